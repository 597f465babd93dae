"""Nested dicts of arrays by "/"-separated path. What is not a dict is a leaf, a quantized array too."""

from collections.abc import Iterator, Mapping
from typing import Any

type Tree = Mapping[str, Any]


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`(path, leaf)` of every leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def get(tree: Tree, path: str) -> Any:
    """The leaf at a path."""
    for part in path.split("/"):
        tree = tree[part]
    return tree


def put(tree: dict[str, Any], path: str, leaf: Any) -> None:
    """Set the leaf at a path, making the dicts on the way."""
    *parents, last = path.split("/")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = leaf


def joined(a: Tree, b: Tree) -> dict[str, Any]:
    """Two trees of disjoint leaves as one."""
    both = {key: joined(a[key], b[key]) for key in a.keys() & b.keys()}
    return {**a, **b, **both}
