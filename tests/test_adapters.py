"""LoRA and QLoRA: adapters beside frozen kernels, as formulas, through an update, and as PEFT folders."""

import asyncio
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_model import micro, random_groups, tiny_model_folder, tiny_policy
from qwix import QArray
from safetensors.numpy import load_file, save_file

from gspo_jax import adapters, peft
from gspo_jax.adapters import (
    Adapter,
    UnknownTarget,
    adapter_of,
    adapter_table,
    attach,
    count,
    init_adapter,
    linear_rows,
    merged,
)
from gspo_jax.batch import Packing, pack
from gspo_jax.learner import learner
from gspo_jax.losses import gspo
from gspo_jax.models import quantize as quantize_module
from gspo_jax.models.quantize import TILE, matrix, nbytes, quantize, tile_size
from gspo_jax.policy import load_policy, logprobs_of, serving_params
from gspo_jax.sampler import Sampler
from gspo_jax.start import load_frozen
from gspo_jax.types import Params
from rollout.types import Completion, SamplingParams
from serving_bridge.trees import get, leaves, put
from serving_bridge.weights import Weight, WeightError

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def batch():
    return pack(random_groups(3, 2, 4), [[1.0, -1.0, 0.5, -0.5]] * 2, 8, Packing(32, 1))


def random_adapter(adapter: Adapter, sizes: dict[str, int], seed: int = 1) -> Params:
    """Adapters whose B is not zero."""
    rng = np.random.default_rng(seed)
    fresh = init_adapter(adapter, sizes, seed)
    return jax.tree.map(lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32), fresh)


def tiny_adapter(rank: int = 3, alpha: float = 5.0, targets: tuple[str, ...] = (), **kwargs):
    policy, params = tiny_policy()
    adapter = adapter_of(policy.table, targets, rank, alpha, **kwargs)
    return policy, params, adapter, random_adapter(adapter, policy.config.sizes())


def pair(params: Params) -> list[np.ndarray]:
    """A and B of the queries."""
    return [np.asarray(get(params, f"layers/attention/query/lora_{x}")) for x in "ab"]


def logprobs(policy, params: Params, batch):
    return np.asarray(jax.jit(logprobs_of(policy))(params, micro(batch))[0])


# Which maps, and how many numbers


def test_all_linear_is_every_map_but_the_head():
    policy, _ = tiny_policy(tie_word_embeddings=False)
    assert adapter_of(policy.table, (), 2, 4.0).targets == tuple(sorted(LINEAR))
    assert adapter_of(policy.table, ("all-linear",), 2, 4.0).rows == adapter_of(policy.table, LINEAR, 2, 4.0).rows


@pytest.mark.parametrize("targets", [("q_proj",), ("mlp.up_proj", "v_proj"), ("self_attn.o_proj",)])
def test_lor_07_the_trained_numbers_are_two_matrices_a_target(targets: tuple[str, ...]):
    policy, _, _, params = tiny_adapter(targets=targets)
    c = policy.config
    shapes = {
        "q_proj": (c.hidden_size, c.num_attention_heads * c.head_dim),
        "o_proj": (c.num_attention_heads * c.head_dim, c.hidden_size),
        "v_proj": (c.hidden_size, c.num_key_value_heads * c.head_dim), "up_proj": (c.hidden_size, c.intermediate_size),
    }  # fmt: skip
    assert len(jax.tree.leaves(params)) == 2 * len(targets)
    expected = sum(sum(shapes[t.rpartition(".")[2]]) * 3 * c.num_hidden_layers for t in targets)
    assert count(params) == expected


def test_a_name_that_no_map_has_is_refused():
    policy, _ = tiny_policy()
    for name, told in (("q_prj", "did you mean 'q_proj'"), ("embed_tokens", "it has down_proj"), ("proj", "is no linear map")):
        with pytest.raises(UnknownTarget, match=f"'{name}' is no linear map") as caught:
            adapter_of(policy.table, (name,), 2, 4.0)
        assert told in str(caught.value)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 12 / 4), (True, 12 / 2)])
def test_lor_04_strength_is_alpha_over_rank_or_its_root(rslora: bool, scale: float):
    assert Adapter(4, 12.0, rslora, ()).scale == scale


# What they compute


@pytest.mark.parametrize(("rank", "alpha"), [(4, 12.0), (4, 1.0), (1, 3.0), (24, 24.0)])
def test_lor_04_lor_05_beside_the_kernel_is_the_same_as_added_to_it(batch, rank: int, alpha: float):
    policy, frozen, adapter, params = tiny_adapter(rank, alpha)
    beside = logprobs(policy, attach(adapter, params, frozen), batch)
    kernel, (a, b) = get(frozen, "layers/attention/query/kernel"), pair(params)
    full = merged(adapter, params, frozen, policy.config.sizes())
    expected = kernel + alpha / rank * np.einsum("ldr,lrnh->ldnh", a, b)
    np.testing.assert_allclose(get(full, "layers/attention/query/kernel"), expected, atol=1e-6)
    np.testing.assert_allclose(beside, logprobs(policy, full, batch), atol=2e-5)
    assert np.abs(beside - logprobs(policy, frozen, batch)).max() > 1e-2


def test_a_fresh_adapter_changes_nothing_and_repeats():
    policy, frozen = tiny_policy()
    adapter = adapter_of(policy.table, (), 4, 8.0)
    first, again, other = (init_adapter(adapter, policy.config.sizes(), seed) for seed in (0, 0, 1))
    tokens = pack(random_groups(0, 1, 2), [[1.0, 1.0]], 2, Packing(32, 1))
    np.testing.assert_array_equal(logprobs(policy, attach(adapter, first, frozen), tokens), logprobs(policy, frozen, tokens))
    for x, y, z in zip(*map(jax.tree.leaves, (first, again, other)), strict=True):
        np.testing.assert_array_equal(x, y)
        assert not x.any() or not np.array_equal(x, z)
    a = np.asarray(get(first, "layers/mlp/down/lora_a"))
    bound = policy.config.intermediate_size**-0.5
    assert 0.9 * bound < np.abs(a).max() <= bound


# An update


def sgd(policy, adapter: Adapter):
    return learner(logprobs_of(policy), gspo, optax.sgd(0.1), max_grad_norm=1e9, attach=lambda p, f: attach(adapter, p, f))


def test_lor_06_the_state_has_the_adapter_and_nothing_else(batch):
    """What is trained, its moments, and what an update returns; the frozen weights are not donated with it."""
    policy, frozen, adapter, params = tiny_adapter()
    learn = learner(logprobs_of(policy), gspo, optax.adamw(1e-2), attach=lambda p, f: attach(adapter, p, f))
    state = learn.init(jax.tree.map(jnp.copy, params))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim) == 2 * count(params)
    state, metrics = jax.jit(learn.update, donate_argnums=0)(state, jax.tree.map(jnp.asarray, batch), frozen)
    assert metrics["optimizer/skipped"] == 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(frozen))
    assert [path for path, _ in leaves(state.params)] == [path for path, _ in leaves(params)]
    for (path, x), (_, y) in zip(leaves(params), leaves(state.params), strict=True):
        assert path.endswith(("lora_a", "lora_b"))
        assert np.abs(np.asarray(x) - np.asarray(y)).max() > 0, path


def test_the_adapters_gradient_is_the_full_gradient_through_the_product(batch):
    """dL/dA = s dL/dW Bᵀ and dL/dB = s Aᵀ dL/dW, with dL/dW of the merged weights from a full fine-tuning step."""
    policy, frozen, adapter, params = tiny_adapter()
    batch = jax.tree.map(jnp.asarray, batch)
    full = merged(adapter, params, frozen, policy.config.sizes())
    plain = learner(logprobs_of(policy), gspo, optax.sgd(1.0), max_grad_norm=1e9)
    stepped, _ = jax.jit(plain.update)(plain.init(full), batch)
    low, _ = jax.jit(sgd(policy, adapter).update)(sgd(policy, adapter).init(params), batch, frozen)
    where = "layers/attention/query/"
    gradient = np.asarray(get(full, where + "kernel")) - np.asarray(get(stepped.params, where + "kernel"))
    a, b = pair(params)
    moved_a, moved_b = (x - y for x, y in zip(pair(params), pair(low.params), strict=True))
    s = adapter.scale
    np.testing.assert_allclose(moved_a / 0.1, s * np.einsum("ldnh,lrnh->ldr", gradient, b), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(moved_b / 0.1, s * np.einsum("ldr,ldnh->lrnh", a, gradient), rtol=1e-3, atol=1e-5)


# The sampler


def test_lor_01_lor_02_the_sampler_follows_every_push_and_keeps_nothing_of_the_last():
    """Three adapters under one engine: each time what a fresh engine with that adapter samples, at the pushed version."""
    policy, frozen, adapter, _ = tiny_adapter()
    pushed = [attach(adapter, random_adapter(adapter, policy.config.sizes(), seed), frozen) for seed in range(3)]

    async def engine(*pushes: tuple[int, Params]) -> list[Completion]:
        sampler = Sampler(policy, slots=2, context_length=32, seed=0)
        found = []
        for version, params in pushes:
            await sampler.publish(version, params)
            found.append(await sampler.sample((5, 6, 7), SamplingParams(8, key=(1,))))
        await sampler.aclose()
        return found

    one_engine = asyncio.run(engine(*enumerate(pushed)))
    for version, (completion, params) in enumerate(zip(one_engine, pushed, strict=True)):
        assert completion == asyncio.run(engine((version, params)))[0]
        assert completion.versions == (version,) * 8
    assert len({completion.logprobs for completion in one_engine}) == 3


# Quantized kernels


@pytest.mark.parametrize(("qtype", "bits", "error"), [("nf4", 4, 0.16), ("int8", 8, 0.5 / 127)])
def test_quantized_kernels_are_near_and_small(qtype: str, bits: int, error: float):
    """Half the widest gap of the code book, 0.16 or half a step, times the tile's largest value bounds the error."""
    kernel = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 48, 5)), jnp.float32)
    found = quantize(kernel, 2, 1, qtype, jnp.float32)
    assert found.shape == (2, 192, 5)
    tiles = np.asarray(kernel).reshape(2, 192 // TILE, TILE, 5)
    bound = error * np.abs(tiles).max(2, keepdims=True)
    assert (np.abs(np.asarray(matrix(found, jnp.float32)).reshape(tiles.shape) - tiles) <= bound * 1.001).all()
    assert nbytes(found) == kernel.size * bits // 8 + kernel.size // TILE * 4


@pytest.mark.parametrize(("features", "size"), [(576, 64), (48, 48), (100, 50), (101, 101), (202, 202), (1536, 64), (17, 17)])
def test_tiles_divide_and_are_neither_small_nor_large(features: int, size: int):
    assert features % tile_size(features) == 0
    assert tile_size(features) == size


@pytest.mark.parametrize("qtype", ["nf4", "int8"])
def test_quantizing_takes_little_more_than_a_matrix(qtype: str):
    """Matrix by matrix: nf4 compares every number with sixteen others, for a whole stacked leaf many times its size."""
    stacked = jax.ShapeDtypeStruct((64, 128, 128), jnp.float32)
    used = quantize_module._quantized.lower(stacked, qtype, jnp.dtype("float32")).compile().memory_analysis()
    assert used.temp_size_in_bytes < 40 * 4 * 128 * 128


def test_qlora_keeps_no_dequantized_kernels_for_the_backward_pass(batch):
    """Without remat, too: an update of QLoRA needs no more than one of LoRA and what one layer's kernels take."""
    policy, frozen, adapter, params = tiny_adapter()
    learn = sgd(policy, adapter)

    def temporaries(weights: Params) -> int:
        lowered = jax.jit(learn.update).lower(learn.init(params), jax.tree.map(jnp.asarray, batch), weights)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    kernels = {row.path: row for row in linear_rows(policy.table)}
    small: dict = {}
    for path, leaf in leaves(frozen):
        stack, inputs = adapters.kernel_axes(kernels[path]) if path in kernels else (0, 0)
        put(small, path, quantize(leaf, inputs, stack, "nf4", jnp.float32) if path in kernels else leaf)
    layer = 4 * sum(get(frozen, path).size for path in kernels) // policy.config.num_hidden_layers
    assert temporaries(small) < temporaries(frozen) + layer


@pytest.mark.parametrize("qtype", ["nf4", "int8"])
def test_qlora_computes_with_the_dequantized_kernels(folder: Path, batch, qtype: str):
    policy, params = load_policy(folder)
    frozen = load_frozen(policy, qtype)
    quantized = [path for path, leaf in leaves(frozen) if isinstance(leaf, QArray)]
    assert sorted(quantized) == sorted(row.path for row in linear_rows(policy.table))
    adapter = adapter_of(policy.table, (), 4, 8.0)
    low = random_adapter(adapter, policy.config.sizes())
    full = merged(adapter, low, frozen, policy.config.sizes())
    shapes = [leaf.shape for _, leaf in leaves(full)]
    assert shapes == [get(params, path).shape for path, _ in leaves(full)]
    batch = jax.tree.map(lambda x: np.minimum(x, policy.config.vocab_size - 1) if x is batch.tokens else x, batch)
    found = logprobs(policy, attach(adapter, low, frozen), batch)
    np.testing.assert_allclose(found, logprobs(policy, full, batch), atol=2e-5)
    served = serving_params(attach(adapter, low, frozen), jnp.dtype("float32"))
    np.testing.assert_array_equal(logprobs(policy, served, batch), found)


def test_bfloat16_frozen_weights_keep_what_the_model_reads_in_float32(folder: Path):
    policy, _ = load_policy(folder, compute_dtype="bfloat16")
    for path, leaf in leaves(load_frozen(policy, None)):
        assert leaf.dtype == (jnp.float32 if path.endswith("scale") else jnp.bfloat16), path


# PEFT folders


def written(folder: Path, out: Path, **kwargs):
    policy, _ = load_policy(folder)
    adapter = adapter_of(policy.table, kwargs.pop("targets", ()), kwargs.pop("rank", 4), 8.0, **kwargs)
    params = random_adapter(adapter, policy.config.sizes())
    peft.save_adapter(out, adapter, params, policy.config.sizes(), base=str(folder), tokenizer=folder)
    return policy, adapter, params


@pytest.mark.parametrize("kwargs", [{}, {"targets": ("q_proj", "down_proj"), "rank": 1, "rslora": True}])
def test_export_then_import_is_the_same_adapter_bit_for_bit(folder: Path, tmp_path: Path, kwargs: dict):
    policy, adapter, params = written(folder, tmp_path / "out", **kwargs)
    found, again = peft.load_adapter(tmp_path / "out", policy.table, policy.config.sizes())
    assert (found.rank, found.alpha, found.rslora, set(found.rows)) == (
        adapter.rank,
        adapter.alpha,
        adapter.rslora,
        set(adapter.rows),
    )
    for path, leaf in leaves(params):
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint32), np.asarray(get(again, path)).view(np.uint32))


def test_lor_04_the_folder_says_how_strong_it_is(folder: Path, tmp_path: Path):
    written(folder, tmp_path / "out", rank=2)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 8.0, False)
    assert config["base_model_name_or_path"] == str(folder)
    assert config["target_modules"] == sorted(LINEAR)
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (2, 64)
    assert tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"].shape == (16, 2)


def test_lor_07_an_export_that_lacks_a_leaf_raises(folder: Path, tmp_path: Path):
    policy, adapter, params = written(folder, tmp_path / "out")
    del params["layers"]["mlp"]["up"]["lora_b"]  # pyright: ignore
    with pytest.raises(WeightError, match="layers/mlp/up/lora_b"):
        peft.save_adapter(tmp_path / "b", adapter, params, policy.config.sizes(), base="x", tokenizer=folder)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported"),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config = {'beta': 1.0} is not supported"),
        ({"lora_alpha": "16"}, "lora_alpha = '16' must be a number"),
        ({"target_modules": "("}, "'(' is not a pattern"),
        ({"r": 0}, "r = 0 must be"),
        ({"r": 8}, "expected"),
        ({"target_modules": ["q_proj"]}, "unused"),
        ({"target_modules": ["w1"]}, "'w1' is no linear map"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path, change: dict, named: str):
    policy, _, _ = written(folder, tmp_path / "out")
    file = tmp_path / "out" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(WeightError) as caught:
        peft.load_adapter(tmp_path / "out", policy.table, policy.config.sizes())
    assert named in str(caught.value)


def test_a_folder_with_missing_tensors_is_refused(folder: Path, tmp_path: Path):
    policy, _, _ = written(folder, tmp_path / "out")
    file = tmp_path / "out" / "adapter_model.safetensors"
    tensors = load_file(file)
    gone = tensors.popitem()[0]
    save_file(tensors, file)
    with pytest.raises(WeightError, match=gone.replace(".", r"\.")):
        peft.load_adapter(tmp_path / "out", policy.table, policy.config.sizes())


def test_rows_of_stacked_experts_make_adapters_of_their_own():
    """`{e}` in a name stacks A and B like the kernel; `layers` picks the same layers."""
    row = Weight("m/kernel", "model.layers.{l}.mlp.experts.{e}.up_proj.weight", "f d -> d f", (1, 3))
    a, b = adapter_table(Adapter(2, 2.0, False, (row,)))
    assert (a.path, a.layout, b.layout, a.layers) == ("m/lora_a", "r d -> d r", "f r -> r f", (1, 3))
    assert a.name == "base_model.model.model.layers.{l}.mlp.experts.{e}.up_proj.lora_A.weight"
    assert adapter_of([row], ("up_proj",), 2, 2.0).rows == (row,)
    shared = Weight("s/kernel", "model.layers.{l}.mlp.shared_expert.up_proj.weight", "f d -> d f")
    everything = adapter_of([row, shared], (), 2, 2.0)
    assert (everything.rows, everything.targets) == ((shared,), ("shared_expert.up_proj",))
    assert adapter_of([row, shared], everything.targets, 2, 2.0) == everything
    assert adapter_of([row, shared], ("up_proj",), 2, 2.0).targets == ("up_proj",)
    assert adapters.kernel_axes(Weight("o/kernel", "layers.{l}.o.weight", "d (n h) -> n h d")) == (1, 2)
    assert adapters.kernel_axes(Weight("g/kernel", "layers.{l}.experts.up", "e f d -> e d f")) == (2, 1)
