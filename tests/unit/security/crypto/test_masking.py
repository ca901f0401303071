"""Mask streams and the two sides of masking."""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import LocalProtocolError
from security.crypto import masking, merkle, prg
from security.crypto.masking import Accumulator, OpenedMasks, SiteMasks
from security.crypto.ring import BITS, FRAME_BYTES, Ring, frames_of
from security.secrets import Secret

KEYS = [Secret(bytes([number] * 32)) for number in range(1, 6)]
# More than two chunks and a part of one, in either word size.
WORDS = 2 * FRAME_BYTES // 3 + 1004


def vector(bits: int = 32, words: int = WORDS) -> np.ndarray:
    return (np.arange(words, dtype="<u8") * 2_654_435_761).astype(f"<u{bits // 8}")


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_streams_are_added_modulo_the_ring(bits: int, workers: int) -> None:
    words = vector(bits)
    expected = words.copy()
    for sign, group in ((1, KEYS[:3]), (-1, KEYS[3:])):
        for key in group:
            mask = np.frombuffer(prg.keystream(key, words.nbytes), dtype=words.dtype)
            expected = expected + mask if sign == 1 else expected - mask
    prg.apply_streams(words, add=KEYS[:3], subtract=KEYS[3:], workers=workers)
    assert (words == expected).all()


def test_a_chunk_is_the_same_alone() -> None:
    whole = vector()
    prg.apply_streams(whole, add=KEYS)
    for start in (0, 4, 65_536, WORDS - 8):
        part = vector()[start : start + 5000].copy()
        prg.apply_streams(part, add=KEYS, offset=start * 4)
        assert (part == whole[start : start + 5000]).all()


def test_an_empty_vector_and_no_streams() -> None:
    empty = vector(words=0)
    prg.apply_streams(empty, add=KEYS, workers=4)
    same = vector(words=8)
    prg.apply_streams(same)
    assert (same == vector(words=8)).all()


@pytest.mark.parametrize(
    "words",
    [np.zeros(8, dtype="<i4"), np.zeros(8, dtype="<f4"), np.zeros((2, 4), dtype="<u4"), np.zeros(16, dtype="<u4")[::2]],
)
def test_only_plain_vectors_of_words(words: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError):
        prg.apply_streams(words, add=KEYS[:1])


def test_signs_follow_the_order_of_ids() -> None:
    masks = SiteMasks.of("b", KEYS[0], {"a": KEYS[1], "c": KEYS[2], "B": KEYS[3]})
    assert [key.reveal()[0] for key in masks.add] == [3]
    assert [key.reveal()[0] for key in masks.subtract] == [2, 4]
    with pytest.raises(LocalProtocolError):
        SiteMasks.of("b", KEYS[0], {"b": KEYS[1]})


@pytest.mark.parametrize("workers", [1, 3])
def test_a_masked_copy_leaves_the_update_alone(workers: int) -> None:
    masks = SiteMasks.of("b", KEYS[0], {"a": KEYS[1], "c": KEYS[2]})
    update, in_place = vector(), vector()
    copied = masking.masked(update, masks, workers=workers)
    masking.mask(in_place, masks)
    assert (copied == in_place).all()
    assert (update == vector()).all()
    with pytest.raises(LocalProtocolError):
        prg.apply_streams(update, source=vector(bits=64))


def test_leaves_of_a_vector() -> None:
    words = vector()
    leaves = masking.leaf_hashes(words.view(np.uint8))
    data = words.tobytes()
    step = FRAME_BYTES
    assert leaves == [merkle.leaf_hash(data[at : at + step]) for at in range(0, len(data), step)]
    assert len(leaves) == 3
    assert masking.vector_root(words.view(np.uint8)) == merkle.root(leaves)


@pytest.mark.parametrize("bits", BITS)
def test_frames_are_added_and_taken_out(bits: int) -> None:
    ring = Ring(bits)
    total = Accumulator(WORDS, ring)
    one = vector(bits=8 * ring.dtype.itemsize)
    ring.wrap(one)
    vectors = [ring.pack(one), ring.pack(one + one.dtype.type(5))]
    for data in vectors:
        for index, frame in frames_of(data):
            total.add(index, frame)
    for index, frame in frames_of(vectors[1]):
        total.take_out(index, memoryview(frame))
    total.unmask(OpenedMasks.of([], {}))
    assert (total.total == one).all()


@pytest.mark.parametrize(("index", "length"), [(-1, FRAME_BYTES), (0, FRAME_BYTES - 4), (0, FRAME_BYTES - 1), (0, 0)])
@pytest.mark.parametrize("bits", BITS)
def test_frames_outside_the_vector(bits: int, index: int, length: int) -> None:
    for place, size in ((index, length), (99, FRAME_BYTES)):
        with pytest.raises(LocalProtocolError):
            Accumulator(WORDS, Ring(bits)).add(place, bytes(size))


@pytest.mark.parametrize("bits", [24, 32])
def test_a_chunk_of_a_sum_is_checked_alone(bits: int) -> None:
    ring = Ring(bits)
    opened = OpenedMasks.of(KEYS[:2], {("a", "b"): KEYS[2], ("c", "b"): KEYS[3]})
    total = vector()
    whole = Accumulator(WORDS, ring)
    for index, frame in frames_of(ring.pack(total)):
        whole.add(index, frame)
    whole.unmask(opened, workers=2)
    start = ring.frame_words
    chunk = total[start : 2 * start].copy()
    masking.unmask_chunk(chunk, opened, ring, index=1)
    assert (chunk == whole.total[start : 2 * start]).all()
