"""Ratios of the current to the proximal policy, how they are clipped, and what is reported about them: parts of the losses."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from gspo_jax.aggregation import lengths, pool_max, pool_mean
from gspo_jax.types import Batch, Floats, Mean, Peak, Stats, Trough

MAX_LOG_RATIO = 10.0
BUCKETS = (16, 128, 1024)
"""Lengths up to which trajectories are counted together: a fixed band clips short ones more (arXiv 2509.09177)."""
_NAMES = (*(f"to_{n}" for n in BUCKETS), "longer")


def require_float32(logprobs: Array) -> None:
    """TypeError for log-probabilities in fewer than 32 bits: near -2, bfloat16 steps by 52 times GSPO's clip range."""
    if jnp.finfo(logprobs.dtype).bits < 32:
        raise TypeError(
            f"log-probabilities are {logprobs.dtype} and must be float32: rounding alone moves a sequence ratio further than "
            "the clip range. Compute the final logits and the log-softmax in float32"
        )


def trained_difference(a: Floats, b: Floats, batch: Batch) -> Float[Array, "*lead r t"]:
    """`a - b` of two policies' log-probabilities at trained tokens, 0 elsewhere, whatever stands there. Float32 only."""
    trained = jnp.asarray(batch.loss_mask)
    for logprobs in (a, b):
        require_float32(jnp.asarray(logprobs))
    return jnp.where(trained, a, 0) - jnp.where(trained, b, 0)


def token_log_ratio(logprobs: Float[Array, "r t"], batch: Batch) -> Float[Array, "r t"]:
    """Token log-ratios, 0 where nothing is trained; subtracted per token, so that equal values give exactly 0."""
    if batch.proximal_logprobs is None:
        raise ValueError("the loss needs batch.proximal_logprobs: the ratio's `old`; the learner fills it in")
    return trained_difference(logprobs, batch.proximal_logprobs, batch)


def sequences(logprobs: Float[Array, "r t"], batch: Batch) -> tuple[Array, Array, Array]:
    """`log s_i`, `A_i`, `n_i` of each trajectory."""
    log_s = pool_mean(token_log_ratio(logprobs, batch), batch)
    return log_s, pool_max(advantages_of(batch), batch), lengths(batch)


def advantages_of(batch: Batch) -> Float[Array, "r t"]:
    """Advantages of trained tokens, 0 elsewhere."""
    return jnp.where(batch.loss_mask, batch.advantages, 0)


def weights_of(batch: Batch) -> Float[Array, "r t"]:
    """The detached factors of the tokens' terms; ones when there are none."""
    ones = jnp.ones(batch.loss_mask.shape, jnp.result_type(float))
    return ones if batch.weights is None else jax.lax.stop_gradient(jnp.where(batch.loss_mask, batch.weights, 0))


def ratio_of(log_ratio: Array, most: float = MAX_LOG_RATIO) -> Array:
    """`e^log_ratio`, constant from `log_ratio = most` on."""
    return jnp.exp(jnp.where(log_ratio >= most, most, log_ratio))  # NaN stays NaN


def clip_objective(
    log_ratio: Array, advantage: Array, eps_low: float, eps_high: float, most: float = MAX_LOG_RATIO
) -> tuple[Array, Array, Array]:
    """`min(r A, clip(r) A)` without the half gradients of a tie, and where it was clipped below and above."""
    above, below = log_ratio > jnp.log1p(eps_high), log_ratio < jnp.log1p(-eps_low)
    ratio = ratio_of(log_ratio, most)
    positive, negative = jnp.where(above, 1 + eps_high, ratio), jnp.where(below, 1 - eps_low, ratio)
    objective = advantage * jnp.where(advantage >= 0, positive, negative)
    return objective, below & (advantage < 0), above & (advantage > 0)


def sequence_stats(log_s: Array, length: Array, low: Array, high: Array) -> Stats:
    """Statistics per trajectory; `low` and `high` may be shares of a trajectory's tokens."""
    real = length > 0
    clipped = jnp.where(real, low + high + 0.0, 0)
    by_length = {
        f"policy/clip_fraction_{name}": _mean(clipped, (length > least) & (length <= most))
        for name, least, most in zip(_NAMES, (0, *BUCKETS), (*BUCKETS, jnp.inf), strict=True)
    }
    return _ratio_stats(log_s, real, low, high) | by_length | {
        "policy/clip_fraction_tokens": Mean(jnp.sum(clipped * length), jnp.sum(length))
    }  # fmt: skip


def token_stats(x: Float[Array, "r t"], batch: Batch, low: Bool[Array, "r t"], high: Bool[Array, "r t"]) -> Stats:
    """Statistics per trained token."""
    trained = jnp.asarray(batch.loss_mask)
    stats = _ratio_stats(x, trained, low, high)
    return stats | {"policy/clip_fraction_tokens": stats["policy/clip_fraction"]}


def _ratio_stats(log_ratio: Array, real: Array, low: Array, high: Array) -> Stats:
    """What is counted once per unit of the ratio: a trajectory or a token."""
    ratio = ratio_of(log_ratio)
    return {
        "policy/ratio_mean": _mean(ratio, real),
        "policy/ratio_min": Trough(jnp.min(jnp.where(real, ratio, jnp.inf))),
        "policy/ratio_max": Peak(jnp.max(jnp.where(real, ratio, -jnp.inf))),
        "policy/log_ratio_abs": _mean(jnp.abs(log_ratio), real),
        "policy/clip_fraction": _mean(low + high + 0.0, real),
        "policy/clip_fraction_low": _mean(low + 0.0, real),
        "policy/clip_fraction_high": _mean(high + 0.0, real),
    }


def _mean(values: Array, where: Array) -> Mean:
    return Mean(jnp.sum(jnp.where(where, values, 0)), jnp.sum(where).astype(values.dtype))
