"""Every objective against its published formula in plain numpy, and what all of them have to keep."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers_loss import LENGTH, ROWS, derivatives, rows

from gspo_jax import losses
from gspo_jax.aggregation import budget_mean, lengths, pool, pool_max, row_mean, row_sum, spread, token_mean

# The published formulas: of one trajectory's log-ratios x, log-probabilities and advantages, the token terms that are
# maximised, their derivatives with respect to the own token's log-probability, and where the objective clips.


def surrogate(r, a, low: float, high: float, dual: float | None = None):
    """min(r A, clip(r) A), and with a dual clip max(that, c A) for negative A."""
    bounded = np.clip(r, 1 - low, 1 + high) * a
    value, flat = np.minimum(r * a, bounded), r * a > bounded
    if dual is not None:
        flat |= (a < 0) & (dual * a > value)
        value = np.where(a < 0, np.maximum(value, dual * a), value)
    return value, np.where(flat, 0, r * a), flat


def ppo(x, lp, a, low=0.2, high=0.2, dual=None):
    return surrogate(np.exp(x), a, low, high, dual)


def gspo(x, lp, a, low=3e-4, high=4e-4):
    """Equations 5, 13 and 14: the geometric mean stands at every token."""
    return surrogate(np.full(x.shape, math.prod(np.exp(x)) ** (1 / x.size)), a, low, high)


def gmpo(x, lp, a, width=0.4):
    sign = np.where(a >= 0, 1, -1)
    c = sign * np.minimum(sign * x, sign * np.clip(x, -width, width))
    mean = math.prod(np.exp(c)) ** (1 / x.size)
    return mean * a, mean * a * (c == x), (c != x) & (a != 0)


def cispo(x, lp, a, floor=0.0, cap=5.0):
    weight = np.clip(np.exp(x), floor, cap)
    return weight * a * lp, weight * a, weight != np.exp(x)


def sapo(x, lp, a, positive=1.0, negative=1.05):
    tau = np.where(a > 0, positive, negative)
    p = 1 / (1 + np.exp(-tau * (np.exp(x) - 1)))
    return a * 4 / tau * p, a * 4 * p * (1 - p) * np.exp(x), np.zeros(x.shape, bool)


def minirl(x, lp, a, low=0.2, high=0.27):
    r = np.exp(x)
    dropped = ((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low))
    return np.where(dropped, 0, r * a * lp), np.where(dropped, 0, r * a), dropped


def reinforce(x, lp, a):
    return a * lp, a, np.zeros(x.shape, bool)


# What a term is divided by: of a trajectory with n trained tokens, of N trajectories with `total` trained tokens

DENOMINATORS: dict[str, Callable[[int, int, int], float]] = {
    "row_mean": lambda n, rows, total: n * rows,
    "row_sum": lambda n, rows, total: rows,
    "token_mean": lambda n, rows, total: total,
    "budget_mean": lambda n, rows, total: rows * 11.0,
}


class Case(NamedTuple):
    loss: losses.Loss
    terms: Callable
    denominator: str
    scale: tuple[float, float] = (0.1, 0.3)
    """Spread of the log-ratios between trajectories, and between a trajectory's tokens."""
    sequence: bool = False
    """One advantage per trajectory; token weights enter by their mean over it."""
    clips: bool = True


NARROW = (5e-4, 1e-4)
budget = partial(budget_mean, budget=11.0)
FAMILY = {
    "gspo": Case(losses.gspo, gspo, "row_mean", NARROW, True),
    "gspo_token": Case(losses.gspo_token, gspo, "row_mean", NARROW),
    "gspo_token_by_tokens": Case(partial(losses.gspo_token, aggregate=token_mean), gspo, "token_mean", NARROW),
    "luspo": Case(losses.luspo, partial(gspo, low=2e-3, high=2.5e-3), "row_sum", (3e-3, 1e-3), True),
    "gmpo": Case(losses.gmpo, gmpo, "row_mean", (0.1, 0.4), True),
    "ppo": Case(losses.ppo, ppo, "token_mean"),
    "ppo_dual": Case(partial(losses.ppo, ratio_max=3.0), partial(ppo, dual=3.0), "token_mean", (0.1, 1.0)),
    "grpo": Case(losses.grpo, ppo, "row_mean"),
    "grpo_dual": Case(partial(losses.grpo, ratio_max=1.5), partial(ppo, dual=1.5), "row_mean"),
    "dapo": Case(losses.dapo, partial(ppo, high=0.28), "token_mean"),
    "dr_grpo": Case(partial(losses.dr_grpo, budget=11.0), ppo, "budget_mean"),
    "cispo": Case(losses.cispo, cispo, "token_mean", (0.5, 1.5)),
    "cispo_floor": Case(
        partial(losses.cispo, floor=0.7, cap=1.2, aggregate=row_sum), partial(cispo, floor=0.7, cap=1.2), "row_sum"
    ),
    "sapo": Case(losses.sapo, sapo, "row_mean", clips=False),
    "sapo_hard": Case(
        partial(losses.sapo, tau_positive=3.0, tau_negative=7.0, aggregate=budget),
        partial(sapo, positive=3.0, negative=7.0), "budget_mean", clips=False,
    ),
    "minirl": Case(losses.minirl, minirl, "row_sum"),
    "reinforce": Case(losses.reinforce, reinforce, "row_mean", clips=False),
    "reinforce_by_tokens": Case(partial(losses.reinforce, aggregate=token_mean), reinforce, "token_mean", clips=False),
}  # fmt: skip
ALL = tuple(case.loss for case in FAMILY.values())
every = pytest.mark.parametrize("name", FAMILY)


def published(case: Case, logprobs, old, mask, advantages, weights):
    """Loss, gradient and the share of clipped tokens, trajectory by trajectory; those without trained tokens only count."""
    loss, grad, clipped = 0.0, np.zeros(np.shape(logprobs)), 0
    for i, at in enumerate(map(np.flatnonzero, mask)):
        if not at.size:
            continue
        value, slope, flat = case.terms(logprobs[i, at] - old[i, at], logprobs[i, at], advantages[i, at])
        w = np.full(at.size, weights[i, at].mean()) if case.sequence else weights[i, at]
        divisor = DENOMINATORS[case.denominator](at.size, len(mask), int(mask.sum()))
        loss -= (w * value).sum() / divisor
        grad[i, at] = -w * slope / divisor
        clipped += flat.sum()
    return loss, grad, clipped / mask.sum()


class Example(NamedTuple):
    logprobs: np.ndarray
    old: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray


def draw(case: Case, seed: int) -> Example:
    """Ragged and with holes; the first trajectory is empty, the second a single token; some advantages and weights are 0."""
    rng = np.random.default_rng(seed)
    between, within = case.scale
    old = rng.uniform(-3, -0.05, (ROWS, LENGTH))
    logprobs = old + between * rng.standard_normal((ROWS, 1)) + within * rng.standard_normal(old.shape)
    mask = rng.random(old.shape) < rng.uniform(0.3, 1)
    mask[0], mask[1] = False, np.arange(LENGTH) == seed % LENGTH
    shape = (ROWS, 1) if case.sequence or seed % 2 else old.shape
    advantages = np.broadcast_to(rng.standard_normal(shape) * (rng.random(shape) < 0.9), old.shape)
    return Example(logprobs, old, mask, advantages, rng.uniform(0, 2, old.shape) * (rng.random(old.shape) < 0.9))


def run(name: str, x: Example, **changes):
    """In float64: the loss, gradients with respect to log-probabilities and weights, statistics. `changes` to the batch."""
    with jax.enable_x64(True):
        batch = rows(x.old, x.mask, x.advantages, weights=x.weights)
        return derivatives(FAMILY[name].loss, x.logprobs, batch._replace(**changes), ALL)


@every
def test_published_formula(name: str):
    case, clipped = FAMILY[name], 0.0
    for seed in range(12):
        x = draw(case, seed)
        loss, grad, _, stats = run(name, x)
        expected = published(case, *x)
        assert loss == pytest.approx(expected[0], rel=1e-10, abs=1e-13)
        np.testing.assert_allclose(grad, expected[1], rtol=1e-9, atol=1e-14)
        assert stats["policy/clip_fraction_tokens"] == pytest.approx(expected[2], abs=1e-12)
        clipped += expected[2] / 12
    assert 0.02 < clipped < 0.98 if case.clips else clipped == 0, "the examples have to lie on both sides of the clip"


@every
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_tokens_have_no_gradient_and_no_say(name: str, garbage: float):
    """0 times NaN is NaN: garbage has to be selected away from values, gradients and statistics, bit for bit."""
    x = draw(FAMILY[name], 3)
    clean = run(name, x)
    parts = {k: np.where(x.mask, v, garbage) for k, v in x._asdict().items() if k in ("advantages", "weights")}
    other = {"behavior_logprobs": np.where(x.mask, 0.0, garbage), "proximal_logprobs": np.where(x.mask, x.old, garbage)}
    loss, grad, _, stats = run(name, x._replace(logprobs=np.where(x.mask, x.logprobs, -garbage)), **parts, **other)
    assert (loss, stats) == (clean[0], clean[3])
    np.testing.assert_array_equal(grad, clean[1])
    assert not grad[~x.mask].any()
    assert np.isfinite(loss)


@every
def test_empty_trajectory_only_counts(name: str):
    """Whatever stands in it changes nothing; taking it out of N is all that can be done to it."""
    x = draw(FAMILY[name], 3)
    changed = x._replace(**{k: np.concatenate([[row[0] * 0 + 7.0], row[1:]]) for k, row in x._asdict().items() if k != "mask"})
    first, second = run(name, x), run(name, changed)
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])
    fewer = run(name, x, trajectories=np.float64(ROWS - 1))
    share = 1 if FAMILY[name].denominator == "token_mean" else (ROWS - 1) / ROWS
    assert first[0] == pytest.approx(fewer[0] * share, rel=1e-14)


@every
def test_alg_09_nothing_to_train_on_is_zero_not_nan(name: str):
    x = draw(FAMILY[name], 3)
    loss, grad, _, _ = run(name, x._replace(mask=np.zeros_like(x.mask), logprobs=np.full_like(x.old, np.nan)))
    assert loss == 0
    assert not grad.any()


@every
def test_advantages_scale_the_gradient(name: str):
    """Twice, or a thousandth of, every advantage is that of the loss and of its gradient: no constant is hidden."""
    x = draw(FAMILY[name], 4)
    loss, grad, _, _ = run(name, x)
    assert grad.any()
    for c in (2.0, 1e-3):
        scaled = run(name, x._replace(advantages=c * x.advantages))
        assert scaled[0] == pytest.approx(c * loss, rel=1e-12)
        np.testing.assert_allclose(scaled[1], c * grad, rtol=1e-12)


@every
def test_a_step_raises_what_did_well_and_lowers_what_did_badly(name: str):
    """One gradient-descent step on the logits of a softmax policy: a double negation would do the opposite."""
    rng = np.random.default_rng(2)
    logits, action = rng.standard_normal((ROWS, LENGTH, 3)), rng.integers(3, size=(ROWS, LENGTH))

    def chosen(logits):
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.take_along_axis(logprobs, action[..., None], -1)[..., 0], np.exp(logprobs)

    before, p = chosen(logits)
    sign = np.where(np.arange(ROWS) % 2, 1.0, -1.0)[:, None]
    ones = np.ones(before.shape)
    _, grad, _, _ = run(name, Example(before, before, ones > 0, ones * sign, ones))
    after, _ = chosen(logits - 0.1 * grad[..., None] * (np.eye(3)[action] - p))
    assert (sign * (after - before) > 0).all()


@every
def test_first_minibatch_is_the_plain_policy_gradient(name: str):
    """In float32, at equal log-probabilities: every ratio is 1.0 to the bit, nothing clips, and no weights are ones."""
    x = draw(FAMILY[name], 5)
    logprobs = x.old.astype(np.float32)
    _, grad, _, stats = derivatives(FAMILY[name].loss, logprobs, rows(logprobs, x.mask, x.advantages), ALL)
    assert stats["policy/ratio_min"] == stats["policy/ratio_mean"] == stats["policy/ratio_max"] == 1.0
    assert stats["policy/log_ratio_abs"] == stats["policy/clip_fraction"] == stats["policy/clip_fraction_tokens"] == 0.0
    plain = FAMILY[name]._replace(terms=reinforce)
    expected = published(plain, logprobs, logprobs, x.mask, x.advantages, np.ones_like(x.weights))
    np.testing.assert_allclose(grad, expected[1], rtol=2e-6, atol=1e-9)


def test_gspo_on_policy_has_the_gradient_of_reinforce():
    x = draw(FAMILY["gspo"], 6)
    batch = rows(x.old, x.mask, x.advantages)
    gspo, plain = (derivatives(loss, batch.proximal_logprobs, batch, ALL)[1] for loss in (losses.gspo, losses.reinforce))
    assert gspo.any()
    np.testing.assert_allclose(gspo, plain, rtol=1e-6)


@every
def test_weights_are_detached(name: str):
    """A weight that depends on the policy must not be differentiated, even when it is not yet a constant."""
    x = draw(FAMILY[name], 4)
    assert not np.asarray(run(name, x)[2]).any()


@every
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_refused(name: str, dtype):
    batch = rows(np.zeros((2, 3)), np.ones((2, 3)), [1.0, -1.0])
    with pytest.raises(TypeError, match="must be float32"):
        FAMILY[name].loss(jnp.zeros((2, 3), dtype), batch)


@every
def test_missing_proximal_logprobs_are_named(name: str):
    batch = rows(np.zeros((2, 3)), np.ones((2, 3)), [1.0, -1.0])._replace(proximal_logprobs=None)
    with pytest.raises(ValueError, match="proximal_logprobs"):
        FAMILY[name].loss(jnp.zeros((2, 3)), batch)


@every
@pytest.mark.parametrize("far", [1e4, np.inf])
def test_overflow_never_reaches_the_gradient(name: str, far: float):
    """One trajectory's log-ratios are huge: every gradient is finite, and those of the others are what they were."""
    x = draw(FAMILY[name], 5)
    others = np.arange(ROWS) != 2
    loss, grad, _, _ = run(name, x._replace(old=np.where(others[:, None], x.old, -far)))
    assert np.isfinite([loss, *grad.ravel()]).all()
    np.testing.assert_array_equal(grad[others], run(name, x)[1][others])


# Dual clip


def test_dual_clip_and_two_sided_clip_are_one_formula():
    """arXiv 1912.09729 with c, INTELLECT-2 with delta, and ours: equal above 1 + eps; positive advantages do not notice."""
    r, limit = np.array([[0.1, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0, 2.9, 3.1, 6.0, 50.0]]), 3.0
    for a in (-2.0, -0.1, 0.0, 0.1, 2.0):
        clipped = np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)
        dual = np.maximum(clipped, limit * a) if a < 0 else clipped
        two_sided = np.minimum(np.minimum(r, limit) * a, np.clip(r, 0.8, 1.2) * a)
        np.testing.assert_allclose(dual, two_sided, rtol=1e-15)
        with jax.enable_x64(True):
            batch = rows(np.zeros(r.shape), np.ones(r.shape), [a])
            found, plain = (derivatives(loss, np.log(r), batch) for loss in (FAMILY["ppo_dual"].loss, losses.ppo))
        assert found[0] == pytest.approx(-dual.mean(), rel=1e-12)
        np.testing.assert_allclose(found[1], np.where((a < 0) & (r > limit), 0, plain[1]), rtol=1e-12)
        assert (found[0] == plain[0]) == (a >= 0)


@pytest.mark.parametrize("limit", [1.0, 1.2])
def test_dual_clip_inside_the_band_is_refused(limit: float):
    with pytest.raises(ValueError, match=r"ratio_max=1\.\d must be above 1 \+ eps_high"):
        losses.ppo(jnp.zeros((1, 2)), rows(np.zeros((1, 2)), np.ones((1, 2)), [1.0]), ratio_max=limit)


# GSPO-token


def test_gspo_token_is_gspo_for_one_advantage_per_trajectory():
    """Loss and gradient to 1e-15, on ragged, masked and empty rows, on both sides of the band."""
    for seed in range(1, 20, 2):
        x = draw(FAMILY["gspo"], seed)
        x = x._replace(weights=np.broadcast_to(x.weights[:, :1], x.weights.shape))
        gspo, token = run("gspo", x), run("gspo_token", x)
        assert token[0] == pytest.approx(gspo[0], rel=0, abs=1e-15)
        np.testing.assert_allclose(token[1], gspo[1], rtol=0, atol=1e-15)
        assert token[3]["policy/clip_fraction"] == pytest.approx(gspo[3]["policy/clip_fraction"], abs=1e-15)


def test_gspo_token_by_tokens_weighs_trajectories_by_length():
    """The mean over tokens of the sequence objective: (sum_i n_i obj_i) / (sum_i n_i), with its own gradient."""

    def expected(logprobs, x: Example):
        n = x.mask.sum(1)
        s = jnp.exp((x.mask * (logprobs - x.old)).sum(1) / np.maximum(n, 1))
        a = x.advantages[:, 0]
        objective = jnp.where(a >= 0, jnp.where(s > 1 + 4e-4, 1 + 4e-4, s), jnp.where(s < 1 - 3e-4, 1 - 3e-4, s)) * a
        return -(n * objective).sum() / n.sum()

    for seed in range(4):
        x = draw(FAMILY["gspo"], seed)
        loss, grad, _, _ = run("gspo_token_by_tokens", x._replace(weights=np.ones_like(x.weights)))
        with jax.enable_x64(True):
            value, slope = jax.value_and_grad(expected)(jnp.asarray(x.logprobs), x)
        assert loss == pytest.approx(float(value), rel=1e-14)
        np.testing.assert_allclose(grad, slope, rtol=1e-12, atol=1e-18)


def test_gspo_token_clips_each_token_by_its_own_sign():
    """s = 1.001 above a band of 4e-4: positive tokens are held at 1.0004 without gradient, negative ones pay 1.001. With
    one advantage for all, the mean, it would be another number."""
    log_s, a = math.log(1.001), np.array([1.0, -1.0, 2.0, -3.0])
    x = log_s + np.array([2e-4, -2e-4, 1e-4, -1e-4])  # the mean is log_s, no token's is
    with jax.enable_x64(True):
        batch = rows(np.zeros((1, 4)), np.ones((1, 4)), a[None])
        loss, grad, _, stats = derivatives(losses.gspo_token, x[None], batch)
        other, _, _, _ = derivatives(losses.gspo_token, x[None], rows(np.zeros((1, 4)), np.ones((1, 4)), [a.mean()]))
    assert loss == pytest.approx(-(1 * 1.0004 - 1 * 1.001 + 2 * 1.0004 - 3 * 1.001) / 4, rel=1e-12)
    np.testing.assert_allclose(grad, [[0, 1.001 / 4, 0, 3 * 1.001 / 4]], rtol=1e-12)
    assert stats["policy/clip_fraction"] == 0.5
    assert abs(loss - other) > 1e-4


# Aggregation


def test_factors_between_denominators():
    """For uneven lengths n: row_sum = budget * budget_mean = token_mean * sum n / N, and row_mean weighs rows, not tokens."""
    n, value = np.array([1, 2, 5, 8, 0, 3]), np.array([3.0, -1.0, 0.5, 2.0, 9.0, -4.0])
    mask = np.arange(LENGTH)[None] < n[:, None]
    values = jnp.asarray(np.where(mask, value[:, None], np.nan), jnp.float32)
    batch = rows(np.zeros(mask.shape), mask, [0.0] * ROWS)
    found = {f.__name__: float(f(values, batch).value) for f in (row_mean, row_sum, token_mean)}
    assert found["row_mean"] == pytest.approx(value[n > 0].sum() / ROWS, rel=1e-6)
    assert found["row_sum"] == pytest.approx((n * value).sum() / ROWS, rel=1e-6)
    assert found["token_mean"] == pytest.approx((n * value).sum() / n.sum(), rel=1e-6)
    assert found["row_sum"] == pytest.approx(11 * float(budget(values, batch).value), rel=1e-6)
    assert found["row_sum"] == pytest.approx(found["token_mean"] * n.sum() / ROWS, rel=1e-6)
    even = rows(np.zeros(mask.shape), np.ones(mask.shape), [0.0] * ROWS)
    constant = jnp.broadcast_to(jnp.asarray(value, jnp.float32)[:, None], mask.shape)
    assert float(row_sum(constant, even).value) == pytest.approx(LENGTH * float(row_mean(constant, even).value), rel=1e-6)


def test_pooling_per_trajectory():
    """Sums, lengths and maxima of what is trained, of trajectories over two rows too; entry 0 takes nothing."""
    mask = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
    batch = rows(np.zeros((3, 3)), mask, [0.0] * 3)._replace(
        trajectory_ids=np.array([[1, 2, 2], [2, 0, 0], [3, 0, 0]], np.int32)
    )
    values = jnp.array([[-1.0, -2.0, 50.0], [-3.0, 60.0, 70.0], [80.0, 90.0, np.nan]])
    assert pool(values, batch)[:4].tolist() == [0, -1, -5, 0]
    assert lengths(batch)[:4].tolist() == [0, 1, 2, 0]
    assert pool_max(values, batch)[:4].tolist() == [0, -1, -2, 0]
    assert spread(pool(values, batch), batch).tolist() == [[-1, -5, -5], [-5, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("loss", "expected"), [(losses.dapo, 1.0), (losses.grpo, 0.5)])
def test_alg_08_numerator_and_denominator_share_a_mask(loss, expected: float):
    """Ten kept tokens of loss 1, ninety truncated and masked: the token mean is 1, not 0.1. Of two trajectories, half."""
    mask = np.stack([np.arange(90) < 10, np.zeros(90, bool)])
    value, grad, _, _ = derivatives(loss, np.zeros((2, 90)), rows(np.zeros((2, 90)), mask, [-1.0, -1.0]))
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(grad, mask * expected / 10, rtol=1e-6)


@pytest.mark.parametrize(("name", "even"), [("gspo", True), ("luspo", True), ("gmpo", True), ("gspo_token", False)])
def test_token_weights_of_a_sequence_objective(name: str, even: bool):
    """Weights 2, 1, 0 on three tokens: an objective of the sequence takes their mean, so its gradient stays even."""
    w, zeros = np.zeros((ROWS, LENGTH)), np.zeros((ROWS, LENGTH))
    w[2, :3] = 2, 1, 0
    mask = np.arange(LENGTH)[None] < np.where(np.arange(ROWS) == 2, 3, 0)[:, None]
    x = Example(zeros, zeros, mask, np.ones_like(w), w)
    weighted, plain = run(name, x), run(name, x._replace(weights=np.ones_like(w)))
    assert weighted[0] == plain[0] < 0
    np.testing.assert_allclose(weighted[1], plain[1] * (1 if even else w), rtol=1e-14)


def test_sequence_weights_multiply_a_trajectorys_term():
    """Weight 3 and 0.5 on whole trajectories: the loss is that of advantages times the weights, for every objective."""
    for name, case in FAMILY.items():
        x = draw(case, 7)
        w = np.broadcast_to(np.array([1.0, 3.0, 0.5, 2.0, 0.0, 1.0])[:, None], x.old.shape)
        weighted = run(name, x._replace(weights=w))
        scaled = run(name, x._replace(advantages=x.advantages * w, weights=np.ones_like(w)))
        assert weighted[0] == pytest.approx(scaled[0], rel=1e-12), name
        np.testing.assert_allclose(weighted[1], scaled[1], rtol=1e-12, atol=1e-16)
