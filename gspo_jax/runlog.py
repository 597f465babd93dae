"""The run directory: what a run writes while it runs, and reads back to resume or replay. Layout in the README."""

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from gspo_jax.config_report import difference, resolved
from gspo_jax.sections import Config, is_secret, masked
from rollout.types import Group, Problem, Trajectory, Turn


class RunError(Exception):
    """A run directory cannot be used as asked; the message says what to type."""


def open_run(config: Config, run_dir: Path, *, resume: bool) -> Path:
    """The run directory, created, with config.json in it.

    RunError when it holds a run already and `resume` is false, or when it holds another config's run. One that failed before
    its first step holds nothing yet.
    """
    file = run_dir / "config.json"
    begun = (run_dir / "metrics.jsonl").exists()
    if file.exists() and (begun or resume):
        if not resume:
            raise RunError(f"{run_dir} already holds a run; continue it with --resume, or choose another run.name or --run-dir")
        changed = difference(read_run(run_dir)["config"], resolved(config))
        if changed:
            lines = "\n  ".join(changed)
            raise RunError(f"{run_dir} belongs to another config; these keys would change its numbers:\n  {lines}")
    try:
        (run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise RunError(f"{run_dir} cannot be used as a run directory ({error}); choose another run.dir or --run-dir") from None
    if not (file.exists() and begun):
        write_json(file, {"config": resolved(config), **identity()})
    return run_dir


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """The run directory is this process's until the block ends, however it ends. RunError when another one has it."""
    with (run_dir / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{run_dir} is in use by another process; stop it, or choose another run.name") from None
        yield


def identity() -> dict[str, Any]:
    """What besides config and code decides a run's bits: devices, threads, library versions; and the git state."""
    names = ("gspo-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "qwix")
    devices = jax.devices()
    return {
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "device": {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)},
        "processes": jax.process_count(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "git": _git(),
        "command": [Path(sys.argv[0]).name, *map(_shown, sys.argv[1:])],
    }


def _shown(word: str) -> str:
    """A word of the command line without the secret it may set."""
    name, equals, _ = word.partition("=")
    return f"{name}=***" if equals and is_secret(name) else masked(word)


def _git() -> dict[str, Any] | None:
    def ask(*words: str) -> str:
        command = ("git", "-C", str(Path(__file__).parent), *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
        return done.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def append(file: Path, record: dict[str, Any]) -> None:
    """One JSON line at the end of `file`, in one write. OSError naming the file, as of a full disk."""
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def event(run_dir: Path, type: str, **fields: Any) -> None:
    """One line of events.jsonl, with the wall-clock time."""
    append(run_dir / "events.jsonl", {"time": round(time.time(), 3), "type": type, **fields})


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file; a last line cut short by a crash is left out. RunError for any other that is no JSON."""
    if not file.exists():
        return
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.endswith("\n"):
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise RunError(f"{file} line {number} is not JSON ({error}); restore the file from a copy") from None
                yield record


def rewind(run_dir: Path, step: int) -> None:
    """Forget what metrics.jsonl and digests.jsonl say of steps from `step` on: they are about to be run again.

    A line that a crash cut short, also in events.jsonl, would swallow the next one, so it goes too.
    """
    for name in ("metrics.jsonl", "digests.jsonl", "events.jsonl"):
        file = run_dir / name
        if file.exists():
            kept = [r for r in read_lines(file) if name == "events.jsonl" or r["step"] < step]
            write_text(file, "".join(json.dumps(r) + "\n" for r in kept))


def write_json(file: Path, value: Any) -> None:
    """Publish by rename: a reader sees the old file or the whole new one."""
    write_text(file, json.dumps(value, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """`write_json` for text."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
    temporary.replace(file)


def read_json(file: Path) -> Any:
    """The value of a JSON file; RunError when it is not one."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is not readable as JSON ({error}); is {file.parent} a run directory?") from None


def read_run(run_dir: Path) -> dict[str, Any]:
    """The config.json of a run: `config`, `versions`, `device`, `threads`, ... RunError when it is not a run's."""
    found = read_json(run_dir / "config.json")
    if not isinstance(found, dict) or not {"config", "versions", "device", "threads"} <= found.keys():
        raise RunError(f"{run_dir / 'config.json'} was not written by a run; is {run_dir} a run directory?")
    return found


def rollout_file(run_dir: Path, step: int) -> Path:
    """Where the trajectories of a step are written."""
    return run_dir / "rollouts" / f"{step:06d}.jsonl"


def write_groups(file: Path, groups: Sequence[Group]) -> None:
    """The file of `groups_text`."""
    write_text(file, groups_text(groups))


def groups_text(groups: Sequence[Group]) -> str:
    """One trajectory a line: messages to read, ids and log-probabilities to replay (float32 values survive JSON exactly)."""
    lines = []
    for g, group in enumerate(groups):
        for trajectory in group.trajectories:
            lines.append(json.dumps({"group": g, "problem": asdict(group.problem), **asdict(trajectory)}) + "\n")
    return "".join(lines)


def read_groups(file: Path) -> tuple[Group, ...]:
    """What `write_groups` wrote."""
    if not file.exists():
        raise RunError(f"{file} does not exist; a run with run.log_rollouts = true writes it")
    return groups_of(read_lines(file))


def records(text: str) -> Iterator[dict[str, Any]]:
    """The records of JSON lines."""
    return map(json.loads, text.splitlines())


def groups_of(records: Iterable[dict[str, Any]]) -> tuple[Group, ...]:
    """The groups of the records that the lines of `groups_text` are."""
    groups: dict[int, list[tuple[Problem, Trajectory]]] = {}
    for record in records:
        g, problem = record.pop("group"), Problem(**record.pop("problem"))
        turns = tuple(Turn(**_tuples(turn)) for turn in record.pop("turns"))
        rewards = record.pop("turn_rewards")
        trajectory = Trajectory(turns=turns, turn_rewards=tuple(rewards) if rewards is not None else None, **record)
        groups.setdefault(g, []).append((problem, trajectory))
    return tuple(Group(rows[0][0], tuple(t for _, t in rows)) for _, rows in sorted(groups.items()))


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {key: _deep(value) for key, value in record.items()}


def _deep(value: Any) -> Any:
    return tuple(map(_deep, value)) if isinstance(value, list) else value
