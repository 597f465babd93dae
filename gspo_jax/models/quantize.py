"""Quantized kernels: qwix arrays that stand where a float array stood. Only `Linear` and the experts read them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from jax import Array

TILE = 64
"""Input features that share one scale, at most; the block size of QLoRA (arXiv 2305.14314)."""

QTYPES = {"nf4": "nf4", "int8": jnp.int8}


def quantize(kernel: Array, inputs: int, batch: int, qtype: str, dtype: Any) -> qwix.QArray:
    """`kernel` (stacked axes, input axes, output axes) as a quantized array `[*stacked, features in, features out]`.

    `batch` and `inputs` are the numbers of stacked and of input axes. A tile of at most TILE input features of one output
    feature shares a scale of `dtype`, which is also the type `matrix` returns.
    """
    stack, features = kernel.shape[:batch], math.prod(kernel.shape[batch : batch + inputs])
    flat = jnp.asarray(kernel, jnp.float32).reshape(*stack, features, -1)
    tiles = dict.fromkeys((*range(batch), batch + 1), 1) | {batch: math.gcd(features, TILE)}
    return qwix.quantize(flat, QTYPES[qtype], tiled_axes=tiles, scale_dtype=dtype)


def matrix(kernel: Any, dtype: Any) -> Array:
    """The kernel as a float array of `dtype`, dequantized if need be."""
    return (qwix.dequantize(kernel) if isinstance(kernel, qwix.QArray) else kernel).astype(dtype)


def nbytes(tree: Any) -> int:
    """Bytes of a tree's arrays, four-bit ones counted as half a byte."""
    return sum(int(x.size * jnp.iinfo(x.dtype).bits / 8) if _integer(x) else x.size * x.dtype.itemsize
               for x in jax.tree.leaves(tree))  # fmt: skip


def _integer(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)
