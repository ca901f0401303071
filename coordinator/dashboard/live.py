"""The run as it stands now, and the runs before and after it.

`Live` is a small picture that the engine's loop takes and the page's thread looks at. Everything else is read from the
state folder or follows from the picture; nothing is remembered but files that do not change any more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from coordinator import database
from coordinator.effects import PUBLISHED
from coordinator.phases import RunPhase
from coordinator.round_history import BEST_ROUND, ReadOnlyHistory
from coordinator.run import Shell, hindrance
from coordinator.run_queue import RunQueue
from lazaret.control import finished_runs
from lazaret.errors import ToolkitError
from security.log.note import Note

AWAY: Final = "away"
EXCLUDED: Final = "excluded"
HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteNow:
    """One hospital, seen from the hub.

    :param heard: when its newest message came, in whole seconds: a finer time would make every picture a new one.
    :param pause: cohorts that it still sits out.
    """

    name: str
    state: str
    heard: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    pause: int = 0

    @property
    def connected(self) -> bool:
        return self.heard > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationProgress:
    """The attempt under way."""

    attempt: int
    step: str
    members: int
    threshold: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Everything the page shows that is not on disk.

    :param now_ms: the hour: certificates are compared with it, and a finer time would make every picture a new one.
    :param hindrance: what keeps the run from going on; None if nothing does.
    :param witnessed: how much of which log a witness holds: (witness, origin of the log) -> size.
    """

    now_ms: int
    phase: RunPhase
    round: int
    completed: int
    planned: int
    least: int
    deadline: int | None
    hindrance: str | None
    paused: bool
    aggregation: AggregationProgress | None
    checking: int | None
    sites: tuple[SiteNow, ...]
    log_size: int
    head: Note
    witnessed: Mapping[tuple[str, str], int]
    received: Mapping[str, int]
    sent: Mapping[str, int]

    @classmethod
    def of(cls, shell: Shell) -> Live:
        """Take the picture. To be called from the engine's own thread."""
        engine, clock = shell.engine, shell.clock
        aggregation = _aggregation(shell)
        waits = engine.phase in (RunPhase.TRAINING, RunPhase.PINGING)
        previous = engine.previous if engine.check.open else None
        return cls(
            now_ms=clock.now_ms() // HOUR_MS * HOUR_MS,
            phase=engine.phase,
            round=engine.round.start.round if engine.round else 0,
            completed=engine.completed,
            planned=engine.plan.rounds,
            least=engine.candidates.least,
            deadline=(clock.now_ms() - clock.mono_ms() + engine.deadline) // 1000 if waits else None,
            hindrance=hindrance(engine),
            paused=engine.paused is not None,
            aggregation=aggregation,
            checking=previous.start.round if previous else None,
            sites=tuple(_site(shell, entry.site) for entry in engine.core.policy.roster),
            log_size=shell.books.log.size,
            head=shell.books.log.newest_checkpoint,
            witnessed=shell.desk.known(),
            received=dict(shell.traffic.received),
            sent=dict(shell.traffic.sent),
        )


def _aggregation(shell: Shell) -> AggregationProgress | None:
    engine = shell.engine
    attempt = engine.round.current if engine.round and engine.phase is RunPhase.AGGREGATION else None
    if attempt is None:
        return None
    context = attempt.context
    return AggregationProgress(attempt=context.attempt, step=str(attempt.state), members=context.n, threshold=context.t)


def _site(shell: Shell, name: str) -> SiteNow:
    stream = shell.streams.get(name)
    pause = shell.engine.book.pause.get(name, 0)
    if stream is None:
        state = EXCLUDED if name in shell.engine.book.excluded else AWAY
        return SiteNow(name=name, state=state, pause=pause)
    return SiteNow(
        name=name,
        state=_state(shell, name),
        heard=stream.heard_ms // 1000,
        bytes_in=stream.bytes_in,
        bytes_out=stream.bytes_out,
        pause=pause,
    )


def _state(shell: Shell, name: str) -> str:
    """In a word, what a connected site is doing in this round."""
    engine = shell.engine
    if name in engine.book.excluded:
        return EXCLUDED
    if engine.phase is RunPhase.DONE:
        return "idle"
    if engine.phase is RunPhase.AGGREGATION:
        attempt = engine.round.current if engine.round else None
        return "in the sum" if attempt is not None and name in attempt.context.sites else "waiting"
    if name in engine.sites.declined:
        return "declined"
    if engine.phase is RunPhase.WAITING and name not in engine.sites.ready:
        return "waiting"
    return "ready" if name in engine.sites.ready else "training"


# Beyond the run in force: runs before and after it, when it ends, how far logs are witnessed.

LATEST: Final = 10  # rounds that an estimate is made of


class OtherRuns:
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
