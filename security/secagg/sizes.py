"""How long each message of a site is on the wire, from public numbers alone: the size equation of the egress door.

The outbox refuses a message of any other length, and an auditor recomputes the same from the log. Nothing here looks at
a message: a length that followed from the message itself would prove nothing about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lazaret.errors import LocalProtocolError
from security.crypto.encoding import U32_MAX
from security.crypto.ring import FRAME_BYTES
from security.secagg import relay
from security.secagg.certificates import BOX_BYTES
from security.secagg.fields import Bounded, Fixed, Kind, Many, Maybe, Nested, Number, Wire, kinds
from security.secagg.messages import UploadFrame
from security.secagg.relay import FRAMES, LOG_HEAD_FIELD, SEQUENCE_FIELD, SignedHead

_NUMBER_OF: Final = {cls: number for number, cls in relay.KINDS.items()}
LOG_SIGNATURE_BYTES: Final = 64
COSIGNATURE_BYTES: Final = relay.COSIGNATURE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The public numbers that lengths follow from.

    :param cohort: the members of the attempt; empty outside of one.
    :param vector_bytes: length of the masked vector, from the layout.
    :param head_signatures: signatures on the log head that travels along: 1, or 2 at the change of an epoch.
    :param path: hashes in a consistency proof, where the message has one.
    :param epochs: epoch keys of the log that the message speaks of.
    :param frame: which frame of the vector, and the first one where there are more.
    :param frames: how many frames in a row, each a parcel: a vector is weighed as a whole.
    :param named: the other party or log that the message names (dealer, witness, owner of an advert, origin).
    :param cosigned: cosignatures on the head inside the message.
    """

    federation: str
    site: str
    cohort: Sequence[str] = ()
    vector_bytes: int = 0
    head_signatures: int = 1
    path: int = 0
    epochs: int = 0
    frame: int = 0
    frames: int = 1
    named: str = ""
    cosigned: int = 0

    @property
    def origin(self) -> str:
        return f"{self.site}.{self.federation}/audit"


def expected_bytes(cls: type[Wire], shape: Shape) -> int:
    """The length of the whole parcel on the wire."""
    if cls not in relay.FROM_SITE:
        raise LocalProtocolError(f"{cls.__name__} is not a message of a site")
    if shape.frames != 1:
        return _frames(cls, shape)
    size = _tag(SEQUENCE_FIELD) + 8
    size += _delimited(_NUMBER_OF[cls], _body(cls, _lengths(cls, shape)))
    if cls not in FRAMES:
        size += _delimited(LOG_HEAD_FIELD, _body(SignedHead, _head(shape.origin, shape.head_signatures)))
    return size


def _frames(cls: type[Wire], shape: Shape) -> int:
    """The length of several frames of one vector; all but its last are equal."""
    last = -(-shape.vector_bytes // FRAME_BYTES) - 1
    if cls is not UploadFrame or shape.frames < 1 or shape.frame + shape.frames - 1 > last:
        raise LocalProtocolError("there are no such frames")
    ends_it = shape.frame + shape.frames - 1 == last
    whole = expected_bytes(cls, replace(shape, frame=0, frames=1)) if shape.frames > ends_it else 0
    rest = expected_bytes(cls, replace(shape, frame=last, frames=1)) if ends_it else 0
    return whole * (shape.frames - ends_it) + rest


def _lengths(cls: type[Wire], shape: Shape) -> dict[str, Any]:
    """What the kinds of this type's fields leave open: lengths of names and bytes, and what lists hold."""
    name = cls.__name__
    lengths: dict[str, Any] = {"site": len(shape.site), "federation": len(shape.federation)}
    if name == "Shares":
        lengths["shares"] = [{"box": 0 if member == shape.site else BOX_BYTES} for member in shape.cohort]
    elif name == "Unmask":
        lengths["shares"] = [None] * len(shape.cohort)
    elif name == "UploadFrame":
        lengths["data"] = min(FRAME_BYTES, shape.vector_bytes - shape.frame * FRAME_BYTES)
    elif name == "Ack":
        chunks = -(-shape.vector_bytes // FRAME_BYTES)
        lengths["bitmap"] = -(-chunks // 8)
    elif name == "Accusation":
        lengths["dealer"] = len(shape.named)
    elif name == "Rollback":
        lengths["advert"] = {"site": len(shape.named)}
    elif name == "Head":
        lengths |= {"witness": len(shape.named), "path": [None] * shape.path, "epochs": [{}] * shape.epochs}
        lengths["head"] = _head(shape.origin, shape.head_signatures)
    elif name == "Held":
        lengths |= {"witness": len(shape.site), "epochs": [{}] * shape.epochs}
        lengths["head"] = _head(shape.named, shape.head_signatures, witnesses=[_witness(shape)] * shape.cosigned)
    elif name == "Cosignature":
        lengths |= {"origin": len(shape.named)}
        lengths["signature"] = {"name": len(_witness(shape)), "value": COSIGNATURE_BYTES}
    return lengths


def _witness(shape: Shape) -> str:
    return f"{shape.site}.{shape.federation}/witness"


def _head(origin: str, signatures: int, witnesses: Sequence[str] = ()) -> dict[str, Any]:
    own = [{"name": len(origin), "value": LOG_SIGNATURE_BYTES}] * signatures
    others = [{"name": len(name), "value": COSIGNATURE_BYTES} for name in witnesses]
    return {"origin": len(origin), "signatures": [*own, *others]}


def _body(cls: type[Wire], lengths: dict[str, Any]) -> int:
    return sum(_field(number, kind, lengths.get(name)) for number, (name, kind) in enumerate(kinds(cls), 1))


def _field(number: int, kind: Kind, length: Any) -> int:
    if isinstance(kind, Many):
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
