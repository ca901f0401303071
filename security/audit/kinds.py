"""The kinds of value an event may hold. A kind is one regular expression over the value's canonical JSON.

An event type is then the concatenation of its fields' expressions, and an entry of it is one line that matches. So the
schema, the canonical form and the absence of anything else are a single test, which costs less than parsing the line.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

MAX_TEXT: Final = 500
MAX_ITEMS: Final = 1024
MAX_COUNT: Final = 10**15 - 1

# Not `canonical.dumps`: what it would refuse does not match a kind either, and this is asked for every field.
encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
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


def optional(kind: Kind) -> Kind:
    """The same, or null."""
    return Kind(name=f"{kind.name} or null", pattern=f"(?:null|{kind.pattern})")


def choice(*values: str) -> Kind:
    """One of a fixed set of words."""
    words = "|".join(re.escape(value) for value in values)
    return Kind(name="one of " + ", ".join(values), pattern=f'"(?:{words})"')


def list_of(kind: Kind, *, limit: int = MAX_ITEMS, name: str | None = None) -> Kind:
    """A list of up to `limit` values of one kind."""
    item = kind.pattern
    return Kind(name=name or f"a list of {kind.name}", pattern=rf"\[(?:{item}(?:,{item}){{0,{limit - 1}}}+)?\]")


def record(name: str, **fields: Kind) -> Kind:
    """A small object with exactly these fields."""
    inner = ",".join(f'"{key}":{fields[key].pattern}' for key in sorted(fields))
    return Kind(name=name, pattern=rf"\{{{inner}\}}")


# Controls, soft hyphens, zero-width and direction marks, separators, surrogates and specials have no place in text that
# an auditor reads: they hide, reorder or break lines. What is left needs no escape but these two.
_PLAIN: Final = (
    r'[^"\\\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f'
    r"\ud800-\udfff\ufe00-\ufe0f\ufeff\ufff0-\uffff\U000e0000-\U0010ffff]"
)

TEXT: Final = Kind(
    name=f"plain text of at most {MAX_TEXT} characters", pattern=rf'"(?:{_PLAIN}|\\["\\]){{0,{MAX_TEXT}}}+"'
)
TOKEN: Final = Kind(name="a name of letters, digits and . _ / : -", pattern='"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}+"')
DIGEST: Final = Kind(name="64 lower-case hexadecimal digits", pattern='"[0-9a-f]{64}"')
IDENT: Final = Kind(name="32 lower-case hexadecimal digits", pattern='"[0-9a-f]{32}"')
DECIMAL: Final = Kind(
    name="a decimal number as text",
    pattern=r'"(?:inf|-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:e-?[0-9]{1,3})?)"',
)
VKEY: Final = Kind(
    name="a verifier key (name+id+key)", pattern=r'"[!#-*,-\[\]-~]{1,200}\+[0-9a-f]{8}\+[A-Za-z0-9+/]{44}"'
)
COUNT: Final = Kind(name="an integer from 0 to 10^15 - 1", pattern="(?:0|[1-9][0-9]{0,14})")
INTEGER: Final = Kind(name="an integer below 10^15 in size", pattern="(?:0|-?[1-9][0-9]{0,14})")
FLAG: Final = Kind(name="true or false", pattern="(?:true|false)")

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
Texts = Annotated[tuple[str, ...], list_of(TEXT, limit=32)]
DataClass = Annotated[str, choice(*DATA_CLASSES)]
Role = Annotated[str, choice(*ROLES)]
MaybeText = Annotated[str | None, optional(TEXT)]
MaybeToken = Annotated[str | None, optional(TOKEN)]
MaybeDigest = Annotated[str | None, optional(DIGEST)]
MaybeDecimal = Annotated[str | None, optional(DECIMAL)]
MaybeCount = Annotated[int | None, optional(COUNT)]


def decimal(value: float) -> str:
    """A real number as the log writes it: the shortest text that reads back to the same double."""
    text = repr(float(value))
    return text[:-2] if text.endswith(".0") else text.replace("e+", "e")
