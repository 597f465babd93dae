"""The NCCL sender against a worker that transcribes vLLM's receiver, and against that receiver itself."""

import base64
import hashlib
import json
import subprocess
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_fakes import FakeArray, FakeLibrary
from nccl_worker import FakeWorker, itemsize

from serving_bridge.nccl import NcclSender
from serving_bridge.nccl_library import NcclError, NcclTimeout
from serving_bridge.nccl_plan import ITEMSIZES, chunks, nbytes

ROOT = Path(__file__).parent.parent
DEADLINE_S = 10.0

shapes = st.lists(st.integers(1, 12), max_size=3).map(tuple)
one_type = st.sampled_from(sorted(ITEMSIZES)).flatmap(
    lambda dtype: st.lists(st.tuples(st.just(dtype), shapes), min_size=1, max_size=12)
)


def named(tensors):
    return [(f"t{i}", *tensor) for i, tensor in enumerate(tensors)]


def contents(tensors, seed=0):
    """Random bytes for each tensor, as device arrays."""
    rng = np.random.default_rng(seed)
    return {tensor[0]: FakeArray(rng.integers(0, 256, nbytes(tensor), np.uint8)) for tensor in tensors}


def groups_of(sender, arrays):
    return ([(name, arrays[name]) for name, _, _ in chunk] for chunk in sender.plan)


def concatenate(arrays):
    return FakeArray(np.concatenate([array.memory for array in arrays]))


def library_of(sender) -> FakeLibrary:
    return sender._library


def events_of(sender) -> list[str]:
    return library_of(sender).events


OPEN = []
"""Senders and workers of the running test."""


@pytest.fixture(autouse=True)
def close_all():
    yield
    while OPEN:
        OPEN.pop().close()


def connected(buffer_bytes, *, pack=concatenate, before=lambda n: None, workers=1, **library):
    """A sender and its workers, joined."""
    sender = NcclSender(pack, library=FakeLibrary(**library), buffer_bytes=buffer_bytes)
    info = sender.init_info(workers)
    found = [FakeWorker(info, worker, before) for worker in range(workers)]
    OPEN.extend([*found, sender])  # closed from the end: the sender first, which wakes its workers
    sender.connect(DEADLINE_S)
    for worker in found:
        worker.result()
    return sender, found


def consumer_chunks(sizes, buffer_bytes):
    """Indices per broadcast, by vLLM's loop written down a second time, on sizes alone."""
    found, iterator = [], iter(enumerate(sizes))
    while True:
        chunk, total = [], 0
        try:
            while True:
                index, size = next(iterator)
                chunk.append(index)
                total += size
                if total > buffer_bytes:
                    break
            found.append(chunk)
        except StopIteration:
            if chunk:
                found.append(chunk)
            return found


@given(
    st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZES)), st.lists(st.integers(0, 9), max_size=3)), max_size=30),
    st.integers(1, 900),
)
def test_chunks_are_those_of_the_receivers_loop(tensors, buffer_bytes):
    tensors = named(tensors)
    sizes = [int(np.prod(shape, dtype=int)) * itemsize(dtype) for _, dtype, shape in tensors]
    expected = consumer_chunks(sizes, buffer_bytes)
    assert chunks(tensors, buffer_bytes) == [[tensors[i] for i in chunk] for chunk in expected]


def test_a_chunk_that_fills_the_buffer_exactly_takes_one_more():
    tensors = [(name, "bfloat16", (4,)) for name in "abcd"]  # 8 bytes each
    assert [len(chunk) for chunk in chunks(tensors, 16)] == [3, 1]
    assert [len(chunk) for chunk in chunks(tensors, 15)] == [2, 2]
    assert [len(chunk) for chunk in chunks(tensors, 1)] == [1, 1, 1, 1]


@settings(max_examples=40)
@given(one_type, st.integers(1, 700), st.integers(0, 2**32))
def test_tensors_arrive_bit_for_bit_in_the_receivers_own_chunks(tensors, buffer_bytes, seed):
    tensors = named(tensors)
    arrays = contents(tensors, seed)
    sender, [worker] = connected(buffer_bytes)
    worker.update(sender.update_info(tensors))
    assert sender.send(groups_of(sender, arrays), DEADLINE_S) == sum(map(nbytes, tensors))
    loads = worker.result()
    sender.close()
    worker.close()
    assert [[name for name, *_ in load] for load in loads] == [[name for name, *_ in chunk] for chunk in sender.plan]
    for (name, dtype, shape, data), tensor in zip([t for load in loads for t in load], tensors, strict=True):
        assert (name, dtype, tuple(shape)) == tensor
        assert data == arrays[name].memory.tobytes()
    sizes = [sum(map(nbytes, chunk)) for chunk in chunks(tensors, buffer_bytes)]
    assert worker.calls == ["all_reduce", *sizes]  # the warm-up first, and once
    assert events_of(sender).count("all_reduce") == 1


def test_several_updates_and_workers_share_one_communicator():
    tensors = [(f"w{i}", "bfloat16", (3, 50 + i)) for i in range(9)]
    sender, workers = connected(1000, workers=3)
    for seed in range(3):
        arrays = contents(tensors, seed)
        info = sender.update_info(tensors)
        for worker in workers:
            worker.update(info)
        sender.send(groups_of(sender, arrays), DEADLINE_S)
        for worker in workers:
            got = {name: data for load in worker.result() for name, _, _, data in load}
            assert got == {name: array.memory.tobytes() for name, array in arrays.items()}
    sender.close()
    assert [worker.sum for worker in workers] == [3.0] * 3  # 0 of rank 0 and 1 of each worker
    assert events_of(sender).count("all_reduce") == 1


def test_several_servers_get_their_ranks_in_one_communicator():
    sender = NcclSender(concatenate, library=FakeLibrary())
    infos = sender.init_infos([2, 1])
    assert [info["rank_offset"] for info in infos] == [1, 3]
    assert {(info["world_size"], info["nccl_unique_id_b64"]) for info in infos} == {(4, infos[0]["nccl_unique_id_b64"])}
    workers = [FakeWorker(infos[0], 0), FakeWorker(infos[0], 1), FakeWorker(infos[1], 0)]
    sender.connect(DEADLINE_S)
    for worker in workers:
        worker.result()
        worker.close()
    sender.close()


def test_init_info_is_what_vllm_reads():
    """Standard base64 (its receiver decodes with validate=True) of 128 bytes, and no field it does not know."""
    sender = NcclSender(concatenate, library=FakeLibrary(), buffer_bytes=1234)
    ids, info = [], {}
    for _ in range(20):  # often enough for + and / to occur
        info = sender.init_info(2)
        ids.append(base64.b64decode(info["nccl_unique_id_b64"], validate=True))
        assert base64.b64encode(ids[-1]).decode() == info["nccl_unique_id_b64"]
    assert {len(unique_id) for unique_id in ids} == {128}
    assert any(character in base64.b64encode(b"".join(ids)) for character in b"+/")
    assert {**info, "nccl_unique_id_b64": ""} == {
        "nccl_unique_id_b64": "",
        "rank_offset": 1,
        "world_size": 3,
        "packed": True,
        "packed_buffer_size_bytes": 1234,
        "packed_num_buffers": 2,
    }
    sender.close()


def test_a_jitted_pack_of_jax_arrays():
    """The real thing but for the device: JAX arrays, their pointers, and bytes as XLA lays them out."""
    pack = jax.jit(lambda arrays: jnp.concatenate([jax.lax.bitcast_convert_type(a, jnp.uint8).reshape(-1) for a in arrays]))
    tensors = [(f"w{i}", "bfloat16", (7, 11)) for i in range(7)]
    rng = np.random.default_rng(3)
    arrays = {name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for name, _, shape in tensors}
    sender, [worker] = connected(400, pack=pack)
    worker.update(sender.update_info(tensors))
    sender.send(groups_of(sender, arrays), DEADLINE_S)
    got = {name: data for load in worker.result() for name, _, _, data in load}
    sender.close()
    assert got == {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def test_packing_overlaps_the_transfer_and_stays_two_chunks_ahead_at_most():
    """The worker enters chunk 0 only once chunk 1 is being packed: a sender that waited first would time out."""
    packing = [threading.Event() for _ in range(6)]
    log = []

    def pack(arrays):
        index = sum(event.is_set() for event in packing)
        library.events.append(f"pack {index}")
        packing[index].set()
        return concatenate(arrays)

    def before(n):
        if n + 1 < len(packing):
            assert packing[n + 1].wait(10)
            time.sleep(0.02)  # time in which a sender that does not wait for its buffer would pack chunk n + 2

    sender, [worker] = connected(99, pack=pack, before=before)
    library, log = library_of(sender), events_of(sender)
    tensors = [(f"w{i}", "float32", (25,)) for i in range(6)]
    worker.update(sender.update_info(tensors))
    sender.send(groups_of(sender, contents(tensors)), 10.0)
    worker.result()
    sender.close()
    for i in range(5):
        assert log.index(f"pack {i + 1}") < log.index(f"broadcast {i} done")
    for i in range(4):
        assert log.index(f"broadcast {i} done") < log.index(f"pack {i + 2}")


def test_two_buffers_that_the_caller_reuses_are_never_overwritten_early():
    """`pack` writes into two buffers in turn; memory is read late, so an early overwrite would arrive."""
    memory = [FakeArray(np.zeros(40_000, np.uint8)) for _ in range(2)]
    count = iter(range(100))

    def pack(arrays):
        target = memory[next(count) % 2]
        target.memory[:] = arrays[0].memory
        return target

    sender, [worker] = connected(1, pack=pack, before=lambda n: time.sleep(0.01))
    tensors = [(f"w{i}", "uint8", (40_000,)) for i in range(8)]
    arrays = contents(tensors)
    worker.update(sender.update_info(tensors))
    sender.send(groups_of(sender, arrays), DEADLINE_S)
    got = {name: data for load in worker.result() for name, _, _, data in load}
    sender.close()
    assert got == {name: array.memory.tobytes() for name, array in arrays.items()}


def test_a_worker_that_never_arrives_is_a_timeout_and_the_sender_says_so_ever_after():
    sender = NcclSender(concatenate, library=FakeLibrary())
    worker = FakeWorker(sender.init_info(2), 0)  # the second one stays away
    start = time.monotonic()
    with pytest.raises(NcclTimeout, match=r"connect: 0.3 s .* 2 workers to join .*NCCL 2.31.2 here"):
        sender.connect(0.3)
    assert time.monotonic() - start < 3
    assert events_of(sender) == ["init", "abort"]
    for use in (
        lambda: sender.init_info(1),
        lambda: sender.connect(1.0),
        lambda: sender.update_info([]),
        lambda: sender.send([], 1.0),
    ):
        with pytest.raises(NcclError, match=r"unusable: connect: 0.3 s passed"):
            use()
    sender.close()
    sender.close()
    with pytest.raises(OSError):
        worker.result()


def dying_worker(silent):
    """A sender of ten chunks whose worker dies before the third."""

    def before(n):
        if n == 2:
            raise SystemExit

    sender, [worker] = connected(1, before=before, silent=silent)
    tensors = [(f"w{i}", "uint8", (100_000,)) for i in range(10)]
    worker.update(sender.update_info(tensors))
    return sender, groups_of(sender, contents(tensors))


def test_a_worker_that_dies_midway_is_an_error_at_once():
    sender, groups = dying_worker(silent=False)
    start = time.monotonic()
    with pytest.raises(NcclError, match="remote process exited"):
        sender.send(groups, DEADLINE_S)
    assert time.monotonic() - start < 5
    assert events_of(sender).count("abort") == 1
    assert "remote process exited" in sender.broken


def test_a_worker_that_dies_unnoticed_is_a_timeout():
    sender, groups = dying_worker(silent=True)
    start = time.monotonic()
    with pytest.raises(NcclTimeout, match=r"send: 0.5 s passed waiting for"):
        sender.send(groups, 0.5)
    assert time.monotonic() - start < 5
    assert events_of(sender).count("abort") == 1


def test_abort_ends_a_send_in_another_thread():
    """What the HTTP half calls when vLLM refuses the update: the worker never enters its broadcast."""
    sender, _ = connected(1)
    tensors = [(f"w{i}", "uint8", (100,)) for i in range(5)]
    sender.update_info(tensors)
    threading.Timer(0.2, sender.abort, ["POST /update_weights answered 500"]).start()
    start = time.monotonic()
    with pytest.raises(NcclError, match=r"send: POST /update_weights answered 500 \(while waiting for"):
        sender.send(groups_of(sender, contents(tensors)), DEADLINE_S)
    assert time.monotonic() - start < 5
    with pytest.raises(NcclError, match=r"unusable: .*answered 500"):
        sender.update_info(tensors)
    assert events_of(sender)[-4:] == ["abort", "drop stream", "drop stream", "free"]


def test_abort_between_calls_and_only_once():
    sender, _ = connected(1)
    sender.abort("the server is gone")
    sender.close()
    assert events_of(sender).count("abort") == 1
    with pytest.raises(NcclError, match="unusable: the server is gone"):
        sender.send([], 1.0)


def test_two_sends_at_a_time_are_refused_without_harm():
    held = threading.Event()
    sender, [worker] = connected(1, before=lambda n: held.wait(10))
    tensors = [("w", "uint8", (10,))]
    arrays = contents(tensors)
    worker.update(sender.update_info(tensors))
    first = threading.Thread(target=sender.send, args=(groups_of(sender, arrays), DEADLINE_S))
    first.start()
    while "broadcast 0" not in events_of(sender):
        time.sleep(0.001)
    with pytest.raises(NcclError, match="another thread"):
        sender.send(groups_of(sender, arrays), 1.0)
    held.set()
    first.join(10)
    assert worker.result()[0][0][3] == arrays["w"].memory.tobytes()
    assert not sender.broken
    sender.close()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda a: [[("b", a["b"])], [("a", a["a"])]], r"a group of \['b'\] where the plan has \['a'\]"),
        (lambda a: [[("a", a["a"])]], r"a group of \[\] where the plan has \['b'\]"),
        (lambda a: [[("a", a["a"])], [("b", a["b"])], [("c", a["a"])]], "more than the 2 groups"),
        (lambda a: [[("a", a["b"])]], "pack gave 6 bytes for a ...; update_info says 4"),
    ],
)
def test_groups_that_do_not_fit_the_plan_end_the_transfer(groups, message):
    sender, [worker] = connected(1)
    tensors = [("a", "uint8", (4,)), ("b", "uint8", (6,))]
    worker.update(sender.update_info(tensors))
    with pytest.raises(ValueError, match=message):
        sender.send(groups(contents(tensors)), DEADLINE_S)
    assert events_of(sender).count("abort") == 1
    assert sender.broken


def test_what_pack_raises_is_raised_and_ends_the_transfer():
    def pack(arrays):
        raise RuntimeError("out of memory")

    sender, _ = connected(1, pack=pack)
    tensors = [("a", "uint8", (4,))]
    sender.update_info(tensors)
    with pytest.raises(RuntimeError, match="out of memory"):
        sender.send(groups_of(sender, contents(tensors)), DEADLINE_S)
    assert sender.broken == "out of memory"
    assert "abort" in events_of(sender)


@pytest.mark.parametrize(("where", "words"), [(None, "in host memory"), (1, "on device 1")])
def test_memory_that_nccl_must_not_read_is_refused(where, words):
    """NCCL would answer with an illegal access, which ends the whole process."""

    def pack(arrays):
        packed = concatenate(arrays)
        library_of(sender).foreign[packed.unsafe_buffer_pointer()] = where
        return packed

    sender, _ = connected(1, pack=pack)
    tensors = [("a", "uint8", (4,))]
    sender.update_info(tensors)
    with pytest.raises(ValueError, match=words):
        sender.send(groups_of(sender, contents(tensors)), DEADLINE_S)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "at least one"),
        ([("a", "float32", (2,)), ("a", "float32", (2,))], "2 tensors with 1 names"),
        ([("a", "bf16", (2,))], "dtype 'bf16' must be one of"),
        ([("a", "float32", (2, 0))], r"shape \(2, 0\) must have sizes >= 1"),
        ([("a", "bfloat16", (3,)), ("b", "float32", (2,))], "b would start at byte 6 .* float32"),
    ],
)
def test_what_the_workers_could_not_unpack_is_refused_before_they_wait(tensors, message):
    """torch cannot view bytes as a type whose size does not divide where they start; the worker would fail midway."""
    sender = NcclSender(concatenate, library=FakeLibrary(), buffer_bytes=100)
    with pytest.raises(ValueError, match=message):
        sender.update_info(tensors)
    assert not sender.broken


def test_order_of_calls_and_settings():
    with pytest.raises(ValueError, match="buffer_bytes=0 must be >= 1"):
        NcclSender(concatenate, library=FakeLibrary(), buffer_bytes=0)
    sender = NcclSender(concatenate, library=FakeLibrary())
    with pytest.raises(ValueError, match=r"workers=\[0\]"):
        sender.init_info(0)
    with pytest.raises(NcclError, match="after init_info"):
        sender.connect(1.0)
    with pytest.raises(NcclError, match="after connect and update_info"):
        sender.send([], 1.0)
    assert not sender.broken
    sender, _ = connected(1)
    with pytest.raises(NcclError, match="connect once"):
        sender.connect(1.0)
    with pytest.raises(NcclError, match="another NcclSender"):
        sender.init_info(1)
    assert not sender.broken
    sender.close()


def test_another_device_than_the_process_has():
    sender = NcclSender(concatenate, library=FakeLibrary(device=0), device=5)
    sender.init_info(1)
    with pytest.raises(NcclError, match="invalid device ordinal"):
        sender.connect(DEADLINE_S)


def test_vllms_own_receiver_gets_the_bytes():
    """`packed_nccl_broadcast_consumer` of the installed vLLM, in another process, at the other end of the sockets."""
    python = ROOT / ".venv-vllm/bin/python"
    files = list(python.parent.parent.glob("lib/python*/site-packages/vllm/distributed/weight_transfer/packed_tensor.py"))
    if not python.exists() or not files:
        pytest.skip("no vLLM environment at .venv-vllm")
    sender = NcclSender(concatenate, library=FakeLibrary(), buffer_bytes=5000)
    command = [python, "-W", "ignore", ROOT / "tests/nccl_worker.py", files[0]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(sender.init_info(1)) + "\n")
        sender.connect(60.0)
        process.stdout.readline()
        rng = np.random.default_rng(5)
        for dtype in ("bfloat16", "float32", "float8_e4m3fn"):
            tensors = [(f"w{i}", dtype, tuple(rng.integers(1, 40, rng.integers(0, 4)).tolist())) for i in range(40)]
            arrays = contents(tensors, 7)
            process.stdin.write(json.dumps(sender.update_info(tensors)) + "\n")
            sender.send(groups_of(sender, arrays), DEADLINE_S)
            got = json.loads(process.stdout.readline())
            assert got["loads"] == [[name for name, *_ in chunk] for chunk in sender.plan]
            assert got["shapes"] == {name: list(shape) for name, _, shape in tensors}
            assert got["sha256"] == {name: hashlib.sha256(a.memory.tobytes()).hexdigest() for name, a in arrays.items()}
        sender.close()
        process.stdin.close()
        assert process.wait(20) == 0
