"""Checkpoints that transformers wrote, and ours that it reads: equal logits both ways, equal bits, no key left over."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch_side
from helpers_families import QUICK, TOLERANCE
from safetensors import safe_open

from gspo_jax.models import ARCHITECTURES
from gspo_jax.models.layers import Spots
from gspo_jax.policy import Policy, load_policy, save_policy
from gspo_jax.types import Params
from serving_bridge.convert import folder_tensors, save_folder

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-torch" / "bin" / "python"
NAMES = sorted(torch_side.CASES)


def torch_side_run(*args: str | Path) -> None:
    """Runs the script of the other side; skips the test where its environment could not be made."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON.relative_to(ROOT)} is missing: `make torch` could not get Python 3.11 or torch")
    argv = [PYTHON, Path(torch_side.__file__), *args]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=250, check=False, env=environment)
    if done.returncode == torch_side.NO_TORCH:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]


@dataclass(frozen=True)
class Case:
    """A checkpoint of transformers, and what we exported of it."""

    folder: Path
    policy: Policy
    params: Params
    logits: Callable[[Params], np.ndarray]
    bfloat16: Path
    """As it was loaded, rounded."""
    halves: Path
    """Every parameter halved; float32 in shards."""


def exported(folder: Path, out: Path) -> Case:
    policy, params = load_policy(folder)
    ids = np.load(folder / "golden.npz")["input_ids"]
    spots = Spots(np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape), np.ones(ids.shape, np.int32))

    def logits(params: Params) -> jax.Array:
        return policy.model.apply({"params": params}, ids, spots).hidden @ policy.head(params).T

    save_policy(policy, params, out / "bfloat16")
    save_folder(
        out / "halves", jax.tree.map(lambda x: x / 2, params), policy.table, policy.config.sizes(), source_folder=folder,
        dtype="float32", keep=policy.config.untrained, max_shard_bytes=40_000,
    )  # fmt: skip
    return Case(folder, policy, params, jax.jit(logits, compiler_options=QUICK), out / "bfloat16", out / "halves")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("torch")
    torch_side_run("make", root / "made")
    found = {name: exported(root / "made" / name, root / "ours" / name) for name in NAMES}
    torch_side_run("score", *(path for case in found.values() for path in (case.bfloat16, case.halves)))
    return found


@pytest.fixture
def case(cases: dict[str, Case], request: pytest.FixtureRequest) -> Case:
    return cases[request.param]


def golden(folder: Path) -> np.ndarray:
    return np.load(folder / "golden.npz")["logits"]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_every_model_type_is_compared(cases: dict[str, Case]):
    kinds = {read_json(case.folder / "config.json")["model_type"] for case in cases.values()}
    assert kinds == set(ARCHITECTURES)


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_logits_of_a_checkpoint_by_transformers(case: Case):
    np.testing.assert_allclose(case.logits(case.params), golden(case.folder), atol=TOLERANCE)


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_bfloat16_export_has_the_bits_and_logits_in_transformers(case: Case):
    assert read_json(case.bfloat16 / "loading.json") == {}
    assert read_json(case.bfloat16 / "digests.json") == read_json(case.folder / "digests.json")
    _, params = load_policy(case.bfloat16)
    np.testing.assert_allclose(case.logits(params), golden(case.bfloat16), atol=TOLERANCE)


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_sharded_export_has_the_logits_in_transformers(case: Case):
    """Of parameters that are not the source's, so that nothing but what was exported can give them."""
    assert len(list(case.halves.glob("model-*.safetensors"))) > 2
    assert read_json(case.halves / "loading.json") == {}
    found = golden(case.halves)
    np.testing.assert_allclose(case.logits(jax.tree.map(lambda x: x / 2, case.params)), found, atol=TOLERANCE)
    assert np.abs(found - golden(case.folder)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", [name for name in NAMES if name.endswith("_images")], indirect=True)
def test_vision_towers_pass_through_untouched(case: Case):
    assert folder_tensors(case.folder) == folder_tensors(case.bfloat16) == folder_tensors(case.halves)
    ours = {name for row in case.policy.table for name in [row.name.partition("{")[0]]}
    with (
        safe_open(case.folder / "model.safetensors", "numpy") as source,
        safe_open(case.bfloat16 / "model.safetensors", "numpy") as export,
    ):
        untouched = [name for name in source.keys() if not name.startswith(tuple(ours))]  # noqa: SIM118
        assert untouched
        for name in untouched:
            a, b = source.get_tensor(name), export.get_tensor(name)
            assert a.dtype == b.dtype == np.float32
            assert a.tobytes() == b.tobytes()
    config = read_json(case.bfloat16 / "config.json")
    assert config["vision_config"].items() >= {"hidden_size": 16}.items()
