"""Rounds, attempts and figures as they are on disk, through a connection that can only read."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lazaret.errors import ConfigError

PUBLISHED: Final = "published"
VOID: Final = "void"
RECENT: Final = 40  # rounds whose members are named one by one
MOVING: Final = 16  # newest rounds that may still change: open, under check, or with bytes to come
MOST_ABORTS: Final = 50
COLUMNS: Final = (
    "number", "opened", "closed", "outcome", "model", "checked", "weight", "loss", "hits", "bytes_in", "bytes_out",
    "attempts", "members", "survivors",
)  # fmt: skip

_ROUNDS: Final = """
SELECT r.number, r.opened_ms, r.closed_ms, r.outcome, lower(hex(s.state_hash)), s.certificate IS NOT NULL,
    f.weight, f.loss, f.hits, t.bytes_in, t.bytes_out
FROM rounds r LEFT JOIN results s ON s.round = r.number LEFT JOIN figures f ON f.round = r.number
    LEFT JOIN traffic t ON t.round = r.number
WHERE r.number > ? ORDER BY r.number
"""
_ATTEMPTS: Final = """
SELECT round, attempt, members, LENGTH(survivors) - LENGTH(REPLACE(survivors, ' ', '')) + 1
FROM attempts WHERE round > ? ORDER BY round, attempt
"""
_MEMBERS: Final = """
SELECT round, cohort, survivors, outcome FROM attempts WHERE round > (SELECT MAX(number) FROM rounds) - ?
ORDER BY round, attempt
"""
_ABORTS: Final = f"""
SELECT closed_ms, round, attempt, outcome, missing FROM attempts
WHERE outcome IS NOT NULL AND outcome <> '{PUBLISHED}' AND outcome <> '{VOID}'
UNION ALL SELECT closed_ms, number, NULL, outcome, '' FROM rounds
WHERE outcome IS NOT NULL AND outcome <> '{PUBLISHED}'
ORDER BY 1 DESC LIMIT {MOST_ABORTS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All that the database says, as JSON can carry it.

    :param written: the rounds as JSON already, without the brackets: most of them never change.
    """

    rounds: list[list[Any]]
    written: str
    members: list[dict[str, Any]]
    aborts: list[dict[str, Any]]
    sessions: dict[str, int]
    excluded: dict[str, str]


class History:
    """Opened when it is first asked, in the thread that asks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._settled: list[list[Any]] = []
        self._written = ""

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            # Closed by another thread than the one that reads, never used by both at once.
            where = f"{self._path.resolve().as_uri()}?mode=ro"
            self._db = sqlite3.connect(where, uri=True, timeout=1.0, check_same_thread=False)
        return self._db

    def _ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise ConfigError(f"cannot read the database: {error}", where=str(self._path)) from error

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def version(self) -> int:
        """Another number whenever somebody else has written (SQLite: PRAGMA data_version)."""
        return int(self._ask("PRAGMA data_version")[0][0])

    def read(self) -> Told:
        rounds, written = self._rounds()
        return Told(
            rounds=rounds,
            written=written,
            members=self._members(),
            aborts=[
                {"at": at, "round": number, "attempt": attempt, "reason": reason, "missing": missing.split()}
                for at, number, attempt, reason, missing in self._ask(_ABORTS)
            ],
            sessions=dict(self._ask("SELECT site, seen_ms FROM sessions")),
            excluded=dict(self._ask("SELECT site, reason FROM blame")),
        )

    def _rounds(self) -> tuple[list[list[Any]], str]:
        """All rounds; old ones do not change any more, and are read and written once."""
        after = self._settled[-1][0] if self._settled else 0
        attempts = {row[0]: row[1:] for row in self._ask(_ATTEMPTS, after)}
        moving = [
            [*row[:4], row[4] or None, bool(row[5]), *row[6:], *attempts.get(row[0], (0, None, None))]
            for row in self._ask(_ROUNDS, after)
        ]
        settling, moving = moving[:-MOVING], moving[-MOVING:]
        self._settled += settling
        self._written = _joined(self._written, _json(settling))
        return self._settled + moving, _joined(self._written, _json(moving))

    def _members(self) -> list[dict[str, Any]]:
        """Who was in the last attempt of each recent round: in its sum, left out, or, while it goes on, planned."""
        found = {}
        for number, cohort, survivors, outcome in self._ask(_MEMBERS, RECENT):
            planned, alive = cohort.split(), (survivors or "").split()
            if outcome is None:
                found[number] = {"round": number, "in": [], "out": [], "planned": planned}
            else:
                left_out = [name for name in planned if name not in alive]
                found[number] = {"round": number, "in": alive, "out": left_out, "planned": []}
        return list(found.values())

    # For the metrics.

    def outcomes(self) -> dict[str, int]:
        """How many rounds ended how; whatever else is written there counts as lost."""
        counted = {PUBLISHED: 0, VOID: 0, "lost": 0}
        for outcome, count in self._ask("SELECT outcome, COUNT(*) FROM rounds WHERE outcome IS NOT NULL GROUP BY 1"):
            counted[outcome if outcome in (PUBLISHED, VOID) else "lost"] += count
        return counted

    def durations(self) -> tuple[int, float]:
        """How many rounds have ended, and how many seconds they took together."""
        query = "SELECT COUNT(*), COALESCE(SUM(closed_ms - opened_ms), 0) FROM rounds WHERE closed_ms IS NOT NULL"
        count, total = self._ask(query)[0]
        return count, total / 1000

    def abort_reasons(self) -> dict[str, int]:
        query = "SELECT outcome, COUNT(*) FROM attempts WHERE outcome IS NOT NULL AND outcome NOT IN (?, ?) GROUP BY 1"
        return dict(self._ask(query, PUBLISHED, VOID))


def _json(rows: list[list[Any]]) -> str:
    """The rows of a JSON array, without its brackets."""
    return json.dumps(rows, allow_nan=False, separators=(",", ":"))[1:-1]


def _joined(*parts: str) -> str:
    return ",".join(filter(None, parts))
