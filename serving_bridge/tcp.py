"""The trainer's end of the tcp transport: serves the weights of one version to every worker that asks for them.

Threads, not coroutines: reading, comparing and sending must not hold up the event loop. What is said on a connection is in
tcp_session.py, the protocol in plugin/gspo_vllm/wire.py.
"""

import collections
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from serving_bridge.plugin.gspo_vllm.channel import HANDSHAKE_S, STALL_S, Channel, WireError, key_of
from serving_bridge.plugin.gspo_vllm.manifest import MAX_FRAME
from serving_bridge.stage import Staged
from serving_bridge.tcp_session import Offer, Request, greet, read_offer, refuse, send

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 3600.0
MAX_CONNECTIONS = 256
KEPT = 16
"""Updates and failures that are remembered."""


@dataclass(frozen=True)
class Served:
    """What went out for one update. `bytes`: on the wire; `workers`: those that were sent all of it."""

    bytes: int = 0
    workers: int = 0


@dataclass(frozen=True)
class _Pull:
    """One connection. `offer` is None until its worker has shown that it knows the token."""

    thread: threading.Thread
    offer: Offer | None = None
    base: Offer | None = None

    def reads(self, staged: Staged) -> bool:
        return any(each is not None and each.staged.path == staged.path for each in (self.offer, self.base))


class WeightSender:
    """Listens from the start, on loopback unless `host` is given, and serves what was last offered. Close it with `close`.

    `host` is what workers connect to as well, so it is a name or address of this machine and not a wildcard. `timeout_s`
    bounds a worker's whole transfer, including the loading there; `stall_s` a time in which it takes nothing. Raises
    ValueError for a wildcard, a token of fewer than 16 characters, or a bucket size out of range; OSError for an address that
    cannot be listened on.
    """

    def __init__(
        self,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        handshake_s: float = HANDSHAKE_S,
        stall_s: float = STALL_S,
    ):
        key_of(token)
        if not 0 < bucket_bytes <= MAX_FRAME:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be 1 to {MAX_FRAME}")
        self._token, self._bucket_bytes = token, bucket_bytes
        self._timeout_s, self._handshake_s, self._stall_s = timeout_s, handshake_s, stall_s
        self._lock = threading.Lock()
        self._current: Offer | None = None
        self._base: Offer | None = None
        self._pulls: dict[Channel, _Pull] = {}
        self._served: dict[str, Served] = {}
        self._failures: collections.deque[str] = collections.deque(maxlen=KEPT)
        self._closed = threading.Event()
        self._listener = _listen(host, port)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        """host:port, for workers."""
        self._acceptor = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._acceptor.start()

    def offer(self, staged: Staged, previous: Staged | None = None) -> None:
        """Serves `staged` under its id from now on and nothing else; what is still being sent of another is broken off.

        A worker that holds `previous`, the version offered before, gets the difference. Both files stay as they are until they
        are released. Offering the same again changes nothing. Raises ValueError for a file that is not what `staged` says;
        OSError.
        """
        with self._lock:
            last = self._current
            if last is not None and last.id == staged.id:
                return
            self._current = offer = read_offer(staged)
            self._base = last if _is_base(last, offer, previous) else None
            self._served = dict([*self._served.items(), (offer.id, Served())][-KEPT:])
            outdated = [channel for channel, pull in self._pulls.items() if pull.offer is not None]
        for channel in outdated:
            channel.abort()

    def release(self, staged: Staged) -> None:
        """Reads the file of `staged` no more, so that it may be written again; what is still being read from it is broken off.

        Of no effect for a file that is not read anyway: call it before every write, with the version that lies there.
        """
        with self._lock:
            if self._base is not None and self._base.staged.path == staged.path:
                self._base = None
            if self._current is not None and self._current.staged.path == staged.path:
                self._current = None
            reading = [channel for channel, pull in self._pulls.items() if pull.reads(staged)]
        for channel in reading:
            channel.abort()

    @property
    def served(self) -> Mapping[str, Served]:
        """By update id, the last 16 of them."""
        with self._lock:
            return dict(self._served)

    @property
    def failures(self) -> tuple[str, ...]:
        """What went wrong with the last 16 connections that failed."""
        with self._lock:
            return tuple(self._failures)

    def close(self, timeout_s: float = 10.0) -> None:
        """Breaks off all transfers and joins all threads. TimeoutError if that takes longer than `timeout_s`."""
        end = time.monotonic() + timeout_s
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._acceptor.join(timeout_s)
        with self._lock:
            pulls = dict(self._pulls)
        for channel in pulls:
            channel.abort()
        threads = [self._acceptor, *(pull.thread for pull in pulls.values())]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._listener.close()
        if left := [thread.name for thread in threads if thread.is_alive()]:
            raise TimeoutError(f"{len(left)} threads that send weights still run after {timeout_s:g} s, the first {left[0]}")

    def __enter__(self) -> "WeightSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or out of descriptors for the moment
                self._closed.wait(0.1)
                continue
            peer = f"worker {address[0]}:{address[1]}"
            channel = Channel(sock, peer, self._timeout_s, self._stall_s)
            thread = threading.Thread(target=self._serve, args=(channel,), name=f"weights for {peer}", daemon=True)
            with self._lock:
                full = len(self._pulls) >= MAX_CONNECTIONS
                if not full:
                    self._pulls[channel] = _Pull(thread)
            if full:
                channel.close()
                self._fail(channel.error(f"at most {MAX_CONNECTIONS} connections", "one more"))
            else:
                thread.start()

    def _serve(self, channel: Channel) -> None:
        offer = None
        try:
            channel.enter("handshake", self._handshake_s)
            request = greet(channel, self._token)
            offer, base = self._matched(channel, request)
            send(channel, request, offer, base, self._bucket_bytes)
            self._count(offer, Served(workers=1))
        except WireError as error:
            self._fail(error)
        except OSError as error:
            self._fail(channel.error("a file that can be read", error))
        finally:
            channel.close()
            if offer is not None:
                self._count(offer, Served(bytes=channel.sent))
            with self._lock:
                del self._pulls[channel]

    def _matched(self, channel: Channel, request: Request) -> tuple[Offer, Offer | None]:
        """What is offered, and what the worker has if it can be the base of a delta. Refuses a request for anything else."""
        with self._lock:
            offer, base = self._current, self._base
            known = offer is not None and offer.id == request.id
            if known:
                base = base if base is not None and base.id == request.base else None
                self._pulls[channel] = replace(self._pulls[channel], offer=offer, base=base)
        if offer is None or not known:
            refuse(channel, "the update is not offered, or not any more")
        return offer, base

    def _count(self, offer: Offer, more: Served) -> None:
        with self._lock:
            if (so_far := self._served.get(offer.id)) is not None:
                self._served[offer.id] = Served(so_far.bytes + more.bytes, so_far.workers + more.workers)

    def _fail(self, error: WireError) -> None:
        with self._lock:
            self._failures.append(str(error))


def _is_base(last: Offer | None, offer: Offer, previous: Staged | None) -> bool:
    """Whether `last` is the previous version, in a file of its own, and made of the same tensors."""
    if last is None or previous is None or last.id != previous.id:
        return False
    return last.staged.path != offer.staged.path and last.tensors == offer.tensors


def _listen(host: str, port: int) -> socket.socket:
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            host = ""
    if not host:
        raise ValueError("the weights are served on one address, not on all; give the name or address that workers reach")
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(where[:2], family=family, backlog=128)
    listener.settimeout(1.0)  # where shutdown does not wake accept
    return listener
