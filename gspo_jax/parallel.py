"""Collectives by mesh axis, for code inside `shard_map`. Where an axis is not there, or has one device, they do nothing.

Axes: `replica` (whole copies of the state), `fsdp` (rows, and the state split between them), `tensor` (heads and features),
`sequence` (the tokens of a row). A value is *varying* over an axis when its devices may hold different ones; the gradient of
what is not varying is summed over the axis, which is how every reduction of the backward pass comes about.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

AXES = ("replica", "fsdp", "tensor", "sequence")
ROWS = ("replica", "fsdp")
"""Axes over which the rows of a batch are split."""
STORE = ("fsdp", "sequence")
"""Axes over which matrices at rest are split, to be gathered where they are used (ZeRO-3, arXiv 1910.02054)."""


def size(*names: str) -> int:
    """Devices along axes, together; 1 outside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in names if name in mesh.manual_axes)


def rank(name: str) -> Array | int:
    """This device's place along an axis."""
    return jax.lax.axis_index(name) if size(name) > 1 else 0


def _varies(x: Array) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    found = getattr(kind, "manual_axis_type", None)  # jax 0.12; `vma` before
    return found.varying if found is not None else kind.vma


def varying(tree: Any, names: Sequence[str] = ("replica", "fsdp", "sequence")) -> Any:
    """The same values, which the compiler may no longer take to be equal over these axes."""
    manual = jax.sharding.get_abstract_mesh().manual_axes

    def one(x: Array) -> Array:
        missing = tuple(name for name in names if name in manual and name not in _varies(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def varies(x: Array, name: str) -> bool:
    """Whether devices along an axis may hold different values."""
    return name in _varies(x)


def alike(x: Array, other: Array) -> Array:
    """`x`, varying over the axes that `other` varies over."""
    return varying(x, tuple(_varies(other)))


def summed(tree: Any, *names: str) -> Any:
    """The sums over axes of what varies along them; what does not is the sum already."""

    def one(x: Array) -> Array:
        along = tuple(name for name in names if varies(x, name))
        return jax.lax.psum(x, along) if along else x

    return jax.tree.map(one, tree)


def gathered(x: Array, axis: int, names: Sequence[str] = STORE) -> Array:
    """The parts of all devices along mesh axes, joined along array axis `axis`; its gradient is summed and split again."""
    if size(*names) == 1:
        return x
    wide = x.astype(jnp.int8) if x.dtype.itemsize == 1 and jnp.iinfo(x.dtype).bits < 8 else x  # no collective of four bits
    return jax.lax.all_gather(wide, tuple(names), axis=axis, tiled=True).astype(x.dtype)


def whole(leaf: Any, shape: Sequence[int]) -> Any:
    """A leaf that is split at rest, with the `shape` it is computed with: gathered along the axis that is shorter.

    Quantized arrays are gathered as they are; their scales are split along the same axis.
    """
    first = jax.tree.leaves(leaf)[0]
    for axis, wanted in enumerate(shape):
        if first.shape[axis] != wanted:
            leaf = jax.tree.map(lambda x, axis=axis: gathered(x, axis), leaf)
    return leaf


def scattered(grads: Array, leaf: Array) -> Array:
    """Gradients of `whole(leaf, ...)` to the gradient of `leaf`: summed over the devices, which each keep their part."""
    (found,) = jax.linear_transpose(lambda x: whole(x, grads.shape), leaf)(grads)
    return found


def sliced(x: Any, axis: int, name: str = "sequence") -> Any:
    """This device's part of an array that all devices of the mesh axis have whole."""
    parts = size(name)
    if parts == 1:
        return x
    width = x.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), rank(name) * width, width, axis)


def exchanged(x: Array, split: int, join: int, name: str = "sequence") -> Array:
    """Each device gives every other a part along array axis `split` and joins what it gets along `join` (arXiv 2309.14509)."""
    return jax.lax.all_to_all(x, name, split, join, tiled=True) if size(name) > 1 else x


def divides(width: int, name: str = "tensor") -> bool:
    """Whether the devices of an axis, more than one, can divide so many among them."""
    return size(name) > 1 and width % size(name) == 0


def entering(x: Array, split: bool) -> Array:
    """What the devices of `tensor` all have, on its way into a block that they divide among them: one sum on its way back."""
    return varying(x, ("tensor",)) if split else x


class Heads(NamedTuple):
    """How the devices divide the heads of attention: over `tensor` for good, over `sequence` for the attention itself."""

    queries: int
    keys: int
    split: bool
    """Whether each device of `tensor` has its own query heads."""
    split_keys: bool
    """Whether it has its own key-value heads, too; else it takes the one that its queries need."""

    @staticmethod
    def of(queries: int, keys: int) -> "Heads":
        """The division of so many heads: none over `tensor` where they do not divide."""
        return Heads(queries, keys, *splits_heads(queries, keys, size("tensor")))

    def over_rows(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """`[b t _ h]` of the tokens here to `[b t _ h]` of whole rows and fewer heads."""
        if self.split and not self.split_keys:
            group = self.queries // self.keys
            first = rank("tensor") * (self.queries // size("tensor")) // group
            k, v = (jax.lax.dynamic_slice_in_dim(varying(x, ("tensor",)), first, 1, 2) for x in (k, v))
        parts = size("sequence")
        if k.shape[2] % parts:
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
        blank = -q.shape[2] % parts  # heads that nobody asked for, where they do not divide
        q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, blank), (0, 0))) if blank else x for x in (q, k, v))
        return exchanged(q, 2, 1), exchanged(k, 2, 1), exchanged(v, 2, 1)

    def back(self, out: Array) -> Array:
        """Results of whole rows back to the tokens here and all heads of this device."""
        return exchanged(out, 1, 2)[:, :, : self.queries // (size("tensor") if self.split else 1)]


def splits_heads(queries: int, keys: int, devices: int) -> tuple[bool, bool]:
    """Whether so many devices divide the query heads among them, and the key-value heads."""
    if devices == 1 or queries % devices:
        return False, False
    if keys % devices == 0:
        return True, True
    return (queries // keys) % (queries // devices) == 0, False
