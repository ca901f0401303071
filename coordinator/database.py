"""The tables of a coordinator's SQLite file, and what SQLite refuses as an operator needs to hear it.

`storage` is the one writer, `round_history` the one reader: no other module names a table or a column. There is nothing
secret in the file: everything in it is public or masked.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lazaret.errors import DataError, ToolkitError

FILE: Final = "coordinator.sqlite"
FORMAT: Final = 4
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS rounds (
    number INTEGER PRIMARY KEY, state_hash BLOB NOT NULL, config_hash BLOB NOT NULL, prev_result BLOB NOT NULL,
    opened_ms INTEGER NOT NULL, closed_ms INTEGER, outcome TEXT) STRICT;
CREATE TABLE IF NOT EXISTS records (id INTEGER PRIMARY KEY, round INTEGER NOT NULL, data BLOB NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS records_by_round ON records (round);
CREATE TABLE IF NOT EXISTS results (
    result_hash BLOB PRIMARY KEY, round INTEGER NOT NULL UNIQUE, prev_result BLOB NOT NULL, state_hash BLOB NOT NULL,
    sum_root BLOB NOT NULL, result BLOB NOT NULL, certificate BLOB) STRICT;
CREATE TABLE IF NOT EXISTS blame (site TEXT PRIMARY KEY, reason TEXT NOT NULL, cert BLOB) STRICT;
CREATE TABLE IF NOT EXISTS strikes (site TEXT PRIMARY KEY, strikes INTEGER NOT NULL, pause INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS disputes (
    accuser TEXT NOT NULL, dealer TEXT NOT NULL, accuser_cert BLOB NOT NULL, dealer_cert BLOB NOT NULL,
    PRIMARY KEY (accuser, dealer)) STRICT;
CREATE TABLE IF NOT EXISTS silence (site TEXT PRIMARY KEY, count INTEGER NOT NULL, cert BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS sessions (site TEXT PRIMARY KEY, session INTEGER NOT NULL, seen_ms INTEGER NOT NULL) STRICT;

-- For people only. The engine reads none of what follows: it could be deleted without harm to a run.
CREATE TABLE IF NOT EXISTS attempts (
    ctx BLOB PRIMARY KEY, round INTEGER NOT NULL, attempt INTEGER NOT NULL, threshold INTEGER NOT NULL,
    members INTEGER NOT NULL, cohort TEXT NOT NULL, survivors TEXT, opened_ms INTEGER NOT NULL, closed_ms INTEGER,
    outcome TEXT, missing TEXT NOT NULL DEFAULT '') STRICT;
CREATE INDEX IF NOT EXISTS attempts_by_round ON attempts (round, attempt);
CREATE TABLE IF NOT EXISTS figures (
    round INTEGER PRIMARY KEY, weight INTEGER NOT NULL, loss REAL, hits INTEGER) STRICT;
CREATE TABLE IF NOT EXISTS scores (
    round INTEGER PRIMARY KEY, scored INTEGER NOT NULL, score INTEGER NOT NULL, squares INTEGER) STRICT;
CREATE TABLE IF NOT EXISTS traffic (
    round INTEGER PRIMARY KEY, bytes_in INTEGER NOT NULL, bytes_out INTEGER NOT NULL) STRICT;
"""

# Errors: which file it was, and what to do.

_DAMAGED: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_LOOK_AT_IT: Final = "keep the file, check the disk, and do not restore an old copy: docs/operators.md, Backup"
_HINTS: Final[Mapping[str, str]] = {
    "SQLITE_FULL": "free space on that disk and start again",
    "SQLITE_IOERR": "that disk fails, or is full: check `df` and the system log before you start again",
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
def in_use(path: Path) -> Iterator[None]:
    """For the process that runs on the database.

    :raises ToolkitError: in the place of SQLite's own errors; DataError where the file is damaged.
    """
    try:
        yield
    except sqlite3.Error as error:
        kind = DataError if _name(error).startswith(_DAMAGED) else ToolkitError
        raise kind(f"the database failed: {error}", where=str(path), hint=hint_of(error)) from error
