"""What a person sees while a run runs: a live panel on a terminal, one plain line a step elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gspo_jax import runlog
from gspo_jax.config_report import episodes, total_steps
from gspo_jax.evaluate import Evaluation
from gspo_jax.sections import Config
from gspo_jax.watcher import Step, Watcher
from rollout.types import Trajectory

HISTORY = 12
COLUMNS = {
    "reward": ("reward/mean", ".3f"),
    "ratio": ("policy/ratio_mean", ".5f"),
    "clip": ("policy/clip_fraction", ".2f"),
    "mismatch": ("mismatch/mean", ".1e"),
    "entropy": ("policy/entropy", ".2f"),
    "tok/s": ("tokens/per_second", ".0f"),
    "rollout s": ("time/rollout", ".1f"),
    "update s": ("time/update", ".1f"),
    "sync s": ("time/sync", ".1f"),
}


@contextmanager
def open_display(console: Console) -> Iterator["Display"]:
    """A display that is drawn until the block ends."""
    display = Display(console, live=console.is_terminal)
    if not console.is_terminal:
        yield display
        return
    with Live(console=console, refresh_per_second=4, get_renderable=display.panel) as live:
        yield display
        live.refresh()


class Display(Watcher):
    """A Watcher that shows."""

    def __init__(self, console: Console, *, live: bool) -> None:
        self.console, self._live = console, live
        self._rows: list[Step] = []
        self._phase, self._done, self._episodes, self._total, self._first = "starting", 0, 0, 0, 0
        self._held_out: dict[int, float] = {}
        self._started = time.monotonic()
        self._log_interval = 1

    def started(self, run_dir: Path, config: Config, first_step: int) -> None:
        self._total, self._first, self._episodes = total_steps(config), first_step, episodes(config)
        self._log_interval, self._started = config.training.log_interval, time.monotonic()
        steps = f"steps {first_step}..{self._total - 1}" if first_step < self._total else f"all {self._total} steps are done"
        self.console.print(f"run directory {run_dir}, {steps}", markup=False)

    def phase(self, name: str) -> None:
        self._phase, self._done = name, 0

    def rollout(self, trajectory: Trajectory) -> None:
        self._done += 1

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._held_out[step] = evaluation.reward_mean
        if not self._live:
            self.console.print(
                f"held-out reward after {step} steps: {evaluation.reward_mean:.3f} ± {evaluation.reward_sem:.3f}"
            )

    def event(self, event: dict[str, Any]) -> None:
        if event.get("type") == "model":
            self.console.print(event["message"], markup=False, soft_wrap=True)
        if event.get("type") in ("checkpoint.incomplete", "groups.short", "guard.warn"):
            where = f"warning at step {event['step']}: " if "step" in event else ""
            self.console.print(where + event["message"], style="yellow", markup=False, soft_wrap=True)
        if event.get("type") == "rollout.void":
            message = escape(f"({event['reason']}): {event.get('message', '')}")
            self.console.print(f"[yellow]void rollout[/] {message}", highlight=False)

    def stepped(self, step: Step) -> None:
        """One more step is done."""
        self._rows.append(step)
        if not self._live and (step.step % self._log_interval == 0 or step.step == self._total - 1):
            values = "  ".join(f"{name} {_value(step, key, form)}" for name, (key, form) in COLUMNS.items())
            self.console.print(f"step {step.step:4d} ({step.step + 1}/{self._total})  {values}  eta {self._eta()}")

    def panel(self) -> Group:
        """What stands on the terminal now."""
        table = Table("step", *COLUMNS, "held-out", box=None, header_style="dim", padding=(0, 2, 0, 0))
        for row in self._rows[-HISTORY:]:
            held_out = self._held_out.get(row.step + 1)
            cells = [_value(row, key, form) for key, form in COLUMNS.values()]
            table.add_row(str(row.step), *cells, "" if held_out is None else f"{held_out:.3f}")
        progress = f" {self._done}/{self._episodes}" if self._phase == "rollout" else ""
        last = list(self._held_out.values())[-1:]
        head = f"step {self._first + len(self._rows)}/{self._total}  {self._phase}{progress}  eta {self._eta()}"
        return Group(Text(head + (f"  held-out {last[0]:.3f}" if last else ""), style="bold"), table)

    def _eta(self) -> str:
        if not self._rows:
            return "?"
        seconds = (time.monotonic() - self._started) / len(self._rows) * (self._total - self._first - len(self._rows))
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _value(step: Step, key: str, form: str) -> str:
    value = step.metrics.get(key)
    return "-" if value is None else format(value, form)


def show_transcripts(console: Console, run_dir: Path, last: int, count: int = 5) -> None:
    """The same held-out problems before and after training, side by side; nothing when there was no evaluation."""
    files = [run_dir / "rollouts" / f"eval_{step:06d}.jsonl" for step in (0, last)]
    if not all(file.exists() for file in files):
        return
    before, after = (runlog.read_groups(file) for file in files)
    table = Table("held-out problem", "before", "reward", "after", "reward", title="before and after", show_lines=True)
    for old, new in list(zip(before, after, strict=False))[:count]:
        first, second = old.trajectories[0], new.trajectories[0]
        question = str(first.turns[0].messages[-2]["content"]) if first.turns else "?"
        cells = [cell for t in (first, second) for cell in (_answer(t), "-" if t.reward is None else f"{t.reward:g}")]
        table.add_row(Text(question), Text(cells[0]), cells[1], Text(cells[2]), cells[3])
    console.print(table)


def _answer(trajectory: Trajectory) -> str:
    text = str(trajectory.turns[-1].messages[-1].get("content")) if trajectory.turns else f"({trajectory.reason})"
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)  # a model may emit terminal escapes
