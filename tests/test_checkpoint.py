"""Checkpoints: whole or absent, the newest always kept, the best kept beside it, and a full disk is survived."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_train import Commands, Finished, config_file, events, lines

from gspo_jax import checkpoint, runlog
from gspo_jax.checkpoint import CheckpointError
from gspo_jax.commands import run_command
from gspo_jax.config import load_config
from gspo_jax.train import train
from gspo_jax.types import TrainState
from gspo_jax.watcher import Watcher

pytest_plugins = ("helpers_train",)


def state_at(step: int) -> TrainState:
    """A small state whose numbers tell its step."""
    params = {"embedding": jnp.full((4, 8), step, jnp.float32), "layers": {"scale": jnp.arange(3.0) + step}}
    optimizer: Any = optax.adamw(1e-3).init(params)
    return TrainState(jnp.int32(step), params, optimizer, jnp.int32(0))


def equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def saved(run_dir: Path, rewards: dict[int, float | None], keep_last: int = 2) -> Path:
    with checkpoint.open_checkpoints(run_dir, keep_last) as manager:
        for step, reward in rewards.items():
            checkpoint.save(manager, state_at(step), {"best": reward}, reward)
    return run_dir / "checkpoints"


def kept(directory: Path) -> list[int]:
    return sorted(int(p.name) for p in directory.iterdir())


@contextmanager
def no_room(limit: int) -> Iterator[None]:
    """Files of more than `limit` bytes cannot be written: how a full disk looks to one process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_state_comes_back_bit_for_bit(tmp_path: Path):
    directory = saved(tmp_path, {7: None})
    state, run = checkpoint.restore(directory, 7, state_at(0))
    assert equal(state, state_at(7))
    assert run == {"best": None}
    assert jax.tree.structure(state) == jax.tree.structure(state_at(0))
    assert equal(checkpoint.restore_params(directory, 7, state_at(0).params), state_at(7).params)


def test_ckp_04_the_latest_is_kept_and_the_best_beside_it(tmp_path: Path):
    """Keeping the best N deleted the newest, and resume went back to an old step."""
    directory = saved(tmp_path, {10 * n: 1.0 - 0.1 * n for n in range(1, 7)})  # ever worse
    assert kept(directory) == [10, 50, 60]
    assert checkpoint.latest(directory) == 60
    assert checkpoint.best(directory) == 10
    assert equal(checkpoint.restore(directory, 60, state_at(0))[0], state_at(60))


def test_checkpoints_without_an_evaluation_are_kept_as_the_latest_only(tmp_path: Path):
    directory = saved(tmp_path, {1: None, 2: 0.5, 3: None, 4: None, 5: None})
    assert kept(directory) == [2, 4, 5]
    assert checkpoint.best(directory) == 2
    assert checkpoint.best(saved(tmp_path / "other", {1: None})) is None


def test_ckp_01_what_was_never_committed_is_no_candidate(tmp_path: Path):
    """A restart loaded a half-written checkpoint and died; saves below the failed step were skipped without a word."""
    directory = saved(tmp_path, {1: None, 2: None})
    (directory / "2" / "_CHECKPOINT_METADATA").unlink()
    shutil.copytree(directory / "1", directory / "3.orbax-checkpoint-tmp")
    with pytest.warns(UserWarning, match=r"checkpoints/2 is incomplete.*commit marker"):
        assert checkpoint.latest(directory) == 1
    shutil.rmtree(directory / "2")
    saved(tmp_path, {3: None})
    assert checkpoint.latest(directory) == 3
    assert kept(directory) == [1, 3]


def test_ckp_02_a_missing_part_is_named(tmp_path: Path):
    """Resume chose a step that only one of the writers had saved."""
    directory = saved(tmp_path, {1: None, 2: None})
    shutil.rmtree(directory / "2" / "state")
    with pytest.warns(UserWarning, match=r"checkpoints/2 is incomplete \(missing: \['state'\]\)"):
        assert checkpoint.latest(directory) == 1
    assert checkpoint.latest(tmp_path / "nothing") is None


def test_the_best_is_never_an_incomplete_one(tmp_path: Path):
    directory = saved(tmp_path, {1: 0.1, 2: 0.2, 3: 0.9})
    shutil.rmtree(directory / "3" / "state")
    assert checkpoint.best(directory) == 2


def test_a_save_behind_a_later_one_is_refused(tmp_path: Path):
    directory = saved(tmp_path, {5: None})
    with pytest.raises(CheckpointError, match=r"checkpoints holds checkpoints later than step 3"):
        saved(tmp_path, {3: None})
    assert kept(directory) == [5]


@pytest.mark.parametrize("part", ["state", "run"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, part: str):
    directory = saved(tmp_path, {1: None})
    for file in (directory / "1" / part).rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2])
    with pytest.raises(CheckpointError, match="checkpoints/1 cannot be read"):
        checkpoint.restore(directory, 1, state_at(0))
    if part == "state":
        with pytest.raises(CheckpointError, match="checkpoints/1 cannot be read"):
            checkpoint.restore_params(directory, 1, state_at(0).params)


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path):
    directory = saved(tmp_path, {1: None})
    other = state_at(0)._replace(params={"embedding": jnp.zeros((5, 8))})
    with pytest.raises(CheckpointError, match="checkpoints/1 cannot be read"):
        checkpoint.restore(directory, 1, other)


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path):
    directory = saved(tmp_path, {1: None})
    with no_room(16), pytest.raises(CheckpointError) as error:
        saved(tmp_path, {2: None})
    assert str(directory) in str(error.value)
    assert "the last complete one is 1" in str(error.value)
    assert "\n" not in str(error.value)
    assert checkpoint.latest(directory) == 1
    assert equal(checkpoint.restore(directory, 1, state_at(0))[0], state_at(1))
    saved(tmp_path, {2: None})  # once there is room again
    assert checkpoint.latest(directory) == 2


class FullDisk(Watcher):
    """No room from the second checkpoint on."""

    def __init__(self) -> None:
        self.room, self.saved = ExitStack(), 0

    def phase(self, name: str) -> None:
        self.saved += name == "checkpoint"
        if self.saved == 2:
            self.room.enter_context(no_room(16))


def test_a_run_whose_disk_fills_up_stops_with_1_and_goes_on_later(
    finished: Finished, model: Path, tmp_path: Path, command: Commands
):
    file, run_dir, watcher = config_file(tmp_path, model), tmp_path / "runs" / "tiny", FullDisk()
    config, _ = load_config(file)

    def work() -> None:
        with watcher.room:
            for _ in train(config, run_dir=run_dir, watcher=watcher):
                pass

    done = command(lambda _: run_command(work))
    assert done.code == 1
    (error,) = done.errors
    assert str(run_dir / "checkpoints") in error
    assert "the last complete one is 2" in error
    assert "Warning" not in done.err
    assert command.train(file, "--resume").code == 0
    assert lines(run_dir / "digests.jsonl") == finished.digests()
    assert [e["step"] for e in events(run_dir, "checkpoint")] == [2, 4]


@pytest.mark.parametrize("write", [runlog.append, runlog.write_json])
def test_a_full_disk_while_logging_names_the_file(tmp_path: Path, write):
    with no_room(64), pytest.raises(OSError, match=r"metrics\.jsonl"):
        write(tmp_path / "metrics.jsonl", {"reward/mean": [0.5] * 100})
