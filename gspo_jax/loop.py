"""The steps of a run, on the process that leads it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orbax.checkpoint import CheckpointManager

from gspo_jax import checkpoint, runlog
from gspo_jax.background import Background
from gspo_jax.build import Trainer
from gspo_jax.collecting import Collector
from gspo_jax.config_report import total_steps
from gspo_jax.evaluate import Evaluation, evaluate
from gspo_jax.guards import PATIENCE, check
from gspo_jax.metrics import rollout_metrics, with_aliases
from gspo_jax.rollouts import Rollouts
from gspo_jax.sections import Config
from gspo_jax.start import Start
from gspo_jax.steps import Update, learn, on_host
from gspo_jax.team import Team
from gspo_jax.types import TrainState
from gspo_jax.watcher import Step, Watcher
from rollout.runner import void_table
from rollout.types import Group, Problem

MAX_SKIPPED = 5
"""Consecutive non-finite minibatches after which a run stops."""


class TrainingError(Exception):
    """The run cannot go on; the message says why and what to change."""


@dataclass
class Loop:
    """The objects of one run, and the loop over them."""

    config: Config
    start: Start
    trainer: Trainer
    update: Update
    background: Background
    rollouts: Rollouts
    held_out: Sequence[Problem]
    manager: CheckpointManager
    run_dir: Path
    watcher: Watcher
    best: float | None
    history: list[dict[str, Any]]
    """Metrics of the last steps, for the guards."""
    frozen_digest: str | None
    team: Team

    def refuse_other_problems(self, first: int, sizes: dict[str, int]) -> None:
        """TrainingError when a resumed run meets a task app with other numbers of problems: the rest of an epoch would be of
        other ones."""
        begun = [e for e in runlog.read_lines(self.run_dir / "events.jsonl") if e["type"] == "run.started" and "problems" in e]
        if first and begun and begun[-1]["problems"] != sizes:
            raise TrainingError(
                f"the task app has {sizes} problems by split, and had {begun[-1]['problems']} when this run began; "
                "serve the same task, or begin a new run with another run.name"
            )

    def steps(self, state: TrainState) -> Iterator[Step]:
        first, total = int(state.step), total_steps(self.config)
        self.watcher.started(self.run_dir, self.config, first)
        sizes = dict(self.rollouts.sizes)
        self.refuse_other_problems(first, sizes)
        runlog.event(self.run_dir, "run.started", step=first, steps=total, problems=sizes)
        self.publish(state)
        if first == 0:
            self.evaluate(0)
        collector = Collector(self.config, self.rollouts, first, self.watcher.rollout, self.refuse_void)
        try:
            for step in range(first, total):
                state, done = self.step(state, step, collector)
                yield done
        finally:
            self.background.run(collector.aclose())
        if first < total or not (self.run_dir / "export").exists():
            self.team.lead("export")
            self.start.save(on_host(state.params), self.run_dir / "export")
        self.team.lead("end")
        runlog.event(self.run_dir, "run.finished", step=total)

    def step(self, state: TrainState, step: int, collector: Collector) -> tuple[TrainState, Step]:
        """Wait for the groups of the step, learn, publish, evaluate. `time/rollout` is the time waited for them: with
        `rollout.max_staleness` > 0 what is left of their playing time after the updates that ran beside it."""
        clock = _Clock()
        groups, collected = self.collect(step, collector)
        clock.lap("time/rollout")
        if self.config.run.log_rollouts:
            runlog.write_groups(runlog.rollout_file(self.run_dir, step), groups)
        self.watcher.phase("update")
        self.team.lead("learn", runlog.groups_text(groups) if self.team.count > 1 else "")
        state, learned = learn(self.team, self.trainer, self.update, state, groups)
        digest: dict[str, Any] = {"step": step, **learned.digest}
        if self.frozen_digest is not None:
            digest["frozen"] = self.frozen_digest
        prepared = learned.prepared
        metrics = rollout_metrics(groups, prepared.signal, step) | collected | learned.metrics | prepared.metrics
        clock.lap("time/update")
        self.refuse_nonfinite(state)
        synced = self.publish(state)
        clock.lap("time/sync")
        evaluation = self.evaluate(step + 1) if self.due(step + 1, self.config.evaluation.every_n_iters) else None
        metrics |= {"eval/reward_mean": evaluation.reward_mean if evaluation else None, **synced, **clock.laps}
        metrics["time/step"] = sum(clock.laps.values())
        metrics["tokens/per_second"] = (metrics["tokens/sampled"] or 0.0) / metrics["time/step"]
        runlog.append(self.run_dir / "digests.jsonl", digest)
        runlog.append(self.run_dir / "metrics.jsonl", {"step": step, **with_aliases(metrics)})
        self.guard({"step": step, **metrics})
        self.save(state, evaluation)
        return state, Step(step, metrics, groups, evaluation)

    def collect(self, step: int, collector: Collector) -> tuple[tuple[Group, ...], dict[str, float | None]]:
        self.watcher.phase("rollout")
        groups, metrics, message = self.background.run(collector.next())
        if message:
            self.tell({"type": "groups.short", "step": step, "message": message})
            if self.config.algorithm.refill_short == "stop":
                raise TrainingError(message)
        return groups, metrics

    def guard(self, metrics: dict[str, Any]) -> None:
        """Warnings are told when they begin; the first error stops the run, its step being logged and not saved."""
        self.history = [*self.history, metrics][-PATIENCE - 1 :]
        findings = check(self.config, self.history)
        for finding in findings:
            self.tell(
                {
                    "type": f"guard.{finding.severity}",
                    "guard": finding.guard,
                    "step": metrics["step"],
                    "message": finding.message,
                }
            )
        for finding in findings:
            if finding.severity == "error":
                raise TrainingError(finding.message)

    def tell(self, event: dict[str, Any]) -> None:
        runlog.event(self.run_dir, **event)
        self.watcher.event(event)

    def publish(self, state: TrainState) -> dict[str, float]:
        self.watcher.phase("sync")
        self.team.lead("publish")
        return self.background.run(self.rollouts.publish(int(state.step), state.params))

    def evaluate(self, step: int) -> Evaluation | None:
        """Held-out reward after `step` steps, logged; None when the config names no held-out problems.

        Of one version of the policy: the next one is published after it. Training rollouts may be in flight beside it.
        """
        if not self.held_out:
            return None
        self.watcher.phase("evaluation")
        started = time.monotonic()
        found = self.background.run(evaluate(self.rollouts, self.held_out, self.config.evaluation.samples))
        seconds = round(time.monotonic() - started, 3)
        runlog.event(
            self.run_dir, "evaluation", step=step, reward_mean=found.reward_mean, reward_sem=found.reward_sem, seconds=seconds
        )
        runlog.write_groups(self.run_dir / "rollouts" / f"eval_{step:06d}.jsonl", found.groups)
        self.watcher.evaluated(step, found)
        return found

    def save(self, state: TrainState, evaluation: Evaluation | None) -> None:
        """A checkpoint when one is due, and whenever the held-out reward is the best so far."""
        reward = evaluation.reward_mean if evaluation else None
        better = reward is not None and (self.best is None or reward > self.best)
        if better:
            self.best = reward
        if better or self.due(int(state.step), self.config.run.checkpoint_every):
            self.watcher.phase("checkpoint")
            self.team.lead("save", best=self.best, reward=reward)
            checkpoint.save(self.manager, state, {"best": self.best}, reward)
            runlog.event(self.run_dir, "checkpoint", step=int(state.step), reward_mean=reward)

    def due(self, done: int, every: int) -> bool:
        return done == total_steps(self.config) or (every > 0 and done % every == 0)

    def refuse_void(self, groups: Sequence[Group]) -> None:
        count = sum(len(group.trajectories) for group in groups)
        table = void_table(groups)
        void = sum(n for _, n in table)
        if void > self.config.rollout.max_void * count:
            rows = "\n".join(f"  {n:6d}  {reason}" for reason, n in table)
            most = self.config.rollout.max_void
            raise TrainingError(f"{void} of {count} rollouts failed, more than rollout.max_void = {most}:\n{rows}")

    def refuse_nonfinite(self, state: TrainState) -> None:
        skipped = int(state.skipped)
        if skipped >= MAX_SKIPPED:
            raise TrainingError(
                f"{skipped} minibatches in a row had a loss or gradient that is not finite; the weights are those of before. "
                "Lower training.learning_rate, or look at rollouts/ for log-probabilities out of range"
            )


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._last = now - self._last, now
