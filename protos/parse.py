"""Protobuf to message types and back, strict both ways. The only importer of the generated module besides tests.

Shells move raw bytes: they log and hash exactly what travels, then call `decode`. There is one encoding for each
parcel. `decode` encodes what it has read and compares, so that unknown, missing and repeated fields, another order and
over-long numbers are all refused, without a rule for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from google.protobuf.message import DecodeError

from lazaret.errors import CodecError, LocalProtocolError
from protos import federation_pb2 as pb
from protos.schema import field_name
from security.crypto.encoding import U32_MAX
from security.crypto.ring import MAX_PARCEL
from security.secagg import relay
from security.secagg.fields import FieldKind, Many, Maybe, Name, Nested, Number, Wire, kinds
from security.secagg.registry import LOG_HEAD_FIELD, REGISTRY, SEQUENCE_FIELD
from security.secagg.relay import FRAMES, SignedHead

# The one encoding of a message: protobuf's wire format with every field present, in the order of its numbers.
#
# The protobuf library reads; these few lines write. They give pieces instead of one buffer, so that a received frame
# can be compared with its one encoding without copying a vector. A test holds them against the library.

NUMBER_OF: Final = REGISTRY.numbers()
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


def _writer(number: int, kind: FieldKind) -> Writer:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A message with its place on the stream and the sender's newest log head."""

    message: Wire
    sequence: int
    log_head: SignedHead | None = None


@dataclass(frozen=True)
class Direction:
    """Which messages may travel this way, in which envelope."""

    envelope: type[Any]
    allowed: frozenset[type[Wire]]

    @cached_property
    def _types(self) -> dict[str, type[Wire]]:
        return {field_name(cls): cls for cls in self.allowed}

    def encode(self, parcel: Parcel) -> bytes:
        """The one encoding of a parcel.

        :raises LocalProtocolError: for a message that may not travel this way, or is too large for a frame.
        """
        cls = type(parcel.message)
        if cls not in self.allowed:
            raise LocalProtocolError(f"{cls.__name__} does not travel in {self.envelope.DESCRIPTOR.name}")
        if (parcel.log_head is None) != (cls in FRAMES):
            raise LocalProtocolError("every message but a frame carries a log head", where=cls.__name__)
        data = b"".join(parcel_pieces(parcel.message, parcel.sequence, parcel.log_head))
        if len(data) > MAX_PARCEL:
            raise LocalProtocolError(f"{cls.__name__} of {len(data)} bytes is larger than a frame may be")
        return data

    def decode(self, data: bytes) -> Parcel:
        """Read a parcel.

        :raises CodecError: for bytes that are not the one encoding of an allowed message.
        """
        name = self.envelope.DESCRIPTOR.name
        if len(data) > MAX_PARCEL:
            raise CodecError(f"{len(data)} bytes are more than a frame may have", where=name)
        envelope = self.envelope()
        try:
            envelope.ParseFromString(data)
        except DecodeError as error:
            raise CodecError("not a protobuf message", where=name) from error
        chosen = envelope.WhichOneof("message")
        if chosen is None or not envelope.HasField("sequence"):
            raise CodecError("no message or no sequence number", where=name)
        head = _read(SignedHead, envelope.log_head) if envelope.HasField("log_head") else None
        message = _read(self._types[chosen], getattr(envelope, chosen))
        if (head is None) != (type(message) in FRAMES):
            raise CodecError("every message but a frame carries a log head", where=type(message).__name__)
        check_same(parcel_pieces(message, envelope.sequence, head), data, type(message).__name__)
        return Parcel(message=message, sequence=envelope.sequence, log_head=head)


Getter = Callable[[Any], Any]
_GETTERS: dict[type[Wire], tuple[tuple[str, Getter], ...]] = {}


def _read(cls: type[Wire], source: Any) -> Any:
    getters = _GETTERS.get(cls)
    if getters is None:
        getters = _GETTERS[cls] = tuple((name, _getter(cls, name, kind)) for name, kind in kinds(cls))
    return cls(**{name: get(source) for name, get in getters})


def _getter(cls: type[Wire], name: str, kind: FieldKind) -> Getter:
    """How a field is read: lists as tuples; anything else must be there, unless the type says "none or one"."""
    if isinstance(kind, Many):
        item = kind.item
        if isinstance(item, Nested):
            inner = item.type
            return lambda source: tuple(_read(inner, element) for element in getattr(source, name))
        return lambda source: tuple(getattr(source, name))
    nested = kind.item if isinstance(kind, Maybe) else kind
    optional = isinstance(kind, Maybe)

    def get(source: Any) -> Any:
        if source.HasField(name):
            value = getattr(source, name)
            return _read(nested.type, value) if isinstance(nested, Nested) else value
        if optional:
            return None
        raise CodecError("field is missing", where=f"{cls.__name__}.{name}")

    return get


FROM_SITE: Final = Direction(pb.FromSite, relay.FROM_SITE)
FROM_COORDINATOR: Final = Direction(pb.FromCoordinator, relay.FROM_COORDINATOR)
