"""Writes federation.proto and the tables of docs/spec/wire.md from the registry, so that they cannot differ from code.

Each field's comment states its data class and its bound. Run `scripts/generate-protos` after changing a message; tests
compare what is committed with what this file writes.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterable
from typing import Final

from lazaret.errors import LocalProtocolError
from security.crypto.encoding import U32_MAX, U64_MAX
from security.crypto.ring import MAX_PARCEL
from security.secagg import fields, relay
from security.secagg.fields import Bounded, FieldKind, Fixed, Many, Maybe, Name, Nested, Number, Wire, data_class, kinds
from security.secagg.registry import LOG_HEAD_FIELD, REGISTRY, SEQUENCE_FIELD, Filing, MessageEntry, Registry

HEADER: Final = """\
// The only wire schema. Written by protos/schema.py from the message types; do not edit, run scripts/generate-protos.
//
// A comment behind a field says which class of data it holds and how large it may be. Every field is required, except
// messages marked "none or one": presence is explicit (edition 2023), and a message with a field missing, unknown,
// repeated or in another order than its number is refused. Numbers have fixed width, so that a message's length
// follows from public sizes alone.
//
// Classes: control (names, counters, codes), digest, signature, public-key, checkpoint (heads of privacy logs),
// sealed-share (encrypted for one peer), mask-share (of a mask, released only after agreement), opened-mask,
// masked-vector, aggregate (the sum over all survivors), model, manifest. There is no field for an update that is not
// masked, for a prototype, a class count or an image.
edition = "2023";

package lazaret.federation.v1;
"""
SERVICE: Final = """\
// A site opens one stream and keeps it; the coordinator pushes over it and never connects to a site.
service Federation {
  rpc Converse(stream FromSite) returns (stream FromCoordinator);
}
"""

def schema(registry: Registry = REGISTRY) -> str:
    messages = "\n".join(_message(cls) for cls in _closure(entry.cls for entry in registry))
    upwards = [entry for entry in registry if entry.from_site]
    downwards = [entry for entry in registry if entry.from_coordinator]
    site = _envelope("FromSite", "What a site may send; nothing else leaves a hospital.", upwards)
    coordinator = _envelope("FromCoordinator", "What the coordinator may send.", downwards)
    return "\n".join([HEADER, SERVICE, site, coordinator, messages])


def schema_digest() -> str:
    """What the privacy log records at every start: the schema that the wire was bound to."""
    return hashlib.sha256(schema().encode()).hexdigest()


def field_name(cls: type[Wire]) -> str:
    """The name of a message in its envelope: `UploadFrame` is `upload_frame`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def _closure(roots: Iterable[type[Wire]]) -> list[type[Wire]]:
    """Every type that is used, each before the first one that holds it."""
    found: dict[type[Wire], None] = {}

    def visit(cls: type[Wire]) -> None:
        for _, kind in kinds(cls):
            inner = _item(kind)
            if isinstance(inner, Nested):
                visit(inner.type)
        found[cls] = None

    for root in roots:
        visit(root)
    return list(found)


def _envelope(name: str, summary: str, allowed: Iterable[MessageEntry]) -> str:
    lines = [f"// {summary}", f"message {name} {{"]
    lines.append(f"  fixed64 sequence = {SEQUENCE_FIELD};  // control; 1, 2, 3, ... on each stream")
    words = "the sender's newest; none or one: not with frames"
    lines.append(f"  SignedHead log_head = {LOG_HEAD_FIELD};  // checkpoint; {words}")
    lines.append(f"  oneof message {{  // exactly one; the whole at most {MAX_PARCEL} bytes")
    lines += [f"    {entry.name} {field_name(entry.cls)} = {entry.number};" for entry in allowed]
    return "\n".join([*lines, "  }", "}", ""])


def _message(cls: type[Wire]) -> str:
    words = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    lines = [f"// {line}" for line in textwrap.wrap(words, 116)]
    lines.append(f"message {cls.__name__} {{")
    for number, (name, kind) in enumerate(kinds(cls), 1):
        repeated = "repeated " if isinstance(kind, Many) else ""
        comment = f"{_class(cls, name, kind)}; {bound(kind)}"
        lines.append(f"  {repeated}{proto_type(_item(kind))} {name} = {number};  // {comment}")
    return "\n".join([*lines, "}", ""])


def _item(kind: FieldKind) -> FieldKind:
    return kind.item if isinstance(kind, Many | Maybe) else kind


def proto_type(kind: FieldKind) -> str:
    if isinstance(kind, Number):
        return "fixed32" if kind.limit <= U32_MAX else "fixed64"
    if isinstance(kind, Fixed | Bounded):
        return "bytes"
    if isinstance(kind, Name | relay.LogName):
        return "string"
    if isinstance(kind, Nested):
        return kind.type.__name__
    raise TypeError(f"no wire type for {kind}")


def bound(kind: FieldKind) -> str:
    if isinstance(kind, Number):
        powers = {U64_MAX: "2^64-1", 2**53 - 1: "2^53-1", U32_MAX: "2^32-1"}
        return f"{kind.least}..{powers.get(kind.limit, kind.limit)}"
    if isinstance(kind, Fixed):
        return f"{kind.length} bytes"
    if isinstance(kind, Bounded):
        return f"at most {kind.limit} bytes"
    if isinstance(kind, Name | relay.LogName):
        return f"at most {fields.MAX_NAME if isinstance(kind, Name) else relay.MAX_LOG_NAME} bytes"
    if isinstance(kind, Many):
        each = "" if isinstance(kind.item, Nested) else f", each {bound(kind.item)}"
        return f"at most {kind.limit}{each}"
    return "none or one" if isinstance(kind, Maybe) else "one"


def _class(cls: type[Wire], name: str, kind: FieldKind) -> str:
    found = data_class(cls, name)
    inner = _item(kind)
    return f"see {inner.type.__name__}" if found is None and isinstance(inner, Nested) else str(found)


# The tables of messages in docs/spec/wire.md, between two marks.

_BEGIN, _END = "<!-- written by protos/schema.py: messages -->", "<!-- end of messages -->"
_FILED: Final = {
    Filing.NONE: "none",
    Filing.ATTEMPT: "its attempt's",
    Filing.PAST_ATTEMPT: "none",
    Filing.ROUND: "the one it names",
}


def with_tables(page: str, registry: Registry = REGISTRY) -> str:
    """The page with its tables of messages as the registry has them."""
    before, _, rest = page.partition(_BEGIN)
    _, found, after = rest.partition(_END)
    if not found:
        raise LocalProtocolError("has no marks around its tables of messages", where="docs/spec/wire.md")
    return f"{before}{_BEGIN}\n\n{_tables(registry)}\n\n{_END}{after}"


def _tables(registry: Registry) -> str:
    lines = ["From a site:", "", "| message | number | meaning | class of data | round in the logs |", "|---" * 5 + "|"]
    lines += [f"{_row(entry)} {_FILED[entry.filing]} |" for entry in registry if entry.from_site]
    lines += ["", "From the coordinator:", "", "| message | number | meaning | class of data |", "|---" * 4 + "|"]
    return "\n".join([*lines, *(_row(entry) for entry in registry if entry.from_coordinator)])


def _row(entry: MessageEntry) -> str:
    words = " ".join((entry.cls.__doc__ or "").split())
    first = re.match(r".*?[.?!](?= |$)", words)
    return f"| {entry.name} | {entry.number} | {first[0] if first else words} | {entry.data_class} |"
