"""Policy objectives: pure functions of (log-probabilities, batch). They know nothing about models, text or devices."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from gspo_jax.types import Batch, Mean, Peak, Stats


def gspo(logprobs: Float[Array, "r t"], batch: Batch, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> tuple[Mean, Stats]:
    """The GSPO loss of one micro-batch as a sum over trajectories and their count, and its statistics.

    For trajectory i with trained tokens t (arXiv 2507.18071, eq. 5 and 7):

        log s_i = (1 / n_i) sum_t (logprobs_t - proximal_t)
        loss    = -(1 / N) sum_i A_i (min(s_i, 1 + eps_high) if A_i >= 0 else max(s_i, 1 - eps_low))

    A trajectory without trained tokens counts in N and contributes 0. Clipping is decided on `log s`, so that neither a
    tie nor an overflow of `exp` reaches the gradient: a row beyond the far side of the band (A < 0, s > e^10) keeps its value
    at e^10 and has no gradient.
    """
    if batch.proximal_logprobs is None:
        raise ValueError("gspo needs batch.proximal_logprobs: the ratio's `old`; the learner fills it in")
    trained = batch.loss_mask
    log_ratio = jnp.where(trained, logprobs - jnp.where(trained, batch.proximal_logprobs, 0), 0)
    length = pool(jnp.where(trained, 1.0, 0.0), batch)
    log_s = pool(log_ratio, batch) / jnp.maximum(length, 1)
    advantage = pool_max(jnp.where(trained, batch.advantages, -jnp.inf), batch)
    real = length > 0
    advantage = jnp.where(real, advantage, 0)

    above = log_s > jnp.log1p(eps_high)
    below = log_s < jnp.log1p(-eps_low)
    ratio = jnp.exp(jnp.minimum(log_s, MAX_LOG_RATIO))
    positive = jnp.where(above, 1 + eps_high, ratio)
    negative = jnp.where(below, 1 - eps_low, ratio)
    objective = advantage * jnp.where(advantage >= 0, positive, negative)

    clipped = jnp.where(advantage >= 0, above, below) & real & (advantage != 0)
    total = -jnp.sum(jnp.where(real, objective, 0))
    return Mean(total, jnp.asarray(batch.trajectories, total.dtype)), _statistics(log_s, length, clipped)


MAX_LOG_RATIO = 10.0


def pool(x: Float[Array, "r t"], batch: Batch) -> Float[Array, " i"]:
    """Sums of `x` per trajectory of the micro-batch; entry 0 collects the tokens of none and is 0."""
    sums = jax.ops.segment_sum(x.reshape(-1), jnp.reshape(batch.trajectory_ids, -1), x.size + 1)
    return sums.at[0].set(0)


def pool_max(x: Float[Array, "r t"], batch: Batch) -> Float[Array, " i"]:
    """The largest `x` of each trajectory of the micro-batch."""
    return jax.ops.segment_max(x.reshape(-1), jnp.reshape(batch.trajectory_ids, -1), x.size + 1)


def _statistics(log_s: Float[Array, " i"], length: Float[Array, " i"], clipped: Array) -> Stats:
    real = length > 0
    rows = jnp.sum(real).astype(log_s.dtype)
    ratio = jnp.where(real, jnp.exp(jnp.minimum(log_s, MAX_LOG_RATIO)), 0)
    stats: Stats = {
        "policy/ratio_mean": Mean(jnp.sum(ratio), rows),
        "policy/ratio_max": Peak(jnp.max(ratio)),
        "policy/log_ratio_abs": Mean(jnp.sum(jnp.where(real, jnp.abs(log_s), 0)), rows),
        "policy/clip_fraction": Mean(jnp.sum(clipped).astype(log_s.dtype), rows),
        "policy/clip_fraction_tokens": Mean(jnp.sum(jnp.where(clipped, length, 0)), jnp.sum(length)),
    }
    return jax.lax.stop_gradient(stats)
