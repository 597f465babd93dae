"""What a run starts from: base models, adapters to go on from, their names, and what is said of them."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import random_groups, tiny_model_folder
from helpers_train import config_of
from qwix import QArray

from gspo_jax import peft, runlog
from gspo_jax.adapters import Adapter, adapter_of, init_adapter, merged
from gspo_jax.build import build_trainer
from gspo_jax.commands import load_run_or_model
from gspo_jax.config import ConfigError, parse_config
from gspo_jax.digest import params_digest
from gspo_jax.learner import score_batch
from gspo_jax.policy import load_policy, logprobs_of
from gspo_jax.runlog import RunError
from gspo_jax.sections import Config
from gspo_jax.start import Start, check_frozen, load_start
from gspo_jax.types import Params
from serving_bridge.trees import leaves
from serving_bridge.weights import WeightError

MINIMAL = {
    "rollout": {"episodes_per_batch": 2},
    "training": {"group_size": 2, "iterations_per_epoch": 1, "learning_rate": 1e-4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Adapter, Params]:
    """A PEFT folder as a run leaves it, and what is in it."""
    policy, _ = load_policy(folder)
    adapter, rng = adapter_of(policy.table, ("q_proj", "up_proj"), 3, 6.0), np.random.default_rng(0)
    fresh = init_adapter(adapter, policy.config.sizes(), 0)
    params = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32), fresh)
    out = tmp_path_factory.mktemp("adapter") / "export"
    return peft.save_adapter(out, adapter, params, policy.config.sizes(), base=str(folder), tokenizer=folder), adapter, params


def config_from(source: Path | str, *overrides: str) -> Config:
    """The base config with a `source` in place of its base model."""
    return config_of(Path("unused"), f"model.source={source}", *overrides)


def same(a: Params, b: Params) -> bool:
    found, expected = dict(leaves(a)), dict(leaves(b))
    return found.keys() == expected.keys() and all(np.array_equal(found[path], expected[path]) for path in found)


def numbers(start: Start) -> list[int]:
    return [int(word.replace(",", "")) for word in re.findall(r"\d[\d,]*", start.summary())]


def test_all_weights(folder: Path):
    start = load_start(config_of(folder))
    assert (start.frozen, start.adapter) == (None, None)
    assert same(start.params, load_policy(folder)[1])
    assert start.whole(start.params, None) is start.params


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_an_adapter_starts_as_its_base_model(folder: Path, mode: str):
    start = load_start(config_of(folder, f"model.trainer_mode={mode}", "training.lora.r=4", "training.lora.rslora=true"))
    assert start.adapter is not None
    assert (start.adapter.rank, start.adapter.alpha, start.adapter.scale) == (4, 32.0, 16.0)
    assert start.base == str(folder)
    quantized = [path for path, leaf in leaves(start.frozen or {}) if isinstance(leaf, QArray)]
    assert (len(quantized) == 7) == (mode == "qlora")
    sizes = [sum(x.size for x in jax.tree.leaves(start.params)), sum(np.prod(x.shape) for _, x in leaves(start.frozen or {}))]
    assert numbers(start)[:2] == sizes


def test_the_seed_is_in_the_adapter(folder: Path):
    drawn = [load_start(config_of(folder, "model.trainer_mode=lora", f"run.seed={seed}")).params for seed in (0, 0, 1)]
    assert same(drawn[0], drawn[1])
    assert not same(drawn[0], drawn[2])


def run_directory(root: Path, export: Path, name: str = "job-1") -> Path:
    """A run directory as far as its export goes."""
    (root / name / "checkpoints").mkdir(parents=True)
    shutil.copytree(export, root / name / "export")
    recorded = {"config": {"model": {"base": "org/tiny"}}, "versions": {}, "device": {}, "threads": 1}
    (root / name / "config.json").write_text(json.dumps(recorded))
    return root / name


@pytest.mark.parametrize("name", ["folder", "run", "id"])
def test_an_adapter_is_gone_on_with(trained, folder: Path, tmp_path: Path, name: str):
    export, _, params = trained
    run_dir = run_directory(tmp_path, export)
    source = {"folder": export, "run": run_dir, "id": "ft:org/tiny:job-1"}[name]
    start = load_start(config_from(source, "model.trainer_mode=lora", f"run.dir={tmp_path}"))
    assert start.adapter is not None
    assert (start.adapter.rank, start.adapter.alpha, start.adapter.targets) == (3, 6.0, ("q_proj", "up_proj"))
    assert same(start.params, params)
    assert start.base == str(folder)


def test_in_the_mode_full_it_is_added_to_its_base_model(trained, folder: Path):
    export, adapter, params = trained
    policy, base = load_policy(folder)
    start = load_start(config_from(export))
    assert start.adapter is None
    assert same(start.params, merged(adapter, params, base, policy.config.sizes()))


def test_a_command_takes_a_peft_folder(trained, folder: Path):
    policy, params = load_run_or_model(str(trained[0]))
    extra = dict(leaves(params)).keys() - dict(leaves(load_policy(folder)[1])).keys()
    assert sorted(extra) == [f"layers/{part}/lora_{x}" for part in ("attention/query", "mlp/up") for x in "ab"]
    assert policy.folder == folder


@pytest.mark.parametrize(
    ("source", "overrides", "words"),
    [
        ("{adapter}", ("training.lora.r=8",), ("training.lora.r: 8 contradicts the 3",)),
        (
            "{adapter}",
            ("training.lora.alpha=1", "training.lora.rslora=true"),
            ("alpha: 1.0 contradicts", "rslora: True contradicts"),
        ),
        ("{empty}", (), ("has no export/", "--resume")),
        ("ft:org/tiny:job-9", (), ("job-9", "has no export/")),
        ("ft:org/other:job-1", (), ("job-1 trained 'org/tiny'",)),
        ("{adapter}", ("training.lora.target_modules=['q_proj']",), ("target_modules: ('q_proj',) contradicts",)),
    ],
)
def test_what_cannot_be_gone_on_with(trained, tmp_path: Path, source: str, overrides: tuple[str, ...], words: tuple[str, ...]):
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    run_directory(tmp_path, trained[0])
    name = source.format(adapter=trained[0], empty=tmp_path / "unfinished")
    with pytest.raises(ConfigError) as caught:
        load_start(config_from(name, "model.trainer_mode=lora", f"run.dir={tmp_path}", *overrides))
    assert all(word in str(caught.value) for word in words)


def test_an_adapter_whose_base_model_is_gone_names_it(trained, tmp_path: Path):
    moved = shutil.copytree(trained[0], tmp_path / "moved")
    file = moved / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "/gone"}))
    with pytest.raises(WeightError, match=r"adapter_config\.json: base_model_name_or_path = '/gone'"):
        load_start(config_from(moved, "model.trainer_mode=lora"))


def test_a_target_that_is_no_linear_map(folder: Path):
    with pytest.raises(ConfigError, match=r"training.lora.target_modules: 'q_prj' .* did you mean 'q_proj'"):
        load_start(config_of(folder, "model.trainer_mode=lora", "training.lora.target_modules=['q_prj']"))


def test_without_a_mode_it_is_lora_and_says_so():
    config, notes = parse_config({"model": {"base": "m"}, **MINIMAL})
    assert config.model.trainer_mode == "lora"
    assert any('so "lora"' in note for note in notes)


def test_an_adapter_on_a_full_run_belongs_to_its_export(folder: Path, tmp_path: Path):
    """A later program must find the base model, so neither the run nor its id is recorded."""
    run_dir = run_directory(tmp_path, folder)
    for source in (run_dir, "ft:org/tiny:job-1"):
        start = load_start(config_from(source, "model.trainer_mode=lora", f"run.dir={tmp_path}"))
        assert start.base == str(run_dir / "export")
        start.save(start.params, tmp_path / "adapter")
        load_run_or_model(str(tmp_path / "adapter"))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_reference_of_a_kl_is_the_policy_of_the_start(trained, folder: Path, kind: str):
    """Going on from an adapter, that is with the adapter: the KL is 0 before the first step in every mode."""
    config = config_from(trained[0], f"model.trainer_mode={kind}", "algorithm.kl_beta=0.1")
    start = load_start(config)
    groups = random_groups(0, 2, 4)
    found = build_trainer(config, start).batch(groups, start.params)
    own = score_batch(logprobs_of(start.policy), start.whole(start.params, start.frozen), found.batch)
    np.testing.assert_allclose(found.batch.reference_logprobs, own, atol=1e-6)
    plain = score_batch(logprobs_of(start.policy), load_policy(folder)[1], found.batch)
    assert np.abs(np.asarray(plain) - np.asarray(own)).max() > 1e-3


def test_other_weights_beneath_an_adapter_are_noticed(folder: Path, tmp_path: Path):
    """The run's log has a fingerprint of them: resume, replay, evaluate and export compare it."""
    start = load_start(config_of(folder, "model.trainer_mode=qlora"))
    runlog.append(tmp_path / "digests.jsonl", {"step": 0, "params": "", "batch": "", "frozen": params_digest(start.frozen)})
    assert check_frozen(start, tmp_path) == params_digest(start.frozen)
    other = load_start(config_of(tiny_model_folder(tmp_path / "other", seed=1), "model.trainer_mode=qlora"))
    with pytest.raises(RunError, match="weights beneath the adapter are not those it was trained on"):
        check_frozen(other, tmp_path)
    other = load_start(config_of(folder, "model.trainer_mode=qlora", "training.lora.quantization=int8"))
    assert params_digest(other.frozen) != params_digest(start.frozen)


def test_settings_without_effect_are_told(folder: Path):
    def notes(*overrides: str) -> str:
        return " ".join(parse_config({"model": {"base": "m"}, **MINIMAL}, overrides)[1])

    assert "training.lora.r: without effect" in notes("model.trainer_mode=full", "training.lora.r=4")
    assert "training.lora.quantization: without effect" in notes("model.trainer_mode=lora", "training.lora.quantization=int8")
    assert "without effect" not in notes("model.trainer_mode=qlora", "training.lora.quantization=int8")
    for spelling in ("['all-linear']", "'all-linear'", "[]"):
        found = parse_config({"model": {"base": "m"}, **MINIMAL}, (f"training.lora.target_modules={spelling}",))[0]
        assert found.training.lora.target_modules == ()
