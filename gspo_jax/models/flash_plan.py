"""How `flash` cuts rows into blocks, and which pairs of blocks it visits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from gspo_jax.models.layers import Spots

LARGEST = jnp.iinfo(jnp.int32).max
ALIGNMENT = 128
"""What every block size divides."""
PLANNED = 64
"""Plans are made for blocks of at least so many tokens: pairs of smaller ones would be as many as a mask has entries."""


class Tile(NamedTuple):
    """How a kernel cuts rows: tokens of a block of queries and of keys, warps of a program, stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The cut of each kernel."""

    forward: Tile
    queries: Tile
    keys: Tile


def tiles(width: int, dtype: Any) -> Tiles:
    """Blocks for heads of `width`, a power of two: large ones that an H100's registers hold without spilling, and where its
    shared memory allows, two programs a multiprocessor. float32 multiplies in plain registers: small ones."""
    if jnp.dtype(dtype).itemsize == 4:
        side = 32 if width <= 64 else 16
        return Tiles(*[Tile(side, side, 8, 1)] * 3)
    if width <= 64:
        return Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
    if width <= 128:
        return Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
    return Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2))


def mask_rows(spots: Spots, window: Array | None) -> Int[Array, "b 5 t"]:
    """What the mask is made of, by token: as a query its segment, its prefix (-1: none) and the last position too far away to
    be seen; as a key its segment and its position."""
    pads = ((0, 0), (0, -spots.segments.shape[1] % ALIGNMENT))
    prefixes = jnp.zeros_like(spots.segments) if spots.prefixes is None else spots.prefixes
    position, segment, prefix = (jnp.pad(jnp.asarray(x, jnp.int32), pads) for x in (spots.positions, spots.segments, prefixes))
    own = jnp.where(segment > 0, segment, -1)
    prefix = jnp.where((segment > 0) & (prefix > 0), prefix, -1)
    far = jnp.full_like(position, -LARGEST) if window is None else position - window.astype(jnp.int32)
    return jnp.stack([own, prefix, far, segment, position], 1)


def plans(rows: Int[Array, "b 5 t"], tile: Tile) -> tuple[Int[Array, "b i 8"], Int[Array, "b j 8"]]:
    """What each block of queries has to visit of the keys, and each block of keys of the queries (`_plan`).

    A block of keys is worth a visit if its range of segments meets that of the queries' segments (or prefixes) and, in the
    order of segment and position, its last key comes after all that the first query is too far away from.
    """
    b, _, t = rows.shape
    queries, keys = max(tile.queries, PLANNED), max(tile.keys, PLANNED)
    own, prefix, far = (rows[:, i].reshape(b, -1, 1, queries) for i in range(3))
    segment, position = (rows[:, i].reshape(b, 1, -1, keys) for i in (3, 4))
    low, high = jnp.where(segment > 0, segment, LARGEST).min(-1), segment.max(-1)
    top = jnp.where(segment == high[..., None], position, -1).max(-1)
    query, key = jnp.arange(0, t, queries)[:, None], jnp.arange(0, t, keys)
    apart = (key + keys <= query + 1) & (position.min(-1) > far.max(-1)) & (segment.min(-1) == high)

    def pairs(wanted: Array) -> tuple[Array, Array]:
        least, most = jnp.where(wanted > 0, wanted, LARGEST).min(-1), wanted.max(-1)
        limit = jnp.where(wanted == least[..., None], far, LARGEST).min(-1)
        near = (high > least) | ((high == least) & (top > limit))
        some = (key < query + queries) & (least <= high) & (low <= most) & near
        return some, apart & (wanted.min(-1) == most) & (most == high)

    found, parts = (pairs(own), pairs(prefix)), (queries // tile.queries, keys // tile.keys)
    return jnp.repeat(_plan(*found, 2) * parts[1], parts[0], 1), jnp.repeat(_plan(*found, 1) * parts[0], parts[1], 1)


def _plan(own: tuple[Array, Array], prefix: tuple[Array, Array], axis: int) -> Int[Array, "b i 8"]:
    """Ranges of blocks along `axis` of `[b i j]`: two to visit, apart and in order, then two that are visible throughout.

    Each pair of arrays tells of which blocks some is visible, and of which everything is, by segments or by prefixes.
    """
    count = own[0].shape[axis]
    at = jnp.arange(count)[:, None] if axis == 1 else jnp.arange(count)

    def last(pairs: Array) -> Array:
        return jnp.where(pairs, at + 1, 0).max(axis)

    def span(pairs: Array) -> tuple[Array, Array]:
        start = jnp.where(pairs, at, count).min(axis)
        return start, jnp.maximum(last(pairs), start)

    def run(pairs: Array) -> tuple[Array, Array]:
        end = last(pairs)
        return last(~pairs & (at < jnp.expand_dims(end, axis))), end

    (start, end), (again, final) = span(own[0]), span(prefix[0])
    swapped = again < start
    start, again = jnp.where(swapped, again, start), jnp.where(swapped, start, again)
    end, final = jnp.where(swapped, final, end), jnp.where(swapped, end, final)
    again = jnp.maximum(again, end)
    return jnp.stack([start, end, again, jnp.maximum(again, final), *run(own[1]), *run(prefix[1])], -1)
