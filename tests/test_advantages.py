"""Advantages by hand: formulas, exact zeros, and rewards that do not exist."""

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gspo_jax.advantages import (
    EPSILON,
    batch_std,
    group_mean,
    group_std,
    leave_one_out,
    length_weighted,
    per_reward,
    reinforce_pp,
    reinforce_pp_baseline,
    turns,
)

type Rewards = Sequence[float | None]

rewards_lists = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)
LENGTHS = (3, 1, 4, 1, 5, 9, 2, 6)


def sizes(rewards: Sequence) -> list[int]:
    return [LENGTHS[i % len(LENGTHS)] for i in range(len(rewards))]


def first_numbers(found: Sequence[Sequence[float]]) -> list[float]:
    return [row[0] if row else 0.0 for row in found]


OF_ONE_GROUP: dict[str, Callable[[Rewards], list[float]]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "length_weighted": lambda r: length_weighted(r, [3] * len(r)),
    "batch_std": lambda r: batch_std([r])[0],
    "reinforce_pp": lambda r: first_numbers(reinforce_pp([[None if x is None else [0.0, 0.0, x] for x in r]])[0]),
    "reinforce_pp_baseline": lambda r: reinforce_pp_baseline([r], [[3] * len(r)])[0],
    "per_reward": lambda r: per_reward([[r], [r]], [1.0, 0.5])[0],
    "turns": lambda r: first_numbers(turns([None if x is None else [0.0, x] for x in r])),
    "turns_plain": lambda r: first_numbers(turns([None if x is None else [0.0, x] for x in r], normalize=False)),
}  # fmt: skip
"""Every function as one of a single group's rewards, one number per trajectory (of equal lengths)."""
each = pytest.mark.parametrize("name", OF_ONE_GROUP)


# Every function


@each
@pytest.mark.parametrize("flat", [[0.0] * 4, [0.1] * 3, [0.7] * 6, [1 / 3] * 7, [-1e9 / 7] * 5, [0.1, None, 0.1, 0.1]])
def test_flat_group_is_exactly_zero(name: str, flat: list[float | None]):
    """The mean of equal non-dyadic rewards misses them by an ulp, which a small standard deviation would blow up."""
    assert OF_ONE_GROUP[name](flat) == [0.0] * len(flat)


@each
def test_a_group_of_one_is_exactly_zero(name: str):
    """There is nothing to compare a lone trajectory with: 0, not its reward and not NaN."""
    for rewards in ([5.0], [None, 5.0], [0.1, None, None]):
        assert OF_ONE_GROUP[name](rewards) == [0.0] * len(rewards)


@each
def test_alg_06_failed_rollout_is_not_a_zero(name: str):
    """[2, None, 6] is [-a, 0, a], around a baseline of 4, and not around 8/3."""
    low, failed, high = OF_ONE_GROUP[name]([2.0, None, 6.0])
    assert failed == 0.0
    assert low == pytest.approx(-high)
    assert high > 0
    assert OF_ONE_GROUP[name]([None, None]) == [0.0, 0.0]


@each
def test_alg_07_failed_rollouts_do_not_move_the_baseline(name: str):
    """The others have to the bit what they would have without it, wherever it stands; a placeholder of 0 would show."""
    function = OF_ONE_GROUP[name]
    alone = function([4.0, 1.0, 1.0])
    for at in range(4):
        rewards: list[float | None] = [4.0, 1.0, 1.0]
        rewards.insert(at, None)
        found = function(rewards)
        assert found.pop(at) == 0.0
        assert found == alone
    assert function([4.0, 1.0, 1.0, 0.0])[:3] != pytest.approx(alone, rel=1e-3)


@each
def test_alg_04_a_lone_winner_is_not_worth_a_million(name: str):
    """0/1 rewards: a baseline of the others with their own standard deviation, which is 0, would divide by epsilon."""
    for size in (2, 5, 16, 64):
        for winners in (1, size // 2, size - 1):
            found = OF_ONE_GROUP[name]([1.0] * winners + [0.0] * (size - winners))
            assert max(map(abs, found)) <= 10
            assert min(found[:winners]) > 0 > max(found[winners:])


@each
def test_order_does_not_matter(name: str):
    rng = np.random.default_rng(0)
    for _ in range(10):
        rewards = [None if rng.random() < 0.2 else float(x) for x in rng.integers(-3, 4, 7) / 3]
        order = rng.permutation(7)
        shuffled = OF_ONE_GROUP[name]([rewards[i] for i in order])
        np.testing.assert_allclose(shuffled, np.array(OF_ONE_GROUP[name](rewards))[order], rtol=1e-9, atol=1e-12)


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_refused(name: str, bad: float):
    with pytest.raises(ValueError, match="must be finite; a failed rollout is None"):
        OF_ONE_GROUP[name]([1.0, bad, 0.0])


# Of a group


@given(rewards_lists)
def test_group_std_is_the_papers_formula(rewards: list[float]):
    assume(max(rewards) != min(rewards))
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (std + EPSILON) for r in rewards]
    np.testing.assert_allclose(group_std(rewards), expected, rtol=1e-6, atol=1e-7)


def test_known_values():
    """Sample standard deviation (ddof 1) of 0, 0, 1, 1 is sqrt(1/3)."""
    np.testing.assert_allclose(group_std([0.0, 0.0, 1.0, 1.0]), [-0.5 * math.sqrt(3)] * 2 + [0.5 * math.sqrt(3)] * 2, rtol=1e-5)
    assert group_mean([0.0, 0.0, 1.0, 1.0]) == [-0.5, -0.5, 0.5, 0.5]


@given(rewards_lists, st.floats(-100, 100))
def test_group_mean_has_no_scale_and_sums_to_zero(rewards: list[float], shift: float):
    found = group_mean(rewards)
    assert abs(sum(found)) < 1e-9 * (1 + sum(map(abs, rewards)))
    np.testing.assert_allclose(group_mean([r + shift for r in rewards]), found, atol=1e-9)


@given(rewards_lists)
def test_leave_one_out_is_the_difference_to_the_others(rewards: list[float]):
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(leave_one_out(rewards), expected, rtol=1e-9, atol=1e-9)


def test_alg_04_leave_one_out_has_no_standard_deviation():
    """[0, 0, 1, 0, 0]: the winner is 1 above the others, a loser 1/4 below; ten times the rewards, ten times that."""
    assert leave_one_out([0.0, 0.0, 1.0, 0.0, 0.0]) == pytest.approx([-0.25, -0.25, 1.0, -0.25, -0.25])
    assert leave_one_out([0.0, 0.0, 10.0, 0.0, 0.0]) == pytest.approx([-2.5, -2.5, 10.0, -2.5, -2.5])


@given(rewards_lists)
def test_length_weighted_is_the_difference_to_the_token_mean(rewards: list[float]):
    """Each reward counts once per token; the advantages, so counted, sum to 0."""
    n = sizes(rewards)
    baseline = statistics.fmean([r for r, k in zip(rewards, n, strict=True) for _ in range(k)])
    found = length_weighted(rewards, n)
    np.testing.assert_allclose(found, [r - baseline for r in rewards], rtol=1e-9, atol=1e-9)


def test_length_weighted_leaves_out_the_failed_ones_tokens():
    """[1, None, 0] of 1, 50 and 3 tokens: the baseline is 1/4, not 1/54."""
    assert length_weighted([1.0, None, 0.0], [1, 50, 3]) == [0.75, 0.0, -0.25]


def test_length_weighted_without_a_token_is_the_plain_mean():
    assert length_weighted([1.0, 0.0], [0, 0]) == [0.5, -0.5]


def test_alg_06_known_values():
    """[2, None, 6]: the baseline is 4 over the two that were scored; the failed one carries exactly 0."""
    half = 2 / (math.sqrt(8) + EPSILON)
    assert group_std([2.0, None, 6.0]) == pytest.approx([-half, 0.0, half])
    assert group_std([]) == []


def test_alg_07_known_values():
    """Masked from the loss but still in the baseline as 0: 1.5 instead of 2."""
    assert group_mean([4.0, 1.0, 1.0, None]) == [2.0, -1.0, -1.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_refused_by_value(bad: float):
    with pytest.raises(ValueError, match=r"rewards=.*(nan|inf).*must be finite"):
        group_std([1.0, bad])


def test_nearly_flat_group_is_not_called_flat():
    """1 and 1 + 1e-5 differ by ten times the epsilon: a real, damped signal."""
    low, high = group_std([1.0, 1.00001])
    std = 1e-5 / math.sqrt(2)
    assert high == -low == pytest.approx(0.5e-5 / (std + EPSILON), rel=1e-5)


# Of a batch

BATCH: list[list[float | None]] = [[1.0, 0.0, None, 0.5], [0.1, 0.1, 0.1], [2.0], [None, None], [3.0, 1.0]]
SIZES = [[2, 1, 7, 3], [1, 2, 1], [4], [5, 1], [1, 2]]


def scored(rows: Sequence[Rewards]) -> list[float]:
    return [x for row in rows for x in row if x is not None]


def test_batch_std_scales_by_the_spread_of_all_rewards():
    """Baselines of groups, one scale: a group of small differences keeps small advantages."""
    scale = statistics.stdev(scored(BATCH)) + EPSILON
    found = batch_std(BATCH)
    assert found == [
        pytest.approx([0.5 / scale, -0.5 / scale, 0, 0]), [0.0] * 3, [0.0], [0.0] * 2, pytest.approx([1 / scale, -1 / scale]),
    ]  # fmt: skip


def test_batch_std_of_one_trajectory_is_zero():
    assert batch_std([[3.0]]) == [[0.0]]
    assert batch_std([[None], []]) == [[0.0], []]


def test_reinforce_pp_is_the_whitened_reward_to_come():
    """Rewards (1, 2), (0, 0, 3) and (-1): to come 3, 2, 3, 3, 3, -1 with mean 13/6; the failed one is not among them."""
    togo = [[3.0, 2.0], None, [3.0, 3.0, 3.0]], [[-1.0]]
    tokens = [3.0, 2.0, 3.0, 3.0, 3.0, -1.0]
    mean, scale = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    expected = [[[] if row is None else pytest.approx([(x - mean) / scale for x in row]) for row in group] for group in togo]
    assert reinforce_pp([[[1.0, 2.0], None, [0.0, 0.0, 3.0]], [[-1.0]]]) == expected


def test_reinforce_pp_without_tokens():
    assert reinforce_pp([[[], None], []]) == [[[], []], []]
    assert reinforce_pp([[[7.0]]]) == [[[0.0]]]


def test_reinforce_pp_baseline_whitens_over_tokens_not_trajectories():
    """`r - group mean`, repeated over each trajectory's tokens, gives mean and spread; the mean of tokens is taken off too."""
    centered = [[0.5, -0.5, None, 0.0], [0.0] * 3, [0.0], [None, None], [1.0, -1.0]]
    tokens = [
        a
        for row, n in zip(centered, SIZES, strict=True)
        for a, k in zip(row, n, strict=True)
        if a is not None
        for _ in range(k)
    ]
    assert len(tokens) == 17
    mean, scale = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    assert abs(mean) > 0.01
    expected = [pytest.approx([0.0 if a is None else (a - mean) / scale for a in row]) for row in centered]
    assert reinforce_pp_baseline(BATCH, SIZES) == expected


def test_reinforce_pp_baseline_of_flat_groups_only_is_exactly_zero():
    assert reinforce_pp_baseline([[0.1] * 3, [0.7, None, 0.7]], [[1, 2, 3], [4, 5, 6]]) == [[0.0] * 3, [0.0] * 3]


def normalized(values: Sequence[float]) -> list[float]:
    std = statistics.stdev(values)
    return [(x - statistics.fmean(values)) / (std + EPSILON) for x in values]


def test_per_reward_normalizes_each_reward_before_adding():
    """A reward in thousands and one in tenths weigh 1 : 2 as asked; a trajectory that lacks one of them has neither."""
    big = [[1000.0, 3000.0, 2000.0, 9.0], [0.0, 5000.0]]
    small = [[0.1, 0.0, 0.3, None], [0.2, 0.1]]
    sums = [
        [a + 2 * b for a, b in zip(normalized(x[:3]), normalized(y[:3]), strict=True)] for x, y in zip(big, small, strict=True)
    ]
    expected = normalized([x for row in sums for x in row])
    found = per_reward([big, small], [1.0, 2.0])
    assert found == [pytest.approx([*expected[:3], 0.0]), pytest.approx(expected[3:])]
    assert found[0][3] == 0.0
    again = per_reward([[[x * 1e3 for x in row] for row in big], small], [1.0, 2.0])
    np.testing.assert_allclose(again[0], found[0], rtol=1e-6)


def test_per_reward_differs_from_the_group_std_of_the_sum():
    """What it is for: rewards (0, 1), (1, 1), (0, 2) with sums 1, 2, 2 would give the last two the same."""
    found = per_reward([[[0.0, 1.0, 0.0]], [[1.0, 1.0, 2.0]]], [1.0, 1.0])[0]
    summed = group_std([1.0, 2.0, 2.0])
    assert summed[1] == summed[2]
    first, second = normalized([0.0, 1.0, 0.0]), normalized([1.0, 1.0, 2.0])
    assert found == pytest.approx(normalized([a + b for a, b in zip(first, second, strict=True)]))
    assert found[1] != found[0]


@pytest.mark.parametrize("parts", [[[[0.1] * 3], [[0.7] * 3]], [[[0.0, 1.0]], [[1.0, 0.0]]], [[[None, 1.0]], [[1.0, 1.0]]]])
def test_per_reward_without_a_difference_is_exactly_zero(parts):
    """All equal; rewards that cancel; and one trajectory left."""
    assert per_reward(parts, [1.0, 1.0]) == [[0.0] * len(parts[0][0])]


def test_per_reward_of_a_flat_group_among_others_is_exactly_zero():
    found = per_reward([[[0.0, 0.0, 1.0], [0.5] * 3], [[0.1, 0.7, 0.3], [0.2] * 3]], [1.0, 0.3])
    assert found[1] == [0.0] * 3


# Per turn


def test_turns_by_hand():
    """Rewards (1, 2), (0, 1, 1) and (3): to come 3, 2 | 2, 2, 1 | 3, less the mean over all three of 8/3, 4/3 and 1/3, where
    a trajectory that has ended counts as 0; the second turns vary most, 2, 2 and 0 having a standard deviation of 2/sqrt(3)."""
    scale = 2 / math.sqrt(3) + EPSILON
    expected = [[1 / 3, 2 / 3], [-2 / 3, 2 / 3, 2 / 3], [1 / 3]]
    found = turns([[1.0, 2.0], [0.0, 1.0, 1.0], [3.0]])
    assert found == [pytest.approx([x / scale for x in row]) for row in expected]
    assert turns([[1.0, 2.0], [0.0, 1.0, 1.0], [3.0]], normalize=False) == [pytest.approx(row) for row in expected]


def test_alg_07_turns_leave_out_the_failed_one():
    whole = turns([[1.0, 2.0], [0.0, 1.0, 1.0], [3.0]])
    assert turns([[1.0, 2.0], None, [0.0, 1.0, 1.0], [3.0]]) == [whole[0], [], *whole[1:]]


@given(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=4), min_size=2, max_size=6))
def test_turns_start_as_the_group_std_of_the_sums_or_less_where_later_turns_vary_more(rewards: list[list[int]]):
    found = turns([[float(x) for x in row] for row in rewards])
    assert list(map(len, found)) == list(map(len, rewards))
    first, sums = np.array([row[0] for row in found]), group_std([float(sum(row)) for row in rewards])
    scale = max((a / b for a, b in zip(first, sums, strict=True) if b), default=1.0)
    np.testing.assert_allclose(first, scale * np.array(sums), rtol=1e-9, atol=1e-12)
    assert 0 <= scale <= 1 + 1e-9


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=6), st.integers(1, 4))
def test_turns_with_the_reward_on_the_last_are_group_std_everywhere(rewards: list[float], count: int):
    found = turns([[0.0] * (count - 1) + [r] for r in rewards])
    np.testing.assert_allclose(found, np.tile(np.array(group_std(rewards))[:, None], count), rtol=1e-9, atol=1e-12)


def test_turns_do_not_credit_the_past():
    """A lucky first turn says nothing about the second: all equal from there on, exactly 0."""
    found = turns([[0.7, 0.1], [0.2, 0.1], [0.3, 0.1]])
    assert [row[1] for row in found] == [0.0] * 3
    assert found[0][0] > 0


def test_turns_of_one_or_of_none_are_zero():
    assert turns([[1.0, 2.0], None]) == [[0.0, 0.0], []]
    assert turns([None, None]) == [[], []]
    assert turns([]) == []


def test_alg_04_turns_of_equal_sums_are_not_scaled_by_their_rounding():
    """0.1 + 0.2 and 0 + 0.3 differ by 6e-17: the second turns' difference of 0.1 must not become 100,000."""
    for rewards in ([[0.1, 0.2], [0.0, 0.3]], [[1.0, 0.0], [0.0, 1.0001]]):
        assert np.abs(turns(rewards)).max() <= 1
