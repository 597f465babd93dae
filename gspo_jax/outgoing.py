"""Parameters on their way out: Hugging Face tensors, computed leaf by leaf on the device and brought to the host."""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import Array

from gspo_jax.sharding import here
from gspo_jax.types import Params
from serving_bridge import trees
from serving_bridge.shards import Shards
from serving_bridge.stage import DTYPES, Staged, Tensor
from serving_bridge.weights import Weight, leads, leaf_shape, letters, siblings, sides, stacked, tensor_names, tensor_shape

CHUNK_BYTES = 2**30
"""Most bytes of a leaf that are computed at a time, in the outgoing dtype."""


class Outgoing:
    """The tensors of a weight table in `dtype` (BF16 | F32), by their Hugging Face names.

    Without `stochastic` bit for bit what `serving_bridge.convert.export_weights` yields and a cast to nearest even makes of
    it, several times faster. With it each bfloat16 is one of the two neighbors of its float32, so that it is equal to that on
    average: to nearest, an update smaller than half their distance would not be served at all. Drawn anew for each `version`,
    and the same for the same. `tensors` are in the order in which a server loads them best: layer by layer.
    """

    def __init__(self, table: Sequence[Weight], sizes: Mapping[str, int], dtype: str, *, stochastic: bool = False):
        self._rows = [(row, siblings(row, table)) for row in table if leads(row)]
        self._sizes, self._dtype = sizes, dtype
        self.tensors = tuple(_layer_major(table, sizes, dtype))
        self.stochastic = stochastic and dtype == "BF16"
        self._turn = jax.jit(partial(_turn, sizes=tuple(sizes.items()), dtype=DTYPES[dtype]), static_argnums=0)

    def _key(self, version: int, row: Weight, start: int) -> Array | None:
        if not self.stochastic:
            return None
        key = jax.random.key(version, impl="rbg")  # generated at the speed of memory
        return jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(row.path.encode())), start)

    def arrays(self, params: Params, version: int = 0) -> Iterator[tuple[str, np.ndarray]]:
        """`(name, host array)` of every tensor. The arrays are views of larger ones: copy what is to last.

        Of parameters that several processes have parts of, all of them must run it to its end.
        """
        for row, parts in self._rows:
            leaves = [trees.get(params, part.path) for part in parts]
            names = dict(tensor_names(row, self._sizes))
            if not stacked(row):
                whole = [here(leaf) for leaf in leaves]
                yield names[()], np.asarray(self._turn(tuple(parts), whole, self._key(version, row, 0)))
                continue
            count = leaf_shape(row, self._sizes)[0]
            size = math.prod(leaf_shape(row, self._sizes)) * len(parts) * DTYPES[self._dtype].itemsize
            step = max(1, count * CHUNK_BYTES // size)
            for start in range(0, count, step):
                key = self._key(version, row, start)
                some = [here(leaf[start : start + step]) for leaf in leaves]
                found = np.asarray(self._turn(tuple(parts), some, key))
                for index, name in names.items():
                    if start <= index[0] < start + step:
                        yield name, found[(index[0] - start, *index[1:])]

    def on_device(self, params: Params) -> Iterator[tuple[str, Array]]:
        """`(name, device array)` in the order of `tensors`, computed one by one as they are asked for; cast to nearest."""
        where = {name: (parts, index) for row, parts in self._rows for index, name in tensor_names(row, self._sizes)}
        for tensor in self.tensors:
            parts, index = where[tensor.name]
            leaves = [trees.get(params, part.path)[tuple(slice(i, i + 1) for i in index)] for part in parts]
            found = self._turn(tuple(parts), leaves, None)
            yield tensor.name, jax.device_put(found.reshape(tensor.shape), jax.devices()[0])


class OnDevice:
    """The arrays of a version for NCCL: from the parameters while they are published, else from the staged file.

    From the staged file always if they were rounded stochastically: every server is to have the same bits. And always in a
    run of several processes.
    """

    def __init__(self, outgoing: Outgoing):
        self._outgoing = outgoing
        self.live: tuple[int, Params] | None = None

    def __call__(self, staged: Staged) -> Iterator[tuple[str, Any]]:
        alone = jax.process_count() == 1  # or all processes would have to take part, at times only the servers know
        if alone and self.live is not None and self.live[0] == staged.version and not self._outgoing.stochastic:
            return self._outgoing.on_device(self.live[1])
        shards = Shards(staged.path.parent, staged.path.name)
        return ((name, jax.device_put(shards.read(name))) for name in staged.names)


def pack(arrays: Sequence[Array]) -> Array:
    """The bytes of arrays, one after the other, uint8 `[nbytes]` on their device."""
    return jnp.concatenate([jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(-1) for array in arrays])


def rounded(x: Array, key: Array) -> Array:
    """`x` float32 as bfloat16, up with the probability that makes it right on average; what is a bfloat16 stays."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _turn(
    rows: tuple[Weight, ...],
    leaves: Sequence[Array],
    key: Array | None,
    *,
    sizes: tuple[tuple[str, int], ...],
    dtype: Any,
) -> Array:
    """The Hugging Face tensors of leaves that share them, stacked as the leaves are; rounded by `key` if there is one."""
    row, known = rows[0], dict(sizes)
    axes = stacked(row)
    outside, (hf, flax) = " ".join(f"stack{i}" for i in range(len(axes))), sides(row)
    keys = [] if key is None else list(jax.random.split(key, len(leaves)))
    typed = (
        [rounded(leaf, k) for leaf, k in zip(leaves, keys, strict=True)] if keys else [leaf.astype(dtype) for leaf in leaves]
    )
    if row.part is None:
        return rearrange(typed[0], f"{outside} {flax} -> {outside} {hf}", **letters(row, known))
    return rearrange(jnp.stack(typed), f"{row.part[0]} {outside} {flax} -> {outside} {hf}", **letters(row, known))


def _layer_major(table: Sequence[Weight], sizes: Mapping[str, int], dtype: str) -> Iterator[Tensor]:
    """What is in no layer first, then layer by layer."""
    found = []
    for row in filter(leads, table):
        axes, layers = stacked(row), row.layers
        for index, name in tensor_names(row, sizes):
            place = index[axes.index("l")] if "l" in axes else -1
            layer = layers[place] if layers is not None and place >= 0 else place
            found.append((layer, Tensor(name, dtype, tensor_shape(row, sizes))))
    return (tensor for _, tensor in sorted(found, key=lambda each: each[0]))
