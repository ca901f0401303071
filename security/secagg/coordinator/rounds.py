"""One round at the coordinator: which sites are eligible, the next cohort, and its certificates.

Sections are those of docs/spec/secure-aggregation.md. Planning follows the reuse rule (section 8): an attempt that
ended before C2 needs nothing; one that may have uploads needs its abort certificate; one whose set was certified but
not opened can only be repeated exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lazaret.errors import PolicyViolation, RemoteProtocolError
from security.secagg import messages, statements, thresholds
from security.secagg.certificates import AbortCertificate, AbortLine, CheckCertificate, NamedRoot, RepeatCertificate
from security.secagg.context import PROTOCOL_VERSION, CohortMember, RepeatOf, RoundContext
from security.secagg.coordinator import earlier
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.earlier import EarlierAttempt
from security.secagg.coordinator.uploads import CoordinatorCore
from security.secagg.effects import ANSWERED, MISSING, SILENT, Blamed, Effects, Send
from security.secagg.fields import Wire
from security.secagg.layout import Vector
from security.secagg.transitions import CoordinatorState

# Which sites are left out of a cohort, and why (section 11). This is the coordinator's choice; sites cannot check it,
# but they see it and log it. Strikes are kept over rounds, so that c sites that stall one after the other cost at most
# c + 1 attempts.

MAX_PAUSE = 32
MAX_SILENCE = 3  # accusations in a row that a dealer may leave without an answer: it may be away once, hardly always


@dataclass
class BlameBook:
    """Strikes for absence, disputes of the whole run, and sites that are excluded.

    :ivar pause: how many more cohorts a site is left out of.
    :ivar excluded: reasons by site; until the manifest names another signing certificate for it.
    :ivar accusations: (accuser, dealer) of every dispute about a share box. One of the two lied, it is not known which.
    :ivar silence: how many accusations in a row a dealer has not answered.
    :ivar absent: sites that missed a step in this round.
    """

    strikes: dict[str, int] = field(default_factory=dict)
    pause: dict[str, int] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    accusations: set[tuple[str, str]] = field(default_factory=set)
    silence: dict[str, int] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)

    def to_dict(self) -> dict[str, Any]:
        """What must survive a restart, as JSON values."""
        return {
            "strikes": dict(self.strikes),
            "pause": dict(self.pause),
            "excluded": dict(self.excluded),
            "accusations": sorted(map(list, self.accusations)),
            "silence": dict(self.silence),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> BlameBook:
        return cls(
            strikes=dict(saved["strikes"]),
            pause=dict(saved["pause"]),
            excluded=dict(saved["excluded"]),
            accusations={(accuser, dealer) for accuser, dealer in saved["accusations"]},
            silence=dict(saved["silence"]),
        )

    def missed(self, site: str) -> None:
        """Absence proves nothing: the site is left out of this round and the next 1, 2, 4, ... 32 cohorts.

        If it came back within the round, sites that stall in turn could use up all attempts.
        """
        self.absent.add(site)
        self.strikes[site] = self.strikes.get(site, 0) + 1
        self.pause[site] = min(MAX_PAUSE, 2 ** (self.strikes[site] - 1))

    def took_part(self, site: str) -> None:
        """A site whose vector is in a sum has no strikes any more."""
        self.strikes.pop(site, None)
        self.pause.pop(site, None)
        self.absent.discard(site)

    def exclude(self, site: str, reason: str) -> None:
        """A statement that the site signed is evidence against it."""
        self.excluded[site] = reason

    def clear(self, site: str) -> None:
        """The consortium has resolved the case."""
        self.excluded.pop(site, None)
        self.silence.pop(site, None)
        self.accusations = {pair for pair in self.accusations if site not in pair}
        self.took_part(site)

    def accuse(self, accuser: str, dealer: str, *, c: int) -> None:
        """Either the dealer or the accuser lied. Only c sites lie, so one with disputes with more than c others does.

        A dispute alone leaves nobody out: a liar could then choose who is left out with it, round by round.
        """
        self.accusations.add((accuser, dealer))
        for site in (accuser, dealer):
            others = {other for pair in self.accusations if site in pair for other in pair} - {site}
            if len(others) > max(c, 1):
                self.exclude(site, "disputes")

    def unanswered(self, dealer: str) -> None:
        """A dealer has not answered an accusation. Each time costs it a strike; after the third it is named a liar."""
        self.silence[dealer] = self.silence.get(dealer, 0) + 1
        if self.silence[dealer] >= MAX_SILENCE:
            self.exclude(dealer, "no answer to accusations")

    def new_round(self) -> None:
        """Steps that were missed count for one round only; disputes count for the whole run."""
        self.absent.clear()

    def eligible(self, sites: Iterable[str]) -> list[str]:
        """Sites that may be in the next cohort."""
        barred = self.absent | set(self.excluded) | {site for site, left in self.pause.items() if left > 0}
        return sorted(site for site in sites if site not in barred)

    def named(self, sites: Iterable[str]) -> str:
        """For people: which of these sites failed in this round or are left out for longer, and why."""
        reasons = dict.fromkeys(self.absent, "missed a step") | self.excluded
        found = [f"{site} ({reasons[site]})" for site in sorted(sites) if site in reasons]
        return f"; at fault: {', '.join(found)}" if found else ""

    def cohort_formed(self) -> None:
        """One more cohort was planned: pauses run down."""
        self.pause = {site: left - 1 for site, left in self.pause.items() if left > 1}


class RoundLost(PolicyViolation):
    """No further attempt of this round is possible; the next round begins, with fresh updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStart:
    """What all attempts of a round share."""

    round: int
    state_hash: bytes
    config_hash: bytes
    prev_result: bytes
    check: CheckCertificate | None = None


@dataclass
class CoordinatorRound:
    """The attempts of one round, one after the other.

    :ivar before: what is left of attempts of earlier rounds, on this model or the one before it.
    """

    core: CoordinatorCore
    book: BlameBook
    start: RoundStart
    model: Vector = field(repr=False)
    attempts: list[CoordinatorAttempt] = field(default_factory=list)
    before: list[EarlierAttempt] = field(default_factory=list)

    def known(self, *states: bytes) -> list[EarlierAttempt]:
        """The attempts on these models that count for later ones, oldest first."""
        found = (*self.before, *map(EarlierAttempt.of, self.attempts))
        return [attempt for attempt in found if attempt.counts and attempt.context.state_hash in states]

    @property
    def unsettled(self) -> list[EarlierAttempt]:
        """Attempts of earlier rounds on this model of which it is not known whether they have a sum: sites that have
        dealt in them refuse a plan. With noise that is booked for every release nobody asks."""
        policy, state = self.core.policy, self.start.state_hash
        if policy.dp_active:
            return []
        dealt = (found for found in self.before if found.kx and found.context.state_hash == state)
        return [found for found in dealt if not found.settled(policy)]

    def ask_aborts(self, sites: Iterable[str]) -> Effects:
        """These sites are asked to abort what is not settled."""
        signer = self.core.signer
        return tuple(
            Send(found.request(signer), to=site)
            for found in self.unsettled
            for site in sorted(set(sites) & set(found.context.sites) - found.aborts.keys())
        )

    @property
    def current(self) -> CoordinatorAttempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def most_attempts(self) -> int:
        """Sites join no more than these (section 8)."""
        return thresholds.most_attempts(self.core.policy.c)

    def next_attempt(self, ready: Collection[str]) -> CoordinatorAttempt:
        """Plan the next attempt with the sites that are ready now.

        :raises RoundLost: if there can be none.
        """
        if len(self.attempts) >= self.most_attempts:
            raise RoundLost(
                f"{len(self.attempts)} attempts failed{self.book.named(ready)}", where=f"round {self.start.round}"
            )
        aborts, repeats = self._certificates()
        known = [] if self.core.policy.dp_active else self.known(self.start.state_hash)
        cohort = self._repeated_set(repeats, ready) if repeats else self._cohort(ready, known)
        plan = self._plan(cohort, aborts, repeats, known)
        self.book.cohort_formed()
        attempt = CoordinatorAttempt(self.core, plan, self.model)
        self.attempts.append(attempt)
        return attempt

    def _certificates(self) -> tuple[list[AbortCertificate], list[RepeatCertificate]]:
        aborts, repeats = [], []
        asked = not self.core.policy.dp_active  # also by a site that has dealt shares only (section 10)
        for attempt in self.attempts:
            if not (may_hold_uploads(attempt) or (asked and attempt.dealing.kx)):
                continue
            aborted, certified = abort_certificate(attempt), repeat_certificate(attempt)
            if aborted is not None:
                aborts.append(aborted)
            elif certified is not None:
                repeats.append(certified)
            else:
                raise RoundLost("an attempt ended with neither certificate", where=f"round {self.start.round}")
        return aborts, repeats

    def _repeated_set(self, repeats: list[RepeatCertificate], ready: Collection[str]) -> list[str]:
        cheats = {site for repeat in repeats for site in repeat.cheats}
        sets = [{line.site for line in repeat.roots} - cheats for repeat in repeats]
        if any(found != sets[0] for found in sets) or not sets[0] <= set(ready):
            raise RoundLost("the certified set cannot be repeated", where=f"round {self.start.round}")
        return sorted(sets[0])

    def _cohort(self, ready: Collection[str], known: Collection[EarlierAttempt] = ()) -> list[str]:
        """All eligible sites; those that only missed a step come back before a round is lost."""
        policy = self.core.policy
        used = [attempt for attempt in self.attempts if may_hold_uploads(attempt)]
        # A site whose share is public may need more aborts than the others before its update is free again.
        listed = [site for site in ready if policy.lists(site) and all(attempt.frees(site) for attempt in used)]
        listed = [site for site in listed if all(attempt.frees(site, policy) for attempt in known)]
        chosen = self.book.eligible(listed)
        if not self._legal(chosen):
            chosen = sorted(site for site in listed if site not in self.book.excluded)
        if not self._legal(chosen):
            raise RoundLost(
                f"{len(chosen)} sites are too few for a cohort{self.book.named(listed)}",
                where=f"round {self.start.round}",
                hint=f"the manifest demands at least {policy.least_cohort} sites",
            )
        return chosen

    def _legal(self, cohort: list[str]) -> bool:
        try:
            self.core.policy.check_cohort(len(cohort))
        except PolicyViolation:
            return False
        return self.core.policy.hides(cohort)

    def _plan(
        self,
        cohort: list[str],
        aborts: list[AbortCertificate],
        repeats: list[RepeatCertificate],
        known: Sequence[EarlierAttempt] = (),
    ) -> messages.Plan:
        """:param known: earlier attempts on the model; members are shown what became of them."""
        policy, start = self.core.policy, self.start
        dead, certified = earlier.certificates(policy, known, cohort)
        shown = {found.ctx for found in aborts} | {found.ctx for found in repeats}
        aborts = [*aborts, *(found for found in dead if found.ctx not in shown)]
        settling = [found for found in certified if found.ctx not in shown]
        sizes = policy.thresholds(len(cohort))
        survivors = {attempt.ctx: attempt.survivors_hash() for attempt in self.attempts}
        context = RoundContext(
            version=PROTOCOL_VERSION,
            federation=policy.federation,
            manifest_hash=policy.manifest_hash,
            run=policy.run,
            round=start.round,
            attempt=len(self.attempts) + 1,
            n=sizes.n,
            t=sizes.t,
            a=sizes.a,
            c=sizes.c,
            m=sizes.m,
            members=tuple(CohortMember(site=site, cert=policy.entry(site).cert) for site in cohort),
            coordinator_cert=policy.coordinator.cert,
            suite=policy.suite,
            repeats=tuple(RepeatOf(ctx=repeat.ctx, survivors=survivors[repeat.ctx]) for repeat in repeats),
            sums=earlier.sums(policy, known),
            state_hash=start.state_hash,
            config_hash=start.config_hash,
            layout_hash=policy.layout.layout_hash,
            prev_result=start.prev_result,
        )
        unsigned = messages.Plan(
            context=context, check=start.check, aborts=tuple(aborts), repeats=(*repeats, *settling), signature=bytes(64)
        )
        return replace(unsigned, signature=self.core.signer.sign(statements.plan(context)))

    def receive(self, site: str, message: Wire) -> Effects:
        """Take a message from a site, for the attempt of this round that it names, or an abort of an earlier one."""
        if isinstance(message, messages.Abort):
            for known in self.before:
                if known.ctx == message.ctx:
                    return known.take(self.core.policy, message)
        effects = self.attempt_of(message).receive(site, message)
        self.note(effects)
        return effects

    def names(self, message: Wire) -> bool:
        """Whether a message is of an attempt of this round."""
        ctx, kx = getattr(message, "ctx", b""), getattr(message, "kx", b"")
        return any(attempt.ctx == ctx or (kx and attempt.dealing.kx == kx) for attempt in self.attempts)

    def attempt_of(self, message: Wire) -> CoordinatorAttempt:
        """The attempt that a message names by its context or keys; the newest if it names none."""
        ctx = getattr(message, "ctx", getattr(message, "open_ctx", b""))
        kx = getattr(message, "kx", b"")
        for attempt in self.attempts:
            if ctx == attempt.ctx or (kx and kx == attempt.dealing.kx):
                return attempt
        if self.current is None:
            raise RemoteProtocolError("no attempt is open", where=f"round {self.start.round}")
        return self.current

    def note(self, effects: Iterable[object]) -> None:
        """Take over what an attempt found out about sites."""
        for effect in effects:
            match effect:
                case Blamed(site, reason) if reason == MISSING:
                    self.book.missed(site)
                case Blamed(site, reason) if reason == SILENT:
                    self.book.unanswered(site)
                case Blamed(site, reason) if reason == ANSWERED:
                    self.book.silence.pop(site, None)
                case Blamed(site, reason):
                    self.book.exclude(site, reason)
        for attempt in self.attempts:
            for accuser, dealer in attempt.disputes.accused:
                self.book.accuse(accuser, dealer, c=self.core.policy.c)
            if attempt.state is CoordinatorState.PUBLISHED and attempt.survivors is not None:
                # Not the sites that answered first at S5: a quorum is enough there, and the slowest would never count.
                for line in attempt.survivors.uploads:
                    self.book.took_part(line.site)


def may_hold_uploads(attempt: CoordinatorAttempt) -> bool:
    """Whether a byte of a masked vector may have left a site in an attempt."""
    return bool(attempt.dealing.deals)


def abort_certificate(attempt: CoordinatorAttempt) -> AbortCertificate | None:
    """The proof that an attempt has ended without a sum, once enough of its members have signed that."""
    if len(attempt.aborts) < attempt.context.a:
        return None
    lines = [attempt.aborts[site] for site in attempt.context.sites if site in attempt.aborts]
    return AbortCertificate(
        ctx=attempt.ctx,
        lines=tuple(AbortLine(site=line.site, code=line.code, signature=line.signature) for line in lines),
    )


def repeat_certificate(attempt: CoordinatorAttempt) -> RepeatCertificate | None:
    """What an exact repeat needs: the certified set, and the proofs that made the repeat necessary."""
    if attempt.quorum is None or attempt.survivors is None:
        return None
    return RepeatCertificate(
        ctx=attempt.ctx,
        kx=attempt.dealing.kx,
        deals=attempt.dealing.deals,
        roots=tuple(NamedRoot(site=line.site, root=line.root) for line in attempt.survivors.uploads),
        agreements=attempt.quorum.agreements,
        frauds=tuple(attempt.opening.frauds) if attempt.opening else (),
        pair_frauds=tuple(attempt.opening.pair_frauds) if attempt.opening else (),
    )
