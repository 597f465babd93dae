"""Quantized kernels: qwix arrays that stand where a float array stood. Only `Linear` and the experts read them."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax import Array
from jax.sharding import NamedSharding

TILE = 64
"""Input features that share one scale, at most; the block size of QLoRA (arXiv 2305.14314)."""
LEAST = 16
"""Where no tile of so many divides the features, all of them share one."""

QTYPES = {"nf4": "nf4", "int8": jnp.int8}


def quantize(kernel: Array, inputs: int, batch: int, qtype: str, dtype: Any) -> qwix.QArray:
    """`kernel` (stacked axes, input axes, output axes) as a quantized array `[*stacked, features in, features out]`.

    `batch` and `inputs` are the numbers of stacked and of input axes. A tile of input features of one output feature shares a
    scale of `dtype`, which is also the type `matrix` returns. Matrix by matrix: nf4 takes many times a matrix's memory.
    """
    stack, features = kernel.shape[:batch], math.prod(kernel.shape[batch : batch + inputs])
    found = _quantized(kernel.reshape(math.prod(stack), features, -1), qtype, jnp.dtype(dtype))
    return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[1:]), found)


@partial(jax.jit, static_argnums=(1, 2))
def _quantized(matrices: Array, qtype: str, dtype: Any) -> qwix.QArray:
    how = {"qtype": QTYPES[qtype], "tiled_axes": {0: tile_size(matrices.shape[1]), 1: 1}, "scale_dtype": dtype}
    return jax.lax.map(lambda x: qwix.quantize(x.astype(jnp.float32), **how), matrices)


type Rooms = Mapping[tuple[slice, ...], np.ndarray]
"""Parts of an array, by what they are of it."""


def join_layers(layers: Iterator[qwix.QArray], count: int, place: Callable[[qwix.QArray], NamedSharding | None]) -> qwix.QArray:
    """Quantized layers `[1 ...]` as one array `[count ...]` with the sharding that `place` says (None: on the default device).

    One layer at a time is on the device that quantizes; of the others the host has the parts that its own devices keep.
    """
    first = next(layers)
    sharding, (arrays, tree) = place(first), jax.tree.flatten(first)
    shapes = [(count, *x.shape[1:]) for x in arrays]
    rooms = [_rooms(shape, x.dtype, sharding) for shape, x in zip(shapes, arrays, strict=True)]
    for i, layer in enumerate(itertools.chain([first], layers)):
        for parts, x in zip(rooms, map(np.asarray, jax.tree.leaves(layer)), strict=True):
            for index, room in parts.items():
                start, stop, _ = index[0].indices(count)
                if start <= i < stop:
                    room[i - start] = x[0][index[1:]]
    return tree.unflatten(_settled(parts, shape, sharding) for parts, shape in zip(rooms, shapes, strict=True))


def _rooms(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> Rooms:
    whole = (slice(None),) * len(shape)
    places = [whole] if sharding is None else sharding.addressable_devices_indices_map(shape).values()
    return {
        index: np.empty([len(range(n)[part]) for n, part in zip(shape, index, strict=True)], dtype) for index in places if index
    }


def _settled(parts: Rooms, shape: tuple[int, ...], sharding: NamedSharding | None) -> Array:
    if sharding is None:
        return jax.device_put(*parts.values())
    return jax.make_array_from_callback(shape, sharding, lambda index: parts[index or ()])


def tile_size(features: int) -> int:
    """The largest divisor up to TILE, or all features when that is below LEAST."""
    largest = max(size for size in range(1, TILE + 1) if features % size == 0)
    return largest if largest >= LEAST else features


def is_quantized(kernel: Any) -> bool:
    """Whether a leaf is a quantized kernel."""
    return isinstance(kernel, qwix.QArray)


def matrix(kernel: Any, dtype: Any) -> Array:
    """The kernel as a float array of `dtype`, dequantized if need be."""
    return (qwix.dequantize(kernel) if is_quantized(kernel) else kernel).astype(dtype)


def nbytes(tree: Any) -> int:
    """Bytes of a tree's arrays, four-bit ones counted as half a byte."""
    return sum(int(x.size * jnp.iinfo(x.dtype).bits / 8) if _integer(x) else x.size * x.dtype.itemsize
               for x in jax.tree.leaves(tree))  # fmt: skip


def _integer(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)
