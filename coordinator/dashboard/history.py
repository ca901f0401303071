"""Rounds, attempts and figures as the page shows them. A long run has thousands of rounds: old ones are read once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from coordinator.round_history import Cohort, LastAttempt, ReadOnlyHistory

RECENT: Final = 40  # rounds whose members are named one by one
MOVING: Final = 16  # newest rounds that may still change: open, under check, or with bytes to come
MOST_ABORTS: Final = 50
# Of one row: the fields of RoundFigures, then those of LastAttempt, under the names that the page knows.
COLUMNS: Final = (
    "number", "opened", "closed", "outcome", "model", "checked", "weight", "loss", "hits", "bytes_in", "bytes_out",
    "attempts", "members", "survivors",
)  # fmt: skip
_NO_ATTEMPT: Final = LastAttempt(0, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHistory:
    """All that the database says, as JSON can carry it.

    :param written: the rounds as JSON already, without the brackets: most of them never change.
    """

    rounds: list[list[Any]]
    written: str
    members: list[dict[str, Any]]
    aborts: list[dict[str, Any]]
    sessions: dict[str, int]
    excluded: dict[str, str]


class PageReader:
    """Reads what has changed since the last time, and remembers the rest."""

    def __init__(self, history: ReadOnlyHistory) -> None:
        self.history = history
        self._settled: list[list[Any]] = []
        self._written = ""

    def read(self) -> PageHistory:
        rounds, written = self._rounds()
        return PageHistory(
            rounds=rounds,
            written=written,
            members=_members(self.history.cohorts(rounds=RECENT)),
            aborts=[
                {"at": at, "round": number, "attempt": attempt, "reason": reason, "missing": missing}
                for at, number, attempt, reason, missing in self.history.aborts(most=MOST_ABORTS)
            ],
            sessions={site: seen for site, (_, seen) in self.history.sessions().items()},
            excluded={site: reason for site, (reason, _) in self.history.exclusions().items()},
        )

    def _rounds(self) -> tuple[list[list[Any]], str]:
        """All rounds; old ones do not change any more, and are read and written once."""
        after = self._settled[-1][0] if self._settled else 0
        attempts = self.history.last_attempts(after=after)
        moving = [
            [*row, *attempts.get(row.number, _NO_ATTEMPT)] for row in self.history.round_figures(after=after)
        ]
        settling, moving = moving[:-MOVING], moving[-MOVING:]
        self._settled += settling
        self._written = _joined(self._written, _json(settling))
        return self._settled + moving, _joined(self._written, _json(moving))


def _members(cohorts: list[Cohort]) -> list[dict[str, Any]]:
    """Who was in the last attempt of each recent round: in its sum, left out, or, while it goes on, planned."""
    found = {}
    for number, planned, survivors, outcome in cohorts:
        if outcome is None:
            found[number] = {"round": number, "in": [], "out": [], "planned": planned}
        else:
            left_out = [name for name in planned if name not in survivors]
            found[number] = {"round": number, "in": survivors, "out": left_out, "planned": []}
    return list(found.values())


def _json(rows: list[list[Any]]) -> str:
    """The rows of a JSON array, without its brackets."""
    return json.dumps(rows, allow_nan=False, separators=(",", ":"))[1:-1]


def _joined(*parts: str) -> str:
    return ",".join(filter(None, parts))
