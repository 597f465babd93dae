"""A compiled program, read from its text: instructions, how often each one runs, and the source line it comes from."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAMES = re.compile(r"%([\w.\-]+)")
_TABLE = re.compile(r"^(\d+) (.*)$")
OURS = "gspo_jax/"
KERNEL = 'custom_call_target="__gpu$xla.gpu.triton"'


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    """As it is written: an array, or a tuple of them."""
    opcode: str
    operands: tuple[str, ...]
    rest: str
    """All that follows the operands: attributes and metadata."""
    root: bool = False

    def called(self, attribute: str) -> tuple[str, ...]:
        """Names of the computations in an attribute."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.rest)
        return tuple(_NAMES.findall(found[1])) if found else ()


class Step(NamedTuple):
    """An instruction of a computation that is run, how often, and where."""

    instruction: Instruction
    times: int
    computation: str


@dataclass(frozen=True)
class Module:
    """A program as the compiler will run it."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    tables: Mapping[str, Mapping[int, str]]
    """The tables of source positions, by title."""

    def steps(self, trips: Sequence[int] = ()) -> Iterator[Step]:
        """Every instruction that is run, loops and branches entered, fusions not.

        Loops whose trip count is known count it; of the others the outermost count `trips[0]`, those inside these `trips[1]`,
        and so on; 1 beyond. All branches of a conditional are counted.
        """
        yield from self._visit(self.entry, 1, trips)

    def _visit(self, name: str, times: int, trips: Sequence[int]) -> Iterator[Step]:
        for each in self.computations.get(name, ()):
            yield Step(each, times, name)
            if each.opcode == "while":
                known = _TRIPS.search(each.rest)
                inside = trips if known else trips[1:]
                count = int(known[1]) if known else trips[0] if trips else 1
                for body in each.called("body"):
                    yield from self._visit(body, times * count, inside)
            elif each.opcode in ("call", "async-start", "conditional"):
                names = ("to_apply", "calls", "called_computations", "branch_computations", "true_computation",
                         "false_computation")  # fmt: skip
                for body in dict.fromkeys(found for key in names for found in each.called(key)):
                    yield from self._visit(body, times, trips)

    @cached_property
    def sizes(self) -> dict[str, dict[str, int]]:
        """Bytes of every result, by computation and name."""
        return {name: {each.name: shape_bytes(each.shape) for each in body} for name, body in self.computations.items()}

    def line(self, instruction: Instruction) -> str:
        """`file:line function` of this package that an instruction comes from, the innermost one; "" where none is told."""
        inline = re.search(r'source_file="([^"]+)" source_line=(\d+)', instruction.rest)
        if inline and OURS in inline[1]:
            return f"{inline[1].rpartition(OURS)[2]}:{inline[2]}"
        found = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        return self._frame(int(found[1])) if found else ""

    def kernels(self) -> dict[str, int]:
        """How often kernels of this package's own (Pallas) are called in the text, by source line: attention, experts."""
        own = (s.instruction for s in self.steps() if s.instruction.opcode == "custom-call" and KERNEL in s.instruction.rest)
        return dict(Counter(self.line(each) for each in own))

    def _frame(self, number: int) -> str:
        frames, places = self.tables.get("StackFrames", {}), self.tables.get("FileLocations", {})
        shifted = int("parent_frame_id=1}" in frames.get(1, ""))  # 0 is no parent, or 1 where the first frame has number 1
        while number > 0 and number in frames:
            place = places.get(_number(frames[number], "file_location_id"), "")
            file = self.tables.get("FileNames", {}).get(_number(place, "file_name_id"), '""').strip('"')
            if OURS in file:
                name = self.tables.get("FunctionNames", {}).get(_number(place, "function_name_id"), '""').strip('"')
                return f"{file.rpartition(OURS)[2]}:{_number(place, 'line')} {name.rpartition('.')[2]}"
            number = _number(frames[number], "parent_frame_id") - shifted
        return ""


def _number(text: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found[1]) if found else 0


def parse(text: str) -> Module:
    """The module of a compiled program's text (`compiled.as_text()`). ValueError where there is no entry computation."""
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {}
    entry, current, table = "", None, None
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif table is not None and (row := _TABLE.match(line)):
            table[int(row[1])] = row[2]
        elif started := _COMPUTATION.match(line):
            table, current = None, computations.setdefault(started[2], [])
            entry = started[2] if started[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found[2], line[found.end() :], bool(found[1])))
    if not entry:
        raise ValueError("no entry computation in the program's text")
    return Module({name: tuple(body) for name, body in computations.items()}, entry, tables)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    shape = text[: _closing(text, 0)] if text.startswith("(") else text.partition(" ")[0]
    opcode, _, tail = text[len(shape) :].lstrip().partition("(")
    end = _closing("(" + tail, 0) - 1
    return Instruction(name, shape, opcode.strip(), tuple(_NAMES.findall(tail[: end - 1])), tail[end:], root)


def _closing(text: str, start: int) -> int:
    """Index after the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at + 1
    return len(text)


def parts_of(shape: str) -> list[str]:
    """The elements of a tuple's shape; the shape itself where it is an array's."""
    if not shape.startswith("("):
        return [shape]
    found, depth, start = [], 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            found.append(re.sub(r"/\*.*?\*/", "", shape[start:at]).strip())
            start = at + 1
    return found


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple; four-bit numbers are half a byte each."""
    total = 0.0
    for kind, sizes in _ARRAY.findall(shape):
        total += math.prod(int(n) for n in sizes.split(",") if n) * _bits(kind) / 8
    return int(total)


def _bits(kind: str) -> int:
    if kind == "pred":
        return 8
    found = re.match(r"[a-z]+(\d+)", kind)
    return int(found[1]) if found else 0
