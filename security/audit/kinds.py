"""The kinds of value an event may hold. Each is a predicate and the words for what it wants.

A predicate sees what JSON gave: it must not trust types, and `bool` is not an integer here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from security.audit.canonical import MAX_INT

Predicate = Callable[[Any], bool]

_hex64 = re.compile(r"[0-9a-f]{64}").fullmatch
_hex32 = re.compile(r"[0-9a-f]{32}").fullmatch
_decimal = re.compile(r"inf|-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:e-?[1-9][0-9]{0,2}|e-0[1-9])?").fullmatch
_token = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/+:-]{0,126}[A-Za-z0-9])?").fullmatch
_vkey = re.compile(r"[!-*,-~]{1,200}\+[0-9a-f]{8}\+[A-Za-z0-9+/]{44}").fullmatch

MAX_TEXT: Final = 500
MAX_ITEMS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of value: what it is called, and whether a value is of it."""

    name: str
    accepts: Predicate


def _is_text(value: Any) -> bool:
    # `isprintable` refuses control characters, line separators and the invisible marks that reorder text on screen.
    return type(value) is str and len(value) <= MAX_TEXT and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def _is_integer(value: Any) -> bool:
    return type(value) is int and -MAX_INT <= value <= MAX_INT


def _matching(match: Callable[[str], object | None]) -> Predicate:
    return lambda value: type(value) is str and match(value) is not None


def _items(accepts: Predicate) -> Predicate:
    def predicate(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) <= MAX_ITEMS and all(map(accepts, value))

    return predicate


def optional(kind: Kind) -> Kind:
    """The same, or null."""
    accepts = kind.accepts
    return Kind(name=f"{kind.name} or null", accepts=lambda value: value is None or accepts(value))


def choice(*values: str) -> Kind:
    """One of a fixed set of words."""
    allowed = frozenset(values)
    return Kind(name="one of " + ", ".join(values), accepts=lambda value: type(value) is str and value in allowed)


TEXT: Final = Kind(name=f"printable text of at most {MAX_TEXT} characters", accepts=_is_text)
TOKEN: Final = Kind(name="a name of letters, digits and . _ / + : -", accepts=_matching(_token))
DIGEST: Final = Kind(name="64 lower-case hexadecimal digits", accepts=_matching(_hex64))
IDENT: Final = Kind(name="32 lower-case hexadecimal digits", accepts=_matching(_hex32))
DECIMAL: Final = Kind(name="a decimal number as text", accepts=_matching(_decimal))
VKEY: Final = Kind(name="a verifier key (name+id+key)", accepts=_matching(_vkey))
COUNT: Final = Kind(name="an integer from 0 to 2^53 - 1", accepts=_is_count)
INTEGER: Final = Kind(name="an integer", accepts=_is_integer)
FLAG: Final = Kind(name="true or false", accepts=lambda value: type(value) is bool)
TOKENS: Final = Kind(name="a list of names", accepts=_items(TOKEN.accepts))
TEXTS: Final = Kind(name="a list of texts", accepts=_items(_is_text))

DATA_CLASSES: Final = ("control", "public-key", "sealed-share", "masked-vector", "checkpoint")
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
Tokens = Annotated[tuple[str, ...], TOKENS]
Texts = Annotated[tuple[str, ...], TEXTS]
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
