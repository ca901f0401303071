"""What a site checks in C5, the result, before its model changes; then the download and the audit of the sum.

One function for each rule, called by name, so that a test can switch off exactly one and show the attack that it stops.
The order is that of docs/spec/secure-aggregation.md, section 10: the header (signature, context, adverts, agreements,
opened secrets), the root of the sum, the next model, and chunks of the sum against the signed uploads. Other sections
are cited from the same page.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from lazaret.errors import PolicyViolation, RemoteProtocolError, VerificationFailed
from security import labels
from security.crypto import masking, merkle
from security.crypto.encoding import u64
from security.crypto.masking import OpenedMasks
from security.crypto.prg import Words
from security.identity.membership import AggregationPolicy, AuditMode
from security.secagg import certificate_checks, groups, statements
from security.secagg.certificates import Opened, Vote
from security.secagg.context import RoundContext
from security.secagg.messages import ChunkPiece, Result, SumFrame
from security.secagg.published import earlier_survivors, opened_masks, result_digests
from security.secagg.site import checks
from security.secagg.site.journal import AttemptMemory, Journal, NewestResult
from security.secagg.state import SumOutcome
from security.secrets import Secret


def check_result_signature(policy: AggregationPolicy, result_hash: bytes, signature: bytes) -> None:
    """The coordinator has signed R. If a chunk does not match the signed uploads, this signature is the evidence."""
    statements.verify(policy.coordinator_entry(), statements.result(result_hash), signature)


def check_result_context(policy: AggregationPolicy, context: RoundContext) -> None:
    """The attempt was one that the manifest allows, whether or not this site was in it (section 2)."""
    checks.check_plan_federation(policy, context)
    checks.check_plan_layout(policy, context)
    checks.check_plan_members(policy, context)
    checks.check_plan_thresholds(policy, context)
    checks.check_plan_single_history(policy, context)


def check_result_extends(head: NewestResult, context: RoundContext) -> None:
    """One chain: a result follows the one that this site has, and that one has a check certificate. Otherwise a wrong
    sum could be built upon before anybody has checked it."""
    if context.prev_result != head.link or context.state_hash != head.state_hash or context.round <= head.round:
        raise PolicyViolation("result does not follow the one this site has", where="result")
    if not head.certified:
        raise PolicyViolation("the result before this one has no check certificate", where="result")


def check_jump_context(policy: AggregationPolicy, head: NewestResult, context: RoundContext) -> None:
    """A later state of this run, made under any of its manifests, by no smaller quorum than this one demands (section
    11).

    No other check reads this context: with a quorum of zero, no acknowledgement at all would be needed.
    """
    if (context.federation, context.run) != (policy.federation, policy.run):
        raise PolicyViolation("state is of another federation or run", where="jump")
    if context.round <= head.round or context.layout_hash != policy.layout.layout_hash:
        raise PolicyViolation("state is not newer than this site's, or of another layout", where="jump")
    if context.t < policy.thresholds(context.n).t:
        raise PolicyViolation("state was made by too small a quorum", where="jump")


def check_result_memory(memory: AttemptMemory | None, kx: bytes, deals: bytes, site: str, result: Result) -> None:
    """What this site saw of the attempt is what the result says of it: same keys, same deals, its own upload or
    none."""
    if memory is None or memory.kx is None:
        return
    if memory.kx != kx or (memory.upload is not None and memory.upload.deals != deals):
        raise VerificationFailed("result is of other keys or deals than this site saw", where="result")
    root = next((line.root for line in result.uploads if line.site == site), None)
    if root is not None and (memory.upload is None or memory.upload.root != root):
        raise VerificationFailed("result counts an upload that this site did not make", where="result")


def check_result_survivors(context: RoundContext, sites: Sequence[str]) -> None:
    """The rules of C3 again, for sites that were not in the attempt."""
    checks.check_survivors_members(context, sites)
    checks.check_survivors_count(context, sites)


def check_result_opened(context: RoundContext, result: Result) -> None:
    """Every opened secret is the one behind its commitment or public key, so that the masks are those of the uploads.

    For each site exactly one kind: a survivor's seed, the mask key of a dropout. Both of one site would open its
    vector.
    """
    survivors = {line.site for line in result.uploads}
    dropped = [advert for advert in result.adverts if advert.site not in survivors]
    alive = [advert for advert in result.adverts if advert.site in survivors]
    if len(alive) != len(result.seeds) or len(dropped) != len(result.keys):
        raise VerificationFailed("result opens too many or too few secrets", where="result")
    for adverts, secrets, kind in ((alive, result.seeds, Opened.SEED), (dropped, result.keys, Opened.MASK_KEY)):
        for advert, secret in zip(adverts, secrets, strict=True):
            if not certificate_checks.opens(context, kind, Secret(secret), advert):
                raise VerificationFailed("opened secret is not the committed one", where=f"site {advert.site}")
    owed = earlier_survivors(result.adverts, survivors)
    if len(owed) != len(result.pairs):
        raise VerificationFailed("result opens too many or too few secrets of pairs", where="result")
    for (dealer, holder), pair in zip(owed, result.pairs, strict=True):
        if not certificate_checks.pair_opens(context, dealer, holder.site, Secret(pair)):
            raise VerificationFailed("opened secret of a pair is not that of the advert", where=f"site {dealer.site}")


def check_result_agreements(policy: AggregationPolicy, kx: bytes, survivors: bytes, result: Result) -> None:
    """A quorum agreed to exactly this set: there is no other sum of the attempt (section 13)."""
    context = result.context
    certificate_checks.check_agreements(
        policy, context.sites, context.t, kx=kx, survivors=survivors, agreements=result.agreements
    )


def check_sum_root(leaves: Sequence[bytes], root: bytes) -> None:
    """R names the root, so that all sites have received the same sum."""
    if merkle.root(leaves) != root:
        raise VerificationFailed("sum does not have the announced root", where="result")


def check_next_state(outcome: SumOutcome, result: Result) -> None:
    """The site computes verdict and model itself; the coordinator announces them and cannot choose them."""
    announced = (result.verdict, result.state_hash, result.movements)
    if (outcome.verdict, outcome.state_hash, outcome.movements) != announced:
        raise VerificationFailed("the announced model does not follow from the sum", where="result")


def check_chunk_path(piece: ChunkPiece, *, root: bytes, chunks: int) -> None:
    """A chunk of an upload as its site signed it: with made-up uploads any sum could be explained."""
    merkle.verify_inclusion(
        leaf=merkle.leaf_hash(piece.data), index=piece.chunk, size=chunks, path=piece.path, root=root
    )


class WrongSum(VerificationFailed):
    """A published sum is not the sum of the signed uploads; the coordinator's signature on it is the evidence."""


def check_chunk_sum(recomputed: Words, published: Words) -> None:
    """Whole numbers: the two are equal or the sum is wrong; there is no tolerance."""
    if not np.array_equal(recomputed, published):
        raise WrongSum(
            "a chunk of the published sum is not the sum of the uploads",
            where="result",
            hint="inform the consortium directly, not through the coordinator",
        )


def check_may_ack(journal: Journal, head: NewestResult) -> None:
    """One result for each round, and none for a round that this site has left by joining a later one.

    Two acknowledgements of different results would let two histories be certified.
    """
    if head.round < journal.high_water[0] or head.round < journal.acked_round:
        raise PolicyViolation("this site has joined a later round", where="acknowledgement")
    if head.round == journal.acked_round and journal.acked not in (b"", head.result):
        raise PolicyViolation("this site has acknowledged another result of the round", where="acknowledgement")


@dataclass(frozen=True, slots=True)
class CheckedHeader:
    """A result header that passed every check but those of the sum itself."""

    result: Result
    kx: bytes
    result_hash: bytes

    @property
    def survivors(self) -> tuple[str, ...]:
        return tuple(line.site for line in self.result.uploads)


def check_header(
    policy: AggregationPolicy, head: NewestResult, memory: AttemptMemory | None, site: str, result: Result
) -> CheckedHeader:
    """Check everything a header says, for a member of the cohort or for a site that catches up."""
    context = result.context
    kx, survivors, result_hash = result_digests(result)
    check_result_signature(policy, result_hash, result.signature)
    check_result_context(policy, context)
    check_result_extends(head, context)
    checks.check_adverts_cohort(context, result.adverts)
    if memory is None or memory.kx != kx:  # a member has checked them at C1, and KX binds their bodies
        checks.check_advert_signatures(policy, result.adverts)
    check_result_memory(memory, kx, result.deals, site, result)
    checked = CheckedHeader(result, kx, result_hash)
    check_result_survivors(context, checked.survivors)
    checks.check_groups(policy, checked.survivors)
    check_result_agreements(policy, kx, survivors, result)
    check_result_opened(context, result)
    return checked


def check_header_again(policy: AggregationPolicy, result: Result) -> CheckedHeader:
    """A header whose R this site has accepted before, for the audit that starts again after a restart.

    R does not cover the signatures in it. With bad ones, the evidence of a wrong sum would convince nobody (section
    10).
    """
    kx, survivors, result_hash = result_digests(result)
    check_result_signature(policy, result_hash, result.signature)
    check_result_agreements(policy, kx, survivors, result)
    return CheckedHeader(result, kx, result_hash)


class Download:
    """The sum of one result, frame by frame; with groups, one sum after the other."""

    def __init__(self, header: CheckedHeader, policy: AggregationPolicy) -> None:
        self.header = header
        layout = self._layout = policy.layout
        self.total: Words = np.empty(policy.sums * layout.words, dtype=layout.dtype)
        self._order = groups.sum_order(layout, policy.sums)
        self._leaves: dict[int, bytes] = {}

    @property
    def complete(self) -> bool:
        return len(self._leaves) == len(self._order)

    def take(self, frame: SumFrame) -> None:
        if frame.result != self.header.result_hash or self.complete or frame.index != self._next:
            raise RemoteProtocolError("frame is not the next one of this sum", where="result")
        if len(frame.data) != self._layout.frame_bytes(frame.index % self._layout.frames):
            raise RemoteProtocolError("frame has the wrong length", where="result")
        self.total[groups.frame_place(self._layout, frame.index)] = self._layout.ring.unpack(frame.data)
        self._leaves[frame.index] = merkle.leaf_hash(frame.data)

    @property
    def _next(self) -> int:
        return self._order[len(self._leaves)]

    @property
    def ready(self) -> int:
        """How many words from the start are complete: all before the next frame, because only the first frame is
        early. None can be used before the sums of all groups are there."""
        if len(self.total) > self._layout.words:
            return 0
        return self._layout.words if self.complete else self._next * self._layout.ring.frame_words

    def finish(self) -> Words:
        leaves = [leaf for _, leaf in sorted(self._leaves.items())]
        check_sum_root(leaves, self.header.result.sum_root)
        return self.total


@dataclass
class ChunkAudit:
    """One site's part in checking a sum: the same chunk of all uploads is added, unmasked and compared (section 10).

    :ivar vote: what this site thinks of the model that follows; NONE until it has looked at it.
    :ivar wrong: the group whose sum was found wrong; 0 without groups.
    """

    policy: AggregationPolicy
    site: str
    header: CheckedHeader
    total: Words = field(repr=False)
    todo: list[int] = field(default_factory=list)
    good: set[int] = field(default_factory=set)
    _masks: dict[int, OpenedMasks] = field(default_factory=dict, repr=False)
    pieces: dict[str, ChunkPiece] = field(default_factory=dict, repr=False)
    wrong: int = 0
    vote: Vote = Vote.NONE
    _partial: dict[int, Words] = field(default_factory=dict, repr=False)

    def assign(self, key: Secret, absent: Collection[str] = (), *, c: int) -> None:
        """Decide which chunks to look at; with `absent` sites, take over what would have been theirs.

        :param c: of the manifest in force, which decides how many must look at each chunk. It may be newer than the
            one under which the sum was made.
        """
        wanted = assigned_chunks(self.policy, self.header, self.site, key, absent, c=c)
        self.todo += [chunk for chunk in wanted if chunk not in self.good and chunk not in self.todo]

    def restart_chunk(self) -> None:
        """Forget the pieces of the chunk under audit: its coordinator sends all of them again."""
        self._partial, self.pieces = {}, {}

    def take(self, piece: ChunkPiece) -> bool:
        """Add a piece; returns whether the current chunk is now complete and correct."""
        roots = {line.site: line.root for line in self.header.result.uploads}
        if not self.todo or piece.result != self.header.result_hash or piece.chunk != self.todo[0]:
            raise RemoteProtocolError("piece is not of the chunk that was asked for", where="audit")
        if piece.site not in roots or piece.site in self.pieces:
            raise RemoteProtocolError("piece is of no survivor, or came before", where="audit")
        if len(piece.data) != self.policy.layout.frame_bytes(piece.chunk):
            raise RemoteProtocolError("piece has the wrong length", where="audit")
        check_chunk_path(piece, root=roots[piece.site], chunks=self.policy.chunks)
        words = self.policy.layout.ring.unpack(piece.data)
        number = self.policy.sum_of(piece.site)
        if number not in self._partial:
            self._partial[number] = np.zeros(len(words), dtype=self.total.dtype)
        self._partial[number] += words
        self.pieces[piece.site] = piece
        if len(self.pieces) < len(roots):
            return False
        self._finish_chunk()
        return True

    def _finish_chunk(self) -> None:
        index, layout, result = self.todo[0], self.policy.layout, self.header.result
        for number, group in enumerate(self.policy.parts(result.context.sites)):
            if number not in self._masks:
                self._masks[number] = opened_masks(
                    result.context, self.header.kx, self.header.survivors, result, group=group
                )
            self.wrong = number
            masking.unmask_chunk(self._partial[number], self._masks[number], layout.ring, index=index)
            place = groups.frame_place(layout, number * layout.frames + index)
            check_chunk_sum(self._partial[number], self.total[place])
        self.good.add(self.todo.pop(0))
        self._partial, self.pieces = {}, {}

    @property
    def bitmap(self) -> bytes:
        return certificate_checks.bitmap_of(self.good, self.policy.chunks)


def assigned_chunks(
    policy: AggregationPolicy,
    header: CheckedHeader,
    site: str,
    key: Secret,
    absent: Collection[str] = (),
    *,
    c: int | None = None,
) -> list[int]:
    """Covered: the chunks for which this site is among the first c + 1 by hash, so that each chunk has an honest
    checker. Sampled: a few that only this site can predict.

    :param key: a secret of this site that outlives restarts.
    :param absent: members that do not answer; their chunks go to the next ones in the order.
    """
    if policy.audit is AuditMode.SAMPLED:
        return drawn_chunks(key, header.result_hash, policy)
    present = [name for name in header.result.context.sites if name not in absent]
    if site not in present:
        return []
    chosen = []
    for chunk in range(policy.chunks):
        own = certificate_checks.audit_rank(header.result_hash, chunk, site)
        before = sum(certificate_checks.audit_rank(header.result_hash, chunk, name) < own for name in present)
        if before <= (policy.c if c is None else c):
            chosen.append(chunk)
    return chosen


def drawn_chunks(key: Secret, result_hash: bytes, policy: AggregationPolicy) -> list[int]:
    """The chunks of a sampled audit: the same ones however often the result is shown, also after a restart.

    They follow from R and a key on this site's disk. The coordinator cannot know them when it signs R, and cannot have
    others drawn by withholding a chunk and sending the result again (section 10).
    """
    wanted: set[int] = set()
    draws = 0
    while len(wanted) < min(policy.spot_check_chunks, policy.chunks):
        digest = hmac.digest(key.reveal(), labels.SPOT_CHECK + result_hash + u64(draws), "sha256")
        wanted.add(int.from_bytes(digest[:8], "big") % policy.chunks)
        draws += 1
    return sorted(wanted)
