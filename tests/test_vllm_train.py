"""Whole runs with real vLLM servers: killed at the worst moments, and with an adapter."""

import asyncio
import importlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers_train import STEPS, base
from helpers_vllm import PYTHON, needs_vllm, processes, shortened

from gspo_jax.config import parse_config
from gspo_jax.pretrained import resolve_model
from gspo_jax.runlog import read_lines
from gspo_jax.train import train
from gspo_jax.watcher import Watcher
from rollout.task import Task
from serving_bridge.stage import SHARED_MEMORY
from serving_bridge.transports import SharedMemory

pytestmark = [needs_vllm, pytest.mark.timeout(900)]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WAIT_S = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shortened(resolve_model(MODEL), tmp_path_factory.mktemp("model") / "short", 2)


def config_of(folder: Path, label: str, *overrides: str):
    sections = base(folder)
    sections["model"]["label"] = label
    sections["serving"] |= {"engine": "vllm", "context_length": 128, "launch": {"python": str(PYTHON)}}
    sections["rollout"]["timeout_s"] = 300.0
    sections["training"]["learning_rate"] = 1e-4
    sections["evaluation"] = {"instances": 0}
    return parse_config(sections, overrides)[0]


def events(run_dir: Path, kind: str) -> list[dict]:
    return [line for line in read_lines(run_dir / "events.jsonl") if line["type"] == kind]


def kill(url: str) -> None:
    """SIGKILL for the server at `url`, as the kernel would when memory runs out."""
    for pid in processes(f"--port {url.rsplit(':', 1)[1]} "):
        if b"supervise.py" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def await_rejoined(run_dir: Path, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(events(run_dir, "server.rejoined")) < count:
        assert time.monotonic() < deadline, (run_dir / "events.jsonl").read_text()
        time.sleep(0.5)


def test_a_run_survives_servers_that_are_killed_at_the_worst_moments(folder, tmp_path, monkeypatch):
    """Two servers: one dies mid-rollout; then one in the middle of a transfer, and the other between finish and resume."""
    run_dir, armed, current = tmp_path / "run", set(), {}

    class Events(Watcher):
        def event(self, event):
            if event["type"] == "server.ready":
                current[event["server"]] = event["url"]

    def due(fault: str) -> bool:
        found = fault in armed
        armed.discard(fault)
        return found

    def prompt(problem):
        if due("rollout"):
            asyncio.get_running_loop().call_later(0.4, kill, current["server 0"])
        return f"Say {problem.seed} words."

    transfer = SharedMemory.transfer

    async def killing(self, client, staged, timeout_s, again=False):
        if client.url == current["server 1"] and due("transfer"):
            asyncio.get_running_loop().call_later(0.01, kill, client.url)
        await transfer(self, client, staged, timeout_s, again)
        if client.url == current["server 0"] and due("resume"):
            kill(client.url)

    monkeypatch.setattr(SharedMemory, "transfer", killing)
    config = config_of(folder, "killed", "serving.launch.servers=2", "policy.max_tokens=60")
    task = Task(prompt, lambda text, _: float(sum(x in "aeiou" for x in text)), splits={"train": 6, "test": 4})
    steps = []
    for step in train(config, task=task, run_dir=run_dir, watcher=Events()):
        steps.append(step)
        if step.step == 0:
            armed.add("rollout")
        if step.step == 1:
            await_rejoined(run_dir, 1)
            armed |= {"transfer", "resume"}  # both servers: the next rollout waits until one is back
    assert len(steps) == STEPS
    assert not armed
    for step in steps:
        versions = {v for g in step.groups for t in g.trajectories for turn in t.turns for v in turn.versions}
        assert versions == {step.step}  # of a version that every server that served it had acknowledged
        assert step.metrics["rollout/void_fraction"] == 0
        assert step.metrics["mismatch/mean"] < 1e-4  # float32 on both sides: these weights, on either server
    fenced = events(run_dir, "server.fenced")
    assert fenced[0]["server"] == "server 0"
    assert {each["server"] for each in fenced[1:]} == {"server 0", "server 1"}
    assert all(each["message"] for each in fenced)
    rejoined = [each["message"] for each in events(run_dir, "server.rejoined")]
    assert rejoined[:2] == ["with version 2", "with version 3"]
    assert processes("--served-model-name killed ") == []
    assert not [path for path in SHARED_MEMORY.glob("gspo-*") if (path / "0/model.safetensors").exists() and owned(path)]


def owned(path: Path) -> bool:
    import fcntl

    with (path / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False  # another run's
    return True


def test_lor_01_an_adapter_is_what_the_server_samples_with(folder, tmp_path, capsys):
    """The frozen base was pushed and the adapter slot never filled: the sampler stayed on the initial policy."""
    run_dir = tmp_path / "run"
    config = config_of(folder, "adapted", "training.iterations_per_epoch=3", "model.trainer_mode=lora", "training.lora.r=12")
    config = config.model_copy(update={"training": config.training.model_copy(update={"learning_rate": 1e-2})})
    task = Task(
        lambda problem: f"Say {problem.seed} words.", lambda text, _: float(len(set(text))), splits={"train": 6, "test": 4}
    )
    checksums, opened = set(), []
    for step in train(config, task=task, run_dir=run_dir):
        (url,) = {each["url"] for each in events(run_dir, "server.ready")}
        monkey = token_of(url)
        models = served_models(url, monkey)
        assert models["adapted"]["parent"] == "adapted-base"
        folder_now = Path(models["adapted"]["root"])
        weights = folder_now / "adapter_model.safetensors"
        checksums.add(hash(weights.read_bytes()))
        assert step.metrics["mismatch/mean"] < 1e-4
        if step.step == 2:
            opened.append(imported(url, monkey, tmp_path / "brought", capsys))
            hidden = weights.with_suffix(".hidden")
            weights.rename(hidden)  # LOR-03: were the file read again for each request, these would fail
            assert served_text(url, monkey)
            hidden.rename(weights)
    assert len(checksums) == 3
    (back,) = opened
    assert back["probe_gap_max"] < 1e-3
    exported, brought = (load_tensors(path) for path in (run_dir / "export", tmp_path / "brought"))
    assert exported.keys() == brought.keys()
    assert all(np.array_equal(exported[name], brought[name]) for name in exported)


def token_of(url: str) -> str:
    (pid, *_) = [
        p for p in processes(f"--port {url.rsplit(':', 1)[1]} ") if "supervise" not in Path(f"/proc/{p}/cmdline").read_text()
    ]
    lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(line.split(b"=", 1)[1].decode() for line in lines if line.startswith(b"GSPO_VLLM_TOKEN="))


def served_models(url: str, token: str) -> dict:
    import httpx

    reply = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {token}"}, timeout=30)
    return {each["id"]: each for each in reply.json()["data"]}


def served_text(url: str, token: str) -> str:
    import httpx

    body = {"model": "adapted", "prompt": "one two three", "max_tokens": 100, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)
    assert reply.status_code == 200
    return reply.json()["choices"][0]["text"]


def imported(url: str, token: str, out: Path, capsys) -> dict:
    os.environ["TEST_TOKEN"] = token
    try:
        capsys.readouterr()
        code = importlib.import_module("gspo_jax.import").main(
            [url, str(out), "--model", "adapted", "--token-env", "TEST_TOKEN"]
        )
        said = capsys.readouterr()
        assert code == 0, said.err
        return json.loads(said.out)
    finally:
        del os.environ["TEST_TOKEN"]


def load_tensors(folder: Path) -> dict:
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")
