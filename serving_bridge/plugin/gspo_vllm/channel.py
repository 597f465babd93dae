"""A socket on which every wait has a deadline, and the proofs with which both ends of it show that they know the token.

Knows nothing about weights; what is said on a channel is in wire.py.
"""

import contextlib
import hmac
import math
import socket
import struct
import time

import numpy as np

CONNECT_S, HANDSHAKE_S, STALL_S = 10.0, 10.0, 120.0
"""To connect; to prove who one is; for one read or write, at most a megabyte."""
NONCE_BYTES = 32
MIN_TOKEN = 16
_JOIN = 1 << 16


class WireError(Exception):
    """A transfer that failed. The message names the peer, the phase, what was expected and what was found."""


class Channel:
    """A connected socket, closed with `close`. `sent` counts the bytes written.

    A read or write ends at the earliest of three deadlines: `timeout_s` for everything together, that of the phase, and
    `stall_s` for itself. It raises WireError then, as it does when the peer goes away.
    """

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float, stall_s: float = STALL_S):
        self._socket, self.peer, self._stall_s = sock, peer, stall_s
        self._end = self._phase_end = time.monotonic() + timeout_s
        self._phase, self.sent = "connected", 0
        with contextlib.suppress(OSError):  # a peer that is gone already shows in the first read
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def enter(self, phase: str, timeout_s: float = math.inf) -> None:
        """From here on errors name `phase`, which as a whole may take `timeout_s`."""
        self._phase, self._phase_end = phase, min(self._end, time.monotonic() + timeout_s)

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes; the caller has bounded it."""
        data = bytearray(size)
        self.read_into(data)
        return bytes(data)

    def read_into(self, buffer: bytearray | np.ndarray) -> None:
        """Fills the buffer."""
        view, done, end = memoryview(buffer), 0, self._deadline()
        while done < len(view):
            try:
                self._wait(end)
                count = self._socket.recv_into(view[done:])
            except OSError as error:
                raise self._failed(error, f"{len(view)} bytes", f"{done} of them") from error
            if not count:
                raise self.error(f"{len(view)} bytes", f"{done} of them; the connection was closed")
            done += count

    def write(self, *parts: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Sends all of it, arrays as uint8 [n]; small parts go together."""
        size, end = sum(map(len, parts)), self._deadline()
        for part in parts if size > _JOIN else [b"".join(parts)]:
            try:
                self._wait(end)
                self._socket.sendall(part)
            except OSError as error:
                raise self._failed(error, f"{size} bytes to be taken", "not all of them were") from error
            self.sent += len(part)

    def error(self, expected: object, found: object) -> WireError:
        return WireError(f"weights, {self.peer}, {self._phase}: expected {expected}, found {found}")

    def abort(self) -> None:
        """Ends what a thread waits for on this channel, with an error there."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _deadline(self) -> float:
        return min(self._end, self._phase_end, time.monotonic() + self._stall_s)

    def _wait(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def _failed(self, error: OSError, expected: str, found: str) -> WireError:
        why = "the deadline passed" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error.strerror or error}"
        return self.error(expected, f"{found}; {why}")


class Session:
    """MACs of one connection: they cover both sides' nonces, so none of them is worth anything on another."""

    def __init__(self, token: str, trainer_nonce: bytes, worker_nonce: bytes):
        self._key, self._nonces = key_of(token), trainer_nonce + worker_nonce

    def mac(self, role: bytes, *parts: bytes | bytearray) -> bytes:
        """32 bytes. `role` says who speaks and about what, so that nobody can be answered with words of their own."""
        digest = hmac.new(self._key, self._nonces, "sha256")
        for part in (role, *parts):
            digest.update(struct.pack("!Q", len(part)))
            digest.update(part)
        return digest.digest()


def key_of(token: str) -> bytes:
    """ValueError for a token that somebody who sees its MACs could guess."""
    if len(token) < MIN_TOKEN:
        raise ValueError(f"the token has {len(token)} characters; expected at least {MIN_TOKEN} random ones")
    return token.encode()
