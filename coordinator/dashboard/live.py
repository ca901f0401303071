"""The run as it stands now: a small picture that the engine's loop takes and the page's thread looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coordinator.phases import RunPhase
from coordinator.run import Shell, hindrance
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
        previous = engine.previous if engine.auditing else None
        return cls(
            now_ms=clock.now_ms() // HOUR_MS * HOUR_MS,
            phase=engine.phase,
            round=engine.round.start.round if engine.round else 0,
            completed=engine.completed,
            planned=engine.plan.rounds,
            least=engine.least,
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
