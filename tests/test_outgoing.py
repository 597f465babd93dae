"""Parameters on their way to a server: the same tensors as an export's, and rounding that is right on average."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gspo_jax import outgoing
from gspo_jax.outgoing import Outgoing, pack, rounded
from gspo_jax.policy import load_policy
from serving_bridge.convert import export_weights

FOLDERS = sorted(path for path in (Path(__file__).parent / "data/models").iterdir() if (path / "config.json").exists())
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}


@pytest.mark.parametrize("chunk", [2**30, 20_000])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_tensors_are_those_of_an_export(folder, chunk, monkeypatch):
    """Of every family, whole leaves at a time or a few layers; in the order of `tensors` from the device; as packed bytes."""
    monkeypatch.setattr(outgoing, "CHUNK_BYTES", chunk)
    policy, params = load_policy(folder)
    sizes = policy.config.sizes()
    for name, dtype in DTYPES.items():
        out = Outgoing(policy.table, sizes, name)
        expected = {n: np.asarray(x).astype(dtype) for n, x in export_weights(params, policy.table, sizes)}
        found = {n: x.copy() for n, x in out.arrays(params)}
        assert found.keys() == expected.keys() == {tensor.name for tensor in out.tensors}
        assert {t.name: (t.shape, t.nbytes) for t in out.tensors} == {n: (x.shape, x.nbytes) for n, x in expected.items()}
        assert all(found[n].dtype == x.dtype and found[n].tobytes() == x.tobytes() for n, x in expected.items())
    arrays = list(out.on_device(params))
    assert [n for n, _ in arrays] == [tensor.name for tensor in out.tensors]
    assert pack([x for _, x in arrays]).tobytes() == b"".join(expected[n].tobytes() for n, _ in arrays)


def test_layers_come_one_after_another():
    """A server holds what it got of a layer until the layer is whole."""
    policy, _ = load_policy(FOLDERS[0])
    out = Outgoing(policy.table, policy.config.sizes(), "BF16")
    layers = [int(t.name.split(".layers.")[1].split(".")[0]) if ".layers." in t.name else -1 for t in out.tensors]
    assert layers == sorted(layers)


def test_rounding_is_to_a_neighbor_and_right_on_average():
    x = jax.random.normal(jax.random.key(0), (500,)) * jnp.logspace(-6, 3, 500)
    below = jax.lax.bitcast_convert_type((jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16), jnp.bfloat16)
    above = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(below, jnp.uint16) + 1, jnp.bfloat16)
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 4000)
    draws = jax.vmap(lambda key: rounded(x, key))(keys).astype(jnp.float32)
    low, high = below.astype(jnp.float32), above.astype(jnp.float32)
    assert bool(jnp.all((draws == low) | (draws == high)))
    share = jnp.mean(draws == high, 0)
    expected = jnp.abs(x - low) / jnp.abs(high - low)
    assert float(jnp.abs(share - expected).max()) < 5 * 0.5 / 4000**0.5
    exact = below.astype(jnp.float32)
    assert bool(jnp.all(rounded(exact, keys[0]) == below))


def test_a_version_has_its_rounding_and_another_another():
    """A small step changes nothing to nearest, and everything in proportion when rounded stochastically."""
    policy, params = load_policy(FOLDERS[0])
    exact = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    step = jax.tree.map(lambda x: x * (1 + 2.0**-12), exact)  # 1/32 to 1/16 of the distance to the next bfloat16
    out = {kind: Outgoing(policy.table, policy.config.sizes(), "BF16", stochastic=kind) for kind in (False, True)}

    def words(kind, tree, version):
        return np.concatenate([x.reshape(-1).view(np.uint16).copy() for _, x in out[kind].arrays(tree, version)])

    start = words(False, exact, 0)
    assert np.array_equal(words(False, step, 1), start)
    assert np.array_equal(words(True, exact, 1), start)
    once, again, other = words(True, step, 1), words(True, step, 1), words(True, step, 2)
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    assert 1 / 32 * 0.9 < np.mean(once != start) < 1 / 16 * 1.1
