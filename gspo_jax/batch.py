"""Trajectories to a packed Batch, on the host. Ids are copied, never made: no text, no tokenizer here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from gspo_jax.types import Batch
from rollout.types import Group, Trajectory, Turn

type Choices = tuple[tuple[tuple[int, ...], ...] | None, ...]
"""Recorded experts of each token, by layer that has experts; None where there are none."""
type Advantage = float | Sequence[float] | np.ndarray | None
"""Of a trajectory: one number, a sequence of one per turn, or an array of one per sampled token; None leaves it out."""


@dataclass(frozen=True)
class Segment:
    """A run of tokens that attends only to itself (and to a shared prefix). `prefix` leading tokens are the first prompt."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantages: tuple[float, ...]
    prefix: int
    trajectory: int
    experts: Choices = ()


@dataclass(frozen=True)
class Piece:
    """What must lie together in one row: segments, the first `shared` tokens of which are laid down once."""

    segments: tuple[Segment, ...]
    shared: int

    @property
    def size(self) -> int:
        return self.shared + sum(len(s.tokens) - self.shared for s in self.segments)


@dataclass(frozen=True)
class Item:
    """What must lie together in one micro-batch, and how many trajectories it stands for."""

    pieces: tuple[Piece, ...]
    trajectories: int


@dataclass(frozen=True)
class Packing:
    """How a batch is laid out: `length` tokens a row, at least `rows` rows a micro-batch, prompts shared within a group or not.

    `mode`: shared_prefix (a group's common prompt once, its completions attending to it), packed (first fit), padded (one
    segment a row). The three give the same update; they differ in how many tokens are computed.
    """

    length: int
    rows: int = 1
    mode: str = "shared_prefix"
    multiple: int = 1
    """What the number of rows is rounded up to a multiple of, with blank ones."""


def pack(groups: Sequence[Group], advantages: Sequence[Sequence[Advantage]], minibatch: int, packing: Packing) -> Batch:
    """A Batch `[m u r t]`, one optimizer step for every `minibatch` trajectories.

    Void trajectories and those whose advantage is None take no part, not even in a denominator; the others are spread evenly,
    in order, over the steps. The number of micro-batches is rounded up to a power of two, so that few shapes are ever
    compiled. `experts` is there if any turn carries choices; a shared prompt has those of its first member. Raises ValueError
    for a trajectory longer than a row.
    """
    members = [(g, t, a) for g, (group, row) in enumerate(zip(groups, advantages, strict=True))
               for t, a in zip(group.trajectories, row, strict=True)]  # fmt: skip
    if len(members) % minibatch:
        raise ValueError(f"{len(members)} trajectories do not divide into minibatches of training.batch_size={minibatch}")
    taking = [(g, t, a) for g, t, a in members if t.status != "void" and a is not None]
    count = len(members) // minibatch
    steps = [taking[len(taking) * i // count : len(taking) * (i + 1) // count] for i in range(count)]
    micros = [_place(list(_items(step, packing)), packing) for step in steps]
    rows = max((len(m) for step in micros for m, _ in step), default=1)
    depth = _power_of_two(max(len(step) for step in micros))
    rows = -(-max(rows, packing.rows) // packing.multiple) * packing.multiple
    arrays = _blank((len(steps), depth, rows, packing.length), _recorded(taking))
    for i, step in enumerate(micros):
        for j, (layout, count) in enumerate(step):
            _write(arrays, (i, j), layout)
            arrays.trajectories[i, j] = count
    return arrays


def token_advantages(trajectory: Trajectory, advantage: float | Sequence[float] | np.ndarray) -> list[list[float]]:
    """The advantage of every sampled token, turn by turn. ValueError for any other number of values."""
    sizes = [len(turn.completion_ids) for turn in trajectory.turns]
    if isinstance(advantage, int | float):
        return [[float(advantage)] * n for n in sizes]
    unit, count = ("token", sum(sizes)) if isinstance(advantage, np.ndarray) else ("turn", len(sizes))
    if len(advantage) != count:
        raise ValueError(f"{len(advantage)} advantages for a trajectory of {count} {unit}s: one per {unit} is needed")
    if isinstance(advantage, np.ndarray):
        ends = np.cumsum([0, *sizes]).tolist()
        return [advantage[start:end].tolist() for start, end in pairwise(ends)]
    return [[float(a)] * n for a, n in zip(advantage, sizes, strict=True)]


def segments_of(trajectory: Trajectory, advantage: float | Sequence[float] | np.ndarray, number: int) -> list[Segment]:
    """The trajectory's turns joined: a turn whose prompt extends the last segment continues it, any other opens a new one."""
    segments: list[Segment] = []
    for turn, values in zip(trajectory.turns, token_advantages(trajectory, advantage), strict=True):
        last = segments[-1] if segments else None
        if last and turn.prompt_ids[: len(last.tokens)] == last.tokens:
            seen = turn.prompt_ids[len(last.tokens) :]
        else:
            segments.append(last := Segment((), (), (), (), (), len(turn.prompt_ids), number))
            seen = turn.prompt_ids
        chosen = _choices(turn)
        segments[-1] = replace(
            last,
            experts=tuple(a or b for a, b in zip(last.experts, chosen, strict=False)) + chosen[len(last.tokens) :],
            tokens=last.tokens + seen + turn.completion_ids,
            trained=last.trained + (False,) * len(seen) + (True,) * len(turn.completion_ids),
            logprobs=last.logprobs + (0.0,) * len(seen) + turn.logprobs,
            versions=last.versions + (0,) * len(seen) + turn.versions,
            advantages=last.advantages + (0.0,) * len(seen) + tuple(values),
        )
    return segments


def _choices(turn: Turn) -> Choices:
    """The experts of every token of a turn that the sampler processed, so not of its last."""
    size = len(turn.prompt_ids) + len(turn.completion_ids)
    if turn.experts is None:
        return (None,) * size
    if len(turn.experts) != size:
        raise ValueError(f"experts of {len(turn.experts)} tokens for a turn of {size}: one per token is needed")
    return tuple(None if token[0][0] < 0 else token for token in turn.experts)


def _recorded(taking: list) -> tuple[int, int] | None:
    """`(layers, choices)` of the first turn that carries experts."""
    turns = (turn for _, trajectory, _ in taking for turn in trajectory.turns)
    return next(((len(turn.experts[0]), len(turn.experts[0][0])) for turn in turns if turn.experts), None)


def _items(step: list, packing: Packing) -> Iterator[Item]:
    """What to place, in order. Members of a group with one first prompt and one segment share it, as many as fit a row."""
    bundles: dict[tuple, list[Segment]] = {}
    for number, (g, trajectory, advantage) in enumerate(step, 1):
        segments = segments_of(trajectory, advantage, number)
        for s in segments:
            if len(s.tokens) > packing.length:
                raise ValueError(
                    f"a trajectory of {len(s.tokens)} tokens does not fit training.row_length={packing.length}; "
                    "raise it, or lower serving.context_length"
                )
        if packing.mode == "shared_prefix" and len(segments) == 1:
            bundles.setdefault((g, segments[0].tokens[: segments[0].prefix]), []).extend(segments)
        else:
            yield Item(tuple(Piece((s,), 0) for s in segments), 1)
    for (_, prompt), segments in bundles.items():
        yield from _bundles(segments, len(prompt), packing.length)


def _bundles(segments: list[Segment], shared: int, length: int) -> Iterator[Item]:
    taken: tuple[Segment, ...] = ()
    for segment in segments:
        if taken and Piece((*taken, segment), shared).size > length:
            yield Item((Piece(taken, shared),), len(taken))
            taken = ()
        taken = (*taken, segment)
    yield Item((Piece(taken, shared if len(taken) > 1 else 0),), len(taken))


type Layout = list[list[Piece]]


def _place(items: list[Item], packing: Packing) -> list[tuple[Layout, int]]:
    """First fit: each item into the first micro-batch with room for all its pieces, else into a new one."""
    micros: list[tuple[Layout, int]] = []
    for item in items:
        for i, (layout, count) in enumerate(micros):
            if (found := _fit(layout, item.pieces, packing, len(layout))) is not None:
                micros[i] = (found, count + item.trajectories)
                break
        else:
            fresh: Layout = [[] for _ in range(packing.rows)]
            found = _fit(fresh, item.pieces, packing, max(packing.rows, len(item.pieces))) or fresh
            micros.append((found, item.trajectories))
    return micros


def _fit(layout: Layout, pieces: Sequence[Piece], packing: Packing, limit: int) -> Layout | None:
    rows = [list(row) for row in layout]
    for piece in pieces:
        for row in rows:
            used = sum(p.size for p in row)
            if used + piece.size <= packing.length and not (packing.mode == "padded" and row):
                row.append(piece)
                break
        else:
            if len(rows) >= limit:
                return None
            rows.append([piece])
    return rows


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _blank(shape: tuple[int, int, int, int], experts: tuple[int, int] | None) -> Batch:
    ints, floats = (lambda: np.zeros(shape, np.int32)), (lambda: np.zeros(shape, np.float32))
    return Batch(ints(), ints(), ints(), ints(), ints(), ints(), np.zeros(shape, bool), floats(), floats(), ints(),
                 np.zeros(shape[:2], np.float32),
                 experts=None if experts is None else np.full((*shape, *experts), -1, np.int32))  # fmt: skip


def _write(batch: Batch, where: tuple[int, int], layout: Layout) -> None:
    ids: dict[int, int] = {}
    for row in layout:
        for piece in row:
            for segment in piece.segments:
                ids.setdefault(segment.trajectory, len(ids) + 1)
    for r, row in enumerate(layout):
        start, number = 0, 0
        for piece in row:
            prefix = 0
            if piece.shared:
                number += 1
                prefix = number
                _lay(batch, (*where, r), start, piece.segments[0], slice(0, piece.shared), number, 0, 0)
            at = start + piece.shared
            for segment in piece.segments:
                number += 1
                _lay(batch, (*where, r), at, segment, slice(piece.shared, None), number, prefix, ids[segment.trajectory])
                if piece.shared and len(segment.tokens) > piece.shared:
                    batch.parents[(*where, r, at)] = start + piece.shared - 1
                at += len(segment.tokens) - piece.shared
            start = at


def _lay(
    batch: Batch, row: tuple[int, int, int], at: int, segment: Segment, part: slice, number: int, prefix: int, trajectory: int
) -> None:
    tokens = segment.tokens[part]
    span = (*row, slice(at, at + len(tokens)))
    trained = np.array(segment.trained[part])
    index = np.arange(at, at + len(tokens))
    batch.tokens[span] = tokens
    batch.positions[span] = np.arange(len(segment.tokens))[part]
    batch.segment_ids[span] = number
    batch.prefix_ids[span] = prefix
    batch.parents[span] = np.maximum(index - 1, at)
    batch.trajectory_ids[span] = np.where(trained, trajectory, 0)
    batch.loss_mask[span] = trained
    batch.advantages[span] = segment.advantages[part]
    batch.versions[span] = segment.versions[part]
    batch.behavior_logprobs[span] = np.where(trained, segment.logprobs[part], 0)
    if batch.experts is not None:
        for i, choice in zip(index, segment.experts[part], strict=True):
            if choice is not None:
                batch.experts[(*row, i)] = choice
