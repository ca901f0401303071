"""Strict length-prefixed encoding (docs/spec/secure-aggregation.md, "Encoding").

``TLV(x)`` is a u32 big-endian length followed by the bytes; a list is a u32 count followed by its items; integers are
u64 big-endian. There is one encoding for each value: a reader refuses leftovers, short input and over-long prefixes,
so that two different values never sign the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from security.errors import CodecError

T = TypeVar("T")
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1


def u32(value: int) -> bytes:
    if not 0 <= value <= U32_MAX:
        raise CodecError(f"{value} does not fit an unsigned 32-bit field")
    return value.to_bytes(4, "big")


def u64(value: int) -> bytes:
    if not 0 <= value <= U64_MAX:
        raise CodecError(f"{value} does not fit an unsigned 64-bit field")
    return value.to_bytes(8, "big")


def tlv(value: bytes) -> bytes:
    return u32(len(value)) + value


def text(value: str) -> bytes:
    return tlv(value.encode("utf-8"))


def array(items: Sequence[bytes] | Iterable[bytes]) -> bytes:
    """Count, then the items as they are: the caller encodes each with one of the functions above."""
    listed = list(items)
    return u32(len(listed)) + b"".join(listed)


class Reader:
    """Takes fields off the front of a buffer; `finish` refuses what is left over."""

    def __init__(self, data: bytes, what: str = "message") -> None:
        self._data = data
        self._at = 0
        self._what = what

    def raw(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise CodecError(f"{end - len(self._data)} bytes missing", where=self._what)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def u32(self) -> int:
        return int.from_bytes(self.raw(4), "big")

    def u64(self) -> int:
        return int.from_bytes(self.raw(8), "big")

    def tlv(self, *, limit: int) -> bytes:
        length = self.u32()
        if length > limit:
            raise CodecError(f"length prefix {length} exceeds the field's bound of {limit}", where=self._what)
        return self.raw(length)

    def fixed(self, length: int) -> bytes:
        """A TLV whose length the specification fixes."""
        value = self.tlv(limit=length)
        if len(value) != length:
            raise CodecError(f"field has {len(value)} bytes, expected {length}", where=self._what)
        return value

    def text(self, *, limit: int) -> str:
        try:
            return self.tlv(limit=limit).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CodecError("text field is not UTF-8", where=self._what) from error

    def array(self, item: Callable[[Reader], T], *, limit: int) -> tuple[T, ...]:
        count = self.u32()
        if count > limit:
            raise CodecError(f"list of {count} exceeds the bound of {limit}", where=self._what)
        return tuple(item(self) for _ in range(count))

    def finish(self) -> None:
        left = len(self._data) - self._at
        if left:
            raise CodecError(f"{left} bytes left over", where=self._what)
