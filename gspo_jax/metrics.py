"""Names and values of what a step reports about its rollouts. Update metrics come from the learner, under their final names."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax.batch import Advantage
from gspo_jax.signal import Signal, flatten, tokens_of
from rollout.types import Group

ALIASES = {
    "mean_return": "reward/mean",
    "policy_loss": "policy/loss",
    "kl_divergence": "policy/kl_reference",
    "clip_fraction": "policy/clip_fraction",
    "advantage_mean": "advantage/mean",
}


def rollout_metrics(groups: Sequence[Group], found: Signal, version: int) -> dict[str, float | None]:
    """Scalars over one rollout batch. Rewards are those the advantages were computed from, so without void trajectories."""
    everyone = [t for group in groups for t in group.trajectories]
    alive = [t for t in everyone if t.reward is not None]
    raw = np.array([t.reward for t in alive], np.float64)
    rewards = np.array([r for row in found.rewards for r in row if r is not None], np.float64)
    lengths = np.array([tokens_of(t) for t in alive], np.float64)
    stale = [version - v for t in alive for turn in t.turns for v in turn.versions]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std()) if rewards.size else None,
        "reward/raw_mean": _mean(raw),
        "advantage/mean": _mean(np.array(flatten(found.advantages, groups))),
        "rollout/left_out_fraction": _mean(np.array([a is None for row in found.advantages for a in row], np.float64)),
        "rollout/truncated_fraction": _mean(np.array([t.status == "cut" for t in alive], np.float64)),
        "rollout/void_fraction": 1 - len(alive) / len(everyone),
        "rollout/staleness_max": float(max(stale, default=0)),
        "rollout/completion_tokens_mean": _mean(lengths),
        "rollout/turns_mean": _mean(np.array([len(t.turns) for t in alive], np.float64)),
        "group/flat_fraction": _mean(np.array([_flat(row) for row in found.advantages], np.float64)),
        "tokens/sampled": float(lengths.sum()),
    } | _components(alive)


def finite(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers as floats; None for what is not finite: nothing was there to measure, or it overflowed."""
    return {name: float(x) if np.isfinite(x) else None for name, x in metrics.items()}


def with_aliases(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """`metrics` plus the names older documents use for the same values; None for what nothing measured."""
    values = {name: metrics.get(name) for name in ALIASES.values()}
    return {**values, **metrics, **{alias: values[name] for alias, name in ALIASES.items()}}


def _flat(advantages: Sequence[Advantage]) -> bool:
    """True when nothing is learned from the group."""
    return not any(np.any(a) for a in advantages if a is not None)


def _components(trajectories: Sequence) -> dict[str, float | None]:
    """The mean of every number the task app reported beside the reward."""
    names = sorted({name for t in trajectories for name in t.metrics})
    return {f"task/{n}": _mean(np.array([t.metrics[n] for t in trajectories if n in t.metrics])) for n in names}


def _mean(x: np.ndarray) -> float | None:
    return float(x.mean()) if x.size else None
