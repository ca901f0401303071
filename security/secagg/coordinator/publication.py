"""A published result at the coordinator: header, acknowledgements, and chunks for the sites that check it.

docs/spec/secure-aggregation.md, section 10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lazaret.errors import RemoteProtocolError
from security.crypto.prg import Words
from security.identity.membership import AggregationPolicy
from security.secagg import certificate_checks, groups, published, records, statements
from security.secagg import state as states
from security.secagg.certificates import Ack, CheckCertificate, NamedRoot, Vote
from security.secagg.coordinator.spool import Spool
from security.secagg.coordinator.uploads import CoordinatorCore, Dealing, Uploads
from security.secagg.effects import Advanced, Effects, Persist, SaveState, Send, SendFrames
from security.secagg.layout import Layout, Vector
from security.secagg.messages import ChunkRequest, Quorum, Result, SumFrame, Survivors
from security.secagg.published import OpenedSecrets
from security.secagg.statements import Signer


def build_result(
    signer: Signer,
    dealing: Dealing,
    survivors: Survivors,
    quorum: Quorum,
    secrets: OpenedSecrets,
    *,
    sum_root: bytes,
    outcome: states.SumOutcome,
) -> Result:
    """C5, signed."""
    unsigned = Result(
        context=dealing.context,
        adverts=secrets.adverts,
        deals=dealing.deals,
        uploads=tuple(NamedRoot(site=line.site, root=line.root) for line in survivors.uploads),
        agreements=quorum.agreements,
        verdict=int(outcome.verdict),
        sum_root=sum_root,
        seeds=secrets.seeds,
        keys=secrets.keys,
        pairs=secrets.pairs,
        state_hash=outcome.state_hash,
        movements=outcome.movements,
        signature=bytes(64),
    )
    _, _, result_hash = published.result_digests(unsigned)
    return replace(unsigned, signature=signer.sign(statements.result(result_hash)))


class Publication:
    """A published result until it is covered."""

    def __init__(self, policy: AggregationPolicy, result: Result, uploads: Uploads | None, total: Words) -> None:
        self._policy = policy
        self.result = result
        self.total = total
        self._uploads = uploads
        _, _, self.result_hash = published.result_digests(result)
        self.acks: dict[str, Ack] = {}
        self._closed = False

    @property
    def survivors(self) -> tuple[str, ...]:
        return tuple(line.site for line in self.result.uploads)

    def sum_to(self, site: str) -> SendFrames:
        return SendFrames(site, partial(sum_frames, self.result_hash, self.total, self._policy.layout))

    def shown_to(self, sites: Sequence[str], outcome: states.SumOutcome) -> Effects:
        """C5: the state is kept, the result recorded, and both shown to the cohort."""
        result, number = self.result, self.result.context.round
        total = groups.everything(self._policy.layout, self.total)
        moved = Advanced(
            number, self.result_hash, result.state_hash, outcome.verdict, self.survivors, total, outcome.state
        )
        shown = Persist(records.ResultShown(result=result), number)
        sent = (effect for site in sites for effect in (Send(result, to=site), self.sum_to(site)))
        return SaveState(result.state_hash, outcome.state), shown, moved, *sent

    def take_ack(self, ack: Ack) -> CheckCertificate | None:
        """Take an acknowledgement; returns the certificate if the result is now covered."""
        certificate_checks.check_ack(self._policy, ack, result=self.result_hash, state_hash=self.result.state_hash)
        self.acks[ack.site] = ack
        return self.certificate()

    def certificate(self) -> CheckCertificate | None:
        """What the next Plan carries, once there is enough."""
        chunks = self._policy.chunks
        seen = [
            (ack.site, certificate_checks.chunks_in(ack.bitmap, chunks))
            for ack in self.acks.values()
            if self._policy.lists(ack.site)
        ]
        if not certificate_checks.covers(self._policy, seen, quorum=self.result.context.t):
            return None
        if not self._policy.vote:
            return CheckCertificate(acks=tuple(self.acks[site] for site in sorted(self.acks)))
        # Sites take no vote set with a voter that has left.
        votes = tuple(self.acks[site] for site in sorted(self.acks) if self._policy.lists(site))
        return CheckCertificate(acks=votes) if self._decided(votes) else None

    def _decided(self, votes: Sequence[Ack]) -> bool:
        """Whether the votes so far decide: enough accept, too many do not, or no more are waited for."""
        quorum = self.result.context.t
        if certificate_checks.accepted(votes, quorum):
            return True
        listed = sum(self._policy.lists(entry.site) for entry in self._policy.roster)
        refusals = sum(ack.vote == Vote.REFUSE for ack in votes)
        return len(votes) >= quorum and (self._closed or refusals > listed - quorum)

    def close_vote(self) -> CheckCertificate | None:
        """Wait for no further vote, if there are enough; returns the certificate."""
        self._closed = True
        return self.certificate()

    def serve(self, site: str, request: ChunkRequest) -> SendFrames:
        """One chunk of every upload, read from the spool when it is sent."""
        if request.result != self.result_hash or self._uploads is None or request.chunk >= self._policy.chunks:
            raise RemoteProtocolError("there is no such chunk of this result", where="audit")
        uploads = self._uploads
        frames = partial(uploads.pieces, self.result_hash, request.chunk, self.survivors)
        return SendFrames(site, frames, check=True)


def sum_frames(result: bytes, words: Words, layout: Layout) -> Iterator[SumFrame]:
    """A sum as it is sent. Between two frames none of them is held here: the way out may be slow."""
    for index in groups.sum_order(layout, len(words) // layout.words):
        place = groups.frame_place(layout, index)
        yield SumFrame(result=result, index=index, data=layout.ring.pack(words[place]).tobytes())


def spool_sum(spool: Spool, root: bytes, total: Words, layout: Layout) -> None:
    """Keep a sum under its root, for restarts and for sites that catch up."""
    for index, data in groups.sum_frames_of(layout, total):
        spool.write(root, index, data)
    spool.seal(root)


def read_sum(spool: Spool, root: bytes, layout: Layout, sums: int = 1) -> Words:
    """A sum from the spool.

    :param sums: how many groups it has.
    """
    total: Words = np.empty(sums * layout.words, dtype=layout.dtype)
    for index in range(sums * layout.frames):
        place = groups.frame_place(layout, index)
        # The last frame of a group's sum is shorter than its room in the file, and another group's follows.
        data = spool.read(root, index)[: (place.stop - place.start) * layout.ring.word_bytes]
        total[place] = layout.ring.unpack(data)
    return total


def publish(
    core: CoordinatorCore,
    dealing: Dealing,
    survivors: Survivors,
    quorum: Quorum,
    secrets: OpenedSecrets,
    uploads: Uploads,
    model: Vector,
) -> tuple[Publication, states.SumOutcome]:
    """An unmasked sum becomes a signed result, and the next model: the sum is on disk first."""
    policy, total = core.policy, uploads.total()
    outcome = groups.outcome_of(
        policy.layout,
        policy.groups,
        model,
        total,
        survivors=tuple(line.site for line in survivors.uploads),
        rule=policy.movement,
        movements=core.movements,
    )
    root = groups.sum_root(policy.layout, total)
    result = build_result(core.signer, dealing, survivors, quorum, secrets, sum_root=root, outcome=outcome)
    spool_sum(core.spool, root, total, policy.layout)
    return Publication(policy, result, uploads, total), outcome
