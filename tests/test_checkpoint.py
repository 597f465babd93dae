"""Checkpoints: whole or absent, the newest always kept, the best kept beside it, and a full disk is survived."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_model import on, tiny_policy
from helpers_train import STEPS, Commands, Finished, config_file, config_of, events, lines

from gspo_jax import checkpoint, runlog
from gspo_jax.build import build_trainer
from gspo_jax.checkpoint import CheckpointError
from gspo_jax.commands import run_command
from gspo_jax.config import load_config
from gspo_jax.config_report import minibatches
from gspo_jax.digest import params_digest
from gspo_jax.mesh import MeshShape
from gspo_jax.policy import Policy
from gspo_jax.start import load_start
from gspo_jax.train import train
from gspo_jax.types import TrainState
from gspo_jax.watcher import Watcher
from rollout.task import Task
from rollout.types import Problem

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


def test_ckp_17_what_was_passed_over_is_set_aside_and_can_be_adopted(tmp_path: Path):
    """A copy made by hand, without the marker, was taken for rubbish and deleted."""
    directory = saved(tmp_path, {1: None, 2: None})
    shutil.copytree(directory / "2", directory / "7", ignore=shutil.ignore_patterns(checkpoint.MARKER))
    with pytest.warns(UserWarning, match=f"7 is incomplete .* adopted by copying its {checkpoint.MARKER}"):
        assert checkpoint.latest(directory) == 2
    for aside in ("incomplete-7", "incomplete-7-1"):
        shutil.copytree(directory / "2", directory / "7", ignore=shutil.ignore_patterns(checkpoint.MARKER), dirs_exist_ok=True)
        checkpoint.discard_after(directory, 2)
        assert not (directory / "7").exists()
        assert (directory / aside / "state").is_dir()
    saved(tmp_path, {3: None, 7: None})
    assert {"3", "7", "incomplete-7", "incomplete-7-1"} <= {p.name for p in directory.iterdir()}
    shutil.rmtree(directory / "7")
    (directory / "incomplete-7").rename(directory / "7")
    shutil.copy(directory / "3" / checkpoint.MARKER, directory / "7")
    assert checkpoint.latest(directory) == 7
    assert equal(checkpoint.restore(directory, 7, state_at(0))[0], state_at(2))


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


def test_ckp_05_a_save_behind_a_later_one_is_refused(tmp_path: Path):
    """After rolling back nothing was saved, and nothing was said."""
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


SAVE = """
import itertools, sys, warnings
from pathlib import Path
import jax.numpy as jnp
from gspo_jax import checkpoint
from gspo_jax.types import TrainState

folder = Path(sys.argv[1])

def save(steps):
    with checkpoint.open_checkpoints(folder, 1) as manager:
        for step in steps:
            state = TrainState(jnp.int32(step), {"scale": jnp.full((64, 64), step, jnp.float32)}, (), jnp.int32(0))
            checkpoint.save(manager, state, {"best": None}, None)
            print(step, flush=True)
"""
UNDELETABLE = """
import grp, os, pwd
save([1])
stuck = folder / "checkpoints" / "1" / "state"
for path in (folder, *folder.rglob("*")):
    os.chown(path, 65534, -1)
stuck.chmod(0o500)
os.seteuid(65534)  # nothing keeps root from deleting
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    save([2, 3])
print(*sorted(p.name for p in (folder / "checkpoints").iterdir()), *(str(w.message) for w in caught))
stuck.chmod(0o700)
save([4])
print(*sorted(p.name for p in (folder / "checkpoints").iterdir()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody whom permissions bind")
def test_ckp_18_an_old_checkpoint_that_cannot_be_removed_stops_nothing():
    """The trainer crashed while it cleaned up: a file was held, and the directory not empty."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", SAVE + UNDELETABLE, folder], capture_output=True, text=True, timeout=60, check=False,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    *_, first, _, second = done.stdout.splitlines()
    assert first.startswith("1 3 ")
    assert "an old checkpoint could not be removed" in first
    assert second == "4"


def test_ckp_15_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path):
    """Ctrl-C during a save destroyed the last good data. With keep_last = 1 the old one goes once the new one is there."""
    directory, first = tmp_path / "checkpoints", 1
    for kill in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", f"{SAVE}save(itertools.count({first}))", str(tmp_path)], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == f"{first}\n"
            time.sleep(0.023 * kill)
            child.kill()
            told = [first, *map(int, child.stdout.read().split())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a half-removed old one may be newest but one, never newest
            step = checkpoint.latest(directory)
        assert step in (told[-1], told[-1] + 1)
        zero: Any = np.int32(0)
        like = TrainState(zero, {"scale": np.zeros((64, 64), np.float32)}, (), zero)
        state, _ = checkpoint.restore(directory, step, like)
        assert int(state.step) == step == state.params["scale"].min() == state.params["scale"].max()
        first = step + 1


def test_ckp_12_what_is_saved_is_what_was_there_when_saving_began(tmp_path: Path):
    """The next update gave away buffers that a save in the background had not copied yet."""
    donating = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = jax.tree.map(jnp.copy, state_at(1))
    with checkpoint.open_checkpoints(tmp_path, 5) as manager:
        for _ in range(3):
            checkpoint.save(manager, state, {"best": None}, None)
            state = donating(state)
    for step in (1, 2, 3):
        found, _ = checkpoint.restore(tmp_path / "checkpoints", step, state_at(0))
        expected = jax.tree.map(lambda x, step=step: x + step - 1, state_at(1))
        assert equal(found, expected)


# Another mesh than the one that saved


MESHES = [(1, 1, 1, 1), (1, 2, 1, 1), (1, 4, 1, 1), (2, 1, 2, 1), (1, 1, 2, 2), (1, 2, 2, 2)]


@pytest.fixture(scope="module")
def of_eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Policy, TrainState]:
    """A checkpoint of a tiny model's state on eight devices, its policy, and the state on one. Negative zeros are in it too."""
    policy, params = tiny_policy(vocab_size=104, num_attention_heads=8, num_key_value_heads=4)
    params["norm"]["scale"] = jnp.full_like(params["norm"]["scale"], -0.0)
    moments: Any = optax.adamw(1e-3).init(params)
    state = TrainState(jnp.int32(7), params, moments, jnp.int32(0))
    folder = tmp_path_factory.mktemp("eight")
    with checkpoint.open_checkpoints(folder, 1) as manager:
        checkpoint.save(manager, on(8, policy).state(state), {"best": None}, None)
    return folder / "checkpoints", policy, state


def same_bits(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("inside", [False, True], ids=["", "set_mesh"])
def test_ckp_11_shd_03_restored_onto_any_mesh(of_eight, shape: tuple, inside: bool):
    """The sharding was rebuilt from the file, and failed on another count; and restoring failed inside `jax.set_mesh` only."""
    directory, policy, state = of_eight
    layout = on(MeshShape(*shape), policy)
    like = layout.state(jax.tree.map(jnp.zeros_like, state))
    with jax.set_mesh(layout.mesh) if inside and layout.mesh is not None else nullcontext():
        found, _ = checkpoint.restore(directory, 7, like)
        params = checkpoint.restore_params(directory, 7, like.params)
    same_bits(found, state)
    same_bits(params, state.params)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


ELSEWHERE = """
import sys
from pathlib import Path
import jax, numpy as np
from gspo_jax import checkpoint
directory = Path(sys.argv[1])
assert jax.device_count() == 1
shapes = checkpoint.contents(directory, 7)
assert shapes["params/embedding"].shape == (104, 32) and shapes["step"].dtype == np.int32, shapes
tree = {}
for path, shape in shapes.items():
    if path.startswith("params/"):
        *parents, last = path.split("/")[1:]
        where = tree
        for name in parents:
            where = where.setdefault(name, {})
        where[last] = shape
plain = checkpoint.restore_params(directory, 7, tree)
assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(plain))
host = checkpoint.restore_params(directory, 7, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree))
assert all(type(x) is np.ndarray for x in jax.tree.leaves(host))
assert all(np.asarray(x).tobytes() == y.tobytes() for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(host), strict=True))
np.save(sys.argv[2], host["embedding"])
"""


def test_ckp_11_read_on_a_machine_with_one_device(of_eight, tmp_path: Path):
    """Neither its contents nor, without a mesh, its arrays could be read where there were fewer devices."""
    directory, _, state = of_eight
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(directory), str(tmp_path / "embedding.npy")], capture_output=True, text=True,
        timeout=60, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert np.load(tmp_path / "embedding.npy").tobytes() == np.asarray(state.params["embedding"]).tobytes()


def test_restored_to_numpy_and_in_another_type(of_eight):
    directory, policy, state = of_eight
    host, _ = checkpoint.restore(directory, 7, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state))
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(host))
    same_bits(host, state)
    layout = on(MeshShape(fsdp=2), policy)
    masters = layout.state(jax.tree.map(jnp.zeros_like, state))
    half = masters._replace(opt_state=jax.tree.map(_in_bfloat16, masters.opt_state))
    found, _ = checkpoint.restore(directory, 7, half)
    same_bits(found.params, state.params)
    same_bits(found.opt_state, jax.tree.map(_in_bfloat16, state.opt_state))


def _in_bfloat16(x: Any) -> Any:
    return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x


def test_ckp_09_a_checkpoint_is_of_the_next_step_to_run(finished: Finished):
    """The batch of the last checkpoint was applied twice: its name was the step it came from."""
    config, _ = load_config(finished.config)
    start = load_start(config)
    like, directory = build_trainer(config, start).init(start.params), finished.run_dir / "checkpoints"
    assert max(kept(directory)) == STEPS
    for step in kept(directory):
        state, _ = checkpoint.restore(directory, step, like)
        assert int(state.step) == step
        counts = {int(x) for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32}
        flat = sum(line["optimizer/empty"] for line in lines(finished.run_dir / "metrics.jsonl")[:step])
        assert counts == {minibatches(config) * step - flat}
        assert params_digest(state.params) == finished.digests()[step - 1]["params"]


def seeds(run_dir: Path, step: int) -> set[int]:
    return {line["problem"]["seed"] for line in lines(run_dir / "rollouts" / f"{step:06d}.jsonl")}


def test_ckp_10_a_resumed_run_begins_with_the_problems_of_its_step(model: Path, tmp_path: Path):
    """Data began at 0 again: what plays ahead had begun before the state was loaded. Six problems, two a step, each once."""
    asked: list[int] = []

    def reward(text: str, problem: Problem) -> float:
        asked.append(problem.seed)
        return float(len(text))

    task = Task(lambda problem: f"say {problem.seed}", reward, splits={"train": 6})
    words = ("evaluation.instances=0", "rollout.max_staleness=1")
    list(train(config_of(model, "training.iterations_per_epoch=2", *words), task=task, run_dir=tmp_path))
    asked.clear()
    list(train(config_of(model, "training.iterations_per_epoch=3", *words), task=task, run_dir=tmp_path, resume=True))
    assert set(asked) == seeds(tmp_path, 2)
    assert set.union(*(seeds(tmp_path, step) for step in range(3))) == set(range(6))


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
