"""Low-rank adapters (LoRA, arXiv 2106.09685): `x W + s · x A B`, only A and B trained, s = alpha / r or alpha / sqrt(r).

Everything follows from the weight table: its kernel rows are the linear maps, their last name is what PEFT calls them. A and
B are leaves `lora_a` and `lora_b` beside the kernel they belong to; the model uses them exactly when they are there.
"""

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gspo_jax.models.quantize import matrix
from gspo_jax.types import Params
from serving_bridge.trees import get, joined, leaves, put
from serving_bridge.weights import Weight, axes_of, leaf_shape, sides, stacked

ALL = "all-linear"
"""As in PEFT: every linear map but the head, the router and the experts."""


class UnknownTarget(ValueError):
    """A name that no linear map of the model has; the message says which there are."""


@dataclass(frozen=True)
class Adapter:
    """Which kernels have an adapter, of what rank and strength."""

    rank: int
    alpha: float
    rslora: bool
    rows: tuple[Weight, ...]
    """The kernels' rows of the model's weight table."""
    targets: tuple[str, ...] | str = ()
    """Their names in PEFT, as short as they can be without naming other maps, sorted; or a pattern for their whole names."""

    @property
    def scale(self) -> float:
        """Factor on A B (rslora: arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def kernel_rows(table: Sequence[Weight]) -> list[Weight]:
    """The rows of the matrices that tokens are multiplied with, but for the router's: what can be quantized."""
    return [row for row in table if row.path.endswith("/kernel") and "router" not in row.path.split("/")]


def linear_rows(table: Sequence[Weight]) -> list[Weight]:
    """The rows that an adapter can be put on: kernels that are each a module of its own in the checkpoint."""
    return [row for row in kernel_rows(table) if row.name.endswith(".weight") and len(axes_of(sides(row)[0])) == 2]


def adapter_of(
    table: Sequence[Weight],
    targets: Sequence[str] | str,
    rank: int,
    alpha: float,
    *,
    rslora: bool = False,
    experts: bool = True,
    avoid: Collection[str] = (),
) -> Adapter:
    """The adapter of a model. `targets` as in PEFT: names (`q_proj`, `mlp.up_proj`), or one pattern for whole names; none, or
    `all-linear`, means every linear map but the head, the router and the experts.

    Without `experts` the names are not meant for those, as for peft where one tensor holds all experts. `avoid` are names of
    other modules of the checkpoint that `Adapter.targets` must not name. Raises UnknownTarget for what no linear map matches.
    """
    rows = [row for row in linear_rows(table) if experts or "e" not in stacked(row)]
    if not targets or targets == ALL or tuple(targets) == (ALL,):
        chosen = [row for row in rows if stacked(row) == ("l",)]
    elif isinstance(targets, str):
        chosen = [row for row in rows if _fits(targets, row)]
    else:
        for target in targets:
            _require(target, rows)
        chosen = [row for row in rows if any(_ends(module(row), target) for target in targets)]
    if not chosen:
        raise UnknownTarget(f"{targets!r} is no linear map of this model")
    return Adapter(rank, alpha, rslora, tuple(chosen), _names(chosen, rows, avoid))


def module(row: Weight) -> str:
    """The Hugging Face name of the module a row's weight belongs to."""
    return row.name.removesuffix(".weight")


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _fits(pattern: str, row: Weight) -> bool:
    try:
        return re.fullmatch(pattern, module(row).format(l=(row.layers or (0,))[0], e=0)) is not None
    except re.error as error:
        raise UnknownTarget(f"{pattern!r} is not a pattern ({error})") from None


def _require(target: str, rows: Sequence[Weight]) -> None:
    if any(_ends(module(row), target) for row in rows):
        return
    names = sorted({module(row).rpartition(".")[2] for row in rows})
    near = difflib.get_close_matches(target, names, 1)
    hint = f"; did you mean {near[0]!r}" if near else ""
    raise UnknownTarget(
        f"{target!r} is no linear map of this model{hint}; it has {', '.join(names)}, and {ALL!r} alone means all but experts"
    )


def _names(chosen: Sequence[Weight], rows: Sequence[Weight], avoid: Collection[str]) -> tuple[str, ...] | str:
    """For each chosen row the shortest end of its name that no other module has; a pattern where layer numbers are needed."""
    others = [*(module(row) for row in rows if row not in chosen), *avoid]

    def name(row: Weight) -> str:
        parts = module(row).split(".")
        ends = [".".join(parts[i:]) for i in reversed(range(len(parts)))]
        return next(end for end in ends if not any(_ends(other, end) for other in others))

    found = sorted({name(row) for row in chosen})
    if not any("{" in each for each in found):
        return tuple(found)
    return "|".join(sorted({_pattern(row) for row in chosen}))


def _pattern(row: Weight) -> str:
    """A row's whole names, under either spelling of a multimodal checkpoint's language model."""
    start, _, rest = module(row).partition("layers.")
    anywhere = r".*language_model\..*" if "language_model" in start else re.escape(start)
    return anywhere + r"layers\." + re.sub(r"\\\{\w\\\}", r"\\d+", re.escape(rest))


def _axes(row: Weight) -> tuple[str, str, str, str]:
    """Of a kernel's row: the outputs and inputs as Hugging Face writes them (`[.. out in]`), then both as Flax does."""
    *stack, outputs, inputs = axes_of(sides(row)[0])
    order = [letter for letter in sides(row)[1].split() if letter not in stack]
    inside = [letter for letter in order if letter in inputs.strip("()").split()]
    return outputs, inputs, " ".join(letter for letter in order if letter not in inside), " ".join(inside)


def adapter_table(adapter: Adapter) -> tuple[Weight, ...]:
    """Weight rows of A and B: leaves `[.. in r]` and `[.. r out]`, PEFT tensors `[r in]` and `[out r]`."""
    rows = []
    for row in adapter.rows:
        outputs, inputs, outside, inside = _axes(row)
        path, name = row.path.removesuffix("kernel"), f"base_model.model.{module(row)}"
        rows.append(Weight(f"{path}lora_a", f"{name}.lora_A.weight", f"r {inputs} -> {inside} r", row.layers))
        rows.append(Weight(f"{path}lora_b", f"{name}.lora_B.weight", f"{outputs} r -> r {outside}", row.layers))
    return tuple(rows)


def adapter_sizes(adapter: Adapter, sizes: Mapping[str, int]) -> dict[str, int]:
    """Axis sizes of the adapter's table."""
    return {**sizes, "r": adapter.rank}


def init_adapter(adapter: Adapter, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    """Fresh adapters, float32: A uniform within ±1/sqrt(in) as PEFT draws it, B zero, so that the model is unchanged."""
    key, found = jax.random.key(seed), {}
    for i, row in enumerate(adapter_table(adapter)):
        shape = leaf_shape(row, adapter_sizes(adapter, sizes))
        if row.path.endswith("lora_b"):
            leaf = jnp.zeros(shape, jnp.float32)
        else:
            bound = 1 / math.sqrt(math.prod(shape[len(stacked(row)) : -1]))
            leaf = jax.random.uniform(jax.random.fold_in(key, i), shape, jnp.float32, -bound, bound)
        put(found, row.path, leaf)
    return found


def attach(adapter: Adapter | None, params: Params, frozen: Params | None) -> Params:
    """The model's parameters: `frozen` with the adapters `params` beside their kernels, B carrying the scale; without an
    adapter `params` themselves."""
    if adapter is None or frozen is None:
        return params

    def scaled(path: Any, leaf: Array) -> Array:
        return leaf * adapter.scale if path[-1].key == "lora_b" else leaf

    return joined(frozen, jax.tree_util.tree_map_with_path(scaled, params))


def merged(adapter: Adapter, params: Params, frozen: Params, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Full float32 parameters with every adapter added to its kernel, leaf by leaf; quantized kernels dequantized first."""
    found: dict[str, Any] = {}
    kernels = {row.path: row for row in adapter.rows}
    for path, leaf in leaves(frozen):
        row = kernels.get(path)
        wide = matrix(leaf, jnp.float32)
        if row is not None:
            a, b = (get(params, path.removesuffix("kernel") + name) for name in ("lora_a", "lora_b"))
            wide = wide.reshape(leaf_shape(row, sizes)) + adapter.scale * _product(row, a, b)
        put(found, path, wide)
    return found


def _product(row: Weight, a: Array, b: Array) -> Array:
    """A B in the shape of the kernel."""
    lead = len(stacked(row))
    rank = a.shape[-1]
    flat = a.reshape(*a.shape[:lead], -1, rank) @ b.reshape(*b.shape[:lead], rank, -1)
    return flat.reshape(*a.shape[:-1], *b.shape[lead + 1 :])


def count(tree: Params) -> int:
    """Numbers in a tree; a quantized kernel counts as what it stands for."""
    return sum(math.prod(leaf.shape) for _, leaf in leaves(tree))


def kernel_axes(row: Weight) -> tuple[int, int]:
    """How many leading axes of a kernel's leaf are stacked (layers, experts), and how many after them are its inputs."""
    return len(stacked(row)) + len(axes_of(sides(row)[0])) - 2, len(_axes(row)[3].split())
