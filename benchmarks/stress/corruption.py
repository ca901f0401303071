"""False messages made from real ones. A false message is well-formed and in its place; a damaged one is not."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Any, Final

from lazaret.errors import ToolkitError
from protos.parse import Direction, Parcel, parcel_pieces
from security.crypto.ring import MAX_PARCEL
from security.secagg.fields import Bounded, FieldKind, Fixed, Many, Maybe, Name, Nested, Number, Wire, kinds
from security.secagg.relay import FRAMES, SignedHead

NAMES: Final = ("site0", "site1", "site2", "coordinator", "nobody", "A" * 64, "x")
KEPT: Final = 40  # of each type of message
TRIES: Final = 20
DAMAGES: Final = (
    "flipped", "truncated", "extended", "noise", "empty", "other_way", "headless", "sequence", "oversized",
)  # fmt: skip


class Corruptor:
    """Remembers real messages of a stream, and makes false ones of them. Every choice follows from the seed."""

    def __init__(self, seed: str) -> None:
        self.rng = Random(seed)
        self._seen: dict[str, deque[Wire]] = {}
        self._bytes: dict[int, deque[bytes]] = {}

    def saw(self, message: Wire) -> None:
        self._seen.setdefault(type(message).__name__, deque(maxlen=KEPT)).append(message)
        self._gather(message)

    def _gather(self, message: Wire) -> None:
        """Digests, keys and signatures that were used, by length: another one in its place is the best lie."""
        for name, kind in kinds(type(message)):
            value = getattr(message, name)
            if isinstance(kind, Fixed):
                self._bytes.setdefault(kind.length, deque(maxlen=KEPT)).append(value)
            elif isinstance(kind, Nested):
                self._gather(value)

    def __bool__(self) -> bool:
        return bool(self._seen)

    def false(self) -> Wire:
        """An older message again, or one with a field changed. Types are drawn alike, however often each is sent."""
        message: Wire = self.rng.choice(self._seen[self.rng.choice(sorted(self._seen))])
        if self.rng.random() < 0.2:
            return message
        for _ in range(TRIES):
            try:
                return self._changed(message)
            except ToolkitError:  # not a value of this field
                continue
        return message

    def _changed(self, message: Any) -> Any:
        name, kind = self.rng.choice(kinds(type(message)))
        return replace(message, **{name: self._value(kind, getattr(message, name))})

    def _value(self, kind: FieldKind, value: Any) -> Any:
        rng = self.rng
        if isinstance(kind, Number):
            near = (value + 1, value - 1, kind.least, kind.limit, rng.randint(kind.least, kind.limit))
            return min(max(rng.choice(near), kind.least), kind.limit)
        if isinstance(kind, Fixed):
            used = rng.choice(self._bytes.get(kind.length, [value]))
            return rng.choice([_flipped(rng, value), bytes(kind.length), used])
        if isinstance(kind, Bounded):
            longer = value + rng.randbytes(rng.randint(1, 64))
            return rng.choice([_flipped(rng, value), value[: rng.randint(0, len(value))], longer, b""])[: kind.limit]
        if isinstance(kind, Nested):
            return self._changed(value)
        if isinstance(kind, Maybe):
            return None if value is None or rng.random() < 0.3 else self._value(kind.item, value)
        if isinstance(kind, Many):
            return self._list(kind, list(value))
        return rng.choice(NAMES) if isinstance(kind, Name) else value[: rng.randint(1, len(value))]

    def _list(self, kind: Many, items: list[Any]) -> tuple[Any, ...]:
        if not items:
            return ()
        rng, at = self.rng, self.rng.randrange(len(items))
        match rng.randrange(5):
            case 0:
                items[at] = self._value(kind.item, items[at])
            case 1:
                del items[at]
            case 2:
                items.append(items[at])
            case 3:
                rng.shuffle(items)
            case _:
                items = items * (kind.limit // len(items)) if rng.random() < 0.1 else []
        return tuple(items)

    def damaged(self, parcel: Parcel, other: Direction) -> tuple[str, bytes]:
        """Bytes that no reader may take, and what was done to them.

        :param other: the direction in which this message does not travel.
        """
        rng = self.rng
        data = b"".join(parcel_pieces(parcel.message, parcel.sequence, parcel.log_head))
        match how := rng.choice(DAMAGES):
            case "flipped":
                return how, _flipped(rng, data)
            case "truncated":
                return how, data[: rng.randrange(1, len(data))]
            case "extended":
                return how, data + rng.randbytes(rng.randint(1, 64))
            case "noise":
                return how, rng.randbytes(rng.randint(1, 4096))
            case "empty":
                return how, b""
            case "other_way":
                return how, _encoded(other, parcel) or data[::-1]
            case "headless":
                head = None if parcel.log_head is not None else _any_head(self._seen)
                tail = b"" if head is None else b"\0"
                return how, b"".join(parcel_pieces(parcel.message, parcel.sequence, head)) + tail
            case "sequence":
                number = rng.choice([0, parcel.sequence - 1, parcel.sequence + 1, 2**64 - 1])
                return how, b"".join(parcel_pieces(parcel.message, number, parcel.log_head))
        # Just beyond what a parcel may have, or beyond what gRPC lets through.
        return how, bytes(MAX_PARCEL + rng.choice([1, 2048]))


def _flipped(rng: Random, data: bytes) -> bytes:
    if not data:
        return b"\1"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _encoded(direction: Direction, parcel: Parcel) -> bytes | None:
    """The message in the other direction's envelope, where it has a place there."""
    return direction.encode(parcel) if type(parcel.message) in direction.allowed else None


def _any_head(seen: dict[str, deque[Wire]]) -> SignedHead | None:
    return next((found[0].head for name, found in seen.items() if name == "Head"), None)  # type: ignore[attr-defined]


def numbered(direction: Direction, message: Wire, sequence: int, head: SignedHead | None) -> bytes:
    """A message in its place on a stream."""
    own = None if type(message) in FRAMES else head
    return direction.encode(Parcel(message=message, sequence=sequence, log_head=own))
