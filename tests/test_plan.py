"""Plans of small models on virtual CPU devices: memory, donation, arithmetic, the search, and what must not grow with what."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers_plan import small_folder
from huggingface_hub import constants

from gspo_jax.config import ConfigError, parse_config
from gspo_jax.mesh import MeshShape
from gspo_jax.models import ARCHITECTURES
from gspo_jax.models.tables import table_of
from gspo_jax.plan.__main__ import devices_of, main
from gspo_jax.plan.abstract import device_bytes, shapes_source, visible_pairs
from gspo_jax.plan.compiling import Built, Described, compile_run, describe
from gspo_jax.plan.flops import forward_flops, step_flops
from gspo_jax.plan.report import report
from gspo_jax.plan.search import candidates, meshes, search
from gspo_jax.plan.targets import GPUS, RESERVE, Target, target_of
from gspo_jax.pretrained import SHAPES, ModelNotFoundError, resolve_model
from gspo_jax.sections import Config
from serving_bridge.weights import leaf_shape

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 0.6e9, "Qwen/Qwen3-1.7B": 1.7e9, "Qwen/Qwen3-4B": 4.0e9, "Qwen/Qwen3-8B": 8.2e9,
    "Qwen/Qwen3-14B": 14.8e9, "Qwen/Qwen3-32B": 32.8e9, "Qwen/Qwen3-30B-A3B": 30.5e9, "Qwen/Qwen3.5-9B": 8.95e9,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03e9, "meta-llama/Llama-3.1-70B-Instruct": 70.6e9,
}  # fmt: skip
"""Parameters as the model cards state them (Qwen3.5: of the text path)."""


def plain(folder: Path) -> dict[str, Any]:
    """A run of 8 trajectories of 64 tokens in two minibatches."""
    return {
        "algorithm": {"eps_low": 3e-3, "eps_high": 4e-3},
        "model": {"base": str(folder), "trainer_mode": "full", "compute_dtype": "float32", "remat": "layer", "label": "x"},
        "policy": {"max_tokens": 24},
        "rollout": {"episodes_per_batch": 8},
        "training": {"iterations_per_epoch": 4, "group_size": 4, "batch_size": 4, "learning_rate": 1e-3, "packing": "packed"},
        "serving": {"slots": 4, "context_length": 64, "engine": "vllm"},
    }


def config_of(folder: Path, *sets: str) -> Config:
    return parse_config(plain(folder), sets)[0]


def described(config: Config) -> Described:
    return describe(config, shapes_source(config), target_of("h100", devices_of(config), cpu=True))


def update_of(config: Config) -> Built:
    return compile_run(config, shapes_source(config), target_of("h100", devices_of(config), cpu=True), only_update=True)


# The models


@pytest.mark.parametrize("base", PUBLISHED)
def test_shipped_shapes_have_the_published_number_of_parameters(base: str):
    raw = json.loads((SHAPES / base / "config.json").read_text())
    module = ARCHITECTURES[raw["model_type"]]
    config = module.Config.model_validate(raw)
    count = sum(math.prod(leaf_shape(row, config.sizes())) for row in table_of(module, config, ()))
    assert count == pytest.approx(PUBLISHED[base], rel=0.015)


def test_every_shipped_shape_is_checked():
    assert {path.parent.relative_to(SHAPES).as_posix() for path in SHAPES.glob("*/*/config.json")} == set(PUBLISHED)


def test_shapes_stand_in_for_a_model_only_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve_model("Qwen/Qwen3-32B", shapes=True) == SHAPES / "Qwen/Qwen3-32B"
    for base, shapes in (("Qwen/Qwen3-32B", False), ("Qwen/Qwen9-1B", True)):
        with pytest.raises(ModelNotFoundError, match="was not found"):
            resolve_model(base, shapes=shapes)


# The command


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "x.toml"
    lines = [f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items())
             for name, keys in plain(small_folder(tmp_path / "m")).items()]  # fmt: skip
    file.write_text("\n".join(lines))
    assert main([str(file), "--gpus", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= {
        "fits",
        "peak_bytes",
        "capacity_bytes",
        "compiler",
        "collectives",
        "model_flops",
        "seconds_roofline",
    }
    assert found["mesh"]["fsdp"] == 2
    assert main([str(file), "--gpu", "abacus"]) == 2
    assert main([str(file), "--set", "model.base=Qwen/Qwen9-1B"]) == 2
    assert main([str(tmp_path / "absent.toml")]) == 2
    assert capsys.readouterr().err.count("error: ") == 3


# Memory


def state_bytes(built: Built) -> int:
    """Masters and two moments in float32 on one device; counters of steps, of skipped ones, of AdamW and of its schedule."""
    return 3 * device_bytes(built.start.params) + 4 * 4


@pytest.mark.parametrize("sets", [("mesh.tensor=2", "mesh.fsdp=2"), ("model.trainer_mode=lora",)])
def test_the_whole_state_is_donated(tmp_path: Path, sets: tuple[str, ...]):
    """Of one device: everything that is trained, its moments, and the counters; nothing else is written over."""
    built = update_of(config_of(small_folder(tmp_path), *sets))
    assert built.update.aliased == state_bytes(built)
    assert built.donated == 1


def test_two_devices_hold_half_the_state_but_for_norms(tmp_path: Path):
    folder = small_folder(tmp_path)
    one, two = (device_bytes(described(config_of(folder, f"mesh.fsdp={n}")).start.params) for n in (1, 2))
    norms = 4 * (2 * 2 * 64 + 64 + 2 * 2 * 16)  # two norms a layer and the last one, of 64; two of heads a layer, of 16
    assert two == (one - norms) / 2 + norms


def growth(folder: Path, tokens: int) -> float:
    """Temporary bytes of an update per word more in the vocabulary."""
    sizes = []
    for words in (1024, 4096):
        small_folder(folder, vocab_size=words, num_hidden_layers=1, tie_word_embeddings=True)
        config = config_of(folder, f"serving.context_length={tokens}", f"policy.max_tokens={tokens // 2}")
        sizes.append(update_of(config).update.temporaries)
    return (sizes[1] - sizes[0]) / 3072


def test_memory_grows_with_the_vocabulary_by_gradients_and_one_chunk_of_logits_only(tmp_path: Path):
    """Per word: the gradient and its sum, of embedding and head (64 float32 each), and a few arrays of 128 logits, at any
    length of rows that 128 tokens are a chunk of. One `[t v]` would add 4 bytes for each of 512 tokens."""
    short, long = growth(tmp_path / "a", 512), growth(tmp_path / "b", 1024)
    assert short <= 2 * 4 * 64 + 2 * 4 * 128
    assert abs(long - short) < 4 * 512 / 10


def test_programs_do_not_grow_with_depth(tmp_path: Path):
    sizes = []
    for layers in (4, 16):
        small_folder(tmp_path, num_hidden_layers=layers)
        module = update_of(config_of(tmp_path)).update.module
        sizes.append(sum(map(len, module.computations.values())))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


# Arithmetic


def test_visible_pairs_are_those_of_the_mask():
    """A prompt of 3, two completions of 2 and 4 that see it, another sequence of 5, padding."""
    segments = np.array([1] * 3 + [2] * 2 + [3] * 4 + [4] * 5 + [0] * 2)
    prefixes = np.array([0] * 3 + [1] * 6 + [0] * 7)
    index = np.arange(segments.size)
    related = (segments[:, None] == segments) | ((prefixes[:, None] == segments) & (segments > 0))
    mask = (index[:, None] >= index) & related & (segments[:, None] > 0)
    assert visible_pairs(segments, prefixes) == mask.sum()


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_flops_of_a_tiny_model_by_hand(tmp_path: Path, mode: str):
    """Two layers of 64, 4 query and 2 key heads of 16, MLP of 128, 320 words; 4 trajectories of 64 tokens, 24 sampled."""
    config = config_of(small_folder(tmp_path), f"model.trainer_mode={mode}", "training.lora.r=8")
    _, start, _, work = described(config)
    tokens, trained = 4 * 64, 4 * 24
    shapes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    kernels = 2 * tokens * 2 * sum(a * b for a, b in shapes)
    adapters = 2 * tokens * 2 * 8 * sum(a + b for a, b in shapes) if mode == "lora" else 0
    attention = 2 * (2 * 2) * 4 * 16 * 4 * (64 * 65 / 2)
    head = 2 * trained * 64 * 320
    assert tuple(forward_flops(start, work)) == (kernels, adapters, attention, head)
    forward = kernels + adapters + attention + head
    backward = (2 if mode == "full" else 1) * (kernels + head) + 2 * (adapters + attention)
    found = step_flops(config, start, work)
    assert found.model == 2 * (forward + backward) + forward  # two minibatches, the second scored before
    assert found.computed == found.model + 2 * forward  # rows without padding; layers and logits computed again


def test_experts_count_as_often_as_they_are_chosen(tmp_path: Path):
    found = []
    for chosen in (1, 4):
        folder = small_folder(tmp_path, "Qwen/Qwen3-30B-A3B", num_experts_per_tok=chosen)
        _, start, _, work = described(config_of(folder))
        found.append(forward_flops(start, work).kernels)
    assert found[1] - found[0] == 2 * 256 * 2 * 3 * (3 * 64 * 64)  # 256 tokens, 2 layers, 3 more experts of three matrices


# The search


def test_meshes_are_all_the_devices():
    assert all(shape.devices == 24 for shape in meshes(24))
    assert meshes(24)[0] == MeshShape(fsdp=24)
    assert MeshShape(1, 12, 2, 1) in meshes(24)


def test_candidates_begin_with_what_changes_least(tmp_path: Path):
    config = config_of(tmp_path, "training.rows_per_microbatch=8", "model.remat=none")
    found = list(candidates(config, MeshShape(fsdp=2)))
    assert found[:3] == [("training.rows_per_microbatch=4",), ("training.rows_per_microbatch=2",), ("model.remat=layer",)]
    assert len(found) == len(set(found))


def test_what_the_search_proposes_fits_when_it_is_compiled_again(tmp_path: Path):
    """A GPU with room for the update of a few rows: the search finds that fewer are needed."""
    sets = ("training.rows_per_microbatch=8", "mesh.fsdp=2", "training.batch_size=8", "compute.topology.gpus_for_training=2")
    config = config_of(small_folder(tmp_path), *sets)
    few, many = (update_of(config_of(tmp_path, *sets, f"training.rows_per_microbatch={rows}")).update.peak for rows in (2, 8))
    gpu = GPUS["h100"]._replace(memory=RESERVE + (few + many) // 2)
    target, tried = Target(gpu, jax.devices("cpu")[:2], "xla:cpu (estimate)"), []

    def attempt(words: tuple[str, ...]) -> tuple[bool, str]:
        changed = config_of(tmp_path, *sets, *words)
        return report(changed, compile_run(changed, shapes_source(changed), target, only_update=True), target)["fits"], ""

    assert many > gpu.memory - RESERVE
    proposal = search(config, MeshShape(fsdp=2), attempt, tried.append)
    assert proposal is not None
    assert attempt(proposal)[0]
    assert [each.fits for each in tried] == [False] * (len(tried) - 1) + [True]


def test_the_search_ends(tmp_path: Path):
    config, tried = config_of(tmp_path, "training.rows_per_microbatch=8"), []
    assert search(config, MeshShape(fsdp=8), lambda _: (False, ""), tried.append, most=3) is None
    assert len(tried) == 3


def test_settings_that_cannot_be_are_passed_over(tmp_path: Path):
    def attempt(words: tuple[str, ...]) -> tuple[bool, str]:
        if "mesh.sequence=4" not in words:
            raise ConfigError("config", ["mesh.sequence: too few heads"])
        return True, ""

    found = search(config_of(tmp_path), MeshShape(fsdp=8), attempt, lambda _: None, most=1)
    assert found is not None
    assert "mesh.sequence=4" in found


def test_too_few_devices_are_wrong_input():
    with pytest.raises(ConfigError, match="virtual CPU devices"):
        target_of("h100", 4096, cpu=True)
