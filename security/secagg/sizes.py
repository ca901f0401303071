"""How long each message of a site is on the wire, from public numbers alone: the size equation of the egress filter.

The outbox refuses a message of any other length, and an auditor recomputes the same from the log. Nothing here looks at
a message: a length that followed from the message itself would prove nothing about it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lazaret.errors import LocalProtocolError
from security.crypto.encoding import U32_MAX
from security.crypto.ring import FRAME_BYTES
from security.secagg.fields import Bounded, FieldKind, Fixed, Many, Maybe, Nested, Number, Wire, kinds
from security.secagg.registry import LOG_HEAD_FIELD, REGISTRY, SEQUENCE_FIELD, Lengths, MessageEntry, Registry, Shape
from security.secagg.relay import SignedHead, head_lengths


def expected_bytes(cls: type[Wire], shape: Shape, registry: Registry = REGISTRY) -> int:
    """The length of the whole parcel on the wire."""
    entry = registry[cls]
    if not entry.from_site:
        raise LocalProtocolError(f"{cls.__name__} is not a message of a site")
    return _frames(entry, shape) if shape.frames != 1 else _parcel(entry, shape)


def _parcel(entry: MessageEntry, shape: Shape) -> int:
    size = _tag(SEQUENCE_FIELD) + 8
    size += _delimited(entry.number, _body(entry.cls, entry.lengths(shape)))
    if not entry.frame:
        size += _delimited(LOG_HEAD_FIELD, _body(SignedHead, head_lengths(shape.origin, shape.head_signatures)))
    return size


def _frames(entry: MessageEntry, shape: Shape) -> int:
    """The length of several frames of one vector; all but its last are equal."""
    last = -(-shape.vector_bytes // FRAME_BYTES) - 1
    if not entry.frame or shape.frames < 1 or shape.frame + shape.frames - 1 > last:
        raise LocalProtocolError("there are no such frames")
    ends_it = shape.frame + shape.frames - 1 == last
    whole = _parcel(entry, replace(shape, frame=0, frames=1)) if shape.frames > ends_it else 0
    rest = _parcel(entry, replace(shape, frame=last, frames=1)) if ends_it else 0
    return whole * (shape.frames - ends_it) + rest


def _body(cls: type[Wire], lengths: Lengths) -> int:
    return sum(_field(number, kind, lengths.get(name)) for number, (name, kind) in enumerate(kinds(cls), 1))


def _field(number: int, kind: FieldKind, length: Any) -> int:
    if isinstance(kind, Many):
        if len(length) > kind.limit:
            raise LocalProtocolError("a list is longer than its bound")
        return sum(_field(number, kind.item, item) for item in length)
    if isinstance(kind, Maybe):
        return 0 if length is None else _field(number, kind.item, length)
    if isinstance(kind, Number):
        return _tag(number) + (4 if kind.limit <= U32_MAX else 8)
    if isinstance(kind, Fixed):
        return _delimited(number, kind.length)
    if isinstance(kind, Nested):
        return _delimited(number, _body(kind.type, length))
    if length is None or length < 0 or (isinstance(kind, Bounded) and length > kind.limit):
        raise LocalProtocolError("a length is missing or out of bounds")
    return _delimited(number, length)


def _delimited(number: int, length: int) -> int:
    return _tag(number) + _varint(length) + length


def _tag(number: int) -> int:
    return _varint(number << 3)


def _varint(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))
