"""From groups to advantages: what counts in a baseline, what is trained, and what only shapes the reward."""

import math
from dataclasses import replace
from statistics import fmean, stdev

import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import micro
from hypothesis import given
from hypothesis import strategies as st

from gspo_jax.advantages import EPSILON
from gspo_jax.aggregation import token_mean
from gspo_jax.batch import Packing, pack
from gspo_jax.sections import Algorithm
from gspo_jax.signal import Signal, choose, flat_value, flatten, is_flat, numbered, signal, soft_overlong
from rollout.types import Group, Problem, Trajectory, Turn

MOST = 100


def member(reward: float | None, *sizes: int, status: str = "done", **fields) -> Trajectory:
    """A trajectory of one turn per size; a reward of None is a failure."""
    turns = tuple(Turn((1, 2), tuple(range(3, 3 + n)), (-1.0,) * n, (0,) * n, "stop") for n in sizes or (2,))
    return Trajectory(turns, reward, "void" if reward is None else status, **fields)  # pyright: ignore


def group(*members: Trajectory, seed: int = 0) -> Group:
    return Group(Problem(seed), members)


def found(algorithm: Algorithm | dict, *groups: Group, penalties=None) -> Signal:
    return signal(algorithm if isinstance(algorithm, Algorithm) else Algorithm(**algorithm), groups, MOST, penalties)


def standardized(rewards) -> list[float]:
    """Equation 6 of the paper with ddof 1."""
    return [(r - fmean(rewards)) / (stdev(rewards) + EPSILON) for r in rewards]


def whitened(rows) -> list[np.ndarray]:
    """Over all numbers of all rows."""
    every = np.concatenate(rows)
    return [(np.array(row) - every.mean()) / math.sqrt(every.var(ddof=1) + 1e-8) for row in rows]


# Who takes part


def test_alg_08_a_masked_cut_trajectory_counts_in_the_baseline_and_in_no_denominator():
    """10 kept and 90 cut tokens, loss 1 per token: 1.0, where dividing by all of them said 0.1."""
    cut = group(member(1.0, 10), member(0.0, 90, status="cut"))
    kept, masked = found({}, cut), found({"overlong": "mask"}, cut)
    assert kept.advantages[0] == pytest.approx(standardized([1.0, 0.0]))
    assert masked.advantages[0] == (kept.advantages[0][0], None)
    assert masked.rewards == kept.rewards == ((1.0, 0.0),)
    for result, tokens, trajectories in ((masked, 10, 1), (kept, 100, 2)):
        batch = micro(pack([cut], result.advantages, 2, Packing(128, 2, "padded")))
        loss = token_mean(jnp.ones(batch.loss_mask.shape), batch)
        assert (float(loss.value), float(loss.count), batch.trajectories) == (1.0, tokens, trajectories)


def test_alg_07_a_failed_trajectory_is_in_nothing():
    """4, 1, 1 and a failure: baseline 2, not 1.5 with the failure as a 0; none of its tokens is trained."""
    rows = group(member(4.0), member(1.0), member(1.0), member(None, 7))
    result = found({"advantage": "group_mean"}, rows)
    assert result.advantages[0][:3] == pytest.approx([2.0, -1.0, -1.0])
    assert result.rewards == ((4.0, 1.0, 1.0, None),)
    assert flatten(result.advantages, [rows]) == pytest.approx([2.0, -1.0, -1.0])
    batch = pack([rows], result.advantages, 4, Packing(16))
    assert (batch.trajectories.sum(), batch.loss_mask.sum()) == (3, 6)


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"advantage": name} for name in ("group_std", "group_mean", "batch_std", "leave_one_out", "length_weighted")),
        *({"variety": "grpo", "advantage": name} for name in ("reinforce_pp", "reinforce_pp_baseline")),
        {"advantage": "per_reward", "reward_weights": {"right": 1.0, "short": 0.5}},
        {"variety": "gspo_token", "credit": "turn"},
    ],
    ids=lambda a: a.get("advantage", "turn"),
)
def test_alg_06_no_advantage_changes_when_a_failure_joins(algorithm):
    """[2, None, 6] was [2, 0, 6]: every way to an advantage has to leave failures out."""

    def scored(reward, *sizes):
        return member(reward, *sizes, metrics={"right": reward, "short": 1.0 / sum(sizes)})

    one, two = [scored(2.0, 3), scored(6.0, 1, 2)], [scored(1.0, 2), scored(0.0, 4), scored(5.0, 1)]
    void = member(None, 5)
    plain = found(algorithm, group(*one), group(*two))
    groups = [group(one[0], void, one[1]), group(void, *two)]
    joined = found(algorithm, *groups)
    alive = [joined.advantages[0][0], joined.advantages[0][2], *joined.advantages[1][1:]]
    for a, b in zip(alive, [*plain.advantages[0], *plain.advantages[1]], strict=True):
        assert a == pytest.approx(b)
    assert len(flatten(joined.advantages, groups)) == 5
    assert max(map(abs, flatten(joined.advantages, groups))) > 0.1


# Flat groups


def test_flat_groups_are_flat_before_shaping():
    """The filter looked at the shaped reward, so two right answers of unequal length were a mixed group."""
    rows = group(member(1.0, 60), member(1.0, 95))
    shaping = {"overlong_buffer": 20}
    keep = found(shaping, rows)
    assert keep.rewards[0] == pytest.approx((1.0, 1.0 + (80 - 95) / 20))
    assert keep.advantages[0] == pytest.approx(standardized(keep.rewards[0]))
    for how in ("skip", "refill"):
        assert found({**shaping, "flat_groups": how}, rows).advantages == ((None, None),)
    mixed = group(member(1.0, 60), member(0.0, 60))
    assert found({**shaping, "flat_groups": "skip"}, rows, mixed).advantages[1] == pytest.approx(standardized([1.0, 0.0]))


def test_flat_groups_are_those_of_the_metric_that_is_named():
    """Partial credit makes rewards differ where the answers are all wrong, and equal rewards may hide a right one."""
    wrong = group(member(0.1, metrics={"right": 0.0}), member(0.3, metrics={"right": 0.0}))
    hidden = group(member(1.0, metrics={"right": 0.0}), member(1.0, metrics={"right": 1.0}))
    by_metric = found({"flat_groups": "skip", "correctness": "right"}, wrong, hidden).advantages
    by_reward = found({"flat_groups": "skip"}, wrong, hidden).advantages
    assert by_metric == ((None, None), (0.0, 0.0))
    assert by_reward[0] == pytest.approx(standardized([0.1, 0.3]))
    assert by_reward[1] == (None, None)
    assert found({}, wrong, hidden).advantages[1] == (0.0, 0.0)  # keep: in the denominator, with advantage 0


def test_groups_without_two_results_are_flat():
    lonely, empty = group(member(1.0), member(None)), group(member(None), member(None))
    assert [is_flat(g, None) for g in (lonely, empty, group(member(0.0), member(1.0)))] == [True, True, False]
    assert [flat_value(g, None) for g in (lonely, empty, group(member(0.5), member(0.5)))] == [None, None, 0.5]
    assert is_flat(group(member(0.5), member(0.5), member(None)), None)


def test_mixed_groups_are_chosen_first_in_order():
    rows = [
        group(member(a), member(b), seed=i)
        for i, (a, b) in enumerate(((1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
    ]
    assert [g.problem.seed for g in choose(rows, 2, None)] == [1, 3]
    assert [g.problem.seed for g in choose(rows, 4, None)] == [1, 3, 4, 0]


# Shaping


@pytest.mark.parametrize(
    ("length", "buffer", "penalty"),
    [
        *[(80, 20, 0), (81, 20, -0.05), (90, 20, -0.5), (99, 20, -0.95), (100, 20, -1), (150, 20, -1)],
        *[(0, 100, 0), (50, 100, -0.5), (100, 0, 0), (101, 0, 0), (99, 1, 0), (100, 1, -1)],
    ],
)
def test_soft_overlong_corners(length, buffer, penalty):
    assert soft_overlong(length, MOST, buffer) == pytest.approx(penalty)


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 200))
def test_soft_overlong_is_dapos_formula(length, most, buffer):
    """Equation 13 of arXiv 2503.14476: 0, a line down, -1."""
    buffer = min(buffer, most)
    line = ((most - buffer) - length) / buffer if buffer else 0.0
    expected = 0.0 if length <= most - buffer or not buffer else line if length <= most else -1.0
    assert soft_overlong(length, most, buffer) == pytest.approx(expected)


def test_overlong_is_about_the_longest_completion_not_the_sum():
    """max_tokens bounds one completion; a conversation of short ones is not too long."""
    result = found({"overlong_buffer": 50}, group(member(1.0, 40, 45, 50), member(1.0, 75, 3), member(None, 100)))
    assert result.rewards == ((1.0, 0.5, None),)


PENALTIES = [[[0.1, -0.2], [0.3, 0.0, 0.05]], [[0.5], [0.0, 0.25]]]
PENALIZED = (group(member(1.0, 2), member(0.0, 1, 2)), group(member(0.5, 1), member(2.0, 2)))


@pytest.mark.parametrize("name", ["group_std", "group_mean", "leave_one_out", "batch_std"])
def test_kl_in_the_reward_is_summed_over_tokens_and_taken_off(name):
    penalized = [[1.0 - (0.1 - 0.2), 0.0 - 0.35], [0.5 - 0.5, 2.0 - 0.25]]
    centered = [[r - fmean(row) for r in row] for row in penalized]
    std = np.std(np.concatenate(penalized), ddof=1)
    expected = {
        "group_std": [standardized(row) for row in penalized],
        "group_mean": centered,
        "leave_one_out": [[row[0] - row[1], row[1] - row[0]] for row in penalized],
        "batch_std": [[a / (std + EPSILON) for a in row] for row in centered],
    }[name]
    result = found({"advantage": name}, *PENALIZED, penalties=PENALTIES)
    for row, rewards, advantages in zip(result.rewards, penalized, zip(result.advantages, expected, strict=True), strict=True):
        assert row == pytest.approx(rewards)
        assert advantages[0] == pytest.approx(advantages[1])


def test_kl_in_the_reward_is_counted_from_each_token_on_by_reinforce_pp():
    """What was already paid is no reason to go on differently: a token's return has the penalties from it on and the reward."""
    returns = []
    for groups, penalties in zip(PENALIZED, PENALTIES, strict=True):
        for t, off in zip(groups.trajectories, penalties, strict=True):
            returns.append([t.reward - sum(off[i:]) for i in range(len(off))])
    result = found({"variety": "grpo", "advantage": "reinforce_pp"}, *PENALIZED, penalties=PENALTIES)
    flat = [a for row in result.advantages for a in row]
    for a, expected in zip(flat, whitened(returns), strict=True):
        assert a == pytest.approx(expected)
    assert result.rewards[0] == pytest.approx((1.0 - (0.1 - 0.2), 0.0 - 0.35))


def test_reinforce_pp_without_a_penalty_is_the_reward_at_every_token():
    returns = [[t.reward] * sum(len(x.completion_ids) for x in t.turns) for g in PENALIZED for t in g.trajectories]
    result = found({"advantage": "reinforce_pp", "overlong_buffer": 0}, *PENALIZED)
    for a, expected in zip([a for row in result.advantages for a in row], whitened(returns), strict=True):
        assert a == pytest.approx(expected)


def test_shaping_reaches_reinforce_pp_with_the_penalties():
    long = group(member(1.0, 90), member(0.0, 1))
    penalties = [[[0.01] * 90, [0.5]]]
    result = found({"variety": "grpo", "advantage": "reinforce_pp", "overlong_buffer": 20}, long, penalties=penalties)
    returns = [[1.0 - 0.5 - 0.01 * (90 - i) for i in range(90)], [-0.5]]
    for a, expected in zip(result.advantages[0], whitened(returns), strict=True):
        assert a == pytest.approx(expected)


# Which advantage


LENGTHS = group(member(1.0, 2), member(0.0, 3, 1), member(4.0, 6))


def test_length_weighted_baseline_has_the_sampled_tokens_of_all_turns():
    baseline = (2 * 1 + 4 * 0 + 6 * 4) / 12
    assert found({"advantage": "length_weighted"}, LENGTHS).advantages[0] == pytest.approx([r - baseline for r in (1, 0, 4)])


def test_reinforce_pp_baseline_is_whitened_over_tokens():
    centered = [[r - 5 / 3] * n for r, n in ((1, 2), (0, 4), (4, 6))]
    expected = [row[0] for row in whitened(centered)]
    assert found({"advantage": "reinforce_pp_baseline"}, LENGTHS).advantages[0] == pytest.approx(expected)


def test_per_reward_normalizes_each_metric_and_ignores_the_reward():
    """GDPO: a large metric does not drown a small one, and the weights are those written beside the names."""
    right, style = [1.0, 0.0, 0.0], [300.0, 100.0, 500.0]
    rows = group(
        *(member(9.0 * i, metrics={"style": s, "right": r}) for i, (r, s) in enumerate(zip(right, style, strict=True)))
    )
    weights = {"right": 2.0, "style": 0.5}
    sums = [2.0 * a + 0.5 * b for a, b in zip(standardized(right), standardized(style), strict=True)]
    result = found({"advantage": "per_reward", "reward_weights": weights}, rows)
    assert result.advantages[0] == pytest.approx(standardized(sums))
    other = found({"advantage": "per_reward", "reward_weights": dict(reversed(weights.items()))}, rows)
    assert other.advantages[0] == pytest.approx(result.advantages[0])


def test_a_metric_that_was_not_reported_is_named_with_those_that_were():
    """A misspelt metric must not be read as 0."""
    ok = member(1.0, metrics={"right": 1.0, "attempts": 1.0})
    bad = member(0.0, metrics={"attempts": 1.0})
    for algorithm, key in (
        ({"advantage": "per_reward", "reward_weights": {"right": 1.0}}, "reward_weights"),
        ({"flat_groups": "skip", "correctness": "right"}, "correctness"),
    ):
        with pytest.raises(
            ValueError, match=rf"algorithm\.{key}: the task app reported no metric 'right'; it reported attempts"
        ):
            found(algorithm, group(ok, bad))
        with pytest.raises(ValueError, match="it reported none"):
            found(algorithm, group(ok, member(0.0)))
        found(algorithm, group(ok, ok, member(None)))  # a failure reports nothing, and that is no mistake


# Credit per turn


def turn_advantages(rows, normalize: bool = True) -> list[np.ndarray]:
    """Reward to come, less its mean over the group (0 for one that has ended), over the std of the sums."""
    most = max(map(len, rows))
    togo = [[sum(row[k:]) for k in range(most)] for row in rows]
    mean = np.mean(togo, 0)
    scale = stdev(map(sum, rows)) + EPSILON if normalize else 1.0
    return [(np.array(t) - mean)[: len(row)] / scale for t, row in zip(togo, rows, strict=True)]


@pytest.mark.parametrize("name", ["group_std", "group_mean"])
def test_credit_per_turn_follows_the_turn_rewards(name):
    rewards = [(0.5, 0.0, 1.0), (0.0, 0.25), (0.0, 1.0, 0.0)]
    rows = group(*(member(sum(r), *(2,) * len(r), turn_rewards=r) for r in rewards))
    result = found({"variety": "gspo_token", "credit": "turn", "advantage": name}, rows)
    for a, expected in zip(result.advantages[0], turn_advantages(rewards, name == "group_std"), strict=True):
        assert a == pytest.approx(expected)


def test_credit_per_turn_without_turn_rewards_is_the_trajectorys_at_every_turn():
    """The reward then belongs to the last turn, and all of it is still to come at each turn."""
    rows = group(member(1.0, 2, 1), member(0.0, 3, 2), member(0.5, 1, 1))
    result = found({"variety": "gspo_token", "credit": "turn"}, rows)
    for a, expected in zip(result.advantages[0], standardized([1.0, 0.0, 0.5]), strict=True):
        assert a == pytest.approx([expected] * 2)


def test_shaping_falls_on_the_last_turn():
    """Length and KL belong to no turn in particular; they must not vanish when credit is per turn."""
    rewards = [(0.5, 1.0), (0.25, 0.0)]
    rows = group(*(member(sum(r), 90, 1, turn_rewards=r) for r in rewards))
    penalties = [[[0.001] * 91, [0.002] * 91]]
    result = found({"variety": "gspo_token", "credit": "turn", "overlong_buffer": 20}, rows, penalties=penalties)
    shaped = [(0.5, 1.0 - 0.5 - 0.091), (0.25, 0.0 - 0.5 - 0.182)]
    for a, expected in zip(result.advantages[0], turn_advantages(shaped), strict=True):
        assert a == pytest.approx(expected)


# Tokens


def test_every_sampled_token_has_its_own_number():
    """The penalties are found again by these numbers, in the order of groups, members, turns; prompts have none."""
    found = numbered([group(member(1.0, 2, 3), member(None, 4)), group(member(0.0, 1), member(1.0, 2))])
    numbers = [[[turn.versions for turn in t.turns] for t in g.trajectories] for g in found]
    assert numbers == [[[(0, 1), (2, 3, 4)], [(5, 6, 7, 8)]], [[(9,)], [(10, 11)]]]


def test_the_numbers_survive_packing():
    """Two turns in one segment, a rewritten history in two, a shared prompt: each trained cell has its token's number."""
    one = member(1.0, 2, 3)
    follow = replace(one.turns[1], prompt_ids=(*one.turns[0].prompt_ids, *one.turns[0].completion_ids, 9))
    rows = group(one, replace(one, turns=(one.turns[0], follow)), member(0.0, 4), member(None, 2))
    (marked,) = numbered([rows])
    expected = {
        number: token
        for t in marked.trajectories[:3]
        for turn in t.turns
        for number, token in zip(turn.versions, turn.completion_ids, strict=True)
    }
    for mode in ("padded", "packed", "shared_prefix"):
        batch = pack([marked], [[0.0] * 4], 4, Packing(16, 4, mode))
        cells = zip(batch.versions[batch.loss_mask].tolist(), batch.tokens[batch.loss_mask].tolist(), strict=True)
        assert dict(sorted(cells)) == expected


def test_mean_advantage_of_a_trajectory_is_over_its_tokens():
    rows = group(member(1.0, 1, 3), member(0.0, 2), member(1.0, 2), member(None))
    assert flatten([[[1.0, 2.0], np.array([0.5, 1.5]), None, 0.0]], [rows]) == pytest.approx([(1 + 3 * 2) / 4, 1.0])
