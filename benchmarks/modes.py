"""Full fine-tuning beside LoRA and QLoRA, one run each: `python benchmarks/modes.py` prints a row per config.

state MB: weights, gradient and AdamW moments, as the run states them. peak MB: largest resident memory of the process, with the
sampler's copy, caches and activations. Seconds are medians over steps after the first two, which compile.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from gspo_jax.runlog import read_lines

CONFIGS = ("quickstart", "quickstart_lora", "quickstart_qlora")
COLUMNS = ("config", "trained", "state MB", "peak MB", "update s", "rollout s", "held-out after", "best")


def run(config: Path, run_dir: Path, overrides: list[str]) -> float:
    """Train in a process of its own; its peak resident memory in MB."""
    settings = [word for each in overrides for word in ("--set", each)]
    command = [sys.executable, "-m", "gspo_jax.train", str(config), "--run-dir", str(run_dir), *settings]
    with (run_dir.parent / f"{config.stem}.log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{config} failed; see {log.name}")
    return usage.ru_maxrss / 1000


def row(config: Path, run_dir: Path, peak: float) -> tuple[str, ...]:
    """What the run directory says."""
    events: list[dict[str, Any]] = list(read_lines(run_dir / "events.jsonl"))
    steps = list(read_lines(run_dir / "metrics.jsonl"))[2:]
    told = next(e["message"] for e in events if e["type"] == "model")
    trained, state = re.findall(r"[\d,]+(?= parameters)", told)[0], re.findall(r"([\d,]+) MB", told)[0]
    held_out = {e["step"]: e["reward_mean"] for e in events if e["type"] == "evaluation"}
    update, rollout = (statistics.median(s[f"time/{name}"] for s in steps) for name in ("update", "rollout"))
    curve = "  ".join(f"{step}: {reward:.2f}" for step, reward in held_out.items())
    return (
        config.stem,
        trained,
        state,
        f"{peak:,.0f}",
        f"{update:.1f}",
        f"{rollout:.1f}",
        curve,
        f"{max(held_out.values()):.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/modes"))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("configs", nargs="*", type=Path, default=[Path(f"configs/{name}.toml") for name in CONFIGS])
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    for config in args.configs:
        peak = run(config, args.dir / config.stem, args.set)
        print("| " + " | ".join(row(config, args.dir / config.stem, peak)) + " |", flush=True)


if __name__ == "__main__":
    main()
