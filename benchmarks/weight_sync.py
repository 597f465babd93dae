"""Seconds that new weights take to a real vLLM server on this machine, by transport: `python benchmarks/weight_sync.py`.

Pushes all of SmolLM2-135M (or --model) while requests run, first by shared memory, then by a TCP stream, then as a difference
to the version before, then an adapter. Prints for each bytes, seconds, GB/s, how long the server paused, and the ratio to
copying the same bytes once in this process: into memory that is in use already (`warm`), and into memory fresh from the
kernel (`fresh`), which is what a receiver without buffers of its own pays. Then the share of bfloat16 words that training
steps change, and how far the two engines are apart. Needs `make install-vllm`.
"""

import argparse
import asyncio
import dataclasses
import mmap
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import peft
from gspo_jax.adapters import adapter_of, adapter_sizes, adapter_table, init_adapter
from gspo_jax.host import keep_freed_memory
from gspo_jax.outgoing import Outgoing
from gspo_jax.policy import load_policy
from gspo_jax.sampler import Sampler
from gspo_jax.scoring import score_tokens
from rollout.types import SamplingParams
from serving_bridge.chat import load_chat
from serving_bridge.plugin.gspo_vllm.delta import changed_share
from serving_bridge.publish import Transport, publish
from serving_bridge.stage import Stage
from serving_bridge.transports import LoraFolder, SharedMemory, Stream
from serving_bridge.vllm_client import VllmClient
from serving_bridge.vllm_launch import Launch
from serving_bridge.vllm_server import VllmServer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RUNNING, TOKENS = 64, 160
"""Requests in flight during the pushes, and their length."""
STEP = 1e-5
"""Change of a weight in one Adam step at the learning rate of the quickstart."""
PARTS = ("bfloat16", "float32", "adapter", "changed")
SPELLED = {"bfloat16": "BF16", "float32": "F32"}


def copy_seconds(size: int, repeats: int) -> tuple[float, float]:
    """Median seconds of one copy of `size` bytes here: into memory that was written before, and into fresh memory."""
    source, warm = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def timed(work: Callable[[], Any]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def fresh() -> None:
        with mmap.mmap(-1, size) as memory:  # never what the allocator kept
            memory[:] = source.data

    return median(timed(lambda: np.copyto(warm, source)) for _ in range(repeats)), median(timed(fresh) for _ in range(repeats))


def stepped(params: Any, seed: int) -> Any:
    """The parameters after a step of Adam-like size in random directions."""
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params))))
    return jax.tree.map(lambda x: x + STEP * jnp.sign(jax.random.normal(next(keys), x.shape)), params)


async def pushes(
    client: VllmClient, stage: Stage, outgoing: Outgoing, transport: Transport, versions: list[tuple[int, Any]], running: bool
) -> list[tuple[float, float, float]]:
    """`(seconds in all, of them staging, of them paused)` of each push."""
    await transport.connect(client, 60.0)
    prompt = list(range(100, 120))
    params = SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS)
    tasks = [
        asyncio.create_task(client.sample(prompt, dataclasses.replace(params, key=(i,)))) for i in range(RUNNING * running)
    ]
    found = []
    for version, weights in versions:
        await asyncio.sleep(1.0 if running else 0.0)
        started = time.perf_counter()
        if (old := stage.overwritten(version)) is not None:
            transport.vacate(old)
        staged = await asyncio.to_thread(stage.write, version, outgoing.arrays(weights))
        await asyncio.to_thread(transport.offer, staged)
        staging = time.perf_counter() - started
        timings = await publish(client, staged, transport, 120.0)
        found.append((time.perf_counter() - started, staging, timings.paused))
    done = await asyncio.gather(*tasks)
    if any(len(each.ids) != TOKENS for each in done):
        raise RuntimeError("a request was cut short by a push")
    if done:
        seen = sorted({version for each in done for version in each.versions})
        print(f"  {len(done)} requests in flight, none lost; versions of their tokens: {seen}")
    return found


def report(name: str, size: int, found: list[tuple[float, float, float]], copies: tuple[float, float]) -> None:
    """One row; the first push of a transport is left out: it makes buffers."""
    total, staging, paused = (median(column) for column in zip(*found[1:], strict=True))
    moved = total - staging
    print(
        f"{name:26s} {size / 1e6:9.1f} {total:8.3f} {staging:8.3f} {paused:8.3f} {size / 1e9 / total:7.2f} "
        f"{total / copies[0]:7.1f} {total / copies[1]:7.2f} {moved / copies[1]:7.2f}",
        flush=True,
    )


def launch(python: Path, folder: Path, log: Path, dtype: str, stage: Stage, token: str, rank: int) -> VllmServer:
    name = "policy-base" if rank else "policy"
    return VllmServer(Launch(
        python=python, model=folder, name=name, log=log, context_length=512, slots=RUNNING, dtype=dtype, shm=stage.folder,
        backend=SharedMemory.backend, token=token, max_lora_rank=rank,
    ))  # fmt: skip


async def full(args: argparse.Namespace, log: Path, dtype: str) -> None:
    """All weights, by each transport; then how far apart the engines are."""
    policy, params = load_policy(args.model)
    outgoing, token = Outgoing(policy.table, policy.config.sizes(), SPELLED[dtype]), secrets.token_urlsafe(24)
    stage = Stage(outgoing.tensors)
    server = launch(args.python, policy.folder, log, dtype, stage, token, 0)
    try:
        await server.start()
        async with VllmClient(server.url, "policy", token=token, publisher=stage.folder.name) as client:
            size = sum(tensor.nbytes for tensor in outgoing.tensors)
            copies = copy_seconds(size, args.repeats)
            print(f"\n{dtype}: {size / 1e6:.1f} MB; one copy of them here: warm {copies[0]:.3f} s, fresh {copies[1]:.3f} s")
            print(f"{'transport':26s} {'MB':>9s} {'seconds':>8s} {'staging':>8s} {'paused':>8s} {'GB/s':>7s} "
                  f"{'/warm':>7s} {'/fresh':>7s} {'moved/f':>7s}")  # fmt: skip
            version, weights = 0, params
            transports = {"shared memory, idle": (SharedMemory(), False), "shared memory, in flight": (SharedMemory(), True),
                          "tcp": (Stream(token, "127.0.0.1", delta=False), False),
                          "tcp, delta": (Stream(token, "127.0.0.1", delta=True), False)}  # fmt: skip
            for name, (transport, running) in transports.items():
                versions = []
                for _ in range(args.repeats + 1):
                    weights = stepped(weights, version)
                    versions.append((version, weights))
                    version += 1
                report(name, size, await pushes(client, stage, outgoing, transport, versions, running), copies)
                if isinstance(transport, Stream):
                    sent = [each.bytes for each in transport.sender.served.values() if each.bytes]
                    print(f"  bytes on the wire: {sent[-1] / 1e6:.1f} MB, {100 * sent[-1] / size:.1f} % of the weights")
                await transport.aclose()
            await agreement(client, policy, weights)
    finally:
        await server.stop()
        stage.close()


async def agreement(client: VllmClient, policy: Any, params: Any) -> None:
    """Greedy ids and log-probabilities of 50 prompts, embedded sampler against server."""
    chat = load_chat(policy.folder)
    messages = [[{"role": "user", "content": f"What is {i} + {i * 7 % 23}? Explain it."}] for i in range(50)]
    prompts = [tuple(chat.encode(chat.prompt(each, None).text)) for each in messages]
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    sampler = Sampler(policy, slots=50, context_length=256, seed=0, decode=chat.decode)
    await sampler.publish(0, params)
    ours = await asyncio.gather(*(sampler.sample(ids, greedy) for ids in prompts))
    await sampler.aclose()
    theirs = await asyncio.gather(*(client.sample(ids, greedy) for ids in prompts))
    rows = [
        score_tokens(policy, params, np.asarray([[*ids, *each.ids]]))[0, len(ids) - 1 :]
        for ids, each in zip(prompts, theirs, strict=True)
    ]
    gaps = np.concatenate([np.abs(np.subtract(row, each.logprobs)) for row, each in zip(rows, theirs, strict=True)])
    equal = sum(a.ids == b.ids for a, b in zip(ours, theirs, strict=True))
    print(f"greedy ids equal on {equal} of 50 prompts; server against trainer: mean {gaps.mean():.2e}, max {gaps.max():.2e}")


async def adapters(args: argparse.Namespace, log: Path) -> None:
    """An adapter on every linear map of every layer."""
    policy, _ = load_policy(args.model)
    adapter, sizes = adapter_of(policy.table, (), 16, 32.0), policy.config.sizes()
    params = jax.tree.map(lambda x: x + 0.01, init_adapter(adapter, sizes, 0))
    outgoing, token = Outgoing(adapter_table(adapter), adapter_sizes(adapter, sizes), "F32"), secrets.token_urlsafe(24)
    beside = {peft.CONFIG: peft.config_text(adapter, str(policy.folder))}
    stage = Stage(outgoing.tensors, file=peft.WEIGHTS, beside=beside)
    server = launch(args.python, policy.folder, log, "bfloat16", stage, token, adapter.rank)
    try:
        await server.start()
        async with VllmClient(server.url, "policy", token=token, publisher=stage.folder.name) as client:
            size = sum(tensor.nbytes for tensor in outgoing.tensors)
            versions = [(version, stepped(params, version)) for version in range(args.repeats + 1)]
            found = await pushes(client, stage, outgoing, LoraFolder("policy"), versions, False)
            print()
            report("adapter, rank 16", size, found, copy_seconds(size, args.repeats))
    finally:
        await server.stop()
        stage.close()


def unchanged(model: str) -> None:
    """How many words of the serving dtype a step changes: what a delta saves."""
    policy, params = load_policy(model)
    outgoing = Outgoing(policy.table, policy.config.sizes(), "BF16")
    before = {name: x.copy() for name, x in outgoing.arrays(params)}
    print("\nshare of bfloat16 words changed by a step of Adam's size, by learning rate:")
    for rate in (1e-6, 1e-5, 1e-4):
        after = outgoing.arrays(jax.tree.map(lambda x, rate=rate: x + (stepped(x, 1) - x) * (rate / STEP), params))
        changed = total = 0.0
        for name, x in after:
            old, new = (y.reshape(-1).view(np.uint8) for y in (before[name], np.ascontiguousarray(x)))
            changed, total = changed + changed_share(old, new, 2) * new.size, total + new.size
        print(f"  {rate:g}: {100 * changed / total:.2f} %")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    args = parser.parse_args()
    if not args.python.exists():
        print(f"{args.python} does not exist: run `make install-vllm`, or name an interpreter with --python", file=sys.stderr)
        return 2
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as logs:
        for dtype in ("bfloat16", "float32"):
            if dtype in args.parts:
                asyncio.run(full(args, Path(logs) / f"{dtype}.log", dtype))
        if "adapter" in args.parts:
            asyncio.run(adapters(args, Path(logs) / "adapter.log"))
    if "changed" in args.parts:
        unchanged(args.model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
