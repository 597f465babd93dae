"""Weights for the gap between the sampler and the trainer at equal weights (and stale samplers): detached factors on the loss.

`rho_it = proximal - behavior` is the token log-ratio of the two policies at the start of the step. The sequence ratio of
GSPO is a geometric mean; the sampler's correct importance weight is a product over tokens. They are different numbers and
have different names here. A filter returns 0 or 1 per token of a whole trajectory, a weight returns a ratio; they
combine by multiplication.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from gspo_jax.aggregation import Aggregate, lengths, pool, pool_max, pool_mean, spread
from gspo_jax.kl import k3
from gspo_jax.losses import Loss
from gspo_jax.ratios import advantages_of, token_log_ratio, trained_difference, weights_of
from gspo_jax.types import Batch, Mean, Metrics, Prepare, Stats

MAX_LOG_RHO = 20.0

type Correction = Callable[[Batch], Float[Array, "r t"]]
"""`micro-batch with proximal_logprobs -> ` weights at trained tokens, 0 elsewhere."""


def log_rho(batch: Batch) -> Float[Array, "*lead r t"]:
    """`proximal - behavior` at trained tokens, 0 elsewhere."""
    if batch.proximal_logprobs is None:
        raise ValueError("a correction needs batch.proximal_logprobs; the learner fills it in")
    return jax.lax.stop_gradient(trained_difference(batch.proximal_logprobs, batch.behavior_logprobs, batch))


def token_truncate(batch: Batch, *, high: float = 2.0, low: float = 0.0) -> Float[Array, "r t"]:
    """TIS: `clip(e^rho_it, low, high)` (Yao et al. 2025)."""
    return _trained(batch, jnp.clip(_exp(log_rho(batch)), low, high))


def token_mask(batch: Batch, *, low: float = 0.5, high: float = 2.0) -> Float[Array, "r t"]:
    """MIS, IcePop: `e^rho_it` where it lies in [low, high], else 0 (arXiv 2510.18855)."""
    return _trained(batch, _inside(_exp(log_rho(batch)), low, high))


def sequence_truncate(batch: Batch, *, high: float = 2.0, low: float = 0.0) -> Float[Array, "r t"]:
    """`clip(prod_t e^rho_it, low, high)`: the exact importance weight of the trajectory, bounded."""
    return _trained(batch, jnp.clip(spread(sequence_ratio(batch), batch), low, high))


def sequence_mask(batch: Batch, *, low: float = 0.5, high: float = 2.0) -> Float[Array, "r t"]:
    """`prod_t e^rho_it` where it lies in [low, high], else 0."""
    return _trained(batch, spread(_inside(sequence_ratio(batch), low, high), batch))


def geometric_filter(batch: Batch, *, low: float = 0.99, high: float = 1.01) -> Float[Array, "r t"]:
    """1 for trajectories whose geometric mean ratio `e^((1/n_i) sum_t rho_it)` lies in [low, high], else 0 (Geo-RS)."""
    inside = _inside(geometric_ratio(batch), low, high) > 0
    return _trained(batch, spread(inside.astype(jnp.result_type(float)), batch))


def k3_filter(batch: Batch, *, most: float = 0.01) -> Float[Array, "r t"]:
    """1 for trajectories whose mean k3 estimate of KL(behavior || proximal) is at most `most`, else 0."""
    mean = pool_mean(k3(-log_rho(batch)), batch)
    return _trained(batch, spread((mean <= most).astype(mean.dtype), batch))


def sequence_ratio(batch: Batch) -> Float[Array, " i"]:
    """`prod_t e^rho_it` of each trajectory: a product, so it grows and shrinks with length."""
    return _exp(pool(log_rho(batch), batch))


def geometric_ratio(batch: Batch) -> Float[Array, " i"]:
    """`e^((1/n_i) sum_t rho_it)` of each trajectory: a mean, so lengths compare."""
    return _exp(pool_mean(log_rho(batch), batch))


def token_weight(batch: Batch) -> Float[Array, "r t"]:
    """`e^rho_it` without a bound."""
    return _trained(batch, _exp(log_rho(batch)))


def sequence_weight(batch: Batch) -> Float[Array, "r t"]:
    """`prod_t e^rho_it` at every token of the trajectory, without a bound."""
    return _trained(batch, spread(sequence_ratio(batch), batch))


def product(corrections: Sequence[Correction]) -> Correction:
    """All of them together."""

    def combined(batch: Batch) -> Float[Array, "r t"]:
        weights = _trained(batch, jnp.ones(batch.loss_mask.shape, jnp.result_type(float)))
        for correction in corrections:
            weights = weights * correction(batch)
        return weights

    return combined


def off_policy_filter(logprobs: Float[Array, "r t"], batch: Batch, *, most: float) -> Float[Array, "r t"]:
    """DeepSeek-V3.2's sequence mask (arXiv 2512.02556): 0 where `A_i < 0` and `mean_t(proximal - logprobs) > most`, else 1."""
    mean = pool_mean(jax.lax.stop_gradient(-token_log_ratio(logprobs, batch)), batch)
    negative = pool_max(advantages_of(batch), batch) < 0
    return _trained(batch, spread(1 - (negative & (mean > most)).astype(mean.dtype), batch))


def off_policy_masked(loss: Loss, most: float) -> Loss:
    """`loss` with the weights of `off_policy_filter`; what it drops stays in the denominator."""

    def masked(logprobs: Float[Array, "r t"], batch: Batch) -> tuple[Mean, Stats]:
        kept = off_policy_filter(logprobs, batch, most=most)
        trained = jnp.asarray(batch.loss_mask)
        total, stats = loss(logprobs, batch._replace(weights=kept * weights_of(batch)))
        dropped = Mean(jnp.sum(trained & (kept == 0)).astype(kept.dtype), jnp.sum(trained).astype(kept.dtype))
        return total, stats | {"correction/off_policy_fraction": dropped}

    return masked


def prepare(
    correction: Correction, *, raw: Correction | None = None, normalize: Aggregate | None = None, leave: bool = False
) -> Prepare:
    """Fills `weights` of a whole batch `[m u r t]` and reports on them.

    `raw` is the weight before any bound, to report how many were bounded. `leave` takes tokens of weight 0 out of ratios and
    denominators too; else they count there, with term 0. `normalize` then divides by the mean weight of what counts, as that
    aggregation (the loss's own) weighs tokens.
    """

    def fill(batch: Batch) -> tuple[Batch, Metrics]:
        weights = _each(correction, batch)
        metrics = _report(weights, batch) | _bounded(weights, batch, raw)
        batch = _without(batch, weights) if leave else batch._replace(weights=weights)
        if normalize is not None:
            batch = batch._replace(weights=weights / jnp.maximum(_mean_weight(batch, normalize), 1e-8))
        return batch, metrics

    return fill


def _each(function: Callable[[Batch], Array], batch: Batch) -> Array:
    """`function` of every micro-batch of `[m u r t]`."""
    return jax.vmap(jax.vmap(function))(batch)


def _mean_weight(batch: Batch, aggregate: Aggregate) -> Array:
    def totals(micro: Batch) -> tuple[Array, Array]:
        weights = jnp.asarray(micro.weights)
        return aggregate(weights, micro).total, aggregate(jnp.ones_like(weights), micro).total

    total, ones = jax.vmap(jax.vmap(totals))(batch)
    return jnp.sum(total) / jnp.maximum(jnp.sum(ones), 1e-30)


def _without(batch: Batch, weights: Float[Array, "m u r t"]) -> Batch:
    kept = jnp.asarray(batch.loss_mask) & (weights != 0)

    def gone(micro: Batch) -> Array:
        left = pool((jnp.asarray(micro.weights) != 0).astype(weights.dtype), micro)
        return jnp.sum((lengths(micro) > 0) & (left == 0))

    batch = batch._replace(weights=weights)
    return batch._replace(loss_mask=kept, trajectories=jnp.asarray(batch.trajectories) - _each(gone, batch))


def _report(weights: Array, batch: Batch) -> Metrics:
    """The largest ratios before any bound; the weights' mean before `normalize`, and their effective sample size per token."""
    trained = jnp.asarray(batch.loss_mask)
    count, total, squares = jnp.maximum(jnp.sum(trained), 1), jnp.sum(weights), jnp.sum(weights * weights)
    products = _each(lambda micro: jnp.where(lengths(micro) > 0, sequence_ratio(micro), 0), batch)
    return {
        "correction/token_ratio_max": jnp.max(jnp.where(trained, _exp(log_rho(batch)), 0)),
        "correction/sequence_ratio_max": jnp.max(products),
        "correction/weight_mean": total / count,
        "correction/effective_share": total * total / jnp.maximum(count * squares, 1e-30),
        "correction/rejected_fraction": jnp.sum(trained & (weights == 0)) / count,
    }


def _bounded(weights: Array, batch: Batch, raw: Correction | None) -> Metrics:
    if raw is None:
        return {}
    trained = jnp.asarray(batch.loss_mask)
    changed = trained & (weights != 0) & (weights != _each(raw, batch))
    return {"correction/bounded_fraction": jnp.sum(changed) / jnp.maximum(jnp.sum(trained), 1)}


def _exp(log_ratio: Array) -> Array:
    """The ratio, its logarithm kept within what float32 can hold many of."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RHO, MAX_LOG_RHO))


def _inside(ratio: Array, low: float, high: float) -> Array:
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0)


def _trained(batch: Batch, values: Array) -> Float[Array, "r t"]:
    return jnp.where(batch.loss_mask, values, 0)
