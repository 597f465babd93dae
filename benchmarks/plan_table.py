"""The table of docs/plan.md: the shipped configs of large models, planned on H100: `python benchmarks/plan_table.py [NAME]`.

Every row is a process of its own, `python -m gspo_jax.plan CONFIG --json --no-search ...`; names are parts of row titles.
With the compiler for GPUs (`make install-plan`) a row takes one to ten minutes on two cores.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 1800.0
GB = 1e9


class Row(NamedTuple):
    """A planned run."""

    title: str
    config: str
    gpus: int
    sets: tuple[str, ...] = ()


ROWS = (
    Row("Qwen3-4B full", "qwen3_4b", 3, ("training.rows_per_microbatch=3",)),
    Row("Qwen3-4B full", "qwen3_4b", 8, ("training.rows_per_microbatch=8",)),
    Row("Qwen3-8B LoRA", "qwen3_8b_lora", 1),
    Row("Qwen3.5-9B LoRA, 8k", "qwen3_5_9b_lora", 4),
    Row("Qwen3-32B full", "qwen3_32b", 32),
    Row("Qwen3-30B-A3B full", "qwen3_30b_a3b", 64),
    Row("Llama-3.1-70B LoRA", "llama3_70b_lora", 16),
)


def planned(row: Row) -> dict[str, Any]:
    """The report of a row. RuntimeError with what the command said where it gave none."""
    sets = [word for item in row.sets for word in ("--set", item)]
    words = [sys.executable, "-m", "gspo_jax.plan", str(ROOT / "configs" / f"{row.config}.toml"), "--gpus", str(row.gpus)]
    done = subprocess.run(
        [*words, *sets, "--json", "--no-search"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode not in (0, 1) or not done.stdout.startswith("{"):
        raise RuntimeError(f"{row.title}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def line(row: Row, found: dict[str, Any]) -> str:
    """A row of the table."""
    mesh = " ".join(f"{name} {size}" for name, size in found["mesh"].items() if size > 1) or "one device"
    moved: dict[str, float] = {}
    for each in found["collectives"]:
        moved[each["kind"]] = moved.get(each["kind"], 0.0) + each["bytes"]
    told = ", ".join(f"{kind} {size / GB:,.0f}" for kind, size in moved.items() if size > GB / 2) or "none"
    sent, least = sum(each["wire_bytes"] for each in found["collectives"]), sum(found["least_wire_bytes"].values())
    cells = (
        row.title, f"{found['gpus']} ({mesh})", "fits" if found["fits"] else "**no**",
        f"{found['peak_bytes'] / GB:.1f} of {found['capacity_bytes'] / GB:.1f}", told, f"{sent / GB:,.0f} / {least / GB:,.0f}",
        f"{found['seconds_roofline']:.3g}", f"{100 * found['mfu_ceiling']:.0f} %", found["compiler"],
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main(names: Sequence[str]) -> None:
    """Prints the rows whose titles contain one of the names, all without any."""
    print("| run | GPUs | verdict | peak, GB | collectives of a step, GB | sent / least, GB | s a step, at best | MFU at most "
          "| compiler |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for row in ROWS:
        if not names or any(name.lower() in row.title.lower() for name in names):
            try:
                print(line(row, planned(row)), flush=True)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"| {row.title} | {row.gpus} | not planned: {str(error).splitlines()[-1][:200]} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
