"""Every family through the whole loop: task app, gateway, sampler, update, publish, export; all weights, LoRA or QLoRA."""

import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers_random import FAMILIES, family_folder
from helpers_train import config_of

from gspo_jax import runlog
from gspo_jax.commands import load_run, load_run_or_model
from gspo_jax.scoring import score_tokens
from gspo_jax.train import train
from gspo_jax.watcher import Watcher
from rollout.task_app import Task
from serving_bridge.trees import leaves

pytest_plugins = ("helpers_train",)

QUICK = ("training.iterations_per_epoch=2", "evaluation.instances=0", "training.lora.r=2", "training.learning_rate=1e-3")
TASK = Task(lambda problem: f"say {problem.seed}", lambda text, _: float(sum(map(ord, text)) % 11), splits={"train": 6})


class Notes(Watcher):
    """What the run says of what it trains."""

    def __init__(self) -> None:
        self.told = ""

    def event(self, event) -> None:
        if event["type"] == "model":
            self.told = event["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = family_folder(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return make


ADAPTED = [("llama", "qlora"), ("qwen2", "qlora"), ("qwen3", "lora"), ("qwen3_moe", "qlora"), ("qwen3_5", "qlora"),
           ("qwen3_5_moe", "lora"), ("gemma3", "lora")]  # fmt: skip
"""A kind of adapter for each family; both kinds meet attention, linear attention and experts."""


@pytest.mark.parametrize(("family", "mode"), [*((family, "full") for family in FAMILIES), *ADAPTED])
def test_a_step_of_every_family(family: str, mode: str, folder, compiled: Path, tmp_path: Path):
    model, notes = folder(family), Notes()
    quantized = "training.lora.quantization=int8" if family == "qwen2" else "training.lora.quantization=nf4"
    config = config_of(model, *QUICK, quantized, f"model.trainer_mode={mode}")
    steps = list(train(config, task=TASK, run_dir=tmp_path / "run", watcher=notes))
    for step in steps:
        assert step.metrics["policy/ratio_mean_1"] == 1.0
        assert step.metrics["optimizer/skipped"] == 0
        assert step.metrics["mismatch/max"] < 2e-4, "the sampler computes what the trainer computes"
        assert step.metrics["optimizer/grad_norm"] > 0
    digests = [line["params"] for line in runlog.read_lines(tmp_path / "run" / "digests.jsonl")]
    assert len(set(digests)) == 2
    start, params = load_run(tmp_path / "run", best=False)
    check_counts(notes.told, start, mode)
    check_export(start, params, tmp_path)


def check_counts(told: str, start, mode: str) -> None:
    trained = sum(x.size for x in jax.tree.leaves(start.params))
    total = sum(np.prod(leaf.shape) for _, leaf in leaves(start.frozen or start.params))
    numbers = [int(found.replace(",", "")) for found in re.findall(r"[\d,]+(?= )", told) if found.replace(",", "")]
    assert trained in numbers
    assert (trained == total) == (mode == "full")
    if mode != "full":
        assert total in numbers


def check_export(start, params, tmp_path: Path) -> None:
    """The run's export, merged or not, scores as its last checkpoint does."""
    ids = np.random.default_rng(0).integers(0, start.policy.config.vocab_size, (2, 9)).astype(np.int32)
    expected = score_tokens(start.policy, start.whole(params, start.frozen), ids)
    start.save(params, tmp_path / "merged", dtype="float32", merge=True)
    merged = score_tokens(*load_run_or_model(str(tmp_path / "merged")), ids)
    np.testing.assert_allclose(merged, expected, atol=5e-5)
    if start.adapter is not None and not any(type(leaf).__name__ == "QArray" for _, leaf in leaves(start.frozen)):
        np.testing.assert_array_equal(score_tokens(*load_run_or_model(str(tmp_path / "run" / "export")), ids), expected)
