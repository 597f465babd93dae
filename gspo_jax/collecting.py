"""The groups of a step: one round of rollouts, and with dynamic sampling (DAPO) bounded rounds more for the flat ones."""

from collections import Counter
from collections.abc import Callable, Sequence

from gspo_jax.config_report import groups as group_count
from gspo_jax.rollouts import Rollouts, training_problems
from gspo_jax.sections import Config
from gspo_jax.signal import choose, flat_value, is_flat, tokens_of
from rollout.types import Group, Trajectory

type Collected = tuple[tuple[Group, ...], dict[str, float | None], str | None]
"""As many groups as a step has, what to report about them, and a message when too few of them are mixed."""


async def collect(
    config: Config,
    rollouts: Rollouts,
    step: int,
    on_rollout: Callable[[Trajectory], None],
    on_round: Callable[[Sequence[Group]], None],
) -> Collected:
    """The groups that step `step` learns from, the mixed ones first if it took several rounds.

    Each round asks for as many new problems as mixed groups are missing, at most `algorithm.refill_rounds` times; what then is
    missing is filled up with flat groups, which take no part in the update. `on_round` sees all groups so far, and may raise.
    """
    algorithm, count = config.algorithm, group_count(config)
    groups: list[Group] = []
    rounds, missing = 0, count
    while True:
        problems = training_problems(config, rollouts.sizes, step, count, round=rounds)[:missing]
        groups += await rollouts.collect(
            problems, config.training.group_size, step=step, first=rounds * count, on_done=lambda _, t: on_rollout(t)
        )
        on_round(groups)
        mixed = sum(not is_flat(group, algorithm.correctness) for group in groups)
        missing = count - mixed
        if algorithm.flat_groups != "refill" or missing <= 0 or rounds == algorithm.refill_rounds:
            break
        rounds += 1
    if algorithm.flat_groups != "refill":
        return tuple(groups), {}, None
    everyone = [t for group in groups for t in group.trajectories]
    metrics: dict[str, float | None] = {
        "group/sampled": float(len(groups)),
        "group/sampled_flat_fraction": 1 - mixed / len(groups),
        "group/refill_rounds": float(rounds),
        "rollout/void_fraction": sum(t.status == "void" for t in everyone) / len(everyone),
        "tokens/sampled": float(sum(tokens_of(t) for t in everyone)),
    }
    return choose(groups, count, algorithm.correctness), metrics, _short(config, groups, count) if missing > 0 else None


def _short(config: Config, groups: Sequence[Group], count: int) -> str:
    algorithm = config.algorithm
    values = Counter(flat_value(group, algorithm.correctness) for group in groups if is_flat(group, algorithm.correctness))
    told = ", ".join(
        f"{n} with fewer than two results" if value is None else f"{n} all {value:g}" for value, n in values.most_common(3)
    )
    rounds = f"{algorithm.refill_rounds} round{'s' if algorithm.refill_rounds > 1 else ''} of new problems"
    mixed = len(groups) - values.total()
    then = "stopping" if algorithm.refill_short == "stop" else f"training on {mixed} of {count}"
    return (
        f"{values.total()}/{len(groups)} groups are flat ({told}) after {rounds}: "
        f"{then}. Choose problems the policy solves sometimes, or raise algorithm.refill_rounds or training.group_size"
    )
