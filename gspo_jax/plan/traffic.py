"""What a compiled program allocates and moves through memory, from its text."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from gspo_jax.plan.hlo import Instruction, Module, parts_of, shape_bytes

VIEWS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
         "partition-id", "replica-id", "opt-barrier", "async-start", "async-update", "domain")  # fmt: skip
"""Instructions that move nothing themselves."""
FUSIONS = ("fusion", "fusion-start")


class Temporary(NamedTuple):
    """The largest array that a source line makes."""

    line: str
    bytes: int
    shape: str
    number: int
    """Instructions of that line with results of this size."""


def temporaries(module: Module, most: int = 8) -> list[Temporary]:
    """The largest results of a program by source line, largest first. They need not live at the same time."""
    found: dict[str, tuple[int, str, int]] = {}
    for step in module.steps():
        each = step.instruction
        if each.opcode in VIEWS or each.opcode.endswith("-done") or _writes_in_place(module, each):
            continue
        shape = max(parts_of(parts_of(each.shape)[-1]) if each.opcode.endswith("-start") else parts_of(each.shape),
                    key=shape_bytes)  # fmt: skip
        size, line = shape_bytes(shape), module.line(each) or "(compiler)"
        largest, _, count = found.get(line, (0, "", 0))
        if size > largest:
            found[line] = size, shape.partition("{")[0], 1
        elif size == largest:
            found[line] = largest, found[line][1], count + 1
    out = [Temporary(line, *rest) for line, rest in found.items()]
    return sorted(out, key=lambda each: -each.bytes)[:most]


def _writes_in_place(module: Module, each: Instruction) -> bool:
    if each.opcode == "dynamic-update-slice":
        return True
    return each.opcode in FUSIONS and any(
        inner.root and inner.opcode == "dynamic-update-slice"
        for name in each.called("calls")
        for inner in module.computations.get(name, ())
    )


def memory_bytes(module: Module, trips: Sequence[int]) -> int:
    """Bytes a program reads from and writes to memory: every operand and result of what is run, slices as slices.

    What stays in a cache between two kernels is counted all the same, so it is an upper bound of what a perfect cache needs.
    """
    return sum(step.times * _moved(module, step.computation, step.instruction) for step in module.steps(trips))


def _moved(module: Module, computation: str, each: Instruction) -> int:
    if each.opcode in VIEWS or each.opcode.endswith("-done"):
        return 0
    sizes = module.sizes[computation]
    if each.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * sizes[each.name]
    if each.opcode == "dynamic-update-slice":
        return 2 * sizes.get(each.operands[1], 0)
    if each.opcode in FUSIONS:
        called = each.called("calls")
        return _fused(module, called[0]) if called and called[0] in module.computations else sizes[each.name]
    return sizes[each.name] + sum(sizes.get(name, 0) for name in each.operands)


def _fused(module: Module, name: str) -> int:
    """What a fusion reads and writes: of parameters that are only sliced the slices, of a result updated in place its part."""
    body, sizes = module.computations[name], module.sizes[name]
    users: dict[str, list[Instruction]] = defaultdict(list)
    for each in body:
        for operand in each.operands:
            users[operand].append(each)
    total = 0
    for each in body:
        if each.opcode == "parameter":
            total += _read(each.name, users, sizes)
        if each.root:
            written = each.operands[1:2] if each.opcode == "dynamic-update-slice" else (each.name,)
            total += sum(sizes.get(name, 0) for name in written)
    return total


def _read(name: str, users: dict[str, list[Instruction]], sizes: dict[str, int]) -> int:
    total = 0
    for user in users[name]:
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += sizes[user.name]
        elif user.opcode == "bitcast":
            total += _read(user.name, users, sizes)
        elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == name):
            return sizes[name]
    return min(total, sizes[name])
