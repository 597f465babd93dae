"""A real vLLM server for tests: started once per file, driven from synchronous tests."""

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gspo_jax.background import Background
from gspo_jax.outgoing import Outgoing
from gspo_jax.policy import Policy
from gspo_jax.scoring import score_tokens
from serving_bridge.publish import Timings, publish
from serving_bridge.shards import Shards
from serving_bridge.stage import Stage, Staged
from serving_bridge.transports import SharedMemory
from serving_bridge.vllm_client import VllmClient
from serving_bridge.vllm_launch import Launch
from serving_bridge.vllm_server import VllmServer

PYTHON = Path(__file__).parents[1] / ".venv-vllm/bin/python"
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM: .venv-vllm is missing (make install-vllm)")
TYPES = {"float32": "F32", "bfloat16": "BF16"}


@dataclass
class Served:
    """A running server, what it serves, and what publishes to it."""

    policy: Policy
    params: Any
    server: VllmServer
    client: VllmClient
    stage: Stage
    outgoing: Outgoing
    background: Background
    token: str
    version: int = -1

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        return self.background.run(work)

    def staged(self, params: Any) -> Staged:
        """The next version, staged."""
        self.version += 1
        return self.stage.write(self.version, self.outgoing.arrays(params))

    def publish(self, params: Any, transport: Any = None) -> Timings:
        return self.run(self.publishing(params, transport))

    async def publishing(self, params: Any, transport: Any = None) -> Timings:
        staged = await asyncio.to_thread(self.staged, params)
        transport = transport or SharedMemory()
        transport.offer(staged)
        return await publish(self.client, staged, transport, 120.0)

    def gap(self, params: Any, ids: list[int]) -> float:
        """The largest difference between server and trainer over the tokens of `ids`."""
        found, expected = self.run(self.client.probe(ids)), score_tokens(self.policy, params, np.asarray([ids]))[0]
        return float(np.abs(np.asarray(found) - expected).max())

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self.server.stop())
        self.background.close()
        self.stage.close()


def shortened(source: Path, folder: Path, layers: int = 4) -> Path:
    """The first layers of a model, with its tokenizer: quick on two cores, and nothing about it is made up."""
    shutil.copytree(source, folder)
    shards = Shards(source)
    kept = [name for name in shards.names if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < layers]
    save_file({name: shards.read(name) for name in kept}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def serve_model(
    policy: Policy,
    params: Any,
    folder: Path,
    logs: Path,
    *,
    dtype: str = "float32",
    change: Callable[[dict], None] = lambda _: None,
) -> Served:
    """A server of `folder`, with the weights `params` published to it. `change` edits the arguments of `Launch`."""
    outgoing = Outgoing(policy.table, policy.config.sizes(), TYPES[dtype])
    stage, token, background = Stage(outgoing.tensors), secrets.token_urlsafe(24), Background()
    options: dict[str, Any] = {
        "python": PYTHON, "model": folder, "name": "policy", "log": logs / "vllm.log", "context_length": 512, "slots": 64,
        "dtype": dtype, "backend": SharedMemory.backend, "shm": stage.folder, "token": token,
        "extra_args": ("--enable-prompt-tokens-details",),
    }  # fmt: skip
    change(options)
    server = VllmServer(Launch(**options))
    try:
        background.run(server.start())
    except BaseException:
        background.close()
        stage.close()
        raise
    client = background.run(_client(server.url, token, stage))
    served = Served(policy, params, server, client, stage, outgoing, background, token)
    served.run(SharedMemory().connect(client, 60.0))
    served.publish(params)
    return served


async def _client(url: str, token: str, stage: Stage) -> VllmClient:
    return VllmClient(url, "policy", token=token, publisher=stage.folder.name, seed=7, timeout_s=120.0)


def processes(text: str) -> list[int]:
    """Ids of the processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in line:
                found.append(int(entry.name))
    return found
