"""Runs one config with several seeds and prints held-out reward against time: `python benchmarks/seeds.py CONFIG`."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gspo_jax.runlog import read_lines


def run(config: Path, seed: int, folder: Path) -> Path:
    """Train with `seed` in a process of its own; the run directory."""
    run_dir = folder / f"{config.stem}-seed{seed}"
    command = [sys.executable, "-m", "gspo_jax.train", config, "--run-dir", run_dir, "--set", f"run.seed={seed}"]
    subprocess.run(list(map(str, command)), check=True)
    return run_dir


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """`(step, minutes of the loop, held-out mean reward)` of every evaluation; compilation counts, set-up does not."""
    events: list[dict[str, Any]] = list(read_lines(run_dir / "events.jsonl"))
    start = next(e["time"] for e in events if e["type"] == "run.started")
    return [(e["step"], (e["time"] - start) / 60, e["reward_mean"]) for e in events if e["type"] == "evaluation"]


def draw(curves: dict[int, list[tuple[int, float, float]]], file: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for seed, points in curves.items():
        axes.plot([minutes for _, minutes, _ in points], [reward for *_, reward in points], marker="o", label=f"seed {seed}")
    axes.set(xlabel="minutes of training, compilation included", ylabel="held-out mean reward", ylim=(0, 1))
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--dir", type=Path, default=Path("runs"))
    parser.add_argument("--plot", type=Path, help="write the curves to this PNG")
    parser.add_argument("--target", type=float, default=0.85)
    args = parser.parse_args()
    curves = {seed: curve(run(args.config, seed, args.dir)) for seed in args.seeds}
    for seed, points in curves.items():
        reached = next(
            (f"{minutes:.1f} min (step {step})" for step, minutes, reward in points if reward >= args.target), "never"
        )
        line = "  ".join(f"{step}: {reward:.2f} @ {minutes:.1f}" for step, minutes, reward in points)
        print(f"seed {seed}  {args.target} reached at {reached}   step: held-out @ minutes  {line}")
    if args.plot:
        draw(curves, args.plot)


if __name__ == "__main__":
    main()
