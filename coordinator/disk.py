"""What SQLite refuses, as an operator needs it: which file it was, and what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from security.errors import DataError, ToolkitError

_DAMAGED: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_LOOK_AT_IT: Final = "keep the file, look at the disk, and put no old copy in its place: docs/operators.md, Backup"
_HINTS: Final[Mapping[str, str]] = {
    "SQLITE_FULL": "make room on that disk and start again",
    "SQLITE_IOERR": "that disk fails, or is full: look at `df` and at the system's log before you start again",
    "SQLITE_READONLY": "this account must be able to write to the file and its folder",
    "SQLITE_CANTOPEN": "this account must be able to read and write the file and its folder",
    **dict.fromkeys(_DAMAGED, _LOOK_AT_IT),
}


def hint_of(error: sqlite3.Error) -> str:
    """What to do about it. SQLite's names have endings, such as SQLITE_IOERR_WRITE."""
    name = _name(error)
    return next((hint for known, hint in _HINTS.items() if name.startswith(known)), "docs/operators.md, Disk")


def _name(error: sqlite3.Error) -> str:
    return str(getattr(error, "sqlite_errorname", ""))


@contextmanager
def database(path: Path) -> Iterator[None]:
    """:raises ToolkitError: in the place of SQLite's own errors; DataError where the file is damaged."""
    try:
        yield
    except sqlite3.Error as error:
        kind = DataError if _name(error).startswith(_DAMAGED) else ToolkitError
        raise kind(f"the database failed: {error}", where=str(path), hint=hint_of(error)) from error
