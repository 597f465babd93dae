"""Placement: what is split, what is whole, and that nothing but the place changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_model import random_groups, tiny_policy
from jax.sharding import PartitionSpec as P

from gspo_jax.batch import Packing, pack
from gspo_jax.sharding import place


def test_one_device_is_the_identity():
    placement, tree = place(1), {"a": np.ones(3)}
    assert placement.state(tree) is tree
    assert placement.gathered(tree) is tree


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((8, 24), P(None, "fsdp")), ((24, 8), P("fsdp", None)), ((3, 8), P(None, "fsdp")), ((3, 5), P()), ((), P())],
)
def test_leaf_is_split_over_its_largest_axis_that_divides(shape: tuple[int, ...], spec: P):
    x = jnp.arange(int(np.prod(shape)), dtype=jnp.float32).reshape(shape)
    placed = place(4).state(x)
    expected = jax.sharding.NamedSharding(placed.sharding.mesh, spec)
    assert placed.sharding.is_equivalent_to(expected, x.ndim)
    np.testing.assert_array_equal(placed, x)


def test_each_device_holds_its_part_of_masters_and_moments():
    """Four devices: a quarter of the bytes each, but for leaves no axis of which divides."""
    _, params = tiny_policy(vocab_size=100)
    state = place(4).state((params, optax.adamw(1e-3).init(params)))
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert held < 0.26 * total


def test_batch_rows_are_split_and_counts_whole():
    groups = random_groups(0, 2, 4)
    host = pack(groups, [[1.0] * 4] * 2, 4, Packing(24, 4, "padded"))
    batch = place(4).batch(host)
    assert batch.proximal_logprobs is None
    assert batch.trajectories.sharding.is_fully_replicated
    for name, x in batch._asdict().items():
        if x is not None:
            np.testing.assert_array_equal(x, getattr(host, name))
            if x.ndim == 4:
                assert x.addressable_shards[0].data.shape[2] == 1, name


def test_gathered_is_whole_on_one_device():
    _, params = tiny_policy(vocab_size=100)
    whole = place(8).gathered(place(8).state(params))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(params), strict=True):
        assert a.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(a, b)
