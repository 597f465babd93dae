"""Held-out reward: the same rollouts, other problems, no learning. `python -m gspo_jax.evaluate RUN|MODEL cfg.toml`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_jax.config import evaluation_seeds
from gspo_jax.rollouts import EVALUATION, Rollouts
from gspo_jax.sections import Config
from rollout.types import Group, Problem


class EvaluationError(Exception):
    """Not a single held-out rollout succeeded."""


@dataclass(frozen=True)
class Evaluation:
    """Mean reward over problems (of the mean over samples), its standard error over problems, and the groups themselves."""

    reward_mean: float
    reward_sem: float
    groups: tuple[Group, ...]


def evaluation_problems(config: Config, rollouts: Rollouts) -> list[Problem]:
    """The held-out problems: `evaluation.seeds` / `evaluation.instances` of the split, none beyond what the task app has."""
    split = config.evaluation.split
    size = rollouts.sizes.get(split)
    return [Problem(seed, split) for seed in evaluation_seeds(config) if size is None or seed < size]


async def evaluate(rollouts: Rollouts, problems: Sequence[Problem], samples: int) -> Evaluation:
    """Held-out reward of the policy published last. The same keys every time, so two evaluations differ by the policy only.

    Raises EvaluationError when not a single rollout succeeded.
    """
    groups = await rollouts.collect(problems, samples, step=0, branch=EVALUATION)
    means = [
        np.mean(rewards) for group in groups if (rewards := [t.reward for t in group.trajectories if t.reward is not None])
    ]
    if not means:
        reasons = sorted({t.reason for group in groups for t in group.trajectories})
        raise EvaluationError(f"evaluation: all {len(problems) * samples} rollouts failed ({', '.join(reasons)})")
    sem = float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0
    return Evaluation(float(np.mean(means)), sem, groups)


if __name__ == "__main__":
    from gspo_jax.evaluate_command import main

    raise SystemExit(main())
