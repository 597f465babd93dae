"""vLLM servers as an engine: what is sent to them, how, and how they are started."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax import peft
from gspo_jax.adapters import adapter_sizes, adapter_table
from gspo_jax.config import ConfigError
from gspo_jax.outgoing import OnDevice, Outgoing, pack
from gspo_jax.policy import logprobs_of, save_policy
from gspo_jax.scoring import whole_rows
from gspo_jax.sections import Config
from gspo_jax.start import Start
from gspo_jax.types import Params
from rollout.types import Completion, SamplingParams
from serving_bridge import capabilities
from serving_bridge.chat import Chat, load_chat
from serving_bridge.fleet import Fleet, Probe, Published
from serving_bridge.nccl import NcclSender
from serving_bridge.nccl_library import Library, NcclMissing
from serving_bridge.publish import Transport
from serving_bridge.stage import Stage, Staged
from serving_bridge.transports import LoraFolder, Nccl, SharedMemory, Stream
from serving_bridge.vllm_client import VllmClient
from serving_bridge.vllm_launch import Launch
from serving_bridge.vllm_server import Restarts, VllmServer

type OnEvent = Callable[[dict[str, Any]], None]

PROBE = (
    "The quick brown fox jumps over the lazy dog. Two plus three equals five, and seven times six is forty-two. Paris is the "
    "capital of France; water boils at one hundred degrees. She opened the letter, read it twice, and put it back."
)
"""What is scored on both sides after every transfer; plain prose, so that its log-probabilities are moderate."""
MOST_PROBE_GAP = 0.2
"""Nats per token between trainer and server on the probe, above which they are taken to have different weights."""


class Served:
    """vLLM servers as an engine: each version is staged once, then published to all of them."""

    def __init__(
        self,
        fleet: Fleet,
        stage: Stage,
        outgoing: Outgoing,
        on_device: OnDevice,
        probe: Callable[[Params], Probe],
        on_event: OnEvent,
    ):
        self._fleet, self._stage, self._outgoing, self._on_device = fleet, stage, outgoing, on_device
        self._probe, self._on_event = probe, on_event

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        return await self._fleet.sample(prompt_ids, params)

    async def publish(self, version: int, params: Params) -> dict[str, float]:
        started = time.monotonic()
        if (old := self._stage.overwritten(version)) is not None:
            self._fleet.vacate(old)
        staged = await asyncio.to_thread(self._stage.write, version, self._outgoing.arrays(params, version))
        staging = time.monotonic() - started
        probe = await asyncio.to_thread(self._probe, params)
        self._on_device.live = version, params
        try:
            done = await self._fleet.publish(staged, probe)
        finally:
            self._on_device.live = None
        found = _measured(staged, staging, time.monotonic() - started, done)
        kind = "weights.published" if done.timings else "weights.pending"  # no server is there; one that comes back gets them
        self._on_event({"type": kind, "version": version, "failed": dict(done.failed), **found})
        return found


def gather_served(config: Config, start: Start) -> Callable[[int, Params], None]:
    """What a process without servers does while process 0 publishes `(version, params)`: its part of staging and probe."""
    outgoing = _outgoing(config, start)
    probe = _probe(start, load_chat(start.policy.folder), config.serving.context_length)

    def publish(version: int, params: Params) -> None:
        for _ in outgoing.arrays(params, version):
            pass
        probe(params)

    return publish


def _measured(staged: Staged, staging: float, seconds: float, done: Published) -> dict[str, float]:
    paused = [timings.paused for timings in done.timings.values()]
    found = {"sync/bytes": float(staged.nbytes), "sync/stage": staging, "sync/paused": max(paused, default=0.0),
             "sync/seconds": seconds, "sync/servers": float(len(paused))}  # fmt: skip
    return found | ({"sync/probe_gap": max(done.gaps.values())} if done.gaps else {})


@asynccontextmanager
async def open_served(
    config: Config, start: Start, chat: Chat, context_length: int, run_dir: Path, on_event: OnEvent
) -> AsyncIterator[Served]:
    """The servers of `[serving]`, checked; those that it started have ended when the block is left. Raises as `open_engine`."""
    outgoing = _outgoing(config, start)
    stage = _stage(start, outgoing)
    on_device = OnDevice(outgoing)
    try:
        try:
            make_transport = partial(_transport, config, start, on_device)
            fleet = _fleet(config, start, context_length, run_dir, stage, on_event, make_transport)
        except ValueError as error:
            raise error if isinstance(error, ConfigError) else ConfigError("config", [f"serving: {error}"]) from None
        try:
            await _opened(fleet)
            yield Served(fleet, stage, outgoing, on_device, _probe(start, chat, context_length), on_event)
        finally:
            await fleet.aclose()
    finally:
        stage.close()


async def _opened(fleet: Fleet) -> None:
    try:
        await fleet.open()
    except ValueError as error:  # a program, a folder, an argument that cannot be
        raise ConfigError("config", [f"serving.launch: {error}"]) from None


def serving_dtype(config: Config) -> str:
    """The dtype that servers compute in."""
    asked = config.serving.dtype
    return config.model.compute_dtype if asked == "auto" else asked


def training_gpus(config: Config, processes: int) -> int:
    """GPUs of a machine that the run takes before those of the servers it starts; 0: no matter. The same in each process."""
    topology = config.compute.topology
    return (topology.gpus_for_training + topology.gpus_for_ref) // processes if config.serving.engine == "vllm" else 0


def _outgoing(config: Config, start: Start) -> Outgoing:
    """What is sent: all weights, or an adapter's."""
    sizes = start.policy.config.sizes()
    if start.adapter is not None:
        return Outgoing(adapter_table(start.adapter), adapter_sizes(start.adapter, sizes), "F32")
    dtype = {"bfloat16": "BF16", "float32": "F32"}[serving_dtype(config)]
    return Outgoing(start.policy.table, sizes, dtype, stochastic=config.serving.rounding == "stochastic")


def _stage(start: Start, outgoing: Outgoing) -> Stage:
    """Where it is staged; an adapter as a PEFT folder."""
    if start.adapter is None:
        return Stage(outgoing.tensors)
    return Stage(outgoing.tensors, file=peft.WEIGHTS, beside={peft.CONFIG: peft.config_text(start.adapter, start.base)})


def _fleet(
    config: Config,
    start: Start,
    context_length: int,
    run_dir: Path,
    stage: Stage,
    on_event: OnEvent,
    make_transport: Callable[[Stage, str], Transport],
) -> Fleet:
    serving = config.serving
    token = os.environ.get(serving.token_env, "") if serving.urls else secrets.token_urlsafe(24)
    transport, rank = make_transport(stage, token), start.adapter.rank if start.adapter else 0
    needs = capabilities.Needs(context_length, serving_dtype(config), transport.backend, rank)

    def connect(url: str) -> VllmClient:
        return VllmClient(url, config.model.label, token=token, publisher=stage.folder.name, seed=config.run.seed,
                          concurrency=config.rollout.max_concurrent_rollouts, timeout_s=config.rollout.timeout_s)  # fmt: skip

    servers = serving.urls or _launched(config, start, context_length, run_dir, stage, token, transport.backend)
    return Fleet(
        servers, connect, transport, partial(capabilities.problems, needs=needs), on_event=on_event,
        sync_timeout_s=serving.sync_timeout_s, most_gap=MOST_PROBE_GAP, restarts=Restarts(serving.launch.max_restarts),
    )  # fmt: skip


def _transport(config: Config, start: Start, on_device: OnDevice, stage: Stage, token: str) -> Transport:
    serving, kind = config.serving, config.serving.transport
    if start.adapter is not None:
        return LoraFolder(config.model.label)
    if kind == "nccl":
        tensors = [(tensor.name, serving_dtype(config), tensor.shape) for tensor in stage.tensors]
        try:
            return Nccl(on_device, jax.jit(pack), tensors, sender=partial(NcclSender, library=Library()))
        except NcclMissing as error:
            raise ConfigError("config", [f'serving.transport: "nccl": {error}']) from None
    if kind == "tcp" or (kind == "auto" and serving.urls):
        try:
            return Stream(token, serving.address, delta=serving.delta)
        except (ValueError, OSError) as error:
            raise ConfigError("config", [f"serving.address, serving.token_env: {error}"]) from None
    return SharedMemory(config.training.weight_sync.verify_every_k)


def _launched(
    config: Config, start: Start, context_length: int, run_dir: Path, stage: Stage, token: str, backend: str
) -> list[VllmServer]:
    launch, topology = config.serving.launch, config.compute.topology
    rank = start.adapter.rank if start.adapter else 0
    model = _base_folder(config, start, run_dir)
    per, first = topology.gpus_for_vllm // launch.servers, training_gpus(config, jax.process_count())
    try:
        return [
            VllmServer(Launch(
                python=Path(launch.python).expanduser(), model=model, name=config.model.label + ("-base" if rank else ""),
                log=run_dir / "vllm" / f"server-{i}.log", context_length=context_length, slots=config.serving.slots,
                dtype=serving_dtype(config), backend=backend or SharedMemory.backend, shm=stage.folder, token=token,
                gpus=tuple(range(first + i * per, first + (i + 1) * per)), tensor_parallel=topology.tensor_parallel,
                max_lora_rank=rank, extra_args=launch.extra_args, start_timeout_s=launch.start_timeout_s,
            ))
            for i in range(launch.servers)
        ]  # fmt: skip
    except ValueError as error:
        raise ConfigError("config", [str(error)]) from None


def _base_folder(config: Config, start: Start, run_dir: Path) -> Path:
    """The folder a server starts from. Beneath an adapter on quantized weights it has what the trainer computes with."""
    if not start.quantized:
        return start.policy.folder
    folder = run_dir / "vllm" / "base"
    if not folder.exists():
        save_policy(start.policy, start.dequantized(), folder, dtype=config.model.compute_dtype)
    return folder


def _probe(start: Start, chat: Chat, context_length: int) -> Callable[[Params], Probe]:
    ids = tuple(int(token) for token in chat.tokenizer.encode(PROBE))[: context_length - 1]
    mesh, batch = start.layout.mesh, whole_rows(np.asarray([ids], np.int32))
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    logprobs = jax.jit(logprobs_of(start.policy), out_shardings=whole)

    def probe(params: Params) -> Probe:
        found = np.asarray(logprobs(start.whole(params, start.frozen), batch)[0])[0, 1:]
        return Probe(ids, tuple(map(float, found)))

    return probe
