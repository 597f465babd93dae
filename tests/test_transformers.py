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
from safetensors.numpy import load_file

from gspo_jax import peft
from gspo_jax.adapters import adapter_of, attach, init_adapter
from gspo_jax.models import ARCHITECTURES
from gspo_jax.models.layers import Spots
from gspo_jax.policy import Policy, load_policy, save_policy
from gspo_jax.types import Params
from serving_bridge.convert import WeightError, folder_tensors, save_folder
from serving_bridge.weights import tensor_names

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


def our_adapter(case: Case, out: Path) -> Path:
    """An adapter of random numbers on a case, with the settings of the one that peft made, written by us."""
    settings = torch_side.ADAPTED[case.folder.name]
    policy = case.policy
    avoid = folder_tensors(case.folder) - {n for row in policy.table for _, n in tensor_names(row, policy.config.sizes())}
    adapter = adapter_of(
        policy.table, settings["target_modules"], settings["r"], float(settings["lora_alpha"]),
        rslora=settings.get("use_rslora", False), avoid={name.removesuffix(".weight") for name in avoid},
    )  # fmt: skip
    sizes = case.policy.config.sizes()
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: (0.1 * rng.standard_normal(x.shape)).astype(np.float32), init_adapter(adapter, sizes, 0))
    return peft.save_adapter(out, adapter, params, sizes, base=str(case.folder), tokenizer=case.folder)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("torch")
    torch_side_run("make", root / "made")
    found = {name: exported(root / "made" / name, root / "ours" / name) for name in NAMES}
    ours = [our_adapter(found[name], root / "ours" / name / "adapter") for name in torch_side.ADAPTED]
    torch_side_run("score", *(path for case in found.values() for path in (case.bfloat16, case.halves)), *ours)
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


def logits_with(case: Case, folder: Path) -> np.ndarray:
    """Of the case with an adapter, at the tokens of all comparisons."""
    adapter, params = peft.load_adapter(folder, case.policy.table, case.policy.config.sizes())
    return case.logits(attach(adapter, params, case.params))


def in_memory(name: str) -> str:
    """What transformers calls a weight of Gemma 3's language model while it runs, under which peft saves it."""
    return name.replace("language_model.model.", "model.language_model.")


EXPERTS = "qwen3_moe_sparse"
"""The case whose adapter is on experts, which peft keeps in a form of its own."""


@pytest.mark.parametrize("case", sorted({*torch_side.ADAPTED} - {EXPERTS}), indirect=True)
def test_an_adapter_of_peft_is_on_the_same_maps_and_gives_the_same_logits(case: Case):
    """`all-linear` means the same maps to both."""
    folder = case.folder.with_name(f"{case.folder.name}_peft")
    theirs = load_file(folder / "adapter_model.safetensors")
    ours = load_file(case.bfloat16.parent / "adapter" / "adapter_model.safetensors")
    assert {in_memory(name): x.shape for name, x in theirs.items()} == {in_memory(name): x.shape for name, x in ours.items()}
    found = golden(folder)
    np.testing.assert_allclose(logits_with(case, folder), found, atol=TOLERANCE)
    assert np.abs(found - golden(case.folder)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", [EXPERTS], indirect=True)
def test_an_adapter_of_peft_on_fused_experts_is_refused_by_name(case: Case):
    with pytest.raises(WeightError, match=r"target_parameters = .* is not supported"):
        peft.load_adapter(case.folder.with_name(f"{EXPERTS}_peft"), case.policy.table, case.policy.config.sizes())


@pytest.mark.parametrize("case", sorted(torch_side.ADAPTED), indirect=True)
def test_our_adapter_gives_peft_the_same_logits(case: Case):
    folder = case.bfloat16.parent / "adapter"
    assert read_json(folder / "loading.json") == {}
    np.testing.assert_allclose(logits_with(case, folder), golden(folder), atol=TOLERANCE)
    assert np.abs(golden(folder) - golden(case.folder)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", sorted({*torch_side.ADAPTED} - {EXPERTS}), indirect=True)
def test_peft_writes_our_adapter_with_the_same_bits(case: Case):
    folder = case.bfloat16.parent / "adapter"
    both = (load_file(path / "adapter_model.safetensors") for path in (folder, folder / "again"))
    ours, again = ({in_memory(name): x for name, x in tensors.items()} for tensors in both)
    assert ours.keys() == again.keys()
    assert all(ours[name].tobytes() == again[name].tobytes() for name in ours)
    written, read = (read_json(path / "adapter_config.json") for path in (folder, folder / "again"))
    assert all(read[key] == written[key] for key in ("r", "lora_alpha", "use_rslora", "bias"))


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
