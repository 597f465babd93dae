"""Staged weights: whole safetensors files in two slots, and who removes them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from serving_bridge.stage import DTYPES, SHARED_MEMORY, Stage, Tensor, remove_abandoned
from serving_bridge.weights import WeightError

TENSORS = (Tensor("embed", "BF16", (3, 4)), Tensor("layers.0.up", "F32", (2, 5)), Tensor("layers.0.scale", "BF16", ()))


def arrays(tensors, seed=0):
    """Random bits, so that a byte out of place shows; some of them are not numbers."""
    draw = np.random.default_rng(seed)
    for tensor in tensors:
        found = np.frombuffer(draw.bytes(tensor.nbytes), DTYPES[tensor.dtype])
        yield tensor.name, found.reshape(tensor.shape)


def read(path):
    """What the safetensors package makes of a file, its values as bytes: `{name: (dtype, shape, bytes)}`."""
    with safe_open(path, "np") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        assert file.metadata() == {"format": "pt"}
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in found.items()}


def described(pairs):
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in pairs}


@pytest.fixture
def stage(tmp_path):
    found = Stage(TENSORS, tmp_path)
    yield found
    found.close()


NAMES = st.text('abc.é"\\ 0', min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(NAMES, st.sampled_from(["BF16", "F32"]), SHAPES), max_size=6, unique_by=lambda each: each[0]))
def test_the_safetensors_package_reads_what_was_written(tmp_path_factory, described_tensors):
    """Bit for bit what the package writes itself and reads back, in the order that was announced."""
    folder = tmp_path_factory.mktemp("stage")
    tensors = [Tensor(*each) for each in described_tensors]
    stage = Stage(tensors, folder)
    try:
        staged = stage.write(7, arrays(tensors))
        assert read(staged.path) == described(arrays(tensors))
        save_file(dict(arrays(tensors)), folder / "theirs", {"format": "pt"})
        assert read(staged.path) == read(folder / "theirs")
        assert staged.nbytes == sum(tensor.nbytes for tensor in tensors)
        assert staged.path.stat().st_size % 64 == staged.nbytes % 64  # tensors begin at a multiple of 64
        data = staged.path.read_bytes()
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert [name for name in head if name != "__metadata__"] == [tensor.name for tensor in tensors] == list(staged.names)
    finally:
        stage.close()


def test_arrays_in_any_order_and_layout(stage):
    """A transposed view, a slice and a reversed order give the same bytes as copies in order."""
    turned = [(name, x.copy("F")) for name, x in arrays(TENSORS)][::-1]
    assert read(stage.write(0, turned).path) == described(arrays(TENSORS))


def test_two_slots_take_turns(stage):
    """The version before stays readable while the next is written; the one before that is written over, in place."""
    first = stage.write(4, arrays(TENSORS, 4))
    assert stage.overwritten(5) is None
    second = stage.write(5, arrays(TENSORS, 5))
    assert first.path.parent != second.path.parent
    assert read(first.path) == described(arrays(TENSORS, 4))
    assert stage.overwritten(6) == first
    inode = first.path.stat().st_ino
    third = stage.write(6, arrays(TENSORS, 6))
    assert (third.path, third.path.stat().st_ino) == (first.path, inode)
    assert (read(second.path), read(third.path)) == (described(arrays(TENSORS, 5)), described(arrays(TENSORS, 6)))
    assert len({each.id for each in (first, second, third)}) == 3


def test_ids_of_two_stages_never_meet(tmp_path):
    """A server that another run published to must not be taken to have our weights."""
    stages = [Stage(TENSORS, tmp_path) for _ in range(20)]
    try:
        assert len({stage.write(0, arrays(TENSORS)).id for stage in stages}) == 20
    finally:
        for stage in stages:
            stage.close()


def test_a_peft_folder(tmp_path):
    """An adapter's file has PEFT's name, and its config lies beside it in both slots."""
    stage = Stage(TENSORS, tmp_path, file="adapter_model.safetensors", beside={"adapter_config.json": '{"r": 4}'})
    try:
        for version in (0, 1):
            folder = stage.write(version, arrays(TENSORS, version)).path.parent
            assert load_file(folder / "adapter_model.safetensors").keys() == {tensor.name for tensor in TENSORS}
            assert json.loads((folder / "adapter_config.json").read_text()) == {"r": 4}
    finally:
        stage.close()


def other(name, change):
    return [(key, change(x) if key == name else x) for key, x in arrays(TENSORS)]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (other("embed", lambda x: x.T), r"embed bfloat16 \(4, 3\) was not announced so .*shape=\(3, 4\)"),
        (other("embed", lambda x: x.view(np.float16)), r"embed float16 \(3, 4\) was not announced so .*'BF16'"),
        (other("layers.0.up", lambda x: x.astype(">f4")), r"layers.0.up >f4 \(2, 5\) was not announced"),
        (other("layers.0.scale", lambda x: x[None]), r"layers.0.scale bfloat16 \(1,\) was not announced so"),
        ([*arrays(TENSORS), ("head", np.zeros(2, np.float32))], r"head float32 \(2,\) was not announced so \(None\)"),
        ([*arrays(TENSORS), *arrays(TENSORS[:1])], r"embed bfloat16 \(3, 4\) was not announced so \(None\)"),
        (list(arrays(TENSORS))[:2], "1 tensors were not written, the first layers.0.scale"),
        ([], "3 tensors were not written, the first embed"),
    ],
)
def test_what_was_not_announced_is_refused(stage, pairs, message):
    with pytest.raises(WeightError, match=message):
        stage.write(0, pairs)
    assert stage.overwritten(2) is None  # no such version
    assert read(stage.write(0, arrays(TENSORS)).path) == described(arrays(TENSORS))


def test_a_name_that_is_announced_twice_is_refused(tmp_path):
    with pytest.raises(WeightError, match="staged twice"):
        Stage([*TENSORS, TENSORS[0]], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_short_is_an_error_and_not_a_signal():
    """Without it the first write beyond the end would be a SIGBUS. The stage is usable, or can be closed, afterwards."""
    whole = os.statvfs(SHARED_MEMORY)
    stage = Stage([Tensor("x", "F32", (whole.f_blocks * whole.f_frsize // 4 + 1,))])
    try:
        assert stage.folder.parent == SHARED_MEMORY
        for _ in range(2):
            with pytest.raises(OSError, match=r"weights do not fit there .No space left on device.*0/model.safetensors"):
                stage.write(0, [])
        assert sum(path.stat().st_blocks for path in stage.folder.rglob("*")) == 0
    finally:
        stage.close()


def test_closing_removes_the_files_and_keeps_what_is_mapped(tmp_path):
    stage = Stage(TENSORS, tmp_path)
    staged = stage.write(0, arrays(TENSORS))
    whole = staged.path.read_bytes()
    mapped = np.memmap(staged.path, np.uint8, "r")
    for _ in range(2):
        stage.close()
        assert list(tmp_path.iterdir()) == []
    assert mapped.tobytes() == whole
    with pytest.raises(ValueError, match="is closed"):
        stage.write(2, arrays(TENSORS))
    assert list(tmp_path.iterdir()) == []
    assert f"{tmp_path}" in Path("/proc/self/maps").read_text()
    del mapped
    assert f"{tmp_path}" not in Path("/proc/self/maps").read_text()  # the memory is given back


def test_nobody_else_may_look(stage):
    """Weights may be secret, and /dev/shm is everybody's."""
    staged = stage.write(0, arrays(TENSORS))
    modes = {path: path.stat().st_mode & 0o077 for path in (stage.folder, staged.path.parent, staged.path)}
    assert set(modes.values()) == {0}


HOLD = """
import sys, time, numpy as np
from serving_bridge.stage import Stage, Tensor
stage = Stage([Tensor("x", "F32", (1000,))], __import__("pathlib").Path(sys.argv[1]))
stage.write(0, [("x", np.ones(1000, np.float32))])
print(stage.folder, flush=True)
time.sleep(60)
"""


def test_stages_of_killed_processes_are_removed_and_live_ones_are_not(tmp_path):
    """A SIGKILLed trainer leaves twice the model in memory; the next one that starts takes it away."""
    (tmp_path / "gspo-of-somebody-else").mkdir()
    (tmp_path / "gspo-file").write_text("")
    (tmp_path / "gspo-link").symlink_to(tmp_path / "gspo-of-somebody-else")
    strange = set(tmp_path.iterdir())
    commands = [sys.executable, "-c", HOLD, str(tmp_path)]
    children = [subprocess.Popen(commands, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) for _ in range(2)]
    try:
        folders = [Path(child.stdout.readline().strip()) for child in children]
        ours = Stage(TENSORS, tmp_path)
        assert all(folder.exists() for folder in folders)
        children[0].send_signal(signal.SIGKILL)
        children[0].wait()
        assert folders[0].exists()
        another = Stage(TENSORS, tmp_path)
        assert [folder.exists() for folder in folders] == [False, True]
        assert ours.folder.exists()
        remove_abandoned(tmp_path)
        assert ours.folder.exists()
        assert another.folder.exists()
        ours.close()
        another.close()
    finally:
        for child in children:
            child.kill()
            child.communicate()
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == strange


def test_bfloat16_is_numpys_with_the_package(stage):
    """The dtype under test is the one that safetensors gives back, not two bytes that happen to fit."""
    assert load_file(stage.write(0, arrays(TENSORS)).path)["embed"].dtype == ml_dtypes.bfloat16
