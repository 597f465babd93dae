"""Lossless differences between two versions of the same weights, in words of the tensors' own type.

A difference is one bit per word, set where the word changed, followed by the changed words; no bytes at all if none did.
Words are compared as bits, so NaNs and signed zeros are nothing special. Knows nothing about tensors or sockets; runs on
both sides, so NumPy is all it may need.
"""

import mmap

import numpy as np

Bytes = bytes | bytearray | memoryview | mmap.mmap | np.ndarray
"""A buffer; of an array, its bytes in order."""
SLICE = 1 << 20
"""Bytes of weights looked at at a time: temporaries stay this small, and in the cache."""
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BITS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def encode(old: Bytes, new: Bytes, itemsize: int) -> memoryview | bytes | None:
    """What turns `old` into `new`, or None if it would be no smaller than `new` itself.

    `old`, `new`: buffers of the same n words of `itemsize` bytes (1, 2, 4 or 8). With k > 0 changed words the result has
    ceil(n / 8) + k * itemsize bytes; with k = 0 it is empty. Raises ValueError for lengths that do not fit.
    """
    was, now = _words(old, itemsize), _words(new, itemsize)
    if was.size != now.size:
        raise ValueError(f"{was.size} old words and {now.size} new ones; a delta needs the same number of both")
    size, step = _mask_bytes(now.size), SLICE // itemsize
    out = None
    for start in range(0, now.size, step):
        changed = was[start : start + step] != now[start : start + step]
        places = np.flatnonzero(changed)
        if not places.size:
            continue
        if size + places.size * itemsize >= now.nbytes:
            return None
        if out is None:
            out = np.zeros(now.nbytes, np.uint8)
        bits = np.packbits(changed)
        out[start // 8 : start // 8 + bits.size] = bits
        kept = now[start : start + step][places].view(np.uint8)
        out[size : size + kept.size] = kept
        size += kept.size
    return b"" if out is None else memoryview(out)[:size]


def apply(mirror: Bytes, payload: Bytes, itemsize: int) -> None:
    """Turns the words of `mirror`, a writable buffer, into those that `payload` was encoded from, in place.

    Raises ValueError, with `mirror` untouched, for a payload that `encode` cannot have made of so many words.
    """
    words = _words(mirror, itemsize)
    data = np.frombuffer(payload, np.uint8)
    if not data.size:
        return
    mask = data[: _mask_bytes(words.size)]
    expected = _mask_bytes(words.size) + int(np.sum(_BITS[mask], dtype=np.int64)) * itemsize
    if data.size != expected:
        raise ValueError(f"a delta for {words.size} words of {itemsize} bytes has {data.size} bytes; its mask says {expected}")
    if words.size % 8 and mask[-1] & (0xFF >> words.size % 8):
        raise ValueError(f"a delta for {words.size} words marks words beyond the last one")
    changed, done = data[mask.size :], 0
    step = SLICE // itemsize
    for start in range(0, words.size, step):
        part = words[start : start + step]
        places = np.flatnonzero(np.unpackbits(mask[start // 8 : (start + step) // 8 + 1], count=part.size))
        kept = places.size * itemsize
        part[places] = changed[done : done + kept].view(words.dtype)
        done += kept


def changed_share(old: Bytes, new: Bytes, itemsize: int) -> float:
    """Share of the words that differ, 0 to 1; 0 where there are none."""
    was, now = _words(old, itemsize), _words(new, itemsize)
    if was.size != now.size:
        raise ValueError(f"{was.size} old words and {now.size} new ones; a comparison needs the same number of both")
    step = SLICE // itemsize
    counts = (np.count_nonzero(was[i : i + step] != now[i : i + step]) for i in range(0, now.size, step))
    return sum(counts) / now.size if now.size else 0.0


def _mask_bytes(words: int) -> int:
    return -(-words // 8)


def _words(buffer: Bytes, itemsize: int) -> np.ndarray:
    if itemsize not in _WORDS:
        raise ValueError(f"words of {itemsize} bytes; expected one of {sorted(_WORDS)}")
    data = np.frombuffer(buffer, np.uint8)
    if data.size % itemsize:
        raise ValueError(f"{data.size} bytes are not whole words of {itemsize} bytes")
    return data.view(_WORDS[itemsize])
