"""Advantages from rewards, in float64 on the host. None is a failed rollout: it takes no part in any baseline.

Functions of one group take its rewards; functions of a batch take the rewards of all its groups. A failed rollout has exactly
0; so has every member of a flat group (max == min, so no rounding residue is ever scaled up) and of a group of one, except
under the two forms of REINFORCE++, which whiten over the whole batch.
"""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6

type Rewards = Sequence[float | None]


def group_std(rewards: Rewards, *, eps: float = EPSILON) -> list[float]:
    """`(r - mean) / (std + eps)` of one group, std with ddof 1 (GSPO eq. 6, arXiv 2507.18071)."""
    return _over_group(rewards, lambda r: (r - r.mean()) / (r.std(ddof=1) + eps))


def group_mean(rewards: Rewards) -> list[float]:
    """`r - mean` of one group, without a standard deviation (Dr. GRPO, arXiv 2503.20783)."""
    return _over_group(rewards, lambda r: r - r.mean())


def leave_one_out(rewards: Rewards) -> list[float]:
    """`r_i - mean of the others` (RLOO, arXiv 2402.14740); no standard deviation: a lone winner's others have none."""
    return _over_group(rewards, lambda r: (r - r.mean()) * r.size / (r.size - 1))


def length_weighted(rewards: Rewards, lengths: Sequence[int]) -> list[float]:
    """`r_i - sum_j n_j r_j / sum_j n_j` with n the trained tokens of each trajectory (OPO, arXiv 2505.23585)."""
    sizes = np.array([n for r, n in zip(rewards, lengths, strict=True) if r is not None], np.float64)
    return _over_group(rewards, lambda r: r - (sizes @ r) / sizes.sum() if sizes.sum() else r - r.mean())


def batch_std(groups: Sequence[Rewards], *, eps: float = EPSILON) -> list[list[float]]:
    """`(r - group mean) / (std of all rewards of the batch + eps)`, ddof 1."""
    everyone = _scored([r for group in groups for r in group])
    scale = everyone.std(ddof=1) + eps if everyone.size > 1 else 1.0
    return [[a / scale for a in group_mean(group)] for group in groups]


def reinforce_pp(token_rewards: Sequence[Sequence[Sequence[float] | None]], *, eps: float = 1e-8) -> list[list[list[float]]]:
    """REINFORCE++ (arXiv 2501.03262): reward still to come at each trained token, whitened over the batch's tokens.

    A trajectory's rewards are one number per trained token: the reward on the last, a KL penalty on any.
    """
    returns = [
        [None if r is None else np.cumsum(np.asarray(r, np.float64)[::-1])[::-1] for r in group] for group in token_rewards
    ]
    return _whitened(returns, eps)


def reinforce_pp_baseline(
    groups: Sequence[Rewards], lengths: Sequence[Sequence[int]], *, eps: float = 1e-8
) -> list[list[float]]:
    """REINFORCE++ with a baseline: `r - group mean`, then whitened over the batch's tokens."""
    centered = [
        [None if r is None else np.full(n, a) for r, a, n in zip(group, group_mean(group), sizes, strict=True)]
        for group, sizes in zip(groups, lengths, strict=True)
    ]
    return [[a[0] if a else 0.0 for a in group] for group in _whitened(centered, eps)]


def per_reward(components: Sequence[Sequence[Rewards]], weights: Sequence[float], *, eps: float = EPSILON) -> list[list[float]]:
    """GDPO (arXiv 2601.05242): each reward normalized over its group, weighted, summed, then normalized over the batch.

    `components[k][g]` are the k-th rewards of group g. A trajectory that lacks any of them takes part in none.
    """
    groups = [list(zip(*parts, strict=True)) for parts in zip(*components, strict=True)]
    whole = [[all(r is not None for r in member) for member in group] for group in groups]
    sums = []
    for group, alive in zip(groups, whole, strict=True):
        parts = [
            group_std([m[k] if a else None for m, a in zip(group, alive, strict=True)], eps=eps) for k in range(len(weights))
        ]
        sums.append(np.array(weights) @ np.array(parts).reshape(len(weights), len(group)))
    everyone = np.array([s for row, alive in zip(sums, whole, strict=True) for s, a in zip(row, alive, strict=True) if a])
    if everyone.size < 2 or everyone.max() == everyone.min():
        return [[0.0] * len(group) for group in groups]
    mean, scale = everyone.mean(), everyone.std(ddof=1) + eps
    return [
        [float((s - mean) / scale) if a and row.any() else 0.0 for s, a in zip(row, alive, strict=True)]
        for row, alive in zip(sums, whole, strict=True)
    ]


def turns(turn_rewards: Sequence[Sequence[float] | None], *, eps: float = EPSILON, normalize: bool = True) -> list[list[float]]:
    """Advantages per turn from rewards per turn of one group, for objectives with token advantages.

    The reward still to come at turn k, minus its mean over the group (0 for a trajectory that has ended), divided by the
    largest std of any turn, the first of which is that of the trajectories' sums. With the whole reward on the last turn, of
    trajectories of equally many turns, this is `group_std` of the sums at every turn.
    """
    sums = [None if r is None else float(np.sum(r)) for r in turn_rewards]
    scored = _scored(sums)
    most = max((len(r) for r in turn_rewards if r is not None), default=0)
    if scored.size < 2:
        return [[0.0] * len(r or ()) for r in turn_rewards]
    togo = np.zeros((len(turn_rewards), most))
    for i, r in enumerate(turn_rewards):
        if r is not None:
            togo[i, : len(r)] = np.cumsum(np.asarray(r, np.float64)[::-1])[::-1]
    alive = np.array([r is not None for r in turn_rewards])
    noise = 1e-12 * max(float(np.sum(np.abs(r))) for r in turn_rewards if r is not None)  # of summing in another order
    flat = np.ptp(togo[alive], 0) <= noise
    centered = np.where(flat, 0.0, togo - togo[alive].mean(0))
    scale = centered[alive].std(0, ddof=1).max() + eps if normalize else 1.0
    return [[] if r is None else (centered[i, : len(r)] / scale).tolist() for i, r in enumerate(turn_rewards)]


def _over_group(rewards: Rewards, function) -> list[float]:
    scored = _scored(rewards)
    if scored.size < 2 or scored.max() == scored.min():
        return [0.0] * len(rewards)
    found = iter(function(scored).tolist())
    return [0.0 if r is None else next(found) for r in rewards]


def _scored(rewards: Rewards) -> np.ndarray:
    scored = np.array([r for r in rewards if r is not None], np.float64)
    if not np.isfinite(scored).all():
        raise ValueError(f"rewards={list(rewards)} must be finite; a failed rollout is None")
    return scored


def _whitened(groups: Sequence[Sequence[np.ndarray | None]], eps: float) -> list[list[list[float]]]:
    """(x - mean) / sqrt(var + eps) over all tokens, var with ddof 1; 0 when all are equal."""
    arrays = [a for group in groups for a in group if a is not None and a.size]
    tokens = np.concatenate(arrays) if arrays else np.zeros(0)
    if not np.isfinite(tokens).all():
        raise ValueError("rewards must be finite; a failed rollout is None")
    if tokens.size < 2 or tokens.max() == tokens.min():
        return [[[0.0] * (0 if a is None else a.size) for a in group] for group in groups]
    mean, scale = tokens.mean(), np.sqrt(tokens.var(ddof=1) + eps)
    return [[[] if a is None else ((a - mean) / scale).tolist() for a in group] for group in groups]
