"""The weight files of a Hugging Face folder: one `model.safetensors`, or shards and the index that says which holds what."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from serving_bridge.weights import Weight, WeightError, axes_of, leaf_shape, letters, sides, stacked, tensor_names, to_leaf

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Shards:
    """Tensors of a folder by name. At most one file is open, so no more than that is ever mapped into memory.

    Raises:
        WeightError: no weights, a missing or corrupt file, a tensor in two files.
    """

    def __init__(self, folder: Path, only: str | None = None):
        self.folder = folder
        self._open: tuple[str, Any] | None = None
        self._files: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        """As safetensors spells them: F32, BF16."""
        for filename in [only] if only else weight_files(folder):
            file = self._file(filename)
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in self._files:
                    raise WeightError(f"{folder}: tensor {name} is in two files, one of them {filename}; expected it once")
                view = file.get_slice(name)
                self._files[name], self.shapes[name], self.dtypes[name] = filename, tuple(view.get_shape()), view.get_dtype()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def read(self, name: str, window: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of one tensor, bfloat16 and the like as `ml_dtypes` have them; of a `window` of it, no more is read."""
        file = self._file(self._files[name])
        try:
            return file.get_slice(name)[window] if window else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{self.folder}: tensor {name} cannot be read ({error}); fetch the folder again") from error

    def _file(self, filename: str) -> Any:
        if self._open is None or self._open[0] != filename:
            self._open = None  # unmaps the last one before the next is mapped
            try:
                self._open = filename, safe_open(self.folder / filename, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise WeightError(f"{self.folder}: {filename} is corrupt or cut short ({error}); fetch it again") from error
        return self._open[1]


@dataclass(frozen=True)
class StoredLeaf:
    """A Flax leaf whose tensors are still in their files: to be read whole, or only the part that one device keeps."""

    tensors: Shards
    row: Weight
    sizes: Mapping[str, int]
    dtype: Any = np.float32
    """What it is read as."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole leaf."""
        return leaf_shape(self.row, self.sizes)

    def astype(self, dtype: DTypeLike) -> "StoredLeaf":
        """The same leaf, to be read as another type."""
        return replace(self, dtype=np.dtype(dtype))

    def read(self, index: Sequence[slice] = ()) -> np.ndarray:
        """A copy of what one slice per axis selects (none: of everything), tensor by tensor, in bytes JAX may take over.

        Raises WeightError for a tensor that cannot be read.
        """
        rest = [slice(None)] * (len(self.shape) - len(index))
        bounds = [part.indices(size)[:2] for part, size in zip([*index, *rest], self.shape, strict=True)]
        found = _aligned(tuple(stop - start for start, stop in bounds), self.dtype)
        window, inside, row, sizes = _window(self.row, bounds[len(stacked(self.row)) :], self.sizes)
        for place, name in tensor_names(self.row, self.sizes):
            if all(start <= i < stop for i, (start, stop) in zip(place, bounds, strict=False)):
                at = tuple(i - start for i, (start, _) in zip(place, bounds, strict=False))
                found[at] = to_leaf(row, self.tensors.read(name, window), sizes)[inside]
        return found


type Bounds = tuple[int, int]


def _window(
    row: Weight, bounds: Sequence[Bounds], sizes: Mapping[str, int]
) -> tuple[tuple[slice, ...], tuple[slice, ...], Weight, dict[str, int]]:
    """The part of each of a row's tensors that holds what `bounds` select of a leaf's axes after the stacked ones.

    `(part of the tensor, what is selected of its rearrangement, row and sizes to rearrange it by)`. Of joint axes `(n h)` a
    range of the first alone is one piece; what is not is read whole, and cut later.
    """
    hf, flax = (axes_of(side) for side in sides(row))
    size, wanted = letters(row, sizes), dict(zip(flax, bounds, strict=True))
    if row.part:
        wanted[row.part[0]] = row.part[1], row.part[1] + 1
    window, read = [], {}
    for axis in hf:
        start, count = 0, 1
        for letter in re.findall(r"[A-Za-z_]\w*", axis):
            low, high = read[letter] = wanted.get(letter, (0, size[letter])) if count == 1 else (0, size[letter])
            start, count = start * size[letter] + low, count * (high - low)
        window.append(slice(start, start + count))
    inside = tuple(slice(None) if axis in read and read[axis] == wanted[axis] else slice(*wanted[axis]) for axis in flax)
    if row.part:
        row = replace(row, part=(row.part[0], row.part[1] - read[row.part[0]][0]))
    return tuple(window), inside, row, {letter: high - low for letter, (low, high) in read.items()}


def _aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialized array whose bytes JAX may take over as they are, on the CPU."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def weight_files(folder: Path) -> list[str]:
    """Names of a folder's weight files. WeightError if there are none, or some that the index names are missing."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        raise WeightError(f"{folder}: no weights; expected {SINGLE} or {INDEX}")
    files = sorted(set(_weight_map(folder).values()))
    raise_problems(
        f"{folder}: shards that {INDEX} names must be in the folder",
        missing=[file for file in files if not (folder / file).is_file()],
    )
    return files


def folder_tensors(folder: Path) -> frozenset[str]:
    """Names of all tensors of a folder, from its index or the head of its one file; empty where there are no weights."""
    if (folder / SINGLE).is_file():
        return frozenset(Shards(folder).names)
    return frozenset(_weight_map(folder) if (folder / INDEX).is_file() else ())


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    try:
        found = dict(json.loads(index.read_bytes())["weight_map"].items())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightError(f"{index}: expected JSON with a weight_map of tensor name -> file ({error!r})") from error
    strange = [file for file in found.values() if not isinstance(file, str) or Path(file).name != file]
    if strange:
        raise WeightError(f"{index}: shard {strange[0]!r} must be a file name inside the folder")
    return found


def write_shards(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], sizes: Sequence[tuple[str, int]], limit: int) -> None:
    """Writes `(name, tensor)` pairs, whose names and bytes are known before, as files of at most `limit` bytes, one at a time.

    An index names the files if there are several; one tensor is never split.
    """
    plan, stream = _plan([size for _, size in sizes], limit), iter(tensors)
    for filename, count in plan:
        save_file(dict(itertools.islice(stream, count)), folder / filename, metadata={"format": "pt"})
    if len(plan) > 1:
        files = [filename for filename, count in plan for _ in range(count)]
        index = {
            "metadata": {"total_size": sum(size for _, size in sizes)},
            "weight_map": {name: file for (name, _), file in zip(sizes, files, strict=True)},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _plan(sizes: Sequence[int], limit: int) -> list[tuple[str, int]]:
    """`(file name, number of tensors)` of each file."""
    counts, room = [0], limit
    for size in sizes:
        if size > room and counts[-1]:
            counts.append(0)
            room = limit
        counts[-1] += 1
        room -= size
    if len(counts) == 1:
        return [(SINGLE, counts[0])]
    return [(f"model-{i:05d}-of-{len(counts):05d}.safetensors", count) for i, count in enumerate(counts, 1)]


def raise_problems(what: str, **problems: list[str]) -> None:
    """WeightError with ten of each kind of problem, if there are any."""
    lines = []
    for kind, items in problems.items():
        if items:
            more = f", and {len(items) - 10} more" if len(items) > 10 else ""
            lines.append(f"{kind} ({len(items)}): {', '.join(items[:10])}{more}")
    if lines:
        raise WeightError("\n  ".join([f"{what}:", *lines]))
