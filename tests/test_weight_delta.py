"""Lossless differences: the delta of two versions turns one into the other bit for bit, alone and over the wire."""

import tracemalloc

import numpy as np
import pytest
from helpers_wire import TOKEN, contents, pull, relay, soon, stage_file
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from serving_bridge.plugin.gspo_vllm import delta, manifest, wire
from serving_bridge.plugin.gspo_vllm.channel import WireError
from serving_bridge.tcp import WeightSender

MIB = 1 << 20
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ROOM = 8
"""Words in a byte of the mask."""


def versions(words: int, itemsize: int, changed: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random words, and the same with those at `changed` replaced by others."""
    chance = np.random.default_rng(seed)
    old = np.frombuffer(chance.bytes(words * itemsize), WORDS[itemsize])
    new = old.copy()
    new[changed] ^= chance.integers(1, 256, len(changed)).astype(WORDS[itemsize])
    return old, new


def size_of(words: int, itemsize: int, changed: int) -> int | None:
    """A bit for each word, in whole bytes, and the changed words: nothing if there are none, None if that is no gain."""
    size = (words + ROOM - 1) // ROOM + changed * itemsize
    return 0 if not changed else size if size < words * itemsize else None


def applied(old: np.ndarray, payload: delta.Bytes) -> np.ndarray:
    mirror = bytearray(old.tobytes())
    delta.apply(mirror, payload, old.itemsize)
    return np.frombuffer(mirror, old.dtype)


@st.composite
def edits(draw):
    words, itemsize = draw(st.integers(0, 70)), draw(st.sampled_from(sorted(WORDS)))
    changed = draw(st.lists(st.integers(0, words - 1), unique=True) if words else st.just([]))
    return words, itemsize, changed, draw(st.integers(0, 9))


@given(edits())
def test_any_edit_is_reproduced(case):
    words, itemsize, changed, seed = case
    old, new = versions(words, itemsize, changed, seed)
    payload = delta.encode(old, new, itemsize)
    assert (None if payload is None else len(payload)) == size_of(words, itemsize, len(changed))
    if payload is not None:
        np.testing.assert_array_equal(applied(old, payload), new)
        # read by the definition, bit by bit
        mask, kept = payload[: (words + 7) // 8], bytes(payload[(words + 7) // 8 :])
        places = [i for i in range(words) if len(payload) and mask[i // 8] >> (7 - i % 8) & 1]
        assert places == sorted(changed)
        assert kept == new[sorted(changed)].tobytes()
    assert delta.changed_share(old, new, itemsize) == (len(changed) / words if words else 0.0)


@pytest.mark.parametrize("itemsize", WORDS)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.03, 0.5, 0.9, 1.0])
def test_edits_of_several_slices(itemsize, share):
    """Longer than SLICE, not a whole number of them, with edits on both sides of each seam."""
    step = delta.SLICE // itemsize
    words = 2 * step + 11
    changed = np.random.default_rng(1).random(words) < share
    changed[[0, step - 1, step, 2 * step - 1, 2 * step, words - 1]] = share > 0
    old, new = versions(words, itemsize, np.flatnonzero(changed).tolist())
    payload = delta.encode(old.tobytes(), new.tobytes(), itemsize)
    expected = size_of(words, itemsize, int(changed.sum()))
    assert (None if payload is None else len(payload)) == expected
    if payload is not None:
        np.testing.assert_array_equal(applied(old, payload), new)
    assert delta.changed_share(old, new, itemsize) == changed.sum() / words


def test_bits_count_and_not_numbers():
    """Another payload of a NaN and another sign of zero are changes; the same NaN is none."""
    old = np.array([0x7FC00000, 0x7FC00000, 0x00000000, 0x3F800000] * 8, np.uint32)
    new = old.copy()
    new[[1, 2]] = 0x7FC00001, 0x80000000
    assert np.isnan(old.view(np.float32)[1])
    assert old.view(np.float32)[2] == new.view(np.float32)[2]
    payload = delta.encode(old.view(np.float32), new.view(np.float32), 4)
    assert payload is not None
    assert len(payload) == 32 // 8 + 2 * 4
    np.testing.assert_array_equal(applied(old, payload), new)
    assert delta.changed_share(old.view(np.float32), new.view(np.float32), 4) == 2 / 32
    assert delta.encode(old.view(np.float32), old.view(np.float32), 4) == b""


@examples(max_examples=200)
@given(edits(), st.data())
def test_damaged_delta_changes_nothing(case, data):
    """Shorter, longer, or with a mask that counts otherwise: an error, and the mirror as it was."""
    words, itemsize, changed, seed = case
    old, new = versions(words, itemsize, changed, seed)
    payload = delta.encode(old, new, itemsize)
    if not payload:
        return
    whole = bytes(payload)
    bit = data.draw(st.integers(0, 8 * ((words + 7) // 8) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 0x80 >> bit % 8
    for damaged in (whole[: data.draw(st.integers(1, len(whole) - 1))], whole + b"x", bytes(flipped)):
        mirror = bytearray(old.tobytes())
        with pytest.raises(ValueError, match="a delta for"):
            delta.apply(mirror, damaged, itemsize)
        assert mirror == old.tobytes()


def test_bits_beyond_the_last_word_are_an_error():
    """Three words, four marked, four sent: the counts agree."""
    mirror = bytearray(6)
    with pytest.raises(ValueError, match="beyond the last"):
        delta.apply(mirror, b"\x90" + b"abcd", 2)
    assert mirror == bytes(6)
    delta.apply(mirror, b"\xa0" + b"abcd", 2)
    assert mirror == b"ab\0\0cd"


def test_sizes_that_do_not_fit():
    for function in (delta.encode, delta.changed_share):
        with pytest.raises(ValueError, match="2 old words and 3 new"):
            function(bytes(4), bytes(6), 2)
        with pytest.raises(ValueError, match="not whole words"):
            function(bytes(3), bytes(3), 2)
        with pytest.raises(ValueError, match="words of 3 bytes"):
            function(bytes(3), bytes(3), 3)


def test_temporaries_stay_small():
    """Of 64 MiB with 3 % changed, looked at in slices: the result and little more, and next to nothing to apply it."""
    words = 32 * MIB
    old = np.zeros(words, np.uint16)
    new = old.copy()
    new[::33] = 1
    tracemalloc.start()
    try:
        payload = delta.encode(old, new, 2)
        _, encoding = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        assert payload is not None
        delta.apply(old, payload, 2)
        _, applying = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(old, new)
    assert encoding < 2 * words + 8 * delta.SLICE
    assert applying - before < words // 8 + 8 * delta.SLICE  # one byte of the mask counts eight words


# -- over the wire

LENGTHS = {
    "embed": ("BF16", 700),
    "a.w": ("F32", 300),
    "a.norm": ("BF16", 9),
    "empty": ("F32", 0),
    "b.w": ("BF16", 3 * MIB // 4),
}


def random_tensors(seed: int) -> dict:
    chance = np.random.default_rng(seed)
    sized = {name: (dtype, n, chance.bytes(n * manifest.ITEMSIZES[dtype])) for name, (dtype, n) in LENGTHS.items()}
    return {name: (dtype, (n,), data) for name, (dtype, n, data) in sized.items()}


def edited(tensors: dict, share: float, seed: int) -> dict:
    chance, new = np.random.default_rng(seed), {}
    for name, (dtype, shape, data) in tensors.items():
        words = np.frombuffer(data, WORDS[manifest.ITEMSIZES[dtype]]).copy()
        words[chance.random(words.size) < share] += 1
        new[name] = dtype, shape, words.tobytes()
    return new


def wire_size(old: dict, new: dict, sent: manifest.Manifest) -> int:
    """Bytes from the trainer, by the protocol: heads, and for each piece of a tensor the smaller of a delta and itself."""
    size = wire.HELLO.size + wire.REPLY.size + len(sent.to_json()) + wire.END.size
    size += len(manifest.buckets(sent.tensors, sent.bucket_bytes)) * (wire.HEAD.size + wire.CRC.size)
    for name, (dtype, _, data) in new.items():
        itemsize = manifest.ITEMSIZES[dtype]
        was, now = (np.frombuffer(each[name][2], WORDS[itemsize]) for each in (old, new))
        for start in range(0, len(data), wire.PIECE):
            part = slice(start // itemsize, (start + wire.PIECE) // itemsize)
            words = now[part].size
            changes = size_of(words, itemsize, int((was[part] != now[part]).sum()))
            size += wire.PART.size + (words * itemsize if changes is None else changes)
    return size


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.6, 1.0])
def test_delta_equals_full_and_costs_what_the_formula_says(tmp_path, share):
    old = random_tensors(0)
    new = edited(old, share, 1)
    first, second, mirror = stage_file(tmp_path, 1, old), stage_file(tmp_path, 2, new), wire.Mirror()
    with WeightSender(TOKEN, bucket_bytes=4000) as sender:
        sender.offer(first)
        assert pull(sender, first, mirror) == contents(old)
        sender.offer(second, first)
        with wire.receive(sender.address, TOKEN, second.id, mirror, timeout_s=30.0) as receiver:
            got = {tensor.name: array.tobytes() for bucket in receiver.buckets() for tensor, array in bucket.views()}
        assert receiver.manifest.base == first.id
        assert got == contents(new)
        assert mirror.base == second.id
        expected = wire_size(old, new, receiver.manifest)
        assert soon(lambda: sender.served[second.id].bytes == expected), (sender.served, expected)
        assert pull(sender, second) == contents(new), "who has no mirror gets all of it"


def test_a_chain_of_deltas_stays_exact(tmp_path):
    """Forty versions, each in the file of two before it, as a trainer does it; a second worker joins in the middle."""
    tensors, mirrors = random_tensors(0), (wire.Mirror(), wire.Mirror())
    kept, kinds = [], []
    with WeightSender(TOKEN) as sender:
        for version in range(40):
            if len(kept) > 1:
                sender.release(kept[-2])
            staged = stage_file(tmp_path, version, tensors)
            sender.offer(staged, kept[-1] if kept else None)
            kept.append(staged)
            for mirror in mirrors[: 1 if version < 20 else 2]:
                kinds.append("full" if mirror.base is None else "delta")
                assert pull(sender, staged, mirror) == contents(tensors)
            tensors = edited(tensors, 0.02, version)
        sizes = [sender.served[name].bytes for name in sender.served]
    assert kinds.count("full") == 2
    assert max(sizes[1:]) < 2 * sum(len(data) for _, _, data in tensors.values()) / 3


def test_whole_tensors_where_a_delta_is_not_possible(tmp_path):
    """Another base, none offered, the same file, other tensors: what arrives is right, and the mirror can go on from it."""
    old, tensors = random_tensors(0), edited(random_tensors(0), 0.1, 1)
    others = {**tensors, "more": ("F32", (1,), b"1234")}

    def base_after(mirror, sender, staged) -> str | None:
        with wire.receive(sender.address, TOKEN, staged.id, mirror, timeout_s=30.0) as receiver:
            list(receiver.buckets())
        assert mirror.base == staged.id
        return receiver.manifest.base

    one, two = stage_file(tmp_path, 1, old), stage_file(tmp_path, 2, tensors)
    with WeightSender(TOKEN) as sender:
        mirror, late = wire.Mirror(), wire.Mirror()
        sender.offer(one)
        assert base_after(mirror, sender, one) is None
        assert base_after(late, sender, one) is None
        sender.offer(two)
        assert base_after(mirror, sender, two) is None, "no previous version was given"
        three = stage_file(tmp_path, 3, old)
        sender.offer(three, two)
        assert base_after(late, sender, three) is None, "it has version 1"
        assert base_after(mirror, sender, three) == two.id
        five = stage_file(tmp_path, 5, tensors)
        sender.offer(five, three)
        assert base_after(mirror, sender, five) is None, "version 3 was in the same file"
        six = stage_file(tmp_path, 6, others)
        sender.offer(six, five)
        assert base_after(mirror, sender, six) is None, "there is one tensor more"
        seven = stage_file(tmp_path, 7, edited(others, 0.1, 2))
        sender.offer(seven, five)
        assert base_after(mirror, sender, seven) is None, "version 5 is not the one before"


def test_mirror_is_invalid_after_half_a_transfer(tmp_path):
    """However it ends early: the next one brings whole tensors, and they are right."""
    old = random_tensors(0)
    new = edited(old, 0.01, 1)
    first, second, mirror = stage_file(tmp_path, 1, old), stage_file(tmp_path, 2, new), wire.Mirror()
    edits = {
        "hung up": lambda at, data: data if at < 12_000 else None,
        "flipped": lambda at, data: data if at < 12_000 else bytes(byte ^ 1 for byte in data),
        "stopped": lambda at, data: data,
    }
    with WeightSender(TOKEN, bucket_bytes=500) as sender:
        for name, edit in edits.items():
            sender.offer(first)
            pull(sender, first, mirror)
            assert mirror.base == first.id
            sender.offer(second, first)
            with relay(sender.address, edit) as (address, _):
                receiver = wire.receive(address, TOKEN, second.id, mirror, timeout_s=30.0)
                assert receiver.manifest.base == first.id
                arriving = receiver.buckets()
                next(arriving)
                if name != "stopped":
                    with pytest.raises(WireError):
                        list(arriving)
                receiver.close()
            assert mirror.base is None
            assert pull(sender, second, mirror) == contents(new)
            assert mirror.base == second.id


def test_a_refusal_leaves_the_mirror_valid(tmp_path):
    old, new = random_tensors(0), random_tensors(1)
    first, second, mirror = stage_file(tmp_path, 1, old), stage_file(tmp_path, 2, new), wire.Mirror()
    with WeightSender(TOKEN) as sender:
        sender.offer(first)
        pull(sender, first, mirror)
        with pytest.raises(WireError, match="not offered"):
            pull(sender, second, mirror)
        assert mirror.base == first.id


def test_base_that_was_written_over_never_gives_wrong_weights(tmp_path):
    """Without `release`, the crc of the result shows that the trainer compared with something else."""
    old = random_tensors(0)
    new = edited(old, 0.05, 1)
    first, second, mirror = stage_file(tmp_path, 1, old), stage_file(tmp_path, 2, new), wire.Mirror()
    with WeightSender(TOKEN) as sender:
        sender.offer(first)
        pull(sender, first, mirror)
        sender.offer(second, first)
        inode = first.path.stat().st_ino
        stage_file(tmp_path, 3, edited(old, 0.05, 2))
        assert first.path.stat().st_ino == inode
        with pytest.raises(WireError, match="bytes with the crc"):
            pull(sender, second, mirror)
        assert mirror.base is None
        assert pull(sender, second, mirror) == contents(new)


def test_released_file_is_not_read_any_more(tmp_path):
    """Transfers that read it end with an error and others do not; the base goes, or the offer itself."""
    old = {f"t{i}": ("U8", (8 * MIB,), bytes(8 * MIB)) for i in range(3)}
    new = {name: (dtype, shape, bytes([1]) * len(data)) for name, (dtype, shape, data) in old.items()}
    first, second = stage_file(tmp_path, 1, old), stage_file(tmp_path, 2, new)
    mirror, other = wire.Mirror(), wire.Mirror()
    with WeightSender(TOKEN, bucket_bytes=MIB) as sender:
        sender.offer(first)
        pull(sender, first, mirror)
        pull(sender, first, other)
        sender.offer(second, first)
        plain = wire.receive(sender.address, TOKEN, second.id, timeout_s=30.0)
        difference = wire.receive(sender.address, TOKEN, second.id, mirror, timeout_s=30.0)
        assert difference.manifest.base == first.id
        sender.release(first)
        with pytest.raises(WireError):
            list(difference.buckets())
        assert sum(array.nbytes for bucket in plain.buckets() for array in bucket.arrays) == 24 * MIB
        with wire.receive(sender.address, TOKEN, second.id, other, timeout_s=30.0) as receiver:
            assert receiver.manifest.base is None
        assert pull(sender, second, mirror) == contents(new)
        plain = wire.receive(sender.address, TOKEN, second.id, timeout_s=30.0)
        sender.release(second)
        with pytest.raises(WireError):
            list(plain.buckets())
        with pytest.raises(WireError, match="not offered"):
            pull(sender, second)
