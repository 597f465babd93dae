"""How layers of several kinds are scanned: any sequence of them as few stages, each a unit that repeats."""

from collections.abc import Sequence
from typing import NamedTuple

LONGEST_UNIT = 8
"""Most layers that repeat together as one step of the scan."""


class Stage(NamedTuple):
    """Layers `first, first + 1, ...`: `unit` repeated."""

    first: int
    unit: tuple[str, ...]
    repeats: int

    def numbers(self, place: int) -> tuple[int, ...]:
        """The layers at one place of the unit."""
        return tuple(range(self.first + place, self.first + len(self.unit) * self.repeats, len(self.unit)))


def stages(kinds: Sequence[str]) -> tuple[Stage, ...]:
    """Any sequence of kinds as few scans: at each point the unit whose repetition covers most, the shorter one of equals."""
    found, at = [], 0
    while at < len(kinds):
        best = Stage(at, (kinds[at],), 1)
        for size in range(1, min(LONGEST_UNIT, (len(kinds) - at) // 2) + 1):
            unit, repeats = tuple(kinds[at : at + size]), 1
            while tuple(kinds[at + size * repeats : at + size * (repeats + 1)]) == unit:
                repeats += 1
            if repeats > 1 and size * repeats > len(best.unit) * best.repeats:
                best = Stage(at, unit, repeats)
        found.append(best)
        at += len(best.unit) * best.repeats
    return tuple(found)


def stage_name(plan: Sequence[Stage], index: int) -> str:
    """Name of a stage among the parameters."""
    return "layers" if len(plan) == 1 else f"layers{index}"
