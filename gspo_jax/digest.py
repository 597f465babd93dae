"""Fingerprints of arrays: equal bits, equal digest, whatever the device count or the order of summation."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gspo_jax.types import Batch


@jax.jit
def _sums(tree: Any) -> list[Array]:
    return [_sum(x) for x in jax.tree.leaves(tree)]


def _sum(x: Array) -> Array:
    """Two integer sums over the words of `x`, each word mixed with its place. Integer addition is exact in any order."""
    words = {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}[x.dtype.itemsize]
    whole = x if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jax.lax.bitcast_convert_type(x, words)
    bits = whole.astype(jnp.uint32).reshape(-1)
    place = jnp.arange(bits.size, dtype=jnp.uint32)
    mixed = (bits ^ (place * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE3D)
    return jnp.stack([jnp.sum(mixed ^ (mixed >> 13)), jnp.sum(mixed * (2 * place + 1))])


def params_digest(params: Any) -> str:
    """A hex digest of every leaf's path, shape, dtype and bits. Made to find differences, not to resist an attacker."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [f"{jax.tree_util.keystr(path)} {x.shape} {x.dtype}" for path, x in leaves]
    sums = np.concatenate(jax.device_get(_sums(params)))
    return hashlib.sha256("\n".join(names).encode() + sums.astype("<u4").tobytes()).hexdigest()[:32]


def batch_digest(batch: Batch) -> str:
    """A hex digest of a host batch."""
    hasher = hashlib.sha256()
    for name, x in batch._asdict().items():
        if x is not None:
            array = np.ascontiguousarray(x)
            hasher.update(f"{name} {array.shape} {array.dtype}".encode() + array.tobytes())
    return hasher.hexdigest()[:32]
