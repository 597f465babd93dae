"""The weight table: rows that name the same weights in Flax and in Hugging Face, and what follows from a row alone."""

import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from einops import rearrange

_LETTER = r"[A-Za-z_]\w*"


class WeightError(ValueError):
    """A weight folder, table or parameter tree that does not fit; the message lists every tensor at fault, ten of each kind."""


@dataclass(frozen=True)
class Weight:
    """One row: the same weights under both namings.

    `path`: Flax path, "/"-separated. `name`: Hugging Face name, `{l}` standing for the layer number. `layout`: Hugging Face
    axes -> Flax axes of one tensor, without the stacked ones; letters get their sizes from the caller. `layers`: the layer
    numbers `{l}` takes, for a leaf that stacks only some of them; None: all. `part`: for several leaves in one tensor, the
    letter of the Hugging Face side that tells them apart and the leaf's place along it: `"(c f) d -> d f"`, `("c", 0)`.
    """

    path: str
    name: str
    layout: str
    layers: tuple[int, ...] | None = None
    part: tuple[str, int] | None = None


def stacked(row: Weight) -> tuple[str, ...]:
    """Letters of the axes a row stacks over, in the order of its Flax leaf's leading axes."""
    return tuple(letter for _, letter, _, _ in string.Formatter().parse(row.name) if letter)


def leaf_axes(row: Weight) -> tuple[str, ...]:
    """Letters of all axes of a row's Flax leaf, stacked ones first: what sharding rules are keyed by."""
    return (*stacked(row), *axes_of(sides(row)[1]))


def leaf_shape(row: Weight, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a row's Flax leaf under `sizes`."""
    return (*(_size(row, letter, sizes) for letter in stacked(row)), *_shape(row, sides(row)[1], sizes))


def tensor_shape(row: Weight, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of each of a row's Hugging Face tensors under `sizes`."""
    return _shape(row, sides(row)[0], sizes)


def tensor_names(row: Weight, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[int, ...], str]]:
    """`(index into the leaf's stacked axes, Hugging Face name)` of each tensor of a row."""
    axes = stacked(row)
    for index in np.ndindex(*(_size(row, letter, sizes) for letter in axes)):
        numbers = dict(zip(axes, index, strict=True))
        if "l" in numbers and row.layers is not None:
            numbers["l"] = row.layers[numbers["l"]]
        yield index, row.name.format(**numbers)


def sides(row: Weight) -> tuple[str, str]:
    """`(Hugging Face axes, Flax axes)` of a row's layout."""
    parts = row.layout.split("->")
    if len(parts) != 2:
        raise WeightError(f"{row.path}: layout {row.layout!r} must be 'hugging face axes -> flax axes'")
    return parts[0].strip(), parts[1].strip()


def to_leaf(row: Weight, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """What one of a row's tensors contributes to its leaf."""
    if row.part is None:
        return rearrange(tensor, row.layout, **letters(row, sizes))
    hf, flax = sides(row)
    return rearrange(tensor, f"{hf} -> {row.part[0]} {flax}", **letters(row, sizes))[row.part[1]]


def to_tensor(row: Weight, parts: Sequence[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    """The Hugging Face tensor of what the leaves in it contribute, in their order (one, unless the row is a part)."""
    hf, flax = sides(row)
    letter = "" if row.part is None else row.part[0]
    array = np.asarray(parts[0]) if row.part is None else np.stack(parts)
    return np.asarray(rearrange(array, f"{letter} {flax} -> {hf}", **letters(row, sizes)), order="C")


def siblings(row: Weight, table: Sequence[Weight]) -> list[Weight]:
    """The rows whose leaves are in the same tensors as a row's, itself included, in their order there."""
    if row.part is None:
        return [row]
    found = [other for other in table if other.part and (other.name, other.layers) == (row.name, row.layers)]
    return sorted(found, key=lambda other: other.part[1] if other.part else 0)


def leads(row: Weight) -> bool:
    """Whether a row stands for its tensors where each is counted once: the first of those that share them."""
    return row.part is None or row.part[1] == 0


def axes_of(side: str) -> list[str]:
    """Axes of one side of a layout: `"(n h) d"` -> `["(n h)", "d"]`."""
    return re.findall(r"\([^()]*\)|\w+", side)


def letters(row: Weight, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the letters of a row's layout, and of no others: what `einops.rearrange` wants."""
    return {letter: _size(row, letter, sizes) for letter in re.findall(_LETTER, row.layout)}


def _size(row: Weight, letter: str, sizes: Mapping[str, int]) -> int:
    if letter == "l" and row.layers is not None:
        return len(row.layers)
    if letter not in sizes:
        raise WeightError(f"{row.path}: no size for axis {letter!r} of {row.name!r}, {row.layout!r}; sizes has {sorted(sizes)}")
    return sizes[letter]


def _shape(row: Weight, side: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(_size(row, letter, sizes) for letter in re.findall(_LETTER, group)) for group in axes_of(side))


def check_table(table: Sequence[Weight], sizes: Mapping[str, int]) -> None:
    """Raises WeightError unless every row's layout is well-formed and has its sizes, and no name or path occurs twice."""
    for row in table:
        hf, flax = (Counter(re.findall(_LETTER, side)) for side in sides(row))
        if row.part is not None:
            letter, _ = row.part
            flax[letter] += 1
            if [other.part for other in siblings(row, table)] != [(letter, i) for i in range(_size(row, letter, sizes))]:
                raise WeightError(f"{row.path}: every part along {letter!r} of {row.name!r} needs one row")
        if hf != flax or max(hf.values(), default=1) > 1:
            raise WeightError(f"{row.path}: both sides of layout {row.layout!r} must have the same letters, each once")
        leaf_shape(row, sizes)
    names = Counter(name for row in table if leads(row) for _, name in tensor_names(row, sizes))
    paths = Counter(row.path for row in table)
    doubled = [value for counts in (names, paths) for value, count in counts.items() if count > 1]
    if doubled:
        raise WeightError(f"the weight table has these names or paths twice: {', '.join(doubled[:10])}")
