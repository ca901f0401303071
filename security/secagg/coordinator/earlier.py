"""What is left of an attempt when its round is over and its model still stands (docs/spec/secure-aggregation.md,
section 10, "Differences of sums").

A site that has dealt shares in it asks, before it deals again on this model, for the one set that can have a sum or for
the aborts by which no set can. Both are signatures of sites: a coordinator collects them, if need be after the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lazaret.errors import VerificationFailed
from security.identity.membership import AggregationPolicy
from security.secagg import context as hashes
from security.secagg import messages, records, statements
from security.secagg.certificates import AbortCertificate, AbortLine, NamedRoot, RepeatCertificate, Signed
from security.secagg.context import MAX_EARLIER_SUMS, EarlierSum, RoundContext
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.effects import Effects, Persist
from security.secagg.fields import Wire
from security.secagg.messages import Abort, Plan

MOST_CERTIFICATES: Final = 64  # in one plan


@dataclass(kw_only=True)
class EarlierAttempt:
    """An attempt in which sites may have dealt shares, by what was signed in it.

    :ivar carried: the attempts whose certificates its own plan has shown to its members.
    :ivar roots: the uploads of the set that was shown, and `agreements` on it.
    :ivar public: holder and dealer of every share that was disclosed.
    """

    plan: Plan
    kx: bytes = b""
    deals: bytes = b""
    roots: tuple[NamedRoot, ...] = ()
    agreements: dict[str, bytes] = field(default_factory=dict)
    aborts: dict[str, Abort] = field(default_factory=dict)
    public: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def of(cls, attempt: CoordinatorAttempt) -> EarlierAttempt:
        """From an attempt; what sites still sign in it counts here too."""
        uploads = attempt.survivors.uploads if attempt.survivors else ()
        return cls(
            plan=attempt.plan,
            kx=attempt.dealing.kx,
            deals=attempt.dealing.deals,
            roots=tuple(NamedRoot(site=line.site, root=line.root) for line in uploads),
            agreements=attempt.agreements,
            aborts=attempt.aborts,
            public=set(attempt.disputes.settled),
        )

    @classmethod
    def replay(cls, found: Iterable[Wire]) -> list[EarlierAttempt]:
        """From the records of any number of attempts, those that count for later ones."""
        known: list[EarlierAttempt] = []
        for record in found:
            if isinstance(record, records.Planned):
                known.append(cls(plan=record.plan))
            elif isinstance(record, records.AbortSeen):
                # It may have come when another attempt had begun.
                for attempt in known:
                    attempt._aborted_by(record.abort)
            elif known:
                known[-1]._apply(record)
        return [attempt for attempt in known if attempt.counts]

    def _apply(self, record: Wire) -> None:
        match record:
            case records.AdvertsShown(adverts=shown):
                self.kx = hashes.key_transcript(shown.ctx, [advert.body() for advert in shown.adverts])
            case records.UploadCounted(header=header):
                self.deals = header.deals
            case records.DisclosureSeen(disclosure=said):
                self.public.add((said.holder, said.site))
            case records.SurvivorsShown(survivors=shown):
                self.roots = tuple(NamedRoot(site=line.site, root=line.root) for line in shown.uploads)
            case records.QuorumShown(quorum=quorum):
                self.agreements = {line.site: line.signature for line in quorum.agreements}

    def _aborted_by(self, abort: Abort) -> None:
        if abort.ctx == self.ctx:
            self.aborts[abort.site] = abort

    @property
    def context(self) -> RoundContext:
        return self.plan.context

    @property
    def ctx(self) -> bytes:
        return self.context.ctx()

    @property
    def sites(self) -> tuple[str, ...]:
        """The set that was shown."""
        return tuple(line.site for line in self.roots)

    @property
    def carried(self) -> set[bytes]:
        return {found.ctx for found in self.plan.aborts} | {found.ctx for found in self.plan.repeats}

    @property
    def counts(self) -> bool:
        """Whether sites may have dealt shares in it, or have recorded sets that its plan has shown."""
        return bool(self.kx or self.context.sums)

    # What sites have signed. A key that is no longer listed cannot be checked any more.

    def _signers(self, policy: AggregationPolicy, signed: Iterable[str]) -> list[str]:
        there, certs = set(signed), {entry.site: entry.cert for entry in policy.roster}
        listed = (member for member in self.context.members if certs.get(member.site) == member.cert)
        return [member.site for member in listed if member.site in there]

    def aborted(self, policy: AggregationPolicy) -> AbortCertificate | None:
        """No set of it can have a sum."""
        signers = self._signers(policy, self.aborts)
        if len(signers) < self.context.a:
            return None
        lines = (self.aborts[site] for site in signers)
        return AbortCertificate(
            ctx=self.ctx,
            lines=tuple(AbortLine(site=line.site, code=line.code, signature=line.signature) for line in lines),
        )

    def certified(self, policy: AggregationPolicy) -> RepeatCertificate | None:
        """The one set of it that can have a sum."""
        signers = self._signers(policy, self.agreements)
        if len(signers) < self.context.t:
            return None
        return RepeatCertificate(
            ctx=self.ctx,
            kx=self.kx,
            deals=self.deals,
            roots=self.roots,
            agreements=tuple(Signed(site=site, signature=self.agreements[site]) for site in signers),
            frauds=(),
            pair_frauds=(),
        )

    def settled(self, policy: AggregationPolicy) -> bool:
        return self.aborted(policy) is not None or self.certified(policy) is not None

    def frees(self, site: str, policy: AggregationPolicy) -> bool:
        """Whether the certificate is one for this site: aborts of those who hold a public share of it do not count."""
        public = {holder for holder, dealer in self.public if dealer == site}
        dead = self.aborted(policy)
        return dead is None or len({line.site for line in dead.lines} - public) >= self.context.a

    def take(self, policy: AggregationPolicy, message: Abort) -> Effects:
        """An abort that came after the round."""
        if message.site not in self.context.sites:
            raise VerificationFailed("abort is of a site that was not there", where=f"site {message.site}")
        statements.verify(policy.entry(message.site), statements.abort(message.ctx, message.code), message.signature)
        if message.site in self.aborts:
            return ()
        self.aborts[message.site] = message
        return (Persist(records.AbortSeen(abort=message), self.context.round),)

    def request(self, signer: statements.Signer) -> messages.AbortRequest:
        signature = signer.sign(statements.abort_request(self.ctx))
        return messages.AbortRequest(context=self.context, signature=signature)


Certificates = tuple[list[AbortCertificate], list[RepeatCertificate]]


def certificates(policy: AggregationPolicy, known: Sequence[EarlierAttempt], cohort: Iterable[str]) -> Certificates:
    """What members of a cohort have not been shown yet of earlier attempts in which they were."""
    members = set(cohort)
    aborts: list[AbortCertificate] = []
    repeats: list[RepeatCertificate] = []
    for attempt in known:
        told = {site for later in known if later.kx and attempt.ctx in later.carried for site in later.context.sites}
        if not attempt.kx or not members & set(attempt.context.sites) - told:
            continue
        if (dead := attempt.aborted(policy)) is not None:
            aborts.append(dead)
        elif (one := attempt.certified(policy)) is not None:
            repeats.append(one)
    return aborts[-MOST_CERTIFICATES:], repeats[-MOST_CERTIFICATES:]


def sums(policy: AggregationPolicy, known: Sequence[EarlierAttempt]) -> tuple[EarlierSum, ...]:
    """The sums that exist or may exist, oldest first.

    What a plan has listed stays listed: its members have recorded it, although aborts that came later may show that
    there is none.
    """
    found = {
        (attempt.context.round, attempt.sites)
        for attempt in known
        if attempt.aborted(policy) is None and attempt.certified(policy) is not None
    }
    found |= {(told.round, told.sites) for attempt in known for told in attempt.context.sums}
    return tuple(EarlierSum(round=number, sites=sites) for number, sites in sorted(found))[-MAX_EARLIER_SUMS:]
