"""KL(policy || reference) from sampled tokens: estimators per token, and what their gradients are.

With d = logprobs - reference (http://joschu.net/blog/kl-approx.html):

    k1 = d              unbiased value; as a loss its expected gradient is 0; as a reward penalty it is the right one
    k2 = d^2 / 2        biased value; as a loss its expected gradient is that of KL(policy || reference) on policy
    k3 = e^-d - 1 + d   unbiased, never negative; as a loss its expected gradient is that of KL(reference || policy)

Multiplied by the differentiable ratio policy / proximal (`importance_weighted`), k1 and k3 give the gradient of
KL(policy || reference), on policy and off it (arXiv 2506.09477, 2512.02556). `straight_through` has the value of one
estimator and the gradient of k2.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from gspo_jax.aggregation import Aggregate
from gspo_jax.losses import Loss
from gspo_jax.ratios import ratio_of, token_log_ratio, trained_difference
from gspo_jax.types import Batch, Mean, Stats

type Estimator = Callable[[Float[Array, "*lead"]], Float[Array, "*lead"]]


def k1(difference: Float[Array, "*lead"]) -> Float[Array, "*lead"]:
    """The log-ratio itself."""
    return difference


def k2(difference: Float[Array, "*lead"]) -> Float[Array, "*lead"]:
    """Half its square."""
    return difference * difference / 2


def k3(difference: Float[Array, "*lead"]) -> Float[Array, "*lead"]:
    """`e^-d - 1 + d`, by expm1: in float32 the plain form is 0 for d = 1e-4."""
    return jnp.expm1(-difference) + difference


ESTIMATORS: Mapping[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}


def difference(logprobs: Float[Array, "r t"], batch: Batch) -> Float[Array, "r t"]:
    """`logprobs - reference` at trained tokens, 0 elsewhere."""
    if batch.reference_logprobs is None:
        raise ValueError("a KL penalty needs batch.reference_logprobs: log-probabilities under the frozen reference")
    return trained_difference(logprobs, batch.reference_logprobs, batch)


def plain(logprobs: Float[Array, "r t"], batch: Batch, *, estimator: Estimator = k3) -> Float[Array, "r t"]:
    """The estimator, differentiated as it stands (GRPO's k3). Biased: see the table above."""
    return estimator(difference(logprobs, batch))


def importance_weighted(logprobs: Float[Array, "r t"], batch: Batch, *, estimator: Estimator = k3) -> Float[Array, "r t"]:
    """`exp(logprobs - proximal)` times the estimator, both differentiated: the unbiased form (DeepSeek-V3.2)."""
    return ratio_of(token_log_ratio(logprobs, batch)) * plain(logprobs, batch, estimator=estimator)


def straight_through(logprobs: Float[Array, "r t"], batch: Batch, *, estimator: Estimator = k3) -> Float[Array, "r t"]:
    """The value of `estimator` with the gradient of k2: right on policy."""
    d = difference(logprobs, batch)
    return jax.lax.stop_gradient(estimator(d) - k2(d)) + k2(d)


FORMS: Mapping[str, Callable[..., Float[Array, "r t"]]] = {
    "importance_weighted": importance_weighted,
    "plain": plain,
    "straight_through": straight_through,
}


def penalized(loss: Loss, aggregate: Aggregate, *, kl: Callable | None = None, beta: float = 0.0, entropy: float = 0.0) -> Loss:
    """`loss + beta aggregate(kl) - entropy aggregate(H)` under the denominator of `aggregate`, which has to be the loss's own.

    `kl(logprobs, batch)` gives values per token; a coefficient of 0 leaves its term out of the computation.
    """

    def total(logprobs: Float[Array, "r t"], batch: Batch) -> tuple[Mean, Stats]:
        mean, stats = loss(logprobs, batch)
        values = jnp.zeros_like(logprobs)
        if kl is not None and beta:
            values += beta * kl(logprobs, batch)
            tokens = jnp.sum(batch.loss_mask).astype(logprobs.dtype)
            stats = stats | {"policy/kl_reference": Mean(jnp.sum(k3(difference(logprobs, batch))), tokens)}
        if entropy:
            if batch.entropy is None:
                raise ValueError("an entropy bonus needs batch.entropy; the learner fills it in")
            values -= entropy * jnp.where(batch.loss_mask, batch.entropy, 0)
        return Mean(mean.total + aggregate(values, batch).total, mean.count), stats

    return total
