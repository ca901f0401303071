"""A site's conversation with the coordinator, without sockets, files or torch: message in, effects out.

It owns the aggregation machine and asks the hospital's policy before it trains or joins. What a message makes the site
say, log and do comes back as effects, in the order in which the shell must carry them out.

Who emits what:

- The machine (`security.secagg.site`) emits what an aggregation needs: `Persist` and `Compact` for its journal; `Log`,
  `Send` and `SendUpload` for what it says; `DraftState`, `SaveState` and `Advanced` for a new model, `AskVote` for
  this site's opinion of it; `KeepEvidence`; and for the operator `Ended`, `Certified`, `VotedDown` and `Isolated`. When
  it must stop it emits `Leave`.
- The session emits what is around it: `Send` for the greeting and for answers to orders; `Log` for the model it was
  given, for training and for refusals by the hospital's rules; `Train`, `KeepUpdate`, `Adopt` and `KeepPiece`;
  `Complain` for the operator; `Leave` when the stream is to end.

The session puts its own effects before or behind those of the machine and changes none. In what is said the order is
always the same: the record first, then the entry of the privacy log, then the message
(`security.secagg.effects.in_order`). `KeepUpdate` comes before the record that binds the site to the update, so that a
restarted site which is bound has it. `SaveState` comes before the record that names the state, for the same reason.
`site_agent.run` tells what carrying out each effect means. Messages between witnesses do not come here: the shell hands
them to `site_agent.witness`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from lazaret.errors import (
    KeyUnavailable,
    LocalProtocolError,
    NotNow,
    PolicyViolation,
    RemoteProtocolError,
    ToolkitError,
    VerificationFailed,
)
from security.clock import Clock
from security.identity.acceptance import unseal
from security.identity.manifest import Manifest
from security.identity.membership import Membership, Seat
from security.secagg import messages, relay
from security.secagg.context import PROTOCOL_VERSION
from security.secagg.effects import Leave, Log, in_order
from security.secagg.fields import Wire
from security.secagg.relay import MAX_DECLINE, ManifestParts, SignedHead
from security.secagg.site import entries
from security.secagg.site.attempt import PendingUpdate
from security.secagg.site.journal import score_due
from security.secagg.site.machine import SiteMachine
from security.secagg.statements import run_stop, verify
from security.secagg.transitions import SITE, SiteEvent, SiteState
from site_agent import log_events
from site_agent.contribution import LocalResult
from site_agent.effects import (
    Adopt,
    Complain,
    Effect,
    Effects,
    KeepPiece,
    KeepStop,
    KeepUpdate,
    LogCommits,
    Train,
    parting,
)
from site_agent.policy import SitePolicy, attempt_bytes, check_standing
from site_agent.ready_slots import OrderAnswers, ReadySlots

FAILED_SECONDS: Final = 600  # until training is tried again after it has failed; doubled each time


class SessionPhase(StrEnum):
    CLOSED = "closed"
    OPENING = "opening"
    AWAITING_MANIFEST = "awaiting-manifest"
    AWAITING_RUN = "awaiting-run"  # the coordinator is at another run; this site has not begun it
    LIVE = "live"


_GREETED: Final = (SessionPhase.LIVE, SessionPhase.AWAITING_RUN)


class Session:
    """One site over all its connections. `spent` tells how many bytes a round has cost so far.

    :param seat: this site's membership in force. The machine has it as its mandate; a newer one is taken here alone.
    :param pending: the sealed update found at start, if its round may still be open.
    :param config_hash: of the training settings this site started with; the one configuration it trains under.
    :param rounds_done: how many rounds this site has trained before this start.
    :param slots: the public times at which an order is answered, so that the time does not tell the data's size.
    """

    def __init__(
        self,
        machine: SiteMachine,
        seat: Seat,
        policy: SitePolicy,
        clock: Clock,
        *,
        config_hash: bytes,
        slots: ReadySlots,
        pending: PendingUpdate | None = None,
        rounds_done: int = 0,
    ) -> None:
        self.machine = machine
        self.seat = seat
        self.policy = policy
        self.clock = clock
        self.config_hash = config_hash
        self.answers = OrderAnswers(slots, clock)
        self.phase = SessionPhase.CLOSED
        self.training: int | None = None
        self.connection = 0
        self.rounds_done = rounds_done
        self.spent: Callable[[int], int] = lambda _: 0
        self.paused: Callable[[], str | None] = lambda: None
        self.declined: tuple[int, str, int | None] | None = None  # round, why, until when (wall clock)
        self.stopped = False  # the operator has ended this run before its last round
        self._paused = False  # an order was declined because of a pause
        self._failures = 0
        self._pending = pending
        self._started = False
        self._parts = ManifestParts()
        self._offered: bytes | None = None
        self._asks_again = False  # an order came before the manifest it was given under was in force here

    @property
    def site(self) -> str:
        return self.seat.signer.site

    @property
    def manifest(self) -> Manifest:
        return self.seat.manifest

    # The life of a connection.

    def opened(self, connection: int) -> Effects:
        """The stream stands; say who speaks."""
        self.phase, self.connection = SessionPhase.OPENING, connection
        self._parts.clear()
        return in_order(
            relay.Open(
                protocol=PROTOCOL_VERSION,
                federation=self.manifest.federation,
                site=self.site,
                session=connection,
                manifest_version=self.manifest.version,
                manifest_hash=self.manifest.digest,
            )
        )

    def closed(self) -> None:
        """The stream is gone. What was under way is asked for again on the next one."""
        self.phase, self._asks_again = SessionPhase.CLOSED, False

    def receive(self, message: Wire, head: SignedHead | None = None) -> Effects:
        """Take one message. A refusal of the message itself is an effect, never an exception."""
        try:
            return self._route(message, head)
        except (LocalProtocolError, KeyUnavailable):
            raise
        except ToolkitError as error:
            return (*self._halted(), *self._refused(message, error))

    def _refused(self, message: Wire, error: ToolkitError) -> Effects:
        """A sum or state that is not what was announced leaves this site behind the others. On a new stream it is sent
        again: from an honest coordinator rightly, from a lying one as often as this site is patient.
        """
        broken = isinstance(message, messages.SumFrame | messages.StateFrame) and isinstance(error, VerificationFailed)
        return (Leave(error, retry=True),) if broken else (Complain(error),)

    def rejected(self, error: ToolkitError) -> Effects:
        """Something came that is no message: an open attempt ends if it still can, and the stream is begun anew."""
        return *self.machine.reject(error), Leave(error, retry=True)

    def _route(self, message: Wire, head: SignedHead | None) -> Effects:
        if isinstance(message, relay.Goodbye):
            return (parting(message),)
        if isinstance(message, relay.Welcome):
            return self._welcome(message)
        if isinstance(message, relay.ManifestFrame):
            return self._manifest_frame(message)
        if isinstance(message, relay.Receipt) and self.phase in _GREETED:
            return (log_events.receipt(message, head, self.site, self.connection),)
        if isinstance(message, relay.ModelFrame) and self.phase is SessionPhase.AWAITING_RUN:
            return (KeepPiece(message),)
        if self.phase is not SessionPhase.LIVE:
            raise RemoteProtocolError(f"{type(message).__name__} before the greeting", where="stream")
        if isinstance(message, relay.Ping):
            return in_order(relay.Pong(number=message.number))
        if isinstance(message, relay.RunStop):
            return self._run_stop(message)
        if isinstance(message, messages.TrainOrder):
            return self._order(message)
        if isinstance(message, messages.Plan):
            return self._plan(message)
        return self.machine.receive(message)

    def _welcome(self, message: relay.Welcome) -> Effects:
        if self.phase is not SessionPhase.OPENING or message.protocol != PROTOCOL_VERSION:
            raise RemoteProtocolError("an unexpected Welcome", where="stream")
        mine = self.manifest
        if message.manifest_version > mine.version:
            self.phase = SessionPhase.AWAITING_MANIFEST
            return ()
        effects = self._go_live()
        if message.manifest_version < mine.version:
            error = PolicyViolation(
                f"the coordinator is at manifest version {message.manifest_version}, this site at {mine.version}",
                where="manifest",
                hint="the operator must install the newer manifest; until then this site joins no round",
            )
            return (*effects, Complain(error))
        return effects

    def _go_live(self) -> Effects:
        self.phase = SessionPhase.LIVE
        if self._started:
            return in_order(self.machine.hello())
        self._started = True
        return *self.machine.start(), *self._reload()

    def _reload(self) -> Effects:
        """Hand the machine the sealed update again, if its round is still open."""
        pending, core = self._pending, self.machine.core
        bound = core.journal.update
        if pending is None or bound is None or self.machine.aggregation.update is not None:
            return ()
        fits = (pending.round, pending.state_hash) == (bound.round, core.head.state_hash)
        return self.machine.load_update(pending) if fits else ()

    # A newer manifest.

    def _manifest_frame(self, frame: relay.ManifestFrame) -> Effects:
        expected = self.phase in (SessionPhase.AWAITING_MANIFEST, *_GREETED)
        if not expected or frame.version <= self.manifest.version:
            raise RemoteProtocolError("a manifest that was not announced", where="manifest")
        whole = self._parts.take(frame)
        if whole is None:
            return ()
        if self._begins_a_run(whole):
            # The coordinator begins no attempt of this run any more and ends none: there is nothing to wait for.
            self.phase = SessionPhase.AWAITING_RUN
            return (Adopt(whole),)
        self._offered = whole
        adopting = self._adopt_when_idle()
        if adopting or self.phase is not SessionPhase.AWAITING_MANIFEST:
            return adopting
        return self._go_live()  # an attempt is open, and only a site that has said Hello can end it

    def _begins_a_run(self, data: bytes) -> bool:
        """Whether a manifest, whoever signed it, names another run. What cannot be read is for the shell to refuse."""
        try:
            return unseal(data)[0].run != self.manifest.run
        except ToolkitError:
            return False

    def _adopt_when_idle(self) -> Effects:
        """One version holds for a whole attempt; a newer one takes effect between two, or when this site has agreed in
        the open one and only waits for its end.
        """
        waits = SiteEvent.MANIFEST in SITE[self.machine.state]
        if self._offered is None or (not waits and self._started):
            return ()
        data, self._offered = self._offered, None
        return (Adopt(data),)

    def _run_stop(self, word: relay.RunStop) -> Effects:
        """The operator's signed word. All that follows from it is that this site trains no more in this run."""
        policy = self.seat.policy
        verify(policy.coordinator_entry(), run_stop(word.run, word.manifest_hash), word.signature)
        if (word.run, word.manifest_hash) != (policy.run, policy.manifest_hash):
            raise RemoteProtocolError("ends another run than the one in force", where="coordinator")
        if self.stopped:
            return ()
        self.stopped = True
        return KeepStop(word), log_events.run_stopped(word)

    def run_over(self, run: str) -> Effects:
        """Another run begins: an attempt that is still open here ends, if it can."""
        return self.machine.reject(RemoteProtocolError(f"run {run} begins", where="manifest"))

    def adopted(self, newer: Membership) -> Effects:
        """The shell has checked and installed a newer manifest."""
        taken = self._take(newer)
        if self.phase is SessionPhase.AWAITING_MANIFEST:
            return *taken, *self._go_live()
        asks, self._asks_again = self._asks_again, False
        return (*taken, *in_order(self.machine.hello())) if asks else taken

    def _take(self, newer: Membership) -> Effects:
        """Go on under another membership. Everything here, in the machine, the outbox and the shell reads it from the
        seat, so that nothing but the seat changes.
        """
        if newer.layout.layout_hash != self.seat.layout.layout_hash:
            self._pending = None
            self.answers.drop()
        self.machine.admit(newer.policy)
        self.seat.take(newer)
        return self.machine.renewed()

    # Training.

    def _order(self, order: messages.TrainOrder) -> Effects:
        if order.round != entries.loggable(order.round):
            raise RemoteProtocolError("round number is too far ahead", where="order")
        ended = self._end_open_attempt()
        if adopting := self._adopt_when_idle():
            # The order is under the newer manifest; an update for this one would be of no use.
            self._asks_again = True
            return *ended, *adopting
        effects = [*ended, *self.machine.receive(order), *self._reload()]
        if order.round == self.training:
            return tuple(effects)
        self.answers.ordered(order.round)
        held = self.machine.aggregation.update
        if held is not None and held.round == order.round:
            if not self.answers.waiting:
                effects.append(self.answers.say(messages.Ready(site=self.site, round=order.round)))
            return tuple(effects)
        try:
            self._check_order(order)
        except PolicyViolation as refusal:
            return (*effects, *self._decline(order.round, refusal))
        self.answers.drop()
        self.training, self.declined, self._paused = order.round, None, False
        head = self.machine.core.head
        effects.append(log_events.model_received(self.manifest, order.round, head.state_hash, self.seat.destination))
        state = self.machine.intake.model
        job = Train(
            round=order.round,
            state=state,
            state_hash=head.state_hash,
            config_hash=order.config_hash,
            scores=score_due(head, order.round),
        )
        return (*effects, job)

    def _end_open_attempt(self) -> Effects:
        """Who orders training has no attempt open: one that a restarted coordinator has given up ends here too."""
        over = RemoteProtocolError("training was ordered while an attempt was open", where="order")
        return self.machine.reject(over)

    def _check_order(self, order: messages.TrainOrder) -> None:
        head = self.machine.core.head
        if (order.state_hash, order.prev_result) != (head.state_hash, head.link) or order.round <= head.round:
            raise PolicyViolation("it begins from another model than the newest accepted here", where="order")
        if order.config_hash != self.config_hash:
            raise PolicyViolation("order names another training configuration than the manifest's", where="order")
        if self.machine.core.policy.strict and not head.certified:
            raise PolicyViolation("the newest model has no check certificate yet", where="order")
        if self.stopped:
            raise PolicyViolation("the operator has ended this run", where="order")
        if (reason := self.paused()) is not None:
            raise NotNow(f"paused: {reason}", seconds=MAX_DECLINE, where="site-agent pause")
        now = dt.datetime.fromtimestamp(self.clock.now_ms() / 1000).astimezone()
        self.policy.check_order(self.manifest, order.round, done=self.rounds_done, now=now)
        check_standing(self.seat.membership, now_ms=self.clock.now_ms())

    def _decline(self, number: int, refusal: PolicyViolation) -> Effects:
        """A refusal that ends by itself says when to ask again; a pause is ended from here (`tick`)."""
        seconds = refusal.seconds if isinstance(refusal, NotNow) else 0
        self._paused = self.paused() is not None
        self.declined = (number, str(refusal), self.clock.now_ms() + 1000 * seconds if seconds else None)
        entry = entries.declined(self.seat.policy.method, str(refusal), number)
        return entry, Complain(refusal), self.answers.say(relay.Decline(site=self.site, round=number, seconds=seconds))

    def trained(self, update: PendingUpdate, result: LocalResult) -> Effects:
        """The local work of a round is done and encoded."""
        self._rest(update.round)
        self.rounds_done += 1
        self._failures = 0
        due = self.answers.next_slot(update.round)
        slot_ms = due - self.answers.order_time(update.round)
        done = self._at_slot(log_events.train_done(self.manifest, update.round, result, slot_ms=slot_ms), due)
        try:
            bound = self.machine.load_update(update)
        except ToolkitError as error:
            # The chain has moved on meanwhile; what was learnt stays in the memory, the update is of no use.
            return KeepUpdate(round=update.round), *done, Complain(error)
        self._pending = update
        self.answers.give(messages.Ready(site=self.site, round=update.round), due)
        return KeepUpdate(round=update.round, update=update), *done, *bound

    def _at_slot(self, entry: Log, due: int) -> Effects:
        """What the log says of a training that has ended: at once, or under differential privacy when READY is due,
        since the time of an entry tells of the data as much as a duration in it.
        """
        if self.manifest.privacy is None:
            return (entry,)
        self.answers.hold((LogCommits(), entry), due)
        return ()

    def failed(self, round_number: int, error: ToolkitError) -> Effects:
        """The local work of a round came to nothing. The reason stays here, and when it was known too."""
        self._rest(round_number)
        self._failures += 1
        wait = min(FAILED_SECONDS * 2 ** (self._failures - 1), MAX_DECLINE)
        decline = relay.Decline(site=self.site, round=round_number, seconds=wait)
        due = self.answers.next_slot(round_number)
        self.answers.give(decline, due)
        self.declined = (round_number, str(error), self.clock.now_ms() + 1000 * wait)
        reason = f"{error.code}: no update for this round"
        return *self._at_slot(entries.declined(self.seat.policy.method, reason, round_number), due), Complain(error)

    def _rest(self, number: int) -> None:
        """A round that was given up may end its training when the next one is already ordered."""
        if self.training == number:
            self.training = None

    def tick(self) -> Effects:
        """Look at the clock: patience of the machine, the answer to an order at its slot, a manifest that waits."""
        effects: list[Effect] = [*self.machine.tick(), *self._adopt_when_idle()]
        newest = self.seat.membership.at(self.clock.now_ms())
        if newest is not self.seat.membership and self.machine.state is SiteState.IDLE:
            effects += self._take(newest)
        effects += self.answers.due(live=self.phase is SessionPhase.LIVE)
        if self._paused and self.phase is SessionPhase.LIVE and self.paused() is None:
            self._paused = False
            effects += in_order(self.machine.hello())  # asks for the order that was declined
        return tuple(effects)

    # The aggregation.

    def _plan(self, plan: messages.Plan) -> Effects:
        context = plan.context
        reloaded = self._reload()
        try:
            self.policy.check_cohort(context.n)
            self.policy.check_bytes(self.spent(context.round) + attempt_bytes(self.manifest, context.n))
        except PolicyViolation as refusal:
            entry = entries.declined(self.seat.policy.method, str(refusal), context.round, context)
            return *reloaded, *in_order(messages.Refusal(site=self.site, ctx=context.ctx()), entry=entry)
        return *reloaded, *self._before_slot(plan)

    def _before_slot(self, plan: messages.Plan) -> Effects:
        """Until READY is due, a plan is answered as if training had not ended: else its answer would tell the time."""
        return self.machine.receive_untrained(plan) if self.answers.waiting else self.machine.receive(plan)

    def _halted(self) -> Effects:
        if self.machine.state is not SiteState.HALTED:
            return ()
        reason = self.machine.core.journal.stopped or "halted"
        return (Leave(PolicyViolation(f"this site has stopped: {reason}", where="state"), retry=False),)
