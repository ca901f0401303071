"""The site's shell: feeds the conversation, carries out its effects in order, keeps log and state directory.

Decisions of the protocol are made in the session; here only whether a newer manifest is accepted (`_adopt`). `execute`
is the one place where an effect becomes an action. The effects come from the session and from the machine in it
(`site_agent.session` says which comes from whom), and each is carried out as it is:

- `Persist` and `Compact` write the write-ahead log, and wait until it is on disk.
- `Log` appends to the privacy log, and waits too. `LogCommits` does so with what the privacy ledger has committed.
- `Send` and `SendUpload` go through the outbox, which checks and logs the message, and come out as bytes. A caller
  that has the bytes in hand has everything before them on disk.
- `DraftState`, `SaveState`, `KeepUpdate` and `KeepEvidence` write files of the state directory.
- `Advanced` means that a new model is in force: sealed updates up to its round are erased, the privacy log is signed,
  and the training thread looks at the model.
- `Train` hands work (`local_work`) to the training thread; what it returns comes back here as effects. So does
  `AskVote`.
- `Adopt` installs a newer manifest, or hands one that begins another run to `next_run`; `KeepPiece` keeps a piece of
  that run's model. `Leave` ends the stream. `Complain`, `Ended`, `Certified`, `VotedDown` and `Isolated` are for the
  operator's eyes only.

Effects are carried out one after the other, in the order in which they were given. So the order "write down, log, send"
that `security.secagg.effects.in_order` makes is the order in which things happen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lazaret import process
from lazaret.errors import AuditLogError, CodecError, LocalProtocolError, PolicyViolation, ToolkitError
from protos.parse import FROM_COORDINATOR
from security.clock import Clock
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.membership import Membership, Seat
from security.log.writer import AuditLog
from security.secagg.effects import (
    REFUSED,
    Advanced,
    AskVote,
    Certified,
    Compact,
    DraftState,
    Ended,
    Isolated,
    KeepEvidence,
    Leave,
    Log,
    Persist,
    SaveState,
    Send,
    SendUpload,
    VotedDown,
)
from security.secagg.messages import Jump, Result
from security.secagg.published import result_digests
from security.secagg.relay import ModelFrame, ModelRequest
from security.secagg.statements import Signer
from site_agent.budget import Budget
from site_agent.effects import Adopt, Complain, Effect, Effects, KeepPiece, KeepStop, KeepUpdate, LogCommits, Train
from site_agent.local_work import Finish, Job, Learner, LocalWork
from site_agent.next_run import NextRun, Offer
from site_agent.outbox import Outbox
from site_agent.policy import SitePolicy
from site_agent.session import Session, SessionPhase
from site_agent.state_dir import StateDir
from site_agent.state_writer import WriteAheadLog
from site_agent.witness import Witnessing, WitnessMessage

log = logging.getLogger("site-agent")


class Left(Exception):
    """The stream is to be closed; `retry` says whether to come back."""

    def __init__(self, error: ToolkitError, *, retry: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry = retry


class RunEnds(Left):
    """The next run is accepted, with its manifest installed and its model here: everything is opened anew for it."""


@dataclass(kw_only=True)
class Agent:
    """Everything of a running site but the network.

    :ivar budget: the privacy ledger, where the federation trains under differential privacy.
    :ivar submit: takes work for the training thread; what the work returns is called here when it is done.
    """

    identity: Identity
    seat: Seat
    policy: SitePolicy
    session: Session
    outbox: Outbox
    state_dir: StateDir
    wal: WriteAheadLog
    log: AuditLog
    witnessing: Witnessing
    work: LocalWork
    next_run: NextRun
    clock: Clock
    budget: Budget | None = None
    submit: Callable[[Job], None] = lambda _: None
    expected: int = 1
    newest: int = 0
    _shown: Result | None = None  # the newest result and jump that came, until they are covered or in force
    _landing: Jump | None = None

    @property
    def manifest(self) -> Manifest:
        return self.seat.manifest

    @property
    def learner(self) -> Learner:
        return self.work.learner

    # Events.

    def opened(self) -> Iterator[bytes]:
        """A stream stands: what to send first."""
        connection = self.state_dir.next_connection()
        self.outbox.opened(connection)
        self.expected = 1
        yield from self.run(self.session.opened(connection))

    def closed(self) -> None:
        self.outbox.closed()
        self.session.closed()
        self.next_run.closed()

    def received(self, data: bytes) -> Iterator[bytes]:
        """Bytes of the coordinator."""
        try:
            parcel = FROM_COORDINATOR.decode(data)
            if parcel.sequence != self.expected:
                raise CodecError("messages are out of order", where="stream")
        except CodecError as error:
            yield from self.run(self.session.rejected(error))
            return
        self.expected += 1
        if isinstance(parcel.message, Result):
            self._shown = parcel.message
        elif isinstance(parcel.message, Jump):
            self._landing = parcel.message
        if parcel.log_head is not None:
            self.witnessing.saw(parcel.log_head)
        if isinstance(parcel.message, WitnessMessage):
            yield from self._attend(parcel.message)
        else:
            yield from self.run(self.session.receive(parcel.message, parcel.log_head))
        if self.outbox.refused is not None:
            raise Left(self.outbox.refused, retry=True)

    def ticked(self) -> Iterator[bytes]:
        """To be called several times a second."""
        yield from self.run(self.session.tick())
        if self.session.phase is SessionPhase.AWAITING_RUN:
            yield from self._pursue_run()

    def heartbeat(self) -> None:
        """To be called every minute or so."""
        self.log.tick()

    def run(self, effects: Effects) -> Iterator[bytes]:
        """Carry effects out one by one. To be drained even if the stream breaks: later effects may be promises."""
        for effect in effects:
            yield from self.execute(effect)

    # Actions.

    def execute(self, effect: Effect) -> Iterator[bytes]:
        """Do one thing; whatever it sends comes out as bytes."""
        match effect:
            case Send():
                yield from self.outbox.post(effect)
            case SendUpload():
                yield from self.outbox.vector(effect)
            case Adopt():
                yield from self._adopt(effect.data)
            case KeepPiece():
                yield from self._keep_piece(effect.frame)
            case Leave():
                raise Left(effect.error, retry=effect.retry)
            case Complain():
                log.warning("%s", effect.error)
            case Train():
                log.info("round %d: training", effect.round)
                self.submit(lambda: self.work.train(effect))
            case Advanced():
                self._advance(effect)
            case AskVote():
                self.submit(lambda: self.work.vote(effect))
            case _:
                self._keep(effect)

    def _keep(self, effect: Effect) -> None:
        """Effects that end on disk or before the operator's eyes."""
        match effect:
            case Persist():
                self.wal.append(effect.record)
            case Compact():
                self.wal.compact(effect.records)
            case KeepEvidence():
                log.error("the published sum is wrong; the evidence is in %s", self.state_dir.keep_evidence(effect))
            case DraftState():
                self.state_dir.draft_state(self.seat.layout, effect.start, effect.values)
            case SaveState():
                if effect.drafted:
                    self.state_dir.keep_draft(effect.state_hash)
                else:
                    self.state_dir.keep_state(self.seat.layout, effect.state_hash, effect.state)
            case Log():
                self.log.append(effect.event, run=self.seat.manifest.run, round=effect.round)
            case KeepStop():
                self.state_dir.keep_stop(effect.word)
                log.warning("the operator has ended run %s before its last round", effect.word.run)
            case LogCommits():
                if self.budget is not None:
                    self.budget.log_commits()
            case KeepUpdate():
                self.state_dir.count_round()
                if effect.update is not None:
                    self.state_dir.seal(self.seat.layout, effect.update)
                else:
                    self.state_dir.forget(effect.round)
            case Ended():
                reason = effect.error if effect.reason == REFUSED else effect.reason
                log.info("attempt %s: %s", effect.ctx.hex()[:8], reason)
            case VotedDown():
                log.warning("round %d: the sites voted against the model; the one before it stands", effect.round)
            case Isolated():
                log.warning(
                    "round %d: together the sums so far show this site's %s (leverage %.2f): docs/threat-model.md",
                    effect.round,
                    effect.what,
                    effect.leverage,
                )
            case Certified():
                log.info("result %s is verified", effect.result.hex()[:8])
                process.release_memory()  # what masks, sum and check needed; not while others wait for an answer
                if self._shown is not None and result_digests(self._shown)[2] == effect.result:
                    self.state_dir.keep_covered(Jump(result=self._shown, check=effect.check))
            case _:
                raise LocalProtocolError(f"{type(effect).__name__} cannot be carried out")

    def _advance(self, effect: Advanced) -> None:
        """A new model is in force: nothing of its round is sent again, so its update can go."""
        log.info("round %d: sum of %d sites accepted", effect.round, len(effect.survivors))
        self.state_dir.forget(effect.round)
        if self._landing is not None and result_digests(self._landing.result)[2] == effect.result:
            self.state_dir.keep_covered(self._landing)  # a state that came whole is covered already
        self.log.checkpoint()
        self.newest = effect.round
        self.submit(lambda: self._look_at(effect))

    def _look_at(self, effect: Advanced) -> Finish:
        """In the training thread: a site that catches up looks at the newest model only."""
        return self.work.evaluate(effect.round, effect.state) if effect.round >= self.newest else lambda: ()

    def _attend(self, message: WitnessMessage) -> Iterator[bytes]:
        try:
            for reply in self.witnessing.attend(message):
                yield from self.outbox.post(Send(reply))
        except AuditLogError:
            raise
        except ToolkitError as error:
            log.warning("%s", error)

    def last_head(self) -> Iterator[bytes]:
        """Before the stream is closed: have what was logged so far witnessed."""
        try:
            for head in self.witnessing.last_head():
                yield from self.outbox.post(Send(head))
        except PolicyViolation as error:
            log.warning("%s", error)

    # A newer manifest.

    def _adopt(self, data: bytes) -> Iterator[bytes]:
        now = self.clock.now_ms()
        try:
            offered = self.identity.check_manifest(data, now_ms=now)
            if offered.run != self.manifest.run:
                offered.site(self.session.site)
                self.next_run.offered(data, offered, self.manifest)
                return
            manifest = self.identity.install_manifest(data, now_ms=now)
            self.identity.settle_tls(now_ms=now, known_there=True)
            manifest.site(self.session.site)
            self.policy.check_federation(manifest)
            self.policy.check_consent(manifest, self.session.site)
        except ToolkitError as error:
            raise Left(error, retry=False) from error
        newer = site_membership(self.identity, manifest, self.session.site, now_ms=now)
        self.log.adopt_manifest(data, manifest.version, newer.roster)
        log.info("manifest version %d is in force", manifest.version)
        self.learner.adopted(manifest)
        yield from self.run(self.session.adopted(newer))

    # The next run (`site_agent.next_run`).

    def _pursue_run(self) -> Iterator[bytes]:
        """Ask for the model of a run that is accepted, or begin it."""
        match self.next_run.step():
            case ModelRequest() as request:
                yield from self.outbox.post(Send(request))
            case Offer(manifest=manifest, data=data):
                yield from self.run(self.session.run_over(manifest.run))
                self.identity.install_manifest(data, now_ms=self.clock.now_ms())
                ended = PolicyViolation(f"run {self.manifest.run} is over, run {manifest.run} begins", where="manifest")
                raise RunEnds(ended, retry=False)

    def _keep_piece(self, frame: ModelFrame) -> Iterator[bytes]:
        try:
            whole = self.next_run.piece(frame)
        except ToolkitError as error:
            raise Left(error, retry=True) from error
        if whole:
            yield from self._pursue_run()


def site_membership(identity: Identity, manifest: Manifest, site: str, *, now_ms: int) -> Membership:
    """What this site is under a manifest. A federation that trains under differential privacy has a ledger here."""
    signer = Signer(site, identity.signing_key(manifest.site(site).certificate))
    return Membership.of(manifest, signer, now_ms=now_ms, dp_active=manifest.privacy is not None)
