"""Flash attention: what `attend` computes with the mask written out, by kernels that never write it."""

import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from gspo_jax.models.flash import flash
from gspo_jax.models.flash_plan import Tile, mask_rows, plans
from gspo_jax.models.layers import Spots, attend, row_mask

SHARED = [(1, 70, 0), (2, 60, 1), (3, 50, 1), (4, 40, 0), (5, 50, 4)]
"""Segment, tokens, prefix: two prompts and what continues them. The rest of the row is padding."""
PACKED = [(1, 150, 0), (2, 30, 0), (3, 110, 0)]
SCALE = 0.3
FAR = 2**30
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def spots_of(length: int, *rows: list[tuple[int, int, int]]) -> Spots:
    """Rows of segments laid down one after the other; a continuation's positions follow its prefix."""
    positions, segments, prefixes = np.zeros((3, len(rows), length), np.int32)
    for r, row in enumerate(rows):
        at, sizes = 0, {0: 0} | {segment: size for segment, size, _ in row}
        for segment, size, prefix in row:
            here = (r, slice(at, at + size))
            segments[here], prefixes[here], positions[here] = segment, prefix, sizes[prefix] + np.arange(size)
            at += size
    return Spots(*map(jnp.asarray, (positions, segments, prefixes)))


def heads(spots: Spots, n: int = 4, k: int = 2, h: int = 16, dtype: Any = jnp.float32) -> list[Array]:
    """Random q, k, v and a gradient of the output."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((*spots.segments.shape, m, h)), dtype) for m in (n, k, k, n)]


def visible(spots: Spots, window: Array | int | None) -> Array:
    """The mask, written out."""
    mask = row_mask(spots)
    return mask if window is None else mask & (spots.positions[:, :, None] - spots.positions[:, None, :] < window)


def dense(q: Array, k: Array, v: Array, spots: Spots, scale: float, window: Array | None = None) -> Array:
    """`attend`, but zeros for a query that sees nothing."""
    mask = visible(spots, window)
    return jnp.where(mask.any(-1)[..., None, None], attend(q, k, v, mask, scale), 0)


interpreted = partial(flash, interpret=True)


@partial(jax.jit, static_argnums=0)
def results(f: Callable, given: list[Array], spots: Spots, window: Array | None = None) -> list[Array]:
    """Output and gradients of q, k, v, for `given` q, k, v and gradient of the output."""
    out, back = jax.vjp(lambda *heads: f(*heads, spots, SCALE, window), *given[:3])
    return [out, *back(given[3])]


def agree(given: list[Array], spots: Spots, window: int | None = None) -> None:
    """Values and gradients are those of `attend`, to 1e-5 of the largest."""
    limit = None if window is None else jnp.int32(window)
    for a, b in zip(results(interpreted, given, spots, limit), results(dense, given, spots, limit), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def test_wide_heads_without_prefixes():
    """Heads of 96, of which three share one key."""
    spots = spots_of(100, [(1, 40, 0), (2, 50, 1)])._replace(prefixes=None)
    agree(heads(spots, 3, 1, 96), spots)


def test_equals_attention_with_the_mask_written_out():
    """Packed rows, shared prefixes, padding, groups of two query heads; 300 is not a number of blocks."""
    spots = spots_of(300, SHARED, PACKED)
    agree(heads(spots), spots)
    agree(heads(spots), spots, 37)


def test_any_mask():
    """Segments, prefixes and positions in no order at all, in runs both of several blocks and of less than one."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        spots = Spots(*(jnp.asarray(rng.integers(0, top, (2, 30)).repeat(10, 1), jnp.int32) for top in (30, 2 + seed % 3, 4)))
        agree(heads(spots), spots, [FAR, 1, 10, 20, 25, FAR][seed])


def test_bfloat16_is_as_near_to_float32_as_attend_is():
    spots = spots_of(600, [(1, 300, 0), (2, 140, 1), (3, 150, 1)])
    given = heads(spots, 2, 1, 64, jnp.bfloat16)
    exact = results(dense, [x.astype(jnp.float32) for x in given], spots)
    for a, b, c in zip(results(interpreted, given, spots), results(dense, given, spots), exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert float(jnp.abs(a - c).max()) <= 2 * float(jnp.abs(b - c).max())


def test_a_query_that_sees_nothing_is_zero_and_has_no_gradient():
    """Padding, a row of nothing else, and a window of no positions, whatever the gradient of the output there."""
    spots = spots_of(300, PACKED, [])
    given = heads(spots)
    blind = spots.segments == 0
    for gradient in (given[3], given[3].at[blind].set(1e30)):
        out, dq, dk, dv = results(interpreted, [*given[:3], gradient], spots)
        assert out[~blind].all()
        assert not any(x[blind].any() for x in (out, dq, dk, dv))
        agree([*given[:3], gradient], spots)
    assert not any(x.any() for x in results(interpreted, given, spots, jnp.int32(0)))


def test_the_same_bits_again_and_wherever_a_row_lies():
    """Twice; with the rows exchanged; with more padding."""
    spots = spots_of(300, SHARED, PACKED)
    given = heads(spots)
    first, again = results(interpreted, given, spots), results(interpreted, given, spots)
    turned = results(interpreted, *jax.tree.map(lambda x: x[::-1], (given, spots)))
    pad = [jnp.pad(x, ((0, 0), (0, 200), *((0, 0),) * (x.ndim - 2))) for x in (*given, *(x for x in spots if x is not None))]
    longer = results(interpreted, pad[:4], Spots(*pad[4:]))
    for a, b, c, d in zip(first, again, turned, longer, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c[::-1])
        np.testing.assert_array_equal(a, d[:, :300])


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("tile", [Tile(128, 64, 4, 1), Tile(16, 32, 4, 1)])
def test_only_blocks_with_something_visible_are_visited(tile: Tile, window: int | None):
    """All of them, once; no others but where blocks are small, or a window cuts a prefix. The mask is left out only where all
    is visible."""
    spots = spots_of(1024, [(1, 500, 0), (2, 30, 0), (3, 420, 0)], [(1, 300, 0), (2, 260, 1), (3, 200, 1), (4, 140, 1)])
    pairs = np.asarray(visible(spots, window)).reshape(2, 1024 // tile.queries, tile.queries, -1, tile.keys)
    limit = None if window is None else jnp.int32(window)
    found = jax.jit(lambda spots: plans(mask_rows(spots, limit), tile))(spots)
    unmasked = 0
    for side, plan in enumerate(found):
        some, every = (x.swapaxes(1, 2) if side else x for x in (pairs.any((2, 4)), pairs.all((2, 4))))
        assert plan.shape[:2] == some.shape[:2]
        for row, i in np.ndindex(plan.shape[:2]):
            a, b, c, d, *runs = np.asarray(plan)[row, i].tolist()
            visits, wanted = [*range(a, b), *range(c, d)], np.flatnonzero(some[row, i]).tolist()
            assert len(set(visits)) == len(visits)
            assert set(visits) >= set(wanted)
            assert visits == wanted or tile.queries < 64 or (row == 1 and window is not None)
            whole = [*range(*runs[:2]), *range(*runs[2:])]
            assert every[row, i, whole].all()
            unmasked += len(whole)
    assert unmasked > 0


def sharded(f: Callable, mesh: Any) -> Any:
    """Loss and gradients of two rematerialised, scanned layers of attention with and without a window. Rows are split over one
    axis, query heads over another, and the single key-value head is the same on all of that."""

    def loss(q: Array, k: Array, v: Array, spots: Spots) -> Array:
        def layer(q: Array, window: Array) -> tuple[Array, None]:
            return q + f(q, k, v, spots, SCALE, window), None

        out, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), q, jnp.asarray([40, FAR]))
        return jax.lax.psum(jnp.sum(jnp.sin(out.astype(jnp.float32))), ("fsdp", "tensor"))

    specs = (P("fsdp", None, "tensor"), P("fsdp"), P("fsdp"), P("fsdp"))
    return jax.jit(jax.value_and_grad(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P()), (0, 1, 2)))


def written_out(q: Array, k: Array, v: Array, spots: Spots, scale: float, window: Array) -> Array:
    return attend(q, k, v, visible(spots, window), scale)


def chosen(q: Array, k: Array, v: Array, spots: Spots, scale: float, window: Array) -> Array:
    """`flash` on CUDA, elsewhere `attend`."""

    def either(f: Callable) -> Callable:
        return lambda q, k, v, spots, window: f(q, k, v, spots, scale, window)

    return jax.lax.platform_dependent(q, k, v, spots, window, cuda=either(flash), default=either(written_out))


AUTO = (jax.sharding.AxisType.Auto,) * 2


def test_in_shard_map():
    """Two devices by rows, two by heads: the loss and gradients of one device; where `attend` is chosen, its own bits."""
    spots = spots_of(200, [(1, 70, 0), (2, 60, 1), (3, 70, 1)], [(1, 90, 0), (2, 110, 0)])
    given = (*heads(spots, 4, 1)[:3], spots)
    one, four = (jax.make_mesh((n, n), ("fsdp", "tensor"), axis_types=AUTO) for n in (1, 2))
    expected, ours = sharded(written_out, one)(*given), sharded(interpreted, four)(*given)
    for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))
    for a, b in zip(*(jax.tree.leaves(sharded(f, four)(*given)) for f in (chosen, written_out)), strict=True):
        np.testing.assert_array_equal(a, b)


def on_cuda(f: Callable, mesh: Any, length: int, h: int, dtype: Any = jnp.bfloat16) -> Any:
    """`sharded`, lowered for CUDA."""
    placed = jax.sharding.NamedSharding(mesh, P())
    *given, spots = ((2, length, 4, h), (2, length, 1, h), (2, length, 1, h), (2, length))
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for shape in given]
    where = Spots(*[jax.ShapeDtypeStruct(spots, jnp.int32, sharding=placed)] * 3)  # pyright: ignore[reportArgumentType]
    return sharded(f, mesh).trace(*shapes, where).lower(lowering_platforms=("cuda",))


deprecated = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


@deprecated
@pytest.mark.parametrize("h", [64, 256])
def test_lowered_for_cuda_without_a_gpu(h: int):
    """One kernel forward, the same again before the two of the backward pass, none with atomics; where `flash` is chosen it is
    all there is, and it has no array of `t * t`."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"), AUTO, abstract_device=device)
    ours, picked, theirs = (on_cuda(f, mesh, 640, h).as_text() for f in (flash, chosen, written_out))
    for text in (ours, picked):
        assert sorted(re.findall(r'name = "(\w+_kernel)"', text)) == [*["forward_kernel"] * 2, "keys_kernel", "queries_kernel"]
        assert "atomic" not in text
    products = [re.findall(r"stablehlo.dot_general.*->.*640x640", text) for text in (ours, picked, theirs)]
    assert [bool(found) for found in products] == [False, False, True]
    assert "640x640" not in ours


@deprecated
@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="needs the CUDA compiler, jax[cuda12]; no GPU")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("h", [64, 96, 128, 256])
def test_compiled_for_an_h100_memory_is_linear(h: int, dtype: Any):
    """Kernels fit the registers and the shared memory; twice the tokens take twice the memory."""
    devices = topologies.get_topology_desc("h100", platform="cuda", topology="1x1x4", target_config=H100).devices
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("fsdp", "tensor"))
    short, long = (on_cuda(chosen, mesh, t, h, dtype).compile().memory_analysis().temp_size_in_bytes for t in (2048, 4096))
    assert long < 2.1 * short
