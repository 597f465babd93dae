"""Weights between Flax and Hugging Face: one table of `Weight` rows, read left to right to load and right to left to export.

A row's layout is written in the project's einsum alphabet, Hugging Face side first: `"(n h) d -> d n h"`. A `{letter}` in the
Hugging Face name makes one Flax leaf out of many tensors, stacked along a leading axis per placeholder: `"model.layers.{l}.…"`
gives a leaf with leading axis `l`. Exporting what was loaded gives the same bits.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from serving_bridge import trees
from serving_bridge.folders import copy_side_files, new_folder
from serving_bridge.shards import Shards, StoredLeaf, folder_tensors, raise_problems, write_shards
from serving_bridge.weights import (
    Weight,
    WeightError,
    check_table,
    leads,
    leaf_shape,
    siblings,
    tensor_names,
    tensor_shape,
    to_tensor,
)

__all__ = ["DTYPES", "StoredLeaf", "Weight", "WeightError", "export_weights", "folder_tensors", "load_weights", "open_weights",
           "place", "save_folder"]  # fmt: skip

DTYPES: Mapping[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
"""Tensor types an export may have, by their name in `config.json`."""

_FLOATS = ("F64", "F32", "F16", "BF16")


def load_weights(
    folder: str | Path,
    table: Sequence[Weight],
    sizes: Mapping[str, int],
    dtype: DTypeLike = np.float32,
    put: Callable[[str, np.ndarray], Any] | None = None,
    ignore: Sequence[str] = (),
    twins: Sequence[tuple[str, str]] = (),
    file: str | None = None,
) -> dict[str, Any]:
    """Returns the parameters of a Hugging Face folder as nested dicts of arrays of `dtype`.

    One tensor is read at a time. `put(path, array)` is called once per finished leaf and its result takes the leaf's place, so
    the host never holds more than one leaf if `put` moves it elsewhere. The others are those of `open_weights`, as are errors.
    """
    keep, params = put or (lambda _, array: array), {}
    for path, leaf in open_weights(folder, table, sizes, ignore, twins, file).items():
        trees.put(params, path, keep(path, leaf.astype(dtype).read()))
    return params


def open_weights(
    folder: str | Path,
    table: Sequence[Weight],
    sizes: Mapping[str, int],
    ignore: Sequence[str] = (),
    twins: Sequence[tuple[str, str]] = (),
    file: str | None = None,
) -> dict[str, StoredLeaf]:
    """Returns the leaves of a Hugging Face folder by path, in the order of the table, none of them read yet.

    They are in `model.safetensors` or the shards of `model.safetensors.index.json`. `ignore` are glob patterns of names the
    table may leave out (`"lm_head.weight"` of a tied model). `twins` are pairs of names that must hold the same bits where a
    folder has both (the head of a tied model, its embedding). `file` names the one file to read instead.

    Raises:
        WeightError: no weights, a missing or corrupt file; or all missing, unused, mis-shaped and non-float tensors.
    """
    check_table(table, sizes)
    tensors = Shards(Path(folder), file)
    _check_tensors(table, sizes, tensors, ignore)
    _check_twins(tensors, twins)
    return {row.path: StoredLeaf(tensors, row, sizes) for row in table}


def place(leaf: StoredLeaf, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns a leaf on the devices of a sharding. A process reads what its own devices keep, one device's part at a time."""
    devices: dict[tuple[slice, ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        devices.setdefault(index or (), []).append(device)
    parts = [part for index, those in devices.items() for part in _copies(leaf.read(index), those)]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _copies(part: np.ndarray, devices: Sequence[Any]) -> list[jax.Array]:
    """Waited for, so that the host gives up one part before it reads the next."""
    return jax.block_until_ready([jax.device_put(part, device) for device in devices])


def export_weights(
    params: Mapping[str, Any], table: Sequence[Weight], sizes: Mapping[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields `(Hugging Face name, C-contiguous array)` for every tensor of the table, in its order; dtypes are kept.

    Leaves may be numpy or JAX arrays; one leaf at a time is brought to the host.

    Raises:
        WeightError: at the call, if leaves are missing, not in the table, or of another shape than `sizes` says.
    """
    check_table(table, sizes)
    leaves = dict(trees.leaves(params))
    expected = {row.path: leaf_shape(row, sizes) for row in table}
    raise_problems(
        "parameters do not fit the weight table",
        missing=[f"{path} {shape}" for path, shape in expected.items() if path not in leaves],
        unused=[path for path in leaves if path not in expected],
        shapes=[
            f"{path}: expected {shape}, found {tuple(leaves[path].shape)}"
            for path, shape in expected.items()
            if path in leaves and tuple(leaves[path].shape) != shape
        ],
    )
    return _export(leaves, table, sizes)


def save_folder(
    out: str | Path,
    params: Mapping[str, Any],
    table: Sequence[Weight],
    sizes: Mapping[str, int],
    *,
    source_folder: str | Path,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    keep: Sequence[str] = (),
    max_shard_bytes: int = 2 * 2**30,
    overwrite: bool = False,
) -> Path:
    """Returns `out`, a complete Hugging Face folder: weights, and config, tokenizer and chat template of `source_folder`.

    Values are rounded to nearest even. Tensors of `source_folder` that match a glob pattern of `keep` and that the table does
    not name are copied bit for bit. Weights above `max_shard_bytes` are split, with an index; one tensor is never split.
    The folder appears by rename, complete or not at all; `overwrite` exchanges it with what stood there.

    Raises:
        WeightError: parameters do not fit the table, or `source_folder` has no config.json.
        FileExistsError: `out` holds something and `overwrite` is false.
    """
    if dtype not in DTYPES:
        raise WeightError(f"dtype {dtype!r} must be one of {', '.join(DTYPES)}")
    tensors = export_weights(params, table, sizes)
    with new_folder(Path(out), overwrite=overwrite) as folder:
        try:
            copy_side_files(Path(source_folder), folder, dtype)
        except (FileNotFoundError, ValueError) as error:
            raise WeightError(f"source_folder {source_folder}: a readable config.json is needed ({error})") from error
        plan = list(_tensor_bytes(table, sizes, np.dtype(DTYPES[dtype]).itemsize))
        kept, kept_plan = _kept(Path(source_folder), keep, {name for name, _ in plan})
        cast = ((name, array.astype(DTYPES[dtype], copy=False)) for name, array in tensors)
        write_shards(folder, itertools.chain(cast, kept), plan + kept_plan, max_shard_bytes)
    return Path(out)


def _export(leaves: Mapping[str, Any], table: Sequence[Weight], sizes: Mapping[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    for row in filter(leads, table):
        parts = [np.asarray(leaves[each.path]) for each in siblings(row, table)]
        for index, name in tensor_names(row, sizes):
            yield name, to_tensor(row, [part[index] for part in parts], sizes)


def _kept(
    source: Path, keep: Sequence[str], written: set[str]
) -> tuple[Iterator[tuple[str, np.ndarray]], list[tuple[str, int]]]:
    """Tensors to copy as they are, and their bytes."""
    names = [name for name in sorted(folder_tensors(source) if keep else ()) if _matches(name, keep) and name not in written]
    if not names:
        return iter(()), []
    tensors = Shards(source)
    size = {name: math.prod(tensors.shapes[name]) * _bits(tensors.dtypes[name]) // 8 for name in names}
    return ((name, tensors.read(name)) for name in names), list(size.items())


def _bits(dtype: str) -> int:
    """Bits of an element: BF16, F8_E4M3, I64, BOOL."""
    return int((re.findall(r"\d+", dtype) or ["8"])[0])


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _check_twins(tensors: Shards, twins: Sequence[tuple[str, str]]) -> None:
    for a, b in twins:
        if {a, b} <= set(tensors.names) and not _equal(tensors.read(a), tensors.read(b)):
            raise WeightError(f"{tensors.folder}: {a} differs from {b}, but tie_word_embeddings=true says that they are one")


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays hold the same bits, compared row by row: a whole comparison takes as much memory again."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def _check_tensors(table: Sequence[Weight], sizes: Mapping[str, int], tensors: Shards, ignore: Sequence[str]) -> None:
    expected = {name: tensor_shape(row, sizes) for row in table for _, name in tensor_names(row, sizes)}
    found = [name for name in expected if name in tensors.shapes]
    raise_problems(
        f"{tensors.folder} does not hold the expected weights",
        missing=[f"{name} {shape}" for name, shape in expected.items() if name not in tensors.shapes],
        unused=[name for name in tensors.names if name not in expected and not _matches(name, ignore)],
        shapes=[
            f"{name}: expected {expected[name]}, found {tensors.shapes[name]}"
            for name in found
            if tensors.shapes[name] != expected[name]
        ],
        dtypes=[
            f"{name}: expected one of {', '.join(_FLOATS)}, found {tensors.dtypes[name]}"
            for name in found
            if tensors.dtypes[name] not in _FLOATS
        ],
    )


def _tensor_bytes(table: Iterable[Weight], sizes: Mapping[str, int], itemsize: int) -> Iterator[tuple[str, int]]:
    for row in filter(leads, table):
        size = math.prod(tensor_shape(row, sizes)) * itemsize
        yield from ((name, size) for _, name in tensor_names(row, sizes))
