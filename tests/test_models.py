"""Llama against reference logits, in every way the project runs it, and its weights there and back."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers_model import done, group, micro, tiny_config, tiny_model_folder, tiny_policy, turn
from safetensors.numpy import load_file

from gspo_jax import sampling
from gspo_jax.batch import Packing, pack
from gspo_jax.models import llama
from gspo_jax.models.layers import Spots
from gspo_jax.policy import Policy, describe_policy, load_policy, logprobs_of, save_policy
from gspo_jax.types import Batch, Params
from serving_bridge.convert import WeightError

DATA = Path(__file__).parent / "data" / "models"
TOLERANCE = 2e-4
VOCAB = 331


@pytest.fixture(scope="module", params=["llama", "llama3_rope"])
def golden(request) -> tuple[Policy, Params, dict[str, np.ndarray]]:
    policy, params = load_policy(DATA / request.param)
    return policy, params, dict(np.load(DATA / request.param / "golden.npz"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


def hidden_states(model: llama.Model, params: Params, *inputs):
    return jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs).hidden)(params, *inputs)


def packed_states(policy: Policy, params: Params, batch: Batch):
    batch = jax.tree.map(jnp.asarray, batch)
    return hidden_states(policy.model, params, batch.tokens, Spots(batch.positions, batch.segment_ids, batch.prefix_ids))


def whole(ids: np.ndarray) -> Spots:
    """Rows of one sequence each."""
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return Spots(positions, np.ones(ids.shape, np.int32))


def one_row(ids: np.ndarray, mode: str = "packed") -> Batch:
    """The sequences in one row, the first token of each a prompt."""
    groups = [group(done(turn(row[:1].tolist(), row[1:].tolist()))) for row in ids]
    return micro(pack(groups, [[1.0]] * len(ids), len(ids), Packing(ids.size, 1, mode)))


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_logits_of_whole_sequences(golden, remat: str):
    policy, params, data = golden
    ids = data["input_ids"]
    hidden = hidden_states(llama.Model(policy.config, policy.dtype, remat), params, ids, whole(ids))
    np.testing.assert_allclose(hidden @ policy.head(params).T, data["logits"], atol=TOLERANCE)


def test_logits_and_logprobs_of_packed_sequences(golden):
    """All three in one row: segment ids keep them apart, positions start again."""
    policy, params, data = golden
    batch = one_row(data["input_ids"])
    assert batch.tokens.shape == (1, data["input_ids"].size)
    logits = np.asarray(packed_states(policy, params, batch) @ policy.head(params).T)
    np.testing.assert_allclose(logits.reshape(data["logits"].shape), data["logits"], atol=TOLERANCE)
    logprobs, _ = jax.jit(logprobs_of(policy))(params, batch)
    found = np.asarray(logprobs).reshape(data["input_ids"].shape)
    np.testing.assert_allclose(found[:, 1:], data["next_logprobs"], atol=TOLERANCE)
    assert not found[:, 0].any()


def test_logits_through_the_cache_token_by_token(golden):
    """Right-padded prompts of unequal length, then one token at a time, each slot at its own place."""
    policy, params, data = golden
    ids, lengths = data["input_ids"], np.array([1, 9, 16], np.int32)
    first = np.zeros((3, 16), np.int32)
    for row, n in enumerate(lengths):
        first[row, :n] = ids[row, :n]
    prompts = jax.jit(partial(sampling.prefill, policy))(params, first, lengths)
    np.testing.assert_allclose(prompts.logits, data["logits"][np.arange(3), lengths - 1], atol=TOLERANCE)
    slots, insert = sampling.empty_slots(policy, 4, 40), jax.jit(sampling.insert)
    where = (3, 0, 2)
    for row, slot in enumerate(where):
        slots = insert(slots, prompts, np.int32(row), np.int32(slot))
    decode = jax.jit(partial(sampling.decode, policy))
    at = lengths.copy()
    while (at < ids.shape[1]).any():
        tokens, positions = np.zeros(4, np.int32), np.full(4, 40, np.int32)
        running = [row for row in range(3) if at[row] < ids.shape[1]]
        for row in running:
            tokens[where[row]], positions[where[row]] = ids[row, at[row]], at[row]
        slots = decode(params, slots, tokens, positions)
        for row in running:
            np.testing.assert_allclose(slots.logits[where[row]], data["logits"][row, at[row]], atol=TOLERANCE)
            at[row] += 1


def test_no_gradient_flows_from_the_future():
    """Every position holds another token: later tokens' embeddings get exactly no gradient, earlier ones some."""
    policy, params = tiny_policy()
    tokens = np.arange(1, 21, dtype=np.int32)[None]

    def total(params: Params, at):
        return jnp.sum(jnp.sin(hidden_states(policy.model, params, tokens, whole(tokens))[0, at]))

    derivative = jax.jit(jax.grad(total))
    for place in (0, 7, 19):
        grads = np.asarray(derivative(params, place)["embedding"])
        assert np.abs(grads[tokens[0, : place + 1]]).max(1).min() > 0
        assert not grads[tokens[0, place + 1 :]].any()


def big_shapes(text: str, size: int) -> list[str]:
    """Array shapes of a program that have the vocabulary as an axis and at least `size` elements."""
    found = {tuple(map(int, dims.split(","))) for dims in re.findall(r"(?:f32|bf16|pred|s32)\[([\d,]+)\]", text)}
    return [str(s) for s in found if VOCAB in s and np.prod(s) >= size]


def test_logits_of_a_whole_batch_never_exist():
    """Neither forward nor backward program has a buffer of tokens x vocabulary; the plain formula does."""
    policy, params = tiny_policy(vocab_size=VOCAB)
    batch = jax.tree.map(jnp.asarray, one_row(np.arange(1, 513).reshape(4, 128) % VOCAB))
    logprobs = logprobs_of(policy)

    def ours(params: Params):
        found, entropy = logprobs(params, batch)
        return jnp.sum(found + entropy)

    def plain(params: Params):
        logp = jax.nn.log_softmax(packed_states(policy, params, batch) @ policy.head(params).T)
        return jnp.sum(jnp.take_along_axis(logp, batch.tokens[..., None], -1))

    size = batch.tokens.size * VOCAB
    texts = [jax.jit(jax.grad(f)).lower(params).compile().as_text() for f in (ours, plain)]
    assert big_shapes(texts[0], size // 3) == []
    assert big_shapes(texts[1], size)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: silu"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type='dynamic' is not supported; supported: default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' needs factor in rope_parameters"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'} is not supported"),
        ({"attention_logit_cap": 30.0}, "attention_logit_cap=30.0 is not supported"),
        ({"model_type": "mamba"}, "model_type='mamba' is not supported; supported: llama"),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_setting_we_do_not_compute_is_refused_by_name(tmp_path: Path, change: dict, named: str):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**change)))
    with pytest.raises(WeightError) as caught:
        describe_policy(tmp_path, compute_dtype="float32", remat="none")
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["{", None])
def test_unreadable_config_is_a_weight_error(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightError, match="not a readable model configuration"):
        describe_policy(tmp_path, compute_dtype="float32", remat="none")


def test_older_spellings_of_the_config_mean_the_same():
    new = llama.Config.model_validate(tiny_config(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}))
    old = {k: v for k, v in tiny_config(num_key_value_heads=None).items() if k != "head_dim"}
    found = llama.Config.model_validate(old)
    assert (found.head_dim, found.num_key_value_heads) == (8, 4)
    np.testing.assert_array_equal(new.rope().frequencies, found.rope().frequencies)


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}])
def test_float32_export_then_load_is_the_identity(tmp_path: Path, change: dict):
    source = tiny_model_folder(tmp_path / "source", **change)
    policy, params = load_policy(source)
    save_policy(policy, params, tmp_path / "out", dtype="float32")
    _, again = load_policy(tmp_path / "out")
    assert jax.tree.structure(params) == jax.tree.structure(again)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))
    first, second = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)


def test_bfloat16_export_then_load_then_export_is_the_identity(tmp_path: Path, folder: Path):
    policy, params = load_policy(folder)
    save_policy(policy, params, tmp_path / "a")
    policy_a, params_a = load_policy(tmp_path / "a")
    save_policy(policy_a, params_a, tmp_path / "b")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert {x.dtype for x in first.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert all(first[k].tobytes() == second[k].tobytes() for k in first)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(params_a), strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype(ml_dtypes.bfloat16).astype(np.float32), np.asarray(b))


def test_alg_16_parameters_are_float32_whatever_the_compute_type(folder: Path):
    """Updates smaller than a 256th of a weight are lost in bfloat16: masters stay float32."""
    policy, params = load_policy(folder, compute_dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    batch = one_row(np.arange(1, 21)[None])
    assert packed_states(policy, params, batch).dtype == jnp.bfloat16
    logprobs, entropy = jax.jit(logprobs_of(policy))(params, batch)
    assert logprobs.dtype == entropy.dtype == jnp.float32
