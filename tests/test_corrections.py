"""Weights for the sampler's mismatch: two sequence ratios with two names, what each filter rejects, and who still counts."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers_loss import QUICKLY, derivatives, rows, stacked

from gspo_jax import corrections as fix
from gspo_jax import losses
from gspo_jax.aggregation import budget_mean, row_mean, row_sum, token_mean
from gspo_jax.types import Batch

ROWS, LENGTH = 8, 6


def gaps(rho, mask, advantages=None) -> Batch:
    """A batch whose token log-ratios proximal - behavior are `rho`."""
    behavior = np.random.default_rng(0).uniform(-3, 0, np.shape(rho))
    advantages = np.ones(len(rho)) if advantages is None else advantages
    return rows(behavior + rho, mask, advantages, behavior_logprobs=behavior)


def example(seed: int):
    """Ragged, the first trajectory empty, gaps between 0 and large, some trajectories close to the sampler throughout."""
    rng = np.random.default_rng(seed)
    mask = rng.random((ROWS, LENGTH)) < 0.7
    mask[0] = False
    return rng.standard_normal((ROWS, LENGTH)) * np.array([1, 1, 0.01, 0.05, 0.1, 0.3, 0.6, 2])[:, None], mask


def inside(ratio, low: float, high: float) -> float:
    return ratio if low <= ratio <= high else 0.0


def kept(value: float, high: float, low: float = -math.inf) -> float:
    return float(low <= value <= high)


CORRECTIONS = {
    "token_truncate": (fix.token_truncate, lambda rho: [min(math.exp(x), 2.0) for x in rho]),
    "token_clip": (
        partial(fix.token_truncate, low=0.8, high=1.5),
        lambda rho: [min(max(math.exp(x), 0.8), 1.5) for x in rho],
    ),
    "token_mask": (fix.token_mask, lambda rho: [inside(math.exp(x), 0.5, 2.0) for x in rho]),
    "sequence_truncate": (fix.sequence_truncate, lambda rho: [min(math.prod(map(math.exp, rho)), 2.0)] * len(rho)),
    "sequence_clip": (
        partial(fix.sequence_truncate, low=0.8, high=1.5),
        lambda rho: [min(max(math.prod(map(math.exp, rho)), 0.8), 1.5)] * len(rho),
    ),
    "sequence_mask": (fix.sequence_mask, lambda rho: [inside(math.prod(map(math.exp, rho)), 0.5, 2.0)] * len(rho)),
    "geometric_filter": (
        partial(fix.geometric_filter, low=0.95, high=1.05),
        lambda rho: [kept(math.prod(map(math.exp, rho)) ** (1 / len(rho)), 1.05, 0.95)] * len(rho),
    ),
    "k3_filter": (fix.k3_filter, lambda rho: [kept(sum(math.exp(x) - 1 - x for x in rho) / len(rho), 0.01)] * len(rho)),
}  # fmt: skip
CORRECTIONS["product"] = (
    fix.product([CORRECTIONS["token_clip"][0], CORRECTIONS["geometric_filter"][0], CORRECTIONS["k3_filter"][0]]),
    lambda rho: np.prod([CORRECTIONS[name][1](rho) for name in ("token_clip", "geometric_filter", "k3_filter")], 0),
)
each = pytest.mark.parametrize("name", CORRECTIONS)


@partial(jax.jit, compiler_options=QUICKLY)
def _all(batch: Batch):
    return {name: correction(batch) for name, (correction, _) in CORRECTIONS.items()}


def weights_of(name: str, batch: Batch) -> np.ndarray:
    return np.asarray(_all(batch)[name])


def prepared(correction, batch: Batch, **options):
    """Weights and counts of a whole batch, and the report as numbers."""
    filled, metrics = jax.jit(fix.prepare(correction, **options), compiler_options=QUICKLY)(batch)
    return filled, {name.removeprefix("correction/"): float(x) for name, x in metrics.items()}


@each
def test_formula(name: str):
    """Weights of trained tokens by the definition, 0 elsewhere; the examples are kept, cut and rejected."""
    seen = set()
    for seed in range(6):
        rho, mask = example(seed)
        with jax.enable_x64(True):
            found = weights_of(name, gaps(rho, mask))
        for i, at in enumerate(map(np.flatnonzero, mask)):
            if at.size:
                np.testing.assert_allclose(found[i, at], CORRECTIONS[name][1](rho[i, at]), rtol=1e-10, atol=1e-14)
        assert not found[~mask].any()
        seen |= set(np.round(found[mask], 9))
    assert len(seen) >= 2


@each
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_masked_tokens_never_matter(name: str, garbage: float):
    rho, mask = example(0)
    batch = gaps(rho, mask)
    dirty = {k: np.where(mask, getattr(batch, k), garbage) for k in ("behavior_logprobs", "proximal_logprobs", "advantages")}
    np.testing.assert_array_equal(weights_of(name, batch._replace(**dirty)), weights_of(name, batch))


@each
def test_equal_policies_have_weight_one(name: str):
    """No mismatch, no correction: exactly 1 on what is trained."""
    mask = example(0)[1]
    np.testing.assert_array_equal(weights_of(name, gaps(np.zeros(mask.shape), mask)), mask)


def test_alg_01_the_correction_is_a_product_and_gspos_ratio_a_mean():
    """A hundred tokens of 0.01: a weight of e, held at a cap of 2; the same numbers as a policy ratio are 1.010050."""
    batch = gaps(np.full((1, 100), 0.01), np.ones((1, 100)))
    raw = float(fix.sequence_ratio(batch)[1])
    assert raw == pytest.approx(2.718282, abs=2e-5)
    np.testing.assert_allclose(fix.sequence_truncate(batch, high=math.inf), np.full((1, 100), raw))
    np.testing.assert_array_equal(fix.sequence_truncate(batch, high=2.0), np.full((1, 100), 2.0))
    assert float(fix.geometric_ratio(batch)[1]) == pytest.approx(1.010050, abs=1e-6)
    _, _, _, stats = derivatives(
        losses.gspo, batch.proximal_logprobs, batch._replace(proximal_logprobs=batch.behavior_logprobs)
    )
    assert stats["policy/ratio_mean"] == pytest.approx(1.010050, abs=1e-6)


def test_alg_02_log_ratios_are_added_before_exp():
    """0.1, -0.2, 0.3: the product is 1.221403 and the geometric mean 1.068939, not 3.273760 or 1.091253."""
    batch = gaps([[0.1, -0.2, 0.3]], np.ones((1, 3)))
    assert float(fix.sequence_ratio(batch)[1]) == pytest.approx(1.221403, abs=1e-6)
    assert float(fix.geometric_ratio(batch)[1]) == pytest.approx(1.068939, abs=1e-6)


def test_the_geometric_filter_does_not_depend_on_length():
    """The same gap of 0.009 at every token: within 1 percent at any length; its product leaves [0.5, 2] after 77 tokens."""
    n = np.array([1, 77, 78, 300])
    mask = np.arange(300)[None] < n[:, None]
    batch = gaps(np.full(mask.shape, 0.009), mask)
    assert math.exp(0.009 * 77) < 2 < math.exp(0.009 * 78)
    np.testing.assert_array_equal(fix.geometric_filter(batch), mask)
    np.testing.assert_array_equal(fix.sequence_mask(batch) > 0, mask & (n < 78)[:, None])


def test_k3_filter_looks_at_the_size_of_the_gap_not_its_sign():
    """Gaps of +0.5 and -0.5 cancel in the geometric mean, whose filter keeps the trajectory; k3 adds 0.13 to them."""
    batch = gaps([[0.5, -0.5]], np.ones((1, 2)))
    assert (math.expm1(0.5) - 0.5 + math.expm1(-0.5) + 0.5) / 2 > 0.01
    assert np.asarray(fix.geometric_filter(batch)).all()
    assert not np.asarray(fix.k3_filter(batch)).any()


def test_k3_filter_estimates_the_kl_of_the_sampler_to_the_trainer():
    """Samples are the sampler's, so a gap g is worth e^g - 1 - g: +0.142 is just above 0.01 and -0.142 just below."""
    assert math.expm1(0.142) - 0.142 > 0.01 > math.expm1(-0.142) + 0.142
    assert np.asarray(fix.k3_filter(gaps([[0.142], [-0.142]], np.ones((2, 1))))).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("sign", [1, -1])
def test_huge_gaps_stay_finite(sign: int):
    """e^1000 and the product of six are beyond float32: kept within e^20, and the metrics are numbers."""
    batch = gaps(np.full((2, 6), sign * 1000.0), np.ones((2, 6)))
    for correction in (partial(fix.token_truncate, high=math.inf), partial(fix.sequence_truncate, high=math.inf)):
        np.testing.assert_allclose(correction(batch), np.full((2, 6), math.exp(sign * 20)), rtol=1e-5)
    _, metrics = prepared(partial(fix.sequence_truncate, high=math.inf), stacked(batch))
    assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_refused(dtype):
    batch = gaps(np.zeros((1, 2)), np.ones((1, 2)))
    with pytest.raises(TypeError, match="must be float32"):
        fix.log_rho(batch._replace(proximal_logprobs=np.zeros((1, 2), dtype)))


def test_missing_proximal_logprobs_are_named():
    batch = gaps(np.zeros((1, 2)), np.ones((1, 2)))._replace(proximal_logprobs=None)
    with pytest.raises(ValueError, match=r"batch\.proximal_logprobs"):
        fix.token_truncate(batch)


# The mask of stale trajectories


_off_policy = jax.jit(partial(fix.off_policy_filter, most=0.1), compiler_options=QUICKLY)


def off_policy(batch: Batch, logprobs):
    return np.asarray(_off_policy(np.asarray(logprobs, np.float32), batch))


def test_off_policy_filter_drops_negative_trajectories_that_fell():
    """Mean of proximal - logprobs above 0.1 and A < 0; by the mean of a trajectory, whatever its single tokens do."""
    fall = np.array([[0.3, 0.1], [0.3, 0.1], [0.3, -0.2], [-0.3, -0.3], [0.3, 0.1], [0.3, 0.1]], np.float32)
    mask = np.ones(fall.shape)
    mask[5] = 0
    batch = rows(np.zeros(fall.shape), mask, [-1.0, 1.0, -1.0, -1.0, 0.0, -1.0])
    np.testing.assert_array_equal(off_policy(batch, -fall), [[0, 0], [1, 1], [1, 1], [1, 1], [1, 1], [0, 0]])


def test_off_policy_filter_ignores_masked_tokens():
    fall, mask = np.array([[0.2, 9.0], [0.0, 9.0]], np.float32), np.array([[1, 0], [1, 0]])
    batch = rows(np.zeros(fall.shape), mask, [-1.0, -1.0])
    batch = batch._replace(advantages=np.where(mask, batch.advantages, np.nan))
    for garbage in (-9.0, np.nan, np.inf):
        np.testing.assert_array_equal(off_policy(batch, np.where(mask, -fall, garbage)), [[0, 0], [1, 0]])


STALE = fix.off_policy_masked(losses.grpo, 0.1)


@pytest.mark.parametrize("weight", [None, 3.0])
def test_off_policy_masked_keeps_the_denominator(weight: float | None):
    """Of two trajectories the negative one fell by 0.15: the other's loss is still divided by two, its weight kept."""
    x = np.array([[-0.15, -0.15], [0.05, 0.05]])
    extra = {} if weight is None else {"weights": np.full(x.shape, weight)}
    loss, grad, _, stats = derivatives(STALE, x, rows(np.zeros(x.shape), np.ones(x.shape), [-1.0, 1.0], **extra))
    assert loss == pytest.approx(-(weight or 1) * math.exp(0.05) / 2, rel=1e-6)
    np.testing.assert_allclose(grad, [[0, 0], [-(weight or 1) * math.exp(0.05) / 4] * 2], rtol=1e-6)
    assert stats["correction/off_policy_fraction"] == 0.5


# Over a whole batch

BANDED = fix.product([fix.token_truncate, partial(fix.geometric_filter, low=0.9, high=1.1)])
OPTIONS = {"plain": {}, "row_mean": {"normalize": row_mean}, "token_mean": {"normalize": token_mean}, "leave": {"leave": True}}


@partial(jax.jit, compiler_options=QUICKLY)
def variants(batch: Batch):
    return {name: fix.prepare(BANDED, **options)(batch) for name, options in OPTIONS.items()}


def mean_weight(name: str, weights: np.ndarray, mask: np.ndarray) -> float:
    """Of whole trajectories `[r t]`, as the loss weighs tokens; an empty one has none."""
    n = mask.sum(1)
    each = weights.sum(1) / np.maximum(n, 1)
    return float(each[n > 0].mean() if name == "row_mean" else weights.sum() / n.sum())


@pytest.mark.parametrize("name", ["row_mean", "token_mean"])
def test_normalized_weights_have_mean_one(name: str):
    """Over the batch, under the loss's own aggregation, and in the proportions of the raw weights, which are reported."""
    rho, mask = example(3)
    found = variants(stacked(gaps(rho, mask), 2, 2))
    raw, filled = (np.asarray(found[k][0].weights).reshape(mask.shape) for k in ("plain", name))
    assert mean_weight(name, filled, mask) == pytest.approx(1, rel=1e-6)
    factor = mean_weight(name, raw, mask)
    assert abs(factor - 1) > 0.01
    np.testing.assert_allclose(filled, raw / factor, rtol=1e-6)
    assert float(found[name][1]["correction/weight_mean"]) == pytest.approx(raw[mask].mean(), rel=1e-6)


@pytest.mark.parametrize("aggregate", [row_sum, partial(budget_mean, budget=12.0)], ids=["row_sum", "budget_mean"])
def test_normalizing_unit_weights_changes_nothing(aggregate):
    mask = example(1)[1]
    filled, _ = prepared(fix.token_truncate, stacked(gaps(np.zeros(mask.shape), mask)), normalize=aggregate)
    np.testing.assert_allclose(np.asarray(filled.weights)[0, 0], mask, rtol=1e-6)


REJECTING = partial(fix.token_mask, low=0.5, high=2.0)
REJECTED = np.array([[0.0, 5.0, 0.0], [5.0, 5.0, 5.0], [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]])
TRAINED = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]], bool)


@pytest.mark.parametrize("split", [(1, 1), (2, 2)])
def test_alg_08_rejected_tokens_that_leave_are_not_counted(split: tuple[int, int]):
    """A rejected token leaves its trajectory's length, a wholly rejected trajectory leaves N; the empty one stays in N."""
    filled, metrics = prepared(REJECTING, stacked(gaps(REJECTED, TRAINED), *split), leave=True)
    found = np.asarray(filled.loss_mask).reshape(4, 3)
    np.testing.assert_array_equal(found, [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]])
    assert float(np.sum(filled.trajectories)) == 3.0
    if split == (2, 2):
        np.testing.assert_array_equal(filled.trajectories, [[1, 0], [1, 1]])
    assert metrics["rejected_fraction"] == pytest.approx(3 / 8)


def test_rejected_tokens_that_stay_count_with_term_zero():
    batch = stacked(gaps(REJECTED, TRAINED))
    filled, metrics = prepared(REJECTING, batch, leave=False)
    np.testing.assert_array_equal(filled.loss_mask, batch.loss_mask)
    np.testing.assert_array_equal(filled.trajectories, batch.trajectories)
    ratio = math.exp(0.1)
    expected = [[1, 0, 1], [0, 0, 0], [ratio] * 3, [0, 0, 0]]
    np.testing.assert_allclose(filled.weights[0, 0], expected, rtol=1e-6, atol=0)
    assert metrics["rejected_fraction"] == pytest.approx(3 / 8)


@pytest.mark.parametrize(("leave", "by_tokens", "by_rows"), [(False, 5 / 8, (2 / 3 + 1) / 4), (True, 1.0, 2 / 3)])
def test_alg_08_losses_of_what_was_rejected(leave: bool, by_tokens: float, by_rows: float):
    """Loss 1 at every token that is kept, none elsewhere: 5 of 8 tokens count, or 5 of 5; of the four trajectories one of two
    thirds and a whole one, or of the three that are left two whole ones."""
    rho = np.where(REJECTED > 1, REJECTED, 0)
    batch = stacked(gaps(rho, TRAINED, [-1.0] * 4))
    filled, _ = prepared(REJECTING, batch, leave=leave)
    micro = jax.tree.map(lambda x: np.asarray(x)[0, 0], filled)
    among = (losses.dapo, losses.grpo)
    found = [derivatives(loss, micro.proximal_logprobs, micro, among)[0] for loss in among]
    assert found == pytest.approx([by_tokens, by_rows], rel=1e-6)


def test_normalized_weights_have_mean_one_among_what_is_left():
    filled, _ = prepared(REJECTING, stacked(gaps(REJECTED, TRAINED)), normalize=token_mean, leave=True)
    assert mean_weight("token_mean", np.asarray(filled.weights)[0, 0], np.asarray(filled.loss_mask)[0, 0]) == pytest.approx(1)


def test_alg_10_splits_give_the_same_weights():
    """Minibatches and micro-batches are bookkeeping: weights, masks, counts and the report are those of the batch."""
    rho, mask = example(3)
    whole, *others = (variants(stacked(gaps(rho, mask), *split)) for split in ((1, 1), (2, 2), (2, 4)))
    for found in others:
        for name, (batch, metrics) in found.items():
            one, report = whole[name]
            assert 0 < report["correction/rejected_fraction"] < 1
            np.testing.assert_allclose(np.reshape(batch.weights, mask.shape), one.weights[0, 0], rtol=1e-6)
            np.testing.assert_array_equal(np.reshape(batch.loss_mask, mask.shape), one.loss_mask[0, 0])
            assert float(np.sum(batch.trajectories)) == float(one.trajectories[0, 0])
            assert {k: float(x) for k, x in metrics.items()} == pytest.approx(
                {k: float(x) for k, x in report.items()}, rel=1e-6
            )


def test_alg_01_report():
    """Trajectories of 2, 4, 1 and no tokens. Products e^0.4, e^4 and e^-1, capped at 2; every number by hand."""
    mask = np.arange(4)[None] < np.array([[2], [4], [1], [0]])
    rho = np.array([[0.5, -0.1, 0, 0], [1.0, 1.0, 1.0, 1.0], [-1.0, 0, 0, 0], [9.0] * 4])
    _, metrics = prepared(fix.sequence_truncate, stacked(gaps(rho, mask), 2, 2))
    used = np.array([math.exp(0.4)] * 2 + [2.0] * 4 + [math.exp(-1)])
    assert metrics == pytest.approx(
        {
            "token_ratio_max": math.e,
            "sequence_ratio_max": math.exp(4),
            "weight_mean": used.mean(),
            "effective_share": used.sum() ** 2 / (7 * (used**2).sum()),
            "rejected_fraction": 0.0,
        },
        rel=1e-5,
    )


def test_largest_sequence_ratio_below_one_is_reported():
    """Every trajectory less likely by e^-1 than when sampled: the largest ratio is e^-1."""
    _, metrics = prepared(fix.sequence_truncate, stacked(gaps(np.full((2, 2), -0.5), np.ones((2, 2)))))
    assert metrics["sequence_ratio_max"] == pytest.approx(math.exp(-1), rel=1e-5)


def test_effective_share_is_one_for_equal_weights_and_one_over_n_for_one():
    """(sum w)^2 / (n sum w^2): scale does not matter, and rejecting all but one of six leaves a sixth."""
    even = stacked(gaps(np.full((2, 3), 0.3), np.ones((2, 3))))
    assert prepared(fix.token_truncate, even)[1]["effective_share"] == pytest.approx(1, rel=1e-6)
    one = stacked(gaps(np.where(np.arange(6).reshape(2, 3) == 4, 0.0, 5.0), np.ones((2, 3))))
    assert prepared(fix.token_mask, one)[1]["effective_share"] == pytest.approx(1 / 6, rel=1e-6)


def test_alg_09_nothing_trained_is_reported_in_numbers():
    filled, metrics = prepared(
        fix.token_mask, stacked(gaps(np.zeros((2, 3)), np.zeros((2, 3)))), normalize=token_mean, leave=True
    )
    assert not np.asarray(filled.weights).any()
    assert float(filled.trajectories[0, 0]) == 2.0
    assert np.isfinite(list(metrics.values())).all()


def test_weights_carry_no_gradient():
    """They are ratios of proximal to behavior, which are constants; and would be even if proximal were not."""
    batch = gaps(np.full((1, 3), 0.1), np.ones((1, 3)))

    def total(proximal):
        return sum(jnp.sum(x) for x in _all.__wrapped__(batch._replace(proximal_logprobs=proximal)).values())

    assert not np.asarray(jax.jit(jax.grad(total), compiler_options=QUICKLY)(batch.proximal_logprobs)).any()


def test_alg_01_the_share_of_bounded_weights_is_reported():
    """Two of four tokens beyond the cap; a bound that nothing reaches; a filter, which bounds nothing."""
    rho = np.array([[math.log(3), 0.1, math.log(4), -0.1]])
    correction = partial(fix.token_truncate, high=2.0)
    _, metrics = fix.prepare(correction, raw=fix.token_weight)(stacked(gaps(rho, np.ones((1, 4)))))
    assert float(metrics["correction/bounded_fraction"]) == 0.5
    assert float(metrics["correction/weight_mean"]) == pytest.approx((4 + math.exp(0.1) + math.exp(-0.1)) / 4, rel=1e-6)
    _, whole = fix.prepare(partial(fix.sequence_truncate, high=1e6), raw=fix.sequence_weight)(
        stacked(gaps(rho, np.ones((1, 4))))
    )
    assert float(whole["correction/bounded_fraction"]) == 0
    assert "correction/bounded_fraction" not in fix.prepare(fix.geometric_filter)(stacked(gaps(rho, np.ones((1, 4)))))[1]
