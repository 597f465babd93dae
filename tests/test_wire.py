"""The tcp transport over real sockets: what arrives is what was staged, and nobody else gets or gives anything."""

import ast
import hashlib
import itertools
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers_wire import TOKEN, contents, dial, false_trainer, greeting, heard, pull, read_all, relay, soon, stage_file
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from serving_bridge import tcp, tcp_session
from serving_bridge.plugin.gspo_vllm import channel, delta, manifest, wire
from serving_bridge.plugin.gspo_vllm.channel import WireError
from serving_bridge.stage import Stage, Tensor
from serving_bridge.tcp import WeightSender

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
SIX = {f"model.layers.{i}.w": ("BF16", (i + 1, 500), bytes([i]) * 1000 * (i + 1)) for i in range(6)}
"""1 000 to 6 000 bytes each; in buckets of 4 000 bytes the first two are together and the others alone."""


@st.composite
def tensor_lists(draw):
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    kinds = draw(st.lists(st.tuples(st.sampled_from(sorted(manifest.ITEMSIZES)), shapes), max_size=9))
    seed = np.random.default_rng(draw(st.integers(0, 99)))
    tensors = {}
    for index, (dtype, shape) in enumerate(kinds):
        tensors[f"t.{index}"] = dtype, shape, seed.bytes(int(np.prod(shape)) * manifest.ITEMSIZES[dtype])
    return tensors


@examples(max_examples=60)
@given(tensors=tensor_lists(), bucket_bytes=st.integers(1, 600))
def test_what_arrives_is_what_was_staged(tmp_path_factory, tensors, bucket_bytes):
    """Names, types, shapes and bytes, in the order of the file, for any sizes: scalars, empty ones, larger than a bucket."""
    staged = stage_file(tmp_path_factory.mktemp("stage"), 3, tensors)
    with WeightSender(TOKEN, bucket_bytes=bucket_bytes) as sender:
        sender.offer(staged)
        with wire.receive(sender.address, TOKEN, staged.id, timeout_s=20.0) as receiver:
            buckets = list(receiver.buckets())
    assert receiver.manifest.version == 3
    assert receiver.manifest.base is None
    got = {t.name: (t.dtype, t.shape, a.tobytes()) for bucket in buckets for t, a in bucket.views()}
    assert list(got.items()) == list(tensors.items())
    sizes = [[tensor.nbytes for tensor in bucket.tensors] for bucket in buckets]
    assert all(sum(bucket) <= bucket_bytes or len(bucket) == 1 for bucket in sizes)
    assert all(sum(bucket) + after[0] > bucket_bytes for bucket, after in itertools.pairwise(sizes))  # none is split early
    assert all(array.ctypes.data % 8 == 0 for bucket in buckets for array in bucket.arrays if array.size)


def test_tensors_of_several_pieces(tmp_path):
    data = np.random.default_rng(0).bytes(3 * wire.PIECE + 2)
    tensors = {"small": ("U8", (3,), b"abc"), "large": ("BF16", (len(data) // 2,), data), "last": ("F32", (1,), b"1234")}
    staged = stage_file(tmp_path, 0, tensors)
    with WeightSender(TOKEN, bucket_bytes=wire.PIECE) as sender:
        sender.offer(staged)
        assert pull(sender, staged) == contents(tensors)


def test_several_workers_at_once(tmp_path):
    staged = stage_file(tmp_path, 1, SIX)
    with WeightSender(TOKEN, bucket_bytes=4000) as sender:
        sender.offer(staged)
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda _: pull(sender, staged), range(24)))
        assert all(each == contents(SIX) for each in got)
        assert soon(lambda: sender.served[staged.id].workers == 24)
        assert sender.failures == ()


def test_worker_needs_numpy_and_nothing_else(tmp_path):
    """As vLLM sees it: another interpreter, the plugin's folder on its path. No package of the trainer's is imported."""
    script = """
import hashlib, json, sys
from gspo_vllm import wire
with wire.receive(sys.argv[1], sys.stdin.read(), sys.argv[2], timeout_s=30.0) as receiver:
    data = b"".join(array.tobytes() for bucket in receiver.buckets() for _, array in bucket.views())
loaded = sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
print(json.dumps([hashlib.sha256(data).hexdigest(), [name for name in loaded if not name.startswith("_")]]))
"""
    staged = stage_file(tmp_path, 1, SIX)
    expected = hashlib.sha256(b"".join(contents(SIX).values())).hexdigest()
    other = ROOT / ".venv-vllm/bin/python"
    with WeightSender(TOKEN) as sender:
        sender.offer(staged)
        for python in [sys.executable, *([str(other)] if other.exists() else [])]:
            done = subprocess.run(
                [python, "-c", script, sender.address, staged.id], input=TOKEN, capture_output=True, text=True, timeout=60,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "serving_bridge/plugin")}, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            digest, loaded = json.loads(done.stdout)
            assert digest == expected
            assert {"gspo_vllm", "numpy"} <= set(loaded)
            assert not {"torch", "jax", "ml_dtypes", "safetensors", "serving_bridge", "vllm"} & set(loaded)


def test_memory_stays_below_three_buckets(tmp_path):
    """Both ends together, for a file of sixteen buckets: the worker has one in hand while the next arrives."""
    tensors = {f"t{i}": ("F32", (MIB,), bytes(4 * MIB)) for i in range(16)}
    staged = stage_file(tmp_path, 1, tensors)
    del tensors
    with WeightSender(TOKEN, bucket_bytes=4 * MIB) as sender:
        sender.offer(staged)
        with wire.receive(sender.address, TOKEN, staged.id, timeout_s=30.0) as receiver:
            tracemalloc.start()
            try:
                count = sum(1 for bucket in receiver.buckets())
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
    assert count == 16
    assert 4 * MIB < peak < 3 * 4 * MIB


# -- who may have and give weights


def test_wrong_token_gets_a_refusal_and_not_a_byte_more(tmp_path):
    staged = stage_file(tmp_path, 1, SIX)
    with WeightSender(TOKEN) as sender:
        sender.offer(staged)
        with pytest.raises(WireError, match=r"trainer 127.0.0.1.*handshake.*wrong token"):
            pull(sender, staged, token=TOKEN[:-1] + "X")
        with dial(sender.address) as sock:
            greeting(sock, json.dumps({"id": staged.id, "base": None}).encode(), token=TOKEN[::-1])
            kind, mac, size = wire.REPLY.unpack(sock.recv(wire.REPLY.size, socket.MSG_WAITALL))
            assert (kind, mac, read_all(sock)) == (wire.REFUSED, bytes(32), b"wrong token")
            assert size == len(b"wrong token")
        assert soon(lambda: len(sender.failures) == 2)
        assert sender.served[staged.id] == tcp.Served(0, 0)
        assert TOKEN not in "".join(sender.failures)


def test_only_the_offered_update_is_served(tmp_path):
    first, second = stage_file(tmp_path, 1, SIX), stage_file(tmp_path, 2, SIX)
    with WeightSender(TOKEN) as sender:
        with pytest.raises(WireError, match="not offered"):
            pull(sender, first)
        sender.offer(first)
        with pytest.raises(WireError, match="not offered") as caught:
            pull(sender, second)
        assert first.id not in str(caught.value).replace(second.id, "")
        sender.offer(second, first)
        with pytest.raises(WireError, match="not offered"):
            pull(sender, first)
        assert pull(sender, second) == contents(SIX)


def test_replayed_handshake_is_refused(tmp_path):
    """A worker's words, recorded on their way, are worth nothing on another connection."""
    staged = stage_file(tmp_path, 1, SIX)
    with WeightSender(TOKEN) as sender:
        sender.offer(staged)
        with relay(sender.address) as (address, said):
            assert pull(sender, staged, through=address) == contents(SIX)
            assert soon(lambda: len(said) == 1)
        with dial(sender.address) as sock:
            sock.sendall(said[0])
            answer = read_all(sock)
        assert answer.endswith(b"wrong token")
        assert len(answer) == wire.HELLO.size + wire.REPLY.size + len(b"wrong token")


@pytest.mark.parametrize("proof", ["zeros", "echo", "other token", "manifest of another request"])
def test_worker_loads_nothing_from_an_impostor(proof):
    """An impostor knows everything but the token, and may answer with the worker's own MAC."""
    text = manifest.Manifest("u", 1, None, 100, (manifest.Tensor("w", "U8", (1,)),)).to_json()

    def impostor(sock):
        session, request, worker_mac = heard(sock, TOKEN if proof == "manifest of another request" else "x" * 32)
        macs = {"zeros": bytes(32), "echo": worker_mac, "other token": session.mac(b"manifest", request, text)}
        mac = macs.get(proof) or session.mac(b"manifest", request.replace(b"u", b"v"), text)
        head = wire.HEAD.pack(wire.BUCKET, 0, 1, 1) + b"!" + wire.CRC.pack(0)
        sock.sendall(wire.REPLY.pack(wire.MANIFEST, mac, len(text)) + text + head)

    with false_trainer(impostor) as address, pytest.raises(WireError, match="expected a trainer that knows the token"):
        wire.receive(address, TOKEN, "u", timeout_s=10.0)


def test_a_mac_is_for_one_role_one_connection_and_one_text():
    one = channel.Session(TOKEN, b"a" * 32, b"b" * 32)
    macs = [
        one.mac(b"request", b"text"), one.mac(b"manifest", b"text"), one.mac(b"request", b"te", b"xt"),
        one.mac(b"request", b"text", b""), channel.Session(TOKEN, b"b" * 32, b"a" * 32).mac(b"request", b"text"),
        channel.Session(TOKEN + " ", b"a" * 32, b"b" * 32).mac(b"request", b"text"),
    ]  # fmt: skip
    assert len(set(macs)) == len(macs)
    assert one.mac(b"request", b"text") == macs[0]


WORD = manifest.Tensor("w", "BF16", (8,))


@pytest.mark.parametrize(
    ("changes", "part", "message"),
    [
        ({}, (wire.CHANGES, 15), "expected a delta, found a delta for 8 words"),
        ({}, (wire.CHANGES, 16), "expected a part of 16 bytes"),
        ({}, (wire.CHANGES, 2**32 - 1), "expected a part of 16 bytes"),
        ({}, (wire.WHOLE, 15), "expected a part of 16 bytes"),
        ({}, (b"?", 0), "expected a part of 16 bytes"),
        ({"id": "other"}, None, "expected update 'u', found 'other'"),
        ({"base": "older"}, None, "expected a delta to the mirror's 'base'"),
        ({"tensors": (manifest.Tensor("w", "F16", (8,)),)}, None, "expected a delta to the mirror's 'base'"),
    ],
)
def test_trainer_that_knows_the_token_and_not_the_protocol(changes, part, message):
    """Parts of wrong kinds and lengths are refused before memory is taken, and so are deltas to what the mirror is not."""
    mirror = wire.Mirror()
    mirror.open((WORD,))
    mirror.base = "base"
    said = replace(manifest.Manifest("u", 1, "base", 100, (WORD,)), **changes)

    def trainer(sock):
        session, request, _ = heard(sock)
        text = said.to_json()
        sock.sendall(wire.REPLY.pack(wire.MANIFEST, session.mac(b"manifest", request, text), len(text)) + text)
        if part:
            sock.sendall(wire.HEAD.pack(wire.BUCKET, 0, 1, 16) + wire.PART.pack(*part) + bytes([255]) * 100)
        sock.recv(1)

    with false_trainer(trainer) as address, pytest.raises(WireError, match=message):
        list(wire.receive(address, TOKEN, "u", mirror, timeout_s=10.0).buckets())


def test_delta_for_a_worker_without_a_mirror_is_refused():
    def trainer(sock):
        session, request, _ = heard(sock)
        text = manifest.Manifest("u", 1, "base", 100, (WORD,)).to_json()
        sock.sendall(wire.REPLY.pack(wire.MANIFEST, session.mac(b"manifest", request, text), len(text)) + text)

    with false_trainer(trainer) as address, pytest.raises(WireError, match="expected a delta to the mirror's None"):
        wire.receive(address, TOKEN, "u", timeout_s=10.0)


class _Marker:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_stays_bytes_on_both_sides(tmp_path):
    """SEC-01: posted to the trainer, sent as a request or as a manifest by who knows the token: nothing evaluates it."""
    marker = tmp_path / "marker"
    bomb = pickle.dumps(_Marker(marker))
    pickle.loads(bomb)
    assert marker.exists(), "the pickle is armed"
    marker.unlink()

    def trainer(sock):
        session, request, _ = heard(sock)
        sock.sendall(wire.REPLY.pack(wire.MANIFEST, session.mac(b"manifest", request, bomb), len(bomb)) + bomb)

    staged = stage_file(tmp_path, 1, SIX)
    with WeightSender(TOKEN) as sender:
        sender.offer(staged)
        for posted in (bomb, b"POST /update_weights HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(bomb), bomb) * 9):
            with dial(sender.address) as sock:
                sock.sendall(posted + bytes(100))
                read_all(sock)
        with dial(sender.address) as sock:
            greeting(sock, bomb)
            assert read_all(sock).endswith(b"not JSON with id and base")
        with false_trainer(trainer) as address, pytest.raises(WireError, match="expected a manifest"):
            wire.receive(address, TOKEN, "u", timeout_s=10.0)
        assert pull(sender, staged) == contents(SIX), "it still serves"
    assert not marker.exists()


@pytest.mark.parametrize("module", [channel, delta, manifest, wire, tcp, tcp_session], ids=lambda module: module.__name__)
def test_nothing_that_evaluates_is_imported_or_called(module):
    names = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        names |= {node.id} if isinstance(node, ast.Name) else set()
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
    assert not names & {"pickle", "marshal", "shelve", "dill", "eval", "exec", "compile", "__import__", "load", "loads"}


# -- peers that say nonsense, too much, or nothing

GARBAGE = {
    "nothing": b"",
    "a little": b"hello",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(60),
    "a huge length": bytes(64) + b"\xff\xff\xff\xff",
    "just too long": bytes(64) + (wire.MAX_REQUEST + 1).to_bytes(4, "big"),
    "noise": random.Random(0).randbytes(100_000),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_trainer_survives_garbage(tmp_path, kind):
    staged = stage_file(tmp_path, 1, SIX)
    with WeightSender(TOKEN, handshake_s=5.0) as sender:
        sender.offer(staged)
        with dial(sender.address) as sock:
            try:
                sock.sendall(GARBAGE[kind])
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it has hung up
            assert len(read_all(sock, 4)) < 300
        assert soon(lambda: len(sender.failures) == 1)
        assert pull(sender, staged) == contents(SIX)
    assert sender.served[staged.id].workers <= 1


def drip(sock, seconds=0.02):
    for _ in range(500):
        sock.sendall(b"g")
        time.sleep(seconds)


@pytest.mark.parametrize("seconds", [0.0, 0.02], ids=["silent", "a byte at a time"])
def test_trainer_hangs_up_on_a_slow_worker(tmp_path, seconds):
    """The deadline is that of the handshake, not from byte to byte; others are served meanwhile."""
    staged = stage_file(tmp_path, 1, SIX)
    with WeightSender(TOKEN, handshake_s=0.5) as sender:
        sender.offer(staged)
        with dial(sender.address) as sock:
            started = time.monotonic()
            if seconds:
                with pytest.raises(OSError):
                    drip(sock, seconds)
            else:
                assert len(read_all(sock)) == wire.HELLO.size
                assert pull(sender, staged) == contents(SIX)
            assert 0.4 < time.monotonic() - started < 5
        assert soon(lambda: any("the deadline passed" in failure for failure in sender.failures))


def test_trainer_gives_up_a_worker_that_takes_nothing(tmp_path):
    staged = stage_file(tmp_path, 1, {"t": ("U8", (64 * MIB,), bytes(64 * MIB))})
    with WeightSender(TOKEN, stall_s=0.3) as sender:
        sender.offer(staged)
        with wire.receive(sender.address, TOKEN, staged.id, timeout_s=30.0) as receiver:
            assert soon(lambda: len(sender.failures) == 1)
            assert "bucket 0" in sender.failures[0]
            assert "the deadline passed" in sender.failures[0]
            with pytest.raises(WireError, match="bucket 0"):
                next(receiver.buckets())


@pytest.mark.parametrize("behave", [drip, lambda sock: sock.recv(1)], ids=["a byte at a time", "silent"])
def test_worker_gives_up_a_slow_trainer(behave):
    """WSY-07: accepted, and then nothing, or next to nothing. The error names the peer and the phase."""
    with false_trainer(behave) as address:
        started = time.monotonic()
        with pytest.raises(WireError, match=rf"trainer {address}, handshake: .*the deadline passed"):
            wire.receive(address, TOKEN, "u", timeout_s=0.5)
        assert 0.4 < time.monotonic() - started < 5


def test_worker_gives_up_a_trainer_that_stops_in_the_middle(tmp_path):
    staged = stage_file(tmp_path, 1, SIX)
    stuck = threading.Event()
    with WeightSender(TOKEN, bucket_bytes=4000) as sender:
        sender.offer(staged)
        with relay(sender.address, lambda at, data: data if at < 1000 or stuck.wait(20) else None) as (address, _):
            with pytest.raises(WireError, match="the deadline passed"):
                partly(address, staged, {}, timeout_s=1.0)
            stuck.set()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(WireError, match=f"trainer {address}: expected a connection"):
        wire.receive(address, TOKEN, "u", timeout_s=5.0)


def reply(kind: bytes, size: int):
    def behave(sock):
        heard(sock)
        sock.sendall(wire.REPLY.pack(kind, bytes(32), size))
        sock.recv(1)

    return behave


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (lambda sock: sock.sendall(bytes(100)), "protocol 1"),
        (lambda sock: sock.sendall(wire.HELLO.pack(wire.MAGIC, 2, bytes(32))), "found b'gspo-wts' protocol 2"),
        (reply(wire.MANIFEST, manifest.MAX_JSON + 1), "expected a manifest of at most"),
        (reply(wire.REFUSED, wire.MAX_REASON + 1), "expected a manifest of at most"),
        (reply(b"?", 10), "expected a manifest of at most"),
        (lambda sock: None, "the connection was closed"),
    ],
)
def test_worker_survives_garbage(behave, message):
    with false_trainer(behave) as address:
        tracemalloc.start()
        try:
            with pytest.raises(WireError, match=message):
                wire.receive(address, TOKEN, "u", timeout_s=10.0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < MIB


# -- what breaks on the way


def stream_of(sender, staged) -> int:
    """Bytes of a whole transfer, from the trainer's first to its last."""
    before = sender.served[staged.id]
    pull(sender, staged)
    assert soon(lambda: sender.served[staged.id].workers > before.workers and sender.served[staged.id].bytes > before.bytes)
    return sender.served[staged.id].bytes - before.bytes


def partly(address, staged, into: dict[str, bytes], timeout_s=30.0) -> None:
    """Like `pull`, keeping what was handed out before an error."""
    with wire.receive(address, TOKEN, staged.id, timeout_s=timeout_s) as receiver:
        for bucket in receiver.buckets():
            into.update((tensor.name, array.tobytes()) for tensor, array in bucket.views())


def test_one_flipped_bit_anywhere_is_noticed_before_its_bucket_is_handed_out(tmp_path):
    """In the greeting, the manifest, a head, the weights, a crc or the end: and what was handed out before it is right."""
    staged, chance = stage_file(tmp_path, 1, SIX), random.Random(0)
    with WeightSender(TOKEN, bucket_bytes=4000) as sender:
        sender.offer(staged)
        size = stream_of(sender, staged)
        data = sum(len(each) for each in contents(SIX).values())
        overhead = 5 * (wire.HEAD.size + wire.CRC.size) + wire.END.size
        first = size - data - overhead  # byte of the stream that is the first head's first
        handed = set()
        for place in [0, first - 1, first, size - 1, *(chance.randrange(size) for _ in range(60))]:

            def flip(at, chunk, place=place):
                if not at <= place < at + len(chunk):
                    return chunk
                return bytes(byte ^ (1 << place % 8) * (at + i == place) for i, byte in enumerate(chunk))

            got: dict[str, bytes] = {}
            with relay(sender.address, flip) as (address, _), pytest.raises(WireError):
                partly(address, staged, got)
            assert got.items() <= contents(SIX).items()
            plan = manifest.buckets([manifest.Tensor(n, d, s) for n, (d, s, _) in SIX.items()], 4000)
            ends = [first + wire.HEAD.size + wire.CRC.size + 1000 + 2000]
            for index in range(2, 6):
                ends.append(ends[-1] + wire.HEAD.size + wire.CRC.size + 1000 * (index + 1))
            whole_buckets = sum(end <= place for end in ends)
            assert len(got) == sum(count for _, count in plan[:whole_buckets])
            handed.add(len(got))
        assert len(handed) > 3, "flips hit several buckets"


def test_hanging_up_anywhere_is_noticed(tmp_path):
    staged, chance = stage_file(tmp_path, 1, SIX), random.Random(1)
    with WeightSender(TOKEN, bucket_bytes=4000) as sender:
        sender.offer(staged)
        size = stream_of(sender, staged)
        for length in [0, size - 1, *(chance.randrange(size) for _ in range(20))]:
            got: dict[str, bytes] = {}

            def cut(at, chunk, length=length):
                return chunk[: length - at] if at < length else None

            with relay(sender.address, cut) as (address, _), pytest.raises(WireError, match="the connection was closed"):
                partly(address, staged, got)
            assert got.items() <= contents(SIX).items()
        assert pull(sender, staged) == contents(SIX)


@pytest.mark.parametrize("how", ["close", "break", "raise"])
def test_worker_may_stop_early(tmp_path, how):
    """However it leaves the loop, the connection is closed."""
    staged = stage_file(tmp_path, 1, {f"t{i}": ("U8", (8 * MIB,), bytes(8 * MIB)) for i in range(4)})
    with WeightSender(TOKEN, bucket_bytes=MIB) as sender:
        sender.offer(staged)
        receiver = wire.receive(sender.address, TOKEN, staged.id, timeout_s=30.0)
        arriving = receiver.buckets()
        next(arriving)
        if how == "close":
            receiver.close()
        elif how == "break":
            arriving.close()
        else:
            with pytest.raises(KeyError):
                arriving.throw(KeyError("a name that the model lacks"))
        assert soon(lambda: len(sender.failures) == 1)
        assert sender.served[staged.id].workers == 0
        with pytest.raises(WireError):
            next(receiver.buckets())


def test_new_offer_breaks_off_what_is_still_being_sent(tmp_path):
    tensors = {f"t{i}": ("U8", (8 * MIB,), bytes(8 * MIB)) for i in range(4)}
    first, second = stage_file(tmp_path, 1, tensors), stage_file(tmp_path, 2, SIX)
    with WeightSender(TOKEN, bucket_bytes=8 * MIB) as sender:
        sender.offer(first)
        with wire.receive(sender.address, TOKEN, first.id, timeout_s=30.0) as receiver:
            arriving = receiver.buckets()
            next(arriving)
            sender.offer(first)  # the same again: nothing happens
            next(arriving)
            sender.offer(second)
            with pytest.raises(WireError):
                list(arriving)
        assert pull(sender, second) == contents(SIX)


@pytest.mark.parametrize("stuck_in", ["handshake", "data"])
def test_close_does_not_wait_for_a_stuck_worker(tmp_path, stuck_in):
    staged = stage_file(tmp_path, 1, {"t": ("U8", (64 * MIB,), bytes(64 * MIB))})
    before = threading.active_count()
    sender = WeightSender(TOKEN)
    sender.offer(staged)
    with dial(sender.address) as sock:
        if stuck_in == "data":
            greeting(sock, json.dumps({"id": staged.id, "base": None}).encode())
        sock.recv(1)
        assert threading.active_count() == before + 2
        started = time.monotonic()
        sender.close()
        assert time.monotonic() - started < 3
    assert threading.active_count() == before
    with pytest.raises(WireError, match="expected a connection"):
        pull(sender, staged)
    sender.close()


def test_connections_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_CONNECTIONS", 2)
    staged = stage_file(tmp_path, 1, SIX)
    with WeightSender(TOKEN, handshake_s=0.5) as sender:
        sender.offer(staged)
        with dial(sender.address) as one, dial(sender.address) as two, dial(sender.address) as three:
            assert read_all(three) == b""
            assert len(read_all(one)) == len(read_all(two)) == wire.HELLO.size
        assert any("at most 2 connections" in failure for failure in sender.failures)
        assert pull(sender, staged) == contents(SIX), "places are free again"


# -- what is refused before anything is sent


@pytest.mark.parametrize("change", ["removed", "replaced", "cut short"])
def test_file_that_is_no_longer_there(tmp_path, change):
    staged = stage_file(tmp_path, 1, SIX)
    with WeightSender(TOKEN) as sender:
        sender.offer(staged)
        if change == "removed":
            staged.path.unlink()
        elif change == "replaced":
            staged.path.rename(tmp_path / "old")
            stage_file(tmp_path, 1, SIX)
        else:
            os.truncate(staged.path, staged.path.stat().st_size - 1)
        with pytest.raises(WireError, match="gone or was replaced"):
            pull(sender, staged)


def test_file_that_is_cut_short_while_it_is_sent(tmp_path):
    """An error on both sides, and no SIGBUS in the trainer."""
    tensors = {f"t{i}": ("U8", (16 * MIB,), bytes(16 * MIB)) for i in range(4)}
    staged = stage_file(tmp_path, 1, tensors)
    with WeightSender(TOKEN, bucket_bytes=MIB) as sender:
        sender.offer(staged)
        with wire.receive(sender.address, TOKEN, staged.id, timeout_s=30.0) as receiver:
            arriving = receiver.buckets()
            next(arriving)
            os.truncate(staged.path, 50 * MIB)
            with pytest.raises(WireError, match="the connection was closed"):
                list(arriving)
        assert soon(lambda: any("ended early" in failure for failure in sender.failures))


def damaged(text: bytes, **changes) -> bytes:
    return json.dumps({**json.loads(text), **changes}).encode()


def test_manifest_is_read_strictly():
    tensors = manifest.Tensor("a", "BF16", (2, 3)), manifest.Tensor("b", "F32", ())
    for base in (None, "earlier"):
        plain = manifest.Manifest("u", 1, base, 100, tensors)
        assert manifest.Manifest.from_json(plain.to_json()) == plain
    text = plain.to_json()
    entry = ["a", "BF16", [2, 3], 12]
    wrong = [
        b"", b"{", b"[]", b"null", b"[" * 100_000, text[:-1], b"1" * 5000, damaged(text, id=7), damaged(text, version=1.0),
        damaged(text, version=True), damaged(text, kind="delta", base=None), damaged(text, kind="full"),
        damaged(text, bucket_bytes=0), damaged(text, bucket_bytes=manifest.MAX_FRAME + 1), damaged(text, bytes=17),
        damaged(text, tensors=[entry[:3]], bytes=12), damaged(text, tensors=[["a", "BF17", [2, 3], 12]], bytes=12),
        damaged(text, tensors=[["a", "BF16", [-2, -3], 12]], bytes=12), damaged(text, tensors=[[*entry[:3], 13]], bytes=13),
        damaged(text, tensors=[["a", "U8", [manifest.MAX_FRAME + 1], manifest.MAX_FRAME + 1]], bytes=manifest.MAX_FRAME + 1),
        damaged(text, tensors=[["a", "BF16", [True, 6], 12]], bytes=12), damaged(text, tensors=[["a", "U8", "23", 6]], bytes=6),
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(ValueError, match="no manifest"):
            manifest.Manifest.from_json(each)
    assert manifest.Manifest.from_json(damaged(text, tensors=[entry], bytes=12)).nbytes == 2 * 3 * 2


def test_offer_reads_the_file_first(tmp_path):
    """Not whole, other tensors than staged, unknown types, gaps: an error, and the offer before it stands."""
    good = stage_file(tmp_path, 1, SIX)
    data = good.path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    name = next(reversed(head))

    def file(head: dict, rest: bytes = rest) -> bytes:
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + rest

    entry = head[name]
    begin, end = entry["data_offsets"]
    for content in [
        b"", data[:100], data[:-1], data + b"x", b"\xff" * 8 + data[8:], file({}), b"\x02" + bytes(7) + b"[]",
        file({**head, name: {**entry, "dtype": "F4"}}), file({**head, name: {**entry, "shape": [1, 499]}}),
        file({**head, name: {**entry, "data_offsets": [begin + 2, end]}}), file({k: v for k, v in head.items() if k != name}),
        file({("x" if k == name else k): v for k, v in head.items()}),
    ]:  # fmt: skip
        path = tmp_path / "slot0" / "model.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        with WeightSender(TOKEN) as sender:
            sender.offer(good)
            with pytest.raises(ValueError, match=r"model\.safetensors"):
                sender.offer(tcp.Staged(2, path, good.nbytes, good.names))
            assert pull(sender, good) == contents(SIX)


def test_arguments_that_cannot_be():
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ValueError, match="not on all"):
            WeightSender(TOKEN, host)
    with pytest.raises(ValueError, match="at least 16"):
        WeightSender("short")
    for size in (0, manifest.MAX_FRAME + 1):
        with pytest.raises(ValueError, match="bucket_bytes"):
            WeightSender(TOKEN, bucket_bytes=size)
    for address in ("", "host", ":80", "host:", "host:0", "host:65536", "host:-1", "host:1e3"):
        with pytest.raises(ValueError, match="not host:port"):
            wire.receive(address, TOKEN, "u", timeout_s=1.0)
    with pytest.raises(ValueError, match="at least 16"):
        wire.receive("127.0.0.1:1", "short", "u", timeout_s=1.0)
    with pytest.raises(ValueError, match="at most 4096"):
        wire.receive("127.0.0.1:1", TOKEN, "u" * 5000, timeout_s=1.0)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6(tmp_path):
    staged = stage_file(tmp_path, 1, SIX)
    try:
        sender = WeightSender(TOKEN, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with sender:
        assert sender.address.startswith("[::1]:")
        sender.offer(staged)
        assert pull(sender, staged) == contents(SIX)


def test_serves_what_a_stage_writes(tmp_path):
    """The real staged file, as the trainer makes it."""
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=ml_dtypes.bfloat16)}
    stage = Stage([Tensor("a", "F32", (2, 3)), Tensor("b", "BF16", (5,))], tmp_path)
    with WeightSender(TOKEN) as sender:
        staged = stage.write(7, arrays.items())
        sender.offer(staged)
        assert pull(sender, staged) == {name: array.tobytes() for name, array in arrays.items()}
    stage.close()
