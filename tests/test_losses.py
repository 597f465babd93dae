"""GSPO against the paper's formula, its precision, and the mistakes that sequence ratios invite."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_loss import LENGTH, QUICKLY, ROWS, derivatives, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.aggregation import pool
from gspo_jax.losses import gspo
from gspo_jax.ratios import MAX_LOG_RATIO, sequences
from gspo_jax.types import Batch, Mean, Peak, Trough, merge, nothing

LOW, HIGH = 3e-4, 4e-4

jit_gspo = jax.jit(gspo, compiler_options=QUICKLY)


@cache
def gspo_with(**constants):
    return partial(gspo, **constants)


def evaluate(logprobs, batch: Batch, **eps):
    """Loss, gradient and statistics as numbers."""
    loss, grad, _, stats = derivatives(gspo_with(**eps), logprobs, batch)
    return loss, grad, stats


def paper(logprobs, old, mask, advantages, low: float = LOW, high: float = HIGH):
    """Equations 5, 7 and 10 of arXiv 2507.18071 in plain float64: loss and its gradient, row by row."""
    loss, grad = 0.0, np.zeros(np.shape(logprobs))
    for i, (lp, o, m, a) in enumerate(zip(logprobs, old, mask, advantages, strict=True)):
        sampled = np.flatnonzero(m)
        if not sampled.size:
            continue
        s = (math.prod(math.exp(float(lp[t]) - float(o[t])) for t in sampled)) ** (1 / sampled.size)
        unclipped, clipped = s * a, min(max(s, 1 - low), 1 + high) * a
        loss -= min(unclipped, clipped) / len(mask)
        if unclipped <= clipped:
            grad[i, sampled] = -s * a / sampled.size / len(mask)
    return loss, grad


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1e-4, 3e-4, 1e-3, 0.3]))
def test_gspo_is_the_papers_objective(seed: int, spread: float):
    rng = np.random.default_rng(seed)
    old = rng.uniform(-3, -0.05, (ROWS, LENGTH))
    logprobs = old + spread * rng.standard_normal((ROWS, 1)) + 1e-5 * rng.standard_normal(old.shape)
    mask = rng.random(old.shape) < rng.uniform(0.1, 1)
    advantages = rng.standard_normal(ROWS) * (rng.random(ROWS) < 0.8)
    expected_loss, expected_grad = paper(logprobs, old, mask, advantages)
    with jax.enable_x64(True):
        loss, grad, _ = evaluate(logprobs, rows(old, mask, advantages))
    assert loss == pytest.approx(expected_loss, rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-9, atol=1e-13)


def test_float32_decides_clipping_as_float64_away_from_the_edge():
    rng = np.random.default_rng(0)
    old = rng.uniform(-3, -0.05, (ROWS, LENGTH)).astype(np.float32)
    logprobs = (old + np.array([[2e-4], [-2e-4], [6e-4], [-6e-4], [6e-4], [-6e-4]])).astype(np.float32)
    mask, advantages = np.ones(old.shape, bool), np.array([1, -1, 1, -1, -1, 1.0])
    loss, grad, stats = evaluate(logprobs, rows(old, mask, advantages))
    expected_loss, expected_grad = paper(logprobs, old, mask, advantages)
    np.testing.assert_allclose([loss, *grad.ravel()], [expected_loss, *expected_grad.ravel()], rtol=2e-6, atol=1e-7)
    assert stats["policy/clip_fraction"] == pytest.approx(2 / 6)


def test_alg_01_ratio_is_the_geometric_mean_not_the_product():
    """A hundred tokens each a log-ratio of 0.01 up: 1.010050, not 2.718282."""
    _, _, stats = evaluate(np.full((1, 100), 0.01), rows(np.zeros((1, 100)), np.ones((1, 100)), [1.0]))
    assert stats["policy/ratio_mean"] == stats["policy/ratio_min"] == pytest.approx(math.exp(0.01), rel=1e-6)
    assert stats["policy/ratio_max"] == pytest.approx(1.010050, abs=1e-6)


def test_alg_02_log_ratios_are_pooled_before_exp():
    """exp was taken per token and then averaged: 1.091253 instead of 1.068939."""
    _, _, stats = evaluate([[0.1, -0.2, 0.3]], rows(np.zeros((1, 3)), np.ones((1, 3)), [1.0]))
    assert stats["policy/ratio_mean"] == pytest.approx(1.068939, abs=1e-6)


@pytest.mark.parametrize("garbage", [5.0, -1e30, np.inf, np.nan])
@pytest.mark.parametrize("pads", [1, 3, 64])
def test_alg_03_pad_cells_never_matter(pads: int, garbage: float):
    """Padded length or padded cells entered the mean, and 0 times NaN is NaN, also in the gradient."""
    old, logprobs, mask = np.zeros((2, 3)), np.array([[0.1, -0.2, 0.3], [2e-4, 1e-4, 0.0]]), np.ones((2, 3), bool)
    plain = evaluate(logprobs, rows(old, mask, [-0.5, 1.5]))

    def pad(x, value):
        return np.concatenate([x, np.full((2, pads), value)], 1)

    batch = rows(pad(old, garbage), pad(mask, False), [-0.5, 1.5])
    dirty = np.where(batch.loss_mask, batch.advantages, garbage).astype(np.float32)
    loss, grad, stats = evaluate(pad(logprobs, -garbage), batch._replace(advantages=dirty))
    assert stats["policy/ratio_max"] == pytest.approx(1.068939, abs=1e-6)
    assert (loss, stats) == (plain[0], plain[2])
    np.testing.assert_array_equal(grad[:, :3], plain[1])
    assert not grad[:, 3:].any()


def test_alg_08_numerator_and_denominator_share_a_mask():
    """Ten kept tokens of a hundred: the other ninety neither dilute the ratio nor the gradient."""
    mask = np.arange(100)[None] < 10
    logprobs = np.where(mask, 1e-4, 7.0)
    _, grad, stats = evaluate(logprobs, rows(np.zeros((1, 100)), mask, [1.0]))
    assert stats["policy/log_ratio_abs"] == pytest.approx(1e-4, rel=1e-5)
    np.testing.assert_allclose(grad[0, :10], -math.exp(1e-4) / 10, rtol=1e-6)
    assert not grad[0, 10:].any()


def test_alg_09_nothing_to_train_on_is_zero_not_nan():
    """Every completion empty: loss 0, gradient exactly 0, and statistics that leave those of other parts as they are."""
    nan, advantages = np.full((ROWS, LENGTH), np.nan, np.float32), [1.0, -1.0, 0.0] * 2
    batch = rows(nan, np.zeros(nan.shape), advantages)
    loss, grad, _ = evaluate(nan, batch)
    assert loss == 0
    assert not grad.any()
    _, empty = jit_gspo(nan, batch)
    _, other = jit_gspo(np.full_like(nan, 1e-3), rows(np.zeros(nan.shape), np.ones(nan.shape), advantages))
    assert empty == nothing(other)
    assert merge(empty, other) == other


def test_empty_trajectory_counts_in_the_mean():
    """A sum of one trajectory's objective over a count of two: the paper's mean runs over everything that was sampled."""
    mask = np.array([[1, 1], [0, 0]], bool)
    total, _ = jit_gspo(np.zeros((2, 2), np.float32), rows(np.zeros((2, 2)), mask, [3.0, 5.0]))
    assert (float(total.total), float(total.count)) == (-3.0, 2.0)
    assert float(total.value) == -1.5


@pytest.mark.parametrize(("eps", "share"), [({}, 1.0), ({"eps_low": 0.2, "eps_high": 0.2}, 0.0)], ids=["paper", "ppo"])
def test_alg_17_default_band_is_of_the_scale_of_the_ratio(eps: dict, share: float):
    """Sequence ratios within 1e-3 of 1 never clip at PPO's 0.2; at the paper's 3e-4 and 4e-4 they do."""
    logprobs = np.log(np.array([[1.001], [0.999], [1.001], [0.999]]))
    _, _, stats = evaluate(logprobs, rows(np.zeros((4, 1)), np.ones((4, 1)), [1.0, -1.0, 2.0, -2.0]), **eps)
    assert stats["policy/clip_fraction"] == share


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [(1e-3, 1.0, True), (1e-3, -1.0, False), (-1e-3, 1.0, False), (-1e-3, -1.0, True), (1e-3, 0.0, False), (0.0, 1.0, False)],
)
def test_each_side_of_the_band_clips_one_sign(log_ratio: float, advantage: float, clipped: bool):
    loss, grad, stats = evaluate([[log_ratio] * 4], rows(np.zeros((1, 4)), np.ones((1, 4)), [advantage]))
    limit = 1 + HIGH if log_ratio > 0 else 1 - LOW
    assert loss == pytest.approx(-advantage * (limit if clipped else math.exp(log_ratio)), rel=1e-6)
    assert grad.any() == (not clipped and advantage != 0)
    assert stats["policy/clip_fraction"] == stats["policy/clip_fraction_tokens"] == clipped


def test_ratio_at_the_edge_keeps_its_whole_gradient():
    """min and clip split a tie in halves; deciding on log s does not."""
    with jax.enable_x64(True):
        for edge, advantage in ((math.log1p(HIGH), 1.0), (math.log1p(-LOW), -1.0)):
            _, grad, _ = evaluate([[edge]], rows([[0.0]], [[1]], [advantage]))
            assert grad[0, 0] == pytest.approx(-advantage * math.exp(edge), rel=1e-12)


def test_on_policy_is_the_sequence_mean_policy_gradient():
    """At the first minibatch: ratio exactly 1.0, gradient -A_i / (N n_i) on every sampled token."""
    rng = np.random.default_rng(1)
    logprobs = rng.uniform(-4, 0, (ROWS, LENGTH)).astype(np.float32)
    mask = np.arange(LENGTH)[None] < np.array([[1], [2], [3], [5], [7], [8]])
    advantages = np.array([1.5, -1, 0.5, -0.25, 2, -3])
    loss, grad, stats = evaluate(logprobs, rows(logprobs, mask, advantages))
    assert stats["policy/ratio_mean"] == stats["policy/ratio_max"] == 1.0
    assert stats["policy/log_ratio_abs"] == stats["policy/clip_fraction"] == 0.0
    assert loss == pytest.approx(-advantages.mean(), rel=1e-6)
    np.testing.assert_allclose(grad, -(advantages[:, None] * mask / mask.sum(1, keepdims=True)) / ROWS, rtol=1e-6)


@pytest.mark.parametrize("log_ratio", [11.0, 88.0, 1e4, np.inf])
def test_overflow_never_reaches_the_gradient(log_ratio: float):
    """Negative advantage, ratio beyond e^10: the value stays at e^10 and the gradient is 0. The other row is untouched."""
    batch = rows(np.zeros((2, 2)), np.ones((2, 2)), [-1.0, 1.0])
    loss, grad, stats = evaluate([[log_ratio] * 2, [0.0, 0.0]], batch)
    assert loss == pytest.approx((math.exp(MAX_LOG_RATIO) - 1) / 2, rel=1e-6)
    np.testing.assert_allclose(grad, [[0, 0], [-0.25, -0.25]], rtol=1e-6)
    assert stats["policy/ratio_max"] == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)


def test_the_bound_on_the_ratio_can_be_lifted():
    """Equation 5 to the letter: a negative advantage pays for the whole ratio, e^12, and keeps its gradient."""
    with jax.enable_x64(True):
        loss, grad, _ = evaluate([[12.0] * 2], rows(np.zeros((1, 2)), np.ones((1, 2)), [-1.0]), max_log_ratio=math.inf)
    assert loss == pytest.approx(math.exp(12), rel=1e-12)
    np.testing.assert_allclose(grad, np.full((1, 2), math.exp(12) / 2), rtol=1e-12)


@pytest.mark.parametrize("shift", [0.0, 3e-4])
def test_float32_keeps_the_ratio_of_long_sequences(shift: float):
    """32,768 tokens: subtracting per token and then adding is off by less than 1e-8, adding and then subtracting by 1e-6."""
    rng = np.random.default_rng(7)
    old = rng.uniform(-20, 0, (1, 32768)).astype(np.float32)
    logprobs = (old + shift + 3e-4 * rng.standard_normal(old.shape)).astype(np.float32)
    batch = rows(old, np.ones(old.shape), [1.0])
    exact = float(np.mean(logprobs.astype(np.float64) - old.astype(np.float64)))
    log_s, _, length = sequences(jnp.asarray(logprobs), batch)
    assert log_s.dtype == jnp.float32
    assert (float(length[1]), float(log_s[1])) == (32768, pytest.approx(exact, abs=1e-8))
    apart = float(pool(jnp.asarray(logprobs), batch)[1] - pool(jnp.asarray(old), batch)[1]) / 32768
    assert abs(apart - exact) > 1e-6


def test_segments_of_a_trajectory_are_one_sequence():
    """Two rows of one trajectory: one ratio, one length, one place in the count."""
    logprobs, mask = np.array([[0.1, -0.2], [0.3, 9.0]]), np.array([[1, 1], [1, 0]], bool)
    batch = rows(np.zeros((2, 2)), mask, [1.0, 1.0], trajectories=1)
    _, _, stats = evaluate(logprobs, batch._replace(trajectory_ids=np.where(mask, 1, 0).astype(np.int32)))
    assert stats["policy/ratio_mean"] == pytest.approx(1.068939, abs=1e-6)
    assert float(pool(jnp.asarray(logprobs), batch)[0]) == 0


def test_tok_18_statistics_use_the_sampled_tokens_only():
    """Five sampled and fifty observation tokens: nothing reported changes when the observation's values do."""
    mask = np.arange(55)[None] < 5
    rng = np.random.default_rng(3)
    inside = rng.normal(0, 1e-3, (1, 55))
    seen = []
    for outside in (0.0, -50.0, np.nan):
        old = np.where(mask, 0.0, rng.normal(size=(1, 55)))
        seen.append(evaluate(np.where(mask, inside, outside), rows(old, mask, [1.0]))[2])
    assert seen[0] == seen[1] == seen[2]


def test_parts_merge_into_the_statistics_of_the_whole():
    """Unequal parts: sums of sums, not means of means."""
    rng = np.random.default_rng(5)
    logprobs = rng.normal(0, 1e-3, (ROWS, LENGTH)).astype(np.float32)
    mask = np.arange(LENGTH)[None] < np.array([[1], [8], [3], [5], [0], [2]])
    batch = rows(np.zeros((ROWS, LENGTH)), mask, rng.normal(size=ROWS))

    def part(taken):
        total, stats = jit_gspo(logprobs, batch._replace(loss_mask=mask & taken[:, None], trajectories=np.float32(taken.sum())))
        return {**stats, "loss": total}

    first = np.arange(ROWS) == 0
    merged, whole = merge(part(first), part(~first)), part(first | True)
    for name, x in whole.items():
        assert isinstance(x, Mean | Peak | Trough)
        assert float(merged[name].value) == pytest.approx(float(x.value), rel=1e-5, abs=1e-9), name


def test_clip_fractions_by_length():
    """Lengths 16 and 17, 128 and 129 on the two sides of a bucket's border; of the tokens, 16 + 129 of 290 were clipped."""
    lengths, out = np.array([[16], [17], [128], [129]]), np.array([[1e-3], [0.0], [0.0], [1e-3]])
    mask = np.arange(130)[None] < lengths
    _, _, stats = evaluate(np.where(mask, out, 0), rows(np.zeros(mask.shape), mask, [1.0] * 4))
    found = [stats[f"policy/clip_fraction_{name}"] for name in ("to_16", "to_128", "to_1024", "longer")]
    assert found == [1.0, 0.0, 1.0, 0.0]
    assert stats["policy/clip_fraction"] == stats["policy/clip_fraction_high"] == 0.5
    assert stats["policy/clip_fraction_low"] == 0.0
    assert stats["policy/clip_fraction_tokens"] == pytest.approx(145 / 290)


def test_met_02_a_share_over_parts_is_a_sum_over_a_sum():
    """2 clipped of 20 and 4 of 5 are 6 of 25; the mean of the parts' shares would be 0.45."""
    parts = [{"clip": Mean(jnp.float32(clipped), jnp.float32(tokens))} for clipped, tokens in ((2, 20), (4, 5))]
    assert float(merge(*parts)["clip"].value) == np.float32(6) / np.float32(25)
