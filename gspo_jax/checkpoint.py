"""The whole run as one atomic step: Orbax writes parameters, optimizer state and the run's own numbers, or nothing."""

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

from gspo_jax.types import Params, TrainState

PARTS = ("state", "run")
METRIC = "reward_mean"
MARKER = "_CHECKPOINT_METADATA"
"""The file that Orbax writes last."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the directory and what still stands."""


@contextmanager
def open_checkpoints(run_dir: Path, keep_last: int) -> Iterator[ocp.CheckpointManager]:
    """The run's checkpoints: the newest `keep_last` are kept for resuming, and the best by held-out reward."""
    best = keep.BestN(get_metric_fn=_reward, n=1, keep_checkpoints_without_metrics=False)
    options = ocp.CheckpointManagerOptions(
        best_fn=_reward,  # without it Orbax does not write metrics at all; what is kept the policy decides
        preservation_policy=keep.AnyPreservationPolicy([keep.LatestN(n=keep_last), best]),
        enable_async_checkpointing=False,  # the next update donates the buffers that would still be being copied
        cleanup_tmp_directories=True,
    )
    manager = ocp.CheckpointManager((run_dir / "checkpoints").absolute(), options=options)
    try:
        yield manager
    finally:
        manager.close()


def _reward(metrics: Mapping[str, float]) -> float:
    return metrics.get(METRIC, -math.inf)


def save(manager: ocp.CheckpointManager, state: TrainState, run: Mapping[str, Any], reward: float | None) -> None:
    """Write `state` after its `state.step`-th step; the step the checkpoint is named after is the next one to run.

    `reward` is the held-out mean reward of exactly these parameters, or None. CheckpointError when the disk refuses; where it
    only keeps an old one from being removed, a warning: the next start of the run removes it.
    """
    step, directory = int(state.step), Path(manager.directory)
    args = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(dict(run)))  # pyright: ignore
    metrics = {} if reward is None else {METRIC: reward}
    try:
        saved = manager.save(step, args=args, metrics=metrics)
        manager.wait_until_finished()
    except (OSError, ValueError) as error:
        if step in _steps(directory) and not _lacks(directory, step):
            warnings.warn(f"{directory}: an old checkpoint could not be removed ({_first_line(error)})", stacklevel=2)
            return
        whole = max((n for n in _steps(directory) if not _lacks(directory, n)), default=None)
        raise CheckpointError(
            f"checkpoint {step} could not be written to {directory} ({_first_line(error)}); "
            f"the last complete one is {whole}. Free disk space or lower run.keep_last, then --resume"
        ) from None
    if not saved:
        raise CheckpointError(f"{directory} holds checkpoints later than step {step}; nothing was written")


def latest(directory: Path) -> int | None:
    """The newest step that is complete in all its parts, or None; a warning names each newer one that is not."""
    for step in sorted(_steps(directory), reverse=True):
        missing = _lacks(directory, step)
        if not missing:
            return step
        adopt = f"; a copy of a whole one is adopted by copying its {MARKER} too" if missing == ["commit marker"] else ""
        warnings.warn(
            f"checkpoint {directory / str(step)} is incomplete (missing: {missing}); passed over{adopt}", stacklevel=2
        )
    return None


def _steps(directory: Path) -> list[int]:
    return [int(p.name) for p in directory.glob("*") if p.is_dir() and p.name.isdigit()]


def _lacks(directory: Path, step: int) -> list[str]:
    """What checkpoint `step` does not have; empty when it is whole."""
    missing = [part for part in PARTS if not (directory / str(step) / part).is_dir()]
    return missing or ([] if (directory / str(step) / MARKER).exists() else ["commit marker"])


def discard_after(directory: Path, step: int) -> None:
    """Set aside the checkpoints of steps later than `step`: those passed over, which would stand in the way of new ones.

    They are renamed, not removed: one may be a copy that somebody made by hand.
    """
    for later in _steps(directory):
        if later > step:
            names = (f"incomplete-{later}" + (f"-{n}" if n else "") for n in itertools.count())
            aside = next(name for name in names if not (directory / name).exists())
            (directory / str(later)).rename(directory / aside)


def best(directory: Path) -> int | None:
    """The step with the highest held-out reward among those kept, or None."""
    with ocp.CheckpointManager(directory.absolute()) as manager:
        scored = [(manager.metrics(s), s) for s in manager.all_steps() if not _lacks(directory, s)]
    rated = [(m[METRIC], s) for m, s in scored if m]
    return max(rated)[1] if rated else None


def restore(directory: Path, step: int, like: Any) -> tuple[TrainState, dict[str, Any]]:
    """State and run numbers of checkpoint `step`, placed and typed as `like`, whatever mesh wrote it.

    `like` is a TrainState of arrays, of ShapeDtypeStructs (without a sharding: on one device), or of numpy arrays, which stay
    such; a type other than the saved one is what its values are rounded to. CheckpointError for what cannot be read.
    """
    args = ocp.args.Composite(state=ocp.args.StandardRestore(_targets(like)), run=ocp.args.JsonRestore())  # pyright: ignore
    with _readable(directory, step), ocp.CheckpointManager(directory.absolute()) as manager:
        found = manager.restore(step, args=args)
    leaves, structure = jax.tree.flatten(found["state"])
    run = found["run"]
    del found  # one array at a time is there twice
    for i in range(len(leaves)):
        leaves[i] = _owned(leaves[i])
    return structure.unflatten(leaves), run


def restore_params(directory: Path, step: int, like: Params) -> Params:
    """Only the parameters of checkpoint `step`; `like` as for `restore`."""
    item = {"params": _targets(like)}
    how = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)  # pyright: ignore
    with _readable(directory, step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore((directory / str(step) / "state").absolute(), args=args)["params"]


def contents(directory: Path, step: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and type of every array of checkpoint `step`, by its path in the state; on any machine, without reading one."""
    with _readable(directory, step):
        found = ocp.PyTreeCheckpointHandler().metadata((directory / str(step) / "state").absolute()).tree  # pyright: ignore
    flat = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in flat}


@contextmanager
def _readable(directory: Path, step: int) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {directory / str(step)} cannot be read: {_first_line(error)}") from None


def _targets(like: Any) -> Any:
    """With a sharding of this process's devices at every array: the one in the file is of those that wrote it."""
    here = SingleDeviceSharding(jax.local_devices()[0])

    def target(x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            return np.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here)

    return jax.tree.map(target, like)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


_copy = jax.jit(jnp.copy)


def _owned(x: Any) -> Any:
    """An array in a buffer of XLA's own making: a restored one may not be donatable, and donation fails silently."""
    return x if isinstance(x, np.ndarray) else _copy(x)
