"""A vLLM worker's end of an update, over the sockets of nccl_fakes.py instead of NCCL. Standard library only, Python 3.10.

`receive` transcribes vLLM's `packed_nccl_broadcast_consumer`. Run as `python nccl_worker.py PACKED_TENSOR.PY` in an environment
with torch, it is that very function instead: a line of JSON with `init_info`, then one with `update_info` for each update, each
answered by a line.
"""

import base64
import contextlib
import hashlib
import importlib.util
import json
import math
import queue
import re
import socket
import struct
import sys
import threading
from typing import Any

HEADER = struct.Struct("!cQ")


class Peer:
    """A rank of a communicator, joined. Every wait is bounded by `timeout_s`; `calls` are its collectives."""

    def __init__(self, init_info, worker=0, before=lambda n: None, timeout_s=20.0):
        unique_id = base64.b64decode(init_info["nccl_unique_id_b64"], validate=True)
        assert len(unique_id) == 128
        port = int.from_bytes(unique_id[:2], "big")
        self.rank = init_info["rank_offset"] + worker
        assert self.rank < init_info["world_size"]
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self.socket.sendall(bytes([self.rank]))
        self.calls, self.before = [], before

    def all_reduce(self, value):
        """The first collective: one float32."""
        self.calls.append("all_reduce")
        self.socket.sendall(b"R" + struct.pack("!f", value))
        kind, size = HEADER.unpack(self.exactly(HEADER.size))
        assert (kind, size) == (b"A", 4), f"an all-reduce of one float32 here, {kind} of {size} bytes at rank 0"
        return struct.unpack("!f", self.exactly(4))[0]

    def broadcast(self, nbytes):
        """The bytes of rank 0. Sizes that differ would hang or corrupt real NCCL; here they fail."""
        self.before(len(self.calls) - 1)
        self.calls.append(nbytes)
        self.socket.sendall(b"R")
        kind, size = HEADER.unpack(self.exactly(HEADER.size))
        assert (kind, size) == (b"B", nbytes), f"a broadcast of {nbytes} bytes here, {kind} of {size} bytes at rank 0"
        return self.exactly(nbytes)

    def exactly(self, nbytes):
        found = bytearray(nbytes)
        view = memoryview(found)
        while view:
            n = self.socket.recv_into(view)
            if not n:
                raise ConnectionError("rank 0 left")
            view = view[n:]
        return bytes(found)

    def close(self):
        self.socket.close()


def receive(peer, init_info, update_info):
    """`[[(name, type, shape, bytes)]]`: what each call of `load_weights` gets."""
    infos = zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True)
    target, buffers = init_info["packed_buffer_size_bytes"], init_info["packed_num_buffers"]
    meta = [[] for _ in range(buffers)]
    sizes = [0] * buffers
    index, loads = 0, []

    def load():
        packed = peer.broadcast(sizes[index])
        start, tensors = 0, []
        for name, dtype, shape, size in meta[index]:
            assert start % itemsize(dtype) == 0, f"{name}: torch cannot view a {dtype} at byte {start}"
            tensors.append((name, dtype, shape, packed[start : start + size]))
            start += size
        loads.append(tensors)

    while True:
        meta[index], sizes[index] = [], 0
        try:
            while True:
                name, dtype, shape = next(infos)
                size = math.prod(shape) * itemsize(dtype)
                meta[index].append((name, dtype, shape, size))
                sizes[index] += size
                if sizes[index] > target:
                    break
            load()
            index = (index + 1) % buffers
        except StopIteration:
            if len(meta[index]) > 0:
                load()
            return loads


def itemsize(dtype):
    """Bytes of an element by the number in a type's name: float8_e4m3fn 1, bfloat16 2."""
    return int(re.findall(r"\d+", dtype)[0]) // 8


class FakeWorker:
    """A worker in a thread: joins, then unpacks the updates it is given. `before(n)` runs before it enters broadcast n."""

    def __init__(self, init_info, worker=0, before=lambda n: None):
        self.init_info, self.worker, self.before = init_info, worker, before
        self.orders, self.answers = queue.SimpleQueue(), queue.SimpleQueue()
        self.calls, self.sum = [], 0.0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def update(self, update_info):
        self.orders.put(json.loads(json.dumps(update_info)))

    def result(self, timeout_s=20.0):
        """What the oldest unanswered step gave: None for joining, then what `receive` returns. Raises what went wrong there."""
        found = self.answers.get(timeout=timeout_s)
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self):
        self.orders.put(None)
        self.thread.join(20)
        assert not self.thread.is_alive()

    def run(self):
        with contextlib.ExitStack() as stack:
            try:
                peer = Peer(self.init_info, self.worker, self.before)
                stack.callback(peer.close)
                self.calls = peer.calls
                self.sum = peer.all_reduce(1.0)
                self.answers.put(None)
                while order := self.orders.get():
                    self.answers.put(receive(peer, self.init_info, order))
            except BaseException as error:
                self.answers.put(error)


def main(path):
    import torch  # pyright: ignore[reportMissingImports]

    spec = importlib.util.spec_from_file_location("packed_tensor", path)
    assert spec
    assert spec.loader
    packed_tensor: Any = importlib.util.module_from_spec(spec)
    sys.modules["packed_tensor"] = packed_tensor
    spec.loader.exec_module(packed_tensor)

    class Stream:
        def synchronize(self):
            pass

    class Group:
        def broadcast(self, tensor, src):
            assert (src, tensor.dtype) == (0, torch.uint8)
            got = peer.broadcast(tensor.numel())
            if got:
                tensor.copy_(torch.frombuffer(bytearray(got), dtype=torch.uint8))

    # there is no accelerator here: streams are all that the function wants of one
    packed_tensor._get_streams = lambda device, n: [Stream() for _ in range(n)]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.accelerator.current_device_index = lambda: 0
    init_info = json.loads(sys.stdin.readline())
    peer = Peer(init_info)
    peer.all_reduce(0.0)
    print("{}", flush=True)
    for line in sys.stdin:
        info, loads = json.loads(line), []
        infos = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=iter([(n, (s, getattr(torch, d))) for n, d, s in infos]),
            group=Group(),
            src=0,
            post_unpack_func=loads.append,
            buffer_size_bytes=init_info["packed_buffer_size_bytes"],
            num_buffers=init_info["packed_num_buffers"],
            device="cpu",
        )
        digest = {
            name: hashlib.sha256(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()
            for load in loads
            for name, tensor in load
        }
        shapes = {name: list(tensor.shape) for load in loads for name, tensor in load}
        print(
            json.dumps({"loads": [[name for name, _ in load] for load in loads], "sha256": digest, "shapes": shapes}),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1])
