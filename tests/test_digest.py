"""Digests tell arrays apart by one bit, and by nothing but their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import on, random_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.batch import Packing, pack
from gspo_jax.digest import batch_digest, params_digest

TREE = {
    "a": np.arange(48, dtype=np.float32).reshape(8, 6),
    "b": {"c": np.zeros(16, np.float32), "count": np.array(3, np.int32)},
    "low": np.asarray(jnp.ones((4, 4), jnp.bfloat16)),
}


def flipped(tree, name: str, bit: int):
    """A copy with one bit of one leaf changed."""
    array = np.array(tree[name])
    array.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
    return {**tree, name: array}


def test_equal_bits_have_equal_digests():
    digest = params_digest(TREE)
    assert digest == params_digest(jax.tree.map(np.copy, TREE)) == params_digest(jax.tree.map(jnp.asarray, TREE))
    assert len(digest) == 32
    int(digest, 16)


@settings(max_examples=40, deadline=None)
@given(bit=st.integers(0, 48 * 32 - 1), low=st.integers(0, 16 * 16 - 1))
def test_one_flipped_bit_changes_the_digest(bit: int, low: int):
    """Any bit, the sign of a zero and the last of a mantissa included."""
    digests = {params_digest(TREE), params_digest(flipped(TREE, "a", bit)), params_digest(flipped(TREE, "low", low))}
    assert len(digests) == 3


def test_negative_zero_and_swapped_values_are_seen():
    swapped = TREE["a"].copy()
    swapped[0, 0], swapped[0, 1] = swapped[0, 1], swapped[0, 0]
    negative = {"c": -TREE["b"]["c"], "count": TREE["b"]["count"]}
    trees = [TREE, {**TREE, "a": swapped}, {**TREE, "b": negative}, {**TREE, "a": TREE["a"][::-1]}]
    assert len({params_digest(t) for t in trees}) == len(trees)


def test_path_shape_and_type_are_part_of_it():
    zeros = np.zeros(4, np.float32)
    trees = [{"a": zeros}, {"b": zeros}, {"a": zeros.reshape(2, 2)}, {"a": zeros.view(np.int32)}, {"a": zeros, "b": zeros}]
    assert len({params_digest(t) for t in trees}) == len(trees)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_digest_does_not_depend_on_where_the_bits_lie(devices: int):
    layout = on(devices)
    split = NamedSharding(layout.mesh, PartitionSpec("fsdp"))
    placed = layout.state(jax.tree.map(jnp.asarray, TREE))
    placed = placed | {"a": jax.device_put(TREE["a"], split)}
    assert len(placed["a"].sharding.device_set) == devices
    assert not placed["a"].sharding.is_fully_replicated
    assert params_digest(placed) == params_digest(TREE)
    gathered = layout.gathered(placed)
    assert len(gathered["a"].sharding.device_set) == 1
    assert params_digest(gathered) == params_digest(TREE)


def test_batch_digest_sees_every_array():
    batch = pack(random_groups(0, 1, 2), [[1.0, -1.0]], 2, Packing(24))
    digest = batch_digest(batch)
    assert digest == batch_digest(jax.tree.map(np.copy, batch))
    assert digest == batch_digest(jax.tree.map(jnp.asarray, batch))
    seen = {digest}
    for name, x in batch._asdict().items():
        if x is not None:
            other = np.array(x)
            other.reshape(-1)[-1] = not other.reshape(-1)[-1] if other.dtype == bool else other.reshape(-1)[-1] + 1
            seen.add(batch_digest(batch._replace(**{name: other})))
    assert len(seen) == 1 + sum(x is not None for x in batch)
