"""The three kernels of `flash`, in Pallas for Triton: the forward pass, the gradient of queries, that of keys and values.

A program works on one block of a row's queries (or keys) and visits the blocks of the other side that its plan names, in order.
It alone writes its results, so nothing depends on which program comes first.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Bool, Float, Int

LOG2E = math.log2(math.e)
NEVER = -1e30
"""Score of a pair that the mask forbids."""


class Tile(NamedTuple):
    """How a kernel cuts rows: tokens of a block, warps of a program, stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The cut of each kernel."""

    forward: Tile
    queries: Tile
    keys: Tile


ALIGNMENT = 128
"""What every block size divides."""


def tiles(width: int, dtype: Any) -> Tiles:
    """Blocks for heads of `width` (a power of two): the largest that fit an H100's registers without spilling, two programs a
    multiprocessor where its shared memory allows. float32 has no tensor cores and multiplies from registers: small ones."""
    if jnp.dtype(dtype).itemsize == 4:
        side = 32 if width <= 64 else 16
        return Tiles(*[Tile(side, side, 8, 1)] * 3)
    if width <= 64:
        return Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
    if width <= 128:
        return Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
    return Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2))


def forward_kernel(plan: Any, rows: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, lse_ref: Any, *, scale: float, tile: Tile):  # fmt: skip
    """Writes the attention of a block of queries `[q h]` and the base-2 logarithm of its softmax's denominator `[q]`."""
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
    lse_ref[...] = jnp.where(seeing, top + jnp.log2(total), -NEVER)  # no score has any weight against this


def queries_kernel(plan: Any, rows: Any, q_ref: Any, k_ref: Any, v_ref: Any, dout_ref: Any, lse_ref: Any, delta_ref: Any, dq_ref: Any, *, scale: float, tile: Tile):  # fmt: skip
    """Writes the gradient of a block of queries `[q h]`; `delta` is the sum of each output times its gradient."""
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


def keys_kernel(plan: Any, rows: Any, q_ref: Any, k_ref: Any, v_ref: Any, dout_ref: Any, lse_ref: Any, delta_ref: Any, dk_ref: Any, dv_ref: Any, *, scale: float, tile: Tile):  # fmt: skip
    """Writes the gradients of a block of keys and values `[s h]`, summed over the query heads that share them."""
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
    scores: Float[Array, "q s"], whole: Bool[Array, ""], rows: Any, queries: Any, keys: Any, transposed: bool = False
) -> Float[Array, "q s"]:
    """Scores with those of forbidden pairs replaced; `[s q]` if transposed."""

    def masked(scores: Array) -> Array:
        (own, prefix, far), (segment, position) = (rows[i, queries] for i in range(3)), (rows[i, keys] for i in (3, 4))
        earlier = queries.start + jnp.arange(queries.size), keys.start + jnp.arange(keys.size)
        side, other = (1, 0) if transposed else (0, 1)

        def pair(query: Array, key: Array) -> tuple[Array, Array]:
            return jnp.expand_dims(query, other), jnp.expand_dims(key, side)

        def same(query: Array, key: Array) -> Int[Array, "q s"]:
            query, key = pair(query, key)
            return query == key

        (i, j), (limit, at) = pair(*earlier), pair(far, position)
        return jnp.where((same(own, segment) | same(prefix, segment)) & (i >= j) & (at > limit), scores, NEVER)

    return jax.lax.cond(whole, lambda scores: scores, masked, scores)


def _dot(a: Float[Array, "i j"], b: Float[Array, "j k"]) -> Float[Array, "i k"]:
    """The product, accumulated in float32; operands of float32 are not rounded."""
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)
