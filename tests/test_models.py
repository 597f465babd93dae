"""What holds of models whatever their weights: causality, memory, settings that are refused, types."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import done, group, micro, tiny_config, tiny_model_folder, tiny_policy, turn

from gspo_jax.batch import Packing, pack
from gspo_jax.models import llama
from gspo_jax.models.layers import Spots
from gspo_jax.policy import Policy, describe_policy, load_policy, logprobs_of
from gspo_jax.types import Batch, Params
from serving_bridge.convert import WeightError

VOCAB = 331


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
        ({"model_type": "mamba"}, "model_type='mamba' is not supported; supported: gemma3"),
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


def test_alg_16_parameters_are_float32_whatever_the_compute_type(folder: Path):
    """Updates smaller than a 256th of a weight are lost in bfloat16: masters stay float32."""
    policy, params = load_policy(folder, compute_dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    batch = one_row(np.arange(1, 21)[None])
    assert packed_states(policy, params, batch).dtype == jnp.bfloat16
    logprobs, entropy = jax.jit(logprobs_of(policy))(params, batch)
    assert logprobs.dtype == entropy.dtype == jnp.float32
