"""The run directory: what a run writes while it runs, and reads back to resume or replay. Layout in the README."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from gspo_jax.config_report import difference, resolved
from gspo_jax.sections import Config
from rollout.types import Group, Problem, Trajectory, Turn


class RunError(Exception):
    """A run directory cannot be used as asked; the message says what to type."""


def open_run(config: Config, run_dir: Path, *, resume: bool) -> Path:
    """The run directory, created, with config.json in it.

    RunError when it holds a run already and `resume` is false, or when it holds another config's run.
    """
    file = run_dir / "config.json"
    if file.exists():
        if not resume:
            raise RunError(f"{run_dir} already holds a run; continue it with --resume, or choose another run.name or --run-dir")
        recorded = read_json(file)
        changed = difference(recorded["config"], resolved(config))
        if changed:
            lines = "\n  ".join(changed)
            raise RunError(f"{run_dir} belongs to another config; these keys would change its numbers:\n  {lines}")
    try:
        (run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise RunError(f"{run_dir} cannot be used as a run directory ({error}); choose another run.dir or --run-dir") from None
    if not file.exists():
        write_json(file, {"config": resolved(config), **identity()})
    return run_dir


def identity() -> dict[str, Any]:
    """What besides config and code decides a run's bits: devices, threads, library versions; and the git state."""
    names = ("gspo-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")
    devices = jax.devices()
    return {
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "device": {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)},
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "git": _git(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


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
    """One JSON line at the end of `file`, in one write."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")


def event(run_dir: Path, type: str, **fields: Any) -> None:
    """One line of events.jsonl, with the wall-clock time."""
    append(run_dir / "events.jsonl", {"time": round(time.time(), 3), "type": type, **fields})


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file; a last line cut short by a crash is left out."""
    if not file.exists():
        return
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            if line.endswith("\n"):
                yield json.loads(line)


def rewind(run_dir: Path, step: int) -> None:
    """Forget what metrics.jsonl and digests.jsonl say of steps from `step` on: they are about to be run again."""
    for name in ("metrics.jsonl", "digests.jsonl"):
        file = run_dir / name
        if file.exists():
            kept = [r for r in read_lines(file) if r["step"] < step]
            write_text(file, "".join(json.dumps(r) + "\n" for r in kept))


def write_json(file: Path, value: Any) -> None:
    """Publish by rename: a reader sees the old file or the whole new one."""
    write_text(file, json.dumps(value, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """`write_json` for text."""
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def read_json(file: Path) -> Any:
    """The value of a JSON file; RunError when it is not one."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is not readable as JSON ({error}); is {file.parent} a run directory?") from None


def rollout_file(run_dir: Path, step: int) -> Path:
    """Where the trajectories of a step are written."""
    return run_dir / "rollouts" / f"{step:06d}.jsonl"


def write_groups(file: Path, groups: Sequence[Group]) -> None:
    """One trajectory a line: messages to read, ids and log-probabilities to replay (float32 values survive JSON exactly)."""
    lines = []
    for g, group in enumerate(groups):
        for trajectory in group.trajectories:
            lines.append(json.dumps({"group": g, "problem": asdict(group.problem), **asdict(trajectory)}) + "\n")
    write_text(file, "".join(lines))


def read_groups(file: Path) -> tuple[Group, ...]:
    """What `write_groups` wrote."""
    if not file.exists():
        raise RunError(f"{file} does not exist; a run with run.log_rollouts = true writes it")
    groups: dict[int, list[tuple[Problem, Trajectory]]] = {}
    for record in read_lines(file):
        g, problem = record.pop("group"), Problem(**record.pop("problem"))
        turns = tuple(Turn(**_tuples(turn)) for turn in record.pop("turns"))
        rewards = record.pop("turn_rewards")
        trajectory = Trajectory(turns=turns, turn_rewards=tuple(rewards) if rewards is not None else None, **record)
        groups.setdefault(g, []).append((problem, trajectory))
    return tuple(Group(rows[0][0], tuple(t for _, t in rows)) for _, rows in sorted(groups.items()))


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
