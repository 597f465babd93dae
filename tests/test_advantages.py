"""Group statistics: the formula, exact zeros, and rewards that do not exist."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gspo_jax.advantages import EPSILON, group_mean, group_std

rewards_lists = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)


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


@pytest.mark.parametrize("flat", [[0.0] * 4, [0.1] * 3, [0.7] * 6, [1 / 3] * 7, [-1e9 / 7] * 5, [0.1, None, 0.1, 0.1]])
def test_flat_group_is_exactly_zero(flat: list[float | None]):
    """The mean of equal non-dyadic rewards misses them by an ulp, which a small standard deviation would blow up."""
    assert group_std(flat) == group_mean(flat) == [0.0] * len(flat)


@given(rewards_lists, st.floats(-100, 100))
def test_group_mean_has_no_scale_and_sums_to_zero(rewards: list[float], shift: float):
    found = group_mean(rewards)
    assert abs(sum(found)) < 1e-9 * (1 + sum(map(abs, rewards)))
    np.testing.assert_allclose(group_mean([r + shift for r in rewards]), found, atol=1e-9)


@given(rewards_lists, st.data())
def test_order_does_not_matter(rewards: list[float], data: st.DataObject):
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = group_std([rewards[i] for i in order])
    np.testing.assert_allclose(shuffled, [group_std(rewards)[i] for i in order], rtol=1e-7, atol=1e-9)


def test_alg_06_failed_rollout_is_not_a_zero():
    """[2, None, 6]: the baseline is 4 over the two that were scored; the failed one carries exactly 0."""
    half = 2 / (math.sqrt(8) + EPSILON)
    assert group_std([2.0, None, 6.0]) == pytest.approx([-half, 0.0, half])
    assert group_std([2.0, None, 6.0])[1] == 0.0
    assert group_std([5.0]) == [0.0]
    assert group_std([None, 5.0]) == group_std([None, None]) == [0.0, 0.0]
    assert group_std([]) == []


def test_alg_07_failed_rollout_does_not_move_the_baseline():
    """Masked from the loss but still in the baseline as 0: 1.5 instead of 2."""
    assert group_mean([4.0, 1.0, 1.0, None]) == [2.0, -1.0, -1.0, 0.0]
    assert group_std([4.0, 1.0, 1.0, None])[:3] == group_std([4.0, 1.0, 1.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_refused_by_value(bad: float):
    with pytest.raises(ValueError, match=r"rewards=.*(nan|inf).*must be finite"):
        group_std([1.0, bad])


def test_nearly_flat_group_is_not_called_flat():
    """1 and 1 + 1e-5 differ by ten times the epsilon: a real, damped signal."""
    low, high = group_std([1.0, 1.00001])
    std = 1e-5 / math.sqrt(2)
    assert high == -low == pytest.approx(0.5e-5 / (std + EPSILON), rel=1e-5)
