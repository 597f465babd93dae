"""One worker's transfer, seen from the trainer: who it is, and the bytes of an offered file, whole or as changes."""

import contextlib
import hmac
import json
import os
import secrets
import zlib
from dataclasses import dataclass
from io import FileIO
from typing import NoReturn

import numpy as np

from serving_bridge.plugin.gspo_vllm import delta, wire
from serving_bridge.plugin.gspo_vllm.channel import NONCE_BYTES, Channel, Session
from serving_bridge.plugin.gspo_vllm.manifest import ITEMSIZES, MAX_FRAME, MAX_JSON, Manifest, Tensor, buckets
from serving_bridge.stage import Staged

MAX_HEADER = MAX_JSON // 2


@dataclass(frozen=True)
class Offer:
    """A staged file that is known to be what it should be."""

    staged: Staged
    tensors: tuple[Tensor, ...]
    """In the order of the file."""
    start: int
    """Offset of the first one's bytes."""
    identity: tuple[int, ...]
    """Of the file, to notice another one in its place."""

    @property
    def id(self) -> str:
        return self.staged.id


@dataclass(frozen=True)
class Request:
    """What a worker that knows the token asks for, and the bytes it asked with."""

    id: str
    base: str | None
    text: bytes
    session: Session


def read_offer(staged: Staged) -> Offer:
    """Raises ValueError when the file is no whole safetensors file, or holds other tensors than `staged` says; OSError."""
    with open(staged.path, "rb") as file:
        identity = _identity(file.fileno())
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER:
            raise ValueError(f"{staged.path}: a header of {size} bytes; expected a safetensors file")
        try:
            head = json.loads(file.read(size))
            head.pop("__metadata__", None)
            entries = sorted((*entry["data_offsets"], name, entry) for name, entry in head.items())
            tensors = tuple(Tensor(name, entry["dtype"], tuple(entry["shape"])) for _, _, name, entry in entries)
            sizes = [tensor.nbytes for tensor in tensors]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{staged.path} is no safetensors file of known types ({error!r})") from error
    end = 0
    for (first, last, name, _), nbytes in zip(entries, sizes, strict=True):
        if (first, last) != (end, end + nbytes) or nbytes > MAX_FRAME:
            raise ValueError(
                f"{staged.path}: {name} is at {first} to {last}; expected {end} to {end + nbytes}, at most {MAX_FRAME} long"
            )
        end = last
    if 8 + size + end != identity[2] or end != staged.nbytes or {t.name for t in tensors} != set(staged.names):
        raise ValueError(
            f"{staged.path}: {len(tensors)} tensors of {end} bytes in a file of {identity[2]}; "
            f"expected the {len(staged.names)} of {staged.nbytes} bytes that were staged"
        )
    return Offer(staged, tensors, 8 + size, identity)


def greet(channel: Channel, token: str) -> Request:
    """The handshake up to the worker's request. WireError, after a refusal, for who does not know the token."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    channel.write(wire.HELLO.pack(wire.MAGIC, wire.PROTOCOL, nonce))
    worker_nonce, mac, size = wire.REQUEST.unpack(channel.read(wire.REQUEST.size))
    if size > wire.MAX_REQUEST:
        refuse(channel, f"the request has {size} bytes; at most {wire.MAX_REQUEST} are read")
    text, session = channel.read(size), Session(token, nonce, worker_nonce)
    if not hmac.compare_digest(mac, session.mac(b"request", text)):
        refuse(channel, "wrong token")
    try:
        said = json.loads(text)
        update_id, base = said["id"], said["base"]
        if not isinstance(update_id, str) or not isinstance(base, str | None):
            raise TypeError("id and base are texts")
    except (ValueError, TypeError, KeyError, RecursionError):
        refuse(channel, "the request is not JSON with id and base")
    return Request(update_id, base, text, session)


def refuse(channel: Channel, reason: str) -> NoReturn:
    text = reason.encode("ascii", "replace")[: wire.MAX_REASON]
    channel.write(wire.REPLY.pack(wire.REFUSED, bytes(32), len(text)), text)
    raise channel.error("a request that can be granted", reason)


def send(channel: Channel, request: Request, offer: Offer, base: Offer | None, bucket_bytes: int) -> None:
    """The manifest, all buckets and the end; as changes to `base` if its file is still there. WireError, OSError."""
    with contextlib.ExitStack() as files:
        new, old = _opened(files, offer), _opened(files, base)
        if new is None:
            refuse(channel, "the file of the update is gone or was replaced")
        manifest = Manifest(offer.id, offer.staged.version, base.id if base and old else None, bucket_bytes, offer.tensors)
        text = manifest.to_json()
        channel.enter("manifest")
        channel.write(wire.REPLY.pack(wire.MANIFEST, request.session.mac(b"manifest", request.text, text), len(text)), text)
        crcs = _send_buckets(channel, manifest, new, old)
        channel.enter("end")
        channel.write(wire.END.pack(wire.LAST, len(offer.tensors), manifest.nbytes, request.session.mac(b"end", crcs)))


def _send_buckets(channel: Channel, manifest: Manifest, new: FileIO, old: FileIO | None) -> bytes:
    """Sends the tensors, which follow one another in both files. Returns the buckets' crcs."""
    pieces, crcs = np.empty((2, wire.PIECE), np.uint8), b""
    for number, (first, count) in enumerate(buckets(manifest.tensors, manifest.bucket_bytes)):
        channel.enter(f"bucket {number}")
        tensors, crc = manifest.tensors[first : first + count], 0
        channel.write(wire.HEAD.pack(wire.BUCKET, first, count, sum(tensor.nbytes for tensor in tensors)))
        for tensor in tensors:
            for start in range(0, tensor.nbytes, wire.PIECE):
                size = min(wire.PIECE, tensor.nbytes - start)
                piece = _read(channel, new, pieces[0, :size])
                crc = zlib.crc32(piece, crc)
                if old is None:
                    channel.write(piece)
                else:
                    _send_changes(channel, _read(channel, old, pieces[1, :size]), piece, ITEMSIZES[tensor.dtype])
        crcs += wire.CRC.pack(crc)
        channel.write(wire.CRC.pack(crc))
    return crcs


def _send_changes(channel: Channel, old: np.ndarray, new: np.ndarray, itemsize: int) -> None:
    changes = delta.encode(old, new, itemsize)
    if changes is None:
        channel.write(wire.PART.pack(wire.WHOLE, new.size), new)
    else:
        channel.write(wire.PART.pack(wire.CHANGES, len(changes)), changes)


def _opened(files: contextlib.ExitStack, offer: Offer | None) -> FileIO | None:
    """The file at its first tensor; None if it is not there any more, or another one is."""
    if offer is None:
        return None
    try:
        file = files.enter_context(offer.staged.path.open("rb", buffering=0))
    except OSError:
        return None
    if _identity(file.fileno()) != offer.identity:
        return None
    file.seek(offer.start)
    return file


def _read(channel: Channel, file: FileIO, piece: np.ndarray) -> np.ndarray:
    """Fills the piece with the next bytes of the file."""
    view, done = memoryview(piece), 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise channel.error("a whole file", f"{file.name} ended early")
        done += count
    return piece


def _identity(descriptor: int) -> tuple[int, ...]:
    """Device, number and bytes of an open file. Not its time, which changes late where it is written through a mapping."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size
