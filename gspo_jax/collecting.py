"""The groups of a step: one round of rollouts, and with dynamic sampling (DAPO) bounded rounds more for the flat ones.

And those of step after step, in the background up to `rollout.max_staleness` steps ahead of the learner.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from gspo_jax.config_report import groups as group_count
from gspo_jax.config_report import total_steps
from gspo_jax.rollouts import Rollouts, training_problems
from gspo_jax.sections import Config
from gspo_jax.signal import choose, flat_value, is_flat, tokens_of
from rollout.stream import Stream
from rollout.types import Group, Trajectory

type Collected = tuple[tuple[Group, ...], dict[str, float | None], str | None]
"""As many groups as a step has, what to report about them, and a message when too few of them are mixed."""


class Collector:
    """What steps `first`, `first + 1`, ... learn from: `collect` of each, begun up to `rollout.max_staleness` steps early.

    Version s of the policy is to be published before `next` is called for step s: then no token of step s is older than version
    `s - max_staleness`, however long anything takes. At 0 a step's rollouts begin when it is asked for. Weights may be
    published at any time; what is in flight goes on under them. `on_rollout` hears of a rollout when it ends, or, of a step
    played ahead, when that step is asked for. What was played ahead and not asked for is lost with the object. One event loop.
    """

    def __init__(
        self,
        config: Config,
        rollouts: Rollouts,
        first: int,
        on_rollout: Callable[[Trajectory], None],
        on_round: Callable[[Sequence[Group]], None],
    ) -> None:
        self._config, self._rollouts, self._on_rollout, self._on_round = config, rollouts, on_rollout, on_round
        self._asked, self._early = first - 1, defaultdict[int, list[Trajectory]](list)
        self._stream = Stream(self._produce, first, total_steps(config), config.rollout.max_staleness)

    async def next(self) -> Collected:
        """The groups of the next step, waiting for them. Raises what playing them raised; later steps are then cancelled."""
        self._asked = self._stream.step
        for trajectory in self._early.pop(self._asked, ()):
            self._on_rollout(trajectory)
        return await self._stream.next()

    async def aclose(self) -> None:
        """Cancel what is being played, and wait for its end."""
        await self._stream.aclose()

    async def _produce(self, step: int) -> Collected:
        return await collect(self._config, self._rollouts, step, partial(self._ended, step), self._on_round)

    def _ended(self, step: int, trajectory: Trajectory) -> None:
        if step > self._asked:
            self._early[step].append(trajectory)
        else:
            self._on_rollout(trajectory)


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
