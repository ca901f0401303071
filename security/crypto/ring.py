"""The rings that vectors are masked in, and how their words are packed (docs/spec/secure-aggregation.md, "Numbers").

In memory a number is a two's complement word of 16, 32 or 64 bits. One of the 24-bit ring lies in a word of 32 with its
sign carried up, so that adding and masking are those of ordinary words and `wrap` alone knows the difference. On the
wire it takes three bytes: a frame holds the lower two bytes of all its words and then the third ones, because copying
two whole columns is ten times as fast as copying three bytes in four.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazaret.errors import LocalProtocolError
from security.crypto.prg import Words

# What is sent in one message, is one leaf of a vector's tree and is checked as one chunk of a sum: whole words of
# two, three, four and eight bytes.
FRAME_BYTES: Final = 192 * 1024
MAX_PARCEL: Final = 4 * 1024 * 1024  # a whole message on the wire
BITS: Final = (16, 24, 32, 64)
DEFAULT_BITS: Final = 24
_WORDS: Final = {16: 2, 24: 4, 32: 4, 64: 8}  # bytes of a number in memory

Packed = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Ring:
    """Whole numbers modulo 2^bits."""

    bits: int

    @property
    def word_bytes(self) -> int:
        """Of a number on the wire."""
        return self.bits // 8

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a number in memory."""
        return np.dtype(f"<u{_WORDS[self.bits]}")

    @property
    def signed_dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<i{_WORDS[self.bits]}")

    @property
    def frame_words(self) -> int:
        return FRAME_BYTES // self.word_bytes

    def wrap(self, words: Words) -> None:
        """Bring words back into the ring, in place, after they were added or masked."""
        if self.bits == 24:
            signed = words.view(self.signed_dtype)
            np.left_shift(signed, 8, out=signed)
            np.right_shift(signed, 8, out=signed)

    def pack(self, words: Words) -> Packed:
        """A vector as it is sent, frame after frame. Reduces to the ring; makes no copy if words are sent as they
        are."""
        if self.bits != 24:
            return words.view(np.uint8)
        data = np.empty(3 * len(words), dtype=np.uint8)
        for start in range(0, len(words), self.frame_words):
            part = words[start : start + self.frame_words]
            low, high = columns(data[3 * start : 3 * (start + len(part))])
            np.copyto(low, part, casting="unsafe")
            np.copyto(high, part >> 16, casting="unsafe")
        return data

    def frame(self, words: Words, index: int) -> bytes:
        """One frame of a vector as it travels."""
        start = index * self.frame_words
        return self.pack(words[start : start + self.frame_words]).tobytes()

    def frames(self, words: Words) -> Iterator[tuple[int, bytes]]:
        """Yield a vector as it travels, frame by frame with their numbers: never more than one frame in memory."""
        for index in range(-(-len(words) // self.frame_words)):
            yield index, self.frame(words, index)

    def unpack(self, data: Buffer | Packed) -> Words:
        """The words of a vector, or of one frame of it, as it came."""
        if len(data) % self.word_bytes:
            raise LocalProtocolError(f"{len(data)} bytes are not a multiple of words of {self.bits} bits")
        if self.bits != 24:
            return np.frombuffer(data, dtype=self.dtype)
        came = np.frombuffer(data, dtype=np.uint8)
        words = np.empty(len(came) // 3, dtype=self.dtype)
        for start in range(0, len(words), self.frame_words):
            part = words[start : start + self.frame_words]
            join_columns(*columns(came[3 * start : 3 * (start + len(part))]), out=part)
        return words


def frames_of(vector: Packed, *, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield a packed vector frame by frame, with their numbers."""
    data = vector.data
    for index in range(first, -(-len(data) // FRAME_BYTES)):
        yield index, bytes(data[index * FRAME_BYTES : (index + 1) * FRAME_BYTES])


Low = npt.NDArray[np.uint16]
High = npt.NDArray[np.uint8]


def columns(frame: Packed) -> tuple[Low, High]:
    """The lower two bytes and the third byte of the words of one frame."""
    words = len(frame) // 3
    return frame[: 2 * words].view("<u2"), frame[2 * words :]


def join_columns(low: Low, high: High, *, out: Words) -> None:
    """The words of 24 bits that have these bytes."""
    signed = out.view(np.int32)
    np.copyto(signed, high.view(np.int8))
    np.left_shift(signed, 16, out=signed)
    np.bitwise_or(signed, low, out=signed)
