"""Keeps one server and all that it starts, ends every one of them when its owner is gone, and tells why a server ended.

Run as a script, `python -I supervise.py GRACE_S FOLDER COMMAND...`, leading a session, with a pipe from the owner as stdin;
`Supervised` is the owner's side. Needs Linux and the standard library only. The server leads a process group of its own in the
same session. At the end of the pipe, at SIGTERM, or when the server ends, every descendant gets SIGTERM, and SIGKILL after
GRACE_S seconds; descendants whose parent has died are adopted, so none is missed. FOLDER is removed. It exits with the code of
the server: 128 + n if signal n killed it, 127 if it cannot be run. Should the supervisor itself be killed, the kernel sends the
server SIGTERM, and the owner ends what is left of the session.
"""

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

KILL_S = 5.0  # that processes get to vanish after SIGKILL
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S, _TRACKER_S, _LONGEST = 0.02, 1.0, 300
_LOG_BYTES, _TAIL_BYTES = 2**24, 2**18
_FLOOD = b"EngineDeadError"
"""Each request that fails with the engine leaves a traceback of this after the cause: 20 KB a request."""
_SECRET = re.compile(r"key|token(?!izer)|secret|passw|authorization|credential|cookie|header", re.IGNORECASE)
_COUNT = re.compile(r"max_\w*tokens", re.IGNORECASE)
_LOGIN_IN_URL = re.compile(r"://[^/@\s]+@")
_DECORATION = re.compile(r"\x1b\[[\d;]*m|^\([^)]*pid=\d+\) |\b(ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] ?")
_EXCEPTION = re.compile(r"(\w+\.)*[A-Z]\w*(Error|Exception|Exit|Interrupt): \S|Value error, ")
_FOLLOWS = re.compile(r"[Rr]oot cause|EngineDeadError|KeyboardInterrupt|Executor failed|validation errors? for")
_KNOWN = (
    (r"[Cc]an(not|'t) allocate memory|MemoryError", "the machine is out of memory"),
    (r"exit code: -9", "a process of it was killed by signal 9, probably because memory ran out"),
    (r"No space left on device", "a disk or /dev/shm is full"),
    (r"[Aa]ddress already in use", "an address that it needs is taken: end what listens there, or start again"),
)
_SILENT = (r"died unexpectedly|EngineDeadError", "a process of it ended without a word, perhaps killed because memory ran out")
_SIGNALS: Mapping[int, str] = {signal.SIGKILL: "memory ran out", signal.SIGBUS: "shared memory is full"}


class Process(NamedTuple):
    """A row of the process table: ids of the process, of its parent and of its session."""

    pid: int
    parent: int
    session: int


def processes() -> list[Process]:
    """Every process that runs; one that has ended and waits to be reaped does not."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent, _, session, *rest = file.read().rpartition(b")")[2].split()
            if state not in (b"Z", b"X") or int(rest[13]) > 1:  # the first thread of several may end before the others
                found.append(Process(int(name), int(parent), int(session)))
    return found


def descendants(root: int) -> set[int]:
    """Ids of the processes that descend from `root`."""
    table, found, edge = processes(), set[int](), {root}
    while edge:
        edge = {process.pid for process in table if process.parent in edge} - found
        found |= edge
    return found


class Ending:
    """Ends processes step by step: SIGTERM once, SIGKILL after `grace_s` seconds.

    Python's resource trackers ignore SIGTERM and remove leaked shared memory when the last process that they serve is gone, so
    they get another second. `overdue`: SIGKILL did not end everything within `KILL_S`.
    """

    def __init__(self, grace_s: float):
        self._begun, self._grace_s = time.monotonic(), grace_s
        self._told: set[int] = set()

    @property
    def overdue(self) -> bool:
        return time.monotonic() > self._begun + self._grace_s + _TRACKER_S + KILL_S

    def step(self, living: set[int]) -> None:
        """To be called until none of them is left, with what is left."""
        late_s = time.monotonic() - self._begun - self._grace_s
        if late_s < 0:
            send(living - self._told, signal.SIGTERM)
            self._told |= living
        else:
            send({pid for pid in living if late_s > _TRACKER_S or not _is_tracker(pid)}, signal.SIGKILL)


def send(pids: set[int], number: signal.Signals) -> None:
    """The signal to each of them that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@dataclass(frozen=True)
class Restarts:
    """When a server that died is started again: at most `limit` times in `window_s` seconds, each time after a longer delay."""

    limit: int = 3
    window_s: float = 600.0
    first_delay_s: float = 1.0
    factor: float = 2.0
    max_delay_s: float = 60.0

    def delay(self, n: int) -> float:
        """Seconds before restart number n, from 0, of a window."""
        delay = self.first_delay_s
        for _ in range(n):
            delay = min(delay * self.factor, self.max_delay_s)
        return min(delay, self.max_delay_s)

    def next(self, times: Sequence[float], now: float) -> float | None:
        """Seconds until the next restart, None when the budget is used up. `times`: past restarts, by the clock of `now`."""
        recent = sum(now - time < self.window_s for time in times)
        return self.delay(recent) if recent < self.limit else None


class Supervised:
    """A server under a supervisor of its own, which ends with this object or its process. `folder` is removed in the end."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes], folder: Path, grace_s: float):
        script = [sys.executable, "-I", "-S", __file__, str(grace_s), str(folder), *command]
        self._process = subprocess.Popen(  # noqa: S603
            script, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, bufsize=0, start_new_session=True
        )
        self.pid = self._process.pid
        self._folder, self._grace_s = folder, grace_s
        self._ending: Ending | None = None

    @property
    def code(self) -> int | None:
        """The exit code of the supervisor, once `clear` has returned True."""
        return self._process.returncode

    def ended(self) -> bool:
        """Whether the supervisor has ended. It is not reaped, so that its session's id goes to no other."""
        with contextlib.suppress(ChildProcessError):
            return self.code is not None or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def send(self, number: signal.Signals) -> None:
        """The signal to the supervisor, unless it has ended. SIGTERM ends the server and all that it started."""
        if not self.ended():
            os.kill(self.pid, number)

    def clear(self) -> bool:
        """To be called until True after the supervisor ended: ends the rest of its session, reaps it. Else RuntimeError."""
        if self.code is not None:
            return True
        left = {process.pid for process in processes() if process.session == self.pid} - {self.pid}
        self._ending = self._ending or Ending(self._grace_s)
        self._ending.step(left)
        if left and self._ending.overdue:
            raise RuntimeError(f"processes {sorted(left)} of a server do not end on SIGKILL")
        if not left:
            self._process.communicate()
            shutil.rmtree(self._folder, ignore_errors=True)
        return not left


def reason(log: Path, start: int, code: int, known: Iterable[tuple[str, str]], secret: str) -> str:
    """Why a server ended, in words, from the end of its log and the exit code of its supervisor.

    The server's part of the log begins at byte `start`. `known`: pairs of a regular expression and what to say if a line
    matches it, the most telling first. Else the last line that tells of an exception, else the code. `secret` becomes ***.
    """
    number, tail = -code if code < 0 else code - 128, b""
    if (guess := _SIGNALS.get(number)) is not None:
        return f"it was killed by signal {number}, probably because {guess}"
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _LOG_BYTES))
        tail = file.read(_LOG_BYTES)
    if (flood := tail.find(_FLOOD)) >= 0:
        tail = tail[: flood + _LONGEST]
    lines = [_plain(line.replace(secret, "***")) for line in tail[-_TAIL_BYTES:].decode(errors="replace").splitlines()]
    errors = [line for line in lines if _EXCEPTION.match(line)]
    first_hand = [line for line in errors if not _FOLLOWS.search(line)][-1:]
    for pattern, advice in (*known, *_KNOWN, *([] if first_hand else [_SILENT])):
        if line := next((line for line in reversed(lines) if re.search(pattern, line)), None):
            return f"{advice} [{line}]"
    fallback = f"it was killed by signal {number}" if number > 0 else f"it ended with exit code {code}"
    return (first_hand or errors[-1:] or [fallback])[0]


def _plain(line: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in _DECORATION.sub("", line)).strip()
    return shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "..."


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What a server may see of `environment`: no variable named like a secret, no URL with a login in it."""
    return {
        name: value
        for name, value in environment.items()
        if (_COUNT.search(name) or not _SECRET.search(name)) and not _LOGIN_IN_URL.search(value)
    }


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port on 127.0.0.1. Bound until the block ends, it is given to nobody else, but a server may listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def main(arguments: Sequence[str]) -> int:
    """Runs `arguments[2:]`; before it come the grace period in seconds and the folder. Returns the exit code."""
    owner, supervisor = os.getppid(), os.getpid()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    got: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda number, _: got.add(number))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = os.fork() or _become(arguments[2:], supervisor)
    code = None
    # Any process that the owner forked meanwhile holds the pipe open too, hence the look at the parent.
    while code is None and got <= {signal.SIGCHLD} and os.getppid() == owner:
        ready, _, _ = select.select([0, woken], [], [], 1.0)
        if woken in ready:
            os.read(woken, 4096)
        if 0 in ready and not os.read(0, 4096):
            break
        code = _reap(server, code)
    code = _end(server, code, float(arguments[0]))
    shutil.rmtree(arguments[1], ignore_errors=True)
    if code is not None and code < 0:
        print(f"supervise.py: the server was killed by signal {-code}", file=sys.stderr, flush=True)
        return 128 - code
    return 1 if code is None else code


def _become(command: Sequence[str], parent: int) -> NoReturn:
    """The server, in a new process, with nothing to read. It ends when `parent` does."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execv(command[0], list(command))  # noqa: S606
    except OSError as error:
        print(f"supervise.py: cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _end(server: int, code: int | None, grace_s: float) -> int | None:
    """Ends all descendants. Returns the server's code, None if it does not end."""
    ending = Ending(grace_s)
    while (living := descendants(os.getpid())) and not ending.overdue:
        ending.step(living)
        time.sleep(_POLL_S)
        code = _reap(server, code)
    return _reap(server, code)


def _reap(server: int, code: int | None) -> int | None:
    """Reaps children that have ended, adopted ones too. Returns the server's code if it is among them, else `code`."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == server:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
