"""Every key of the families' config.json is computed, harmless and listed so, or refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_side
from helpers_model import tiny_config
from transformers import AutoConfig

from gspo_jax.models import ARCHITECTURES, gemma3, qwen2, qwen3_5, rotary
from gspo_jax.models.settings import Settings
from gspo_jax.policy import describe_policy
from serving_bridge.convert import WeightError
from serving_bridge.weights import leaf_shape

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "gemma3_text")
SLIDE, FULL = "sliding_attention", "full_attention"
HARMLESS = {
    # Types and names.
    "_name_or_path", "architectures", "dtype", "model_type", "transformers_version", "id2label", "label2id", "problem_type",
    # How to run the model, not what it computes.
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict", "use_cache",
    # Initialization, dropout and auxiliary losses of other trainers.
    "attention_dropout", "initializer_range", "output_router_logits", "router_aux_loss_coef",
    # Tokens of text and images, which come in as ids; only an embedding of padding would be special, and is not.
    "bos_token_id", "eos_token_id", "pad_token_id",
    "is_encoder_decoder", "pretraining_tp",
    # Means something where `layer_types` is absent, and a saved file has those.
    "_sliding_window_pattern",
}  # fmt: skip


def small(kind: str, **changes: Any) -> dict[str, Any]:
    """The whole config.json that transformers writes for a tiny model."""
    extra = {"qwen3_moe": torch_side.EXPERTS, "qwen3_5_text": torch_side.DELTA, "gemma3_text": torch_side.GEMMA,
             "qwen3_5_moe_text": torch_side.DELTA | torch_side.EXPERTS}  # fmt: skip
    config = AutoConfig.for_model(kind, **torch_side.SMALL | extra.get(kind, {}))
    return json.loads(config.to_json_string(use_diff=False)) | changes


def load(raw: dict[str, Any]) -> Settings:
    return ARCHITECTURES[raw["model_type"]].Config.model_validate(raw)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_that_transformers_writes_is_known(kind: str):
    """A field, a listed harmless key, or refused once it holds anything but what it holds by default."""
    raw = small(kind)
    load(raw)
    fields = {*ARCHITECTURES[kind].Config.model_fields, "hidden_activation", "num_local_experts"}
    for name in sorted(set(raw) - HARMLESS - fields):
        with pytest.raises(ValueError, match=name):
            load(raw | {name: 3.25})


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", ["rope_theta", "tie_word_embeddings", "sliding_window", "max_window_layers", "norm_topk_prob",
                                  "head_dim", "query_pre_attn_scalar", "hidden_act", "hidden_activation", "layer_types",
                                  "full_attention_interval", "decoder_sparse_step", "rope_parameters"])  # fmt: skip
def test_a_key_left_out_means_what_it_means_to_transformers(kind: str, name: str):
    changes = {"use_sliding_window": True} if kind.startswith("qwen") and "5" not in kind else {}
    raw = {k: v for k, v in small(kind, **changes).items() if k not in (name, "layer_types")}
    theirs, ours = AutoConfig.for_model(**{k: v for k, v in raw.items() if k != "transformers_version"}), load(raw)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    if name != "head_dim":  # the shapes of the weights tell that one
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    if any(ours.sliding):
        assert ours.sliding_window == theirs.sliding_window
    if getattr(theirs, "layer_types", None) and kind != "llama":
        assert ours.sliding == tuple(each == SLIDE for each in theirs.layer_types)
    for field in ("norm_topk_prob", "query_pre_attn_scalar", "decoder_sparse_step"):
        assert getattr(ours, field, None) == getattr(theirs, field, None)
    parameters = theirs.rope_parameters.get(FULL, theirs.rope_parameters)
    size = int(ours.head_dim * parameters.get("partial_rotary_factor", 1))
    expected = 1 / np.float64(parameters["rope_theta"]) ** (np.arange(0, size, 2) / size)
    np.testing.assert_allclose(ours.rope().frequencies, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("llama", {"is_causal": False}, "is_causal=False"),
        ("llama", {"sliding_window": 16}, "sliding_window=16"),
        ("llama", {"sliding_window": 16, "use_sliding_window": True}, "sliding_window=16"),
        ("llama", {"layer_types": [FULL, SLIDE, FULL]}, "layer_types with sliding_attention"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"attention_chunk_size": 8}, "attention_chunk_size=8"),
        ("llama", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers="),
        ("llama", {"original_max_position_embeddings": 64}, "original_max_position_embeddings=64"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "short_factor": [1.0]}}, "short_factor=[1.0] in rope_parameters"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope_type='yarn' needs factor"),
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, "rope_type='mrope'"),
        ("qwen2", {"layer_types": [FULL, "chunked_attention", FULL]}, "layer_types with chunked_attention"),
        ("qwen2", {"layer_types": [FULL, SLIDE, FULL]}, "layer_types has sliding_attention"),
        ("qwen2", {"layer_types": [FULL]}, "layer_types has 1 entries"),
        ("qwen2", {"rope_parameters": {FULL: {"rope_theta": 1e4}}}, f"{FULL}="),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5_text", {"sliding_window": 16}, "sliding_window=16"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_act='gelu'"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters="),
        ("gemma3_text", {"rope_parameters": {FULL: {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
        ("gemma3_text", {"layer_types": None, "_sliding_window_pattern": 4}, "_sliding_window_pattern=4"),
    ],
)  # fmt: skip
def test_setting_that_would_change_results_is_refused_by_name(tmp_path: Path, kind: str, change: dict, named: str):
    (tmp_path / "config.json").write_text(json.dumps(small(kind) | change))
    with pytest.raises(WeightError) as caught:
        describe_policy(tmp_path, compute_dtype="float32", remat="none")
    assert named in str(caught.value)


def test_text_config_and_outer_config_must_agree_on_tied_heads():
    inner = tiny_config(tie_word_embeddings=True)
    assert load({"model_type": "llama", "text_config": inner, "tie_word_embeddings": True}).tie_word_embeddings
    assert load({"model_type": "llama", "text_config": inner}).tie_word_embeddings
    outer = {k: v for k, v in inner.items() if k != "tie_word_embeddings"}
    assert load({"model_type": "llama", "text_config": outer, "tie_word_embeddings": True}).tie_word_embeddings
    with pytest.raises(ValueError, match="tie_word_embeddings=False is not supported beside"):
        load({"model_type": "llama", "text_config": inner, "tie_word_embeddings": False})


def test_rope_scaling_comes_before_rope_parameters():
    """As in transformers, where a file has both spellings."""
    raw = tiny_config(
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rope_scaling={"type": "linear", "factor": 2.0}
    )
    ours, theirs = load(raw).rope().frequencies, AutoConfig.for_model(**raw).rope_parameters
    assert theirs["rope_type"] == "linear"
    np.testing.assert_allclose(ours, rotary.rope(8, theirs).frequencies)


def test_published_gemma_3_config_is_understood():
    """The text_config of the 4b checkpoint names only what differs from its defaults."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    theirs = AutoConfig.for_model("gemma3", text_config=dict(text)).text_config
    ours = gemma3.Config.model_validate({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window",
                 "query_pre_attn_scalar", "max_position_embeddings", "tie_word_embeddings"):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.sliding == tuple(kind == SLIDE for kind in theirs.layer_types)
    full, local = (1 / base ** (np.arange(0, 256, 2) / 256) for base in (1e6, 1e4))
    np.testing.assert_allclose(ours.rope().frequencies, full / 8, rtol=1e-5)
    np.testing.assert_allclose(ours.local_rope().frequencies, local, rtol=1e-5)


def test_older_gemma_3_patterns_and_thetas():
    raw = {
        k: v for k, v in small("gemma3_text").items() if k not in ("layer_types", "rope_parameters", "_sliding_window_pattern")
    }
    ours = gemma3.Config.model_validate(raw | {"sliding_window_pattern": 3, "rope_theta": 500.0, "rope_local_base_freq": 50.0})
    assert ours.sliding == (True, True, False, True, True, False, True)
    np.testing.assert_allclose(ours.rope().frequencies[1], 500 ** (-1 / 8), rtol=1e-6)
    np.testing.assert_allclose(ours.local_rope().frequencies[1], 50 ** (-1 / 8), rtol=1e-6)
    assert gemma3.Config.model_validate(raw | {"layer_types": [FULL] * 7, "sliding_window_pattern": 3}).sliding == (False,) * 7


def test_windows_that_are_switched_off_are_off():
    assert not any(qwen2.Config.model_validate(small("qwen2", sliding_window=4, use_sliding_window=False)).sliding)
    on = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    assert qwen2.Config.model_validate(small("qwen2", **on)).sliding == (False, True, True)
    assert load(tiny_config(sliding_window=4, use_sliding_window=False)).sliding == (False, False)
    assert qwen3_5.Config.model_validate(small("qwen3_5_text", layer_types=None, full_attention_interval=2)).kinds == (
        "linear", "full", "linear")  # fmt: skip


PUBLISHED = {
    134_515_008: {  # SmolLM2-135M-Instruct
        "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "use_cache": True,
        "vocab_size": 49152,
    },
    1_235_814_400: {  # Llama-3.2-1B
        "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 128256,
    },
    494_032_768: {  # Qwen2.5-0.5B
        "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
        "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    596_049_920: {  # Qwen3-0.6B
        "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    30_532_122_624: {  # Qwen3-30B-A3B
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
}  # fmt: skip
"""Published files, by the number of parameters their models are published with."""


@pytest.mark.parametrize("parameters", PUBLISHED)
def test_published_files_load_and_give_the_published_number_of_parameters(parameters: int):
    config = load(PUBLISHED[parameters])
    table = ARCHITECTURES[PUBLISHED[parameters]["model_type"]].weights(config)
    assert sum(math.prod(leaf_shape(row, config.sizes())) for row in table) == parameters
