"""Memory on a mesh: what an update may take over, what nobody may, what is compiled, and the options of the process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers_model import done, group, random_groups, tiny_model_folder, turn
from helpers_train import config_of, events, lines

from gspo_jax import checkpoint
from gspo_jax.build import Trainer, build_trainer
from gspo_jax.config import ConfigError
from gspo_jax.host import refuse_taken
from gspo_jax.mesh import mesh_of
from gspo_jax.start import Start, load_start
from gspo_jax.train import train
from gspo_jax.types import TrainState
from rollout.task import Task
from rollout.types import Group

pytest_plugins = ("helpers_train",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


def buffers(tree: Any) -> dict[tuple[int, int], int]:
    """Bytes of every buffer behind a tree, by device and address."""
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return {(shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes for shard in shards}


def begun(folder: Path, *overrides: str) -> tuple[Start, Trainer, TrainState]:
    config = config_of(folder, *overrides)
    start = load_start(config, mesh_of(config))
    trainer = build_trainer(config, start)
    return start, trainer, trainer.init(start.params)


@pytest.mark.parametrize("fsdp", [1, 4])
def test_shd_01_a_restored_state_is_given_away_as_a_fresh_one(folder: Path, tmp_path: Path, fsdp: int):
    """The first step after resuming ran out of memory: restored arrays could not be donated, and nothing said so."""
    _, trainer, fresh = begun(folder, f"mesh.fsdp={fsdp}")
    with checkpoint.open_checkpoints(tmp_path, 1) as manager:
        checkpoint.save(manager, fresh, {"best": None}, None)
    resumed, _ = checkpoint.restore(tmp_path / "checkpoints", 0, fresh)
    batch = trainer.batch(random_groups(0, 2, 4), fresh.params).batch
    jitted: Any = trainer.compiled(resumed)
    update = jitted.lower(resumed, batch, None).compile()
    mine = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(fresh))
    assert update.memory_analysis().alias_size_in_bytes >= 0.95 * mine
    for state in (fresh, resumed):
        before = buffers(state)
        after = buffers(update(state, batch, None)[0])
        assert all(x.is_deleted() for x in jax.tree.leaves(state))
        assert sum(size for place, size in before.items() if place in after) >= 0.95 * sum(before.values())


PLACES = ("compute.topology.reference_placement=dedicated", "compute.topology.gpus_for_ref=1")


@pytest.mark.parametrize(
    "words",
    [
        ("model.trainer_mode=full", "mesh.fsdp=1"),
        ("model.trainer_mode=full", "mesh.fsdp=2", *PLACES),
        ("model.trainer_mode=lora", "mesh.fsdp=2", "training.lora.r=4"),
    ],
)
def test_shd_02_the_reference_outlives_the_update(folder: Path, words: tuple[str, ...]):
    """Policy and reference shared buffers, which the update gave away."""
    config = config_of(folder, "algorithm.kl_beta=0.1", *words)
    start = load_start(config, mesh_of(config))
    trainer, groups = build_trainer(config, start), random_groups(0, 2, 4)
    state = trainer.init(start.params)
    assert len(buffers(state)) == sum(len(x.addressable_shards) for x in jax.tree.leaves(state))  # no leaf is another
    first = trainer.batch(groups, state.params).batch
    before = np.asarray(first.reference_logprobs)
    moved, _ = trainer.compiled(state)(state, first, trainer.frozen)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    again = trainer.batch(groups, moved.params).batch
    np.testing.assert_array_equal(again.reference_logprobs, before)


def test_shd_06_random_lengths_compile_few_programs_on_a_mesh(folder: Path):
    """Every step compiled again. Rows are of fixed length, and micro-batches a power of two: of 32 tokens a row and 8 rows at
    least, a minibatch of four short trajectories takes one or two."""
    _, trainer, state = begun(folder, "mesh.fsdp=2", "mesh.sequence=2")
    update: Any = trainer.compiled(state)
    shapes = set()
    for groups in lengths(12):
        batch = trainer.batch(groups, state.params).batch
        shapes.add(batch.tokens.shape)
        state, _ = update(state, batch, None)
        assert update._cache_size() == len(shapes)
    assert len(shapes) <= 2


def lengths(count: int) -> Iterator[list[Group]]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        groups = []
        for seed in range(2):
            prompt = rng.integers(1, 90, rng.integers(1, 40)).tolist()
            answers = [rng.integers(1, 90, rng.integers(1, 7)).tolist() for _ in range(4)]
            groups.append(group(*(done(turn(prompt, answer), member=m) for m, answer in enumerate(answers)), seed=seed))
        yield groups


def test_a_run_goes_on_under_another_mesh(model: Path, tmp_path: Path):
    """Saved on one device, resumed on two: the sampler has the restored weights, and the log says what they are on now."""
    task = Task(lambda problem: f"say {problem.seed}", lambda text, _: float(len(text)), splits={"train": 6})
    words = ("evaluation.instances=0",)
    list(train(config_of(model, "training.iterations_per_epoch=1", *words), task=task, run_dir=tmp_path))
    config = config_of(model, "training.iterations_per_epoch=2", "mesh.fsdp=2", *words)
    (step,) = train(config, task=task, run_dir=tmp_path, resume=True)
    assert step.step == 1
    assert (step.metrics["mismatch/max"] or 1.0) < 1e-3
    (resumed,) = events(tmp_path, "run.resumed")
    assert resumed["step"] == 1
    assert resumed["device"]["count"] == jax.device_count()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1]


# The process


def run(code: str, **environment: str) -> list[str]:
    """What a child process prints, to both streams."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [done.stdout.strip(), done.stderr]


IMPORTED = """
import os
import gspo_jax.train_command, gspo_jax.commands, gspo_jax.serve, gspo_jax.vllm_engine
from jax._src import xla_bridge
from jaxlib import xla_client
from gspo_jax.host import use_first_gpus
use_first_gpus(2)
assert not xla_bridge.backends_are_initialized()
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
found = xla_client.generate_pjrt_gpu_plugin_options()
print(found["preallocate"], found["memory_fraction"])
"""


def test_shd_07_memory_options_are_read_after_our_imports():
    """Set after an import, they had no effect, and JAX took 90 % of every GPU. Here nothing uses JAX at import."""
    assert run(IMPORTED, XLA_PYTHON_CLIENT_MEM_FRACTION="0.25")[0] == "False 0.25"


def test_shd_07_gpus_taken_before_are_refused():
    """A notebook that had used JAX held the memory of the GPUs that were to be the servers'."""
    gpus = [SimpleNamespace(platform="gpu")] * 4
    refuse_taken(gpus, 4)
    refuse_taken(jax.devices(), 1)
    with pytest.raises(ConfigError, match=r"compute\.topology: 2 GPUs .* has taken 4; .*CUDA_VISIBLE_DEVICES=0,1"):
        refuse_taken(gpus, 2)


CACHED = """
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.endswith("/cache_hits")))
from gspo_jax.digest import params_digest
print(params_digest({"a": jnp.arange(8.0)}), any(hits))
"""


def test_shd_10_a_damaged_or_unwritable_compilation_cache_only_warns(tmp_path: Path):
    """A full disk or a cut file ended the run. A second process finds what the first compiled."""
    small = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    folder, file = tmp_path / "cache", tmp_path / "file"
    file.write_text("no folder")
    first, second = (run(CACHED, JAX_COMPILATION_CACHE_DIR=str(folder), **small) for _ in range(2))
    digest, _ = first[0].split()
    assert (first[0], second[0]) == (f"{digest} False", f"{digest} True")
    for entry in folder.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:20])
    cut = run(CACHED, JAX_COMPILATION_CACHE_DIR=str(folder), **small)
    assert cut[0] == f"{digest} False"
    assert "Error reading persistent compilation cache entry" in cut[1]
    away = run(CACHED, JAX_COMPILATION_CACHE_DIR=str(file / "inside"), **small)
    assert away[0] == f"{digest} False"
    assert "Warning" in away[1]
