"""Grouped products of a mixture of experts on CUDA: every row meets the kernel of its own expert and nothing else.

The rows of an expert are cut into tiles, from its first row on, so that a tile has rows of one expert only. Which tile is whose
follows from the sizes on the device. Every element of a result is written by one program, which sums in a fixed order: nothing
depends on which program comes first, nor a row's result on the rows around it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Int

from gspo_jax.models.launch import launch, together


class Tile(NamedTuple):
    """What a program works on: rows and columns of its part of the result, and how much of the sum it adds at a time."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    def within(self, *sizes: int) -> "Tile":
        """No larger than a result and a sum of these sizes need; the hardware multiplies 16 at least."""
        rows, columns, inner = (min(own, max(16, pl.next_power_of_2(n))) for own, n in zip(self[:3], sizes, strict=True))
        return Tile(rows, columns, inner, self.warps, self.stages)


class Span(NamedTuple):
    """Indices `start ... start + size - 1` along an axis of an array, of which those from `limit` on are not there."""

    start: Any
    size: int
    limit: Any


def product(x: Float[Array, "p d"], kernel: Float[Array, "e d f"], sizes: Int[Array, " e"]) -> Float[Array, "p f"]:
    """`grouped` on CUDA, `jax.lax.ragged_dot` elsewhere: where the former is compiled, the latter leaves no trace."""
    return jax.lax.platform_dependent(x, kernel, sizes, cuda=grouped, default=jax.lax.ragged_dot)


def grouped(
    x: Float[Array, "p d"], kernel: Float[Array, "e d f"], sizes: Int[Array, " e"], interpret: bool = False
) -> Float[Array, "p f"]:
    """The first `sizes[0]` rows times the first matrix, the next `sizes[1]` times the second, ...; rows beyond them give 0.

    For CUDA. Differentiable in x and kernel; deterministic; sums in float32, float32 operands not rounded. Memory is that of
    the results. Inside `shard_map` every device multiplies its own. `interpret` runs the kernels as XLA code, anywhere and
    slowly. ValueError for an x and a kernel of different types.
    """
    if x.dtype != kernel.dtype:
        raise ValueError(f"x of {x.dtype} and kernel of {kernel.dtype} must be of one type")
    given = (x, kernel, sizes)
    return _grouped(interpret, *together(given))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(interpret: bool, x: Array, kernel: Array, sizes: Array) -> Array:
    return _products(interpret, x, kernel, sizes, turned=False)


def _forward(interpret: bool, x: Array, kernel: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped(interpret, x, kernel, sizes), (x, kernel, sizes)


def _backward(interpret: bool, kept: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, None]:
    x, kernel, sizes = kept
    return _products(interpret, g, kernel, sizes, turned=True), _outer(interpret, x, g, sizes), None


_grouped.defvjp(_forward, _backward)


def tile_of(rows: int, dtype: Any) -> Tile:
    """The tile of a product in which experts have so many rows on average, fewer of them where much of it would be empty.

    An H100's registers hold its sum without spilling, and its shared memory the stages of two programs at once, so that one
    multiplies while the other begins or ends. float32 multiplies in plain registers: a small one.
    """
    if jnp.dtype(dtype).itemsize == 4:
        return Tile(64, 64, 32, 8, 2)
    return Tile(128, 128, 64, 8, 3) if rows >= 256 else Tile(64, 128, 64, 4, 3)


def schedule(sizes: Int[Array, " e"], p: int, rows: int) -> Int[Array, "i 4"]:
    """Expert, first row and end of every tile of at most `rows` rows, and 1 if they meet a kernel: what `p` rows can need.

    Rows that belong to nobody are of expert e, without a kernel. So are the tiles that turn out not to be needed, all empty.
    """
    e = sizes.shape[0]
    ends = jnp.minimum(jnp.append(jnp.cumsum(sizes, dtype=jnp.int32), p), p).astype(jnp.int32)
    starts = jnp.append(0, ends[:-1]).astype(jnp.int32)
    tiles = -(-(ends - starts) // rows)
    last = jnp.cumsum(tiles, dtype=jnp.int32)
    number = jnp.arange(-(-p // rows) + e, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(number[:, None] >= last, 1, dtype=jnp.int32), e)
    start = jnp.minimum(starts[expert] + (number - (last - tiles)[expert]) * rows, p)
    return jnp.stack([expert, start, jnp.minimum(start + rows, ends[expert]), (expert < e).astype(jnp.int32)], 1)


def _products(interpret: bool, x: Array, kernel: Array, sizes: Array, *, turned: bool) -> Array:
    """`grouped`, or with every matrix transposed."""
    (p, d), e, f = x.shape, kernel.shape[0], kernel.shape[1 if turned else 2]
    tile = tile_of(p // e, x.dtype).within(p, f, d)
    plan = schedule(sizes, p, tile.rows)
    lines = pl.BlockSpec((None, 4), lambda j, i: (i, 0))
    work = partial(products_kernel, tile=tile, turned=turned)
    return _launch(work, tile, (pl.cdiv(f, tile.columns), len(plan)), lines, (p, f), interpret, (plan, x, kernel))


def _outer(interpret: bool, x: Array, g: Array, sizes: Array) -> Array:
    """The gradient of the kernel: the product of every expert's rows of x, transposed, with theirs of g."""
    (p, d), f, e = x.shape, g.shape[1], sizes.shape[0]
    tile = tile_of(d, x.dtype).within(d, f, p)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), p)
    plan = jnp.stack([jnp.append(0, ends[:-1]).astype(jnp.int32), ends], 1)
    lines = pl.BlockSpec((None, 2), lambda j, i, n: (n, 0))
    grid = (pl.cdiv(f, tile.columns), pl.cdiv(d, tile.rows), e)
    return _launch(partial(outer_kernel, tile=tile), tile, grid, lines, (e, d, f), interpret, (plan, x, g))


def products_kernel(plan: Any, x: Any, kernel: Any, out: Any, *, tile: Tile, turned: bool) -> None:
    """Writes a tile's rows of some columns of the result; zeros, without a look at any kernel, if they belong to no expert."""
    expert, start, end, meets = (plan[i] for i in range(4))
    rows, columns = Span(start, tile.rows, end), Span(pl.program_id(0) * tile.columns, tile.columns, out.shape[1])

    def step(i: Array, total: Array) -> Array:
        inner = Span(i * tile.inner, tile.inner, x.shape[1])
        a = _load(x, (), rows, inner)
        b = _load(kernel, (expert,), columns, inner).T if turned else _load(kernel, (expert,), inner, columns)
        return total + _dot(a, b)

    total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = jax.lax.fori_loop(0, meets * pl.cdiv(x.shape[1], tile.inner), step, total)
    _store(out, (), rows, columns, total)


def outer_kernel(plan: Any, x: Any, g: Any, out: Any, *, tile: Tile) -> None:
    """Writes a part of an expert's gradient, summed over its rows in order; zeros if it has none."""
    start, end, expert = plan[0], plan[1], pl.program_id(2)
    into = Span(pl.program_id(1) * tile.rows, tile.rows, x.shape[1])
    out_of = Span(pl.program_id(0) * tile.columns, tile.columns, g.shape[1])

    def step(i: Array, total: Array) -> Array:
        rows = Span(start + i * tile.inner, tile.inner, end)
        return total + _dot(_load(x, (), rows, into).T, _load(g, (), rows, out_of))

    total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(end - start, tile.inner), step, total)
    _store(out, (expert,), into, out_of, total)


def _load(ref: Any, first: tuple[Array, ...], *spans: Span) -> Array:
    """What is at `first` and the spans; zeros where that is not there."""
    mask = _inside(spans)
    return triton.load(ref.at[(*first, *(pl.ds(s.start, s.size) for s in spans))], mask=mask, other=None if mask is None else 0)


def _store(ref: Any, first: tuple[Array, ...], rows: Span, columns: Span, value: Array) -> None:
    at = (*first, *(pl.ds(s.start, s.size) for s in (rows, columns)))
    triton.store(ref.at[at], value.astype(ref.dtype), mask=_inside((rows, columns)))


def _inside(spans: Sequence[Span]) -> Array | None:
    """Which elements are there; None where all are for certain."""
    mask = None
    for axis, (start, size, limit) in enumerate(spans):
        if isinstance(limit, int) and limit % size == 0:
            continue
        shape = tuple(s.size for s in spans)
        here = jax.lax.broadcast_in_dim(start + jnp.arange(size, dtype=jnp.int32) < limit, shape, (axis,))
        mask = here if mask is None else mask & here
    return mask


def _dot(a: Float[Array, "i j"], b: Float[Array, "j k"]) -> Float[Array, "i k"]:
    """The product, accumulated in float32; operands of float32 are not rounded."""
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def _launch(
    kernel: Callable[..., None],
    tile: Tile,
    grid: tuple[int, ...],
    plan: pl.BlockSpec,
    shape: tuple[int, ...],
    interpret: bool,
    args: tuple[Array, ...],
) -> Array:
    """The kernel on a grid; `args` are its plan, of which a program sees one line, and two arrays that it sees whole."""
    (found,) = launch(
        kernel, args, [(shape, args[1].dtype)], 1, warps=tile.warps, stages=tile.stages, interpret=interpret,
        grid=grid, in_specs=[plan, pl.BlockSpec(), pl.BlockSpec()], out_specs=[pl.BlockSpec()],
    )  # fmt: skip
    return found
