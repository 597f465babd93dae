"""What a sender needs of NCCL and of the CUDA runtime, by ctypes: no torch, no headers, nothing to compile."""

import ctypes
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

UNIQUE_ID_BYTES = 128
IN_PROGRESS = 7
_NOT_READY = 600
_UINT8, _FLOAT32, _SUM, _ROOT = 1, 7, 0, 0
_NON_BLOCKING_STREAM = 1
_DEVICE_MEMORY, _MANAGED_MEMORY = 2, 3

VARIABLES = {"nccl": "GSPO_NCCL_LIBRARY", "cudart": "GSPO_CUDART_LIBRARY"}
"""Environment variables that name a library file."""
_WHEELS = {"nccl": ("nccl/lib/libnccl.so.2",), "cudart": ("cuda_runtime/lib/libcudart.so.*", "cu*/lib/libcudart.so.*")}
_LOADER = {"nccl": ("libnccl.so.2",), "cudart": ("libcudart.so.12", "libcudart.so.13", "libcudart.so")}


class NcclError(Exception):
    """NCCL or CUDA refused, a peer failed, or the transfer was aborted. The communicator is gone; a new sender is needed."""


class NcclTimeout(NcclError):
    """A deadline passed: a peer never arrived, died without a word, or expects other tensors."""


class NcclMissing(NcclError):
    """A library was not found or is too old; the message says what to install."""


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, which NCCL takes by value."""

    _fields_ = [("internal", c_char * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """`ncclConfig_t` as NCCL 2.14 had it; later versions read as much as `size` says and default the rest."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]


class _Attributes(ctypes.Structure):
    """`cudaPointerAttributes`, with room for what later versions append."""

    _fields_ = [("type", c_int), ("device", c_int), ("rest", c_char * 128)]


_NCCL: Mapping[str, Sequence[type]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclCommAbort": (c_void_p,),
    "ncclGetErrorString": (c_int,),
    "ncclGetLastError": (c_void_p,),
}
_CUDART: Mapping[str, Sequence[type]] = {
    "cudaSetDevice": (c_int,),
    "cudaStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaStreamQuery": (c_void_p,),
    "cudaStreamDestroy": (c_void_p,),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "cudaFree": (c_void_p,),
    "cudaPointerGetAttributes": (POINTER(_Attributes), c_void_p),
    "cudaGetErrorString": (c_int,),
}
_TEXTS = ("ncclGetErrorString", "ncclGetLastError", "cudaGetErrorString")


class Library:
    """NCCL and the CUDA runtime, loaded. Handles (communicators, streams, device pointers) are ints.

    A communicator never blocks the calling thread: after `init`, `all_reduce` and `broadcast`, poll `ready` until it is true
    before the next of them, and before `idle` means anything. Every method raises NcclError with the library's own reason.
    """

    version: int
    """Of NCCL: 22907 is 2.29.7. All ranks must have the same."""

    def __init__(self, nccl: str | Path | None = None, cudart: str | Path | None = None):
        """Loads both from the given files, else from $GSPO_NCCL_LIBRARY and $GSPO_CUDART_LIBRARY, else from the wheels that
        `jax[cuda12]` or `jax[cuda13]` install, else by the loader's path. Raises NcclMissing."""
        self._nccl = _load("nccl", nccl, _NCCL)
        self._cudart = _load("cudart", cudart, _CUDART)
        version = c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value

    def unique_id(self) -> bytes:
        """A new communicator's id, 128 bytes. Who has it can join, so it is a secret. Needs no GPU."""
        found = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)

    def set_device(self, device: int) -> None:
        """Makes `device` current for the calling thread; every thread that uses a communicator does this first."""
        self._cuda("cudaSetDevice", device)

    def init(self, world: int, unique_id: bytes, rank: int) -> int:
        """Starts to join a communicator of `world` ranks and returns it; it is usable when `ready`."""
        comm, config = c_void_p(), Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)
        by_value = UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRankConfig", ctypes.byref(comm), world, by_value, rank, ctypes.byref(config))
        return comm.value or 0

    def ready(self, comm: int) -> bool:
        """Whether the last operation was handed to the device. Raises NcclError if the communicator has failed since."""
        state = c_int()
        self._call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        self._check("NCCL communicator", state.value)
        return state.value != IN_PROGRESS

    def all_reduce(self, pointer: int, comm: int, stream: int) -> None:
        """Starts the sum of one float32 over all ranks, in place."""
        self._call("ncclAllReduce", pointer, pointer, 1, _FLOAT32, _SUM, comm, stream)

    def broadcast(self, pointer: int, nbytes: int, comm: int, stream: int) -> None:
        """Starts to send `nbytes` bytes of device memory from rank 0, which this must be."""
        self._call("ncclBroadcast", pointer, pointer, nbytes, _UINT8, _ROOT, comm, stream)

    def abort(self, comm: int) -> None:
        """Ends a communicator in whatever state, without the peers; it does not exist afterwards. May block."""
        self._call("ncclCommAbort", comm)

    def stream(self) -> int:
        """A new stream that does not wait for other streams."""
        found = c_void_p()
        self._cuda("cudaStreamCreateWithFlags", ctypes.byref(found), _NON_BLOCKING_STREAM)
        return found.value or 0

    def idle(self, stream: int) -> bool:
        """Whether the device has done all that was put on the stream."""
        return self._cuda("cudaStreamQuery", stream, fine=(0, _NOT_READY)) == 0

    def drop_stream(self, stream: int) -> None:
        self._cuda("cudaStreamDestroy", stream)

    def zeros(self, nbytes: int, stream: int) -> int:
        """The address of `nbytes` zero bytes on the current device, in order with `stream`."""
        found = c_void_p()
        self._cuda("cudaMalloc", ctypes.byref(found), nbytes)
        self._cuda("cudaMemsetAsync", found, 0, nbytes, stream)
        return found.value or 0

    def free(self, pointer: int) -> None:
        """Frees `zeros`. Waits for all of the device's work."""
        self._cuda("cudaFree", pointer)

    def device_of(self, pointer: int) -> int | None:
        """The device that an address belongs to; None for host memory."""
        found = _Attributes()
        self._cuda("cudaPointerGetAttributes", ctypes.byref(found), pointer)
        return found.device if found.type in (_DEVICE_MEMORY, _MANAGED_MEMORY) else None

    def _call(self, name: str, *args: object) -> None:
        self._check(name, getattr(self._nccl, name)(*args))

    def _check(self, what: str, code: int) -> None:
        if code in (0, IN_PROGRESS):
            return
        reason, detail = self._nccl.ncclGetErrorString(code), self._nccl.ncclGetLastError(None)
        raise NcclError(": ".join([what, *(part.decode(errors="replace").strip() for part in (reason, detail) if part)]))

    def _cuda(self, name: str, *args: object, fine: Sequence[int] = (0,)) -> int:
        code = getattr(self._cudart, name)(*args)
        if code not in fine:
            raise NcclError(f"{name}: {self._cudart.cudaGetErrorString(code).decode(errors='replace')} ({code})")
        return code


def _load(kind: str, path: str | Path | None, functions: Mapping[str, Sequence[type]]) -> ctypes.CDLL:
    """The library with the signatures of `functions` set; results are ints, or texts for those in _TEXTS."""
    given = path or os.environ.get(VARIABLES[kind])
    failures = []
    for candidate in [str(given)] if given else _candidates(kind):
        try:
            library = ctypes.CDLL(candidate)
        except OSError as error:
            failures.append(str(error))
            continue
        for name, arguments in functions.items():
            function = getattr(library, name, None)
            if function is None:
                raise NcclMissing(f"{candidate} has no {name}: NCCL 2.14 and CUDA 12, or newer, are needed")
            function.argtypes, function.restype = list(arguments), c_char_p if name in _TEXTS else c_int
        return library
    raise NcclMissing(
        f"no {'NCCL' if kind == 'nccl' else 'CUDA runtime'} library ({'; '.join(failures)}). Install 'jax[cuda12]' or"
        f" 'jax[cuda13]', which bring it, or set {VARIABLES[kind]} to the file"
    )


def _candidates(kind: str) -> Iterator[str]:
    """Files in the `nvidia` wheels' folders, then names for the loader."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for pattern in _WHEELS[kind]:
            yield from map(str, sorted(Path(folder).glob(pattern)))
    yield from _LOADER[kind]


def in_time(call: Callable[[], None], seconds: float, otherwise: str) -> None:
    """Runs what cannot be interrupted in a thread that is left behind when it takes longer: NcclTimeout."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        future.result(seconds)
    except TimeoutError:
        raise NcclTimeout(otherwise) from None
