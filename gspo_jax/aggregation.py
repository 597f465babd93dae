"""How token values become one loss: pooling per trajectory, and the named denominators. Aggregation is part of an algorithm."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from gspo_jax.types import Batch, Mean

type Aggregate = Callable[[Float[Array, "r t"], Batch], Mean]
"""`(token values, micro-batch) -> ` sum and count. Only values at `loss_mask` matter, whatever stands elsewhere."""


def row_mean(values: Float[Array, "r t"], batch: Batch) -> Mean:
    """`(1/N) sum_i (1/n_i) sum_t x_it`: every trajectory weighs the same. GSPO eq. 5, GRPO (seq-mean-token-mean)."""
    means = pool_mean(values, batch)
    return Mean(jnp.sum(means), jnp.asarray(batch.trajectories, means.dtype))


def row_sum(values: Float[Array, "r t"], batch: Batch) -> Mean:
    """`(1/N) sum_i sum_t x_it`: a trajectory weighs as much as it is long. LUSPO, MiniRL (seq-mean-token-sum)."""
    total = _sum(values, batch)
    return Mean(total, jnp.asarray(batch.trajectories, total.dtype))


def token_mean(values: Float[Array, "r t"], batch: Batch) -> Mean:
    """`sum_it x_it / sum_i n_i`: every trained token of the minibatch weighs the same. DAPO, CISPO, PPO (token-mean)."""
    total = _sum(values, batch)
    return Mean(total, jnp.sum(batch.loss_mask).astype(total.dtype))


def budget_mean(values: Float[Array, "r t"], batch: Batch, *, budget: float) -> Mean:
    """`sum_it x_it / (N budget)`: a constant denominator, the tokens a trajectory may have. Dr. GRPO's code."""
    total = _sum(values, batch)
    return Mean(total, jnp.asarray(batch.trajectories, total.dtype) * budget)


def pool(values: Float[Array, "r t"], batch: Batch) -> Float[Array, " i"]:
    """Sums of trained `values` per trajectory of the micro-batch; entry 0 collects the tokens of none and is 0."""
    trained = jnp.where(batch.loss_mask, values, 0)
    sums = jax.ops.segment_sum(trained.reshape(-1), jnp.reshape(batch.trajectory_ids, -1), values.size + 1)
    return sums.at[0].set(0)


def pool_mean(values: Float[Array, "r t"], batch: Batch) -> Float[Array, " i"]:
    """The mean of trained `values` of each trajectory; 0 for one without a trained token."""
    return pool(values, batch) / jnp.maximum(lengths(batch), 1)


def pool_max(values: Float[Array, "r t"], batch: Batch) -> Float[Array, " i"]:
    """The largest trained `values` of each trajectory; 0 for one without a trained token."""
    trained = jnp.where(batch.loss_mask, values, -jnp.inf)
    found = jax.ops.segment_max(trained.reshape(-1), jnp.reshape(batch.trajectory_ids, -1), values.size + 1)
    return jnp.where(lengths(batch) > 0, found, 0)


def lengths(batch: Batch) -> Float[Array, " i"]:
    """Trained tokens of each trajectory, as floats."""
    return pool(jnp.ones(batch.loss_mask.shape, jnp.result_type(float)), batch)


def spread(values: Float[Array, " i"], batch: Batch) -> Float[Array, "r t"]:
    """Each trajectory's value at all of its tokens."""
    return values[jnp.asarray(batch.trajectory_ids)]


def _sum(values: Float[Array, "r t"], batch: Batch) -> Float[Array, ""]:
    return jnp.sum(jnp.where(batch.loss_mask, values, 0))
