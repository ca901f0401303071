"""What an operator looks at later: a row for each attempt, and what each sum says beside the model.

Written in the transaction of the record it belongs to, so that it is never ahead of it. The engine reads none of it: it
could be deleted without harm to a run.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Final

from coordinator.effects import Keep
from lazaret.errors import DataError
from security.crypto.prg import Words
from security.secagg import records
from security.secagg.context import Verdict
from security.secagg.fixed_point import decode_slots
from security.secagg.layout import Layout

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS attempts (
    ctx BLOB PRIMARY KEY, round INTEGER NOT NULL, attempt INTEGER NOT NULL, threshold INTEGER NOT NULL,
    members INTEGER NOT NULL, cohort TEXT NOT NULL, survivors TEXT, opened_ms INTEGER NOT NULL, closed_ms INTEGER,
    outcome TEXT, missing TEXT NOT NULL DEFAULT '') STRICT;
CREATE INDEX IF NOT EXISTS attempts_by_round ON attempts (round, attempt);
CREATE TABLE IF NOT EXISTS figures (
    round INTEGER PRIMARY KEY, weight INTEGER NOT NULL, loss REAL, hits INTEGER) STRICT;
CREATE TABLE IF NOT EXISTS traffic (
    round INTEGER PRIMARY KEY, bytes_in INTEGER NOT NULL, bytes_out INTEGER NOT NULL) STRICT;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The slots of a sum: weights, losses and hits of its sites added up, none of them of a single site."""

    weight: int
    loss: float | None
    hits: int | None

    @classmethod
    def of(cls, layout: Layout, total: Words) -> Figures | None:
        """None where the sum holds nothing that can be read."""
        try:
            weight, loss, hits = decode_slots(layout, total)
        except DataError:
            return None
        return cls(weight=weight, loss=loss, hits=hits)


def note(db: sqlite3.Connection, effect: object, now_ms: int) -> None:
    """The row that follows from an effect, if one does."""
    match effect:
        case Keep(number, records.Planned(plan=plan)):
            context = plan.context
            row = (context.ctx(), number, context.attempt, context.t, context.n, " ".join(context.sites), now_ms)
            db.execute("INSERT OR IGNORE INTO attempts VALUES (?, ?, ?, ?, ?, ?, NULL, ?, NULL, NULL, '')", row)
        case Keep(number, records.SurvivorsShown(survivors=shown)):
            names = " ".join(line.site for line in shown.uploads)
            newest = "(SELECT MAX(attempt) FROM attempts WHERE round = ?)"
            update = f"UPDATE attempts SET survivors = ? WHERE round = ? AND attempt = {newest}"
            db.execute(update, (names, number, number))
        case Keep(_, records.AttemptClosed(ctx=ctx, reason=reason)):
            _close(db, ctx, reason.decode("utf-8", errors="replace"), now_ms)
        case Keep(_, records.ResultShown(result=result)):
            _close(db, result.context.ctx(), "published" if result.verdict == Verdict.GOOD else "void", now_ms)


def _close(db: sqlite3.Connection, ctx: bytes, outcome: str, now_ms: int) -> None:
    db.execute("UPDATE attempts SET closed_ms = ?, outcome = ? WHERE ctx = ?", (now_ms, outcome, ctx))


def note_missing(db: sqlite3.Connection, site: str) -> None:
    """Who fell silent in the newest attempt."""
    newest = "(SELECT ctx FROM attempts ORDER BY round DESC, attempt DESC LIMIT 1)"
    db.execute(f"UPDATE attempts SET missing = TRIM(missing || ' ' || ?) WHERE ctx = {newest}", (site,))


def note_figures(db: sqlite3.Connection, number: int, figures: Figures) -> None:
    row = (number, figures.weight, figures.loss, figures.hits)
    db.execute("INSERT OR REPLACE INTO figures VALUES (?, ?, ?, ?)", row)


def note_traffic(db: sqlite3.Connection, number: int, bytes_in: int, bytes_out: int) -> None:
    db.execute("INSERT OR REPLACE INTO traffic VALUES (?, ?, ?)", (number, bytes_in, bytes_out))
