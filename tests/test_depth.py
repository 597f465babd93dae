"""Layers are scanned: neither the program of a gradient nor the time to compile it grows with their number."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_side
from jax.experimental.compilation_cache import compilation_cache

from gspo_jax.models import ARCHITECTURES
from gspo_jax.models.stages import stages
from gspo_jax.policy import Policy, logprobs_of
from gspo_jax.scoring import whole_rows
from serving_bridge import trees
from serving_bridge.weights import leaf_shape

EXPERTS, DELTA = torch_side.EXPERTS, torch_side.DELTA
PATTERNS = {
    "llama": ({}, 4, 32),
    "qwen3_moe": (EXPERTS, 4, 32),
    "qwen3_moe_mixed": (EXPERTS | {"decoder_sparse_step": 2}, 4, 32),
    "qwen3_5": (DELTA, 8, 32),
    "gemma3": ({"sliding_window": 6}, 8, 32),
}
"""Settings, and numbers of layers in which the pattern repeats (of Qwen3.5 and Gemma 3, four would be less than that)."""


@pytest.fixture
def uncached() -> Iterator[None]:
    """Every compilation is one: tests that share a process may have a cache of compiled programs."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def policy_of(name: str, settings: dict[str, Any], layers: int) -> Policy:
    kind = name.removesuffix("_mixed")
    module = ARCHITECTURES[kind]
    common = {"rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    config = module.Config.model_validate(torch_side.SMALL | settings | common | {"num_hidden_layers": layers})
    dtype = jnp.dtype("float32")
    return Policy(Path("tiny"), kind, config, module.Model(config, dtype, "layer"), module.weights(config), dtype)


def gradient(policy: Policy) -> Any:
    """The lowered gradient of the sum of log-probabilities."""
    params: dict[str, Any] = {}
    for row in policy.table:
        trees.put(params, row.path, jax.ShapeDtypeStruct(leaf_shape(row, policy.config.sizes()), jnp.float32))
    batch, logprobs = whole_rows(np.ones((2, 16), np.int32)), logprobs_of(policy)
    return jax.jit(jax.grad(lambda params: jnp.sum(logprobs(params, batch)[0]))).lower(params)


def operations(text: str) -> int:
    return len(re.findall(r"^\s*(?:ROOT )?%\S+ = ", text, re.MULTILINE))


@pytest.mark.parametrize("name", PATTERNS)
def test_program_does_not_grow_with_depth(name: str):
    """As many operations, to the last one."""
    settings, *depths = PATTERNS[name]
    policies = [policy_of(name, settings, layers) for layers in depths]
    assert [len(stages(policy.config.kinds)) for policy in policies] == [1, 1]
    shallow, deep = (operations(gradient(policy).as_text()) for policy in policies)
    assert shallow > 300
    assert shallow == deep


@pytest.mark.usefixtures("uncached")
def test_compile_time_does_not_grow_with_depth():
    def seconds(layers: int) -> float:
        lowered = gradient(policy_of("llama", {}, layers))
        start = time.perf_counter()
        lowered.compile()
        return time.perf_counter() - start

    assert any(seconds(32) < 1.3 * seconds(4) for _ in range(4))  # whatever else the machine does meanwhile
