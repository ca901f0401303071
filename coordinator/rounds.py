"""The run, round after round, as a machine without sockets, files or clock: event in, effects out.

`phases` says where a run can be and what each phase has promised. This module says what becomes of an event in it.

Events are: a site connects (`hello`), its stream ends (`gone`), it says something (`receive`), time passes (`tick`),
the operator pauses the run (`pause`) or stops the coordinator (`stop`). A message belongs to one of three things, and
goes there and nowhere else:

1. to the round that is open: `Ready`, `Decline` and `Pong` of an older round or ping are late, and dropped; what names
   an attempt of the round goes to that attempt (`security/secagg/coordinator/attempt.py`), which checks signatures,
   order and sender.
2. to the sum of the round before, which is under check while this round trains: requests for chunks, and
   acknowledgements. Enough of these are its certificate, without which no further sum is begun: a sum that nobody has
   checked is never built upon.
3. to an attempt of the round before, as an answer that came when enough others had answered. It changes no sum.

A site that connects is first told what it missed: the end of an attempt that is still open there, then results and sums
up to the newest, or a whole state, each with the certificate by which it can be believed (`results`).

The engine knows what is on disk, since it has asked for it: an effect that is a record (`coordinator.effects.Stored`)
always stands before the messages that depend on it. What sites are held responsible for (strikes, exclusion) is stored
as soon as an attempt has found it out, before anything that follows from it is sent. After a crash, `start`, `restore`
or `restore_done` gets the same engine from the records; nothing else has to be remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from coordinator.attendance import Attendance, Candidates
from coordinator.effects import PUBLISHED, VOID, CloseRound, Effect, Effects, OpenRound, PauseRun, StoreBlame
from coordinator.phases import PhaseChange, RunPhase, RunPlan, follow
from coordinator.results import QUESTIONS, Chain, Link, Standings, SumCheck, publication_of
from lazaret.errors import PolicyViolation, RemoteProtocolError
from security.identity.membership import AggregationPolicy
from security.secagg import messages, records
from security.secagg.certificates import Ack
from security.secagg.context import SumVerdict
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.earlier import EarlierAttempt
from security.secagg.coordinator.recovery import resume
from security.secagg.coordinator.rounds import BlameBook, CoordinatorRound, RoundStart
from security.secagg.coordinator.uploads import CoordinatorCore
from security.secagg.effects import Certified, Persist, Send, VotedDown
from security.secagg.fields import Wire
from security.secagg.layout import Vector
from security.secagg.relay import Decline, Ping, Pong
from security.secagg.transitions import CoordinatorState

_S = CoordinatorState
_OVER = (_S.DEAD, _S.LOST)
_DONE = (_S.PUBLISHED, _S.CERTIFIED)
_ENDING = (*_OVER, *_DONE, _S.UNMASKING, _S.ABORTING)
LOST_IN_A_ROW: Final = 3  # rounds without a sum, after which the run pauses: each has cost the sites work and budget


class RoundEngine:
    """One run of one federation.

    :param renew: brings the core's mandate up to an instant: certificates begin and end in mid-run.
    :param policy_at: the policy at a later instant (`Candidates`).
    :param first: the model of the manifest, if it is not `model`; it stands while sites vote against all others.
    :param before: what is left of attempts of earlier rounds on the model that stands, or on the one before it.
    :param lost: how many rounds before this start were lost, one after the other.
    :ivar paused: why nothing new begins; None if the run goes on.
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
        policy_at: Callable[[int], AggregationPolicy] | None = None,
        lost: int = 0,
        first: Vector | None = None,
        paused: str | None = None,
        before: list[EarlierAttempt] | None = None,
    ) -> None:
        self.core = core
        self.book = book
        self.plan = plan
        self.chain = chain
        self.model = model
        self._first = first if first is not None else model
        self.completed = completed
        self.phase = RunPhase.WAITING
        self.paused = paused
        self.sites = Attendance()
        self.round: CoordinatorRound | None = None
        self.check = SumCheck(core, plan.audit_ms, plan.train_ms)
        self.standings = Standings(chain)
        self.deadline = 0
        self._stopping = False
        self.candidates = Candidates(core, book, plan, chain, self.sites, policy_at)
        self._renew = renew
        self._lost = lost
        self._before = before or []
        self._stored_blame = StoreBlame.of(book, core.policy)

    @property
    def previous(self) -> CoordinatorRound | None:
        """The round whose sum is, or was last, under check."""
        return self.check.round

    # Starting, fresh or after a crash.

    def start(self, last_round: int, rebuilt: CoordinatorRound | None = None) -> Effects:
        """Open the first round, or the one after `last_round`; the sum of `rebuilt` may still be under check."""
        return *self._watch_if_uncovered(rebuilt), *self._open_round(last_round + 1)

    def _watch_if_uncovered(self, rebuilt: CoordinatorRound | None) -> Effects:
        """Go on with the check of the newest sum; whatever else the last process left in the spool is removed."""
        current = rebuilt.current if rebuilt is not None else None
        if current is None or current.publication is None or self.chain.head_check() is not None:
            return self.chain.tidy(self.core.spool)
        self.check.watch(rebuilt)
        # The last acknowledgement may be on disk without the certificate that it completes.
        if (covered := self.check.certificate()) is None:
            return self.chain.tidy(self.core.spool, current)
        return covered, *self._covered(covered), *self.chain.tidy(self.core.spool)

    def restore(self, start: RoundStart, rebuilt: CoordinatorRound | None) -> Effects:
        """Go on with the round that was open when the last process ended."""
        tidied: Effects = ()
        if rebuilt is not None and rebuilt.start.round == start.round:
            self.round = rebuilt
        else:
            self.round = CoordinatorRound(self.core, self.book, start, self.model)
            tidied = self._watch_if_uncovered(rebuilt)
        self.round.before = self._before
        self.sites.new_round()
        if self.round.current is None:
            return tidied
        self.phase = RunPhase.AGGREGATION
        attempt = self.round.current
        return self._settle(resume(attempt)) if attempt.state not in (*_OVER, *_DONE) else self._settle(())

    def restore_done(self, rebuilt: CoordinatorRound | None) -> Effects:
        """All rounds are over; the last sum may still be under check."""
        self.phase = RunPhase.DONE
        return self._watch_if_uncovered(rebuilt)

    def _open_round(self, number: int) -> Effects:
        head, policy = self.chain.head, self.core.policy
        start = RoundStart(
            round=number,
            state_hash=head.state_hash if head else policy.initial_state_hash,
            config_hash=self.plan.config_hash,
            prev_result=self.chain.follow or policy.manifest_hash,
        )
        if self.round is not None:
            self._before = self.round.known(start.state_hash, self.round.start.state_hash)
        self.book.new_round()
        self.round = CoordinatorRound(self.core, self.book, start, self.model, before=self._before)
        self.sites.new_round()
        return OpenRound(start), *self.round.ask_aborts(self.sites.online), *self._look()

    def _orders(self, sites: Iterable[str]) -> Effects:
        """The order for those who can be in a cohort. Another one would train, and pay, for nothing."""
        start, able = self._round.start, self.candidates.able_until(self.plan.train_ms)
        order = messages.TrainOrder(
            round=start.round,
            state_hash=start.state_hash,
            config_hash=start.config_hash,
            prev_result=start.prev_result,
            check=self.chain.head_check(),
        )
        return tuple(Send(order, to=site) for site in sorted(able & set(sites)))

    @property
    def _ordering(self) -> bool:
        """Whether a site that comes now can still take part in the round."""
        return self.phase in (RunPhase.TRAINING, RunPhase.PINGING)

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
        self.sites.online.add(site)
        self.sites.declined.pop(site, None)
        effects: list[Effect] = list(self._close_there(site, hello.open_ctx))
        effects += self.standings.greet(site, hello.round, hello.result)
        attempt = self.round.current if self.round else None
        if self.phase is RunPhase.AGGREGATION and attempt is not None and site in attempt.context.sites:
            effects += self._settle(attempt.receive(site, hello))
        if self._ordering:
            effects += self._orders({site, *(self.candidates.hold_back(waiting=False) & self.sites.silent)})
        return *effects, *self._look()

    def _close_there(self, site: str, open_ctx: bytes) -> Effects:
        """An attempt that is over here may still be open at a site that was away when it ended."""
        for attempt in self._round.attempts if self.round else ():
            if attempt.ctx == open_ctx and attempt.state in _OVER:
                return (Send(attempt.abort_request(), to=site), *self._round.ask_aborts([site]))
        return self.round.ask_aborts([site]) if self.round else ()

    def gone(self, site: str) -> Effects:
        """A stream has ended. What the site said in this round it will say again when it is back."""
        self.sites.gone(site)
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
        if isinstance(message, messages.Abort):
            for known in self._before:
                if known.ctx == message.ctx:
                    return *known.take(self.core.policy, message), *self._look()
        if self.previous is not None and self.previous.names(message):
            # An answer that came when enough others had answered.
            return *self.previous.receive(site, message), *self._changed_blame()
        return self._settle(self._round.attempt_of(message).receive(site, message))

    def _answer(self, site: str, message: messages.Ready | Decline) -> Effects:
        if self.round is None or message.round != self.round.start.round or self.phase is RunPhase.DONE:
            return ()  # of a round that is over
        if isinstance(message, messages.Ready):
            self.sites.ready.add(site)
            self.standings.accepted_head(site)
            return self._look()
        self.sites.decline(site, message.seconds, self._now())
        return *self._fetch(site), *self._look()

    def _pong(self, site: str, pong: Pong) -> Effects:
        if pong.number == self.sites.ping and self.phase is RunPhase.PINGING:
            self.sites.answered.add(site)
        return self._look()

    def _about_sum(self, site: str, message: Wire) -> Effects:
        """Requests and acknowledgements of the sum that is under check, which is of the round before."""
        effects = self.check.receive(site, message)
        if effects and isinstance(message, Ack) and self.previous is not None:
            self.standings.accepted(site, self.previous.start.round, message.result)
        return self._with_covered(effects)

    def _with_covered(self, effects: Effects) -> Effects:
        """What follows from a certificate stands right behind it: one transaction keeps both."""
        done: list[Effect] = []
        for effect in effects:
            done.append(effect)
            if isinstance(effect, Certified):
                done += self._covered(effect)
        return tuple(done)

    def _covered(self, covered: Certified) -> Effects:
        """The newest sum has its certificate: everybody is told, and who lacks the model gets it."""
        self.chain.cover(covered.result, covered.check)
        voted = self._voted(covered) if self.core.policy.vote else ()
        certified = messages.ResultCertificate(result=covered.result, check=covered.check)
        online = self.sites.online
        behind = (effect for site in sorted(online & self.sites.declined.keys()) for effect in self._fetch(site))
        return *voted, *(Send(certified, to=site) for site in online), *behind

    def _voted(self, covered: Certified) -> Effects:
        """The vote decides what the next round follows, and whether the model moves (section 10, "Votes")."""
        result, accepted = self.chain.vote_on(covered.result, covered.check)
        number, stood = result.context.round, list[Effect]()
        if not accepted:
            standing, self.core.movements = self.chain.standing(), self.chain.movements()
            self.model = self._first if standing is None else standing
            self.completed -= result.verdict == SumVerdict.GOOD
            stood.append(VotedDown(number, covered.result, result.context.state_hash))
        if self.phase is RunPhase.DONE:
            if self.completed >= self.plan.rounds:
                return tuple(stood)
            self.phase = follow(self.phase, PhaseChange.VOTED_DOWN)
            return *stood, *self._open_round(number + 1)
        if self.round is None or self.round.start.round <= number:
            return tuple(stood)
        return *stood, *self._open_round(self.round.start.round)

    def _fetch(self, site: str) -> Effects:
        """Bring a site that declined for want of the model to its end, and ask it again."""
        if (brought := self.standings.fetch(site)) is None:
            return ()
        self.sites.declined.pop(site, None)
        return *brought, *(self._orders([site]) if self._ordering else ())

    # Time.

    def tick(self) -> Effects:
        """Look at the clock; to be called every second or so, and after every message."""
        effects: list[Effect] = []
        if self.phase is RunPhase.AGGREGATION and self._round.current is not None:
            effects += self._settle(self._round.current.tick())
        else:
            self._renew(self.core.clock.now_ms())
            again = self.sites.ask_again(self._now())
            effects += self._orders(again) if self._ordering else ()
        return *effects, *self._look(), *self._with_covered(self.check.press(self.sites.online))

    def stop(self) -> Effects:
        """Begin nothing new; end an aggregation that can still end cleanly. Masks being opened are, if sites answer;
        aborts that were asked for are waited for, since to give them up too would cost the round its updates.
        """
        self._stopping = True
        attempt = self.round.current if self.round else None
        if self.phase is not RunPhase.AGGREGATION or attempt is None or attempt.state in _ENDING:
            return ()
        return self._settle(attempt.give_up())

    def pause(self, reason: str | None) -> Effects:
        """Begin nothing new until told otherwise (None); an attempt that is under way ends, and its sum counts."""
        self.paused, self._lost = reason, 0
        return self._look()

    def end_run(self, outcome: str) -> Effects:
        """The operator ends the run, once no attempt is under way. The newest model stays: this chooses nothing."""
        if self.phase in (RunPhase.AGGREGATION, RunPhase.DONE):
            return ()
        self.phase = RunPhase.DONE
        return (CloseRound(self._round.start.round, outcome),)

    @property
    def aggregating(self) -> bool:
        return self.phase is RunPhase.AGGREGATION

    def _look(self) -> Effects:
        """Whether it is time for the next phase."""
        if self._stopping or self.round is None:
            return ()
        held = self.paused is not None
        if self.phase in (RunPhase.TRAINING, RunPhase.PINGING) and (held or not self.candidates.possible()):
            self.phase = follow(self.phase, PhaseChange.IMPOSSIBLE)
        if self.phase is RunPhase.WAITING:
            self.candidates.hold_back(waiting=True)
        if self.phase is RunPhase.WAITING and not held and self.candidates.possible(self.plan.train_ms):
            self.phase = follow(self.phase, PhaseChange.POSSIBLE)
            self.deadline = self._now() + self.plan.train_ms
            return self._orders(self.sites.silent)
        if self.phase is RunPhase.TRAINING and self._enough_ready():
            self.phase = follow(self.phase, PhaseChange.ENOUGH_READY)
            return self._send_pings()
        if self.phase is RunPhase.PINGING and (self.sites.all_answered or self._now() >= self.deadline):
            return self._plan()
        return ()

    def _send_pings(self) -> Effects:
        asked = self.sites.next_ping()
        self.deadline = self._now() + self.plan.ping_ms
        return tuple(Send(Ping(number=self.sites.ping), to=site) for site in asked)

    def _enough_ready(self) -> bool:
        # Sites that have dealt in an earlier attempt on this model would refuse the plan.
        now, early = self._now(), self._round.unsettled and self._now() < self.deadline
        return not early and self.candidates.enough_ready(now, self.deadline)

    # The aggregation.

    def _plan(self) -> Effects:
        present = self.sites.present & self.candidates.able_until()
        if not self.candidates.suffice(present):
            self.phase = follow(self.phase, PhaseChange.TOO_FEW)
            return self._look()
        self._round.start = replace(self._round.start, check=self.chain.head_check())
        try:
            attempt = self._round.next_attempt(sorted(present))
        except PolicyViolation as lost:
            # RoundLost, or a set to be repeated with a site that the policy does not allow any more.
            return self._lose(lost)
        self.phase = follow(self.phase, PhaseChange.ANSWERED)
        return *self._changed_blame(), *attempt.start()

    def _settle(self, effects: Iterable[Effect]) -> Effects:
        """Take note of what an attempt did, and move on when it is over."""
        done: list[Effect] = []
        listed = tuple(effects)
        for effect in listed:
            done.append(effect)
            if isinstance(effect, Persist) and isinstance(effect.record, records.ResultShown):
                done += self._link()
        self._round.note(listed)
        done += self._changed_blame()
        attempt = self._round.current
        if self.phase is RunPhase.AGGREGATION and attempt is not None:
            if attempt.state in _DONE:
                done += self._published(attempt)
            elif attempt.state in _OVER:
                done += self._again()
        return tuple(done)

    def _changed_blame(self) -> Effects:
        stored, self._stored_blame = self._stored_blame, StoreBlame.of(self.book, self.core.policy)
        return () if stored == self._stored_blame else (self._stored_blame,)

    def _link(self) -> Effects:
        """The chain has a new result, which is in the record: storage needs no second one."""
        attempt = self._round.current
        if attempt is None:
            return ()
        self.chain.add(Link.of(publication_of(attempt)))
        return self.chain.tidy(self.core.spool, attempt)

    def _published(self, attempt: CoordinatorAttempt) -> Effects:
        published = publication_of(attempt)
        good = published.result.verdict == SumVerdict.GOOD
        self.candidates.summed(published.survivors)
        self.model = attempt.model
        self.completed, self._lost = self.completed + good, 0
        self.check.watch(self._round)
        closed = CloseRound(self._round.start.round, PUBLISHED if good else VOID)
        if self.completed >= self.plan.rounds:
            self.phase = follow(self.phase, PhaseChange.LAST_PUBLISHED)
            return (closed,)
        self.phase = follow(self.phase, PhaseChange.PUBLISHED)
        return closed, *self._open_round(self._round.start.round + 1)

    def _again(self) -> Effects:
        """The next attempt of this round, with those that are still there."""
        self.phase = follow(self.phase, PhaseChange.ATTEMPT_ENDED)
        return self._send_pings()

    def _lose(self, lost: PolicyViolation) -> Effects:
        self.phase = follow(self.phase, PhaseChange.ROUND_LOST)
        closed = CloseRound(self._round.start.round, lost.message)
        self._lost += 1
        if self._lost < LOST_IN_A_ROW:
            return closed, *self._open_round(self._round.start.round + 1)
        # Whatever it is, the next round would not mend it, and every round costs the sites work and budget.
        self.paused = f"{self._lost} rounds were lost in a row, the last because {lost.message}"
        return closed, *self._open_round(self._round.start.round + 1), PauseRun(self.paused)
