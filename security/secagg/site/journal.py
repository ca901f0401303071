"""What a site remembers: its write-ahead log, replayed (docs/spec/secure-aggregation.md, section 9).

`apply` is the only way to change it, so that a restarted site, which applies the same records, has the same journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from lazaret.errors import LocalProtocolError
from security.identity.membership import AggregationPolicy
from security.secagg import records
from security.secagg.certificates import Advert
from security.secagg.context import RoundContext
from security.secagg.fields import Wire
from security.secagg.records import AttemptOutcome

# Different vectors on one model without differential privacy (section 8). Where sites vote, a model may stand for a few
# rounds although nobody cheats: scores on small validation sides vary.
MAX_UPDATES_ON_ONE_STATE: Final = 3
MAX_UPDATES_WITH_VOTES: Final = 6


def most_updates(*, vote: bool) -> int:
    """How many different updates a site sends on one model before it waits for its operator."""
    return MAX_UPDATES_WITH_VOTES if vote else MAX_UPDATES_ON_ONE_STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptMemory:
    """What is recorded of one attempt that the site joined.

    :ivar disclosed: the holders whose shares of this site's secrets are public.
    :ivar settled: the one set that can have a sum, empty if no set can; None until that is known.
    """

    context: RoundContext
    advert: Advert
    kx: bytes | None = None
    disclosed: tuple[str, ...] = ()
    upload: records.UploadBound | None = None
    agreed: records.Agreed | None = None
    outcome: AttemptOutcome | None = None
    settled: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestResult:
    """The newest link of the chain of results."""

    round: int
    result: bytes
    state_hash: bytes
    trained_on: bytes = bytes(32)
    quorum: int = 0
    survivors: tuple[str, ...] = ()
    certified: bool = False
    movements: bytes = b""
    movements_before: bytes = b""
    voted: bytes = b""

    @property
    def link(self) -> bytes:
        """What the next context names: the result or, where sites vote, the result together with its vote set."""
        return self.voted or self.result


def score_due(head: NewestResult, round_number: int) -> bool:
    """Whether scores of the newest model go into the sum of this round: in the round right after the one that made it.

    So they are in one sum at most. On the same model a score is the same number each time: after a void or a lost
    round, or a vote against a model, two sums over other sites would show one site's score as their difference. It
    depends on the chain alone, so that all sites of a cohort add their scores, or none does.
    """
    return head.round > 0 and head.trained_on != head.state_hash and round_number == head.round + 1


@dataclass
class Journal:
    """Everything that must survive a restart. Nothing in it is secret, except the sealed answers.

    :ivar sequence: number of the newest advert; it never decreases.
    :ivar high_water: highest round and attempt that were joined or aborted; a Plan must be above it.
    :ivar released: attempts in which shares were released: they can never be aborted.
    :ivar aborted: attempts with the code of the signed ABORT: they can never be released.
    :ivar peers: newest advert of each other site, to notice a peer whose state is an old copy.
    :ivar uploaded: digests of the updates that were sent on the state `uploaded_on` (section 8).
    :ivar permitted: how often the operator has permitted further updates on that state.
    :ivar sums: the newest sums that exist, or that this site has released shares for.
    :ivar aside: a model, and the last round on it whose sums the operator has set aside.
    :ivar acked: the newest result that this site has acknowledged, of `acked_round`, and its `vote` on it.
    :ivar last: newest link of the chain of results.
    """

    manifest: records.ManifestSeen | None = None
    sequence: int = 0
    high_water: tuple[int, int] = (0, 0)
    attempts: dict[bytes, AttemptMemory] = field(default_factory=dict)
    released: set[bytes] = field(default_factory=set)
    aborted: dict[bytes, int] = field(default_factory=dict)
    peers: dict[str, Advert] = field(default_factory=dict)
    update: records.UpdateBound | None = None
    uploaded_on: bytes = b""
    uploaded: set[bytes] = field(default_factory=set)
    permitted: int = 0
    sums: list[records.SumSeen] = field(default_factory=list)
    aside: tuple[bytes, int] = (b"", 0)
    last: NewestResult | None = None
    acked_round: int = 0
    acked: bytes = b""
    vote: int = 0
    stopped: str | None = None

    def updates_left(self, *, vote: bool) -> int:
        """How many different updates on the newest model the operator of this site still permits, without DP."""
        return max(0, most_updates(vote=vote) * (1 + self.permitted) - len(self.uploaded))

    @classmethod
    def replay(cls, found: Iterable[Wire]) -> Journal:
        journal = cls()
        for record in found:
            journal.apply(record)
        return journal

    def head(self, policy: AggregationPolicy) -> NewestResult:
        """The newest link, or the manifest as the start of the chain."""
        if self.last is not None:
            return self.last
        return NewestResult(round=0, result=policy.manifest_hash, state_hash=policy.initial_state_hash, certified=True)

    def apply(self, record: Wire) -> None:
        match record:
            case records.ManifestSeen():
                self.manifest = record
            case records.UpdateBound():
                self.update = record
            case records.Joined():
                self._join(record)
            case records.KeysSeen():
                self._change(record.ctx, kx=record.kx)
                self.peers |= {advert.site: advert for advert in record.adverts}
            case records.ShareDisclosed():
                known = self.attempts[record.ctx].disclosed if record.ctx in self.attempts else ()
                self._change(record.ctx, disclosed=(*known, record.holder))
            case records.UploadBound():
                self._change(record.ctx, upload=record)
                self._count_upload(record.state_hash, record.update)
            case records.Agreed():
                self._change(record.ctx, agreed=record)
            case records.AttemptEnded():
                self._end(record)
            case records.AttemptSettled():
                self._settle(record)
            case records.ReplyErased():
                self._change(record.ctx, agreed=None)
            case records.Stopped():
                self.stopped = record.reason.decode("utf-8", "replace")
            case records.Remembered():
                self._recall(record)
            case _:
                self._apply_chain(record)

    def _apply_chain(self, record: Wire) -> None:
        match record:
            case records.ResultAccepted():
                self._count_sum(record.round, record.trained_on, record.survivors)
                self.last = NewestResult(
                    round=record.round,
                    result=record.result,
                    state_hash=record.state_hash,
                    trained_on=record.trained_on,
                    quorum=record.quorum,
                    survivors=record.survivors,
                    movements=record.movements,
                    movements_before=record.movements_before,
                )
            case records.VotesTaken():
                self._vote(record)
            case records.ResultCertified():
                if self.last is not None and self.last.result == record.result:
                    self.last = replace(self.last, certified=True)
            case records.UpdatesPermitted():
                self.permitted += record.state_hash == self.uploaded_on
                # The operator answers for what further sums on this model show together with the earlier ones.
                self.sums = [seen for seen in self.sums if seen.state_hash != record.state_hash]
                self.aside = record.state_hash, max(self.high_water[0], self.last.round if self.last else 0)
            case records.ResultAcked():
                self.acked_round, self.acked, self.vote = record.round, record.result, record.vote
            case _:
                raise LocalProtocolError(f"{type(record).__name__} is not a site's record", where="journal")

    def _vote(self, record: records.VotesTaken) -> None:
        """Against a model: the one before it stands, with the lengths of steps before it, as after a void sum."""
        if self.last is None or self.last.result != record.result:
            return
        head = replace(self.last, certified=True, voted=record.link)
        self.last = (
            head if record.accepted else replace(head, state_hash=head.trained_on, movements=head.movements_before)
        )

    def _join(self, record: records.Joined) -> None:
        self.sequence = max(self.sequence, record.advert.sequence)
        self.high_water = max(self.high_water, record.context.place)
        self.attempts[record.context.ctx()] = AttemptMemory(context=record.context, advert=record.advert)

    def _change(self, ctx: bytes, **changes: object) -> None:
        if ctx in self.attempts:
            self.attempts[ctx] = replace(self.attempts[ctx], **changes)  # type: ignore[arg-type]

    def _count_upload(self, state_hash: bytes, digest: bytes) -> None:
        if state_hash != self.uploaded_on:
            self.uploaded_on, self.uploaded, self.permitted = state_hash, set(), 0
        self.uploaded.add(digest)

    def _count_sum(
        self, number: int, state_hash: bytes, sites: tuple[str, ...], ctx: bytes = bytes(32), by: bytes = bytes(32)
    ) -> None:
        """One sum counts once. What is only released in the attempt `ctx` may yet turn out to have none."""
        seen = records.SumSeen(round=number, state_hash=state_hash, sites=sites, ctx=ctx, shown_by=by)
        for at, known in enumerate(self.sums):
            if (known.round, known.state_hash, known.sites) == (number, state_hash, sites):
                certain = seen if any(by) else replace(known, ctx=ctx)
                self.sums[at] = known if any(ctx) else certain
                return
        self.sums = [*self.sums, seen][-records.MAX_SUMS :]

    def _settle(self, record: records.AttemptSettled) -> None:
        self._change(record.ctx, settled=record.sites)
        memory = self.attempts.get(record.ctx)
        if record.sites and memory is not None:
            context = memory.context
            self._count_sum(context.round, context.state_hash, record.sites, by=context.coordinator_cert)
        elif not record.sites:
            self.sums = [seen for seen in self.sums if seen.ctx != record.ctx]

    def _end(self, record: records.AttemptEnded) -> None:
        self.high_water = max(self.high_water, (record.round, record.attempt))
        self._change(record.ctx, outcome=AttemptOutcome(record.outcome))
        if record.outcome == AttemptOutcome.RELEASED:
            self.released.add(record.ctx)
            memory = self.attempts.get(record.ctx)
            if memory is not None and memory.agreed is not None:
                self._count_sum(record.round, memory.context.state_hash, memory.agreed.sites, record.ctx)
        else:
            self.aborted[record.ctx] = record.code
            # ABORT promises never to release, so the sealed answer is dropped together with it.
            if ctx_memory := self.attempts.get(record.ctx):
                self.attempts[record.ctx] = replace(ctx_memory, agreed=None)

    def _recall(self, record: records.Remembered) -> None:
        self.sequence = record.sequence
        self.high_water = (record.round, record.attempt)
        self.released = set(record.released)
        self.peers = {advert.site: advert for advert in record.peers}
        self.uploaded_on, self.uploaded = record.state_hash, set(record.updates)
        self.permitted, self.sums = record.permitted, list(record.sums)
        self.acked_round, self.vote = record.acked_round, record.vote
        self.aside = record.aside_on if any(record.aside_on) else b"", record.aside
        self.acked = record.acked if any(record.acked) else b""

    def open_attempts(self) -> list[AttemptMemory]:
        """Attempts without an outcome, oldest first."""
        return [memory for memory in self.attempts.values() if memory.outcome is None]

    def of_round(self, number: int) -> list[AttemptMemory]:
        """Every attempt of a round that this site joined."""
        return [memory for memory in self.attempts.values() if memory.context.round == number]

    def unsettled(self, state_hash: bytes) -> list[AttemptMemory]:
        """Attempts on a model in which this site has dealt shares, and of which it does not know what became."""
        return [
            memory
            for memory in self.attempts.values()
            if memory.context.state_hash == state_hash
            and memory.kx is not None
            and memory.settled is None
            and not self.set_aside(state_hash, memory.context.round)
        ]

    def set_aside(self, state_hash: bytes, number: int) -> bool:
        """Whether the operator answers for what a sum of this round shows together with further ones on the model."""
        return self.aside[0] == state_hash and number <= self.aside[1]

    def by_kx(self, kx: bytes) -> AttemptMemory | None:
        """The attempt with this KX, if it is still remembered."""
        return next((memory for memory in self.attempts.values() if memory.kx == kx), None)

    def compacted(self, *, done_round: int, standing: Iterable[bytes] = ()) -> tuple[Wire, ...]:
        """The records that give this journal without the attempts of rounds up to `done_round`.

        The sealed answers of those rounds are then in no record, which is how they are erased. Of attempts on the
        models `standing` it stays known that they were, until they are settled.
        """
        kept: list[Wire] = [self.manifest] if self.manifest else []
        kept.append(
            records.Remembered(
                sequence=self.sequence,
                round=self.high_water[0],
                attempt=self.high_water[1],
                released=tuple(sorted(self.released)),
                peers=tuple(self.peers[site] for site in sorted(self.peers)),
                state_hash=self.uploaded_on or bytes(32),
                updates=tuple(sorted(self.uploaded)),
                permitted=self.permitted,
                sums=tuple(self.sums),
                acked_round=self.acked_round,
                acked=self.acked or bytes(32),
                vote=self.vote,
                aside_on=self.aside[0] or bytes(32),
                aside=self.aside[1],
            )
        )
        if self.last is not None:
            kept += self._head_records(self.last)
        if self.update is not None and self.update.round > done_round:
            kept.append(self.update)
        unsettled = {memory.context.ctx() for state in standing for memory in self.unsettled(state)}
        for ctx, memory in self.attempts.items():
            if memory.context.round > done_round:
                kept += self._attempt_records(memory)
            elif ctx in unsettled:
                kept += self._attempt_records(replace(memory, upload=None, agreed=None))
        if self.stopped is not None:
            kept.append(records.Stopped(reason=self.stopped.encode()[:256]))
        return tuple(kept)

    def _head_records(self, head: NewestResult) -> list[Wire]:
        accepted = records.ResultAccepted(
            round=head.round,
            result=head.result,
            prev_result=bytes(32),
            trained_on=head.trained_on,
            state_hash=head.state_hash,
            quorum=head.quorum,
            verdict=0,
            survivors=head.survivors,
            movements=head.movements,
            movements_before=head.movements_before,
        )
        if head.voted:
            # The state is the one after the vote, whatever its outcome was.
            return [accepted, records.VotesTaken(result=head.result, link=head.voted, accepted=1)]
        return [accepted, records.ResultCertified(result=head.result)] if head.certified else [accepted]

    def _attempt_records(self, memory: AttemptMemory) -> list[Wire]:
        ctx = memory.context.ctx()
        found: list[Wire | None] = [
            records.Joined(context=memory.context, advert=memory.advert),
            records.KeysSeen(ctx=ctx, kx=memory.kx, adverts=()) if memory.kx else None,
            *(records.ShareDisclosed(ctx=ctx, holder=holder) for holder in memory.disclosed),
            memory.upload,
            memory.agreed,
        ]
        if memory.outcome is not None:
            found.append(
                records.AttemptEnded(
                    ctx=ctx,
                    round=memory.context.round,
                    attempt=memory.context.attempt,
                    outcome=memory.outcome,
                    code=self.aborted.get(ctx, 0),
                )
            )
        if memory.settled is not None:
            found.append(records.AttemptSettled(ctx=ctx, sites=memory.settled))
        return [record for record in found if record is not None]
