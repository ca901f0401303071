"""How a message type says its bytes: each field names its kind, and everything else follows from that.

A message is a frozen dataclass that derives from `Wire`; its fields are annotated with one of the kinds below. There is
one encoding for each value and one value for each encoding (docs/spec/secure-aggregation.md, section 3): construction
and decoding check the same bounds, and decoding refuses anything left over.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Protocol, Self, get_type_hints

from lazaret.errors import CodecError, LocalProtocolError
from security.crypto import encoding
from security.crypto.encoding import Reader

MAX_SITES = 255  # positions are the non-zero elements of GF(2^8)
MAX_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class FieldKind(Protocol):
    """A field's encoding: `check` refuses what could not be encoded, so `encode` never has to."""

    def check(self, value: Any, where: str) -> None: ...

    def encode(self, value: Any) -> bytes: ...

    def decode(self, reader: Reader) -> Any: ...


@dataclass(frozen=True)
class Number:
    """A u64 with an upper bound."""

    limit: int = encoding.U64_MAX
    least: int = 0

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.limit:
            raise CodecError(f"expected a whole number in {self.least}..{self.limit}", where=where)

    def encode(self, value: Any) -> bytes:
        return encoding.u64(value)

    def decode(self, reader: Reader) -> int:
        return reader.u64()


@dataclass(frozen=True)
class Fixed:
    """Bytes whose length the specification fixes."""

    length: int

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, bytes) or len(value) != self.length:
            raise CodecError(f"expected {self.length} bytes", where=where)

    def encode(self, value: Any) -> bytes:
        return encoding.tlv(value)

    def decode(self, reader: Reader) -> bytes:
        return reader.fixed(self.length)


@dataclass(frozen=True)
class Bounded:
    """Bytes of any length up to a bound."""

    limit: int

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, bytes) or len(value) > self.limit:
            raise CodecError(f"expected at most {self.limit} bytes", where=where)

    def encode(self, value: Any) -> bytes:
        return encoding.tlv(value)

    def decode(self, reader: Reader) -> bytes:
        return reader.tlv(limit=self.limit)


@dataclass(frozen=True)
class Name:
    """A site, federation or run id: short, printable, and the same bytes in every encoding."""

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, str) or len(value) > MAX_NAME or not _NAME.fullmatch(value):
            raise CodecError(f"expected a name of 1 to {MAX_NAME} letters, digits, dots or dashes", where=where)

    def encode(self, value: Any) -> bytes:
        return encoding.text(value)

    def decode(self, reader: Reader) -> str:
        return reader.text(limit=MAX_NAME)


@dataclass(frozen=True)
class Nested:
    """Another message's fields, in place."""

    type: type[Wire]

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, self.type):
            raise CodecError(f"expected a {self.type.__name__}", where=where)

    def encode(self, value: Any) -> bytes:
        return bytes(value.to_bytes())

    def decode(self, reader: Reader) -> Wire:
        return self.type.read(reader)


@dataclass(frozen=True)
class Many:
    """A counted list, as a tuple."""

    item: FieldKind
    limit: int = MAX_SITES

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, tuple) or len(value) > self.limit:
            raise CodecError(f"expected a tuple of at most {self.limit}", where=where)
        for element in value:
            self.item.check(element, where)

    def encode(self, value: Any) -> bytes:
        return encoding.array(self.item.encode(element) for element in value)

    def decode(self, reader: Reader) -> tuple[Any, ...]:
        return reader.array(self.item.decode, limit=self.limit)


@dataclass(frozen=True)
class Maybe:
    """A list of none or one."""

    item: FieldKind

    def check(self, value: Any, where: str) -> None:
        if value is not None:
            self.item.check(value, where)

    def encode(self, value: Any) -> bytes:
        return encoding.array([] if value is None else [self.item.encode(value)])

    def decode(self, reader: Reader) -> Any:
        found = reader.array(self.item.decode, limit=1)
        return found[0] if found else None


class DataClass(StrEnum):
    """What kind of information a field or a message carries, in the words of schema and privacy log."""

    CONTROL = "control"  # names, counters, codes
    DIGEST = "digest"
    SIGNATURE = "signature"
    PUBLIC_KEY = "public-key"
    CHECKPOINT = "checkpoint"  # heads of privacy logs
    SEALED_SHARE = "sealed-share"  # encrypted for one peer
    MASK_SHARE = "mask-share"  # of a mask, released only after agreement
    OPENED_MASK = "opened-mask"
    MASKED_VECTOR = "masked-vector"
    AGGREGATE = "aggregate"  # the sum over all survivors
    MODEL = "model"
    MANIFEST = "manifest"


DIGEST = Fixed(32)
SIGNATURE = Fixed(64)
NAME = Name()

# Behind the kind stands the class of data, where the kind does not tell it: see `data_class`.
Digest = Annotated[bytes, DIGEST]
Key = Annotated[bytes, DIGEST, DataClass.PUBLIC_KEY]
Signature = Annotated[bytes, SIGNATURE]
SiteId = Annotated[str, NAME]
Count = Annotated[int, Number()]
Small = Annotated[int, Number(limit=encoding.U32_MAX)]
Digests = Annotated[tuple[bytes, ...], Many(DIGEST)]
SiteIds = Annotated[tuple[str, ...], Many(NAME)]


class Wire:
    """Base of everything that is encoded: messages, certificates and journal records."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    UNSIGNED: ClassVar[frozenset[str]] = frozenset({"signature"})

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, kind in kinds(type(self)):
            kind.check(getattr(self, field), f"{name}.{field}")

    def to_bytes(self) -> bytes:
        return b"".join(kind.encode(getattr(self, field)) for field, kind in kinds(type(self)))

    def body(self) -> bytes:
        """Every field but the signature: what the signature is over."""
        return b"".join(
            kind.encode(getattr(self, field)) for field, kind in kinds(type(self)) if field not in self.UNSIGNED
        )

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return cls(**{field: kind.decode(reader) for field, kind in kinds(cls)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        reader = Reader(data, cls.__name__)
        value = cls.read(reader)
        reader.finish()
        return value


_KINDS: dict[type[Wire], tuple[tuple[str, FieldKind], ...]] = {}
_STATED: dict[type[Wire], dict[str, DataClass]] = {}


def kinds(cls: type[Wire]) -> tuple[tuple[str, FieldKind], ...]:
    """The fields of a type in their order on the wire, each with its kind."""
    found = _KINDS.get(cls)
    if found is None:
        hints = get_type_hints(cls, include_extras=True)
        notes = {name: hints[name].__metadata__ for name in cls.__dataclass_fields__}
        found = tuple((name, note[0]) for name, note in notes.items())
        _STATED[cls] = {name: note[1] for name, note in notes.items() if len(note) > 1}
        _KINDS[cls] = found
    return found


def data_class(cls: type[Wire], name: str) -> DataClass | None:
    """The class of data of a field: what it states, or what its kind tells. None for a message: its fields have theirs.

    :raises LocalProtocolError: for bytes whose kind tells nothing and that state nothing.
    """
    kind = dict(kinds(cls))[name]
    inner = kind.item if isinstance(kind, Many | Maybe) else kind
    stated = _STATED[cls].get(name)
    if stated is not None:
        return stated
    if isinstance(inner, Nested):
        return None
    if isinstance(inner, Number | Name):
        return DataClass.CONTROL
    if inner == DIGEST:
        return DataClass.DIGEST
    if inner == SIGNATURE:
        return DataClass.SIGNATURE
    raise LocalProtocolError("needs a class of data", where=f"{cls.__name__}.{name}")
