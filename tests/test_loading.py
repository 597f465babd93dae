"""Weights that go from their files onto a mesh: the same bits, no byte read that no device keeps, and no second copy."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers_families import DATA
from helpers_model import on
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.adapters import kernel_axes, kernel_rows
from gspo_jax.mesh import MeshShape, make_mesh
from gspo_jax.models.quantize import quantize
from gspo_jax.policy import Policy, compute_leaf, describe_policy, load_params, load_policy
from gspo_jax.start import keep_placed, load_frozen
from serving_bridge.convert import StoredLeaf, open_weights, place, save_folder
from serving_bridge.shards import Shards
from serving_bridge.trees import get, leaves, put
from serving_bridge.weights import Weight, leaf_shape

SHAPES = [(1, 1, 1, 1), (1, 2, 1, 1), (2, 2, 2, 1), (1, 3, 1, 1), (1, 2, 2, 2), (1, 1, 4, 1)]
FAMILIES = ("llama", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "gemma3")


def same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_loads_onto_a_mesh_as_onto_one_device(name: str, shape: tuple):
    policy, whole = load_policy(DATA / name)
    layout = on(MeshShape(*shape), policy)
    found = load_params(policy, policy.folder, keep_placed(layout))
    same_bits(found, whole)
    if layout.mesh is not None:
        for path, leaf in leaves(found):
            assert leaf.sharding == NamedSharding(layout.mesh, layout.spec(path)), path


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Two layers in bfloat16, whose widths give quantized kernels several tiles."""
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((DATA / "llama" / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))
    policy = describe_policy(folder, compute_dtype="bfloat16", remat="none")
    params, rng, sizes = {}, np.random.default_rng(0), policy.config.sizes()
    for row in policy.table:
        put(params, row.path, rng.standard_normal(leaf_shape(row, sizes)).astype(ml_dtypes.bfloat16))
    save_folder(folder / "out", params, policy.table, sizes, source_folder=folder, max_shard_bytes=200_000)
    return describe_policy(folder / "out", compute_dtype="bfloat16", remat="none")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("qtype", [None, "nf4", "int8"])
def test_frozen_weights_are_placed_as_they_are_kept(stored: Policy, qtype: str | None, shape: tuple):
    """In the compute type or quantized, the bits of one device: scales are those of whole tiles wherever a kernel is cut."""
    layout = on(MeshShape(*shape), stored)
    found = load_frozen(stored, qtype, layout)
    same_bits(found, load_frozen(stored, qtype))
    for path, leaf in leaves(found):
        for x in jax.tree.leaves(leaf):
            assert layout.mesh is None or x.sharding == NamedSharding(layout.mesh, layout.spec(path, leaf)), path


def test_frozen_weights_are_those_rounded_after_loading(stored: Policy):
    """Read as bfloat16 at once, they are what float32 parameters become."""
    _, whole = load_policy(stored.folder)
    for path, leaf in leaves(load_frozen(stored, None)):
        expected = compute_leaf(path, get(whole, path), jnp.bfloat16)
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize("qtype", ["nf4", "int8"])
def test_kernels_quantized_a_layer_at_a_time_are_those_quantized_at_once(stored: Policy, qtype: str):
    _, whole = load_policy(stored.folder)
    found = load_frozen(stored, qtype)
    for row in kernel_rows(stored.table):
        stack, inputs = kernel_axes(row)
        same_bits(get(found, row.path), quantize(get(whole, row.path), inputs, stack, qtype, jnp.bfloat16))


class Counting(Shards):
    """Counts the bytes that are read."""

    count = 0

    def read(self, name: str, window: tuple[slice, ...] = ()) -> np.ndarray:
        found = super().read(name, window)
        self.count += found.nbytes
        return found


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (1, 1, 4, 1), (1, 2, 2, 1), (2, 2, 2, 1)])
def test_a_device_reads_only_what_it_keeps(stored: Policy, shape: tuple):
    """Of every leaf the bytes of all distinct parts, each once: nothing of what other processes keep, nothing twice."""
    layout = on(MeshShape(*shape), stored)
    assert layout.mesh is not None
    for row in stored.table:
        tensors = Counting(stored.folder)
        leaf = StoredLeaf(tensors, row, stored.config.sizes(), np.dtype(ml_dtypes.bfloat16))
        placed = place(leaf, NamedSharding(layout.mesh, layout.spec(row.path)))
        assert tensors.count == placed.nbytes, row.path
        first = placed.addressable_shards[0]
        tensors.count = 0
        assert leaf.read(first.index).tobytes() == np.asarray(first.data).tobytes()
        assert tensors.count == first.data.nbytes, row.path


PROCESS = """
import sys
from pathlib import Path
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=60)
import numpy as np
from gspo_jax.mesh import MeshShape, make_mesh
from gspo_jax.policy import describe_policy, load_policy
from gspo_jax.start import load_frozen, start_layout
from serving_bridge.shards import Shards
from serving_bridge.trees import leaves, get
count, read = 0, Shards.read
def counting(self, *args):
    global count
    found = read(self, *args)
    count += found.nbytes
    return found
policy = describe_policy(Path(sys.argv[3]), compute_dtype="bfloat16", remat="none")
whole, quantized = load_frozen(policy, None), load_frozen(policy, "nf4")
layout = start_layout(make_mesh(MeshShape(fsdp=4)), policy, None)
Shards.read = counting
found = load_frozen(policy, None, layout)
kept = sum(shard.data.nbytes for x in jax.tree.leaves(found) for shard in x.addressable_shards if shard.data.shape != x.shape)
kept += sum(x.nbytes // (2 if x.dtype == np.float32 else 1) for x in jax.tree.leaves(found) if x.is_fully_replicated)
mine = count
assert mine == kept, (mine, kept)
for a, b in ((found, whole), (load_frozen(policy, "nf4", layout), quantized)):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert not x.is_fully_addressable
        assert len(x.addressable_shards) == 2
        for shard in x.addressable_shards:
            assert np.array_equal(shard.data, np.asarray(y)[shard.index])
print(mine)
"""


def test_of_several_processes_each_reads_its_own(stored: Policy):
    """Two processes of two devices: each half of what is split, all of what is whole everywhere."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    words = [[sys.executable, "-c", PROCESS, address, str(i), str(stored.folder)] for i in range(2)]
    children = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) for each in words]
    try:
        ends = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], [err[-1500:] for _, err in ends]
    tensors = Shards(stored.folder)
    everything = sum(2 * int(np.prod(tensors.shapes[name])) for name in tensors.names)
    assert [int(out) / everything for out, _ in ends] == [pytest.approx(0.5, rel=0.02)] * 2


def test_what_is_no_single_piece_of_a_tensor_is_cut_after_reading(tmp_path: Path):
    """Eight heads' last axis: the inner one of a joint axis; and one part of a tensor that two leaves share."""
    sizes = {"l": 2, "d": 4, "n": 2, "h": 8, "c": 2}
    query, gate = Weight("q", "{l}.q", "(n h) d -> d n h"), Weight("g", "{l}.g", "(c h) d -> d h", None, ("c", 1))
    other = Weight("o", "{l}.g", "(c h) d -> d h", None, ("c", 0))
    params = {row.path: np.random.default_rng(0).standard_normal(leaf_shape(row, sizes)) for row in (query, gate, other)}
    (tmp_path / "config.json").write_text("{}")
    save_folder(tmp_path / "out", params, [query, other, gate], sizes, source_folder=tmp_path, dtype="float32")
    tensors = Counting(tmp_path / "out")
    for row, index, count in (
        (query, (slice(None), slice(1, 3), slice(None), slice(2, 4)), 2 * 16 * 2),
        (gate, (slice(1, 2), slice(None), slice(4, 8)), 4 * 4),
        (gate, (slice(0, 1), slice(0, 1)), 8),
    ):
        tensors.count = 0
        found = StoredLeaf(tensors, row, sizes).read(index)
        np.testing.assert_array_equal(found, params[row.path].astype(np.float32)[index])
        assert tensors.count == 4 * count


MEMORY = """
import json, sys
from pathlib import Path
import jax
from gspo_jax.mesh import MeshShape, make_mesh
from gspo_jax.policy import describe_policy, load_params
from gspo_jax.start import keep_placed, load_frozen, start_layout

def load(folder, mode):
    policy = describe_policy(Path(folder), compute_dtype="bfloat16", remat="none")
    layout = start_layout(make_mesh(MeshShape(fsdp=4)) if jax.device_count() > 1 else None, policy, None)
    found = load_params(policy, policy.folder, keep_placed(layout)) if mode == "full" else load_frozen(policy, None, layout)
    return jax.block_until_ready(found)

def resident(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) * 1024

large, small, mode = sys.argv[1:]
load(small, mode)
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
found = load(large, mode)
kept = sum(shard.data.nbytes for x in jax.tree.leaves(found) for shard in x.addressable_shards)
print(resident("VmHWM") - before, kept)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """133 MB in bfloat16 in files of 20 MB, most of it in three leaves of twelve layers."""
    folder = tmp_path_factory.mktemp("large")
    config = json.loads((DATA / "llama" / "config.json").read_text()) | {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    policy = describe_policy(folder, compute_dtype="bfloat16", remat="none")
    params, sizes = {}, policy.config.sizes()
    for row in policy.table:
        put(params, row.path, np.ones(leaf_shape(row, sizes), ml_dtypes.bfloat16))
    return save_folder(folder / "out", params, policy.table, sizes, source_folder=folder, max_shard_bytes=20_000_000)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_loading_takes_the_result_and_a_file(large: Path, mode: str, devices: int):
    """Resident memory of a process, mapped files included. Before, a frozen leaf was in float32 first, whole and in parts."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(large), str(DATA / "llama"), mode], capture_output=True, text=True, timeout=120,
        check=False, env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    grown, kept = map(int, done.stdout.split())
    numbers = 12 * (4 * 768 * 256 + 3 * 768 * 2048) + 512 * 768
    assert kept == pytest.approx((4 if mode == "full" else 2) * numbers, rel=0.01)
    assert 0.9 * kept < grown < 1.3 * (kept + max(file.stat().st_size for file in large.glob("*.safetensors")))


def test_parts_that_devices_share_survive_donation():
    """On the CPU replicas are one piece of host memory until one of them is written to."""
    policy = describe_policy(DATA / "llama", compute_dtype="float32", remat="none")
    leaf = open_weights(policy.folder, policy.table, policy.config.sizes())["embedding"]
    before = leaf.read()
    placed = place(leaf, NamedSharding(make_mesh(MeshShape(replica=4)), PartitionSpec()))
    more = jax.jit(lambda x: x + 1, donate_argnums=0)(placed)
    assert placed.is_deleted()
    for shard in more.addressable_shards:
        np.testing.assert_array_equal(shard.data, before + 1)
