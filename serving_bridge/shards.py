"""The weight files of a Hugging Face folder: one `model.safetensors`, or shards and the index that says which holds what."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from serving_bridge.weights import WeightError

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

    def read(self, name: str) -> np.ndarray:
        """A copy of one tensor, bfloat16 and the like as `ml_dtypes` have them."""
        try:
            return self._file(self._files[name]).get_tensor(name)
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
