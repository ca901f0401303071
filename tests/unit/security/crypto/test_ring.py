"""Numbers of a ring in memory and on the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazaret.errors import LocalProtocolError
from security.crypto.ring import BITS, FRAME_BYTES, Ring, frames_of

RINGS = [Ring(bits) for bits in BITS]


def some_words(ring: Ring, count: int) -> np.ndarray:
    raw = np.random.default_rng(count).bytes(count * ring.dtype.itemsize)
    return np.frombuffer(raw, dtype=ring.dtype).copy()


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("extra", [-1, 0, 1, 70_000])
def test_a_vector_comes_back_wrapped(ring: Ring, extra: int) -> None:
    words = some_words(ring, ring.frame_words + extra)
    data = ring.pack(words)
    assert data.nbytes == len(words) * ring.word_bytes
    back = ring.unpack(data)
    ring.wrap(words)
    assert back.dtype == ring.dtype and (back == words).all()


@pytest.mark.parametrize("ring", RINGS)
def test_frames_are_read_alone(ring: Ring) -> None:
    words = some_words(ring, 2 * ring.frame_words + 5)
    frames = list(frames_of(ring.pack(words)))
    assert [index for index, _ in frames] == [0, 1, 2]
    assert [len(frame) for _, frame in frames] == [FRAME_BYTES, FRAME_BYTES, 5 * ring.word_bytes]
    assert list(frames_of(ring.pack(words), first=1)) == frames[1:]
    ring.wrap(words)
    assert np.array_equal(np.concatenate([ring.unpack(frame) for _, frame in frames]), words)


@given(st.lists(st.integers(-(2**23), 2**23 - 1), min_size=1), st.data())
def test_sums_of_24_bits_are_those_of_whole_numbers(values: list[int], data: st.DataObject) -> None:
    ring = Ring(24)
    others = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=len(values), max_size=len(values)))
    total = np.array(values, dtype="<i4").view("<u4") + np.array(others, dtype="<i4").view("<u4")
    ring.wrap(total)
    due = [(a + b + 2**23) % 2**24 - 2**23 for a, b in zip(values, others, strict=True)]
    assert total.view("<i4").tolist() == due
    assert ring.unpack(ring.pack(total).tobytes()).view("<i4").tolist() == due


def test_the_bytes_of_24_bits() -> None:
    words = np.array([1, -1, 0x123456, -(2**23)], dtype="<i4").view("<u4")
    assert Ring(24).pack(words).tobytes().hex() == "0100ffff56340000" + "00ff1280"


@pytest.mark.parametrize(("bits", "length"), [(24, 4), (32, 6), (64, 12)])
def test_parts_of_numbers_are_refused(bits: int, length: int) -> None:
    with pytest.raises(LocalProtocolError, match="not a multiple of words"):
        Ring(bits).unpack(bytes(length))
