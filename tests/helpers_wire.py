"""Staged files of any tensors, and a man in the middle, a false trainer and false workers for the tcp transport."""

import contextlib
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from serving_bridge.plugin.gspo_vllm import channel, manifest, wire
from serving_bridge.stage import Staged
from serving_bridge.tcp import WeightSender

TOKEN = "0123456789abcdef-shared"
CHUNK = 256
"""Bytes at a time through a man in the middle."""
Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""By name: dtype, shape, bytes; in the order in which they lie in the file."""


def stage_file(folder: Path, version: int, tensors: Tensors) -> Staged:
    """Written by hand: types that NumPy lacks, and a header whose order is not that of the bytes."""
    head, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        assert len(data) == math.prod(shape) * manifest.ITEMSIZES[dtype]
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **dict(reversed(head.items()))}).encode()
    path = folder / f"slot{version % 2}" / "model.safetensors"
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        for part in (struct.pack("<Q", len(text)), text, *(data for _, _, data in tensors.values())):
            file.write(part)
    return Staged(version, path, end, tuple(tensors))


def contents(tensors: Tensors) -> dict[str, bytes]:
    return {name: data for name, (_, _, data) in tensors.items()}


def pull(
    sender: WeightSender, staged: Staged, mirror: wire.Mirror | None = None, *, through: str = "", token: str = TOKEN
) -> dict[str, bytes]:
    """What a worker loads, in the order of its arrival."""
    with wire.receive(through or sender.address, token, staged.id, mirror, timeout_s=30.0) as receiver:
        return {tensor.name: array.tobytes() for bucket in receiver.buckets() for tensor, array in bucket.views()}


def soon(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


def read_all(sock: socket.socket, seconds: float = 10.0) -> bytes:
    """Everything until the other side closes; TimeoutError if it does not."""
    end, data = time.monotonic() + seconds, b""
    while True:
        sock.settimeout(max(0.001, end - time.monotonic()))
        try:
            chunk = sock.recv(1 << 16)
        except ConnectionResetError:
            return data
        if not chunk:
            return data
        data += chunk


def greeting(sock: socket.socket, request: bytes, token: str = TOKEN) -> channel.Session:
    """A worker's half of the handshake, with a request that need not be one."""
    _, _, trainer_nonce = wire.HELLO.unpack(sock.recv(wire.HELLO.size, socket.MSG_WAITALL))
    nonce = b"w" * 32
    session = channel.Session(token, trainer_nonce, nonce)
    sock.sendall(wire.REQUEST.pack(nonce, session.mac(b"request", request), len(request)) + request)
    return session


def heard(sock: socket.socket, token: str = TOKEN) -> tuple[channel.Session, bytes, bytes]:
    """A trainer's half, up to its reply: the session, the worker's request and the worker's MAC."""
    nonce = b"t" * 32
    sock.sendall(wire.HELLO.pack(wire.MAGIC, wire.PROTOCOL, nonce))
    worker_nonce, mac, size = wire.REQUEST.unpack(sock.recv(wire.REQUEST.size, socket.MSG_WAITALL))
    return channel.Session(token, nonce, worker_nonce), sock.recv(size, socket.MSG_WAITALL), mac


@contextlib.contextmanager
def false_trainer(behave: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a server that does `behave(connection)` with each that comes, and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=answer, args=(listener.accept()[0],)))
                threads[-1].start()

    def answer(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            behave(sock)

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join(10)
        listener.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


@contextlib.contextmanager
def relay(target: str, edit: Callable[[int, bytes], bytes | None] = lambda _, data: data) -> Iterator[tuple[str, list[bytes]]]:
    """A man in the middle: `edit(offset, bytes)` of what the trainer says is what the worker hears; None hangs up.

    Yields its address and what the workers said, one entry for each connection that has ended.
    """
    said: list[bytes] = []

    def forward(worker: socket.socket, trainer: socket.socket) -> None:
        said.append(_pump(worker, trainer, lambda _, data: data))
        with contextlib.suppress(OSError):
            trainer.shutdown(socket.SHUT_WR)

    def behave(worker: socket.socket) -> None:
        with dial(target) as trainer:
            up = threading.Thread(target=forward, args=(worker, trainer))
            up.start()
            _pump(trainer, worker, edit)
            for sock in (worker, trainer):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            up.join(10)

    with false_trainer(behave) as address:
        yield address, said


def _pump(source: socket.socket, target: socket.socket, edit: Callable[[int, bytes], bytes | None]) -> bytes:
    kept, count = b"", 0
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            edited = edit(count, data)
            count += len(data)
            if edited is None:
                break
            kept += data if len(kept) < 1 << 16 else b""
            target.sendall(edited)
    return kept
