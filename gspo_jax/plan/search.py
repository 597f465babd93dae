"""When a run does not fit: which settings to try, in which order, until one does."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gspo_jax.config import ConfigError
from gspo_jax.mesh import MeshShape
from gspo_jax.sections import Config

TRIES = 8
"""Most settings that are compiled."""


class Try(NamedTuple):
    """Settings that were compiled, and whether a run fits with them."""

    sets: tuple[str, ...]
    """Words for `--set`."""
    outcome: str
    fits: bool


def candidates(config: Config, shape: MeshShape) -> Iterator[tuple[str, ...]]:
    """Settings other than the config's, the least intrusive first: fewer rows at a time, recomputed activations, then other
    meshes of the same devices, which need both."""
    rows, now = config.training.rows_per_microbatch, shape
    fewer: list[str] = []
    if rows > now.rows:
        half = max(rows // 2, now.rows)
        if half > now.rows:
            yield (f"training.rows_per_microbatch={half}",)
        fewer = [f"training.rows_per_microbatch={now.rows}"]
        yield tuple(fewer)
    remat = [] if config.model.remat == "layer" else ["model.remat=layer"]
    if remat:
        yield tuple(remat)
        if fewer:
            yield (*fewer, *remat)
    for other in meshes(now.devices):
        if other != now:
            yield (
                *(f"mesh.{name}={size}" for name, size in other._asdict().items()),
                *([f"training.rows_per_microbatch={other.rows}"] if rows != other.rows else []),
                *remat,
            )


def meshes(devices: int) -> list[MeshShape]:
    """Factorizations of the devices: all `fsdp` first, then more and more on `sequence` and `tensor`, never copies."""
    found = []
    for tensor in (1, 2, 4, 8):
        for sequence in (1, 2, 4, 8):
            if devices % (tensor * sequence) == 0:
                found.append(MeshShape(1, devices // (tensor * sequence), tensor, sequence))
    return sorted(found, key=lambda shape: (shape.tensor * shape.sequence, shape.tensor))


def search(
    config: Config,
    shape: MeshShape,
    attempt: Callable[[tuple[str, ...]], tuple[bool, str]],
    tell: Callable[[Try], None],
    most: int = TRIES,
) -> tuple[str, ...] | None:
    """The first settings that fit, or None. `attempt` compiles one and returns whether it fits and a line about it;
    `tell` is called after each. Settings that contradict the rest of the config are passed over without counting."""
    done = 0
    for sets in candidates(config, shape):
        if done == most:
            return None
        try:
            fits, outcome = attempt(sets)
        except ConfigError as error:
            tell(Try(sets, f"cannot be: {error.problems[0]}", fits=False))
            continue
        done += 1
        tell(Try(sets, outcome, fits))
        if fits:
            return sets
    return None
