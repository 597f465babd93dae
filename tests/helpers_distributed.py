"""Runs of several processes on this machine: started together, watched with deadlines, and never outliving their block."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DEVICES = 8
"""Of all processes of a run together."""
LOST_AFTER = 10.0
"""Compiling on a busy machine silences a process for some seconds."""

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiling takes most of the time of a tiny run."""


@dataclass(frozen=True)
class Several:
    """Processes that run at the same time, by number."""

    processes: Sequence[subprocess.Popen]
    folder: Path

    def err(self, number: int) -> str:
        return (self.folder / f"err{number}").read_text()

    def errors(self, number: int) -> list[str]:
        """What the process said went wrong."""
        return [line for line in self.err(number).splitlines() if line.startswith("error: ")]

    def wait_for(self, what: Callable[[], bool], seconds: float = 150.0) -> None:
        """Until `what()` is true."""
        end = time.monotonic() + seconds
        while not what():
            codes = [process.poll() for process in self.processes]
            assert codes == [None] * len(codes), (codes, self.err(0)[-2000:])
            assert time.monotonic() < end, f"not in {seconds} s: {self.err(0)[-2000:]}"
            time.sleep(0.005)

    def codes(self, seconds: float = 150.0) -> list[int]:
        """Exit codes, in order, all of them within `seconds`."""
        end = time.monotonic() + seconds
        return [process.wait(max(end - time.monotonic(), 0.01)) for process in self.processes]


@contextmanager
def several(count: int, folder: Path, words: Callable[[int, str], Sequence[object]], **environment: str) -> Iterator[Several]:
    """`python *words(number, coordinator)` for each number, with its share of the devices. Killed at the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    coordinator = f"127.0.0.1:{_free_port()}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES // count), "XLA_FLAGS": QUICK} | environment
    started: list[subprocess.Popen] = []
    try:
        for number in range(count):
            command = [sys.executable, *map(str, words(number, coordinator))]
            with (folder / f"out{number}").open("w") as out, (folder / f"err{number}").open("w") as err:
                started.append(subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True))
        yield Several(started, folder)
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@contextmanager
def training(count: int, folder: Path, compiled: Path, *words: object, only: Sequence[object] = (), **environment: str):
    """`several` processes of the command; the last one has the words of `only` besides."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def command(number: int, coordinator: str) -> Sequence[object]:
        place = ("--coordinator", coordinator, "--processes", count, "--process", number, "--lost-after", LOST_AFTER)
        extra = only if number == count - 1 else ()
        return ("-m", "gspo_jax.train", *words, *place, *extra)

    with several(count, folder, command, **cache, **environment) as running:
        yield running


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
