"""Bundled tasks with exact answers: small sums and their relatives. `python -m rollout.task_app rollout/apps/arithmetic.py`.

Splits are by what is asked, not by how it is written: unordered tuples of numbers are put in the order of their SHA-256, and
the first quarter is `test`. So `8 + 7` is never trained when `7 + 8` is held out. Inside a split the written problems are put
in hash order too, and a seed picks one: index = seed modulo the size of the split.

The system message is empty unless given: many chat templates put a persona of twenty tokens where there is none.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, combinations_with_replacement, permutations

from rollout.task import Task

_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:\.\d+)?")

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """Some numbers, and the integer that answers for them."""

    numbers: Numbers
    answer: int


def addition(template: str = "What is {a} + {b}? Reply with just the number.", system: str | None = "") -> Task:
    """Sums of two digits 1-9: 45 unordered pairs, 81 written sums."""
    return _task("addition", combinations_with_replacement(range(1, 10), 2), sum, template, system)


def products(template: str = "What is {a} * {b}? Reply with just the number.", system: str | None = "") -> Task:
    """Products of two digits 2-9: 36 unordered pairs, 64 written products."""
    return _task("products", combinations_with_replacement(range(2, 10), 2), lambda pair: pair[0] * pair[1], template, system)


def two_digit_addition(template: str = "What is {a} + {b}? Reply with just the number.", system: str | None = "") -> Task:
    """Sums of two numbers 10-99: 4095 unordered pairs, 8100 written sums."""
    return _task("two_digit_addition", combinations_with_replacement(range(10, 100), 2), sum, template, system)


def largest(
    template: str = "Which is the largest: {a}, {b} or {c}? Reply with just the number.", system: str | None = ""
) -> Task:
    """The largest of three different numbers 1-20: 1140 unordered triples, 6840 written ones."""
    return _task("largest", combinations(range(1, 21), 3), max, template, system)


def split_by_hash(name: str, groups: Iterable[Numbers]) -> dict[str, tuple[Numbers, ...]]:
    """`{"train": ..., "test": ...}`: every order of every unordered tuple, a quarter of the tuples (rounded) in test."""
    ordered = sorted(groups, key=partial(_digest, name))
    held_out = round(len(ordered) / 4)
    return {
        "train": _written(name, ordered[held_out:]),
        "test": _written(name, ordered[:held_out]),
    }


def score(text: str, question: Question) -> float:
    """1.0 if the last number in `text` equals the answer, else 0.0."""
    found = _NUMBER.findall(text)
    return 1.0 if found and float(found[-1]) == question.answer else 0.0


TASKS: Mapping[str, Callable[..., Task]] = {
    "addition": addition,
    "products": products,
    "two_digit_addition": two_digit_addition,
    "largest": largest,
}


def _task(name: str, groups: Iterable[Numbers], answer: Callable[[Numbers], int], template: str, system: str | None) -> Task:
    splits = split_by_hash(name, groups)
    example = splits["train"][0]
    try:
        if template.format(**_fields(example)) == template:
            raise ValueError(f"template={template!r} of {name} names none of its fields {sorted(_fields(example))}")
    except (KeyError, IndexError) as exc:
        raise ValueError(f"template={template!r} of {name} may use the fields {sorted(_fields(example))} only") from exc

    def problem(seed: int, split: str) -> Question:
        numbers = splits[split][seed % len(splits[split])]
        return Question(numbers, answer(numbers))

    def prompt(question: Question) -> str:
        return template.format(**_fields(question.numbers))

    sizes = {split: len(written) for split, written in splits.items()}
    return Task(prompt, score, name=name, splits=sizes, system=system, problem=problem)


def _fields(numbers: Numbers) -> dict[str, int]:
    return dict(zip("abc", numbers, strict=False))


def _digest(name: str, numbers: Numbers) -> bytes:
    return hashlib.sha256(f"{name}:{','.join(map(str, numbers))}".encode()).digest()


def _written(name: str, groups: Iterable[Numbers]) -> tuple[Numbers, ...]:
    orders = {order for group in groups for order in permutations(group)}
    return tuple(sorted(orders, key=partial(_digest, name)))


task = addition()
