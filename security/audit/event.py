"""The envelope of an entry, the base of every event, and the registry of event types.

The types themselves are in `events.py`. An event knows its fields and their kinds; nothing else about the log does.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar, dataclass_transform, get_type_hints

from security.audit.kinds import COUNT, DIGEST, IDENT, TEXT, TOKEN, Kind, Predicate, optional
from security.errors import CodecError, LocalProtocolError

VERSION: Final = 1


class Event:
    """What happened. `event_type` makes the subclasses."""

    __slots__ = ()
    type: ClassVar[str]

    def __post_init__(self) -> None:
        for name, kind in SCHEMAS[self.type].kinds.items():
            if not kind.accepts(getattr(self, name)):
                raise LocalProtocolError(f"{name} is not {kind.name}", where=self.type)

    def body(self) -> dict[str, Any]:
        """The event's fields as JSON has them."""
        return {name: _plain(getattr(self, name)) for name in SCHEMAS[self.type].keys}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What the verifier needs of one event type: its keys in canonical order, and a predicate for each."""

    cls: type[Event]
    keys: tuple[str, ...]
    kinds: Mapping[str, Kind]
    predicates: tuple[Predicate, ...]

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse a body with other keys, another order of keys, or a value of another kind."""
        if tuple(body) != self.keys:
            raise CodecError("fields are not those of the type", where=self.cls.type)
        for accepts, value in zip(self.predicates, body.values(), strict=True):
            if not accepts(value):
                name = next(key for key in self.keys if body[key] is value)
                raise CodecError(f"{name} is not {self.kinds[name].name}", where=self.cls.type)


SCHEMAS: Final[dict[str, Schema]] = {}

E = TypeVar("E", bound=Event)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def event_type(name: str) -> Callable[[type[E]], type[E]]:
    """Class decorator: make a frozen, slotted, keyword-only dataclass of an event and enter it under `name`, once."""

    def enter(cls: type[E]) -> type[E]:
        if name in SCHEMAS:
            raise LocalProtocolError("event type registered twice", where=name)
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        made.type = name
        hints = get_type_hints(made, include_extras=True)
        found = {field: _kind_of(hints[field]) for field in made.__annotations__}
        keys = tuple(sorted(found))
        predicates = tuple(found[key].accepts for key in keys)
        SCHEMAS[name] = Schema(cls=made, keys=keys, kinds=found, predicates=predicates)
        return made

    return enter


def _kind_of(hint: Any) -> Kind:
    return next(extra for extra in hint.__metadata__ if isinstance(extra, Kind))


def schema_of(name: str) -> Schema:
    """Look a type up; an unknown one lists near matches."""
    try:
        return SCHEMAS[name]
    except KeyError:
        near = ", ".join(difflib.get_close_matches(name, SCHEMAS)) or "see docs/spec/audit-log.md"
        raise CodecError("unknown event type", hint=f"known types that look alike: {near}") from None


def event_from(name: str, body: Mapping[str, Any]) -> Event:
    """The typed event of a parsed body."""
    schema = schema_of(name)
    schema.check(body)
    return schema.cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in body.items()})


# The envelope, in canonical order of keys.
ENVELOPE: Final[Mapping[str, Kind]] = {
    "actor": TEXT,
    "annex_commit": optional(DIGEST),
    "body": Kind(name="an object", accepts=lambda value: type(value) is dict),
    "boot": IDENT,
    "epoch": COUNT,
    "mono_ms": COUNT,
    "origin": TOKEN,
    "round": optional(COUNT),
    "run": optional(TOKEN),
    "seq": COUNT,
    "ts": COUNT,
    "type": TOKEN,
    "v": COUNT,
}
ENVELOPE_KEYS: Final = tuple(ENVELOPE)
_ENVELOPE_PREDICATES: Final = tuple(kind.accepts for kind in ENVELOPE.values())


def check_envelope(entry: Mapping[str, Any]) -> None:
    """Refuse an entry whose envelope is not exactly ours."""
    if type(entry) is not dict or tuple(entry) != ENVELOPE_KEYS:
        raise CodecError("fields are not those of an entry")
    for accepts, value in zip(_ENVELOPE_PREDICATES, entry.values(), strict=True):
        if not accepts(value):
            name = next(key for key in ENVELOPE_KEYS if entry[key] is value)
            raise CodecError(f"{name} is not {ENVELOPE[name].name}")
    if entry["v"] != VERSION:
        raise CodecError(f"entry version is not {VERSION}")
