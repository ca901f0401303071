"""The identifiers in a table of labels. The trainer reads the same table for its labels, in earnest and in full."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazaret.errors import DataError
from npr.data.columns import IDENTIFIERS

_UID: Final = re.compile(r"[0-9]+(\.[0-9]+)+")
_LONGEST: Final = 64
# In a search `*` and `?` stand for other letters: the archive would give more than the row names.
_WILDCARDS: Final = re.compile(r"[*?\\]")


def is_uid(text: object) -> bool:
    """DICOM PS3.5 section 9.1. Such a text is also safe as the name of a file and in an address."""
    return isinstance(text, str) and len(text) <= _LONGEST and _UID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What one row names. `where` is what messages call it."""

    key: str
    value: str
    where: str


def wanted(table: Path) -> Iterator[Wanted]:
    """Each identifier once.

    :raises DataError: with the row, never with the identifier.
    """
    seen = set[str]()
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            key = next((name for name in IDENTIFIERS if name in (reader.fieldnames or ())), None)
            if key is None:
                raise DataError(
                    "the table names no studies", where=f"{table.name} row 1", hint=f"one of {', '.join(IDENTIFIERS)}"
                )
            for number, entry in enumerate(reader, start=2):
                where, value = f"{table.name} row {number}", (entry[key] or "").strip()
                _check(key, value, where)
                if value not in seen:
                    seen.add(value)
                    yield Wanted(key=key, value=value, where=where)
    except FileNotFoundError:
        raise DataError("there is no such table", where=str(table)) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"not a UTF-8 CSV file ({type(error).__name__})", where=table.name) from None


def _check(key: str, value: str, where: str) -> None:
    if not value:
        raise DataError(f"{key} is empty", where=where)
    if key == "AccessionNumber":
        if len(value) > _LONGEST or not value.isprintable() or _WILDCARDS.search(value):
            raise DataError(f"{key} cannot be searched for", where=where, hint="without *, ? and backslash")
    elif not is_uid(value):
        raise DataError(f"{key} is no UID", where=where, hint="digits and full stops")
