"""Masks on vectors: added by a site, removed by the coordinator (docs/spec/secure-aggregation.md, "Masks").

With positions i in the order of site ids, ``y_i = z_i + PRG(q_i) + sum_{j>i} PRG(k_ij) - sum_{j<i} PRG(k_ij)`` in the
ring. In the sum over the survivors the pairwise masks of two survivors cancel; their self masks
are opened. For a site that dropped out, the pairwise masks that it shared with survivors are opened too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lazaret.errors import LocalProtocolError
from security.crypto import merkle, prg
from security.crypto.prg import Words
from security.crypto.ring import FRAME_BYTES, Buffer, Packed, Ring, columns, join_columns
from security.secrets import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteMasks:
    """The keys of all masks on one upload, by the sign with which they are added."""

    self_key: Secret
    add: tuple[Secret, ...]
    subtract: tuple[Secret, ...]

    @classmethod
    def of(cls, site: str, self_key: Secret, pair_keys: Mapping[str, Secret]) -> SiteMasks:
        """Sort pair keys, by the peer's id, into those added (peer comes later) and those subtracted."""
        if site in pair_keys:
            raise LocalProtocolError("a site shares no mask with itself")
        return cls(
            self_key=self_key,
            add=tuple(key for peer, key in pair_keys.items() if peer.encode() > site.encode()),
            subtract=tuple(key for peer, key in pair_keys.items() if peer.encode() < site.encode()),
        )


def mask(words: Words, masks: SiteMasks, *, workers: int = 1) -> None:
    """Mask an encoded update in place. The keys must never be used for another vector."""
    prg.apply_streams(words, add=(masks.self_key, *masks.add), subtract=masks.subtract, workers=workers)


def masked(words: Words, masks: SiteMasks, *, workers: int = 1) -> Words:
    """Return a masked copy; cheaper than a copy that is masked in place afterwards."""
    out = np.empty_like(words)
    prg.apply_streams(out, source=words, add=(masks.self_key, *masks.add), subtract=masks.subtract, workers=workers)
    return out


def leaf_hashes(vector: Packed) -> list[bytes]:
    """Hash a vector as it travels, frame by frame: the unit in which sums are checked."""
    data = vector.data
    return [merkle.leaf_hash(data[start : start + FRAME_BYTES]) for start in range(0, len(data), FRAME_BYTES)]


def vector_root(vector: Packed) -> bytes:
    return merkle.root(leaf_hashes(vector))


def words_root(words: Words, ring: Ring) -> bytes:
    """The root of a vector that is not packed, and need not be as a whole."""
    return merkle.root(merkle.leaf_hash(frame) for _, frame in ring.frames(words))


class Accumulator:
    """The coordinator's running sum: one vector, however many sites send.

    Uploads are added (or, for one that turns out incomplete, taken out again) frame by frame; `unmask` then takes off
    the opened masks. Until then the content is uniform noise. Words of 24 bits are added as they travel, lower two
    bytes and third byte apart, which takes half the time of putting every upload together first.
    """

    __slots__ = ("_carry", "_high", "_length", "_low", "_ring", "_total")

    def __init__(self, length: int, ring: Ring) -> None:
        self._ring = ring
        self._length = length
        apart = ring.bits == 24
        # Written, not only reserved: the pages are there before the first frame arrives.
        self._low = _written(length if apart else 0, "<u2")
        self._high = _written(length if apart else 0, np.uint8)
        self._carry = np.empty(ring.frame_words if apart else 0, dtype=np.bool_)
        self._total: Words | None = None if apart else _written(length, ring.dtype)

    @property
    def total(self) -> Words:
        if self._total is None:
            words: Words = np.empty(self._length, dtype=self._ring.dtype)
            for start in range(0, self._length, self._ring.frame_words):
                part = slice(start, start + self._ring.frame_words)
                join_columns(self._low[part], self._high[part], out=words[part])
            return words
        return self._total

    def _place(self, index: int, frame: Buffer) -> slice:
        first, count = index * self._ring.frame_words, len(frame) // self._ring.word_bytes
        whole = count * self._ring.word_bytes == len(frame)
        if not 0 <= first < self._length or count != min(self._ring.frame_words, self._length - first) or not whole:
            raise LocalProtocolError(f"{len(frame)} bytes are not frame {index} of the vector")
        return slice(first, first + count)

    def add(self, index: int, frame: Buffer) -> None:
        place = self._place(index, frame)
        if self._total is not None:
            target = self._total[place]
            np.add(target, self._ring.unpack(frame), out=target)
            return
        low, high, carry = self._low[place], self._high[place], self._carry[: place.stop - place.start]
        more, above = columns(np.frombuffer(frame, dtype=np.uint8))
        np.add(low, more, out=low)
        np.less(low, more, out=carry)
        np.add(high, above, out=high)
        np.add(high, carry.view(np.uint8), out=high)

    def take_out(self, index: int, frame: Buffer) -> None:
        place = self._place(index, frame)
        if self._total is not None:
            target = self._total[place]
            np.subtract(target, self._ring.unpack(frame), out=target)
            return
        low, high, carry = self._low[place], self._high[place], self._carry[: place.stop - place.start]
        less, above = columns(np.frombuffer(frame, dtype=np.uint8))
        np.less(low, less, out=carry)
        np.subtract(low, less, out=low)
        np.subtract(high, above, out=high)
        np.subtract(high, carry.view(np.uint8), out=high)

    def unmask(self, opened: OpenedMasks, *, workers: int = 1) -> None:
        total = self._total = self.total
        self._low, self._high, self._carry = self._low[:0].copy(), self._high[:0].copy(), self._carry[:0].copy()
        prg.apply_streams(total, add=opened.add, subtract=opened.subtract, workers=workers)
        self._ring.wrap(total)


def _written(length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    words = np.empty(length, dtype=dtype)
    words.fill(0)
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedMasks:
    """The keys of the masks that remain on a sum, by the sign that takes them off."""

    add: tuple[Secret, ...]
    subtract: tuple[Secret, ...]

    @classmethod
    def of(cls, self_keys: Iterable[Secret], dropped_pairs: Mapping[tuple[str, str], Secret]) -> OpenedMasks:
        """Take self-mask keys of the survivors and pair keys by (survivor, dropped site)."""
        # A survivor before the dropped site in the order has added the pair's stream, so that it comes off here.
        was_added = {pair: pair[1].encode() > pair[0].encode() for pair in dropped_pairs}
        return cls(
            add=tuple(key for pair, key in dropped_pairs.items() if not was_added[pair]),
            subtract=(*self_keys, *(key for pair, key in dropped_pairs.items() if was_added[pair])),
        )


def unmask_chunk(chunk: Words, opened: OpenedMasks, ring: Ring, *, index: int) -> None:
    """Take the masks off one frame of a sum: how a site checks a part of the result for itself."""
    offset = index * ring.frame_words * chunk.itemsize
    prg.apply_streams(chunk, add=opened.add, subtract=opened.subtract, offset=offset)
    ring.wrap(chunk)
