"""Everything that looks at the past of a run: what a restart, an operator, an export or the page asks the database.

Two kinds of callers ask the same questions. The coordinator itself asks through the connection it writes with
(`Storage.history`), when it starts. Everybody else opens the file with `ReadOnlyHistory`, which cannot write, needs no
lock and may be used while the coordinator runs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from coordinator import database
from coordinator.effects import MANIFEST_CHANGED, PUBLISHED, RECOVERED, VOID, VOTED_DOWN
from coordinator.results import Link
from lazaret.errors import OTHER_VERSION, ConfigError, DataError
from security.crypto.prg import Words
from security.identity.manifest import Manifest
from security.secagg import records
from security.secagg.certificates import CheckCertificate
from security.secagg.coordinator.earlier import EarlierAttempt
from security.secagg.coordinator.rounds import BlameBook, RoundStart
from security.secagg.fields import Wire
from security.secagg.fixed_point import decode_scores, decode_slots
from security.secagg.layout import Layout
from security.secagg.messages import Result, Shares
from security.secagg.scores import BestRound, ScoreSum, best_of

Rows = list[tuple[Any, ...]]
Ask = Callable[..., Rows]
BEST_ROUND: Final = "best-round"  # the one whose model is kept for an export
COMPLETED_BEFORE: Final = "completed-before"  # models of this run that a lost coordinator has published
WAIT_SECONDS: Final = 2.0  # for a database that another process holds

_ROUND_FIGURES: Final = """
SELECT r.number, r.opened_ms, r.closed_ms, r.outcome, NULLIF(lower(hex(s.state_hash)), ''),
    s.certificate IS NOT NULL, f.weight, f.loss, f.hits, t.bytes_in, t.bytes_out
FROM rounds r LEFT JOIN results s ON s.round = r.number LEFT JOIN figures f ON f.round = r.number
    LEFT JOIN traffic t ON t.round = r.number
WHERE r.number > ? ORDER BY r.number
"""
# The scores in a sum are of the model that its round began with: the one that an earlier round gave.
_SCORES: Final = """
SELECT m.round, s.scored, s.score, s.squares
FROM scores s JOIN rounds r ON r.number = s.round
    JOIN results m ON m.state_hash = r.state_hash AND m.round = s.round - 1
    JOIN rounds b ON b.number = m.round AND b.state_hash != m.state_hash  -- a void sum leaves no model to score
ORDER BY m.round
"""
_LAST_ATTEMPTS: Final = """
SELECT round, attempt, members, LENGTH(survivors) - LENGTH(REPLACE(survivors, ' ', '')) + 1
FROM attempts WHERE round > ? ORDER BY round, attempt
"""
_COHORTS: Final = """
SELECT round, cohort, survivors, outcome FROM attempts WHERE round > (SELECT MAX(number) FROM rounds) - ?
ORDER BY round, attempt
"""
_EARLIER: Final = """
SELECT data FROM records WHERE round < ? AND round IN (SELECT number FROM rounds WHERE state_hash IN (?, ?))
    AND substr(data, 1, 4) <> ? ORDER BY id
"""
_ABORTS: Final = """
SELECT closed_ms, round, attempt, outcome, missing FROM attempts
WHERE outcome IS NOT NULL AND outcome <> ? AND outcome <> ?
UNION ALL SELECT closed_ms, number, NULL, outcome, '' FROM rounds
WHERE outcome IS NOT NULL AND outcome <> ?
ORDER BY 1 DESC LIMIT ?
"""


# Answers.

class RoundRow(NamedTuple):
    """One round; `closed_ms` and `outcome` are None while it is open."""

    number: int
    opened_ms: int
    closed_ms: int | None
    outcome: str | None


class RoundFigures(NamedTuple):
    """One round with what is known of it. None where it gave no model, or nothing was noted."""

    number: int
    opened_ms: int
    closed_ms: int | None
    outcome: str | None
    model: str | None
    checked: bool
    weight: int | None
    loss: float | None
    hits: int | None
    bytes_in: int | None
    bytes_out: int | None


class LastAttempt(NamedTuple):
    """The newest attempt of a round: its number, and how many sites were planned and in the sum."""

    attempt: int
    members: int | None
    survivors: int | None


class Cohort(NamedTuple):
    """Who was planned in an attempt, and who was in its sum; `outcome` is None while it goes on."""

    round: int
    planned: list[str]
    survivors: list[str]
    outcome: str | None


class AbortRow(NamedTuple):
    """An attempt that ended without a sum; a whole round where `attempt` is None."""

    closed_ms: int
    round: int
    attempt: int | None
    reason: str
    missing: list[str]


class UncheckedSum(NamedTuple):
    """The newest sum while its certificate is lacking, and which sites have acknowledged it."""

    round: int
    since_ms: int | None
    acknowledged: set[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The slots of a sum: weights, losses and hits of its sites added up, none of them of a single site."""

    weight: int
    loss: float | None
    hits: int | None
    scores: ScoreSum | None = None

    @classmethod
    def of(cls, layout: Layout, total: Words) -> Figures | None:
        """None where the sum holds nothing that can be read."""
        try:
            weight, loss, hits = decode_slots(layout, total)
        except DataError:
            return None
        return cls(weight=weight, loss=loss, hits=hits, scores=decode_scores(layout, total))


# Questions.

class RoundHistory:
    """Every question to the database.

    :param ask: carries out a query with its values. Its errors are ours, and name the file.
    """

    def __init__(self, ask: Ask, path: Path) -> None:
        self._ask = ask
        self.path = path

    def _row(self, query: str, *values: object) -> Any:
        """The first row of an answer; None if it is empty."""
        return next(iter(self._ask(query, *values)), None)

    def about(self, key: str) -> str | None:
        """What the database says of itself, such as `run` or `manifest`."""
        row = self._row("SELECT value FROM about WHERE key = ?", key)
        return None if row is None else str(row[0])

    # Rounds and results, for a restart and for people.

    def rounds(self) -> list[RoundRow]:
        """Every round, newest last."""
        rows = self._ask("SELECT number, opened_ms, closed_ms, outcome FROM rounds ORDER BY number")
        return [RoundRow(*row) for row in rows]

    def open_round(self) -> RoundStart | None:
        """The round that no CloseRound has ended."""
        columns = "number, state_hash, config_hash, prev_result"
        row = self._row(f"SELECT {columns} FROM rounds WHERE closed_ms IS NULL ORDER BY number DESC")
        if row is None:
            return None
        return RoundStart(round=row[0], state_hash=row[1], config_hash=row[2], prev_result=row[3])

    def attempted(self, number: int) -> bool:
        """Whether a round has an attempt: its plan is a record before any site sees it."""
        return bool(self._ask("SELECT id FROM records WHERE round = ? LIMIT 1", number))

    def begun(self) -> bool:
        """Whether the tables are there at all."""
        return bool(self._ask("SELECT name FROM sqlite_master WHERE name = 'rounds'"))

    def newest_result(self) -> int:
        """The newest round that has a result."""
        return int(self._row("SELECT COALESCE(MAX(round), 0) FROM results")[0])

    def last_round(self) -> int:
        return int(self._row("SELECT COALESCE(MAX(number), 0) FROM rounds")[0])

    def completed(self) -> int:
        """How many rounds ended with a model, those before a recovery included."""
        before = int(self.about(COMPLETED_BEFORE) or 0)
        return before + int(self._row("SELECT COUNT(*) FROM rounds WHERE outcome = ?", PUBLISHED)[0])

    def lost_lately(self) -> int:
        """How many of the newest rounds ended without a sum, one after the other."""
        ended = [row.outcome for row in self.rounds() if row.outcome not in (None, MANIFEST_CHANGED, RECOVERED)]
        summed = (PUBLISHED, VOID, VOTED_DOWN)
        return next((n for n, outcome in enumerate(reversed(ended)) if outcome in summed), len(ended))

    def links(self) -> list[Link]:
        """The chain of results, oldest first."""
        rows = self._ask("SELECT round, result_hash, prev_result, state_hash, sum_root FROM results ORDER BY round")
        names = ("round", "result_hash", "prev_result", "state_hash", "sum_root")
        return [Link(**dict(zip(names, row, strict=True))) for row in rows]

    def result(self, result_hash: bytes) -> Result:
        row = self._row("SELECT result FROM results WHERE result_hash = ?", result_hash)
        if row is None:
            raise DataError("result is not in the database", where=str(self.path))
        return Result.from_bytes(row[0])

    def certificate(self, result_hash: bytes) -> CheckCertificate | None:
        row = self._row("SELECT certificate FROM results WHERE result_hash = ?", result_hash)
        return CheckCertificate.from_bytes(row[0]) if row and row[0] else None

    def model_after(self, number: int | None) -> tuple[int, bytes] | None:
        """Round and hash of the state after a round, of the newest if none is named; None if there is no result."""
        query = "SELECT round, state_hash FROM results WHERE ? IS NULL OR round = ? ORDER BY round DESC LIMIT 1"
        found: tuple[int, bytes] | None = self._row(query, number, number)
        return found

    def states_in_use(self, newest: int) -> set[bytes]:
        """Hashes of the first state and of so many of the newest: what a restart and a late site need; and of the best
        by the sites' scores, for an export."""
        first = self._ask("SELECT state_hash FROM rounds ORDER BY number LIMIT 1")
        last = self._ask("SELECT state_hash FROM results ORDER BY round DESC LIMIT ?", newest)
        best = self._ask("SELECT state_hash FROM results WHERE round = ?", self.about(BEST_ROUND))
        return {digest for (digest,) in (*first, *last, *best)}

    def scores(self) -> dict[int, ScoreSum]:
        """What consenting sites scored, by the round that gave the model."""
        return {row[0]: ScoreSum(count=row[1], total=row[2], squares=row[3]) for row in self._ask(_SCORES)}

    def best(self, manifest: Manifest) -> BestRound | None:
        """The best model so far, by the rule of the manifest; None without scores."""
        if manifest.scores is None:
            return None
        scored = ((number, found.mean) for number, found in self.scores().items())
        return best_of(scored, least_gain=Fraction(manifest.scores.least_gain))

    # What the aggregation machine has said.

    def newest_records(self) -> list[Wire]:
        """The records of the newest round that has any."""
        (newest,) = self._row("SELECT MAX(round) FROM records")
        return self._records(newest)

    def earlier_attempts(self, initial: bytes) -> list[EarlierAttempt]:
        """What is left of attempts of rounds before the open one, on the newest model and on the one before it.

        :param initial: the model before the first result.
        """
        head, start = next(reversed(self.links()), None), self.open_round()
        before = self.result(head.result_hash).context.state_hash if head else initial
        number = start.round if start else self.last_round() + 1
        # Without share lists, which are large.
        lists = records.heading(records.DealShown)
        rows = self._ask(_EARLIER, number, before, head.state_hash if head else before, lists)
        return EarlierAttempt.replay(records.decode(data) for (data,) in rows)

    def deals(self, number: int, kx: bytes) -> list[Shares]:
        """The share lists of an attempt, which has these keys."""
        query = "SELECT data FROM records WHERE round = ? AND substr(data, 1, 4) = ? ORDER BY id"
        found = (records.decode(data) for (data,) in self._ask(query, number, records.heading(records.DealShown)))
        return [deal.shares for deal in found if isinstance(deal, records.DealShown) and deal.shares.kx == kx]

    def _records(self, number: int | None) -> list[Wire]:
        rows = self._ask("SELECT data FROM records WHERE round = ? ORDER BY id", number)
        return [records.decode(data) for (data,) in rows]

    def unchecked_sum(self) -> UncheckedSum | None:
        """The newest sum, if its certificate is not there: without it no further sum is made."""
        row = self._row("SELECT round, certificate IS NULL FROM results ORDER BY round DESC LIMIT 1")
        if row is None or not row[1]:
            return None
        number = row[0]
        (since,) = self._row("SELECT closed_ms FROM rounds WHERE number = ?", number)
        seen = {record.ack.site for record in self._records(number) if isinstance(record, records.AckSeen)}
        return UncheckedSum(number, since, seen)

    # Sites.

    def sessions(self) -> dict[str, tuple[int, int]]:
        """Last session number, and time of the last contact, of every site that ever connected."""
        rows = self._ask("SELECT site, session, seen_ms FROM sessions ORDER BY site")
        return {site: (session, seen) for site, session, seen in rows}

    def exclusions(self) -> dict[str, tuple[str, bytes | None]]:
        """Why sites were left out, and the signing certificate under which they lied."""
        return {site: (reason, cert) for site, reason, cert in self._ask("SELECT site, reason, cert FROM blame")}

    def excluded(self, certs: Mapping[str, bytes]) -> dict[str, str]:
        """Who is left out and why: those whose signing certificate is still the one under which they lied."""
        found = self.exclusions().items()
        return {site: reason for site, (reason, cert) in found if cert is not None and certs.get(site) == cert}

    def blame_book(self, certs: Mapping[str, bytes]) -> BlameBook:
        """What was held against sites when the last process ended."""
        rows = self._ask("SELECT site, strikes, pause FROM strikes")
        disputes = self._ask("SELECT accuser, dealer, accuser_cert, dealer_cert FROM disputes")
        silence = self._ask("SELECT site, count, cert FROM silence")
        return BlameBook(
            strikes={site: strikes for site, strikes, _ in rows if strikes},
            pause={site: pause for site, _, pause in rows if pause},
            excluded=self.excluded(certs),
            accusations={(a, d) for a, d, *signed in disputes if [certs.get(a), certs.get(d)] == signed},
            silence={site: count for site, count, cert in silence if certs.get(site) == cert},
        )

    # Attempts and figures, for the page and its metrics.

    def round_figures(self, *, after: int) -> list[RoundFigures]:
        """The rounds after this one, with what is known of them."""
        found = [RoundFigures(*row) for row in self._ask(_ROUND_FIGURES, after)]
        return [row._replace(checked=bool(row.checked)) for row in found]  # SQLite has 0 and 1

    def last_attempts(self, *, after: int) -> dict[int, LastAttempt]:
        """By round, of the rounds after this one."""
        return {row[0]: LastAttempt(*row[1:]) for row in self._ask(_LAST_ATTEMPTS, after)}

    def cohorts(self, *, rounds: int) -> list[Cohort]:
        """All attempts of so many of the newest rounds, in order."""
        return [
            Cohort(number, planned.split(), (survivors or "").split(), outcome)
            for number, planned, survivors, outcome in self._ask(_COHORTS, rounds)
        ]

    def aborts(self, *, most: int) -> list[AbortRow]:
        """Attempts and rounds that ended without a sum, newest first."""
        return [
            AbortRow(closed_ms, number, attempt, reason, missing.split())
            for closed_ms, number, attempt, reason, missing in self._ask(_ABORTS, PUBLISHED, VOID, PUBLISHED, most)
        ]

    def outcomes(self) -> dict[str, int]:
        """How many rounds ended how; whatever else is written there counts as lost."""
        counted = {PUBLISHED: 0, VOID: 0, "lost": 0}
        for outcome, count in self._ask("SELECT outcome, COUNT(*) FROM rounds WHERE outcome IS NOT NULL GROUP BY 1"):
            counted[outcome if outcome in (PUBLISHED, VOID) else "lost"] += count
        return counted

    def durations(self) -> tuple[int, float]:
        """How many rounds have ended, and how many seconds they took together."""
        query = "SELECT COUNT(*), COALESCE(SUM(closed_ms - opened_ms), 0) FROM rounds WHERE closed_ms IS NOT NULL"
        count, total = self._row(query)
        return count, total / 1000

    def abort_reasons(self) -> dict[str, int]:
        query = "SELECT outcome, COUNT(*) FROM attempts WHERE outcome IS NOT NULL AND outcome NOT IN (?, ?) GROUP BY 1"
        return dict(self._ask(query, PUBLISHED, VOID))


# From outside.

def check_format(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a database of another format; a file without tables has none yet."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone():
        return
    for (found,) in db.execute("SELECT value FROM about WHERE key = 'format'"):
        if found != str(database.FORMAT):
            message = f"database of format {found}, this version knows {database.FORMAT}"
            raise ConfigError(message, where=str(path), hint=OTHER_VERSION)


class ReadOnlyHistory(RoundHistory):
    """The history of a coordinator that is running or stopped.

    The file is opened when it is first asked, and may be closed by another thread than the one that asks.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(self._read, path)
        self._db: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def version(self) -> int:
        """Another number whenever somebody else has written (SQLite: PRAGMA data_version)."""
        return int(self._row("PRAGMA data_version")[0])

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            if not self.path.exists():
                raise ConfigError("there is no database yet", where=str(self.path), hint="has the coordinator run?")
            # The two threads never use it at once.
            where = f"{self.path.resolve().as_uri()}?mode=ro"
            opened = sqlite3.connect(where, uri=True, timeout=WAIT_SECONDS, check_same_thread=False)
            try:
                check_format(opened, self.path)
            except BaseException:
                opened.close()
                raise
            self._db = opened
        return self._db

    def _read(self, query: str, *values: object) -> Rows:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            message, hint = f"cannot read the database: {error}", database.hint_of(error)
            raise ConfigError(message, where=str(self.path), hint=hint) from error
