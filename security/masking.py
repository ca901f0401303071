"""Masks on vectors: what a site puts on, what the coordinator takes off (docs/spec/secure-aggregation.md, "Masks").

With positions i in the order of site ids, ``y_i = z_i + PRG(q_i) + sum_{j>i} PRG(k_ij) - sum_{j<i} PRG(k_ij)`` in the
ring of 2^32 or 2^64. In the sum over the survivors the pairwise masks of two survivors cancel; the self masks are
opened, and for a site that dropped out the pairwise masks it shared with survivors are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from security import merkle, prg
from security.errors import LocalProtocolError
from security.prg import Words
from security.secrets import Secret

LEAF_BYTES: Final = prg.CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteMasks:
    """The keys of all masks on one upload, by the sign with which they go on."""

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


def leaf_hashes(words: Words) -> list[bytes]:
    """Hash a vector in leaves of 256 KiB, the unit in which it travels and in which sums are checked."""
    data = words.view(np.uint8).data
    return [merkle.leaf_hash(data[start : start + LEAF_BYTES]) for start in range(0, len(data), LEAF_BYTES)]


def vector_root(words: Words) -> bytes:
    return merkle.root(leaf_hashes(words))


class Accumulator:
    """The coordinator's running sum: one vector, however many sites send.

    Uploads are added (or, for one that turns out incomplete, taken out again) frame by frame; `unmask` then takes off
    the opened masks. Until then the content is uniform noise.
    """

    __slots__ = ("_total",)

    def __init__(self, length: int, *, ring_bits: int) -> None:
        # Written, not only reserved: the pages are there before the first frame arrives.
        self._total = np.empty(length, dtype=f"<u{ring_bits // 8}")
        self._total.fill(0)

    @property
    def total(self) -> Words:
        return self._total

    def _range(self, offset: int, frame: bytes | bytearray | memoryview) -> tuple[Words, Words]:
        size = self._total.itemsize
        if offset < 0 or offset % size or len(frame) % size or offset + len(frame) > self._total.nbytes:
            raise LocalProtocolError(f"a frame of {len(frame)} bytes at {offset} does not lie inside the vector")
        target = self._total[offset // size : (offset + len(frame)) // size]
        return target, np.frombuffer(frame, dtype=self._total.dtype)

    def add(self, offset: int, frame: bytes | bytearray | memoryview) -> None:
        target, words = self._range(offset, frame)
        np.add(target, words, out=target)

    def take_out(self, offset: int, frame: bytes | bytearray | memoryview) -> None:
        target, words = self._range(offset, frame)
        np.subtract(target, words, out=target)

    def unmask(self, opened: OpenedMasks, *, workers: int = 1) -> None:
        prg.apply_streams(self._total, add=opened.add, subtract=opened.subtract, workers=workers)


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


def unmask_chunk(chunk: Words, opened: OpenedMasks, *, offset: int) -> None:
    """Take the masks off one chunk of a sum: how a site checks a part of the result for itself."""
    prg.apply_streams(chunk, add=opened.add, subtract=opened.subtract, offset=offset)
