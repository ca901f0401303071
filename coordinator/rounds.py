"""The run, round after round, as a machine without sockets, files or clock: event in, effects out.

A round is ordered, trained, planned and summed; while the next one is being trained, the sites check the sum of this
one, and no burst begins before its certificate is there. Everything that a restart must know is in the effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

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
    of_round,
)
from coordinator.phases import Phase, Turn, follow
from coordinator.results import QUESTIONS, Chain, Link, Standings, SumCheck, publication_of
from lazaret.errors import PolicyViolation, RemoteProtocolError
from security.secagg import messages, records
from security.secagg.certificates import Ack
from security.secagg.context import Verdict
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.recovery import resume
from security.secagg.coordinator.rounds import BlameBook, CoordinatorRound, RoundStart
from security.secagg.coordinator.uploads import CoordinatorCore
from security.secagg.effects import Discard, Send, Vector
from security.secagg.fields import Wire
from security.secagg.relay import Decline, Ping, Pong
from security.secagg.transitions import CoordinatorState

_S = CoordinatorState
_OVER = (_S.DEAD, _S.LOST)
_DONE = (_S.PUBLISHED, _S.CERTIFIED)
_ENDING = (*_OVER, *_DONE, _S.UNMASKING, _S.ABORTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the manifest and the operator decide about a run. Milliseconds.

    :param least: the smallest cohort the operator wants; never below the manifest's.
    :param grace_ms: how long sites that are not connected are waited for when all others are ready.
    :param audit_ms: how long a check may stand still before the chunks of absent sites are handed on.
    """

    rounds: int
    config_hash: bytes
    train_ms: int
    least: int
    grace_ms: int = 60_000
    ping_ms: int = 3_000
    audit_ms: int = 15_000


class RoundEngine:
    """One run of one federation.

    :param renew: brings the core's mandate up to an instant: certificates begin and end in mid-run.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        book: BlameBook,
        plan: RunPlan,
        chain: Chain,
        model: Vector,
        *,
        completed: int = 0,
        renew: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.core = core
        self.book = book
        self.plan = plan
        self.chain = chain
        self.model = model
        self.completed = completed
        self.phase = Phase.TRAINING
        self.online: set[str] = set()
        self.ready: set[str] = set()
        self.declined: set[str] = set()
        self.answered: set[str] = set()
        self.round: CoordinatorRound | None = None
        self.check = SumCheck(core, plan.audit_ms)
        self.standings = Standings(chain)
        self.deadline = 0
        self._all_ready_since: int | None = None
        self._ping = 0
        self._pinged: set[str] = set()
        self._stopping = False
        self._renew = renew
        self._strikes = _strikes(book)

    @property
    def previous(self) -> CoordinatorRound | None:
        """The round whose sum is, or was last, under check."""
        return self.check.round

    @property
    def auditing(self) -> bool:
        return self.check.open

    # Starting, fresh or after a crash.

    def start(self, last_round: int, rebuilt: CoordinatorRound | None = None) -> Effects:
        """Open the first round, or the one after `last_round`; the sum of `rebuilt` may still be under check."""
        return *self._watch_if_uncovered(rebuilt), *self._open_round(last_round + 1)

    def _watch_if_uncovered(self, rebuilt: CoordinatorRound | None) -> Effects:
        """Go on with the check of the newest sum; whatever else the last process left in the spool is removed."""
        current = rebuilt.current if rebuilt is not None else None
        if current is None or current.publication is None or self.chain.head_check() is not None:
            return self._tidy()
        self.check.watch(rebuilt)
        # The last acknowledgement may be on disk without the certificate that it completes.
        return self._tidy(current) if self.check.open else (*self._covered(), *self._tidy())

    def restore(self, start: RoundStart, rebuilt: CoordinatorRound | None) -> Effects:
        """Go on with the round that was open when the last process ended."""
        tidied: Effects = ()
        if rebuilt is not None and rebuilt.start.round == start.round:
            self.round = rebuilt
        else:
            self.round = CoordinatorRound(self.core, self.book, start, self.model)
            tidied = self._watch_if_uncovered(rebuilt)
        self._begin_training()
        if self.round.current is None:
            return tidied
        self.phase = Phase.BURST
        attempt = self.round.current
        return self._settle(resume(attempt)) if attempt.state not in (*_OVER, *_DONE) else self._settle(())

    def restore_done(self, rebuilt: CoordinatorRound | None) -> Effects:
        """All rounds are over; the last sum may still be under check."""
        self.phase = Phase.DONE
        return self._watch_if_uncovered(rebuilt)

    def _open_round(self, number: int) -> Effects:
        head, policy = self.chain.head, self.core.policy
        start = RoundStart(
            round=number,
            state_hash=head.state_hash if head else policy.initial_state_hash,
            config_hash=self.plan.config_hash,
            prev_result=head.result_hash if head else policy.manifest_hash,
        )
        self.book.new_round()
        self.round = CoordinatorRound(self.core, self.book, start, self.model)
        self._begin_training()
        orders = tuple(Send(self._order(), to=site) for site in sorted(self.online))
        return OpenRound(start), *orders

    def _begin_training(self) -> None:
        self.ready, self.declined, self.answered = set(), set(), set()
        self._all_ready_since = None
        self.deadline = self._now() + self.plan.train_ms

    def _order(self) -> messages.TrainOrder:
        start = self._round.start
        return messages.TrainOrder(
            round=start.round,
            state_hash=start.state_hash,
            config_hash=start.config_hash,
            prev_result=start.prev_result,
            check=self.chain.head_check(),
        )

    @property
    def _round(self) -> CoordinatorRound:
        if self.round is None:
            raise RemoteProtocolError("no round is open", where="round engine")
        return self.round

    def _now(self) -> int:
        return self.core.clock.mono_ms()

    # Sites come and go.

    def hello(self, site: str, hello: messages.Hello) -> Effects:
        """A site has connected and says where it stands."""
        if hello.site != site:
            raise RemoteProtocolError("message names another sender", where=f"site {site}")
        self.online.add(site)
        effects: list[Effect] = list(self._close_there(site, hello.open_ctx))
        effects += self.standings.greet(site, hello.round, hello.result)
        attempt = self.round.current if self.round else None
        if self.phase is Phase.BURST and attempt is not None and site in attempt.context.sites:
            effects += self._settle(attempt.receive(site, hello))
        if self.phase in (Phase.TRAINING, Phase.PINGING):
            effects.append(Send(self._order(), to=site))
        return tuple(effects)

    def _close_there(self, site: str, open_ctx: bytes) -> Effects:
        """An attempt that is over here may still be open at a site that was away when it ended."""
        for attempt in self._round.attempts if self.round else ():
            if attempt.ctx == open_ctx and attempt.state in _OVER:
                return (Send(attempt.abort_request(), to=site),)
        return ()

    def gone(self, site: str) -> Effects:
        """A stream has ended. What the site said in this round it will say again when it is back."""
        self.online.discard(site)
        self.ready.discard(site)
        self.answered.discard(site)
        return self._look()

    # Messages.

    def receive(self, site: str, message: Wire) -> Effects:
        """Take a message of a connected site."""
        if isinstance(message, messages.Hello):
            return self.hello(site, message)
        if getattr(message, "site", site) != site:
            raise RemoteProtocolError("message names another sender", where=f"site {site}")
        if isinstance(message, messages.Ready | Decline):
            return self._answer(site, message)
        if isinstance(message, Pong):
            return self._pong(site, message)
        if isinstance(message, QUESTIONS):
            return self._about_sum(site, message)
        if self.previous is not None and self._names(self.previous, message):
            # An answer that came when enough others had answered.
            return tuple(of_round(self.previous.start.round, self.previous.receive(site, message)))
        return self._settle(self._round.attempt_of(message).receive(site, message))

    def round_of(self, message: Wire) -> int | None:
        """The round whose attempt a message of the burst names, for the privacy log."""
        for known in (self.round, self.previous):
            if known is not None and self._names(known, message):
                return known.start.round
        return None

    @staticmethod
    def _names(known: CoordinatorRound, message: Wire) -> bool:
        ctx, kx = getattr(message, "ctx", b""), getattr(message, "kx", b"")
        return any(attempt.ctx == ctx or (kx and attempt.dealing.kx == kx) for attempt in known.attempts)

    def _answer(self, site: str, message: messages.Ready | Decline) -> Effects:
        if self.round is None or message.round != self.round.start.round or self.phase is Phase.DONE:
            return ()  # of a round that is over
        if isinstance(message, messages.Ready):
            self.ready.add(site)
            self.standings.accepted_head(site)
            return self._look()
        self.declined.add(site)
        return *self._fetch(site), *self._look()

    def _pong(self, site: str, pong: Pong) -> Effects:
        if pong.number == self._ping and self.phase is Phase.PINGING:
            self.answered.add(site)
        return self._look()

    def _about_sum(self, site: str, message: Wire) -> Effects:
        """Requests and acknowledgements of the sum that is under check, which is of the round before."""
        effects = self.check.receive(site, message)
        if effects and isinstance(message, Ack) and self.previous is not None:
            self.standings.accepted(site, self.previous.start.round, message.result)
        return effects if self.check.open or not effects else (*effects, *self._covered())

    def _covered(self) -> Effects:
        found = self.check.certificate()
        if found is None:
            return ()
        result, check = found
        self.chain.cover(result, check)
        vouched = messages.Vouched(result=result, check=check)
        told = tuple(Send(vouched, to=site) for site in self.online)
        behind = (effect for site in sorted(self.online & self.declined) for effect in self._fetch(site))
        return KeepCertificate(result, check), *told, *behind

    def _fetch(self, site: str) -> Effects:
        """Bring a site that declined for want of the model to its end, and ask it again."""
        brought = self.standings.fetch(site)
        if brought is None:
            return ()
        self.declined.discard(site)
        orders = (Send(self._order(), to=site),) if self.phase in (Phase.TRAINING, Phase.PINGING) else ()
        return *brought, *orders

    # Time.

    def tick(self) -> Effects:
        """Look at the clock; to be called every second or so, and after every message."""
        effects: list[Effect] = []
        if self.phase is Phase.BURST and self._round.current is not None:
            effects += self._settle(self._round.current.tick())
        else:
            self._renew(self.core.clock.now_ms())
        return *effects, *self._look(), *self.check.press(self.online)

    def stop(self) -> Effects:
        """Begin nothing new; end a burst that can still end cleanly. Masks that are being opened are, if sites answer;
        aborts that were asked for are waited for, since to give them up too would cost the round its updates.
        """
        self._stopping = True
        attempt = self.round.current if self.round else None
        if self.phase is not Phase.BURST or attempt is None or attempt.state in _ENDING:
            return ()
        return self._settle(attempt.give_up())

    @property
    def in_burst(self) -> bool:
        return self.phase is Phase.BURST

    def _look(self) -> Effects:
        """Whether it is time for the next phase."""
        if self._stopping:
            return ()
        if self.phase is Phase.TRAINING and self._enough_ready():
            self._ping += 1
            self.phase = follow(self.phase, Turn.ENOUGH_READY)
            return self._send_pings()
        if self.phase is Phase.PINGING and (self.answered >= self._pinged or self._now() >= self.deadline):
            return self._plan()
        return ()

    def _send_pings(self) -> Effects:
        self.answered, self._pinged = set(), set(self.ready)
        self.deadline = self._now() + self.plan.ping_ms
        return tuple(Send(Ping(number=self._ping), to=site) for site in sorted(self.ready))

    def _enough_ready(self) -> bool:
        if len(self.ready) < self._least or (self.chain.head is not None and self.chain.head_check() is None):
            return False
        policy = self.core.policy
        awaited = {entry.site for entry in policy.roster if policy.lists(entry.site)}
        awaited -= self.ready | self.declined | set(self.book.excluded)
        if not awaited or self._now() >= self.deadline:
            return True
        if awaited & self.online:
            self._all_ready_since = None
            return False
        # Only sites that are not connected are missing: they get a little time to come back.
        self._all_ready_since = self._all_ready_since or self._now()
        return self._now() >= self._all_ready_since + self.plan.grace_ms

    @property
    def _least(self) -> int:
        two = self.core.policy.allow_two_site and len(self.core.policy.roster) == 2
        return 2 if two else max(self.plan.least, self.core.policy.least_cohort)

    # The burst.

    def _plan(self) -> Effects:
        present = self.ready & self.answered
        if len(present) < self._least:
            # Who did not answer may only be slow: it is asked again with the next ping, as long as it is connected.
            # Who came back during a burst has not been asked at all; it holds its update, and says so.
            self.phase = follow(self.phase, Turn.TOO_FEW)
            self.ready &= self.online
            self.deadline = self._now() + self.plan.train_ms
            unasked = self.online - self.ready - self.declined
            return tuple(Send(self._order(), to=site) for site in sorted(unasked))
        self._round.start = replace(self._round.start, check=self.chain.head_check())
        try:
            attempt = self._round.next_attempt(sorted(present))
        except PolicyViolation as lost:
            # RoundLost, or a set to be repeated with a site that the policy does not allow any more.
            return self._lose(lost)
        self.phase = follow(self.phase, Turn.ANSWERED)
        return (*of_round(self._round.start.round, attempt.start()), *self._changed_strikes())

    def _settle(self, effects: Iterable[Effect]) -> Effects:
        """Take note of what an attempt did, and move on when it is over."""
        told: list[Effect] = []
        listed, before = tuple(effects), set(self.book.excluded)
        for effect in of_round(self._round.start.round, listed):
            told.append(effect)
            if isinstance(effect, Keep) and isinstance(effect.record, records.ResultShown):
                told += self._link(effect.record.result)
        self._round.note(listed)
        told += self._newly_excluded(before)
        attempt = self._round.current
        if self.phase is not Phase.BURST or attempt is None:
            return *told, *self._changed_strikes()
        if attempt.state in _DONE:
            told += self._published(attempt)
        elif attempt.state in _OVER:
            told += self._again()
        return *told, *self._changed_strikes()

    def _newly_excluded(self, before: set[str]) -> Effects:
        """Exclusion holds for the certificate under which the site spoke: a new one is the consortium's word."""
        certs = {entry.site: entry.cert for entry in self.core.policy.roster}
        fresh = {site: reason for site, reason in self.book.excluded.items() if site not in before and site in certs}
        return tuple(Exclude(site, certs[site], reason) for site, reason in sorted(fresh.items()))

    def _changed_strikes(self) -> Effects:
        now = _strikes(self.book)
        if now == self._strikes:
            return ()
        self._strikes = now
        return (now,)

    def _link(self, result: messages.Result) -> Effects:
        attempt = self._round.current
        if attempt is None:
            return ()
        link = Link(
            round=result.context.round,
            result_hash=publication_of(attempt).result_hash,
            prev_result=result.context.prev_result,
            state_hash=result.state_hash,
            sum_root=result.sum_root,
        )
        self.chain.add(link)
        return KeepLink(link.result_hash, result), *self._tidy(attempt)

    def _tidy(self, *under_way: CoordinatorAttempt) -> Effects:
        """Everything leaves the spool but sums that a late site may ask for, and uploads that are still needed."""
        kept = self.chain.kept_sums()
        for attempt in under_way:
            kept |= set(attempt.uploads.discard().keys)
        stale = tuple(key for key in self.core.spool.vectors() if key not in kept)
        return (Discard(stale),) if stale else ()

    def _published(self, attempt: CoordinatorAttempt) -> Effects:
        good = publication_of(attempt).result.verdict == Verdict.GOOD
        self.model = attempt.model
        self.completed += good
        self.check.watch(self._round)
        closed = CloseRound(self._round.start.round, "published" if good else "void")
        if self.completed >= self.plan.rounds:
            self.phase = follow(self.phase, Turn.LAST_PUBLISHED)
            return (closed,)
        self.phase = follow(self.phase, Turn.PUBLISHED)
        return closed, *self._open_round(self._round.start.round + 1)

    def _again(self) -> Effects:
        """The next attempt of this round, with those that are still there."""
        self._ping += 1
        self.phase = follow(self.phase, Turn.ATTEMPT_ENDED)
        return self._send_pings()

    def _lose(self, lost: PolicyViolation) -> Effects:
        self.phase = follow(self.phase, Turn.ROUND_LOST)
        closed = CloseRound(self._round.start.round, lost.message)
        return closed, *self._open_round(self._round.start.round + 1)


def _strikes(book: BlameBook) -> KeepStrikes:
    return KeepStrikes(dict(book.strikes), dict(book.pause))
