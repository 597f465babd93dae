"""Every family on a mesh: the log-probabilities, the router's sums and the gradients of one device."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import micro, random_groups
from helpers_random import FAMILIES, family_folder
from helpers_train import config_of

from gspo_jax.batch import Packing, pack
from gspo_jax.config import ConfigError
from gspo_jax.mesh import MeshShape, make_mesh
from gspo_jax.models.quantize import is_quantized
from gspo_jax.policy import logprobs_of
from gspo_jax.start import Start, load_start
from gspo_jax.types import Batch
from serving_bridge.trees import leaves

QUICK = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple, Path] = {}

    def make(family: str, **overrides) -> Path:
        key = (family, *overrides.items())
        if key not in made:
            made[key] = family_folder(tmp_path_factory.mktemp("models") / family, family, **overrides)
        return made[key]

    return make


def rows(recurrent: bool, count: int) -> Batch:
    """So many rows of 32, several trajectories in most."""
    groups = random_groups(1, 4, 4, prompt=7, completion=6)
    mode = "packed" if recurrent else "shared_prefix"
    return micro(pack(groups, [[1.0, -1.0, 0.5, -0.5]] * 4, 16, Packing(32, count, mode)))


def measured(start: Start, count: int):
    """Log-probabilities, statistics of routers, and gradients of a sum of sines of log-probabilities and entropies."""
    logprobs, batch = logprobs_of(start.policy, layout=start.layout), rows(start.policy.config.recurrent, count)

    def total(params, frozen, batch):
        found, entropy, *stats = logprobs(start.whole(params, frozen), batch)
        return jnp.sum(jnp.sin(found) + jnp.cos(entropy)), (found, stats)

    work = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=QUICK)
    (_, found), grads = work(start.params, start.frozen, jax.tree.map(jnp.asarray, batch))
    return jax.device_get(found), jax.device_get(grads)


def assert_same(start: Start, plain: Start, count: int = 4) -> None:
    (found, grads), (expected, wanted) = measured(start, count), measured(plain, count)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
    assert np.abs(expected[0]).max() > 1
    for (path, a), (_, b) in zip(leaves(grads), leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5 * max(np.abs(b).max(), 1e-2), err_msg=path)


@pytest.mark.parametrize(("family", "shape"), [*((family, (1, 2, 2, 2)) for family in FAMILIES), ("qwen3_moe", (2, 1, 4, 1))])
def test_all_weights_of_every_family(family: str, shape: tuple, folder):
    config = config_of(folder(family))
    mesh = MeshShape(*shape)
    assert_same(load_start(config, make_mesh(mesh)), load_start(config))


@pytest.mark.parametrize(("family", "mode"), [("qwen2", "qlora"), ("qwen3_moe", "qlora"), ("qwen3_5", "lora")])
def test_adapters_on_split_weights(family: str, mode: str, folder):
    """Quantized kernels are split too, where their tiles divide."""
    config = config_of(folder(family), f"model.trainer_mode={mode}", "training.lora.r=4")
    plain = load_start(config)
    start = load_start(config, make_mesh(MeshShape(fsdp=2, sequence=2)))
    for tree in (plain.params, start.params):  # a fresh adapter's gradient is zero but for B
        for path, leaf in leaves(tree):
            if path.endswith("lora_b"):
                tree_put(tree, path, leaf + 0.05 * jnp.sin(jnp.arange(leaf.size).reshape(leaf.shape)))
    assert any(is_quantized(leaf) for _, leaf in leaves(start.frozen)) == (mode == "qlora")
    big = [leaf for path, leaf in leaves(start.frozen) if path.endswith(("mlp/gate/kernel", "experts/up/kernel"))]
    assert big
    assert not any(part.sharding.is_fully_replicated for part in jax.tree.leaves(big))
    assert_same(start, plain)


def tree_put(tree, path: str, leaf) -> None:
    *parents, last = path.split("/")
    for part in parents:
        tree = tree[part]
    tree[last] = leaf


def test_layers_are_split_where_nothing_else_divides(folder):
    """Three devices and widths that are powers of two, three layers: as 2560 and 36 of Qwen3-4B."""
    config = config_of(folder("llama", num_hidden_layers=3, hidden_size=32, intermediate_size=64, vocab_size=128))
    start = load_start(config, make_mesh(MeshShape(fsdp=3)))
    kernel = start.params["layers"]["mlp"]["gate"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (1, *kernel.shape[1:])
    assert_same(start, load_start(config), 6)


def test_heads_that_a_sequence_axis_does_not_divide_are_refused(folder):
    config = config_of(folder("qwen3_5"), "mesh.sequence=3")
    with pytest.raises(ConfigError, match=r"mesh.sequence: 3 devices do not divide the \d heads of linear attention"):
        load_start(config, make_mesh(MeshShape(sequence=3)))
