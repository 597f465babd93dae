"""Random models of every family, two layers deep, with a chat tokenizer: complete Hugging Face folders to train."""

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from helpers_tokenizer import tiny_tokenizer

from gspo_jax.policy import Policy, describe_policy, save_policy
from gspo_jax.types import Params
from serving_bridge.trees import put
from serving_bridge.weights import Weight, leaf_shape, stacked

DATA = Path(__file__).parent / "data" / "models"
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "gemma3")


def family_folder(path: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """`path`, a float32 Hugging Face folder of two layers of a family, one of each kind where there are two.

    `overrides` are fields of its config.json.
    """
    tokenizer = tiny_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = json.loads((DATA / family / "config.json").read_text()) | {"vocab_size": len(tokenizer), "num_hidden_layers": 2}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][-2:]
    config |= ids | overrides
    with tempfile.TemporaryDirectory() as side:
        (Path(side) / "config.json").write_text(json.dumps(config))
        (Path(side) / "generation_config.json").write_text(json.dumps(ids))
        tokenizer.save_pretrained(side)
        policy = describe_policy(Path(side), compute_dtype="float32", remat="none")
        save_policy(replace(policy, folder=Path(side)), random_params(policy, seed), path, dtype="float32")
    return path


def random_params(policy: Policy, seed: int = 0) -> Params:
    """Random float32 parameters, large enough that no distribution is flat and every layer matters."""
    rng, params = np.random.default_rng(seed), {}
    for row in policy.table:
        put(params, row.path, jnp.asarray(_leaf(row, policy, rng), jnp.float32))
    return params


def _leaf(row: Weight, policy: Policy, rng: np.random.Generator) -> np.ndarray:
    shape, last = leaf_shape(row, policy.config.sizes()), row.path.rpartition("/")[2]
    draw = rng.standard_normal(shape)
    if last == "scale":  # of the norms, those inside linear attention are never stored minus one
        plain = policy.config.norm_offset == 0 or "delta" in row.path
        return plain + 0.1 * draw
    if last in ("embedding", "head"):
        return 0.6 * draw / policy.config.embedding_scale
    if last == "kernel":
        lead = len(stacked(row))
        return 1.4 * draw / math.sqrt(math.prod(shape[lead : lead + max(1, len(shape) - lead - 1)]))
    return 0.3 * draw
