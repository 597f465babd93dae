"""Whole runs of a tiny model: config files, fake task apps on loopback ports, child processes, and what they leave behind.

A pytest plugin (`pytest_plugins = ("helpers_train",)`): its fixtures share one model folder, one finished run and one cache
of compiled functions, because compiling takes most of the time of a tiny run. PYTEST_DONT_REWRITE (it is also imported).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jax
import pytest
from fastapi import FastAPI, Request
from helpers_model import tiny_model_folder
from jax.experimental.compilation_cache import compilation_cache

from gspo_jax import train_command
from gspo_jax.background import Background
from gspo_jax.config import Config, parse_config
from rollout.client import DIRECT
from rollout.server import serve

STEPS, GROUPS, MEMBERS = 4, 2, 4
TASK = """
import asyncio, os, random
from rollout.task_app import Task

async def reward(text, problem):
    await asyncio.sleep(random.random() * float(os.environ.get("TASK_DELAY", 0)))
    return 10.0 + sum(letter in "aeiou" for letter in text)

task = Task(lambda problem: f"say {problem.seed}", reward, splits={"train": 6, "test": 4})
"""


def base(model: Path) -> dict[str, Any]:
    """Four steps of two groups of four, two minibatches each; evaluated and saved after steps 2 and 4."""
    return {
        "algorithm": {"eps_low": 3e-3, "eps_high": 4e-3},
        "model": {"base": str(model), "trainer_mode": "full", "compute_dtype": "float32", "remat": "none", "label": "tiny"},
        "policy": {"max_tokens": 6},
        "rollout": {"episodes_per_batch": GROUPS * MEMBERS, "max_concurrent_rollouts": 8, "max_attempts": 1, "timeout_s": 60.0},
        "training": {
            "iterations_per_epoch": STEPS,
            "group_size": MEMBERS,
            "batch_size": GROUPS * MEMBERS // 2,
            "learning_rate": 1e-2,
            "log_interval": 1,
        },
        "evaluation": {"instances": 2, "every_n_iters": 2},
        "mesh": {"fsdp": 1},
        "serving": {"slots": 8, "context_length": 64},
        "run": {"checkpoint_every": 2, "keep_last": 2},
    }


def config_of(model: Path, *overrides: str) -> Config:
    """The base config with `section.key=value` overrides."""
    return parse_config(base(model), overrides)[0]


def config_file(folder: Path, model: Path, task_url: str | None = None) -> Path:
    """A TOML file of the base config beside its task: the task file above, or `task_url`. Runs go to `folder`/runs."""
    task = folder / "task.py"
    task.write_text(TASK)
    sections = base(model) | {"services": {"task_url": task_url} if task_url else {"task_app": str(task)}}
    sections["run"] = sections["run"] | {"dir": str(folder / "runs")}
    lines = [f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items()) for name, keys in sections.items()]
    file = folder / "tiny.toml"
    file.write_text("\n".join(lines))
    return file


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The messages on standard error that are neither notes nor warnings of the config."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Commands:
    """Runs a command in this process and catches what it prints; complains about threads and ports it leaves behind."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, main: Callable[[Sequence[str]], int], *argv: object) -> Ran:
        self._capfd.readouterr()
        ports, loops = listening(os.getpid()), _loops()
        code = main([str(word) for word in argv])
        out, err = self._capfd.readouterr()
        assert listening(os.getpid()) == ports
        assert _loops() == loops, "a background loop is still running"
        assert "Traceback" not in out + err
        return Ran(code, out, err)

    def train(self, *argv: object) -> Ran:
        return self(train_command.main, *argv)


def _loops() -> int:
    return sum(thread.name == "rollouts" for thread in threading.enumerate())


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capfd)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of compiled functions, used by every run in this process and by child processes."""
    folder = tmp_path_factory.mktemp("compiled")
    names = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Path:
    """The tiny model's folder."""
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@dataclass(frozen=True)
class Finished:
    """A run that nothing disturbed, its config file and what it printed. Read only: copy it to change it."""

    run_dir: Path
    config: Path
    ran: Ran

    def digests(self) -> list[dict[str, Any]]:
        return lines(self.run_dir / "digests.jsonl")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Finished:
    """The base config, run once by the real command."""
    folder = tmp_path_factory.mktemp("finished")
    file = config_file(folder, model)
    out, err = folder / "out", folder / "err"
    with out.open("w") as stdout, err.open("w") as stderr, _streams(stdout, stderr):
        code = train_command.main([str(file)])
    return Finished(folder / "runs" / "tiny", file, Ran(code, out.read_text(), err.read_text()))


@contextmanager
def _streams(out: Any, err: Any) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file, every line of which must be one."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(run_dir / "events.jsonl") if event["type"] == kind]


# Task apps


def fake_app(answer: Callable[[Mapping[str, Any]], Any], *, health: Any = None, info: Any = None) -> FastAPI:
    """A hand-written task app: `answer(request)` is the JSON, or the Response, of POST /rollout, and may be async."""
    app = FastAPI()

    @app.get("/health")
    async def _health() -> Any:
        return health if health is not None else {"healthy": True}

    @app.get("/task_info")
    async def _task_info() -> Any:
        return info if info is not None else {"taskset": {"sizes": {"train": 6}}}

    @app.post("/rollout")
    async def _rollout(request: Request) -> Any:
        found = answer(await request.json())
        return await found if hasattr(found, "__await__") else found

    return app


async def ask(request: Mapping[str, Any], content: str = "say") -> str:
    """The policy's reply to one message, asked for as a task app does."""
    async with httpx.AsyncClient(mounts=DIRECT, timeout=60) as http:
        body = {"messages": [{"role": "user", "content": content}]}
        reply = await http.post(request["inference_url"], json=body)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"] or ""


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The URL of `app` on a loopback port, served from a thread."""
    background = Background()
    try:
        server = background.run(serve(app))
        try:
            yield server.url
        finally:
            background.run(server.aclose())
    finally:
        background.close()


# Processes


@contextmanager
def child(module: str, *argv: object, compiled: Path, folder: Path, **environment: str) -> Iterator["Child"]:
    """`python -m module argv` as a process of its own, in its own process group; killed at the end of the block."""
    out, err = (folder / f"{module}.{name}" for name in ("out", "err"))
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    words = [sys.executable, "-m", module, *map(str, argv)]
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(words, stdout=stdout, stderr=stderr, env=env | environment, start_new_session=True)
    try:
        yield Child(process, out, err)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@dataclass(frozen=True)
class Child:
    """A running process and the files it prints to."""

    process: subprocess.Popen
    out: Path
    err: Path

    def wait_for(self, what: Callable[[], Any], seconds: float = 150.0) -> Any:
        """The first true value of `what()`, looked for every millisecond."""
        end = time.monotonic() + seconds
        while not (found := what()):
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.err.read_text()[-2000:]}"
            assert time.monotonic() < end, f"it did not come to that in {seconds} s: {self.out.read_text()[-2000:]}"
            time.sleep(0.001)
        return found

    def kill(self) -> None:
        """SIGKILL: no handler, no farewell."""
        self.process.kill()
        assert self.process.wait(10) == -signal.SIGKILL

    def stop(self, number: int, seconds: float = 20.0) -> Ran:
        """Send a signal and wait for the end; no process of its group may survive it and no port may stay open."""
        ports = listening(self.process.pid)
        assert ports, "it listens nowhere: too early to learn anything from stopping it"
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        assert _group(self.process.pid) == []
        for port in ports:
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False)
        return Ran(code, self.out.read_text(), self.err.read_text())


def listening(pid: int) -> set[int]:
    """The TCP ports a process listens on (Linux)."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def _group(pgid: int) -> list[int]:
    """The processes of a process group, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == pgid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found
