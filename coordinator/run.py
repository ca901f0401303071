"""The shell of a coordinator: feeds the round engine, carries out its effects in order, keeps the log.

No decision is made here. Each event is one step, and no step begins before the last one has ended:

1. *Logged.* A message of a site is entered in the privacy log before the engine sees it, whatever it turns out to be.
2. *Decided.* The engine turns the event into effects; `phases` and `rounds` say how. A message that breaks the protocol
   or the policy is refused here, and changes nothing.
3. *Carried out*, in the order in which they were given (`execute`):

   - Records (`coordinator.effects.Stored`) that stand side by side are one transaction. It is on disk before anything
     behind it happens. If the disk refuses it, the process ends: what was not written must not be sent.
   - Then the privacy log and the operator are told what these records mean: an upload counted, survivors shown, a sum
     published.
   - Then the rest, one by one: messages and frames go into the queue of their site's stream, vectors that a record has
     made useless leave the spool.

So the order is always persist, then log, then send. A crash between two of them leaves something written that was not
said. That is safe: after the restart it is said, word for word, since it comes from the record. The other way round, a
site could hold a message that the coordinator does not know of, and would contradict.

A queue takes any number of messages; how fast they leave is between `send_queue` and `service`. A message for a site
that is not connected is dropped: when it connects, the engine tells it everything that it needs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from coordinator.effects import ENDED, CloseRound, Effect, Effects, OpenRound, PauseRun, Stored
from coordinator.ingress_log import Arrived, IngressLog, Traffic
from coordinator.phases import RunPhase
from coordinator.round_history import Figures
from coordinator.rounds import RoundEngine
from coordinator.run_queue import RunQueue, StopFile
from coordinator.send_queue import BULKY, Stream
from coordinator.storage import Storage
from coordinator.witness import Letter, WitnessDesk
from lazaret import process
from lazaret.control import PauseFile
from lazaret.errors import DataError, PolicyViolation, RemoteProtocolError, ToolkitError
from security.clock import Clock
from security.crypto.ring import FRAME_BYTES
from security.identity.manifest import Manifest
from security.log.events import AgentStop
from security.secagg import records, statements
from security.secagg.context import SumVerdict
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.spool import Gone
from security.secagg.effects import Advanced, Blamed, Certified, Discard, Ended, Persist, Send, SendFrames, VotedDown
from security.secagg.fields import Wire
from security.secagg.messages import Hello
from security.secagg.relay import CloseReason, Cosignature, Goodbye, Head, Held, ModelFrame, ModelRequest, RunStop

log = logging.getLogger("coordinator")
_HEADS = (Head, Cosignature, Held)
SAY_AGAIN_MS: Final = 3_600_000  # what hinders the run is said again while it lasts, at last once a day


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The initial model of the run, as the manifest pins it."""

    path: Path
    digest: bytes

    def frames(self, first: int) -> Iterator[Wire]:
        """From this frame on, each read when its turn comes."""
        try:
            with open(self.path, "rb") as file:
                length = os.fstat(file.fileno()).st_size
                file.seek(first * FRAME_BYTES)
                for index in range(first, -(-length // FRAME_BYTES)):
                    yield ModelFrame(digest=self.digest, length=length, index=index, data=file.read(FRAME_BYTES))
        except OSError as error:
            log.warning("the initial model cannot be sent: %s", error)


class Shell:
    """Everything of a running coordinator but the network."""

    def __init__(
        self, engine: RoundEngine, storage: Storage, books: IngressLog, desk: WitnessDesk, clock: Clock
    ) -> None:
        self.engine = engine
        self.storage = storage
        self.books = books
        self.desk = desk
        self.clock = clock
        self.streams: dict[str, Stream] = {}
        self.traffic = Traffic()
        self.results = 0
        self.pause = PauseFile(storage.folder)
        self.model: ModelFile | None = None  # for sites that lack it
        self.in_force: Callable[[], Manifest] | None = None  # for its rule of the best round
        self.queue = RunQueue(storage.folder)
        self.stop_word = StopFile(storage.folder)
        self.stopped = False  # the sites were told that the run ends early
        self._ordered = False  # whether it was said that this round trains
        self._hindered: tuple[str, int, int] | None = None  # by what, since when, when to say it again

    # Events.

    def connected(self, stream: Stream) -> None:
        """A site has opened a stream; an older one of the same site is over."""
        old = self.streams.get(stream.site)
        if old is not None:
            old.close(Goodbye(code=CloseReason.REPLACED))
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
        self.books.arrived(arrived, round_number=self._round_of(message))
        try:
            if isinstance(message, ModelRequest):
                self._send_model(stream, message)
            elif isinstance(message, _HEADS):
                self.post(self.desk.receive(stream.site, message))
            else:
                self.execute(self.engine.receive(stream.site, message))
                if self.stopped and isinstance(message, Hello):
                    stream.put([self._run_stop()])
        except (RemoteProtocolError, PolicyViolation) as error:
            # A policy is violated by who is not listed any more, such as a site whose certificate has ended meanwhile.
            log.warning("site %s: %s refused: %s", stream.site, type(message).__name__, error)
            if isinstance(message, Hello):
                stream.close(Goodbye(code=CloseReason.OTHER_HISTORY))

    def _send_model(self, stream: Stream, request: ModelRequest) -> None:
        """The initial model, from where the site has it; once on a stream, so that nobody can make us send for ever."""
        in_force = self.engine.core.policy.manifest_version
        if self.model is None or stream.model_sent or request.manifest_version != in_force:
            raise RemoteProtocolError("the model was sent, or is another manifest's", where=f"site {stream.site}")
        stream.model_sent = True
        log.info("site %s fetches the initial model", stream.site)
        stream.put(self.model.frames(request.next_frame), vector=True)

    def awaits_frames(self, site: str) -> bool:
        """Whether an upload of this site is on its way."""
        current = self.engine.round
        return current is not None and any(site in attempt.uploads.arriving for attempt in current.attempts[-1:])

    def close(self, reason: str) -> None:
        """The log ends in order, and the files are let go."""
        try:
            self.books.log.close(lambda _: self.books.write(AgentStop(reason=reason)))
        finally:
            self.storage.close()

    def tick(self) -> None:
        """To be called often: deadlines of the run, heartbeat of the log."""
        reason = self.pause.reason()
        if reason != self.engine.paused:
            self.execute(self.engine.pause(reason))
            log.info("%s", "the run goes on" if reason is None else f"paused: {reason}")
        self._end_early()
        self.execute(self.engine.tick())
        self.books.log.tick()
        self._say_hindrance()

    def _end_early(self) -> None:
        """The operator's word is on disk: no round begins any more, and every site is told, under our signature."""
        if self.stopped or (reason := self.stop_word.reason(self.engine.core.policy.run)) is None:
            return
        self.execute(self.engine.end_run(ENDED))
        self.stopped = self.engine.phase is RunPhase.DONE
        if not self.stopped:
            return
        log.warning("the run ends before its last round: %s", reason)
        for stream in self.streams.values():
            stream.put([self._run_stop()])

    def _run_stop(self) -> RunStop:
        policy, signer = self.engine.core.policy, self.engine.core.signer
        signature = signer.sign(statements.run_stop(policy.run, policy.manifest_hash))
        return RunStop(run=policy.run, manifest_hash=policy.manifest_hash, signature=signature)

    @property
    def next_run_due(self) -> bool:
        """Whether this run is over, its last sum checked, and another one waits."""
        return self.engine.phase is RunPhase.DONE and not self.engine.check.open and bool(self.queue)

    def _say_hindrance(self) -> None:
        """A wait is said when it begins, while it lasts, and when it has ended."""
        reason, now = hindrance(self.engine), self.clock.mono_ms()
        known, since, again = self._hindered or ("", now, now)
        if reason is None:
            if self._hindered is not None and now - since >= SAY_AGAIN_MS:
                log.info("the run goes on, after %d min", (now - since) // 60_000)
            self._hindered = None
        elif reason != known or now >= again:
            minutes = (now - since) // 60_000
            log.warning("%s%s", reason, f" (the run has waited for {minutes} min)" if minutes else "")
            self._hindered = (reason, since, now + min(max(SAY_AGAIN_MS, now - since), 24 * SAY_AGAIN_MS))

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
        """Carry out effects in order; records that stand side by side go into one transaction."""
        pending: list[Stored] = []
        for effect in effects:
            if isinstance(effect, Stored):
                pending.append(effect)
                continue
            self._store(pending)
            self.perform(effect)
        self._store(pending)
        if self.engine.phase is RunPhase.TRAINING and not self._ordered and self.engine.round is not None:
            self._ordered = True
            log.info("round %d: training", self.engine.round.start.round)

    def _store(self, pending: list[Stored]) -> None:
        if not pending:
            return
        self.storage.keep(pending, now_ms=self.clock.now_ms())
        for effect in pending:
            self.perform(effect)
        pending.clear()

    def perform(self, effect: Effect) -> None:
        """The one place where an effect becomes an action. One that is a record is on disk already."""
        match effect:
            case Persist(record):
                self._report(record)
            case Certified():
                log.info("the sum of round %d is checked", self._previous_number())
                self.books.voted(self.engine.previous, effect)
            case VotedDown(number):
                log.warning("round %d: the sites voted against the model; the one before it stands", number)
            case OpenRound():
                self._ordered = False
            case CloseRound(number, outcome):
                self.storage.note_traffic(number, *self.traffic.since_last())
                log.info("round %d: %s", number, outcome)
            case Send(message, to) if to is not None:
                self._queue(to, [message], vector=type(message) in BULKY)
            case SendFrames(to):
                self._queue(to, self._frames(effect), vector=True, check=effect.check)
            case Discard(keys):
                for key in keys:
                    self.engine.core.spool.remove(key)
            case Blamed(site, reason):
                if reason == "missing":
                    self.storage.note_missing(site)
                log.warning("site %s: %s", site, reason)
            case PauseRun(reason):
                self.pause.set(reason, now_ms=self.clock.now_ms())
                log.error("paused: %s; `coordinator resume` goes on", reason)
            case Ended(_, reason):
                log.warning("attempt ended: %s", reason)
            case Advanced():
                self.results += 1
                figures = Figures.of(self.engine.core.policy.layout, effect.total)
                if figures is not None:
                    good = effect.verdict == SumVerdict.GOOD
                    self.storage.note_figures(effect.round, figures if good else replace(figures, scores=None))
                    self._compare_rounds()

    def _compare_rounds(self) -> None:
        """Keep the best model by the sites' scores; the manifest says when the run ends for want of a better one."""
        manifest = None if self.in_force is None else self.in_force()
        if manifest is None or manifest.scores is None or (best := self.storage.history.best(manifest)) is None:
            return
        self.storage.note_best(best.round)
        if best.ends(manifest.scores.patience) and self.stop_word.reason(manifest.run) is None:
            reason = f"{best.since} models were no better than that of round {best.round}, by the sites' scores"
            self.stop_word.set(manifest.run, reason)

    def _previous_number(self) -> int:
        return self.engine.previous.start.round if self.engine.previous else 0

    def _queue(self, site: str, messages: Iterable[Wire], *, vector: bool = False, check: bool = False) -> None:
        if site in self.streams:
            self.streams[site].put(messages, vector=vector, check=check)

    def _frames(self, effect: SendFrames) -> Iterator[Wire]:
        """As long as the disk has them: it may take long until a slow site has room for the next one."""
        try:
            yield from effect.frames()
        except (Gone, DataError) as error:
            log.warning("the rest of a vector for site %s cannot be sent: %s", effect.to, error)

    # What goes into the log and to the operator.

    def _report(self, record: Wire) -> None:
        match record:
            case records.UploadCounted(header=header):
                stream = self.streams.get(header.site)
                number = self._round_of(header)
                if stream is not None and number is not None:
                    self.books.upload_complete(header.site, stream.session, header.root, round_number=number)
            case records.SurvivorsShown():
                self.books.survivors(self._current())
            case records.QuorumShown():
                process.release_memory()  # what the uploads needed, before the sum is opened
            case records.ResultShown(result=result):
                self.books.published(self._attempt_of(result.context.ctx()))

    def _round_of(self, message: Wire) -> int | None:
        """The round whose attempt a message of the aggregation names, for the privacy log."""
        for known in (self.engine.round, self.engine.previous):
            if known is not None and known.names(message):
                return known.start.round
        return None

    def _current(self) -> CoordinatorAttempt:
        return self._attempt_of(None)

    def _attempt_of(self, ctx: bytes | None) -> CoordinatorAttempt:
        for known in (self.engine.round, self.engine.previous):
            for attempt in reversed(known.attempts if known else []):
                if ctx is None or attempt.ctx == ctx:
                    return attempt
        raise ToolkitError("no attempt is open", where="coordinator")


def hindrance(engine: RoundEngine) -> str | None:
    """What keeps the run from going on, in words for the operator; None if nothing does."""
    if engine.phase in (RunPhase.DONE, RunPhase.AGGREGATION) or engine.round is None:
        return None
    if engine.paused is not None:
        return f"paused: {engine.paused}"
    number, sites = engine.round.start.round, engine.sites
    able = engine.candidates.able_until(engine.plan.train_ms)
    then = engine.core.clock.now_ms() + engine.plan.train_ms
    if engine.phase is RunPhase.WAITING and (ends := engine.candidates.policy_at(then).ended(then)) is not None:
        return f"round {number} waits: {ends} is not valid until the deadline; the consortium renews it, and publishes"
    if engine.phase is RunPhase.WAITING:
        if engine.core.policy.strict and engine.chain.unchecked:
            due = "voted on" if engine.core.policy.vote else "checked"
            return f"round {number} waits: the sum before it is not {due} yet"
        there = len(able & sites.willing)
        split = engine.core.policy.groups
        beside = f", {split.least} of every group" if split is not None else ""
        sentence = f"round {number} waits: {there} sites can take part, {engine.candidates.least} are needed{beside}"
        return "; ".join((sentence, *_left_out(engine, able)))
    if engine.core.clock.mono_ms() < engine.deadline or engine.phase is not RunPhase.TRAINING:
        return None
    if engine.chain.unchecked:
        return f"round {number} waits: the sum before it is not checked yet"
    slow = ", ".join(sorted(able & sites.silent)) or "nobody"
    return f"round {number} is past its deadline with {len(sites.ready)} sites ready; still training: {slow}"


def _left_out(engine: RoundEngine, able: set[str]) -> Iterator[str]:
    """Who cannot take part now, by reason."""
    sites, roster = engine.sites, {entry.site for entry in engine.core.policy.roster}
    excluded = roster & set(engine.book.excluded)
    reasons = {
        "not connected": able - sites.online,
        "declined": able & sites.online & sites.declined.keys(),
        "certificate not valid until the deadline": roster - able - excluded,
        "excluded": excluded,
    }
    for reason, names in reasons.items():
        if names:
            yield f"{reason}: {', '.join(sorted(names))}"
