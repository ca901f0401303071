"""The form of an entry: kinds of value, the envelope, the base class of events, the registry of event types.

A kind is one regular expression over a value's canonical JSON. An event type is the concatenation of its fields'
expressions, and an entry of it is one line that matches. So the schema, the canonical form and the absence of anything
else are a single test, which costs less than parsing the line. The event types themselves are in `events.py`: an event
knows its fields and their kinds, and nothing else about the log does.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, TypeVar, cast, dataclass_transform, get_type_hints

from lazaret.errors import CodecError, LocalProtocolError
from security.crypto import encoding

MAX_TEXT: Final = 500
MAX_TEXTS: Final = 32
MAX_ITEMS: Final = 1024
MAX_COUNT: Final = 10**15 - 1

# Not `canonical.dumps`: what it would refuse does not match a kind either, and this is asked for every field.
encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueKind:
    """One kind of value: what it is called, and the expression that its JSON matches."""

    name: str
    pattern: str
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", re.compile(self.pattern))

    def accepts(self, value: Any) -> bool:
        """Whether a value is of this kind."""
        try:
            return self._compiled.fullmatch(encode(value)) is not None
        except (TypeError, ValueError):
            return False


def optional(kind: ValueKind) -> ValueKind:
    """The same, or null."""
    return ValueKind(name=f"{kind.name} or null", pattern=f"(?:null|{kind.pattern})")


def choice(*values: str) -> ValueKind:
    """One of a fixed set of words."""
    words = "|".join(re.escape(value) for value in values)
    return ValueKind(name="one of " + ", ".join(values), pattern=f'"(?:{words})"')


def list_of(kind: ValueKind, *, limit: int = MAX_ITEMS, name: str | None = None) -> ValueKind:
    """A list of up to `limit` values of one kind."""
    item = kind.pattern
    return ValueKind(name=name or f"a list of {kind.name}", pattern=rf"\[(?:{item}(?:,{item}){{0,{limit - 1}}}+)?\]")


def record(name: str, **fields: ValueKind) -> ValueKind:
    """A small object with exactly these fields."""
    inner = ",".join(f'"{key}":{fields[key].pattern}' for key in sorted(fields))
    return ValueKind(name=name, pattern=rf"\{{{inner}\}}")


def either(name: str, *kinds: ValueKind) -> ValueKind:
    """One of several kinds of value."""
    return ValueKind(name=name, pattern="(?:" + "|".join(kind.pattern for kind in kinds) + ")")


# Controls, soft hyphens, zero-width and direction marks, separators, surrogates and specials have no place in text that
# an auditor reads: they hide, reorder or break lines. What is left needs no escape but these two.
_PLAIN: Final = (
    r'[^"\\\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f'
    r"\ud800-\udfff\ufe00-\ufe0f\ufeff\ufff0-\uffff\U000e0000-\U0010ffff]"
)

TEXT: Final = ValueKind(
    name=f"plain text of at most {MAX_TEXT} characters", pattern=rf'"(?:{_PLAIN}|\\["\\]){{0,{MAX_TEXT}}}+"'
)
TOKEN: Final = ValueKind(
    name="a name of letters, digits and . _ / : -", pattern='"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}+"'
)
DIGEST: Final = ValueKind(name="64 lower-case hexadecimal digits", pattern='"[0-9a-f]{64}"')
IDENT: Final = ValueKind(name="32 lower-case hexadecimal digits", pattern='"[0-9a-f]{32}"')
DECIMAL: Final = ValueKind(
    name="a decimal number as text",
    pattern=r'"(?:inf|-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:e-?[0-9]{1,3})?)"',
)
VKEY: Final = ValueKind(
    name="a verifier key (name+id+key)", pattern=r'"[!#-*,-\[\]-~]{1,200}\+[0-9a-f]{8}\+[A-Za-z0-9+/]{44}"'
)
COUNT: Final = ValueKind(name="an integer from 0 to 10^15 - 1", pattern="(?:0|[1-9][0-9]{0,14})")
INTEGER: Final = ValueKind(name="an integer below 10^15 in size", pattern="(?:0|-?[1-9][0-9]{0,14})")
FLAG: Final = ValueKind(name="true or false", pattern="(?:true|false)")

DATA_CLASSES: Final = ("control", "public-key", "sealed-share", "mask-share", "masked-vector", "checkpoint")
ROLES: Final = ("site", "coordinator")

# The names events use in their annotations; the kind rides along for the checks.
Text = Annotated[str, TEXT]
Token = Annotated[str, TOKEN]
Digest = Annotated[str, DIGEST]
Ident = Annotated[str, IDENT]
Decimal = Annotated[str, DECIMAL]
VKey = Annotated[str, VKEY]
Count = Annotated[int, COUNT]
Integer = Annotated[int, INTEGER]
Flag = Annotated[bool, FLAG]
Tokens = Annotated[tuple[str, ...], list_of(TOKEN)]
Texts = Annotated[tuple[str, ...], list_of(TEXT, limit=MAX_TEXTS)]
DataClass = Annotated[str, choice(*DATA_CLASSES)]
Role = Annotated[str, choice(*ROLES)]
MaybeText = Annotated[str | None, optional(TEXT)]
MaybeToken = Annotated[str | None, optional(TOKEN)]
MaybeDigest = Annotated[str | None, optional(DIGEST)]
MaybeDecimal = Annotated[str | None, optional(DECIMAL)]
MaybeCount = Annotated[int | None, optional(COUNT)]

# Kinds that only some events have.

_ARTEFACT: Final = record("a local artefact", kind=TOKEN, elements=COUNT, hmac=DIGEST, disposition=choice("local-only"))
_NOISE: Final = {"kind": TOKEN, "sigma": DECIMAL, "sensitivity": DECIMAL, "rate": COUNT, "steps": COUNT}
_MECHANISM: Final = either(
    "a mechanism",
    record("noise of a site", **_NOISE),
    record("noise that sites share", **_NOISE, honest=COUNT, dimensions=COUNT),
)

_SHAPE: Final = record(
    "the numbers of the size equation",
    cohort=COUNT,
    cosigned=COUNT,
    epochs=COUNT,
    frame=COUNT,
    frames=COUNT,
    head_signatures=COUNT,
    named=optional(TOKEN),
    path=COUNT,
    vector_bytes=COUNT,
)

Numbers = Annotated[dict[str, Any], _SHAPE]
Artefacts = Annotated[tuple[dict[str, Any], ...], list_of(_ARTEFACT, limit=64)]
Mechanisms = Annotated[tuple[dict[str, Any], ...], list_of(_MECHANISM, limit=64)]
Plan = Annotated[
    dict[str, Any] | None, optional(record("a plan", epsilon=DECIMAL, events=list_of(_MECHANISM, limit=64)))
]
Unit = Annotated[str, choice("patient", "lesion", "study", "image")]
Relation = Annotated[str, choice("add-or-remove-one", "replace-one")]


def decimal(value: float) -> str:
    """A real number as the log writes it: the shortest text that reads back to the same double."""
    text = repr(float(value))
    return text[:-2] if text.endswith(".0") else text.replace("e+", "e")


# The envelope of an entry, the base class of events, and the registry

VERSION: Final = 1
MAX_LINE: Final = 1 << 16

# The envelope in canonical order; `body`, `type` and `v` are fixed by the event type.
ENVELOPE: Final[Mapping[str, ValueKind]] = {
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
    kinds: Mapping[str, ValueKind]

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
        kinds = {key: _kind_of(hints[key]) for key in sorted(field.name for field in fields(cast("Any", made)))}
        SCHEMAS[name] = Schema(cls=made, kinds=kinds)
        return made

    return enter


def _kind_of(hint: Any) -> ValueKind:
    return next(extra for extra in hint.__metadata__ if isinstance(extra, ValueKind))


def match_line(text: str) -> re.Match[str] | None:
    """The fields of a well-formed entry, still as JSON; None if it is not one. `explain` then says why."""
    # Every entry ends in `"type":"...","v":1}`, so the type can be read from the back; the expression checks it again.
    schema = SCHEMAS.get(text[text.rfind('"', 0, -8) + 1 : -8])
    if schema is None or len(text) > MAX_LINE:
        return None
    return schema.line.fullmatch(text)


def type_of(line: bytes) -> bytes:
    """The type that a line claims at its end, at a tenth of the cost of parsing it. Only `match_line` checks it."""
    return line[line.rfind(b'"', 0, -8) + 1 : -8]


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
    entry: dict[str, Any] = encoding.parse(line)
    return entry


def explain(line: bytes) -> str:
    """Why a line is no entry. Values are not repeated: they may be long, and they may be an attack."""
    if len(line) > MAX_LINE:
        return f"longer than {MAX_LINE} bytes"
    try:
        entry = encoding.loads(line)
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
