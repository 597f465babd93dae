"""The binding of NCCL and the CUDA runtime: its arguments as C sees them, and where the libraries are found."""

import base64
import ctypes
import ctypes.util
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from nccl_fakes import FakeArray

from serving_bridge import nccl_library
from serving_bridge.nccl import NcclSender
from serving_bridge.nccl_library import Library, NcclError, NcclMissing

SOURCE = Path(__file__).parent / "data/nccl_stub.c"
DEADLINE_S = 20.0


def send(sender, *sizes):
    """Tensors of so many bytes, through a sender."""
    tensors = [(str(i), "uint8", (size,)) for i, size in enumerate(sizes)]
    sender.update_info(tensors)
    groups = [[(name, np.zeros(shape, np.uint8)) for name, _, shape in chunk] for chunk in sender.plan]
    sender.send(groups, DEADLINE_S)


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """NCCL and the CUDA runtime as a C library that writes down what it is called with."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    file = tmp_path_factory.mktemp("stub") / "libstub.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", file, SOURCE], check=True, timeout=60)
    return file


def calls_of(stub):
    log = ctypes.CDLL(str(stub)).stub_log
    log.restype = ctypes.c_char_p
    return log().decode().splitlines()


@pytest.fixture
def through_c(stub):
    """A sender whose calls end in C, connected, and its unique id."""
    ctypes.CDLL(str(stub)).stub_clear()
    sender = NcclSender(lambda arrays: FakeArray(np.concatenate(arrays)), library=Library(stub, stub), device=3, buffer_bytes=6)
    unique_id = base64.b64decode(sender.init_info(4)["nccl_unique_id_b64"])
    sender.connect(DEADLINE_S)
    return sender, unique_id


def test_arguments_as_c_sees_them(stub, through_c):
    """The unique id by value with what stands behind it, 64-bit handles, NCCL's numbers for uint8, float32 and sum."""
    sender, unique_id = through_c
    assert unique_id == bytes((255 - 2 * i) % 256 for i in range(128))
    send(sender, 4, 3, 5)
    sender.close()
    one, two = (f"{0xFEDCBA9876540000 + 16 + i:x}" for i in range(2))  # of flag 1: does not wait for other streams
    assert calls_of(stub) == [
        "init ranks=5 id=128/128 rank=0 size=24 magic=cafebeef version=21400 blocking=0",
        f"all_reduce in_place=1 count=1 type=7 last=0 stream={one}",
        f"broadcast in_place=1 count=7 type=1 last=0 stream={one}",
        f"broadcast in_place=1 count=5 type=1 last=0 stream={two}",
        "abort 1",
        f"destroy {one}",
        f"destroy {two}",
        "free",
    ]


def test_the_communicators_own_words_come_up(stub, through_c, monkeypatch):
    monkeypatch.setenv("STUB_FAIL", "1")
    sender, _ = through_c
    with pytest.raises(NcclError, match="NCCL communicator: remote process exited: last words"):
        send(sender, 4)
    assert "abort 1" in calls_of(stub)


def test_libraries_are_named_by_path_or_environment_and_missed_with_advice(stub, tmp_path, monkeypatch):
    monkeypatch.setenv("GSPO_NCCL_LIBRARY", str(stub))
    monkeypatch.setenv("GSPO_CUDART_LIBRARY", str(stub))
    library = Library()
    assert library.version == 22907
    with pytest.raises(NcclError, match=r"cudaSetDevice: invalid device ordinal \(101\)"):
        library.set_device(0)
    assert library.device_of(8) == 3
    assert library.device_of(0) is None
    with pytest.raises(NcclMissing, match=r"no NCCL library \(.*none.so.*\). Install 'jax\[cuda12\]'.* GSPO_NCCL_LIBRARY"):
        Library(tmp_path / "none.so")
    with pytest.raises(NcclMissing, match=r"no CUDA runtime library .* GSPO_CUDART_LIBRARY"):
        Library(cudart=tmp_path / "none.so")
    with pytest.raises(NcclMissing, match=r"has no ncclGetVersion: NCCL 2\.14"):
        Library(ctypes.util.find_library("c") or "libc.so.6")


def test_libraries_are_found_in_the_wheels_of_jax(stub, tmp_path, monkeypatch):
    for place in ("nvidia/nccl/lib/libnccl.so.2", "nvidia/cu13/lib/libcudart.so.13"):
        (tmp_path / place).parent.mkdir(parents=True)
        shutil.copy(stub, tmp_path / place)
    monkeypatch.syspath_prepend(tmp_path)
    for name in nccl_library.VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    assert Library().version == 22907


def test_the_real_nccl_mints_ids_without_a_gpu():
    spec = importlib.util.find_spec("nvidia")
    if not spec or not any(Path(folder).glob("nccl/lib/libnccl.so.2") for folder in spec.submodule_search_locations or ()):
        pytest.skip("the wheel nvidia-nccl-cu12 or -cu13 is not installed")
    library = Library()
    ids = {library.unique_id() for _ in range(5)}
    assert {len(unique_id) for unique_id in ids} == {nccl_library.UNIQUE_ID_BYTES}
    assert len(ids) == 5
