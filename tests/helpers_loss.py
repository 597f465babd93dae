"""Batches for tests of objectives, and what an objective makes of one, as plain numbers."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.types import Batch

ROWS, LENGTH = 6, 8


def rows(old, mask, advantages, trajectories: float | None = None, **fields) -> Batch:
    """A batch in which row i is trajectory i + 1. Advantages are one per row or one per token; `fields` are per token."""
    mask = np.asarray(mask, bool)
    number = np.arange(1, len(mask) + 1, dtype=np.int32)[:, None]
    index = np.broadcast_to(np.arange(mask.shape[1], dtype=np.int32), mask.shape)
    segment = np.broadcast_to(number, mask.shape)
    floats = jnp.result_type(float)
    advantages = np.asarray(advantages, floats)
    advantages = advantages if advantages.ndim == 2 else advantages[:, None]
    return Batch(
        tokens=index, positions=index, segment_ids=segment, prefix_ids=np.zeros_like(index), parents=np.maximum(index - 1, 0),
        trajectory_ids=np.where(mask, segment, 0), loss_mask=mask, advantages=np.where(mask, advantages, 0).astype(floats),
        behavior_logprobs=np.zeros(mask.shape, floats), versions=np.zeros_like(index),
        trajectories=np.asarray(len(mask) if trajectories is None else trajectories, floats),
        proximal_logprobs=np.asarray(old, floats),
    )._replace(**{name: np.asarray(x, floats) for name, x in fields.items()})  # fmt: skip


QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options: to compile takes longer here than to run."""


@partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def _differentiate(losses: tuple[Callable, ...], logprobs, weights, batch: Batch):
    def value(x, w, loss):
        total, stats = loss(x, batch._replace(weights=w))
        return total.value, stats

    return [jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(logprobs, weights, loss) for loss in losses]


def derivatives(loss: Callable, logprobs, batch: Batch, among: tuple[Callable, ...] = ()):
    """Loss, gradients with respect to the log-probabilities and to `batch.weights`, and statistics.

    Compiled once for all of the losses `among` which it is.
    """
    x, among = np.asarray(logprobs, jnp.result_type(float)), among or (loss,)
    found = _differentiate(among, x, batch.weights, batch._replace(weights=None))
    (value, stats), (grad, of_weights) = found[among.index(loss)]
    numbers = {name: float(x.value) for name, x in jax.device_get(stats).items()}
    return float(value), np.asarray(grad), of_weights, numbers


def stacked(batch: Batch, minibatches: int = 1, micros: int = 1) -> Batch:
    """`rows` cut into minibatches and micro-batches `[m u r t]`, trajectories numbered from 1 in each."""
    size = len(batch.loss_mask) // (minibatches * micros)

    def cut(x):
        return (
            np.asarray(x).reshape(minibatches, micros, size, -1)
            if np.ndim(x)
            else np.full((minibatches, micros), size, x.dtype)
        )

    whole = jax.tree.map(cut, batch)
    ids = np.where(whole.loss_mask, np.arange(1, size + 1, dtype=np.int32)[:, None], 0)
    return whole._replace(trajectory_ids=ids)
