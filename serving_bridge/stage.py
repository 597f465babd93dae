"""New weights, staged: a safetensors file in memory (/dev/shm) from which every transport serves one version.

Two files take turns, so that the version before stays readable while the next is written. Both keep their pages: getting
fresh ones from the kernel costs more than the copy itself.
"""

import contextlib
import fcntl
import json
import math
import mmap
import os
import secrets
import shutil
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from serving_bridge.weights import WeightError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the folder made in it is this user's alone)
PREFIX, LOCK = "gspo-", "lock"
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
"""Types of staged tensors, as safetensors spells them."""


class Tensor(NamedTuple):
    """What a staged tensor is, without its values."""

    name: str
    dtype: str
    """BF16 | F32"""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Staged:
    """One version of the weights as a whole safetensors file."""

    version: int
    path: Path
    nbytes: int
    """Bytes of the tensors alone."""
    names: tuple[str, ...]

    @property
    def id(self) -> str:
        """Tells this version of this stage from any other, of any run: what servers call the weights."""
        return f"{self.path.parents[1].name}.{self.version}"


class Stage:
    """The two files of a set of tensors, each in a folder of its own beneath `folder`. `close` removes them.

    `parent`: where to make it; by default shared memory, or the temporary folder where there is none. `file`: the files'
    name. `beside`: small files to lie beside each, by name: with an `adapter_config.json` its folder is a PEFT adapter.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        parent: Path | None = None,
        *,
        file: str = "model.safetensors",
        beside: Mapping[str, str] | None = None,
    ):
        names = [tensor.name for tensor in tensors]
        if len(set(names)) != len(names):
            raise WeightError("a tensor is staged twice; names must differ")
        self.tensors = tuple(tensors)
        parent = parent or _shared_memory()
        remove_abandoned(parent)
        self.folder = parent / f"{PREFIX}{secrets.token_hex(8)}"
        self.folder.mkdir(mode=0o700, parents=True)
        self._lock = os.open(self.folder / "new", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.folder / "new", self.folder / LOCK)  # nobody sees it unlocked
        self._file, self._beside = file, dict(beside or {})
        self._header, self._offsets = _header(tensors)
        self._size = len(self._header) + sum(tensor.nbytes for tensor in tensors)
        self._maps: dict[int, mmap.mmap] = {}
        self._written: dict[int, Staged] = {}

    def write(self, version: int, arrays: Iterable[tuple[str, np.ndarray]]) -> Staged:
        """The staged `version`. The file of two versions ago is written over; its readers must have finished.

        Raises WeightError for a name, shape or dtype that was not announced, or when one is missing; OSError when memory is
        short; ValueError when the stage is closed.
        """
        if self._lock < 0:
            raise ValueError(f"the stage {self.folder} is closed")
        slot = version % 2
        bytes_ = np.frombuffer(self._map(slot), np.uint8)
        missing = {tensor.name: tensor for tensor in self.tensors}
        for name, array in arrays:
            tensor = missing.pop(name, None)
            if tensor is None or array.shape != tensor.shape or array.dtype != DTYPES[tensor.dtype]:
                raise WeightError(f"{name} {array.dtype} {array.shape} was not announced so ({tensor})")
            start = len(self._header) + self._offsets[name]
            bytes_[start : start + tensor.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if missing:
            raise WeightError(f"{len(missing)} tensors were not written, the first {next(iter(missing))}")
        staged = Staged(version, self._path(slot), self._size - len(self._header), tuple(self._offsets))
        self._written[slot] = staged
        return staged

    def overwritten(self, version: int) -> Staged | None:
        """What writing `version` will write over; nobody may read it then."""
        return self._written.get(version % 2)

    def close(self) -> None:
        """Remove the files. Who has mapped them keeps the bytes until it unmaps them. Safe to call twice."""
        self._maps.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self, slot: int) -> Path:
        return self.folder / str(slot) / self._file

    def _map(self, slot: int) -> mmap.mmap:
        if slot not in self._maps:
            path = self._path(slot)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            for name, text in self._beside.items():
                (path.parent / name).write_text(text)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._size)  # a full /dev/shm is an error here and a SIGBUS later
                self._maps[slot] = mmap.mmap(descriptor, self._size)
            except OSError as error:
                os.ftruncate(descriptor, 0)
                size = f"{self._size / 2**20:.1f} MiB, twice over,"
                raise OSError(error.errno, f"{size} of weights do not fit there ({error.strerror})", str(path)) from error
            finally:
                os.close(descriptor)
            self._maps[slot][: len(self._header)] = self._header
        return self._maps[slot]


def remove_abandoned(parent: Path) -> None:
    """Remove the stages in `parent` whose process is gone: killed, it could not do so itself, and they hold memory."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _shared_memory() -> Path:
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _header(tensors: Sequence[Tensor]) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file, padded to 64 bytes, and where each tensor begins after it."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for tensor in tensors:
        offsets[tensor.name], end = end, end + tensor.nbytes
        described[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offsets[tensor.name], end],
        }  # fmt: skip
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text, offsets
