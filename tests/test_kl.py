"""KL to the reference: values, precision, and what its gradient is in expectation, by enumeration."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers_loss import QUICKLY, derivatives, rows

from gspo_jax import kl, losses
from gspo_jax.aggregation import budget_mean, row_mean, row_sum, token_mean

ESTIMATES = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.expm1(-d) + d}
POLICY, REFERENCE = (0.7, 0.3), (0.5, 0.5)


def reverse_gradient(policy, reference):
    """d KL(policy || reference) / d logits: p_k (log(p_k / q_k) - KL)."""
    logs = np.log(np.divide(policy, reference))
    return policy * (logs - policy @ logs)


def on_actions(actions, logprobs, reference, **fields):
    """A trajectory of one token per action, advantages 0: log-probabilities of the actions and their batch."""
    mask = np.ones((len(actions), 1))
    chosen = np.asarray(reference)[np.asarray(actions)][:, None]
    return rows(np.asarray(logprobs)[:, None], mask, [0.0] * len(actions), reference_logprobs=np.log(chosen), **fields)


def expected_gradient(form, actions, proposal):
    """Of the mean over `actions`, drawn in the exact proportions of `proposal`, with respect to the logits of POLICY."""
    with jax.enable_x64(True):
        at = np.asarray(actions)
        batch = on_actions(at, np.log(proposal)[at], REFERENCE)

        def value(logits):
            return row_mean(form(jax.nn.log_softmax(logits)[at][:, None], batch), batch).value

        return np.asarray(jax.jit(jax.grad(value), compiler_options=QUICKLY)(jnp.log(jnp.array(POLICY))))


def test_alg_12_the_exact_gradient_of_two_actions():
    np.testing.assert_allclose(reverse_gradient(np.array(POLICY), np.array(REFERENCE)), [0.177933, -0.177933], atol=5e-7)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (partial(kl.plain, estimator=kl.k1), [0, 0]),
        (partial(kl.plain, estimator=kl.k2), None),
        (partial(kl.plain, estimator=kl.k3), [0.2, -0.2]),
        (partial(kl.importance_weighted, estimator=kl.k1), None),
        (partial(kl.importance_weighted, estimator=kl.k3), None),
        (partial(kl.straight_through, estimator=kl.k1), None),
        (partial(kl.straight_through, estimator=kl.k2), None),
        (partial(kl.straight_through, estimator=kl.k3), None),
    ],
    ids=lambda x: f"{x.func.__name__}-{x.keywords['estimator'].__name__}" if isinstance(x, partial) else "",
)
def test_alg_12_expected_gradient(form, expected):
    """Seven times the first action and three times the second are policy (0.7, 0.3). None is the exact reverse-KL gradient;
    k3 as it stands gives the forward KL's, p - q; k1 as it stands gives none."""
    exact = reverse_gradient(np.array(POLICY), np.array(REFERENCE))
    found = expected_gradient(form, [0] * 7 + [1] * 3, POLICY)
    np.testing.assert_allclose(found, exact if expected is None else expected, atol=1e-14)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
def test_importance_weighting_is_exact_off_policy_too(estimator):
    """Actions drawn from (0.4, 0.6): the ratio to the proximal policy brings the gradient back; k2 alone is wrong there."""
    actions, proposal = [0] * 2 + [1] * 3, (0.4, 0.6)
    exact = reverse_gradient(np.array(POLICY), np.array(REFERENCE))
    np.testing.assert_allclose(
        expected_gradient(partial(kl.importance_weighted, estimator=estimator), actions, proposal), exact, atol=1e-14
    )
    wrong = expected_gradient(partial(kl.straight_through, estimator=estimator), actions, proposal)
    assert np.abs(wrong - exact).max() > 0.05


@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize("form", kl.FORMS)
def test_values(name: str, form: str):
    """Each estimator of d = logprobs - reference; the importance weight multiplies it, a straight-through gradient does not."""
    d, x = np.array([[-2.0, -0.3, 0.0, 1.0, 3.0]]), np.array([[0.2, -0.1, 0.0, 0.3, -0.4]])
    with jax.enable_x64(True):
        logprobs = jnp.full(d.shape, -4.0)
        batch = rows(logprobs - x, np.ones(d.shape), [0.0], reference_logprobs=logprobs - d)
        found = kl.FORMS[form](logprobs, batch, estimator=kl.ESTIMATORS[name])
    weight = np.exp(x) if form == "importance_weighted" else 1
    np.testing.assert_allclose(found, weight * np.vectorize(ESTIMATES[name])(d), rtol=1e-12, atol=1e-14)


def test_default_estimator_is_k3():
    batch = rows(np.zeros((1, 1)), np.ones((1, 1)), [0.0], reference_logprobs=np.full((1, 1), -2.0))
    for form in kl.FORMS.values():
        assert float(
            form(jnp.full((1, 1), -1.0), batch._replace(proximal_logprobs=np.full((1, 1), -1.0, np.float32)))[0, 0]
        ) == (pytest.approx(math.exp(-1), rel=1e-6))


def test_k3_keeps_small_differences_in_float32():
    """d = 1e-6 is worth 5e-13, to the last bit of 1e-6; e^-d - 1 + d is 0 or rounding a hundred thousand times as large."""
    d = np.float32([1e-4, 1e-5, 1e-6, -1e-6])
    found = np.asarray(kl.k3(jnp.asarray(d)[None]), np.float64)[0]
    exact = np.array([math.expm1(-x) + x for x in d.astype(np.float64)])
    assert (np.abs(found - exact) <= np.spacing(np.abs(d))).all()
    assert (found > 0).all()
    assert found[0] == pytest.approx(5e-9, rel=1e-3)
    naive = np.exp(-d) - np.float32(1) + d
    assert (np.abs(naive - exact) > 100 * np.abs(found - exact)).all()


def test_k3_is_never_negative():
    d = np.concatenate([np.logspace(-30, 1, 60), -np.logspace(-30, 1, 60)]).astype(np.float32)
    assert (np.asarray(kl.k3(jnp.asarray(d)[None])) >= 0).all()


# Inside a loss

PENALIZED = {name: kl.penalized(losses.gspo, row_mean, kl=form, beta=0.5) for name, form in kl.FORMS.items()}


@pytest.mark.parametrize("form", kl.FORMS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_masked_tokens_never_matter(form: str, garbage: float):
    """The reference has no log-probabilities at observation tokens: neither they nor the policy's reach loss or gradient."""
    rng = np.random.default_rng(0)
    x, old, reference = rng.uniform(-3, 0, (3, 2, 4))
    mask = np.array([[1, 0, 1, 1], [0, 1, 0, 0]], bool)
    whole = PENALIZED[form]

    def dirty(values, by):
        return np.where(mask, values, by).astype(np.float32)

    clean = derivatives(whole, x, rows(old, mask, [1.0, -1.0], reference_logprobs=reference))
    batch = rows(dirty(old, garbage), mask, [1.0, -1.0], reference_logprobs=dirty(reference, -garbage))
    loss, grad, _, stats = derivatives(whole, dirty(x, garbage), batch)
    assert (loss, stats) == (clean[0], clean[3])
    np.testing.assert_array_equal(grad, clean[1])
    assert not grad[~mask].any()
    assert grad[mask].all()


def test_alg_11_penalty_has_the_right_sign_and_size():
    """Policy -1, reference -2, beta 0.1: k3 is e^-1, so the loss rises by 0.0367879."""
    shape = (2, 3)
    logprobs = np.full(shape, -1.0)
    penalties = [kl.penalized(losses.gspo, row_mean, kl=form, beta=0.1) for form in kl.FORMS.values()]
    with jax.enable_x64(True):
        batch = rows(logprobs, np.ones(shape), [1.0, -0.5], reference_logprobs=logprobs - 1)
        plain, *whole = (derivatives(f, logprobs, batch, (losses.gspo, *penalties)) for f in (losses.gspo, *penalties))
    for loss, _, _, stats in whole:
        assert loss - plain[0] == pytest.approx(0.1 * math.exp(-1), rel=1e-12)
        assert loss - plain[0] == pytest.approx(0.0367879, abs=5e-8)
        assert stats["policy/kl_reference"] == pytest.approx(math.exp(-1), rel=1e-12)


def pulled(form, estimator, steps: int, rate: float) -> list[float]:
    """KL to the reference of a softmax policy of four actions under SGD on the penalty alone, before and after every step."""
    rng = np.random.default_rng(1)
    logits, reference = rng.standard_normal(4), np.array([0.1, 0.2, 0.3, 0.4])
    loss = kl.penalized(losses.gspo, row_mean, kl=partial(form, estimator=estimator), beta=0.1)

    def policy(logits):
        return np.exp(logits) / np.exp(logits).sum()

    found = []
    with jax.enable_x64(True):
        for _ in range(steps + 1):
            p = policy(logits)
            found.append(float(p @ np.log(p / reference)))
            actions = rng.choice(4, size=256, p=p)
            logprobs = np.log(p)[actions]
            _, grad, _, _ = derivatives(loss, logprobs[:, None], on_actions(actions, logprobs, reference))
            logits = logits - rate * (grad * (np.eye(4)[actions] - p)).sum(0)
    return found


@pytest.mark.parametrize(("form", "estimator"), [("importance_weighted", kl.k3), ("straight_through", kl.k3), ("plain", kl.k3)])
def test_alg_11_penalty_alone_leads_to_the_reference(form: str, estimator):
    """Advantages 0: one step lowers the KL, and many sampled ones end at the reference. A wrong sign would run away."""
    found = pulled(kl.FORMS[form], estimator, steps=150, rate=5.0)
    assert found[0] > 0.1
    assert found[1] < found[0]
    assert found[-1] < 1e-8


AGGREGATES = {
    "row_mean": (losses.gspo, row_mean), "row_sum": (losses.luspo, row_sum), "token_mean": (losses.dapo, token_mean),
    "budget_mean": (partial(losses.dr_grpo, budget=7.0), partial(budget_mean, budget=7.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", AGGREGATES)
def test_penalties_share_the_losss_denominator(name: str):
    """loss + beta mean(k3) - c mean(entropy), with the mean of the loss, over uneven lengths 1, 4 and none."""
    rng = np.random.default_rng(2)
    mask = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    x, reference, entropy = rng.uniform(-3, 0, (3, *mask.shape))
    loss, aggregate = AGGREGATES[name]
    with jax.enable_x64(True):
        dirty = np.where(mask, entropy, np.nan)
        batch = rows(x, mask, [1.0, -2.0, 3.0], reference_logprobs=reference, entropy=dirty)
        plain = derivatives(loss, x, batch)
        whole = derivatives(kl.penalized(loss, aggregate, kl=kl.plain, beta=0.3, entropy=0.2), x, batch)
    values = 0.3 * np.vectorize(ESTIMATES["k3"])(x - reference) - 0.2 * entropy
    n = mask.sum(1)
    divisor = {"row_mean": 3 * np.maximum(n, 1)[:, None], "row_sum": 3, "token_mean": 5, "budget_mean": 21}[name]
    assert whole[0] - plain[0] == pytest.approx((mask * values / divisor).sum(), rel=1e-12)
    slope = 0.3 * mask * -np.expm1(reference - x) / divisor
    np.testing.assert_allclose(whole[1] - plain[1], slope, rtol=1e-11, atol=1e-15)


def test_entropy_bonus_is_differentiated():
    """More entropy, less loss: through batch.entropy, which depends on the policy."""
    batch = rows(np.zeros((1, 2)), np.ones((1, 2)), [0.0])
    whole = kl.penalized(losses.gspo, row_mean, entropy=0.5)
    grad = jax.grad(lambda h: whole(jnp.zeros((1, 2)), batch._replace(entropy=h))[0].value)
    np.testing.assert_allclose(
        jax.jit(grad, compiler_options=QUICKLY)(np.ones((1, 2), np.float32)), [[-0.25, -0.25]], rtol=1e-6
    )


def test_a_coefficient_of_zero_computes_nothing():
    """With beta 0 there is no reference to read, and the loss, gradient and statistics are those without a penalty."""
    x, old = np.random.default_rng(3).uniform(-3, 0, (2, 2, 4))
    batch = rows(old, np.ones(x.shape), [1.0, -1.0])
    assert batch.reference_logprobs is batch.entropy is None
    plain = derivatives(losses.grpo, x, batch)
    whole = derivatives(kl.penalized(losses.grpo, row_mean, kl=kl.importance_weighted, beta=0.0), x, batch)
    assert (whole[0], whole[3]) == (plain[0], plain[3])
    np.testing.assert_array_equal(whole[1], plain[1])


def test_what_a_penalty_lacks_is_named():
    x, batch = jnp.zeros((1, 2)), rows(np.zeros((1, 2)), np.ones((1, 2)), [1.0])
    for form in kl.FORMS.values():
        with pytest.raises(ValueError, match="reference_logprobs"):
            kl.penalized(losses.gspo, row_mean, kl=form, beta=0.1)(x, batch)
    with pytest.raises(ValueError, match=r"batch\.entropy"):
        kl.penalized(losses.gspo, row_mean, entropy=0.1)(x, batch)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_refused(dtype):
    batch = rows(np.zeros((1, 2)), np.ones((1, 2)), [1.0], reference_logprobs=np.zeros((1, 2)))
    with pytest.raises(TypeError, match="must be float32"):
        kl.difference(jnp.zeros((1, 2), dtype), batch)
