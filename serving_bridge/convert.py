"""Weights between Flax and Hugging Face: one table of `Weight` rows, read left to right to load and right to left to export.

A row's layout is written in the project's einsum alphabet, Hugging Face side first: `"(n h) d -> d n h"`. A `{letter}` in the
Hugging Face name makes one Flax leaf out of many tensors, stacked along a leading axis per placeholder: `"model.layers.{l}.…"`
gives a leaf with leading axis `l`. Exporting what was loaded gives the same bits.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from einops import rearrange
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from serving_bridge.folders import copy_side_files, new_folder
from serving_bridge.weights import (
    Weight,
    WeightError,
    check_table,
    leaf_shape,
    letters,
    sides,
    tensor_names,
    tensor_shape,
)

__all__ = ["DTYPES", "Weight", "WeightError", "export_weights", "load_weights", "save_folder"]

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
) -> dict[str, Any]:
    """Returns the parameters of a Hugging Face folder as nested dicts of arrays of `dtype`.

    Reads `model.safetensors` or the shards of `model.safetensors.index.json`, one tensor at a time. `put(path, array)` is
    called once per finished leaf and its result takes the leaf's place, so the host never holds more than one leaf if `put`
    moves it elsewhere. `ignore` are glob patterns of names the table may leave out (`"lm_head.weight"` of a tied model).

    Raises:
        WeightError: no weights, a missing or corrupt file; or, before anything is read, all missing, unused, mis-shaped and
            non-float tensors.
    """
    folder = Path(folder)
    check_table(table, sizes)
    with ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        _check_tensors(folder, table, sizes, tensors, ignore)
        params: dict[str, Any] = {}
        for row in table:
            leaf = np.empty(leaf_shape(row, sizes), dtype)
            for index, name in tensor_names(row, sizes):
                try:
                    tensor = tensors[name].get_tensor(name)
                except (SafetensorError, OSError) as error:
                    raise WeightError(f"{folder}: tensor {name} cannot be read ({error}); fetch the folder again") from error
                leaf[index] = rearrange(tensor, row.layout, **letters(row, sizes))
            _set(params, row.path, leaf if put is None else put(row.path, leaf))
        return params


def export_weights(
    params: Mapping[str, Any], table: Sequence[Weight], sizes: Mapping[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields `(Hugging Face name, C-contiguous array)` for every tensor of the table, in its order; dtypes are kept.

    Leaves may be numpy or JAX arrays; one leaf at a time is brought to the host.

    Raises:
        WeightError: at the call, if leaves are missing, not in the table, or of another shape than `sizes` says.
    """
    check_table(table, sizes)
    leaves = dict(_leaves(params))
    expected = {row.path: leaf_shape(row, sizes) for row in table}
    _raise_problems(
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
    max_shard_bytes: int = 2 * 2**30,
    overwrite: bool = False,
) -> Path:
    """Returns `out`, a complete Hugging Face folder: weights, and config, tokenizer and chat template of `source_folder`.

    Values are rounded to nearest even. Weights above `max_shard_bytes` are split, with an index; one tensor is never split.
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
        shards = _plan_shards(table, sizes, np.dtype(DTYPES[dtype]).itemsize, max_shard_bytes)
        for filename, count in shards:
            part = {name: array.astype(DTYPES[dtype], copy=False) for name, array in itertools.islice(tensors, count)}
            save_file(part, folder / filename, metadata={"format": "pt"})
        if len(shards) > 1:
            _write_index(folder, shards, table, sizes, np.dtype(DTYPES[dtype]).itemsize)
    return Path(out)


def _export(leaves: Mapping[str, Any], table: Sequence[Weight], sizes: Mapping[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    for row in table:
        hf, flax = sides(row)
        leaf = np.asarray(leaves[row.path])
        for index, name in tensor_names(row, sizes):
            yield name, np.asarray(rearrange(leaf[index], f"{flax} -> {hf}", **letters(row, sizes)), order="C")


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Open file of each tensor name."""
    tensors: dict[str, Any] = {}
    for filename in _weight_files(folder):
        try:
            file = stack.enter_context(safe_open(folder / filename, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{folder}: {filename} is corrupt or cut short ({error}); fetch it again") from error
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in tensors:
                raise WeightError(f"{folder}: tensor {name} is in two files, one of them {filename}; expected it once")
            tensors[name] = file
    return tensors


def _weight_files(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise WeightError(f"{folder}: no weights; expected model.safetensors or model.safetensors.index.json")
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightError(f"{index}: expected JSON with a weight_map of tensor name -> file ({error!r})") from error
    strange = [file for file in files if not isinstance(file, str) or Path(file).name != file]
    if strange:
        raise WeightError(f"{index}: shard {strange[0]!r} must be a file name inside the folder")
    _raise_problems(
        f"{folder}: shards that {index.name} names must be in the folder",
        missing=[file for file in files if not (folder / file).is_file()],
    )
    return files


def _check_tensors(
    folder: Path, table: Sequence[Weight], sizes: Mapping[str, int], tensors: Mapping[str, Any], ignore: Sequence[str]
) -> None:
    expected = {name: tensor_shape(row, sizes) for row in table for _, name in tensor_names(row, sizes)}
    found = {name: tensors[name].get_slice(name) for name in expected if name in tensors}
    _raise_problems(
        f"{folder} does not hold the expected weights",
        missing=[f"{name} {shape}" for name, shape in expected.items() if name not in tensors],
        unused=[name for name in tensors if name not in expected and not any(fnmatchcase(name, glob) for glob in ignore)],
        shapes=[
            f"{name}: expected {expected[name]}, found {tuple(view.get_shape())}"
            for name, view in found.items()
            if tuple(view.get_shape()) != expected[name]
        ],
        dtypes=[
            f"{name}: expected one of {', '.join(_FLOATS)}, found {view.get_dtype()}"
            for name, view in found.items()
            if view.get_dtype() not in _FLOATS
        ],
    )


def _raise_problems(what: str, **problems: list[str]) -> None:
    lines = []
    for kind, items in problems.items():
        if items:
            more = f", and {len(items) - 10} more" if len(items) > 10 else ""
            lines.append(f"{kind} ({len(items)}): {', '.join(items[:10])}{more}")
    if lines:
        raise WeightError("\n  ".join([f"{what}:", *lines]))


def _set(params: dict[str, Any], path: str, leaf: Any) -> None:
    *parents, last = path.split("/")
    for key in parents:
        params = params.setdefault(key, {})
    params[last] = leaf


def _leaves(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _tensor_bytes(table: Iterable[Weight], sizes: Mapping[str, int], itemsize: int) -> Iterator[tuple[str, int]]:
    for row in table:
        size = math.prod(tensor_shape(row, sizes)) * itemsize
        yield from ((name, size) for _, name in tensor_names(row, sizes))


def _plan_shards(table: Sequence[Weight], sizes: Mapping[str, int], itemsize: int, limit: int) -> list[tuple[str, int]]:
    """`(file name, number of tensors)` of each shard; known before a byte is written, so one shard at a time is in memory."""
    counts, room = [0], limit
    for _, size in _tensor_bytes(table, sizes, itemsize):
        if size > room and counts[-1]:
            counts.append(0)
            room = limit
        counts[-1] += 1
        room -= size
    if len(counts) == 1:
        return [("model.safetensors", counts[0])]
    return [(f"model-{i:05d}-of-{len(counts):05d}.safetensors", count) for i, count in enumerate(counts, 1)]


def _write_index(
    folder: Path, shards: Sequence[tuple[str, int]], table: Sequence[Weight], sizes: Mapping[str, int], itemsize: int
) -> None:
    tensors = list(_tensor_bytes(table, sizes, itemsize))
    files = [filename for filename, count in shards for _ in range(count)]
    index = {
        "metadata": {"total_size": sum(size for _, size in tensors)},
        "weight_map": {name: file for (name, _), file in zip(tensors, files, strict=True)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
