"""Programs as text: which instructions run how often, what is sent along which axis, what is allocated and moved."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax.mesh import MeshShape, make_mesh
from gspo_jax.plan.collectives import Stored, collectives, groups_of, least_bytes, rate, seconds
from gspo_jax.plan.hlo import parse, parts_of, shape_bytes
from gspo_jax.plan.targets import GPUS
from gspo_jax.plan.traffic import memory_bytes, temporaries

MESH = MeshShape(1, 2, 4, 1)
WRITTEN = """HloModule jit_f, is_scheduled=true

FileNames
1 "/x/site-packages/jax/y.py"
2 "/x/gspo_jax/models/layers.py"

FunctionNames
1 "g"
2 "Linear.__call__"

FileLocations
1 {file_name_id=2 function_name_id=2 line=130 end_line=130 column=3 end_column=3}
2 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=3 end_column=3}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%fused_write (p0: f32[10,4,8], p1: f32[4,8], p2: s32[]) -> f32[10,4,8] {
  %p0 = f32[10,4,8]{2,1,0} parameter(0)
  %p1 = f32[4,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %bits = f32[1,4,8]{2,1,0} bitcast(%p1)
  ROOT %dus = f32[10,4,8]{2,1,0} dynamic-update-slice(%p0, %bits, %p2, %p2, %p2)
}

%inner (c: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %c = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%c), index=1
  %ag = ((bf16[4,8]{1,0}), bf16[8,8]{1,0}) all-gather-start(%x), replica_groups=mesh['replica'=1,'fsdp'=2,'tensor'=4,'sequence'=1] {'fsdp','sequence'}, dimensions={0}, metadata={op_name="a" stack_frame_id=2}
  %done = bf16[8,8]{1,0} all-gather-done(%ag)
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%x, %x)
}

%chunk (c2: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %c2 = (s32[], f32[4,8]{1,0}) parameter(0)
  %y = f32[4,8]{1,0} get-tuple-element(%c2), index=1
  %ar = f32[4,8]{1,0} all-reduce(%y), replica_groups=[2,4]<=[8], to_apply=%sum
  ROOT %out2 = (s32[], f32[4,8]{1,0}) tuple(%y, %ar)
}

%condition (d: (s32[], f32[4,8])) -> pred[] {
  %d = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%micro (c3: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %c3 = (s32[], f32[4,8]{1,0}) parameter(0)
  %z = f32[4,8]{1,0} get-tuple-element(%c3), index=1
  %rs = f32[2,8]{1,0} reduce-scatter(%z), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, to_apply=%sum
  %layers = (s32[], /*index=1*/bf16[4,8]{1,0}) while(%c3), condition=%condition, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %chunks = (s32[], f32[4,8]{1,0}) while(%c3), condition=%condition, body=%chunk
  ROOT %out3 = (s32[], f32[4,8]{1,0}) tuple(%z, %z)
}

ENTRY %main (p: f32[4,8], q: f32[10,4,8], i: s32[]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[10,4,8]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %t = (s32[], f32[4,8]{1,0}) tuple(%i, %p)
  %loop = (s32[], f32[4,8]{1,0}) while(%t), condition=%condition, body=%micro
  %written = f32[10,4,8]{2,1,0} fusion(%q, %p, %i), kind=kLoop, calls=%fused_write
  ROOT %r = f32[4,8]{1,0} copy(%p), metadata={source_file="/x/gspo_jax/learner.py" source_line=9}
}
"""  # noqa: E501


def test_known_and_told_trip_counts_multiply():
    """5 layers in each of 3 micro-batches; 7 chunks in each, told second."""
    found = {(each.kind, each.axes): (each.times, each.bytes) for each in collectives(parse(WRITTEN), MESH, (3, 7))}
    assert found == {
        ("all-gather", ("fsdp",)): (15, 15 * 8 * 8 * 2),
        ("all-reduce", ("tensor",)): (21, 21 * 4 * 8 * 4),
        ("reduce-scatter", ("fsdp",)): (3, 3 * 2 * (2 * 8 * 4)),
    }


def test_a_loop_of_unknown_length_counts_once_unless_told():
    assert {each.kind: each.times for each in collectives(parse(WRITTEN), MESH, ())} == {
        "all-gather": 5, "all-reduce": 1, "reduce-scatter": 1,
    }  # fmt: skip


def test_source_lines_are_the_innermost_of_this_package():
    module = parse(WRITTEN)
    by_name = {each.name: each for body in module.computations.values() for each in body}
    assert module.line(by_name["ag"]) == "models/layers.py:130 __call__"
    assert module.line(by_name["r"]) == "learner.py:9"
    assert module.line(by_name["t"]) == ""


def test_memory_moved_counts_slices_as_slices():
    """The copy moves 128 bytes twice, the update in place reads 128 and 4 and writes 128; collectives read and write theirs."""
    gather, chunk, scatter = 64 + (64 + 128), 2 * 128, 128 + 64
    assert memory_bytes(parse(WRITTEN), (3, 7)) == 2 * 128 + (2 * 128 + 4) + 3 * (5 * gather + 7 * chunk + scatter)


def test_temporaries_leave_out_views_and_updates_in_place():
    found = {each.line: each.bytes for each in temporaries(parse(WRITTEN))}
    assert found == {"models/layers.py:130 __call__": 128, "learner.py:9": 128, "(compiler)": 128}


def test_shapes_and_their_bytes():
    assert shape_bytes("(s4[6]{0}, pred[3]{0}, f8e4m3fn[2]{0}, bf16[]{:T(256)}, token[])") == 3 + 3 + 2 + 2
    assert parts_of("(f32[2,3]{1,0}, (s32[], /*index=2*/u8[4]{0}))") == ["f32[2,3]{1,0}", "(s32[], u8[4]{0})"]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", (("fsdp",), 2)),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", (("tensor",), 4)),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ((), 2)),
        ("replica_groups={}", (("fsdp", "tensor"), 8)),
        ("replica_groups=[1,8]<=[8]", (("fsdp", "tensor"), 8)),
    ],
)
def test_groups_of_devices_are_axes(groups, expected):
    text = WRITTEN.replace("replica_groups=[2,4]<=[8]", groups)
    found = next(each for each in parse(text).computations["chunk"] if each.opcode == "all-reduce")
    assert groups_of(found, MESH) == expected


def test_a_compiled_scan_sends_what_its_source_says():
    """Six times: a gather of 8 x 16 float32 over fsdp, and a sum of 4 x 16 over tensor; once a sum over both."""
    mesh = make_mesh(MESH, jax.devices("cpu")[:8])

    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("fsdp", "tensor"), out_specs=PartitionSpec("fsdp", "tensor"))
    def local(x):
        def body(carry, _):
            whole = jax.lax.all_gather(carry, "fsdp", axis=0, tiled=True)
            half = jnp.tanh(whole[:4] + whole[4:])
            return carry + jnp.sin(jax.lax.psum(half, "tensor")), None

        x = jax.lax.scan(body, x, None, length=6)[0]
        return x * jax.lax.psum(x.sum(), ("fsdp", "tensor"))

    spec = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    text = jax.jit(local).lower(jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=spec)).compile().as_text()
    found = {(each.kind, each.axes): (each.times, each.bytes) for each in collectives(parse(text), MESH, ())}
    assert found[("all-gather", ("fsdp",))] == (6, 6 * 8 * 16 * 4)
    assert found[("all-reduce", ("tensor",))] == (6, 6 * 4 * 16 * 4)
    assert found[("all-reduce", ("fsdp", "tensor"))] == (1, 4)
    assert len(found) == 3


def test_links_are_fast_inside_a_node_only():
    gpu = GPUS["h100"]
    assert rate(("fsdp",), MeshShape(fsdp=8), gpu) == gpu.link
    assert rate(("fsdp",), MeshShape(fsdp=16), gpu) == 8 * gpu.network
    assert rate(("tensor",), MeshShape(fsdp=2, tensor=8), gpu) == gpu.link
    assert rate(("fsdp",), MeshShape(fsdp=2, tensor=8), gpu) == gpu.network
    gather = next(each for each in collectives(parse(WRITTEN), MESH, (3, 7)) if each.kind == "all-gather")
    assert seconds(gather, MESH, gpu) == pytest.approx(gather.bytes / 2 / gpu.link)


def test_the_least_bytes_by_hand():
    """4 devices store, 2 split; 3 micro-batches are trained on and 2 scored."""
    found = least_bytes(Stored(100.0, 10.0, 60.0), 7.0, MeshShape(2, 4, 2, 1), micro=3, scored=2, layers=5)
    assert found == {
        "gather": pytest.approx(3 / 4 * (100 * 8 + 10 * 5)),
        "scatter": pytest.approx(3 / 4 * 60 * 3),
        "tensor": pytest.approx(1 * 7 * 5 * 16),
        "replica": pytest.approx(60 / 4 * 3),
    }


def test_kernels_of_this_package_are_counted_by_line():
    """Pallas kernels are custom calls of the GPU compiler; those of libraries have other targets."""
    own = 'custom_call_target="__gpu$xla.gpu.triton", metadata={source_file="/a/gspo_jax/models/flash.py" source_line=7}'
    module = parse(
        "HloModule m\n\nENTRY %main (p: f32[4]) -> f32[4] {\n"
        "  %p = f32[4]{0} parameter(0)\n"
        f"  %a = f32[4]{{0}} custom-call(%p), {own}\n"
        f"  %b = f32[4]{{0}} custom-call(%a), {own}\n"
        '  ROOT %c = f32[4]{0} custom-call(%b), custom_call_target="__cublas$gemm"\n}\n'
    )
    assert module.kernels() == {"models/flash.py:7": 2}
