"""Mixtures of experts against a loop over tokens; their gradients, statistics, adapters, sharding and checkpoints."""

import json
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_experts import moe_config, moe_folder, moe_policy
from safetensors import safe_open

from gspo_jax.models import qwen3, qwen3_moe
from gspo_jax.models.experts import Experts
from gspo_jax.models.layers import Spots
from gspo_jax.models.quantize import matrix, quantize
from gspo_jax.policy import load_policy, save_policy
from serving_bridge import trees
from serving_bridge.convert import Weight, WeightError
from serving_bridge.weights import check_table

E, D, F = 5, 8, 6
KERNELS = ("experts/gate", "experts/up", "experts/down")
ALL = np.ones((2, 7), bool)


def weights(seed: int = 0) -> dict:
    rng, params = np.random.default_rng(seed), {}
    shapes = {"router": (D, E), "experts/gate": (E, D, F), "experts/up": (E, D, F), "experts/down": (E, F, D)}
    for path, shape in shapes.items():
        trees.put(params, f"{path}/kernel", jnp.asarray(rng.standard_normal(shape) * 0.4, jnp.float32))
    return params


def tokens(seed: int = 1, shape: tuple[int, ...] = (2, 7, D)) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@cache
def mixture(chosen: int = 2, normalized: bool = True):
    """`(params, x, valid[, replay]) -> ` the sum and the routing."""
    module = Experts(E, chosen, D, F, normalized)
    return jax.jit(lambda params, *args: module.apply({"params": params}, *args))


def expert(params: dict, e: int, x: np.ndarray) -> np.ndarray:
    gate, up, down = (np.asarray(trees.get(params, f"{path}/kernel"), np.float64)[e] for path in KERNELS)
    a = x @ gate
    return (a / (1 + np.exp(-a)) * (x @ up)) @ down


def by_loop(params: dict, x: jax.Array, chosen: int, normalized: bool, fixed: np.ndarray | None = None):
    """The same in float64, token by token and expert by expert: results, choices, probabilities."""
    flat = np.asarray(x, np.float64).reshape(-1, D)
    logits = flat @ np.asarray(params["router"]["kernel"], np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    out, choices = np.zeros_like(flat), np.argsort(-p, -1)[:, :chosen]
    if fixed is not None:
        choices = np.where((fixed >= 0).all(-1, keepdims=True), fixed, choices)
    for i, token in enumerate(flat):
        weight = p[i, choices[i]] / (p[i, choices[i]].sum() if normalized else 1)
        out[i] = sum(w * expert(params, e, token) for w, e in zip(weight, choices[i], strict=True))
    return out.reshape(x.shape), choices.reshape(*x.shape[:-1], -1), p.reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("chosen", [1, 2, E])
@pytest.mark.parametrize("normalized", [True, False])
def test_the_sum_is_that_of_a_loop_over_tokens(chosen, normalized):
    params, x = weights(), tokens()
    found, routing = mixture(chosen, normalized)(params, x, ALL)
    expected, choices, _ = by_loop(params, x, chosen, normalized)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_array_equal(routing.choices, choices)


def test_statistics_are_sums_over_tokens_that_are_no_padding():
    params, x = weights(), tokens()
    valid = np.random.default_rng(3).random((2, 7)) < 0.6
    _, routing = mixture()(params, x, valid)
    _, choices, p = by_loop(params, x, 2, True)
    np.testing.assert_array_equal(routing.load, np.bincount(choices[valid].ravel(), minlength=E))
    np.testing.assert_allclose(routing.probability, p[valid].sum(0), rtol=1e-5)
    np.testing.assert_allclose(routing.entropy, -(p * np.log(p))[valid].sum(), rtol=1e-5)
    assert float(routing.tokens) == valid.sum()


def test_a_token_does_not_feel_its_companions():
    # The same token in every place of batches that send every other token elsewhere: the same bits.
    params, mine = weights(), tokens(5, (D,))
    seen = set()
    for seed in range(14):
        x = tokens(100 + seed) * (1 + seed)
        at = (seed % 2, seed // 2)
        found, _ = mixture()(params, x.at[at].set(mine), ALL)
        seen.add(np.asarray(found[at]).tobytes())
    assert len(seen) == 1


def test_replayed_experts_are_weighted_by_todays_router():
    params, x = weights(), tokens()
    rng = np.random.default_rng(7)
    fixed = np.stack([rng.permutation(E)[:2] for _ in range(14)]).astype(np.int32)
    fixed[3:6] = -1
    fixed[8, 1] = -1  # half an answer is none
    found, routing = mixture()(params, x, ALL, fixed.reshape(2, 7, 2))
    expected, choices, _ = by_loop(params, x, 2, True, fixed)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_array_equal(routing.choices, choices)
    np.testing.assert_array_equal(routing.load, np.bincount(choices.ravel(), minlength=E))


@pytest.mark.parametrize("replayed", [False, True])
def test_gradients_are_those_of_the_dense_formula(replayed):
    params, x = weights(), tokens()
    fixed = np.asarray(by_loop(params, x, 2, False)[1], np.int32)
    if replayed:
        fixed = (fixed + 1) % E  # the gradient of the router flows through the weights of whatever was chosen
    more = (fixed,) if replayed else ()

    def dense(params, x):
        p = jax.nn.softmax(x @ params["router"]["kernel"])
        chosen = jnp.sum(jax.nn.one_hot(fixed, E), -2)
        gate, up, down = (trees.get(params, f"{path}/kernel") for path in KERNELS)
        each = jnp.einsum("btef,efd->bted", jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) *
                          jnp.einsum("btd,edf->btef", x, up), down)  # fmt: skip
        return jnp.sum(jnp.sin(jnp.einsum("bte,bted->btd", p * chosen, each)))

    ours = jax.grad(lambda params, x: jnp.sum(jnp.sin(mixture(2, False)(params, x, ALL, *more)[0])), (0, 1))(params, x)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), ours, jax.grad(dense, (0, 1))(params, x))


def test_quantized_kernels_and_adapters_mean_what_they_say():
    params, x = weights(), tokens()
    rng, quantized, plain, merged = np.random.default_rng(2), {}, {}, {}
    for tree in (quantized, plain, merged):
        tree["router"] = params["router"]
    for path in KERNELS:
        kernel = trees.get(params, f"{path}/kernel")
        small = quantize(kernel, 1, 1, "int8", jnp.float32)
        a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((E, kernel.shape[1], 2), (E, 2, kernel.shape[2])))
        for name, leaf in (("kernel", small), ("lora_a", a), ("lora_b", b)):
            trees.put(quantized, f"{path}/{name}", leaf)
        trees.put(plain, f"{path}/kernel", matrix(small, jnp.float32))
        trees.put(merged, f"{path}/kernel", matrix(small, jnp.float32) + a @ b)
    found = mixture()(quantized, x, ALL)[0]
    np.testing.assert_allclose(found, mixture()(merged, x, ALL)[0], atol=1e-4)
    assert np.abs(found - mixture()(plain, x, ALL)[0]).max() > 0.1


IDS = np.random.default_rng(0).integers(0, 97, (8, 6)).astype(np.int32)
SPOTS = Spots(np.broadcast_to(np.arange(6, dtype=np.int32), IDS.shape), np.ones_like(IDS))


def test_layers_are_dense_or_sparse_as_the_config_says():
    # Experts that are all alike are one MLP, whatever the router does: the mixed stack is the dense one.
    settings = {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "moe_intermediate_size": 40}
    policy, params = moe_policy(**settings)
    assert policy.config.kinds == ("dense", "sparse", "dense", "dense", "dense")
    dense = qwen3.Config.model_validate({k: v for k, v in moe_config(num_hidden_layers=5).items() if "expert" not in k
                                         and k not in ("moe_intermediate_size", "norm_topk_prob")})  # fmt: skip
    stacked: dict = {}
    for row in qwen3.weights(dense):
        if not row.path.startswith("layers/"):
            trees.put(stacked, row.path, trees.get(params, row.path))
            continue
        rest, parts = row.path.removeprefix("layers/"), []
        for i in (0, 1, 2):  # layer 0, layer 1 (the sparse one), layers 2 to 4
            inside = rest.replace("mlp/", "mlp/experts/") if i == 1 and "mlp/" in rest else rest
            leaf = trees.get(params, f"layers{i}/{inside}")
            if inside != rest:
                leaf = leaf.at[:].set(leaf[:, :1])
                trees.put(params, f"layers{i}/{inside}", leaf)
                leaf = leaf[:, 0]
            parts.append(leaf)
        trees.put(stacked, row.path, jnp.concatenate(parts))
    found = policy.model.apply({"params": params}, IDS, SPOTS)
    expected: Any = qwen3.Model(dense).apply({"params": stacked}, IDS, SPOTS)
    np.testing.assert_allclose(found.hidden, expected.hidden, atol=2e-5)
    assert found.routing.choices.shape == (1, *IDS.shape, 2)


def test_a_rematerialized_model_on_eight_devices_is_the_same_model():
    _, params = moe_policy()

    def loss(remat, params, ids):
        output = moe_policy(remat=remat)[0].model.apply({"params": params}, ids, SPOTS)
        return jnp.sum(jnp.sin(output.hidden)), output.routing

    plain, again = (jax.jit(jax.value_and_grad(partial(loss, remat), has_aux=True)) for remat in ("none", "layer"))
    ((value, routing), grads) = plain(params, IDS)
    assert routing.choices.shape == (2, *IDS.shape, 2)
    np.testing.assert_array_equal(routing.load.sum(1), 2 * IDS.size)
    mesh = jax.sharding.Mesh(jax.devices(), ("fsdp",))
    rows = jax.device_put(IDS, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp")))
    (found, other), gradients = again(params, rows)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_array_equal(other.choices, routing.choices)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-4), gradients, grads)


@pytest.mark.parametrize("dense", [[], [1]])
def test_one_tensor_an_expert_and_one_a_layer_are_the_same_model(tmp_path, dense):
    overrides = {"mlp_only_layers": dense, "num_hidden_layers": 3}
    folders = [moe_folder(tmp_path / name, fused=name == "fused", **overrides) for name in ("single", "fused")]
    params = [load_policy(folder)[1] for folder in folders]
    jax.tree.map(np.testing.assert_array_equal, *params)
    with safe_open(folders[1] / "model.safetensors", "numpy") as file:
        gate_up = file.get_tensor("model.layers.0.mlp.experts.gate_up_proj")
    first = f"{'layers0' if dense else 'layers'}/mlp/experts"
    gate, up = (np.asarray(trees.get(params[0], f"{first}/{part}/kernel"))[0] for part in ("gate", "up"))
    np.testing.assert_array_equal(gate_up, np.concatenate([gate.swapaxes(1, 2), up.swapaxes(1, 2)], 1))
    for folder in folders:  # back in the form it was read in
        policy, loaded = load_policy(folder)
        save_policy(policy, loaded, tmp_path / "again", dtype="float32")
        assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_tensor_of_several_leaves_needs_a_row_for_each():
    rows = [Weight(f"p{i}", "w", "(c f) d -> d f", part=("c", i)) for i in range(2)]
    sizes = {"c": 2, "f": 3, "d": 4}
    check_table(rows, sizes)
    with pytest.raises(WeightError, match="every part along 'c' of 'w' needs one row"):
        check_table(rows[1:], sizes)
    with pytest.raises(WeightError, match="twice: w"):
        check_table([*rows, Weight("q", "w", "d f -> d f")], sizes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be 1..num_experts=6"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"n_shared_experts": 1}, "n_shared_experts=1"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_settings_that_are_not_computed_are_refused(change, named):
    with pytest.raises(ValueError, match=named):
        qwen3_moe.Config.model_validate(moe_config(**change))


def test_both_spellings_of_the_number_of_experts():
    raw = json.loads(json.dumps(moe_config()))
    raw["num_local_experts"] = raw.pop("num_experts")
    assert qwen3_moe.Config.model_validate(raw).num_experts == 6


def test_the_window_holds_on_every_layer():
    config = qwen3_moe.Config.model_validate(moe_config(use_sliding_window=True, sliding_window=4, max_window_layers=2))
    assert config.sliding == (True, True)
