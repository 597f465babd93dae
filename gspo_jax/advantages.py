"""Group statistics over rewards, in float64 on the host. None is a failed rollout: it takes no part in the baseline."""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6


def group_std(rewards: Sequence[float | None]) -> list[float]:
    """Advantages `(r - mean) / (std + 1e-6)` of one group, std with ddof 1 (GSPO eq. 6, arXiv 2507.18071).

    Exactly 0 for a flat group (max == min), for a group of one, and for a failed rollout (reward None), which is also
    left out of mean and std.
    """
    return _centered(rewards, normalize=True)


def group_mean(rewards: Sequence[float | None]) -> list[float]:
    """Advantages `r - mean` of one group, without a standard deviation (Dr. GRPO, arXiv 2503.20783)."""
    return _centered(rewards, normalize=False)


def _centered(rewards: Sequence[float | None], *, normalize: bool) -> list[float]:
    scored = np.array([r for r in rewards if r is not None], np.float64)
    if not np.isfinite(scored).all():
        raise ValueError(f"rewards={list(rewards)} must be finite; a failed rollout is None")
    if scored.size < 2 or scored.max() == scored.min():
        return [0.0] * len(rewards)
    scale = scored.std(ddof=1) + EPSILON if normalize else 1.0
    mean = scored.mean()
    return [0.0 if r is None else float((r - mean) / scale) for r in rewards]
