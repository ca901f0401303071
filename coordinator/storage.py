"""What a coordinator stores: one SQLite file, models by digest beside it, uploads in the spool.

Each step of the machine is one transaction, on disk before any message that follows it is sent. Nothing here is secret:
everything is public or masked. Errors of SQLite name the file and say what to do.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from coordinator import database
from coordinator.config import KEPT_MODELS
from coordinator.effects import (
    MANIFEST_CHANGED,
    PUBLISHED,
    RECOVERED,
    VOID,
    VOTED_DOWN,
    CloseRound,
    OpenRound,
    StoreBlame,
    Stored,
)
from coordinator.round_history import BEST_ROUND, COMPLETED_BEFORE, Figures, RoundHistory, Rows, check_format
from lazaret import files
from lazaret.errors import ConfigError, DataError
from security.secagg import records
from security.secagg.context import SumVerdict
from security.secagg.effects import Certified, Persist, SaveState, VotedDown
from security.secagg.handover import Handover
from security.secagg.layout import Vector
from security.secagg.messages import Result
from security.secagg.published import result_digests
from security.secagg.state import state_hash

SKIPPED_ROUNDS: Final = 8
_OF_A_RUN: Final = ("models", "spool", database.FILE)


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
        self.path = folder / database.FILE
        self._db = self._open(self.path)
        self.history = RoundHistory(self._rows, self.path)

    def _open(self, path: Path) -> sqlite3.Connection:
        self.models.mkdir(mode=0o700, exist_ok=True)
        try:
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
            check_format(db, path)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA cache_size = -256")  # KiB; share lists of large cohorts are written once, hardly read
            db.executescript(database.SCHEMA)
            db.execute("INSERT OR IGNORE INTO about VALUES ('format', ?)", (str(database.FORMAT),))
        except sqlite3.Error as error:
            message, hint = f"cannot open the database: {error}", database.hint_of(error)
            raise ConfigError(message, where=str(path), hint=hint) from error
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

    def settle(self) -> None:
        """Everything in the database file itself, and nothing beside it."""
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """:raises ToolkitError: if it is not on disk; the process must not go on as if it were."""
        with database.in_use(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite may have rolled back by itself; its complaint about that would hide the reason.
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *arguments: object) -> Rows:
        """For `history`: through the connection that also writes, whose own errors end the process."""
        with database.in_use(self.path):
            return self._db.execute(query, arguments).fetchall()

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
        if any(isinstance(effect, Persist) and isinstance(effect.record, records.ResultShown) for effect in listed):
            self._prune_models()

    def _write(self, db: sqlite3.Connection, effect: Stored, now_ms: int) -> None:
        _note_attempt(db, effect, now_ms)
        match effect:
            case Persist(record, number):
                db.execute("INSERT INTO records (round, data) VALUES (?, ?)", (number, records.encode(record)))
                if isinstance(record, records.ResultShown):
                    _write_result(db, record.result)
            case Certified(result_hash, check):
                update = "UPDATE results SET certificate = ? WHERE result_hash = ?"
                db.execute(update, (check.to_bytes(), result_hash))
            case VotedDown(number, result_hash, state_hash):
                db.execute("UPDATE results SET state_hash = ? WHERE result_hash = ?", (state_hash, result_hash))
                db.execute("UPDATE rounds SET outcome = ? WHERE number = ?", (VOTED_DOWN, number))
            case OpenRound(start):
                opened = (start.round, start.state_hash, start.config_hash, start.prev_result, now_ms)
                db.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?, NULL, NULL)", opened)
            case CloseRound(number, outcome):
                db.execute("UPDATE rounds SET closed_ms = ?, outcome = ? WHERE number = ?", (now_ms, outcome, number))
            case StoreBlame():
                _write_blame(db, effect)

    def recover(self, found: Handover, *, completed: int, now_ms: int) -> None:
        """Begin the chain with a covered result from elsewhere; rounds before it are counted, not known."""
        result, context = found.covered.result, found.covered.result.context
        self._save(result.state_hash, found.state)
        with self._transaction() as db:
            start = (context.round, context.state_hash, context.config_hash, context.prev_result)
            db.execute("DELETE FROM rounds WHERE number <= ?", (context.round,))
            db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?)", (*start, now_ms, now_ms, PUBLISHED))
            # Sites take part in no attempt twice: the numbers that the lost coordinator may have used are left out.
            skipped = (context.round + SKIPPED_ROUNDS, result.state_hash, context.config_hash, found.result_hash)
            db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?)", (*skipped, now_ms, now_ms, RECOVERED))
            _write_result(db, result)
            update = "UPDATE results SET certificate = ? WHERE result_hash = ?"
            db.execute(update, (found.covered.check.to_bytes(), found.result_hash))
            db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (COMPLETED_BEFORE, str(completed - 1)))

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
        """Keep who fell silent in the newest attempt, for people: the protocol's own book has it too."""
        with self._transaction() as db:
            newest = "(SELECT ctx FROM attempts ORDER BY round DESC, attempt DESC LIMIT 1)"
            db.execute(f"UPDATE attempts SET missing = TRIM(missing || ' ' || ?) WHERE ctx = {newest}", (site,))

    def note_figures(self, number: int, figures: Figures) -> None:
        """Keep what a sum says beside the model, for people."""
        with self._transaction() as db:
            row = (number, figures.weight, figures.loss, figures.hits)
            db.execute("INSERT OR REPLACE INTO figures VALUES (?, ?, ?, ?)", row)
            if (found := figures.scores) is not None:
                row = (number, found.count, found.total, found.squares)
                db.execute("INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?)", row)

    def note_best(self, number: int) -> None:
        """Keep the model of this round for an export, however old it grows."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (BEST_ROUND, str(number)))

    def note_traffic(self, number: int, bytes_in: int, bytes_out: int) -> None:
        """Keep what a round has moved."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO traffic VALUES (?, ?, ?)", (number, bytes_in, bytes_out))

    def _prune_models(self) -> None:
        """Old models go: all but the first, and the newest few, which are what a restart and a late site need."""
        kept = {self._state_path(digest).name for digest in self.history.states_in_use(self._keep_models)}
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
        found = self.history.about("run") or ""
        if found == wanted:
            return None
        other, _, ended = found.partition("/")
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
        self.settle()
        self._db.close()
        for name in _OF_A_RUN:
            if (self.folder / name).exists() and not (target / name).exists():
                (self.folder / name).rename(target / name)
        self._db = self._open(self.path)

    def end_round_of_older_manifest(self, manifest: str, work: str, *, now_ms: int) -> None:
        """A round belongs to one manifest once it has an attempt, signed under its hash. Before that, updates of sites
        go on under a newer one that asks for the same work on the same result.

        :param work: a digest of what updates depend on.
        """
        history, start = self.history, self.history.open_round()
        same = start is not None and history.about("work") == work and not history.attempted(start.round)
        with self._transaction() as db:
            # The first round follows the manifest itself, and no result.
            if history.about("manifest") not in (None, manifest) and not (same and history.newest_result()):
                ended = "UPDATE rounds SET closed_ms = ?, outcome = ? WHERE closed_ms IS NULL"
                db.execute(ended, (now_ms, MANIFEST_CHANGED))
            db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", (("manifest", manifest), ("work", work)))

    # States, which are files of their own.

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


def _write_result(db: sqlite3.Connection, result: Result) -> None:
    """The chain has a new result. It is a row of its own beside the record, for it stays when records are of no use."""
    context, (_, _, result_hash) = result.context, result_digests(result)
    link = (result_hash, context.round, context.prev_result, result.state_hash, result.sum_root)
    db.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, NULL)", (*link, result.to_bytes()))


def _write_blame(db: sqlite3.Connection, blame: StoreBlame) -> None:
    """Strikes as they are now. Nobody is taken off the list of the excluded: only another certificate does that."""
    strikes, pause = blame.strikes, blame.pause
    rows = [(site, strikes.get(site, 0), pause.get(site, 0)) for site in sorted({*strikes, *pause})]
    db.execute("DELETE FROM strikes")
    db.executemany("INSERT INTO strikes VALUES (?, ?, ?)", rows)
    db.execute("DELETE FROM disputes")
    disputes = [(*pair, *certs) for pair, certs in sorted(blame.disputes.items())]
    db.executemany("INSERT INTO disputes VALUES (?, ?, ?, ?)", disputes)
    db.execute("DELETE FROM silence")
    silence = [(site, count, cert) for site, (count, cert) in sorted(blame.silence.items())]
    db.executemany("INSERT INTO silence VALUES (?, ?, ?)", silence)
    excluded = [(site, reason, cert) for site, (reason, cert) in sorted(blame.excluded.items())]
    db.executemany("INSERT OR REPLACE INTO blame VALUES (?, ?, ?)", excluded)


# A row for each attempt, for people. It is written in the transaction of the record that it follows from, so that it is
# never ahead of it.

def _note_attempt(db: sqlite3.Connection, effect: Stored, now_ms: int) -> None:
    match effect:
        case Persist(records.Planned(plan=plan), number):
            context = plan.context
            row = (context.ctx(), number, context.attempt, context.t, context.n, " ".join(context.sites), now_ms)
            db.execute("INSERT OR IGNORE INTO attempts VALUES (?, ?, ?, ?, ?, ?, NULL, ?, NULL, NULL, '')", row)
        case Persist(records.SurvivorsShown(survivors=shown), number):
            names = " ".join(line.site for line in shown.uploads)
            newest = "(SELECT MAX(attempt) FROM attempts WHERE round = ?)"
            update = f"UPDATE attempts SET survivors = ? WHERE round = ? AND attempt = {newest}"
            db.execute(update, (names, number, number))
        case Persist(records.AttemptClosed(ctx=ctx, reason=reason)):
            _close_attempt(db, ctx, reason.decode("utf-8", errors="replace"), now_ms)
        case Persist(records.ResultShown(result=result)):
            _close_attempt(db, result.context.ctx(), PUBLISHED if result.verdict == SumVerdict.GOOD else VOID, now_ms)


def _close_attempt(db: sqlite3.Connection, ctx: bytes, outcome: str, now_ms: int) -> None:
    db.execute("UPDATE attempts SET closed_ms = ?, outcome = ? WHERE ctx = ?", (now_ms, outcome, ctx))
