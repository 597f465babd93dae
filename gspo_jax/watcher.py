"""What a training run tells: one Step per rollout batch, and a Watcher for what happens in between."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_jax.evaluate import Evaluation
from gspo_jax.sections import Config
from rollout.types import Group, Trajectory


@dataclass(frozen=True)
class Step:
    """What one step consumed and reported. `evaluation` is set on the steps that evaluated."""

    step: int
    metrics: dict[str, float | None]
    groups: tuple[Group, ...]
    evaluation: Evaluation | None


class Watcher:
    """Hears what happens while it happens; override what you care about. `rollout` and `event` come from another thread."""

    def started(self, run_dir: Path, config: Config, first_step: int) -> None:
        """The loop is about to run its first step."""

    def phase(self, name: str) -> None:
        """What the run does from now on: rollout, update, sync, evaluation or checkpoint."""

    def rollout(self, trajectory: Trajectory) -> None:
        """One rollout of the current step ended."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """The held-out reward after `step` steps."""

    def event(self, event: dict[str, Any]) -> None:
        """A line of events.jsonl: what is trained, a failed rollout, an incomplete checkpoint, a guard that fired."""
