"""Token embeddings from a table that may be split over a mesh."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from gspo_jax import parallel


def embed(
    table: Float[Array, "v_here d_here"], tokens: Int[Array, "b t"], shape: tuple[int, int], dtype: Any
) -> Float[Array, "b t d"]:
    """Rows of the table, of `shape` when whole, in `dtype`. Where `tensor` divides the vocabulary, each device looks up its own
    words and the results are summed."""
    split = parallel.divides(shape[0])
    words = shape[0] // parallel.size("tensor") if split else shape[0]
    if table.shape == (words, shape[1]) and not split:
        return jnp.take(table, tokens, axis=0).astype(dtype)
    if not split:
        return _lookup(table, tokens, shape, dtype)
    at = tokens - parallel.rank("tensor") * words
    mine = (at >= 0) & (at < words)
    found = _lookup(table, jnp.where(mine, at, 0), (words, shape[1]), dtype)
    return parallel.summed(jnp.where(mine[..., None], found, 0), "tensor")


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: Array, tokens: Array, shape: tuple[int, int], dtype: Any) -> Array:
    """The table travels in `dtype`; its gradient is added up, and travels, in its own type."""
    return jnp.take(parallel.whole(table.astype(dtype), shape), tokens, axis=0)


def _lookup_forward(table, tokens, shape, dtype):
    return _lookup(table, tokens, shape, dtype), (table, tokens)


def _lookup_backward(shape, dtype, residuals, g):
    table, tokens = residuals
    grads = parallel.alike(jnp.zeros(shape, table.dtype), table).at[tokens].add(g.astype(table.dtype))
    return parallel.scattered(grads, table), np.zeros(tokens.shape, jax.dtypes.float0)


_lookup.defvjp(_lookup_forward, _lookup_backward)
