"""The coordinator's hands: feeds the round engine, carries out its effects in order, keeps the log.

No decision is made here. `perform` is the one place where an effect becomes an action.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import numpy as np

from coordinator import malloc
from coordinator.effects import (
    CloseRound,
    Effect,
    Effects,
    Exclude,
    Keep,
    KeepCertificate,
    KeepLink,
    KeepStrikes,
    OpenRound,
    ReplaySum,
    SendState,
)
from coordinator.ingress_log import Arrived, Books, Traffic
from coordinator.round_history import Figures
from coordinator.rounds import RoundEngine
from coordinator.send_queue import Stream
from coordinator.storage import Storage, Stored
from coordinator.witness import Letter, WitnessDesk
from lazaret.errors import DataError, PolicyViolation, RemoteProtocolError, ToolkitError
from security.clock import Clock
from security.crypto.ring import frames_of
from security.secagg import records
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.publication import read_sum
from security.secagg.coordinator.spool import Gone
from security.secagg.effects import (
    Advanced,
    Blamed,
    Certified,
    Discard,
    Ended,
    SaveState,
    Send,
    SendPieces,
    SendSum,
)
from security.secagg.fields import Wire
from security.secagg.messages import StateFrame
from security.secagg.relay import Cosignature, Farewell, Goodbye, Head, Held

log = logging.getLogger("coordinator")
_STORED = (Keep, SaveState, OpenRound, CloseRound, KeepLink, KeepCertificate, Exclude, KeepStrikes)
_HEADS = (Head, Cosignature, Held)


class Shell:
    """Everything of a running coordinator but the network."""

    def __init__(self, engine: RoundEngine, storage: Storage, books: Books, desk: WitnessDesk, clock: Clock) -> None:
        self.engine = engine
        self.storage = storage
        self.books = books
        self.desk = desk
        self.clock = clock
        self.streams: dict[str, Stream] = {}
        self.traffic = Traffic()
        self.results = 0

    # Events.

    def connected(self, stream: Stream) -> None:
        """A site has opened a stream; an older one of the same site is over."""
        old = self.streams.get(stream.site)
        if old is not None:
            old.close(Goodbye(code=Farewell.REPLACED))
            self.disconnected(old)
        self.streams[stream.site] = stream
        self.storage.note_session(stream.site, stream.session, now_ms=self.clock.now_ms())
        self.post(self.desk.greet(stream.site))
        log.info("site %s connected", stream.site)

    def disconnected(self, stream: Stream) -> None:
        """A stream has ended. If a newer one of the same site stands, the site is there and nothing is to be done."""
        if self.streams.get(stream.site) is not stream:
            return
        del self.streams[stream.site]
        self.storage.note_seen(stream.site, now_ms=self.clock.now_ms())
        self.books.forget_stream(stream.site)
        self.execute(self.engine.gone(stream.site))
        log.info("site %s disconnected", stream.site)

    def received(self, stream: Stream, arrived: Arrived) -> None:
        """A message of a site: into the log first, then to the engine."""
        message = arrived.message
        self.books.arrived(arrived, round_number=self.engine.round_of(message))
        try:
            if isinstance(message, _HEADS):
                self.post(self.desk.receive(stream.site, message))
            else:
                self.execute(self.engine.receive(stream.site, message))
        except (RemoteProtocolError, PolicyViolation) as error:
            # A policy is violated by who is not listed any more, such as a site whose certificate has ended meanwhile.
            log.warning("site %s: %s refused: %s", stream.site, type(message).__name__, error)

    def awaits_frames(self, site: str) -> bool:
        """Whether an upload of this site is on its way."""
        current = self.engine.round
        return current is not None and any(site in attempt.uploads.arriving for attempt in current.attempts[-1:])

    def tick(self) -> None:
        """To be called often: deadlines of the run, heartbeat of the log."""
        self.execute(self.engine.tick())
        self.books.log.tick()

    def settle_receipts(self) -> None:
        """Give the receipts that are owed, each to its own stream."""
        for site, receipts in self.books.receipts().items():
            if site in self.streams:
                self.streams[site].put(receipts)

    def call_witnesses(self) -> None:
        """Cut a head over all that was logged, and have it and the sites' heads witnessed."""
        self.books.log.checkpoint()
        self.post(self.desk.call(list(self.streams)))

    def post(self, letters: Iterable[Letter]) -> None:
        for site, message in letters:
            if site in self.streams:
                self.streams[site].put([message])

    # Effects.

    def execute(self, effects: Effects) -> None:
        """Carry out effects in order; what is to be stored together goes into one transaction."""
        pending: list[Stored] = []
        for effect in effects:
            if isinstance(effect, _STORED):
                pending.append(effect)
                continue
            self._store(pending)
            self.perform(effect)
        self._store(pending)

    def _store(self, pending: list[Stored]) -> None:
        if not pending:
            return
        self.storage.keep(pending, now_ms=self.clock.now_ms())
        for effect in pending:
            self._report(effect)
        pending.clear()

    def perform(self, effect: Effect) -> None:
        """One effect that is not a record."""
        match effect:
            case Send(message, to) if to is not None:
                self._queue(to, [message])
            case SendSum():
                self._queue(effect.to, effect.frames(), vector=True)
            case SendPieces(to, pieces):
                self._queue(to, self._served(pieces()), vector=True)
            case ReplaySum():
                self._queue(effect.to, self._sum(effect), vector=True)
            case SendState(to, state_hash):
                self._queue(to, self._state(state_hash), vector=True)
            case Discard(keys):
                for key in keys:
                    self.engine.core.spool.remove(key)
            case Blamed(site, reason):
                if reason == "missing":
                    self.storage.note_missing(site)
                log.warning("site %s: %s", site, reason)
            case Ended(_, reason):
                log.warning("attempt ended: %s", reason)
            case Advanced():
                self.results += 1
                figures = Figures.of(self.engine.core.policy.layout, effect.total)
                if figures is not None:
                    self.storage.note_figures(effect.round, figures)
            case Certified():
                log.info("the sum of round %d is checked", self._previous_number())

    def _previous_number(self) -> int:
        return self.engine.previous.start.round if self.engine.previous else 0

    def _queue(self, site: str, messages: Iterable[Wire], *, vector: bool = False) -> None:
        if site in self.streams:
            self.streams[site].put(messages, vector=vector)

    def _served(self, pieces: Iterator[Wire]) -> Iterator[Wire]:
        """Chunks for a check, as long as the spool has them: another site's acknowledgement may have ended it."""
        try:
            yield from pieces
        except Gone:
            return

    def _sum(self, effect: ReplaySum) -> Iterator[Wire]:
        core, layout = self.engine.core, self.engine.core.policy.layout
        try:
            words = read_sum(core.spool, effect.sum_root, layout)
        except Gone:
            log.warning("the sum of an older round is not in the spool any more")
            return
        yield from SendSum(to=effect.to, result=effect.result_hash, words=words, layout=layout).frames()

    def _state(self, state_hash: bytes) -> Iterator[StateFrame]:
        try:
            state = self.storage.load_state(state_hash)
        except DataError as error:
            log.warning("a model for a site that was away cannot be sent: %s", error)  # it may have waited too long
            return
        for index, part in frames_of(state.view(np.uint8)):
            yield StateFrame(state_hash=state_hash, index=index, data=part)

    # What goes into the log and to the operator.

    def _report(self, effect: Stored) -> None:
        match effect:
            case Keep(_, records.UploadCounted(header=header)):
                stream = self.streams.get(header.site)
                number = self.engine.round_of(header)
                if stream is not None and number is not None:
                    self.books.upload_complete(header.site, stream.session, header.root, round_number=number)
            case Keep(_, records.SurvivorsShown()):
                self.books.survivors(self._current())
            case Keep(_, records.QuorumShown()):
                malloc.give_back()  # what the uploads needed, before the sum is opened
            case Keep(_, records.ResultShown(result=result)):
                self.books.published(self._attempt_of(result.context.ctx()))
            case OpenRound(start):
                log.info("round %d: training", start.round)
            case CloseRound(number, outcome):
                self.storage.note_traffic(number, *self.traffic.since_last())
                log.info("round %d: %s", number, outcome)

    def _current(self) -> CoordinatorAttempt:
        return self._attempt_of(None)

    def _attempt_of(self, ctx: bytes | None) -> CoordinatorAttempt:
        for known in (self.engine.round, self.engine.previous):
            for attempt in reversed(known.attempts if known else []):
                if ctx is None or attempt.ctx == ctx:
                    return attempt
        raise ToolkitError("no attempt is open", where="coordinator")
