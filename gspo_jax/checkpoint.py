"""The whole run as one atomic step: Orbax writes parameters, optimizer state and the run's own numbers, or nothing."""

import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

from gspo_jax.types import Params, TrainState

PARTS = ("state", "run")
METRIC = "reward_mean"


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

    `reward` is the held-out mean reward of exactly these parameters, or None. CheckpointError when the disk refuses.
    """
    step = int(state.step)
    args = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(dict(run)))  # pyright: ignore
    metrics = {} if reward is None else {METRIC: reward}
    try:
        saved = manager.save(step, args=args, metrics=metrics)
        manager.wait_until_finished()
    except (OSError, ValueError) as error:
        whole = max((n for n in _steps(Path(manager.directory)) if not _lacks(Path(manager.directory), n)), default=None)
        raise CheckpointError(
            f"checkpoint {step} could not be written to {manager.directory} ({_first_line(error)}); "
            f"the last complete one is {whole}. Free disk space or lower run.keep_last, then --resume"
        ) from None
    if not saved:
        raise CheckpointError(f"{manager.directory} holds checkpoints later than step {step}; nothing was written")


def latest(directory: Path) -> int | None:
    """The newest step that is complete in all its parts, or None; a warning names each newer one that is not."""
    for step in sorted(_steps(directory), reverse=True):
        missing = _lacks(directory, step)
        if not missing:
            return step
        warnings.warn(f"checkpoint {directory / str(step)} is incomplete (missing: {missing}); passed over", stacklevel=2)
    return None


def _steps(directory: Path) -> list[int]:
    return [int(p.name) for p in directory.glob("*") if p.is_dir() and p.name.isdigit()]


def _lacks(directory: Path, step: int) -> list[str]:
    """What checkpoint `step` does not have; empty when it is whole."""
    missing = [part for part in PARTS if not (directory / str(step) / part).is_dir()]
    return missing or ([] if (directory / str(step) / "_CHECKPOINT_METADATA").exists() else ["commit marker"])


def discard_after(directory: Path, step: int) -> None:
    """Remove the checkpoints of steps later than `step`: those passed over, which would stand in the way of new ones."""
    for later in _steps(directory):
        if later > step:
            shutil.rmtree(directory / str(later))


def best(directory: Path) -> int | None:
    """The step with the highest held-out reward among those kept, or None."""
    with ocp.CheckpointManager(directory.absolute()) as manager:
        scored = [(manager.metrics(s), s) for s in manager.all_steps() if not _lacks(directory, s)]
    rated = [(m[METRIC], s) for m, s in scored if m]
    return max(rated)[1] if rated else None


def restore(directory: Path, step: int, like: Any) -> tuple[TrainState, dict[str, Any]]:
    """State and run numbers of checkpoint `step`, placed and typed as `like` (a TrainState of arrays or ShapeDtypeStructs)."""
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    args = ocp.args.Composite(state=ocp.args.StandardRestore(target), run=ocp.args.JsonRestore())  # pyright: ignore
    try:
        with ocp.CheckpointManager(directory.absolute()) as manager:
            found = manager.restore(step, args=args)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {directory / str(step)} cannot be read: {_first_line(error)}") from None
    return _owned(found["state"]), found["run"]


def restore_params(directory: Path, step: int, like: Params) -> Params:
    """Only the parameters of checkpoint `step`."""
    item = {"params": jax.tree.map(ocp.utils.to_shape_dtype_struct, like)}
    how = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)  # pyright: ignore
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore((directory / str(step) / "state").absolute(), args=args)["params"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {directory / str(step)} cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 0, tree)


def _owned(tree: Any) -> Any:
    """The tree in buffers of XLA's own making: restored ones may not be donatable, and donation fails silently."""
    return _copy(tree)
