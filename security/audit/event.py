"""The envelope of an entry, the base of every event, and the registry of event types.

The types themselves are in `events.py`. An event knows its fields and their kinds; nothing else about the log does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, TypeVar, dataclass_transform, get_type_hints

from security.audit import canonical
from security.audit.kinds import COUNT, DIGEST, IDENT, TEXT, TOKEN, Kind, encode, optional
from security.errors import CodecError, LocalProtocolError

VERSION: Final = 1
MAX_LINE: Final = 1 << 16

# The envelope in canonical order; `body`, `type` and `v` are fixed by the event type.
ENVELOPE: Final[Mapping[str, Kind]] = {
    "actor": TEXT,
    "annex_commit": optional(DIGEST),
    "boot": IDENT,
    "epoch": COUNT,
    "mono_ms": COUNT,
    "origin": TOKEN,
    "round": optional(COUNT),
    "run": optional(TOKEN),
    "seq": COUNT,
    "ts": COUNT,
}
ENVELOPE_KEYS: Final = tuple(sorted((*ENVELOPE, "body", "type", "v")))
BODY_GROUP: Final = "body_"


class Event:
    """What happened. `event_type` makes the subclasses.

    :ivar json: the body's canonical JSON, made and checked once: what is logged is what was checked.
    """

    __slots__ = ("json",)
    type: ClassVar[str]
    json: str

    def __post_init__(self) -> None:
        schema = SCHEMAS[self.type]
        text = schema.encoded(self.body())
        if text is None:
            name = next(name for name, kind in schema.kinds.items() if not kind.accepts(getattr(self, name)))
            raise LocalProtocolError(f"{name} is not {schema.kinds[name].name}", where=self.type)
        object.__setattr__(self, "json", text)

    def body(self) -> dict[str, Any]:
        """The event's fields as JSON has them."""
        return {name: getattr(self, name) for name in SCHEMAS[self.type].kinds}


@dataclass(frozen=True, kw_only=True)
class Schema:
    """One event type: its class and the kinds of its fields, in canonical order."""

    cls: type[Event]
    kinds: Mapping[str, Kind]

    @cached_property
    def body(self) -> re.Pattern[str]:
        """What a body of this type looks like."""
        return re.compile(r"\{" + ",".join(f'"{key}":{kind.pattern}' for key, kind in self.kinds.items()) + r"\}")

    def encoded(self, body: Mapping[str, Any]) -> str | None:
        """The JSON of a body of this type; None if it is not one."""
        try:
            text = encode(body)
        except (TypeError, ValueError):
            return None
        return text if self.body.fullmatch(text) else None

    @cached_property
    def line(self) -> re.Pattern[str]:
        """What an entry of this type looks like; one group for each field, those of the body with a prefix."""
        fields = [f'"{key}":(?P<{BODY_GROUP}{key}>{kind.pattern})' for key, kind in self.kinds.items()]
        parts = {key: f"(?P<{key}>{kind.pattern})" for key, kind in ENVELOPE.items()}
        parts |= {"body": rf"\{{{','.join(fields)}\}}", "type": f'"{re.escape(self.cls.type)}"', "v": str(VERSION)}
        return re.compile(r"\{" + ",".join(f'"{key}":{parts[key]}' for key in ENVELOPE_KEYS) + r"\}")


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
        kinds = {key: _kind_of(hints[key]) for key in sorted(made.__annotations__)}
        SCHEMAS[name] = Schema(cls=made, kinds=kinds)
        return made

    return enter


def _kind_of(hint: Any) -> Kind:
    return next(extra for extra in hint.__metadata__ if isinstance(extra, Kind))


def match_line(text: str) -> re.Match[str] | None:
    """The fields of a well-formed entry, still as JSON; None if it is not one. `explain` then says why."""
    # Every entry ends in `"type":"...","v":1}`, so the type can be read from the back; the expression checks it again.
    schema = SCHEMAS.get(text[text.rfind('"', 0, -8) + 1 : -8])
    if schema is None or len(text) > MAX_LINE:
        return None
    return schema.line.fullmatch(text)


def type_of(text: str) -> str:
    """The type of a line that `match_line` has accepted."""
    return text[text.rfind('"', 0, -8) + 1 : -8]


def read_line(line: bytes) -> dict[str, Any]:
    """Parse one entry strictly.

    :raises CodecError: saying what is wrong with it.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise CodecError("not UTF-8") from error
    if match_line(text) is None:
        raise CodecError(explain(line))
    entry: dict[str, Any] = canonical.parse(line)
    return entry


def explain(line: bytes) -> str:
    """Why a line is no entry. Values are not repeated: they may be long, and they may be an attack."""
    if len(line) > MAX_LINE:
        return f"longer than {MAX_LINE} bytes"
    try:
        entry = canonical.loads(line)
    except CodecError as error:
        return error.message
    if not isinstance(entry, dict) or tuple(entry) != ENVELOPE_KEYS:
        return "fields are not those of an entry"
    for name, kind in ENVELOPE.items():
        if not kind.accepts(entry[name]):
            return f"{name} is not {kind.name}"
    if entry["v"] is not VERSION:
        return f"entry version is not {VERSION}"
    schema = SCHEMAS.get(entry["type"]) if isinstance(entry["type"], str) else None
    if schema is None:
        near = ", ".join(difflib.get_close_matches(str(entry["type"]), SCHEMAS))
        return f"unknown event type{f'; did it mean {near}' if near else ''}"
    body = entry["body"]
    if not isinstance(body, dict) or tuple(body) != tuple(schema.kinds):
        return f"{schema.cls.type}: fields are not those of the type"
    faults = [f"{name} is not {kind.name}" for name, kind in schema.kinds.items() if not kind.accepts(body[name])]
    return f"{schema.cls.type}: {faults[0]}" if faults else "not an entry"


def event_from(entry: Mapping[str, Any]) -> Event:
    """The typed event of an entry that `read_line` gave."""
    body = entry["body"]
    return SCHEMAS[entry["type"]].cls(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in body.items()}
    )
