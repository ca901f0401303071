"""The one encoding of a message: protobuf's wire format with every field present, in the order of its numbers.

The protobuf library reads; these few lines write. They give pieces instead of one buffer, so that a received frame can
be compared with its one encoding without copying a vector. A test holds them against the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from security import relay
from security.codec import U32_MAX
from security.errors import CodecError
from security.relay import LOG_HEAD_FIELD, SEQUENCE_FIELD, SignedHead
from security.secagg.wire import Kind, Many, Maybe, Name, Nested, Number, Wire, kinds

NUMBER_OF: Final = {cls: number for number, cls in relay.KINDS.items()}
_FIXED64, _DELIMITED, _FIXED32 = 1, 2, 5
Pieces = list[bytes]
Writer = Callable[[Any, Pieces], int]


def parcel_pieces(message: Wire, sequence: int, log_head: SignedHead | None) -> Pieces:
    """A message in its envelope."""
    pieces: Pieces = []
    _delimited(NUMBER_OF[type(message)], message, pieces)
    pieces.append(tag(SEQUENCE_FIELD, _FIXED64) + sequence.to_bytes(8, "little"))
    if log_head is not None:
        _delimited(LOG_HEAD_FIELD, log_head, pieces)
    return pieces


def check_same(pieces: Pieces, data: bytes, where: str) -> None:
    """Compare received bytes with the one encoding of what was read from them."""
    at = 0
    for piece in pieces:
        # In place and at the speed of memcmp, which neither slices nor memoryviews are.
        if not data.startswith(piece, at):
            raise CodecError("not the one encoding of this message", where=where)
        at += len(piece)
    if at != len(data):
        raise CodecError(f"{len(data) - at} bytes left over", where=where)


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_WRITERS: dict[type[Wire], tuple[tuple[str, Writer], ...]] = {}


def _writers(cls: type[Wire]) -> tuple[tuple[str, Writer], ...]:
    found = _WRITERS.get(cls)
    if found is None:
        found = tuple((name, _writer(number, kind)) for number, (name, kind) in enumerate(kinds(cls), 1))
        _WRITERS[cls] = found
    return found


def _body(message: Wire, pieces: Pieces) -> int:
    return sum(write(getattr(message, name), pieces) for name, write in _writers(type(message)))


def _delimited(number: int, message: Wire, pieces: Pieces) -> int:
    """Tag and length come before the body, whose length is known only after it: their place is filled at the end."""
    place = len(pieces)
    pieces.append(b"")
    length = _body(message, pieces)
    pieces[place] = tag(number, _DELIMITED) + varint(length)
    return len(pieces[place]) + length


def _writer(number: int, kind: Kind) -> Writer:
    if isinstance(kind, Many):
        each = _writer(number, kind.item)
        return lambda value, pieces: sum(each(item, pieces) for item in value)
    if isinstance(kind, Maybe):
        some = _writer(number, kind.item)
        return lambda value, pieces: 0 if value is None else some(value, pieces)
    if isinstance(kind, Nested):
        return lambda value, pieces: _delimited(number, value, pieces)
    if isinstance(kind, Number):
        return _number_writer(number, 4 if kind.limit <= U32_MAX else 8)
    return _bytes_writer(number, text=isinstance(kind, Name | relay.LogName))


def _number_writer(number: int, width: int) -> Writer:
    start = tag(number, _FIXED32 if width == 4 else _FIXED64)

    def write(value: int, pieces: Pieces) -> int:
        pieces.append(start + value.to_bytes(width, "little"))
        return len(start) + width

    return write


def _bytes_writer(number: int, *, text: bool) -> Writer:
    start = tag(number, _DELIMITED)

    def write(value: Any, pieces: Pieces) -> int:
        data: bytes = value.encode() if text else value
        head = start + varint(len(data))
        pieces += (head, data)
        return len(head) + len(data)

    return write
