"""A Qwen3-MoE of a few thousand weights, as a policy and as a Hugging Face folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from helpers_model import VOCAB

from gspo_jax.models import qwen3_moe
from gspo_jax.policy import Policy, save_policy
from serving_bridge import trees
from serving_bridge.weights import leaf_shape


def moe_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of the tiny mixture: 2 sparse layers of 6 experts, 2 a token."""
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "dtype": "float32",
    } | overrides


def moe_policy(seed: int = 0, *, remat: str = "none", fused: bool = False, **overrides: Any) -> tuple[Policy, dict[str, Any]]:
    """A policy and random float32 parameters whose routers are far from uniform."""
    config = qwen3_moe.Config.model_validate(moe_config(**overrides))
    table, kind = qwen3_moe.weights(config, fused=fused), jnp.dtype("float32")
    policy = Policy(Path("tiny"), "qwen3_moe", config, qwen3_moe.Model(config, kind, remat), table, kind)
    rng, params = np.random.default_rng(seed), dict[str, Any]()
    for row in qwen3_moe.weights(config):
        leaf = rng.standard_normal(leaf_shape(row, config.sizes())) * 0.25
        trees.put(params, row.path, jnp.asarray(1 + 0.2 * leaf if row.path.endswith("scale") else leaf, jnp.float32))
    return policy, params


def moe_folder(path: Path, seed: int = 0, *, fused: bool = False, **overrides: Any) -> Path:
    """`path`, a Hugging Face folder of the tiny mixture in float32."""
    policy, params = moe_policy(seed, fused=fused, **overrides)
    side = path.with_name(path.name + "_side")
    side.mkdir()
    (side / "config.json").write_text(json.dumps(moe_config(**overrides)))
    save_policy(replace(policy, folder=side), params, path, dtype="float32")
    return path
