"""Which tensors go into which broadcast: the rule of vLLM's receiver, and what it could not unpack."""

import math
from collections.abc import Sequence
from typing import Any

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1} | {
    f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""Bytes of an element, by torch's name of its type."""

type Tensor = tuple[str, str, Sequence[int]]
"""Name, torch's name of the type, shape."""


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return math.prod(tensor[2]) * ITEMSIZES[tensor[1]]


def chunks(tensors: Sequence[Tensor], buffer_bytes: int) -> list[list[Tensor]]:
    """The tensors of each broadcast: a chunk takes tensors until its size EXCEEDS `buffer_bytes`.

    So every chunk but the last is larger than the buffer, by less than its last tensor or by all of it.
    """
    found: list[list[Tensor]] = []
    size = math.inf
    for tensor in tensors:
        if size > buffer_bytes:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += nbytes(tensor)
    return found


def checked_chunks(tensors: Sequence[Tensor], buffer_bytes: int) -> list[list[Tensor]]:
    """`chunks` that the workers can unpack.

    Raises ValueError for types torch does not know by that name, empty tensors, no tensor at all, a name twice, and a tensor
    that would not start at a multiple of its element size within its chunk.
    """
    names = {name for name, _, _ in tensors}
    if len(names) < len(tensors) or not names:
        raise ValueError(f"{len(tensors)} tensors with {len(names)} names: at least one is needed, and no name twice")
    for name, dtype, shape in tensors:
        if dtype not in ITEMSIZES:
            raise ValueError(f"{name}: dtype {dtype!r} must be one of {', '.join(ITEMSIZES)}")
        if any(size < 1 for size in shape):
            raise ValueError(f"{name}: shape {tuple(shape)} must have sizes >= 1")
    plan = chunks(tensors, buffer_bytes)
    for chunk in plan:
        start = 0
        for tensor in chunk:
            name, dtype, _ = tensor
            if start % ITEMSIZES[dtype]:
                raise ValueError(
                    f"{name} would start at byte {start} of its chunk, where the workers cannot view it as {dtype};"
                    " send tensors of one type only, or the widest types first"
                )
            start += nbytes(tensor)
    return plan


def update_info(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """vLLM's `update_info` for these tensors in this order, ready for JSON."""
    return {
        "names": [name for name, _, _ in tensors],
        "dtype_names": [dtype for _, dtype, _ in tensors],
        "shapes": [[int(size) for size in shape] for _, _, shape in tensors],
    }
