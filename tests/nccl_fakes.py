"""NCCL and a GPU in memory: the methods of `Library` over loopback sockets, and vLLM's routes around a worker."""

import ctypes
import json
import os
import queue
import socket
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from nccl_worker import HEADER, FakeWorker

from serving_bridge.nccl_library import Library, NcclError

SLICE = 4096


class FakeArray:
    """A device array of bytes. When it is freed its memory is used for something else at once, as JAX's would be."""

    def __init__(self, data: np.ndarray):
        memory = np.array(data, np.uint8)
        self.memory, self.nbytes = memory, memory.nbytes
        weakref.finalize(self, lambda: (memory.fill(0xDD), _GRAVEYARD.append(memory)))

    def unsafe_buffer_pointer(self) -> int:
        return self.memory.ctypes.data


_GRAVEYARD: list[np.ndarray] = []
"""Memory of freed arrays: late reads see 0xDD instead of crashing the process."""


class FakeLibrary(Library):
    """One device, whose one thread does in order what is put on streams. It is as strict as NCCL and CUDA are:

    the next operation before `ready` is an error, an operation starts only once `ready` was polled `lag` times, `idle` is true
    of a stream whose operation was not started yet, memory is read late, and a thread has no device before `set_device`.
    `silent`: a peer's death goes unnoticed, as between GPUs of one machine. `events` is what happened, in order.
    """

    def __init__(self, *, lag: int = 3, device: int = 0, silent: bool = False):
        self.version, self.lag, self.device, self.silent = 23102, lag, device, silent
        self.events: list[str] = []
        self.foreign: dict[int, int | None] = {}
        self._devices = threading.local()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outstanding: dict[int, int] = defaultdict(int)
        self._streams = self._comm = self._polls = self._broadcasts = 0
        self._launch: Callable[[], None] | None = None
        self._error, self._over, self._joined = "", threading.Event(), threading.Event()
        self._peers: list[socket.socket] = []
        self._warm = np.zeros(1, np.float32)
        self._sockets: list[socket.socket] = []
        weakref.finalize(self, lambda sockets: [each.close() for each in sockets], self._sockets)

    def unique_id(self) -> bytes:
        self._root = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(self._root)
        return self._root.getsockname()[1].to_bytes(2, "big") + os.urandom(126)

    def set_device(self, device: int) -> None:
        if device != self.device:
            raise NcclError("cudaSetDevice: invalid device ordinal (101)")
        self._devices.current = device

    def init(self, world: int, unique_id: bytes, rank: int) -> int:
        self._on_device()
        assert (len(unique_id), rank) == (128, 0)
        self.events.append("init")
        self._comm = 77
        threading.Thread(target=self._accept, args=(world,), daemon=True).start()
        return self._comm

    def ready(self, comm: int) -> bool:
        self._on_device(comm)
        if self._error:
            raise NcclError(f"NCCL communicator: {self._error}")
        if not self._joined.is_set():
            return False
        if self._launch:
            self._polls += 1
            if self._polls < self.lag:
                return False
            self._outstanding[self._stream] += 1
            self._work.put(self._launch)
            self._launch = None
        return True

    def all_reduce(self, pointer: int, comm: int, stream: int) -> None:
        self._enqueue("all_reduce", comm, stream, lambda: self._reduce(pointer))

    def broadcast(self, pointer: int, nbytes: int, comm: int, stream: int) -> None:
        self._enqueue(f"broadcast {self._broadcasts}", comm, stream, lambda: self._send(pointer, nbytes))
        self._broadcasts += 1

    def abort(self, comm: int) -> None:
        self._on_device(comm)
        self.events.append("abort")
        self._comm = 0
        self._over.set()
        for peer in self._peers:
            peer.close()
        self._root.close()
        self._work.put(None)
        self._outstanding.clear()

    def stream(self) -> int:
        self._on_device()
        self._streams += 1
        return self._streams

    def idle(self, stream: int) -> bool:
        return not self._outstanding[stream]

    def drop_stream(self, stream: int) -> None:
        self.events.append("drop stream")

    def zeros(self, nbytes: int, stream: int) -> int:
        assert nbytes == self._warm.nbytes
        return self._warm.ctypes.data

    def free(self, pointer: int) -> None:
        self.events.append("free")

    def device_of(self, pointer: int) -> int | None:
        return self.foreign.get(pointer, self.device)

    def _on_device(self, comm: int | None = None) -> None:
        assert getattr(self._devices, "current", None) == self.device, "this thread has not chosen the device"
        assert comm in (None, self._comm), "a communicator that does not exist (any more)"

    def _accept(self, world: int) -> None:
        self._root.settimeout(0.05)
        ranks = []
        while len(ranks) < world - 1 and not self._over.is_set():
            try:
                peer, _ = self._root.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            peer.settimeout(0.05)
            self._peers.append(peer)
            ranks.append(self._exactly(peer, 1)[0])
        assert self._over.is_set() or sorted(ranks) == list(range(1, world))
        threading.Thread(target=self._run, daemon=True).start()
        self._joined.set()

    def _enqueue(self, name: str, comm: int, stream: int, work: Callable[[], None]) -> None:
        self._on_device(comm)
        if self._launch:
            raise NcclError("Attempt to use communicator before the previous operation returned ncclSuccess")
        self.events.append(name)

        def launch() -> None:
            try:
                work()
            except (OSError, EOFError):
                if not self.silent:
                    self._error = "remote process exited or there was a network error"
            else:
                self.events.append(f"{name} done")
                self._outstanding[stream] -= 1

        self._launch, self._polls, self._stream = launch, 0, stream

    def _run(self) -> None:
        while work := self._work.get():
            work()

    def _reduce(self, pointer: int) -> None:
        own = ctypes.c_float.from_address(pointer)
        total = own.value
        for peer in self._peers:
            assert self._exactly(peer, 1) == b"R"
            total += struct.unpack("!f", self._exactly(peer, 4))[0]
        own.value = total
        for peer in self._peers:
            self._all(peer, HEADER.pack(b"A", 4) + struct.pack("!f", total))

    def _send(self, pointer: int, nbytes: int) -> None:
        for peer in self._peers:
            assert self._exactly(peer, 1) == b"R"
            self._all(peer, HEADER.pack(b"B", nbytes))
        for start in range(0, nbytes, SLICE):
            part = ctypes.string_at(pointer + start, min(SLICE, nbytes - start))
            for peer in self._peers:
                self._all(peer, part)

    def _exactly(self, peer: socket.socket, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            try:
                part = peer.recv(nbytes - len(found))
            except TimeoutError:
                if self._over.is_set():
                    raise EOFError from None
                continue
            if not part:
                raise EOFError
            found += part
        return found

    def _all(self, peer: socket.socket, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[peer.send(view) :]
            except TimeoutError:
                if self._over.is_set():
                    raise EOFError from None


class FakeVllm:
    """vLLM's weight routes on a loopback port, around one FakeWorker. `received`: name -> (type, shape, bytes).

    `requests` are the paths in order; a path in `failures` is answered by its status and does nothing.
    """

    def __init__(self, failures: Mapping[str, int] | None = None):
        self.failures = dict(failures or {})
        self.requests: list[str] = []
        self.received: dict[str, tuple[str, list[int], bytes]] = {}
        self.worker: FakeWorker | None = None
        self.version = "as loaded"
        handler = type("Handler", (_Routes,), {"vllm": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append(path)
        if path in self.failures:
            return self.failures[path], {"error": "scripted"}
        if path == "/get_world_size":
            return 200, {"world_size": 1}
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        if path == "/is_sleeping":
            return 200, {"is_sleeping": False}
        if path == "/init_weight_transfer_engine":
            self.worker = FakeWorker(body["init_info"])
            self.worker.result()
        if path == "/update_weights":
            assert self.worker
            self.worker.update(body["update_info"])
            self.received = {name: tuple(rest) for load in self.worker.result() for name, *rest in load}
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        return 200, {}

    def close(self) -> None:
        if self.worker:
            self.worker.close()
        self._server.shutdown()
        self._server.server_close()


class _Routes(BaseHTTPRequestHandler):
    vllm: FakeVllm

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            status, said = self.vllm.answer(self.path.partition("?")[0], json.loads(body or b"null"))
        except Exception as error:
            status, said = 500, {"error": repr(error)}
        content = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass
