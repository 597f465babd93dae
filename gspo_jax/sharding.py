"""Where arrays live: a mesh of four axes, and from the letters of the weight table the place of every leaf on it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax.mesh import MeshShape
from gspo_jax.models.quantize import is_quantized, tile_size
from gspo_jax.parallel import ROWS, STORE, gathered, splits_heads, varying
from gspo_jax.types import Batch, Params
from serving_bridge import trees
from serving_bridge.weights import Weight, axes_of, leaf_axes, leaf_shape, sides, stacked

MATRICES = ("kernel", "embedding", "head", "lora_a", "lora_b")
"""Last names of the leaves that are split over `parallel.STORE`; the others are small and whole on every device."""
WIDTHS = ("f", "fe", "fs", "v")
"""Letters that `tensor` splits wherever they divide; those of heads are split together, or not (`parallel.splits_heads`)."""


@dataclass(frozen=True)
class Layout:
    """The place of everything a run computes with. Without a mesh: one device, and all functions are the identity."""

    mesh: Mesh | None = None
    table: Mapping[str, Weight] = field(default_factory=dict)
    """Rows of the weight table, and of an adapter's, by path."""
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def shape(self) -> MeshShape:
        """Devices along each axis."""
        return MeshShape() if self.mesh is None else MeshShape(*self.mesh.devices.shape)

    def spec(self, path: str, leaf: Any = None) -> PartitionSpec:
        """How the parameter of a path is split; not at all where the table has no such path."""
        row, of = self.table.get(path), quantized_spec if is_quantized(leaf) else leaf_spec
        return PartitionSpec() if row is None else of(row, self.sizes, self.shape)

    def places(self, tree: Any) -> Any:
        """The spec of every leaf of parameters, of a state of them, or of gradients; whole where a leaf is none of these."""

        def place(path: Any, leaf: Any) -> Any:
            name = "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
            return jax.tree.map(lambda _: self.spec(name, leaf), leaf)

        return jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_quantized)

    def shardings(self, tree: Any) -> Any:
        """`places` on the mesh; None without one."""
        if self.mesh is None:
            return None
        mesh = self.mesh
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.places(tree), is_leaf=_is_spec)

    def state(self, tree: Any) -> Any:
        """The same parameters, or a whole state, in their places."""
        return tree if self.mesh is None else jax.tree.map(_put, tree, self.shardings(tree))

    def batch(self, batch: Batch) -> Batch:
        """A batch `[m u r t]` with its rows split."""
        if self.mesh is None:
            return batch
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: self.rows(x) if x.ndim > 2 else _put(x, whole), batch)

    def rows(self, x: Any) -> Any:
        """An array `[m u r t]` of such a batch, from wherever it is."""
        return x if self.mesh is None else _put(x, NamedSharding(self.mesh, PartitionSpec(None, None, ROWS)))

    def gathered(self, tree: Any) -> Any:
        """Whole on one device, for the sampler; no copy when there is one device. With several processes `here`, in each."""
        if self.mesh is None:
            return tree
        if not self.mesh.is_multi_process:
            return jax.device_put(tree, self.mesh.devices.flat[0])
        return jax.block_until_ready(jax.tree.map(here, tree))  # what failed, failed here

    def by_rows(
        self, function: Callable[[Params, Batch], Any], *, stats: bool, cast: Callable[[str, Any], Any]
    ) -> Callable[[Params, Batch], Any]:
        """`function` of parameters and a micro-batch `[r t]`, computed by each device for its rows, with explicit collectives.

        What it returns is split by rows, but for `stats`, the last. Leaves that are split over layers are gathered before
        the layers are scanned, as `cast(path, leaf)`.
        """
        if self.mesh is None:
            return function
        mesh = self.mesh

        def local(params: Params, batch: Batch) -> Any:
            found: dict[str, Any] = {}
            for path, leaf in trees.leaves(varying(params)):
                spec = self.spec(path, leaf)
                if len(spec) and spec[0] == STORE and path.startswith("layers"):
                    leaf = jax.tree.map(lambda x: gathered(x, 0), cast(path, leaf))
                trees.put(found, path, leaf)
            return function(found, varying(batch, ROWS))

        def mapped(params: Params, batch: Batch) -> Any:
            rows = jax.tree.map(lambda x: PartitionSpec(ROWS) if x.ndim else PartitionSpec(), batch)
            out = (PartitionSpec(ROWS), PartitionSpec(ROWS), *([PartitionSpec()] if stats else []))
            return jax.shard_map(local, mesh=mesh, in_specs=(self.places(params), rows), out_specs=out)(params, batch)

        return mapped


WHOLE = Layout()


def layout_of(mesh: Mesh | None, table: Sequence[Weight], sizes: Mapping[str, int]) -> Layout:
    """The layout of a model's leaves (and an adapter's, if its rows are in the table too) on a mesh."""
    if mesh is None:
        return Layout()
    return Layout(mesh, {row.path: row for row in table}, sizes)


def leaf_spec(row: Weight, sizes: Mapping[str, int], shape: MeshShape) -> PartitionSpec:
    """The axes `tensor` splits, and of a matrix one more over `parallel.STORE`: the largest that divides, or else the layers.

    Never the rank of an adapter. A matrix no axis of which divides is whole on every device.
    """
    letters, lengths = leaf_axes(row), leaf_shape(row, sizes)
    parts: list[Any] = ["tensor" if letter in _split(sizes, shape.tensor) else None for letter in letters]
    if shape.store > 1 and row.path.rsplit("/", 1)[-1] in MATRICES:
        free = [i for i, part in enumerate(parts) if part is None and letters[i] != "r" and lengths[i] % shape.store == 0]
        inside = [i for i in free if letters[i] != "l"]
        best = max(inside, key=lambda i: lengths[i]) if inside else next(iter(free), None)
        if best is not None:
            parts[best] = STORE
    return _spec(parts)


def quantized_spec(row: Weight, sizes: Mapping[str, int], shape: MeshShape) -> PartitionSpec:
    """`leaf_spec` of a quantized kernel `[*stacked, in, out]`, whose scales `[*stacked, tiles, out]` are split alike."""
    stack, letters, lengths = stacked(row), axes_of(sides(row)[1]), leaf_shape(row, sizes)
    outputs = axes_of(sides(row)[0])[-2].strip("()").split()
    inner = [letter for letter in letters if letter not in outputs]
    by_letter = dict(zip(leaf_axes(row), lengths, strict=True))
    features = math.prod(by_letter[letter] for letter in inner)
    lengths = [*(by_letter[letter] for letter in stack), features // tile_size(features),
               math.prod(by_letter[letter] for letter in letters if letter in outputs)]  # fmt: skip
    split = _split(sizes, shape.tensor)
    parts: list[Any] = [*(None for _ in stack), *("tensor" if set(side) & split else None for side in (inner, outputs))]
    for i, part in enumerate(parts):
        if part and lengths[i] % shape.tensor:
            raise ValueError(f"{row.path}: {lengths[i]} tiles of quantized features do not divide over {shape.tensor} devices")
    order = [len(stack) + 1, len(stack), *range(len(stack))]
    best = next((i for i in order if parts[i] is None and lengths[i] % shape.store == 0), None)
    if shape.store > 1 and best is not None:
        parts[best] = STORE
    return _spec(parts)


def _split(sizes: Mapping[str, int], devices: int) -> set[str]:
    if devices == 1:
        return set()
    found = {letter for letter in WIDTHS if letter in sizes and sizes[letter] % devices == 0}
    return found | {letter for letter, split in zip("nk", splits_heads(sizes["n"], sizes["k"], devices), strict=True) if split}


def _spec(parts: Sequence[Any]) -> PartitionSpec:
    last = max((i for i, part in enumerate(parts) if part is not None), default=-1)
    return PartitionSpec(*parts[: last + 1])


def here(x: Any) -> Any:
    """An array whole on the first device of this process; all processes take part. As it is where no other has a part."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    mesh: Any = x.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec())).addressable_data(0)


def _put(x: Any, sharding: NamedSharding) -> Any:
    """On all processes alike: each gives its own devices their parts of what all have."""
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
