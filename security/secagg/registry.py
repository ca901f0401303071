"""The registry of messages: what each type of message states about itself, once, where it is defined.

A message class is a frozen `Wire` dataclass under the decorator `message`. It states its number, who sends it, what
class of data it carries, under which round the logs file it, whether it is a frame, and how long its open fields are.
Everything else is derived from here: the schema, the envelopes, what a site may send, closed-form sizes, the filing of
log entries and the tables of docs/spec/wire.md. A class that states too little, or a number twice, fails at import.

Adding a message is one class, its tests, and the lists that tests compare (docs/spec/wire.md). Write the class in
`messages` (steps of the protocol) or in `relay` (messages around it), run `scripts/generate-protos`, and give the
message a row in the test of sizes if a site sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, TypeVar

from lazaret.errors import LocalProtocolError
from security.secagg.fields import DataClass, FieldKind, Fixed, Many, Maybe, Nested, Number, Wire, data_class, kinds

# In the envelope beside the message, whose field number is its own: see `Registry.message`.
SEQUENCE_FIELD: Final = 100
LOG_HEAD_FIELD: Final = 101
# Fields that name the attempt a message belongs to: by its context, the hash of that, or the hash with all keys.
_ATTEMPT_FIELDS: Final = ("context", "ctx", "kx")
# Data that a message must own up to: if a field holds it, however deep, the message states no harmless class.
_CONTENT: Final = frozenset(
    {
        DataClass.SEALED_SHARE,
        DataClass.MASK_SHARE,
        DataClass.OPENED_MASK,
        DataClass.MASKED_VECTOR,
        DataClass.AGGREGATE,
        DataClass.MODEL,
        DataClass.MANIFEST,
    }
)


class Sender(Enum):
    """Who may send a message, and so its direction."""

    SITE = auto()
    COORDINATOR = auto()
    BOTH = auto()


class Filing(Enum):
    """Under which round the logs of both ends file a message."""

    NONE = auto()  # it belongs to no attempt
    ATTEMPT = auto()  # it is a step of the attempt that it names: under that attempt's round
    # It names an attempt that may be over, or unknown at the other end: under no round, so that both logs agree.
    PAST_ATTEMPT = auto()
    ROUND = auto()  # it belongs to a round before there is an attempt: under the round that it names


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The public numbers that lengths follow from.

    :param cohort: the members of the attempt; empty outside of one.
    :param vector_bytes: length of the masked vector, from the layout.
    :param head_signatures: signatures on the log head that travels along: 1, or 2 at the change of an epoch.
    :param path: hashes in a consistency proof, where the message has one; members after the sender, for its keys.
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

    @property
    def witness(self) -> str:
        return f"{self.site}.{self.federation}/witness"


# The length of each open field by name: a number for bytes and names, a dictionary for a message, a list for a list.
Lengths = dict[str, Any]
SizeRule = Callable[[Shape], Lengths]
# The numbers of a shape that only the message knows, from the message; an entry of the log shows them to the auditor.
Mentions = Callable[[Any], dict[str, Any]]
_MENTIONED: Final = frozenset({"named", "path", "epochs", "cosigned"})
_ANY_SHAPE: Final = Shape(federation="f", site="s", cohort=("s", "t"), vector_bytes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEntry:
    """What one message class states about itself.

    :param number: its field in the envelope, 1 to 99; never given to another message.
    :param data_class: what it carries, as the privacy log says it.
    :param frame: a piece of something that was announced by a message with a log head; carries none itself.
    :param size: the lengths that its kinds of fields leave open, for messages of a site; the sender's own names, in
        fields called `site` and `federation`, need none.
    :param mentions: which of `named`, `path`, `epochs` and `cosigned` the size rule takes from the message.
    """

    cls: type[Wire]
    number: int
    sender: Sender
    data_class: DataClass
    filing: Filing
    frame: bool
    size: SizeRule | None
    mentions: Mentions | None

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def from_site(self) -> bool:
        return self.sender is not Sender.COORDINATOR

    @property
    def from_coordinator(self) -> bool:
        return self.sender is not Sender.SITE

    def lengths(self, shape: Shape) -> Lengths:
        """The lengths of all open fields."""
        return own_names(shape) | (self.size(shape) if self.size else {})

    def shape_of(self, message: Wire, known: Shape) -> Shape:
        """The public numbers that the length of this message must follow from.

        :param known: what is known without looking at the message.
        """
        mentioned = self.mentions(message) if self.mentions else {}
        if not mentioned.keys() <= _MENTIONED:
            raise LocalProtocolError("a message says nothing about cohort or vector", where=self.name)
        return replace(known, **mentioned)

    def attempt_of(self, message: Wire) -> bytes | None:
        """The hash by which the message names its attempt, None if it belongs to none or brings its whole context."""
        if self.filing not in (Filing.ATTEMPT, Filing.PAST_ATTEMPT):
            return None
        return getattr(message, "kx", None) or getattr(message, "ctx", None)

    def round_of(self, message: Any) -> int | None:
        """The round that the message itself names to be filed under; None if it names none or belongs to an attempt."""
        return int(message.round) if self.filing is Filing.ROUND else None


def own_names(shape: Shape) -> Lengths:
    return {"site": len(shape.site), "federation": len(shape.federation)}


MessageClass = TypeVar("MessageClass", bound=type[Wire])


class Registry:
    """All message classes by number. `REGISTRY` is the only one in use; tests extend a copy of it."""

    def __init__(self, entries: Sequence[MessageEntry] = ()) -> None:
        self._entries = {entry.cls: entry for entry in entries}

    def __iter__(self) -> Iterator[MessageEntry]:
        return iter(sorted(self._entries.values(), key=lambda entry: entry.number))

    def __getitem__(self, cls: type[Wire]) -> MessageEntry:
        found = self._entries.get(cls)
        if found is None:
            raise LocalProtocolError("is not a message", where=cls.__name__)
        return found

    def copy(self) -> Registry:
        return Registry(tuple(self))

    def message(
        self,
        number: int,
        sender: Sender,
        data_class: DataClass,
        *,
        filing: Filing = Filing.NONE,
        frame: bool = False,
        size: SizeRule | None = None,
        mentions: Mentions | None = None,
    ) -> Callable[[MessageClass], MessageClass]:
        """The decorator that makes a class a message; see `MessageEntry` for what is stated."""

        def register(cls: MessageClass) -> MessageClass:
            entry = MessageEntry(
                cls=cls,
                number=number,
                sender=sender,
                data_class=data_class,
                filing=filing,
                frame=frame,
                size=size,
                mentions=mentions,
            )
            self._check_place(entry)
            _check_text(entry)
            _check_data_class(entry)
            _check_filing(entry)
            _check_size(entry)
            self._entries[cls] = entry
            return cls

        return register

    def _check_place(self, new: MessageEntry) -> None:
        if not 1 <= new.number < SEQUENCE_FIELD:
            raise LocalProtocolError(f"{new.number} is not the number of a message", where=new.name)
        for known in self._entries.values():
            if known.number == new.number:
                raise LocalProtocolError(f"number {new.number} is taken by {known.name}", where=new.name)
            if known.name == new.name:
                raise LocalProtocolError("there is a message of this name", where=new.name)

    # What is derived for every message at once.

    def numbers(self) -> dict[type[Wire], int]:
        return {entry.cls: entry.number for entry in self}

    def from_site(self) -> frozenset[type[Wire]]:
        return frozenset(entry.cls for entry in self if entry.from_site)

    def from_coordinator(self) -> frozenset[type[Wire]]:
        return frozenset(entry.cls for entry in self if entry.from_coordinator)

    def frames(self) -> frozenset[type[Wire]]:
        return frozenset(entry.cls for entry in self if entry.frame)

    def permitted(self) -> dict[str, str]:
        """Which class of data each message of a site carries. What is not here does not leave."""
        return {entry.name: entry.data_class.value for entry in self if entry.from_site}


def _check_text(entry: MessageEntry) -> None:
    # A dataclass without a docstring gets its own signature as one.
    if (entry.cls.__doc__ or "").startswith(f"{entry.name}("):
        raise LocalProtocolError("needs a docstring: schema and documentation quote it", where=entry.name)


def _check_data_class(entry: MessageEntry) -> None:
    """Every field has a class of data, and the message owns up to what its fields hold."""
    held = set(_content(entry.cls))
    if entry.sender is Sender.COORDINATOR:
        honest = not held or entry.data_class in held
    else:
        honest = held <= {entry.data_class}
    if not honest:
        words = ", ".join(sorted(held))
        raise LocalProtocolError(f"carries {words} and states {entry.data_class}", where=entry.name)


def _content(cls: type[Wire]) -> Iterator[DataClass]:
    for name, kind in kinds(cls):
        found = data_class(cls, name)
        inner = _item(kind)
        if isinstance(inner, Nested):
            yield from _content(inner.type)
        if found in _CONTENT:
            yield found


def _check_filing(entry: MessageEntry) -> None:
    names = {name for name, _ in kinds(entry.cls)}
    attempt = entry.filing in (Filing.ATTEMPT, Filing.PAST_ATTEMPT)
    if attempt != bool(names.intersection(_ATTEMPT_FIELDS)):
        raise LocalProtocolError("belongs to an attempt if and only if it names one", where=entry.name)
    if entry.filing is Filing.ROUND and "round" not in names:
        raise LocalProtocolError("names no round to be filed under", where=entry.name)


def _check_size(entry: MessageEntry) -> None:
    """The rule of a site's message says the length of each open field, and of no other."""
    if not entry.from_site:
        if entry.size is not None or entry.mentions is not None:
            raise LocalProtocolError("has a size rule, and no site sends it", where=entry.name)
        return
    open_fields = {name for name, kind in kinds(entry.cls) if _is_open(kind)} - set(own_names(_ANY_SHAPE))
    stated = set(entry.size(_ANY_SHAPE)) if entry.size else set()
    if stated != open_fields:
        words = ", ".join(sorted(stated ^ open_fields))
        raise LocalProtocolError(f"needs a size rule for exactly its open fields: {words}", where=entry.name)


def _is_open(kind: FieldKind) -> bool:
    """Whether two values of this kind may differ in length."""
    if isinstance(kind, Nested):
        return any(_is_open(inner) for _, inner in kinds(kind.type))
    return not isinstance(kind, Number | Fixed)


def _item(kind: FieldKind) -> FieldKind:
    return kind.item if isinstance(kind, Many | Maybe) else kind


REGISTRY: Final = Registry()
message: Final = REGISTRY.message
