"""The tcp transport's protocol, and the worker's end of it; the trainer's is serving_bridge/tcp.py.

The worker connects. Both sides prove that they know the token, which itself never travels:

    trainer  hello     magic, protocol, nonce
    worker   request   nonce, MAC(request), request: JSON {"id", "base"}
    trainer  reply     MAC(request, manifest), manifest: JSON; or a refusal and its reason
    trainer  buckets   head (first tensor, tensors, bytes), the tensors' bytes, crc32 of these
    trainer  end       tensors, bytes, MAC(crcs)

In a delta, tensors travel in parts of PIECE bytes, each with its kind and length, and the crc is that of what they become.
Nothing received is ever evaluated, and no memory is taken for a length that was not bounded before. The bytes are checked,
not encrypted, and a crc does not stop a forger: across a network that others can read or write, use a tunnel.
"""

import hmac
import json
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from . import delta
from .channel import CONNECT_S, HANDSHAKE_S, NONCE_BYTES, Channel, Session, WireError, key_of
from .manifest import ITEMSIZES, MAX_JSON, Manifest, Tensor, buckets

MAGIC, PROTOCOL = b"gspo-wts", 1
MAX_REQUEST, MAX_REASON = 4096, 512
PIECE = 1 << 20
HELLO, REQUEST, REPLY = struct.Struct(f"!8sH{NONCE_BYTES}s"), struct.Struct(f"!{NONCE_BYTES}s32sI"), struct.Struct("!c32sI")
HEAD, CRC, PART, END = struct.Struct("!cIIQ"), struct.Struct("!I"), struct.Struct("!cI"), struct.Struct("!cIQ32s")
MANIFEST, REFUSED, BUCKET, WHOLE, CHANGES, LAST = b"M", b"R", b"B", b"W", b"C", b"E"
_ALIGN = 64


@dataclass(frozen=True)
class Bucket:
    """Tensors that have arrived, checked. `arrays`: the bytes of each, uint8 [nbytes]."""

    tensors: tuple[Tensor, ...]
    arrays: tuple[np.ndarray, ...]

    def views(self) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Each tensor with its bytes. With a mirror the bytes are the mirror's: copy what outlives the next update."""
        return zip(self.tensors, self.arrays, strict=True)


def _room(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Memory for the bytes of each tensor, in one piece; each begins where any word may."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    memory = np.empty(end, np.uint8)
    return [memory[start : start + tensor.nbytes] for start, tensor in zip(starts, tensors, strict=True)]


class Mirror:
    """The worker's copy of all weights it received last, so that the trainer need only send what changed.

    `base`: the update it holds, or None: nothing, or parts of one.
    """

    def __init__(self) -> None:
        self.base: str | None = None
        self.tensors: tuple[Tensor, ...] = ()
        self._arrays: list[np.ndarray] = []

    def open(self, tensors: tuple[Tensor, ...]) -> None:
        """From here on it holds parts of an update of these tensors, until `base` says that it holds all of it."""
        self.base = None
        if tensors != self.tensors:
            self.tensors, self._arrays = (), []
            self._arrays = _room(tensors)
            self.tensors = tensors

    def arrays(self, first: int, count: int) -> list[np.ndarray]:
        return self._arrays[first : first + count]


class Receiver:
    """A transfer whose `manifest` is there and whose bytes are not. A context manager; it closes its connection."""

    def __init__(self, channel: Channel, session: Session, manifest: Manifest, mirror: Mirror | None):
        self.manifest = manifest
        self._channel, self._session, self._mirror = channel, session, mirror

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def buckets(self) -> Generator[Bucket, None, None]:
        """Every tensor once, in the manifest's order. At most two buckets are alive, if the caller keeps one.

        Only when this ends of itself was the transfer whole: until then the mirror, if any, is invalid. Raises WireError.
        """
        with self:
            if self._mirror is not None:
                self._mirror.open(self.manifest.tensors)
            crcs = bytearray()
            for number, (first, count) in enumerate(buckets(self.manifest.tensors, self.manifest.bucket_bytes)):
                self._channel.enter(f"bucket {number}")
                yield self._bucket(first, count, crcs)
            self._channel.enter("end")
            self._end(crcs)

    def _bucket(self, first: int, count: int, crcs: bytearray) -> Bucket:
        tensors = self.manifest.tensors[first : first + count]
        expected = BUCKET, first, count, sum(tensor.nbytes for tensor in tensors)
        head = HEAD.unpack(self._channel.read(HEAD.size))
        if head != expected:
            raise self._channel.error(f"the head {expected}", head)
        arrays, crc = _room(tensors) if self._mirror is None else self._mirror.arrays(first, count), 0
        for tensor, array in zip(tensors, arrays, strict=True):
            for start in range(0, array.size, PIECE):
                piece = array[start : start + PIECE]
                if self.manifest.base is None:
                    self._channel.read_into(piece)
                else:
                    self._patch(piece, ITEMSIZES[tensor.dtype])
                crc = zlib.crc32(piece, crc)
        (sent,) = CRC.unpack(self._channel.read(CRC.size))
        if sent != crc:
            raise self._channel.error(f"bytes with the crc {sent:08x}", f"{crc:08x}")
        crcs += CRC.pack(crc)
        return Bucket(tensors, tuple(arrays))

    def _patch(self, piece: np.ndarray, itemsize: int) -> None:
        kind, size = PART.unpack(self._channel.read(PART.size))
        if kind == WHOLE and size == piece.size:
            self._channel.read_into(piece)
        elif kind == CHANGES and size < piece.size:
            try:
                delta.apply(piece, self._channel.read(size), itemsize)
            except ValueError as error:
                raise self._channel.error("a delta", error) from error
        else:
            raise self._channel.error(f"a part of {piece.size} bytes", (kind, size))

    def _end(self, crcs: bytearray) -> None:
        *found, mac = END.unpack(self._channel.read(END.size))
        expected = [LAST, len(self.manifest.tensors), self.manifest.nbytes]
        if found != expected or not hmac.compare_digest(mac, self._session.mac(b"end", crcs)):
            raise self._channel.error(f"the end {expected} over all buckets", found)
        if self._mirror is not None:
            self._mirror.base = self.manifest.id


def receive(address: str, token: str, update_id: str, mirror: Mirror | None = None, *, timeout_s: float) -> Receiver:
    """Connects to the trainer at `address`, host:port, which must prove that it knows `token`, and asks for an update.

    `timeout_s` bounds the whole transfer, including what the caller does with the buckets. `mirror` is used by one transfer
    at a time. Raises WireError; ValueError for an address, token or id that cannot be one.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"the trainer's address {address!r} is not host:port")
    key_of(token)
    request = json.dumps({"id": update_id, "base": mirror.base if mirror is not None else None}).encode()
    if len(request) > MAX_REQUEST:
        raise ValueError(f"a request of {len(request)} bytes; at most {MAX_REQUEST} travel")
    started, limit = time.monotonic(), min(CONNECT_S, timeout_s)
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), limit)
    except OSError as error:
        raise WireError(f"weights, trainer {address}: expected a connection within {limit:g} s, found {error}") from error
    channel = Channel(sock, f"trainer {address}", timeout_s - (time.monotonic() - started))
    try:
        session, manifest = _handshake(channel, token, request)
        _agree(channel, manifest, update_id, mirror)
    except BaseException:
        channel.close()
        raise
    return Receiver(channel, session, manifest, mirror)


def _handshake(channel: Channel, token: str, request: bytes) -> tuple[Session, Manifest]:
    channel.enter("handshake", HANDSHAKE_S)
    magic, protocol, trainer_nonce = HELLO.unpack(channel.read(HELLO.size))
    if (magic, protocol) != (MAGIC, PROTOCOL):
        raise channel.error(f"{MAGIC!r} protocol {PROTOCOL}", f"{magic!r} protocol {protocol}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    session = Session(token, trainer_nonce, nonce)
    channel.write(REQUEST.pack(nonce, session.mac(b"request", request), len(request)), request)
    kind, mac, size = REPLY.unpack(channel.read(REPLY.size))
    if kind == REFUSED and size <= MAX_REASON:
        raise channel.error("the update", f"a refusal: {channel.read(size).decode('ascii', 'replace')!r}")
    if kind != MANIFEST or size > MAX_JSON:
        raise channel.error(f"a manifest of at most {MAX_JSON} bytes", (kind, size))
    channel.enter("manifest")
    text = channel.read(size)
    if not hmac.compare_digest(mac, session.mac(b"manifest", request, text)):
        raise channel.error("a trainer that knows the token", "one that does not")
    try:
        return session, Manifest.from_json(text)
    except ValueError as error:
        raise channel.error("a manifest", error) from error


def _agree(channel: Channel, manifest: Manifest, update_id: str, mirror: Mirror | None) -> None:
    if manifest.id != update_id:
        raise channel.error(f"update {update_id!r}", repr(manifest.id))
    if manifest.base is None:
        return
    if mirror is None or manifest.base != mirror.base or manifest.tensors != mirror.tensors:
        raise channel.error(
            f"a delta to the mirror's {mirror.base if mirror else None!r}, tensor by tensor", repr(manifest.base)
        )
