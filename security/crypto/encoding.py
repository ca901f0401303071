"""The canonical encodings: length-prefixed bytes for the protocol, canonical JSON for the privacy log; and DER.

Length-prefixed (docs/spec/secure-aggregation.md, section 3): ``TLV(x)`` is a u32 big-endian length followed by the
bytes; a list is a u32 count followed by its items; integers are u64 big-endian. There is one encoding for each value: a
reader refuses trailing bytes, short input and lengths beyond a bound, so that two different values never sign the same
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn, TypeVar

from lazaret.errors import CodecError

# Canonical JSON (RFC 8785). The privacy log allows ASCII keys, text, booleans, null, lists, objects and integers up to
# 2^53 - 1 in size; never a float. On that subset the C encoder of the standard library, with sorted keys and without
# spaces, writes exactly the bytes of RFC 8785 (a property test compares it with the `rfc8785` package), at a tenth of
# the cost.

MAX_INT: Final = 2**53 - 1
MAX_DEPTH: Final = 16

# Keys are in sorted order in whatever `check` and the log's schemas let through, or are sorted here.
_sorted_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _refuse_number(text: str) -> NoReturn:
    raise CodecError(f"a number that is not an integer: {text[:32]}")


_decoder = json.JSONDecoder(parse_float=_refuse_number, parse_constant=_refuse_number)


def check(value: object, depth: int = 0) -> None:
    """Refuse what has no place in the log: floats, large integers, keys that are not ASCII, foreign types.

    :raises CodecError: naming the kind of value, never the value itself.
    """
    kind = type(value)
    if value is None or kind is bool:
        return
    if kind is str:
        try:
            value.encode()  # type: ignore[attr-defined]  # `type() is` does not narrow; isinstance would let subclasses in
        except UnicodeEncodeError:
            raise CodecError("text holds a lone surrogate") from None
    elif kind is int:
        if not -MAX_INT <= value <= MAX_INT:  # type: ignore[operator]  # as above
            raise CodecError("an integer beyond 2^53 - 1: write it as text")
    elif depth >= MAX_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DEPTH} levels")
    elif isinstance(value, dict):
        if not all(type(key) is str and key.isascii() for key in value):
            raise CodecError("an object key is not ASCII text")
        _check_all(value.values(), depth + 1)
    elif isinstance(value, list | tuple):
        _check_all(value, depth + 1)
    else:
        raise CodecError(f"{kind.__name__} cannot be logged: use integers and decimal strings")


def _check_all(values: Iterable[object], depth: int) -> None:
    for value in values:
        check(value, depth)


def dumps(value: object) -> bytes:
    """The one encoding of a value."""
    check(value)
    return _sorted_encoder.encode(value).encode()


def loads(data: bytes) -> Any:
    """Read a value, and refuse bytes that are not its one encoding (duplicate keys, spaces, escapes, order, floats)."""
    value = parse(data)
    if dumps(value) != data:
        raise CodecError("not in canonical form")
    return value


def parse(data: bytes) -> Any:
    """Read JSON without asking for the canonical form: for callers that compare the bytes themselves."""
    try:
        return _decoder.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise CodecError("not JSON in UTF-8") from error


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


def der(tag: int, *parts: bytes) -> bytes:
    """A value of X.690's distinguished encoding: tag, shortest length (section 10.1), content."""
    content = b"".join(parts)
    if len(content) < 128:
        return bytes((tag, len(content))) + content
    size = len(content).to_bytes((len(content).bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(size))) + size + content


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
