"""What a transfer of weights brings: names, types, shapes and how they are cut into buckets. No values, no sockets."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_JSON = 64 << 20
MAX_FRAME = 64 << 30
"""Bytes of one bucket. No tensor is split over buckets, so this bounds them too."""
ITEMSIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes per word of the types that travel, as safetensors spells them."""


@dataclass(frozen=True)
class Tensor:
    """What a tensor is, without its values. `dtype` is a key of ITEMSIZES."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """What a transfer brings. `base`: the update that it is a difference to; None: whole tensors."""

    id: str
    version: int
    base: str | None
    bucket_bytes: int
    tensors: tuple[Tensor, ...]

    @property
    def kind(self) -> str:
        """full | delta"""
        return "full" if self.base is None else "delta"

    @property
    def nbytes(self) -> int:
        """Of all tensors, whole."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to_json(self) -> bytes:
        """ValueError when it is longer than MAX_JSON."""
        head = {"version": self.version, "id": self.id, "kind": self.kind, "base": self.base}
        tensors = [[tensor.name, tensor.dtype, tensor.shape, tensor.nbytes] for tensor in self.tensors]
        text = json.dumps({**head, "bucket_bytes": self.bucket_bytes, "tensors": tensors, "bytes": self.nbytes}).encode()
        if len(text) > MAX_JSON:
            raise ValueError(f"the manifest of {len(self.tensors)} tensors has {len(text)} bytes; at most {MAX_JSON} travel")
        return text

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """ValueError for what `to_json` cannot have written, or a tensor of more than MAX_FRAME bytes."""
        try:
            said = json.loads(text)
            tensors = tuple(_tensor(*entry) for entry in said["tensors"])
            base = None if said["base"] is None else _is(str, said["base"])
            manifest = cls(_is(str, said["id"]), _is(int, said["version"]), base, _is(int, said["bucket_bytes"]), tensors)
            if not 0 < manifest.bucket_bytes <= MAX_FRAME or _is(int, said["bytes"]) != manifest.nbytes:
                raise ValueError(f"{said['bytes']} bytes in buckets of {manifest.bucket_bytes}")
            if said["kind"] != manifest.kind:
                raise ValueError(f"{str(said['kind'])[:40]} with base {base}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"no manifest ({type(error).__name__}: {str(error)[:100]})") from error
        return manifest


def _tensor(name: Any, dtype: Any, shape: Any, nbytes: Any) -> Tensor:
    tensor = Tensor(_is(str, name), _is(str, dtype), tuple(_is(int, size) for size in _is(list, shape)))
    if any(size < 0 for size in tensor.shape) or _is(int, nbytes) != tensor.nbytes or nbytes > MAX_FRAME:
        raise ValueError(f"{nbytes} bytes for {tensor}")
    return tensor


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:  # bool is an int, and 1.0 equals one
        raise TypeError(f"{str(value)[:40]} is no {kind.__name__}")
    return value


def buckets(tensors: Sequence[Tensor], limit: int) -> list[tuple[int, int]]:
    """`(first tensor, tensors)` of each bucket: as many whole tensors as fit into `limit` bytes, or one that does not."""
    plan, room = [], 0
    for index, tensor in enumerate(tensors):
        if plan and tensor.nbytes <= room:
            plan[-1] = plan[-1][0], plan[-1][1] + 1
        else:
            plan.append((index, 1))
            room = limit
        room -= tensor.nbytes
    return plan
