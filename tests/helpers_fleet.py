"""A fleet before fake servers, in this process or in processes of their own, and what it did to them."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fake_vllm import FakeVllm, score

from rollout.server import serve
from rollout.types import SamplingParams
from serving_bridge.capabilities import Needs, problems
from serving_bridge.fleet import Fleet, Probe
from serving_bridge.stage import Stage, Tensor
from serving_bridge.transports import SharedMemory, checksum
from serving_bridge.vllm_client import VllmClient
from serving_bridge.vllm_launch import Launch
from serving_bridge.vllm_server import Restarts, VllmServer

TENSORS = (Tensor("embed", "BF16", (5, 3)), Tensor("layers.0.up", "F32", (4, 4)))
PARAMS = SamplingParams(max_tokens=8)
LONG = SamplingParams(max_tokens=200)
IDS = tuple(range(40, 60))
NEEDS = Needs(512, "float32", "gspo")
TOKEN = "the-admin-token-0123456789"
QUICK = Restarts(limit=3, first_delay_s=0.05, max_delay_s=0.2)


def arrays(seed):
    draw = np.random.default_rng(seed)
    for tensor in TENSORS:
        yield tensor.name, draw.normal(size=tensor.shape).astype("float32" if tensor.dtype == "F32" else "bfloat16")


class Rig:
    """A fleet, the fakes behind it, and what it was told."""

    def __init__(self, parent, **options):
        self.stage, self.events = Stage(TENSORS, parent, **options.pop("stage", {})), list[dict[str, Any]]()
        self.fakes: list[FakeVllm] = []
        self.servers: list[Any] = []
        self.options: dict[str, Any] = {"sync_timeout_s": 5.0, "most_gap": 0.2, "restarts": QUICK} | options
        self.timeout_s = self.options.pop("timeout_s", 10.0)
        self.transport = self.options.pop("transport", None) or SharedMemory()
        self.check = self.options.pop("check", partial(problems, needs=NEEDS))
        self.version = -1

    def connect(self, url):
        return VllmClient(url, "policy", token=TOKEN, publisher=self.stage.folder.name, seed=7, timeout_s=self.timeout_s)

    def make(self, servers):
        self.fleet = Fleet(servers, self.connect, self.transport, self.check, on_event=self.events.append, **self.options)
        return self.fleet

    async def publish(self, seed=None, logprobs=None):
        """The next version; without `logprobs` the trainer computes as a server that has it."""
        self.version += 1
        staged = self.stage.write(self.version, arrays(self.version if seed is None else seed))
        expected = score(checksum(staged), IDS) if logprobs is None else logprobs
        return await self.fleet.publish(staged, Probe(IDS, tuple(expected)))

    def state(self):
        return [member.state for member in self.fleet.members]

    def reasons(self, kind="server.fenced"):
        return [(event["server"], event["message"]) for event in self.events if event["type"] == kind]

    async def until(self, condition, seconds=15.0):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    async def serving(self, count=None):
        await self.until(lambda: self.state().count("serving") == (count or len(self.state())))

    def sample(self, count=1, params=PARAMS, prompt=lambda i: (i,)):
        requests = ((prompt(i), replace(params, key=(i,))) for i in range(count))
        return [asyncio.create_task(self.fleet.sample(*request)) for request in requests]


@contextlib.asynccontextmanager
async def rig(parent, count=2, *, names=("policy",), token_s=0.002, apply_s=0.0, opened=True, **options):
    """A fleet of `count` servers that others run, each with version 0. Nothing of it is left afterwards: no task, no socket."""
    before, found = set(sockets()), Rig(parent, **options)
    found.fakes = [FakeVllm(names=names, token_s=token_s, apply_s=apply_s) for _ in range(count)]
    found.servers = [await serve(fake) for fake in found.fakes]
    found.make([server.url for server in found.servers])
    try:
        if opened:
            await found.fleet.open()
            await found.publish()
        yield found
    finally:
        for fake in found.fakes:
            fake.close()
        await found.fleet.aclose()
        await asyncio.gather(*(server.aclose() for server in found.servers))
        found.stage.close()
    assert all(event["message"] for event in found.events if event["type"] in ("server.fenced", "server.rejoined"))
    await found.until(lambda: len(asyncio.all_tasks()) <= 2 and set(sockets()) <= before, 5.0)  # this one, and `wait_for`'s


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


def acknowledged(fake):
    """Versions that a server said it has, by the calls it was sent."""
    return {int(body["weight_version"].rpartition(".")[2]) for path, body in fake.bodies
            if path == "/finish_weight_update" and body.get("weight_version")}  # fmt: skip


def generated(fake):
    return sum("generate" in call for call in fake.calls)


def launch(folder, shm, **changes):
    """A fake vLLM as the interpreter that `VllmServer` starts."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_vllm.py")} "$@" # {folder}\n')
    program.chmod(0o755)
    values: dict[str, Any] = {
        "python": program, "model": folder / "model", "name": "policy", "log": folder / "vllm.log", "context_length": 64,
        "slots": 64, "dtype": "float32", "backend": "gspo", "shm": shm, "token": TOKEN, "start_timeout_s": 40.0,
    }  # fmt: skip
    return VllmServer(Launch(**(values | changes)), grace_s=2.0)


def processes(folder) -> list[int]:
    """Those that have `folder` on their command line."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in Path(f"/proc/{entry}/cmdline").read_bytes() and int(entry) != os.getpid():
                found.append(int(entry))
    return found


def sockets() -> Sequence[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return [each for each in found if each.startswith("socket:")]


def kill(server) -> None:
    """SIGKILL to the server itself, as the kernel does when memory runs out; its supervisor lives to tell."""
    (pid,) = [pid for pid in processes(server.launch.model) if b"supervise.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(pid, signal.SIGKILL)


async def remote(it, index, orders=None):
    """The state of a fake in another process; `orders`: faults by path."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=it.fleet.members[index].server.url, headers=headers) as http:
        if orders:
            (await http.post("/fake", json=orders)).raise_for_status()
        return (await http.get("/fake")).json()
