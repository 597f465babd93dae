"""From groups to what is learned from: shaped rewards, advantages, and which trajectories take part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np

from gspo_jax import advantages as of
from gspo_jax.batch import Advantage, token_advantages
from gspo_jax.objective import advantage_name
from gspo_jax.sections import Algorithm
from rollout.types import Group, Trajectory

type Penalties = Sequence[Sequence[Sequence[float]]]
"""What is taken off the reward at every sampled token, by group and member: the KL to the reference, times its weight."""


class SignalError(ValueError):
    """A task app does not report a number that the config names."""


@dataclass(frozen=True)
class Signal:
    """One entry per group and member. A void trajectory has no reward; an advantage of None takes no part in the update."""

    rewards: tuple[tuple[float | None, ...], ...]
    advantages: tuple[tuple[Advantage, ...], ...]


def signal(algorithm: Algorithm, groups: Sequence[Group], max_tokens: int, penalties: Penalties | None = None) -> Signal:
    """Rewards as trained and advantages of a step. Cut trajectories that are masked still count in their group's baseline."""
    rewards = shaped_rewards(algorithm, groups, max_tokens, penalties)
    found = _advantages(algorithm, groups, rewards, penalties)
    dropped = algorithm.flat_groups != "keep"
    rows = []
    for group, row in zip(groups, found, strict=True):
        gone = dropped and is_flat(group, algorithm.correctness)
        cut = [algorithm.overlong == "mask" and t.status == "cut" for t in group.trajectories]
        rows.append(tuple(None if gone or c else a for a, c in zip(row, cut, strict=True)))
    return Signal(tuple(tuple(row) for row in rewards), tuple(rows))


def shaped_rewards(
    algorithm: Algorithm, groups: Sequence[Group], max_tokens: int, penalties: Penalties | None
) -> list[list[float | None]]:
    """The task app's rewards, less DAPO's penalty on long completions and the KL to the reference where asked for."""
    out = []
    for g, group in enumerate(groups):
        row: list[float | None] = []
        for m, t in enumerate(group.trajectories):
            if t.reward is None:
                row.append(None)
                continue
            kl = sum(penalties[g][m]) if penalties else 0.0
            row.append(t.reward + soft_overlong(longest(t), max_tokens, algorithm.overlong_buffer) - kl)
        out.append(row)
    return out


def soft_overlong(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476): 0 up to `max_tokens - buffer`, falling to -1 at `max_tokens`."""
    if buffer == 0 or length <= max_tokens - buffer:
        return 0.0
    return max((max_tokens - buffer - length) / buffer, -1.0)


def longest(trajectory: Trajectory) -> int:
    """Tokens of its longest completion."""
    return max((len(turn.completion_ids) for turn in trajectory.turns), default=0)


def is_flat(group: Group, correctness: str | None) -> bool:
    """True when nothing can be learned from the group: fewer than two results, or all equal, before any shaping.

    `correctness` names the task app's metric to look at; None is the reward. SignalError when a trajectory lacks it.
    """
    return flat_value(group, correctness) is not None or len(_results(group, correctness)) < 2


def flat_value(group: Group, correctness: str | None) -> float | None:
    """The one result of a flat group with at least two, else None."""
    results = _results(group, correctness)
    return results[0] if len(results) > 1 and max(results) == min(results) else None


def choose(groups: Sequence[Group], count: int, correctness: str | None) -> tuple[Group, ...]:
    """`count` of the groups, in order: those with a difference first."""
    return tuple(sorted(groups, key=lambda group: is_flat(group, correctness))[:count])


def numbered(groups: Sequence[Group]) -> list[Group]:
    """The groups with a number of its own, from 0, in the place of every sampled token's version."""
    numbers = count()

    def mark(trajectory: Trajectory) -> Trajectory:
        turns = (replace(turn, versions=tuple(islice(numbers, len(turn.completion_ids)))) for turn in trajectory.turns)
        return replace(trajectory, turns=tuple(turns))

    return [replace(group, trajectories=tuple(map(mark, group.trajectories))) for group in groups]


def tokens_of(trajectory: Trajectory) -> int:
    """Sampled tokens of all its turns."""
    return sum(len(turn.completion_ids) for turn in trajectory.turns)


def _results(group: Group, correctness: str | None) -> list[float]:
    alive = [t for t in group.trajectories if t.reward is not None]
    if correctness is None:
        return [t.reward for t in alive if t.reward is not None]
    return [_metric(t, "correctness", correctness) for t in alive]


def _advantages(
    algorithm: Algorithm, groups: Sequence[Group], rewards: list[list[float | None]], penalties: Penalties | None
) -> list[list[Advantage]]:
    name = advantage_name(algorithm)
    lengths = [[tokens_of(t) for t in group.trajectories] for group in groups]
    if algorithm.credit == "turn":
        return [list(of.turns(_turn_rewards(group, row), normalize=name == "group_std"))
                for group, row in zip(groups, rewards, strict=True)]  # fmt: skip
    if name == "batch_std":
        return of.batch_std(rewards)  # pyright: ignore[reportReturnType]
    if name == "per_reward":
        parts = [[_components(group, part) for group in groups] for part in algorithm.reward_weights]
        return of.per_reward(parts, list(algorithm.reward_weights.values()))  # pyright: ignore[reportReturnType]
    if name == "reinforce_pp_baseline":
        return of.reinforce_pp_baseline(rewards, lengths)  # pyright: ignore[reportReturnType]
    if name == "reinforce_pp":
        tokens = of.reinforce_pp(_token_rewards(algorithm, groups, rewards, penalties))
        return [[np.array(row) if row else 0.0 for row in group] for group in tokens]
    if name == "length_weighted":
        return [list(of.length_weighted(row, n)) for row, n in zip(rewards, lengths, strict=True)]
    one = {"group_std": of.group_std, "group_mean": of.group_mean, "leave_one_out": of.leave_one_out}[name]
    return [list(one(row)) for row in rewards]


def _turn_rewards(group: Group, rewards: Sequence[float | None]) -> list[list[float] | None]:
    """The task app's rewards per turn, what is missing to the trajectory's reward as trained being added on its last turn."""
    out: list[list[float] | None] = []
    for t, reward in zip(group.trajectories, rewards, strict=True):
        if reward is None or t.reward is None:
            out.append(None)
        elif t.turn_rewards is None:
            out.append([0.0] * (len(t.turns) - 1) + [reward])
        else:
            out.append([*t.turn_rewards[:-1], t.turn_rewards[-1] + reward - sum(t.turn_rewards)])
    return out


def _token_rewards(
    algorithm: Algorithm, groups: Sequence[Group], rewards: list[list[float | None]], penalties: Penalties | None
) -> list[list[list[float] | None]]:
    """Minus the penalty at every sampled token, and the rest of the reward on the last one."""
    out = []
    for g, (group, row) in enumerate(zip(groups, rewards, strict=True)):
        members: list[list[float] | None] = []
        for m, (t, reward) in enumerate(zip(group.trajectories, row, strict=True)):
            if reward is None:
                members.append(None)
                continue
            size = tokens_of(t)
            off = list(penalties[g][m]) if penalties else [0.0] * size
            tokens = [-x for x in off]
            if tokens:
                tokens[-1] += reward + sum(off)
            members.append(tokens)
        out.append(members)
    return out


def _metric(trajectory: Trajectory, key: str, name: str) -> float:
    if name not in trajectory.metrics:
        reported = ", ".join(trajectory.metrics) or "none"
        raise SignalError(f"algorithm.{key}: the task app reported no metric {name!r}; it reported {reported}")
    return trajectory.metrics[name]


def _components(group: Group, name: str) -> list[float | None]:
    return [None if t.reward is None else _metric(t, "reward_weights", name) for t in group.trajectories]


def flatten(advantages: Sequence[Sequence[Advantage]], groups: Sequence[Group]) -> list[float]:
    """The mean advantage of every trajectory that takes part, over its sampled tokens."""
    means = []
    for group, row in zip(groups, advantages, strict=True):
        for t, a in zip(group.trajectories, row, strict=True):
            if t.status != "void" and a is not None:
                values = [x for turn in token_advantages(t, a) for x in turn]
                means.append(sum(values) / max(len(values), 1))
    return means
