"""Grouped products: what `jax.lax.ragged_dot` gives, by kernels that compute nothing else."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from gspo_jax.models import cuda
from gspo_jax.models.grouped import grouped, product, schedule
from gspo_jax.plan.targets import GPUS, target_text

ROWS, EXPERTS, INTO, OUT_OF = 200, 5, 70, 72
"""None a multiple of a tile's side, each more than one tile."""
SIZES = {
    "borders inside tiles": (30, 70, 1, 63, 36),
    "borders between tiles": (64, 0, 64, 64, 8),
    "empty experts": (0, 0, 130, 0, 70),
    "one has all": (0, 0, 0, 200, 0),
    "the last has all": (0, 0, 0, 0, 200),
    "rows of nobody": (20, 0, 45, 10, 1),
    "nobody has any": (0, 0, 0, 0, 0),
}
interpreted = partial(grouped, interpret=True)


def given(p: int = ROWS, e: int = EXPERTS, d: int = INTO, f: int = OUT_OF, dtype: Any = jnp.float32) -> list[Array]:
    """Random x, kernel and gradient of the result."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((p, d), (e, d, f), (p, f))]


@partial(jax.jit, static_argnums=0)
def results(f: Callable, x: Array, kernel: Array, g: Array, sizes: Array) -> tuple[Array, ...]:
    """Result and gradients of x and kernel."""
    out, back = jax.vjp(lambda x, kernel: f(x, kernel, sizes), x, kernel)
    return out, *back(g)


def one_by_one(x: Array, kernel: Array, g: Array, sizes: Array) -> list[np.ndarray]:
    """`results`, expert by expert in float64."""
    x64, kernel64, g64 = (np.asarray(a, np.float64) for a in (x, kernel, g))
    found, at = [np.zeros(g.shape), np.zeros(x.shape), np.zeros(kernel.shape)], 0
    for expert, size in enumerate(np.asarray(sizes)):
        rows = slice(at, at + size)
        found[0][rows], found[1][rows] = x64[rows] @ kernel64[expert], g64[rows] @ kernel64[expert].T
        found[2][expert] = x64[rows].T @ g64[rows]
        at += size
    return found


def agree(sizes: Array, x: Array, kernel: Array, g: Array) -> None:
    args = (x, kernel, g, sizes)
    for a, b, c in zip(results(interpreted, *args), results(jax.lax.ragged_dot, *args), one_by_one(*args), strict=True):
        for other in (b, c):
            np.testing.assert_allclose(a, other, rtol=1e-5, atol=1e-5 * max(1, np.abs(c).max()))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_equals_ragged_dot_and_a_loop_over_experts(sizes: tuple[int, ...]):
    agree(jnp.asarray(sizes, jnp.int32), *given())


@pytest.mark.parametrize(("p", "e", "d", "f"), [(7, 3, 5, 3), (64, 2, 32, 64), (100, 1, 64, 16)])
def test_narrow_and_exact_shapes(p: int, e: int, d: int, f: int):
    """Less than a tile, whole tiles, a single expert."""
    agree(jnp.asarray(np.random.default_rng(1).multinomial(p, [1 / e] * e), jnp.int32), *given(p, e, d, f))


def test_bfloat16_is_as_near_to_float32_as_ragged_dot_is():
    x, kernel, g = given(dtype=jnp.bfloat16)
    args = (x, kernel, g, jnp.asarray(SIZES["rows of nobody"], jnp.int32))
    for a, b, c in zip(results(interpreted, *args), results(jax.lax.ragged_dot, *args), one_by_one(*args), strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(np.asarray(a, float) - c).max() <= 1.01 * np.abs(np.asarray(b, float) - c).max()


def test_types_must_agree():
    x, kernel, _ = given()
    with pytest.raises(ValueError, match="x of bfloat16 and kernel of float32"):
        grouped(x.astype(jnp.bfloat16), kernel, jnp.zeros(EXPERTS, jnp.int32))


def test_the_same_bits_again_and_wherever_a_row_lies():
    """Twice; and with the rows of the other experts taken away, so that those of one expert lie elsewhere in other tiles."""
    (x, kernel, g), sizes = given(), np.array(SIZES["borders inside tiles"])
    first, again = (results(interpreted, x, kernel, g, jnp.asarray(sizes, jnp.int32)) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    for expert, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        alone = jnp.asarray(np.eye(EXPERTS)[expert] * size, jnp.int32)
        moved = results(interpreted, jnp.roll(x, -start, 0), kernel, jnp.roll(g, -start, 0), alone)
        for a, b in zip(first[:2], moved[:2], strict=True):
            np.testing.assert_array_equal(a[start : start + size], b[:size])
        np.testing.assert_array_equal(first[2][expert], moved[2][expert])


def test_nothing_leaks_between_experts():
    """NaN in the rows of one expert and of nobody is seen by that expert alone; nobody's rows give 0 and get 0."""
    (x, kernel, g), sizes = given(), np.array(SIZES["rows of nobody"])
    bad = np.r_[20:65, 76:ROWS]
    out, dx, dkernel = results(
        interpreted, x.at[bad].set(jnp.nan), kernel, g.at[bad].set(jnp.nan), jnp.asarray(sizes, jnp.int32)
    )
    clean = results(interpreted, x, kernel, g, jnp.asarray(sizes, jnp.int32))
    for a, b in zip((out, dx), clean[:2], strict=True):
        assert jnp.isnan(a[20:65]).all()
        np.testing.assert_array_equal(np.delete(a, np.r_[20:65], 0), np.delete(b, np.r_[20:65], 0))
        assert not a[76:].any()
    assert jnp.isnan(dkernel[2]).all()
    np.testing.assert_array_equal(np.delete(dkernel, 2, 0), np.delete(clean[2], 2, 0))


@pytest.mark.parametrize(("p", "e", "rows"), [(200, 5, 64), (1000, 7, 16), (64, 3, 64), (5, 9, 16)])
def test_every_row_is_in_one_tile_of_its_expert(p: int, e: int, rows: int):
    """And there are no more tiles with rows than each expert's own need, whatever the sizes."""
    planned = jax.jit(partial(schedule, p=p, rows=rows))
    rng = np.random.default_rng(0)
    for owned in [p, p, p, *rng.integers(0, p + 1, 20)]:
        sizes = rng.multinomial(owned, rng.dirichlet([0.3] * e))
        owners = np.repeat(np.arange(e + 1), [*sizes, p - owned])
        tiles = [tile for tile in np.asarray(planned(jnp.asarray(sizes, jnp.int32))).tolist() if tile[1] < tile[2]]
        assert [i for _, start, end, _ in tiles for i in range(start, end)] == list(range(p))
        for expert, start, end, meets in tiles:
            assert set(owners[start:end]) == {expert}
            assert meets == (expert < e)
        assert len(tiles) == sum(-(-size // rows) for size in [*sizes, p - owned])


def sharded(f: Callable, mesh: Any) -> Any:
    """Loss and gradients of two rematerialised, scanned layers, rows split between the devices: one product with a kernel that
    both have, one with a kernel of which each has its own part, as many outputs as go into the next layer."""

    def loss(x: Array, shared: Array, own: Array, sizes: Array) -> Array:
        def layer(x: Array, kernels: tuple[Array, Array]) -> tuple[Array, None]:
            x = jnp.tanh(f(x, kernels[0], sizes[0]))
            return x + f(x, kernels[1][0], sizes[0]), None

        out, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, (shared, own))
        return jax.lax.psum(jnp.sum(jnp.sin(out.astype(jnp.float32))), "fsdp")

    specs = (P("fsdp"), P(), P(None, "fsdp"), P("fsdp"))
    return jax.jit(jax.value_and_grad(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P()), (0, 1, 2)))


def test_in_shard_map():
    """Two devices with sizes of their own: loss and gradients of `ragged_dot`; where that is chosen, its bits."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    shapes = ((160, 24), (2, 3, 24, 24), (2, 2, 3, 24, 24))
    args = [jnp.asarray(rng.standard_normal(shape) / 5, jnp.float32) for shape in shapes]
    args.append(jnp.asarray([(30, 0, 50), (0, 11, 60)], jnp.int32))
    expected, ours, chosen = (jax.tree.leaves(sharded(f, mesh)(*args)) for f in (jax.lax.ragged_dot, interpreted, product))
    for a, b, c in zip(ours, expected, chosen, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1, float(jnp.abs(b).max())))
        np.testing.assert_array_equal(b, c)


def on_cuda(f: Callable, mesh: Any, p: int, e: int, d: int, dtype: Any = jnp.bfloat16) -> Any:
    """`sharded`, lowered for CUDA."""
    placed = jax.sharding.NamedSharding(mesh, P())
    shapes = [jax.ShapeDtypeStruct(s, dtype, sharding=placed) for s in ((2 * p, d), (2, e, d, d), (2, 2, e, d, d))]
    sizes = jax.ShapeDtypeStruct((2, e), jnp.int32, sharding=placed)
    return sharded(f, mesh).trace(*shapes, sizes).lower(lowering_platforms=("cuda",))


deprecated = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


@deprecated
def test_lowered_for_cuda_without_a_gpu():
    """Two products forward, one of them again before the two of each in the backward pass, no atomics; nothing is dense."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("fsdp",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    ours, chosen, theirs = (on_cuda(f, mesh, 640, 6, 96).as_text() for f in (grouped, product, jax.lax.ragged_dot))
    for text in (ours, chosen):
        names = sorted(re.findall(r'name = "(\w+_kernel)"', text))
        assert names == ["outer_kernel"] * 2 + ["products_kernel"] * 5
        assert "atomic" not in text
    dense = [bool(re.search(r"stablehlo\.dot_general|chlo\.ragged_dot", text)) for text in (ours, chosen, theirs)]
    assert dense == [False, False, True]


compiler = pytest.mark.skipif(not cuda.installed(), reason=f"needs the CUDA compiler, one of {cuda.PLUGINS}; no GPU")


def h100(count: int) -> Any:
    found = topologies.get_topology_desc(
        "h100", platform="cuda", topology=f"1x1x{count}", target_config=target_text(GPUS["h100"])
    )
    return jax.sharding.Mesh(np.array(found.devices), ("fsdp",))


@deprecated
@compiler
def test_compiled_for_an_h100_memory_is_that_of_the_results():
    """Experts as many and as wide as those of Qwen3-30B-A3B."""
    p, e, d, f = 65536, 128, 2048, 768
    mesh = h100(1)
    placed = jax.sharding.NamedSharding(mesh, P())
    x, kernel, g = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=placed) for s in ((p, d), (e, d, f), (p, f)))
    sizes = jax.ShapeDtypeStruct((e,), jnp.int32, sharding=placed)
    both = jax.jit(jax.shard_map(partial(results, product), mesh=mesh, in_specs=P(), out_specs=P()))
    memory: Any = both.trace(x, kernel, g, sizes).lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**20
    assert memory.output_size_in_bytes < 1.001 * 2 * (p * f + p * d + e * d * f)


@deprecated
@compiler
@pytest.mark.parametrize(("d", "dtype"), [(16, jnp.bfloat16), (100, jnp.bfloat16), (72, jnp.float32)])
def test_compiled_for_two_h100s(d: int, dtype: Any):
    """Widths of an adapter and such as no tile divides: twice the rows take twice the memory."""
    short, long = (
        on_cuda(product, h100(2), p, 8, d, dtype).compile().memory_analysis().temp_size_in_bytes for p in (8192, 16384)
    )
    assert long < 2.1 * short
