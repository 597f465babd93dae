"""Weights from the trainer's GPU to vLLM's by NCCL, without torch: the trainer's side of vLLM's own `nccl` engine.

    sender = NcclSender(pack)                      # pack: a jitted function, one chunk's tensors -> their bytes as one array
    sender.init_info(workers)                      # POST /init_weight_transfer_engine {"init_info": ...}, and at the same time
    sender.connect(60)
    sender.update_info(tensors)                    # per update: POST /update_weights {"update_info": ...}, and at the same time
    sender.send(groups, 60)                        # one group of arrays per chunk of `sender.plan`
    sender.close()

Methods block: call them in a thread. When the HTTP half of a pair fails, call `abort` from any thread, and the other half ends
at once. Workers cannot be told: vLLM waits inside NCCL for ever, so after an abort during an update restart the server.
"""

import base64
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from serving_bridge.nccl_library import Library, NcclError, NcclTimeout, in_time
from serving_bridge.nccl_plan import Tensor, checked_chunks, nbytes, update_info

BUFFERS = 2
BUFFER_BYTES = 256 * 2**20
GRACE_S = 10.0
"""For NCCL to end an aborted communicator; then it is left behind."""


def device_pointer(array: Any) -> int:
    """Address of a device array's first byte: a JAX array on one device, or anything with `__cuda_array_interface__`."""
    if hasattr(array, "unsafe_buffer_pointer"):
        return int(array.unsafe_buffer_pointer())
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None or interface.get("strides"):
        raise TypeError(f"{type(array).__name__} is no contiguous device array: neither unsafe_buffer_pointer() nor CUDA's own")
    return int(interface["data"][0])


class NcclSender:
    """Rank 0 of a communicator with vLLM's workers. Every wait is bounded; after any failure it is unusable and says why.

    `pack(arrays)` gives a one-dimensional device array of uint8 with the bytes of one chunk's arrays, one after the other; it
    is called for the next chunk while the last one is on its way. `device`: CUDA's number of its GPU in this process.
    `buffer_bytes`: see `chunks`; each side holds two chunks at a time.
    """

    def __init__(
        self,
        pack: Callable[[list[Any]], Any],
        *,
        library: Library | None = None,
        device: int = 0,
        buffer_bytes: int = BUFFER_BYTES,
    ):
        """Raises NcclMissing without a library, ValueError for a buffer of no bytes."""
        if buffer_bytes < 1:
            raise ValueError(f"buffer_bytes={buffer_bytes} must be >= 1")
        self._pack, self._library, self._device, self._buffer_bytes = pack, library or Library(), device, buffer_bytes
        self.plan: list[list[Tensor]] = []
        self._unique_id, self._world, self._comm = b"", 0, 0
        self._streams: list[int] = []
        self._warm = 0
        self._held: list[Any] = [None] * BUFFERS
        self._busy = threading.Lock()
        self._broken = self._asked = ""

    @property
    def broken(self) -> str:
        """Why it cannot be used any more; empty while it can."""
        return self._broken or self._asked

    def init_info(self, workers: int) -> dict[str, Any]:
        """Mints the communicator's id and gives vLLM's `init_info` for one server of so many workers.

        Workers: tensor x pipeline x data parallel. The id is a secret: whoever has it can join in a worker's place.
        """
        return self.init_infos([workers])[0]

    def init_infos(self, workers: Sequence[int]) -> list[dict[str, Any]]:
        """The same for several servers that receive each update at the same time, in one communicator."""
        self._check_usable()
        if self._comm:
            raise NcclError("the communicator has its workers; another set of them needs another NcclSender")
        if not workers or min(workers) < 1:
            raise ValueError(f"workers={list(workers)} must be at least one server with at least one worker each")
        self._unique_id, self._world = self._library.unique_id(), 1 + sum(workers)
        encoded = base64.b64encode(self._unique_id).decode()
        return [
            {
                "nccl_unique_id_b64": encoded,
                "rank_offset": 1 + sum(workers[:server]),
                "world_size": self._world,
                "packed": True,
                "packed_buffer_size_bytes": self._buffer_bytes,
                "packed_num_buffers": BUFFERS,
            }
            for server in range(len(workers))
        ]

    def connect(self, deadline_s: float) -> None:
        """Joins the communicator while the servers handle `init_info`, and does the first all-reduce that they wait for.

        Raises NcclTimeout if the workers are not all there in time, NcclError otherwise.
        """
        self._check_usable()
        if not self._unique_id or self._comm:
            raise NcclError("connect once, after init_info")
        with self._working("connect", deadline_s) as wait:
            in_time(self._init, deadline_s, f"NCCL did not return from its initialization within {deadline_s:g} s")
            wait(lambda: True, f"{self._world - 1} workers to join (is init_info posted to every server? {self._versions})")
            self._streams = [self._library.stream() for _ in range(BUFFERS)]
            self._warm = self._library.zeros(4, self._streams[0])
            self._library.all_reduce(self._warm, self._comm, self._streams[0])
            wait(lambda: self._library.idle(self._streams[0]), "the workers' first all-reduce")

    def update_info(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """vLLM's `update_info` for these tensors in this order, and `plan`, the chunks that `send` will want.

        Raises ValueError for what the workers could not unpack; see `checked_chunks`.
        """
        self._check_usable()
        self.plan = checked_chunks(tensors, self._buffer_bytes)
        return update_info(tensors)

    def send(self, groups: Iterable[Sequence[tuple[str, Any]]], deadline_s: float) -> int:
        """Sends `(name, array)` of every chunk of `plan` while the servers handle `update_info`; returns the bytes.

        `groups` may be lazy. Any exception, also one of `groups` or `pack`, aborts the communicator; NcclTimeout: workers died
        or expect something else. Time spent inside `groups` and `pack` counts, but is not interrupted.
        """
        self._check_usable()
        plan, rest = self.plan, iter(groups)
        if not self._warm or not plan:
            raise NcclError("send after connect and update_info")
        with self._working("send", deadline_s) as wait:
            for index, chunk in enumerate(plan):
                slot = index % BUFFERS
                stream = self._streams[slot]
                wait(lambda stream=stream: self._library.idle(stream), f"the buffer of chunk {index} of {len(plan)}")
                self._held[slot] = None  # only now may its memory be used again
                self._held[slot] = packed = self._packed(chunk, next(rest, []))
                wait(getattr(packed, "is_ready", lambda: True), f"chunk {index} of {len(plan)} to be packed")
                self._library.broadcast(self._address(packed), packed.nbytes, self._comm, stream)
            if next(rest, None) is not None:
                raise ValueError(f"more than the {len(plan)} groups of the plan")
            for stream in self._streams:
                wait(lambda stream=stream: self._library.idle(stream), "the last chunks to arrive")
            self._held = [None] * BUFFERS
            return sum(nbytes(tensor) for chunk in plan for tensor in chunk)

    def abort(self, reason: str) -> None:
        """Ends everything, from any thread; a `connect` or `send` in progress raises NcclError with the reason."""
        self._asked = self._asked or reason
        if self._busy.acquire(blocking=False):
            try:
                self._stop(reason)
            finally:
                self._busy.release()

    def close(self) -> None:
        """Leaves the communicator, within GRACE_S seconds or twice that when another thread is at work. Again is fine."""
        self._asked = self._asked or "closed"
        if self._busy.acquire(timeout=GRACE_S):
            try:
                self._stop(self._asked)
            finally:
                self._busy.release()

    @property
    def _versions(self) -> str:
        major, rest = divmod(self._library.version, 10000)
        version = f"{major}.{rest // 100}.{rest % 100}"
        return f"NCCL {version} here must be the version that the workers load; GSPO_NCCL_LIBRARY chooses the file"

    def _check_usable(self) -> None:
        if self.broken:
            raise NcclError(f"this sender is unusable: {self.broken}")

    @contextmanager
    def _working(self, what: str, deadline_s: float) -> Iterator[Callable[[Callable[[], bool], str], None]]:
        """One call at a time, on the device, with what waits inside it; whatever goes wrong ends the communicator."""
        if not self._busy.acquire(blocking=False):
            raise NcclError(f"{what}: another thread is using this sender")
        end = time.monotonic() + deadline_s

        def wait(done: Callable[[], bool], for_what: str) -> None:
            pause = 2e-5
            while True:
                if self._asked:
                    raise NcclError(f"{what}: {self._asked} (while waiting for {for_what})")
                if self._library.ready(self._comm) and done():
                    return
                if time.monotonic() > end:
                    raise NcclTimeout(f"{what}: {deadline_s:g} s passed waiting for {for_what}")
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)

        try:
            self._check_usable()
            try:
                self._library.set_device(self._device)
                yield wait
            except BaseException as error:
                self._stop(str(error) or type(error).__name__)
                raise
            if self._asked:  # too late to stop it, not too late to close
                self._stop(self._asked)
        finally:
            self._busy.release()

    def _init(self) -> None:
        self._library.set_device(self._device)
        self._comm = self._library.init(self._world, self._unique_id, 0)

    def _packed(self, chunk: Sequence[Tensor], group: Sequence[tuple[str, Any]]) -> Any:
        if [name for name, _ in group] != [name for name, _, _ in chunk]:
            raise ValueError(f"a group of {[name for name, _ in group]} where the plan has {[name for name, _, _ in chunk]}")
        packed = self._pack([array for _, array in group])
        if packed.nbytes != sum(map(nbytes, chunk)):
            raise ValueError(
                f"pack gave {packed.nbytes} bytes for {chunk[0][0]} ...; update_info says {sum(map(nbytes, chunk))}"
            )
        return packed

    def _address(self, packed: Any) -> int:
        if hasattr(packed, "block_until_ready"):
            packed.block_until_ready()  # it is ready; this raises what went wrong on the device
        pointer = device_pointer(packed)
        found = self._library.device_of(pointer)
        if found != self._device:
            where = "in host memory" if found is None else f"on device {found}"
            raise ValueError(f"pack gave an array {where}; the communicator is on device {self._device}")
        return pointer

    def _stop(self, reason: str) -> None:
        """Ends the communicator without the peers; from now on every method raises with the reason."""
        self._broken = self._broken or reason
        comm, self._comm, self._unique_id = self._comm, 0, b""
        if comm:
            with suppress(NcclError):
                in_time(lambda: self._end(comm), GRACE_S, "NCCL did not end the communicator")
                self._held = [None] * BUFFERS  # else a stuck kernel may still read them

    def _end(self, comm: int) -> None:
        self._library.set_device(self._device)
        self._library.abort(comm)
        while not all(map(self._library.idle, self._streams)):
            time.sleep(1e-3)
        for stream in self._streams:
            self._library.drop_stream(stream)
        if self._warm:
            self._library.free(self._warm)
