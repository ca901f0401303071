"""What a study asks beyond the run in force: runs before and after it, when it ends, how far logs are witnessed.

Everything here is read from the state folder or follows from the page's own picture; nothing is remembered but files
that do not change any more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from coordinator import database
from coordinator.effects import PUBLISHED
from coordinator.round_history import BEST_ROUND, ReadOnlyHistory
from coordinator.run_queue import RunQueue
from lazaret.control import finished_runs
from lazaret.errors import ToolkitError

LATEST: Final = 10  # rounds that an estimate is made of


class StudyRuns:
    """The runs of one state folder that are over, and those that wait."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._over: dict[str, dict[str, Any]] = {}
        self._waiting: tuple[object, list[dict[str, Any]]] = (None, [])

    def stamp(self) -> tuple[int, ...]:
        """Another value whenever a run has ended, was queued or was removed."""
        return tuple(_changed(self._state / name) for name in ("runs", "queue"))

    def read(self, now: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All of them, in the order in which they were or will be trained.

        :param now: the run in force.
        """
        over = [self._ended(name, path) for name, path in finished_runs(self._state).items()]
        return [*sorted(over, key=lambda run: run["began"] or 0), {"state": "now", **now}, *self._queued()]

    def _ended(self, name: str, path: Path) -> dict[str, Any]:
        """From its own database, once. One that was archived or is damaged is named without figures."""
        if name not in self._over:
            run: dict[str, Any] = {"run": name, "state": "over", "published": None, "began": None, "ended": None}
            try:
                with ReadOnlyHistory(path / database.FILE) as history:
                    rounds, best = history.rounds(), history.about(BEST_ROUND)
            except ToolkitError:
                rounds, best = [], None
            if rounds:
                run["published"] = sum(row.outcome == PUBLISHED for row in rounds)
                run["began"] = rounds[0].opened_ms
                run["ended"] = max(row.closed_ms or row.opened_ms for row in rounds)
                run["best"] = best and int(best)
            self._over[name] = run
        return self._over[name]

    def _queued(self) -> list[dict[str, Any]]:
        stamp = _changed(self._state / "queue")
        if self._waiting[0] != stamp:
            waiting = [queued.manifest for queued in RunQueue(self._state).runs()]
            rows = [{"run": one.run, "state": "waits", "planned": one.training.rounds} for one in waiting]
            self._waiting = (stamp, rows)
        return self._waiting[1]


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def estimated_end(rounds: Sequence[Sequence[Any]], *, completed: int, planned: int) -> int | None:
    """When the run ends if rounds go on as the newest have: the median from the end of one to the end of the next.

    :param rounds: number, opening, closing and outcome of each, oldest first; times in milliseconds.
    :returns: a time, or None while nothing can be said.
    """
    ends = [row[2] for row in rounds if row[3] == PUBLISHED][-LATEST - 1 :]
    steps = [later - earlier for earlier, later in pairwise(ends)]
    if not steps or completed >= planned:
        return None
    return int(ends[-1] + statistics.median(steps) * (planned - completed))


def with_gap(log: dict[str, Any], coordinator: str) -> dict[str, Any]:
    """A log's newest head, how far another party holds it, and how many entries are beyond that.

    What this coordinator itself holds of a site's log does not count: it is one witness, and the head is from it.
    """
    others = [one["size"] for one in log["witnesses"] if one["name"] != coordinator]
    newest = log.get("entries", log["size"])
    witnessed = min(newest, max(others, default=0))
    return log | {"witnessed": witnessed, "gap": newest - witnessed}
