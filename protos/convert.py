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

from protos import federation_pb2 as pb
from protos.encoding import check_same, parcel_pieces
from protos.schema import field_name
from security import relay
from security.errors import CodecError, LocalProtocolError
from security.relay import FRAMES, MAX_PARCEL, SignedHead
from security.secagg.wire import Kind, Many, Maybe, Nested, Wire, kinds


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


def _getter(cls: type[Wire], name: str, kind: Kind) -> Getter:
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
