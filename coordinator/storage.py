"""What a coordinator stores: one SQLite file, models by digest beside it, uploads in the spool.

Each step of the machine is one transaction, on disk before any message that follows it is sent. Nothing here is secret:
everything is public or masked. Errors of SQLite name the file and say what to do.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from coordinator import round_history
from coordinator.config import KEPT_MODELS
from coordinator.effects import CloseRound, Exclude, Keep, KeepCertificate, KeepLink, KeepStrikes, OpenRound
from coordinator.results import Link
from lazaret import files
from lazaret.errors import ConfigError, DataError, ToolkitError
from security.secagg import records
from security.secagg.certificates import CheckCertificate
from security.secagg.coordinator.rounds import BlameBook, RoundStart
from security.secagg.effects import SaveState, Vector
from security.secagg.fields import Wire
from security.secagg.messages import Result
from security.secagg.state import state_hash

# Errors of SQLite, in the words of an operator.

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
def database(path: Path) -> Iterator[None]:
    """:raises ToolkitError: in the place of SQLite's own errors; DataError where the file is damaged."""
    try:
        yield
    except sqlite3.Error as error:
        kind = DataError if _name(error).startswith(_DAMAGED) else ToolkitError
        raise kind(f"the database failed: {error}", where=str(path), hint=hint_of(error)) from error


FORMAT: Final = 2
_OF_A_RUN: Final = ("models", "spool", "coordinator.sqlite")
# What older formats lack.
_UPGRADES: Final = {"1": "ALTER TABLE blame ADD COLUMN cert BLOB"}
_SCHEMA: Final = """
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
CREATE TABLE IF NOT EXISTS sessions (site TEXT PRIMARY KEY, session INTEGER NOT NULL, seen_ms INTEGER NOT NULL) STRICT;
"""
Stored = Keep | SaveState | OpenRound | CloseRound | KeepLink | KeepCertificate | Exclude | KeepStrikes


class Storage:
    """The state folder of a coordinator; one process at a time."""

    def __init__(self, folder: Path, *, keep_models: int = KEPT_MODELS) -> None:
        self.folder = folder
        self.models = folder / "models"
        self.spool = folder / "spool"
        self.log = folder / "log"
        self.runs = folder / "runs"
        self._keep_models = keep_models
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = self._take_lock(folder / ".lock")
        self._path = folder / "coordinator.sqlite"
        self._db = self._open(self._path)

    def _open(self, path: Path) -> sqlite3.Connection:
        self.models.mkdir(mode=0o700, exist_ok=True)
        try:
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA cache_size = -256")  # KiB; share lists of large cohorts are written once, hardly read
            db.executescript(_SCHEMA + round_history.SCHEMA)
            self._check_format(db, path)
        except sqlite3.Error as error:
            raise ConfigError(f"cannot open the database: {error}", where=str(path), hint=hint_of(error)) from error
        os.chmod(path, 0o600)
        return db

    @staticmethod
    def _take_lock(path: Path) -> int:
        """One writer; readers such as `coordinator status` need no lock."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError("another coordinator runs in this folder", where=str(path.parent)) from error
        return descriptor

    @staticmethod
    def _check_format(db: sqlite3.Connection, path: Path) -> None:
        db.execute("INSERT OR IGNORE INTO about VALUES ('format', ?)", (str(FORMAT),))
        (found,) = db.execute("SELECT value FROM about WHERE key = 'format'").fetchone()
        if found in _UPGRADES:
            upgrade = f"BEGIN; {_UPGRADES[found]}; UPDATE about SET value = '{FORMAT}' WHERE key = 'format'; COMMIT"
            db.executescript(upgrade)
        elif found != str(FORMAT):
            raise ConfigError(f"database of format {found}, this version knows {FORMAT}", where=str(path))

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """:raises ToolkitError: if it is not on disk; the process must not continue as if it were."""
        with database(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite may have rolled back by itself; its complaint about that would hide the reason.
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *arguments: object) -> list[Any]:
        with database(self._path):
            return self._db.execute(query, arguments).fetchall()

    def _row(self, query: str, *arguments: object) -> Any:
        """The first row of an answer; None if it is empty."""
        return next(iter(self._rows(query, *arguments)), None)

    # Writing.

    def keep(self, effects: Iterable[Stored], *, now_ms: int) -> None:
        """Write what belongs to one step in one transaction. States come first: records name them by hash."""
        listed = list(effects)
        for effect in listed:
            if isinstance(effect, SaveState):
                self._save(effect.state_hash, effect.state)
        with self._transaction() as db:
            for effect in listed:
                self._write(db, effect, now_ms)
        if any(isinstance(effect, KeepLink) for effect in listed):
            self._prune_models()

    def _write(self, db: sqlite3.Connection, effect: Stored, now_ms: int) -> None:
        round_history.note(db, effect, now_ms)
        match effect:
            case Exclude(site, cert, reason):
                db.execute("INSERT OR REPLACE INTO blame VALUES (?, ?, ?)", (site, reason, cert))
            case KeepStrikes(strikes, pause):
                db.execute("DELETE FROM strikes")
                rows = [(site, strikes.get(site, 0), pause.get(site, 0)) for site in sorted({*strikes, *pause})]
                db.executemany("INSERT INTO strikes VALUES (?, ?, ?)", rows)
            case Keep(number, record):
                data = records.encode(record)
                db.execute("INSERT INTO records (round, data) VALUES (?, ?)", (number, data))
            case OpenRound(start):
                opened = (start.round, start.state_hash, start.config_hash, start.prev_result, now_ms)
                db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, NULL, NULL)", opened)
            case CloseRound(number, outcome):
                db.execute("UPDATE rounds SET closed_ms = ?, outcome = ? WHERE number = ?", (now_ms, outcome, number))
            case KeepLink(result_hash, result):
                context = result.context
                link = (result_hash, context.round, context.prev_result, result.state_hash, result.sum_root)
                db.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, NULL)", (*link, result.to_bytes()))
            case KeepCertificate(result_hash, check):
                update = "UPDATE results SET certificate = ? WHERE result_hash = ?"
                db.execute(update, (check.to_bytes(), result_hash))

    def save_state(self, state: Vector) -> None:
        self._save(state_hash(state), state)

    def _save(self, digest: bytes, state: Vector) -> None:
        path = self._state_path(digest)
        if not path.exists():
            files.write_atomically(path, save_tensors({"state": state}), mode=0o600)

    def note_session(self, site: str, session: int, *, now_ms: int) -> None:
        """Remember how often a site has connected, so that message ids never repeat."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", (site, session, now_ms))

    def note_seen(self, site: str, *, now_ms: int) -> None:
        """Remember when a site was last heard of."""
        with self._transaction() as db:
            db.execute("UPDATE sessions SET seen_ms = ? WHERE site = ?", (now_ms, site))

    def note_missing(self, site: str) -> None:
        """Keep who fell silent, for people: the protocol's own book has it too."""
        with self._transaction() as db:
            round_history.note_missing(db, site)

    def note_figures(self, number: int, figures: round_history.Figures) -> None:
        """Keep what a sum says beside the model, for people."""
        with self._transaction() as db:
            round_history.note_figures(db, number, figures)

    def note_traffic(self, number: int, bytes_in: int, bytes_out: int) -> None:
        """Keep what a round has moved."""
        with self._transaction() as db:
            round_history.note_traffic(db, number, bytes_in, bytes_out)

    def _prune_models(self) -> None:
        """Old models go: all but the first, and the newest few, which are what a restart and a late site need."""
        newest = "SELECT state_hash FROM results ORDER BY round DESC LIMIT ?"
        first = "SELECT state_hash FROM rounds ORDER BY number LIMIT 1"
        rows = [*self._rows(newest, self._keep_models), *self._rows(first)]
        kept = {self._state_path(digest).name for (digest,) in rows}
        for path in self.models.glob("*.safetensors"):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def belongs_to(self, federation: str, run: str) -> str | None:
        """Bind the folder to a run. A run before it is over: its files are moved to runs/, while the privacy log
        continues.

        :returns: the run whose files were moved, if any.
        :raises ConfigError: if the folder is another federation's.
        """
        wanted = f"{federation}/{run}"
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO about VALUES ('run', ?)", (wanted,))
            (found,) = db.execute("SELECT value FROM about WHERE key = 'run'").fetchone()
        if found == wanted:
            return None
        other, _, ended = str(found).partition("/")
        if other != federation:
            raise ConfigError(
                f"this folder holds a run of federation {other}",
                where=str(self.folder),
                hint="use one state folder for each federation",
            )
        self._set_aside(ended)
        self.belongs_to(federation, run)
        return ended

    def _set_aside(self, run: str) -> None:
        """The database last: as long as it is here, a start that was cut short begins again where it stopped."""
        target = self.runs / run
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
        for name in _OF_A_RUN:
            if (self.folder / name).exists() and not (target / name).exists():
                (self.folder / name).rename(target / name)
        self._db = self._open(self._path)

    def end_round_of_older_manifest(self, manifest: str, *, now_ms: int) -> None:
        """A round belongs to one manifest: updates are encoded for its layout, attempts signed under its hash."""
        with self._transaction() as db:
            row = db.execute("SELECT value FROM about WHERE key = 'manifest'").fetchone()
            if row is not None and row[0] != manifest:
                ended = "UPDATE rounds SET closed_ms = ?, outcome = 'the manifest changed' WHERE closed_ms IS NULL"
                db.execute(ended, (now_ms,))
            db.execute("INSERT OR REPLACE INTO about VALUES ('manifest', ?)", (manifest,))

    # Reading.

    def _state_path(self, digest: bytes) -> Path:
        return self.models / f"{digest.hex()}.safetensors"

    def load_state(self, digest: bytes) -> Vector:
        """A state by its hash, checked."""
        path = self._state_path(digest)
        try:
            state: Vector = load_tensors(path.read_bytes())["state"].astype("<f4", copy=False)
        except (FileNotFoundError, SafetensorError, KeyError) as error:
            raise DataError("model is missing or damaged", where=str(path)) from error
        if state_hash(np.ascontiguousarray(state)) != digest:
            raise DataError("model does not have the hash in its name", where=str(path))
        return np.ascontiguousarray(state)

    def links(self) -> list[Link]:
        query = "SELECT round, result_hash, prev_result, state_hash, sum_root FROM results ORDER BY round"
        rows = self._rows(query)
        names = ("round", "result_hash", "prev_result", "state_hash", "sum_root")
        return [Link(**dict(zip(names, row, strict=True))) for row in rows]

    def result(self, result_hash: bytes) -> Result:
        row = self._row("SELECT result FROM results WHERE result_hash = ?", result_hash)
        if row is None:
            raise DataError("result is not in the database", where=str(self.folder))
        return Result.from_bytes(row[0])

    def certificate(self, result_hash: bytes) -> CheckCertificate | None:
        row = self._row("SELECT certificate FROM results WHERE result_hash = ?", result_hash)
        return CheckCertificate.from_bytes(row[0]) if row and row[0] else None

    def open_round(self) -> RoundStart | None:
        """The round that no CloseRound has ended."""
        columns = "number, state_hash, config_hash, prev_result"
        query = f"SELECT {columns} FROM rounds WHERE closed_ms IS NULL ORDER BY number DESC"
        row = self._row(query)
        if row is None:
            return None
        return RoundStart(round=row[0], state_hash=row[1], config_hash=row[2], prev_result=row[3])

    def last_round(self) -> int:
        return int(self._row("SELECT COALESCE(MAX(number), 0) FROM rounds")[0])

    def completed(self) -> int:
        """How many rounds ended with a model."""
        return int(self._row("SELECT COUNT(*) FROM rounds WHERE outcome = 'published'")[0])

    def newest_records(self) -> list[Wire]:
        """The records of the newest round that has any."""
        rows = self._rows("SELECT data FROM records WHERE round = (SELECT MAX(round) FROM records) ORDER BY id")
        return [records.decode(row[0]) for row in rows]

    def excluded(self, certs: Mapping[str, bytes]) -> dict[str, str]:
        """Who is left out and why: those whose signing certificate is still the one under which they lied."""
        rows = self._rows("SELECT site, reason, cert FROM blame")
        return {site: reason for site, reason, cert in rows if cert is not None and certs.get(site) == cert}

    def blame_book(self, certs: Mapping[str, bytes]) -> BlameBook:
        """What was held against sites when the last process ended."""
        rows = self._rows("SELECT site, strikes, pause FROM strikes")
        return BlameBook(
            strikes={site: strikes for site, strikes, _ in rows if strikes},
            pause={site: pause for site, _, pause in rows if pause},
            excluded=self.excluded(certs),
        )

    def sessions(self) -> dict[str, tuple[int, int]]:
        """Last session number and time of every site that ever connected."""
        rows = self._rows("SELECT site, session, seen_ms FROM sessions")
        return {site: (session, seen) for site, session, seen in rows}

    def rounds(self) -> list[tuple[int, int, int | None, str | None]]:
        """(number, opened, closed, outcome) of every round, newest last."""
        return self._rows("SELECT number, opened_ms, closed_ms, outcome FROM rounds ORDER BY number")
