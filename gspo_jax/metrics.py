"""Names and values of what a step reports about its rollouts. Update metrics come from the learner, under their final names."""

from collections.abc import Mapping, Sequence

import numpy as np

from rollout.types import Group

ALIASES = {
    "mean_return": "reward/mean",
    "policy_loss": "policy/loss",
    "kl_divergence": "policy/kl_reference",
    "clip_fraction": "policy/clip_fraction",
    "advantage_mean": "advantage/mean",
}


def rollout_metrics(groups: Sequence[Group], advantages: Sequence[Sequence[float]], version: int) -> dict[str, float | None]:
    """Scalars over one rollout batch. Rewards are those the advantages were computed from, so without void trajectories."""
    everyone = [t for group in groups for t in group.trajectories]
    alive = [t for t in everyone if t.reward is not None]
    rewards = np.array([t.reward for t in alive], np.float64)
    lengths = np.array([sum(len(turn.completion_ids) for turn in t.turns) for t in alive], np.float64)
    kept = [a for group, row in zip(groups, advantages, strict=True)
            for t, a in zip(group.trajectories, row, strict=True) if t.reward is not None]  # fmt: skip
    stale = [version - v for t in alive for turn in t.turns for v in turn.versions]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std()) if rewards.size else None,
        "reward/raw_mean": _mean(rewards),
        "advantage/mean": _mean(np.array(kept)),
        "rollout/truncated_fraction": _mean(np.array([t.status == "cut" for t in alive], np.float64)),
        "rollout/void_fraction": 1 - len(alive) / len(everyone),
        "rollout/staleness_max": float(max(stale, default=0)),
        "rollout/completion_tokens_mean": _mean(lengths),
        "rollout/turns_mean": _mean(np.array([len(t.turns) for t in alive], np.float64)),
        "group/flat_fraction": _mean(np.array([_flat(group) for group in groups], np.float64)),
        "tokens/sampled": float(lengths.sum()),
    } | _components(alive)


def with_aliases(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """`metrics` plus the names older documents use for the same values; None for what nothing measured."""
    values = {name: metrics.get(name) for name in ALIASES.values()}
    return {**values, **metrics, **{alias: values[name] for alias, name in ALIASES.items()}}


def _flat(group: Group) -> bool:
    rewards = [t.reward for t in group.trajectories if t.reward is not None]
    return len(rewards) < 2 or max(rewards) == min(rewards)


def _components(trajectories: Sequence) -> dict[str, float | None]:
    """The mean of every number the task app reported beside the reward."""
    names = sorted({name for t in trajectories for name in t.metrics})
    return {f"task/{n}": _mean(np.array([t.metrics[n] for t in trajectories if n in t.metrics])) for n in names}


def _mean(x: np.ndarray) -> float | None:
    return float(x.mean()) if x.size else None
