"""Whole runs on a mesh: the numbers of one device, the same bits again, and a reference on devices of its own."""

from pathlib import Path

import jax
import numpy as np
import pytest
from helpers_train import config_of

from gspo_jax import replay
from gspo_jax.batch import pack
from gspo_jax.build import packing_of
from gspo_jax.config import ConfigError
from gspo_jax.mesh import mesh_of
from gspo_jax.reference import load_reference
from gspo_jax.start import load_start
from gspo_jax.train import train
from rollout.task_app import Task

pytest_plugins = ("helpers_train",)

TASK = Task(lambda problem: f"say {problem.seed}", lambda text, _: float(sum(map(ord, text)) % 11), splits={"train": 6})
SHORT = ("training.iterations_per_epoch=2", "evaluation.instances=0", "algorithm.kl_beta=0.05", "training.learning_rate=1e-3")
FOUR = ("mesh.fsdp=2", "mesh.tensor=2")
APART = ("compute.topology.gpus_for_ref=2",)


def run(model: Path, folder: Path, *overrides: str):
    return list(train(config_of(model, *SHORT, *overrides), task=TASK, run_dir=folder))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory):
    return run(model, tmp_path_factory.mktemp("alone") / "run")


def sampled(step):
    return [(turn.completion_ids, turn.logprobs) for group in step.groups for t in group.trajectories for turn in t.turns]


@pytest.mark.parametrize("overrides", [FOUR, (*FOUR, *APART)], ids=str)
def test_a_run_on_a_mesh_has_the_numbers_of_one_device(alone, model: Path, tmp_path: Path, overrides: tuple):
    """The first step's samples are the same: from then on parameters differ in their last bits, and samples may."""
    steps = run(model, tmp_path / "run", *overrides)
    assert sampled(steps[0]) == sampled(alone[0])
    for name in ("policy/loss", "optimizer/grad_norm", "policy/kl_reference", "policy/entropy", "mismatch/mean"):
        assert steps[0].metrics[name] == pytest.approx(alone[0].metrics[name], rel=1e-4, abs=1e-6), name
    assert [done.differs for done in replay.replay(tmp_path / "run")] == [[], []]


def test_a_dedicated_reference_is_elsewhere_and_says_the_same(model: Path, tmp_path: Path):
    """A policy on two devices, its reference on the two after them."""
    groups, scores = run(model, tmp_path / "run", "training.iterations_per_epoch=1")[0].groups, []
    for overrides in (("mesh.fsdp=2",), ("mesh.fsdp=2", *APART)):
        config = config_of(model, *SHORT, *overrides)
        start = load_start(config, mesh_of(config))
        reference = load_reference(config, start)
        assert reference is not None
        scores.append((reference, start))
    (shared, start), (apart, _) = scores
    assert {d.id for d in apart.layout.mesh.devices.flat} == {2, 3}
    assert shared.layout is start.layout
    batch = pack(groups, [[1.0] * len(g.trajectories) for g in groups], 8, packing_of(config_of(model, *SHORT), start, apart))
    found = [jax.device_get(each.score(batch)) for each in (shared, apart)]
    np.testing.assert_allclose(*found, atol=1e-5)
    assert np.abs(found[0]).max() > 0.1


def test_a_reference_that_has_no_device_is_refused(model: Path):
    config = config_of(model, *SHORT, "mesh.fsdp=0", "compute.topology={gpus_for_training=8, gpus_for_ref=1}")
    with pytest.raises(ConfigError, match="1 devices after the 8 that train, but there are 0"):
        load_reference(config, load_start(config, mesh_of(config)))
