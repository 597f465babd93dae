"""The three kernels of `flash`, in Pallas for Triton: the forward pass, the gradient of queries, that of keys and values.

A program works on one block of a row's queries (or keys) and visits the blocks of the other side that its plan names, in order.
It alone writes its results, so nothing depends on which program comes first.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float

from gspo_jax.models.flash_plan import Tile

LOG2E = math.log2(math.e)
NEVER = -1e30
"""Score of a pair that the mask forbids."""


def forward_kernel(*refs: Any, scale: float, tile: Tile) -> None:
    """Writes the attention of a block of queries `[q h]` and the base-2 logarithm of its softmax's denominator `[q]`."""
    plan, rows, q_ref, k_ref, v_ref, out_ref, lse_ref = refs
    queries = pl.ds(pl.program_id(0) * tile.queries, tile.queries)
    q = q_ref[...]

    def visit(at: Array, whole: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = carry
        keys = pl.ds(at * tile.keys, tile.keys)
        scores = _visible(_dot(q, k_ref[keys, :].T) * (scale * LOG2E), whole, rows, queries, keys)
        new = jnp.maximum(top, scores.max(1))
        weights, kept, v = jnp.exp2(scores - new[:, None]), jnp.exp2(top - new), v_ref[keys, :]
        return out * kept[:, None] + _dot(weights.astype(v.dtype), v), new, total * kept + weights.sum(1)

    zeros = jnp.zeros(tile.queries, jnp.float32)
    out, top, total = _sweep(plan, visit, (jnp.zeros(q.shape, jnp.float32), zeros + NEVER, zeros))
    seeing = top > NEVER / 2
    total = jnp.where(seeing, total, 1.0)
    out_ref[...] = jnp.where(seeing[:, None], out / total[:, None], 0.0).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(seeing, top + jnp.log2(total), -NEVER)  # against which no score has any weight


def queries_kernel(*refs: Any, scale: float, tile: Tile) -> None:
    """Writes the gradient of a block of queries `[q h]`; `delta` `[q]` is each output's product with its gradient."""
    plan, rows, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dq_ref = refs
    queries = pl.ds(pl.program_id(0) * tile.queries, tile.queries)
    q, dout, lse, delta = q_ref[...], dout_ref[...], lse_ref[...], delta_ref[...]

    def visit(at: Array, whole: Array, dq: Array) -> Array:
        keys = pl.ds(at * tile.keys, tile.keys)
        k = k_ref[keys, :]
        scores = _visible(_dot(q, k.T) * (scale * LOG2E), whole, rows, queries, keys)
        weights = jnp.exp2(scores - lse[:, None])
        dscores = weights * (_dot(dout, v_ref[keys, :].T) - delta[:, None])
        return dq + _dot(dscores.astype(k.dtype), k)

    dq = _sweep(plan, visit, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * scale).astype(dq_ref.dtype)


def keys_kernel(*refs: Any, scale: float, tile: Tile) -> None:
    """Writes the gradients of a block of keys and of values `[s h]`, summed over the query heads that share them, in order."""
    plan, rows, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dk_ref, dv_ref = refs
    keys = pl.ds(pl.program_id(0) * tile.keys, tile.keys)
    k, v = k_ref[...], v_ref[...]

    def head(g: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def visit(at: Array, whole: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            queries = pl.ds(at * tile.queries, tile.queries)
            q, dout = q_ref[queries, g, :], dout_ref[queries, g, :]
            scores = _visible(_dot(k, q.T) * (scale * LOG2E), whole, rows, queries, keys, transposed=True)
            weights = jnp.exp2(scores - lse_ref[g, queries][None, :])
            dv = dv + _dot(weights.astype(dout.dtype), dout)
            dscores = weights * (_dot(v, dout.T) - delta_ref[g, queries][None, :])
            return dk + _dot(dscores.astype(q.dtype), q), dv

        return _sweep(plan, visit, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[1], head, (zeros, zeros))
    dk_ref[...] = (dk * scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def _sweep[T](plan: Any, visit: Callable[[Array, Array, T], T], carry: T) -> T:
    """`visit(block, whether all of it is visible, carry)` for every block of the plan's two ranges, in order."""
    start, end, again, last, a, b, c, d = (plan[i] for i in range(8))
    skipped = again - end

    def step(i: Array, carry: T) -> T:
        at = jnp.where(i < end, i, i + skipped)
        return visit(at, ((a <= at) & (at < b)) | ((c <= at) & (at < d)), carry)

    return jax.lax.fori_loop(start, last - skipped, step, carry)


def _visible(
    scores: Float[Array, "i j"], whole: Array, rows: Any, queries: Any, keys: Any, transposed: bool = False
) -> Float[Array, "i j"]:
    """Scores `[q s]` (or `[s q]`, if transposed) with those of forbidden pairs replaced, unless all of them are visible."""
    q, s = (slice(None), None), (None, slice(None))
    if transposed:
        q, s = s, q

    def masked(scores: Array) -> Array:
        own, prefix, far = (rows[i, queries] for i in range(3))
        segment, position = (rows[i, keys] for i in (3, 4))
        earlier = (queries.start + jnp.arange(queries.size))[q] >= (keys.start + jnp.arange(keys.size))[s]
        related = (own[q] == segment[s]) | (prefix[q] == segment[s])
        return jnp.where(earlier & related & (position[s] > far[q]), scores, NEVER)

    return jax.lax.cond(whole, lambda scores: scores, masked, scores)


def _dot(a: Float[Array, "i j"], b: Float[Array, "j k"]) -> Float[Array, "i k"]:
    """The product, accumulated in float32; operands of float32 are not rounded."""
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)
