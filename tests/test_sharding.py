"""The mesh: what is split and what is whole, the same update on every shape, and which collectives that takes."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_model import on, random_groups, tiny_policy
from jax.sharding import PartitionSpec as P

from gspo_jax.batch import Packing, pack
from gspo_jax.learner import learner
from gspo_jax.losses import gspo
from gspo_jax.mesh import MeshShape
from gspo_jax.parallel import STORE, splits_heads
from gspo_jax.policy import logprobs_of
from gspo_jax.sharding import leaf_spec, quantized_spec
from serving_bridge.weights import Weight

SIZES = {"v": 151936, "d": 2560, "f": 9728, "l": 36, "n": 32, "k": 8, "h": 128, "r": 16}
"""Of Qwen3-4B."""
KEY = Weight("layers/attention/key/kernel", "model.layers.{l}.self_attn.k_proj.weight", "(k h) d -> d k h")
OUT = Weight("layers/attention/out/kernel", "model.layers.{l}.self_attn.o_proj.weight", "d (n h) -> n h d")
DOWN = Weight("layers/mlp/down/kernel", "model.layers.{l}.mlp.down_proj.weight", "d f -> f d")
NORM = Weight("layers/mlp_norm/scale", "model.layers.{l}.post_attention_layernorm.weight", "d -> d")
WORDS = Weight("embedding", "model.embed_tokens.weight", "v d -> v d")


@pytest.mark.parametrize(
    ("row", "shape", "spec"),
    [
        (KEY, (1, 8, 1, 1), P(None, STORE)),
        (KEY, (1, 4, 2, 1), P(None, STORE, "tensor")),
        (OUT, (1, 4, 2, 1), P(None, "tensor", None, STORE)),
        (DOWN, (1, 2, 2, 2), P(None, "tensor", STORE)),
        (DOWN, (2, 1, 1, 1), P()),
        (NORM, (1, 4, 2, 1), P()),
        (WORDS, (1, 4, 2, 1), P("tensor", STORE)),
        (WORDS, (1, 8, 1, 1), P(STORE)),
    ],
)
def test_letters_say_what_is_split(row: Weight, shape: tuple, spec: P):
    assert leaf_spec(row, SIZES, MeshShape(*shape)) == spec


def test_three_devices_split_layers_where_nothing_else_divides():
    """2560, 9728, 32, 8 and 128 are not multiples of three; 36 layers are."""
    three = MeshShape(fsdp=3)
    assert all(leaf_spec(row, SIZES, three) == P(STORE) for row in (KEY, OUT, DOWN))
    assert leaf_spec(WORDS, SIZES, three) == P()


def test_key_heads_fewer_than_devices_stay_whole():
    assert splits_heads(32, 8, 8) == (True, True)
    assert splits_heads(32, 8, 16) == (True, False)
    assert splits_heads(9, 3, 2) == (False, False)
    assert splits_heads(12, 4, 6) == (False, False)
    assert leaf_spec(KEY, SIZES, MeshShape(tensor=16)) == P()
    assert leaf_spec(OUT, SIZES, MeshShape(tensor=16)) == P(None, "tensor")


def test_quantized_kernels_are_split_with_their_scales():
    assert quantized_spec(DOWN, SIZES, MeshShape(fsdp=4)) == P(None, None, STORE)
    assert quantized_spec(DOWN, SIZES, MeshShape(fsdp=2, tensor=2)) == P(None, "tensor", STORE)
    assert quantized_spec(OUT, SIZES, MeshShape(tensor=2)) == P(None, "tensor")
    with pytest.raises(ValueError, match="tiles of quantized features do not divide"):
        quantized_spec(DOWN, SIZES | {"f": 96}, MeshShape(tensor=4))


def test_one_device_is_the_identity():
    layout, tree = on(1), {"a": np.ones(3)}
    assert layout.state(tree) is tree
    assert layout.gathered(tree) is tree


def test_each_device_holds_its_part_of_masters_and_moments():
    """Four devices: a quarter of the bytes each, but for the norms."""
    policy, params = model()
    state = on(4, policy).state((params, optax.adamw(1e-3).init(params)))
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert held < 0.26 * total


def test_batch_rows_are_split_and_counts_whole():
    host = pack(random_groups(0, 2, 4), [[1.0] * 4] * 2, 4, Packing(24, 4, "padded"))
    batch = on(MeshShape(replica=2, fsdp=2)).batch(host)
    assert batch.proximal_logprobs is None
    assert batch.trajectories.sharding.is_fully_replicated
    for name, x in batch._asdict().items():
        if x is not None:
            np.testing.assert_array_equal(x, getattr(host, name))
            if x.ndim == 4:
                assert x.addressable_shards[0].data.shape[2] == 1, name


def test_gathered_is_whole_on_one_device():
    policy, params = model()
    layout = on(8, policy)
    whole = layout.gathered(layout.state(params))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(params), strict=True):
        assert a.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(a, b)


# The same update on every mesh


def model(**overrides):
    """Eight query heads on four key heads, three layers: something for every axis to divide."""
    return tiny_policy(remat="layer", **{"vocab_size": 104, "num_attention_heads": 8, "num_key_value_heads": 4} | overrides)


def some_batch(length: int = 48):
    groups = random_groups(5, 2, 8)
    rng = np.random.default_rng(0)
    return pack(groups, [rng.standard_normal(8).tolist() for _ in groups], 8, Packing(length, 8, "shared_prefix"))


def compiled(shape: MeshShape, policy, params):
    """The update on a mesh, and the state it starts from."""
    layout = on(shape, policy)
    found = learner(logprobs_of(policy, layout=layout), partial(gspo, eps_low=3e-3, eps_high=4e-3), optax.adamw(1e-4))
    places = layout.shardings(jax.eval_shape(found.init, params))
    state = jax.jit(found.init, out_shardings=places)(layout.state(jax.tree.map(jnp.copy, params)))
    update = jax.jit(found.update, donate_argnums=0, out_shardings=None if places is None else (places, None))
    return update.lower(state, layout.batch(some_batch())).compile(), state, layout


def three_steps(shape: MeshShape, **overrides):
    """Parameters after three steps on a mesh, and the metrics of the last."""
    update, state, layout = compiled(shape, *model(**overrides))
    batch = layout.batch(some_batch())
    for _ in range(3):
        state, metrics = update(state, batch)
    return jax.device_get(state.params), {name: float(x) for name, x in metrics.items()}


@pytest.fixture(scope="module")
def alone():
    return three_steps(MeshShape())


@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1, 1), (1, 8, 1, 1), (1, 1, 1, 4), (2, 2, 2, 1), (1, 2, 2, 2), (1, 1, 8, 1)],
)
def test_the_same_update_on_every_mesh(alone, shape: tuple):
    """Parameters after three steps to 1e-6 of each leaf's largest, and the metrics."""
    params, metrics = three_steps(MeshShape(*shape))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(alone[0]), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()
    for name in ("policy/loss", "optimizer/grad_norm", "policy/ratio_max", "policy/entropy", "staleness/logprob_abs"):
        assert metrics[name] == pytest.approx(alone[1][name], rel=1e-4, abs=1e-6), name
    assert metrics["policy/clip_fraction_2"] == alone[1]["policy/clip_fraction_2"] > 0


# What travels


def collectives(jaxpr) -> Counter:
    """`(primitive, mesh axes, shape of its operand)` of every collective, each counted once per pass of its loop."""
    found: Counter = Counter()
    for eqn in jaxpr.eqns:
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        if axes and eqn.primitive.name not in ("pvary", "axis_index"):
            found[eqn.primitive.name, axes if isinstance(axes, tuple) else (axes,), eqn.invars[0].aval.shape] += 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += collectives(inner)
    return found


def gradient_of(shape: MeshShape, remat: str):
    """The collectives of log-probabilities and their gradient, and the shapes of the model."""
    policy, params = tiny_policy(
        remat=remat,
        vocab_size=104,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=5,
        tie_word_embeddings=False,
    )
    logprobs = logprobs_of(policy, layout=on(shape, policy))
    micro = jax.tree.map(lambda x: jnp.asarray(x)[0, 0], some_batch())
    return collectives(jax.make_jaxpr(jax.grad(lambda p: jnp.sum(logprobs(p, micro)[0])))(params).jaxpr), policy, micro


def test_a_layer_is_gathered_where_it_is_used_and_its_gradient_scattered():
    """ZeRO-3: every matrix twice (again for the backward pass) one way, its gradient once the other."""
    found, policy, _ = gradient_of(MeshShape(fsdp=8), "none")
    matrices = [row for row in policy.table if row.path.startswith("layers") and row.path.endswith("kernel")]
    inside = {key: n for key, n in found.items() if 5 not in key[2]}
    heads = {"all_gather": 1 + 2, "reduce_scatter": 2}  # the embedding once, the head twice; the gradients of both
    for name, times in (("all_gather", 2), ("reduce_scatter", 1)):
        assert sum(n for key, n in inside.items() if key[0] == name) == times * len(matrices) + heads[name]
    norms = {row.path for row in policy.table if row.path.endswith("scale")}
    sums = [key for key in found if key[0].startswith("psum") and "fsdp" in key[1]]
    assert len(norms) == 3
    assert {key[2] for key in sums} <= {(5, 32), (32,)}, "only norms are summed whole, all layers at once"


def test_a_block_of_tensor_devices_sums_once_each_way():
    """Attention and MLP: two sums forward, two backward (arXiv 1909.08053), of hidden states; and one for the embedding."""
    found, _, micro = gradient_of(MeshShape(tensor=4), "none")
    hidden = (*micro.tokens.shape, 32)
    assert sum(n for (name, axes, shape), n in found.items() if "tensor" in axes and shape == hidden) == 2 + 2 + 1
    assert not any(name == "all_gather" for name, _, _ in found)


def test_devices_of_a_sequence_exchange_heads():
    """Ulysses (arXiv 2309.14509): four exchanges a layer each way; the state is split over them, too."""
    found, _, micro = gradient_of(MeshShape(sequence=4), "none")
    assert sum(n for key, n in found.items() if key[0] == "all_to_all") == 8
    rows, length = micro.tokens.shape
    assert all(shape[:2] in ((rows, length // 4), (rows, length)) for name, _, shape in found if name == "all_to_all")
