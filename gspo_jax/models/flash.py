"""Attention over packed rows in linear memory: FlashAttention-2 (arXiv 2307.08691) with the mask of `layers.row_mask`.

Rows are cut into blocks. A plan made from the segments says which pairs of blocks hold anything visible, and which of them need
no mask, so that the work follows the visible pairs. The kernels are in `flash_kernels`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from gspo_jax.models.flash_kernels import forward_kernel, keys_kernel, queries_kernel
from gspo_jax.models.flash_plan import ALIGNMENT, Tile, mask_rows, plans, tiles
from gspo_jax.models.launch import launch, together
from gspo_jax.models.layers import Spots


def flash(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    spots: Spots,
    scale: float,
    window: Int[Array, ""] | None = None,
    interpret: bool = False,
) -> Float[Array, "b t n h"]:
    """Grouped-query attention over packed rows, for CUDA: what `attend` returns with `row_mask(spots)`, cut to `window`
    positions where that is given (a huge one cuts nothing), without any array of `t * t`.

    Differentiable in q, k, v; deterministic; softmax in float32. A query that sees nothing returns zeros and has no gradient.
    Inside `shard_map` every device attends over its own rows and heads. `interpret` runs the kernels as XLA code, anywhere and
    slowly. On a machine without a GPU, lowering needs a mesh in context whose devices say what they are.
    """
    t, h = q.shape[1], q.shape[3]
    rows = mask_rows(spots, window)
    pads = ((0, 0), (0, -t % ALIGNMENT), (0, 0), (0, pl.next_power_of_2(max(h, 16)) - h))
    given = (*(jnp.pad(x, pads) for x in (q, k, v)), rows)
    return _flash(scale, interpret, *together(given))[:, :t, :, :h]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(scale: float, interpret: bool, q: Array, k: Array, v: Array, rows: Array) -> Array:
    return _forward(scale, interpret, q, k, v, rows)[0]


def _forward(scale: float, interpret: bool, q: Array, k: Array, v: Array, rows: Array) -> tuple[Array, tuple[Array, ...]]:
    (b, t, n, h), tile = q.shape, tiles(q.shape[3], q.dtype).forward
    block, whole = _block(tile.queries, h), _whole(t, h, n // k.shape[2])
    out, lse = _launch(
        partial(forward_kernel, scale=scale, tile=tile),
        tile,
        (t // tile.queries, n, b),
        [block, whole, whole],
        [(block, q.shape, q.dtype), (_line(tile.queries), (b, n, t), jnp.float32)],
        interpret,
        (plans(rows, tile)[0], rows, q, k, v),
    )
    return out, (q, k, v, rows, out, lse)


def _backward(scale: float, interpret: bool, kept: tuple[Array, ...], dout: Array) -> tuple[Array | None, ...]:
    q, k, v, rows, out, lse = kept
    (b, t, n, h), heads = q.shape, k.shape[2]
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), dout.astype(jnp.float32))
    _, tile, other = tiles(h, q.dtype)
    block, whole, line = _block(tile.queries, h), _whole(t, h, n // heads), _line(tile.queries)
    [dq] = _launch(
        partial(queries_kernel, scale=scale, tile=tile),
        tile,
        (t // tile.queries, n, b),
        [block, whole, whole, block, line, line],
        [(block, q.shape, q.dtype)],
        interpret,
        (plans(rows, tile)[0], rows, q, k, v, dout, lse, delta),
    )
    block, shared = _block(other.keys, h), pl.BlockSpec((None, t, n // heads, h), lambda i, j, r: (r, 0, j, 0))
    lines = pl.BlockSpec((None, n // heads, t), lambda i, j, r: (r, j, 0))
    dk, dv = _launch(
        partial(keys_kernel, scale=scale, tile=other),
        other,
        (t // other.keys, heads, b),
        [shared, block, block, shared, lines, lines],
        [(block, k.shape, k.dtype), (block, v.shape, v.dtype)],
        interpret,
        (plans(rows, other)[1], rows, q, k, v, dout, lse, delta),
    )
    return dq, dk, dv, None


_flash.defvjp(_forward, _backward)


def _block(size: int, h: int) -> pl.BlockSpec:
    """A program's tokens of its head, `[size h]` of `[b t n h]`."""
    return pl.BlockSpec((None, size, None, h), lambda i, j, r: (r, i, j, 0))


def _whole(t: int, h: int, group: int) -> pl.BlockSpec:
    """All of the row, `[t h]` of `[b t k h]`, of the head that `group` query heads share."""
    return pl.BlockSpec((None, t, None, h), lambda i, j, r: (r, 0, j // group, 0))


def _line(size: int) -> pl.BlockSpec:
    """A number for each of a program's tokens, `[size]` of `[b n t]`."""
    return pl.BlockSpec((None, None, size), lambda i, j, r: (r, j, i))


def _launch(
    kernel: Callable[..., None],
    tile: Tile,
    grid: tuple[int, ...],
    specs: Sequence[pl.BlockSpec],
    out: Sequence[tuple[pl.BlockSpec, tuple[int, ...], Any]],
    interpret: bool,
    args: tuple[Array, ...],
) -> Sequence[Array]:
    """The kernel on a grid of blocks, heads and rows; `args` are its plan, `rows` and what `specs` say, `out` its results."""
    plan = pl.BlockSpec((None, None, 8), lambda i, j, r: (r, i, 0))
    rows = pl.BlockSpec((None, *args[1].shape[1:]), lambda i, j, r: (r, 0, 0))
    return launch(
        kernel, args, [(shape, dtype) for _, shape, dtype in out], 0, warps=tile.warps, stages=tile.stages, interpret=interpret,
        grid=grid, in_specs=[plan, rows, *specs], out_specs=[spec for spec, _, _ in out],
    )  # fmt: skip
