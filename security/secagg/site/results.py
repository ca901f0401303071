"""How a site takes over results: header, sum, next model, audit, acknowledgement; and the evidence of a wrong sum.

Sections are those of docs/spec/secure-aggregation.md: 10 for results, 11 for a site that was away and catches up, by
one result after the other or by one certified state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np

from lazaret.errors import CodecError, PolicyViolation, RemoteProtocolError, VerificationFailed
from security.crypto import masking, merkle
from security.crypto.ring import FRAME_BYTES
from security.identity.membership import AggregationPolicy
from security.secagg import certificate_checks, groups, published, records, statements
from security.secagg import state as states
from security.secagg.certificates import Ack, CheckCertificate, Vote
from security.secagg.context import SumVerdict
from security.secagg.effects import (
    Advanced,
    AskVote,
    Certified,
    Compact,
    DraftState,
    Effect,
    Effects,
    Isolated,
    SaveState,
    VotedDown,
    in_order,
)
from security.secagg.fields import Bounded, Many, Nested, Small, Wire
from security.secagg.layout import Vector
from security.secagg.messages import (
    AuditOrder,
    ChunkPiece,
    ChunkRequest,
    Jump,
    Path,
    Result,
    ResultCertificate,
    StateFrame,
    SumFrame,
    TrainOrder,
)
from security.secagg.published import opened_masks
from security.secagg.site import differences, entries, result_checks
from security.secagg.site.attempt import SiteCore
from security.secagg.site.journal import Journal
from security.secagg.site.result_checks import CheckedHeader, ChunkAudit, Download, check_header

# Evidence of a wrong sum. Anybody with the manifest can check it: the coordinator signed the result, a quorum signed
# the roots of the uploads, and the chunk is not their sum. Nothing in it is secret: uploads are masked, and the opened
# masks are in the result.

# The first line of such a file, so that a tool can distinguish it from other proofs.
HEADING: Final = b"lazaret wrong-sum proof 1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongSumEvidence(Wire):
    """A chunk of a published sum, and the same chunk of every upload in that sum.

    :ivar chunk: its place among the frames of all sums, one group's after the other.
    """

    result: Annotated[Result, Nested(Result)]
    chunk: Small
    published: Annotated[bytes, Bounded(FRAME_BYTES)]
    path: Path
    pieces: Annotated[tuple[ChunkPiece, ...], Many(Nested(ChunkPiece))]

    @classmethod
    def of(cls, audit: ChunkAudit) -> WrongSumEvidence:
        """From the chunk under audit, when all its pieces have arrived."""
        result, layout = audit.header.result, audit.policy.layout
        chunk = audit.wrong * layout.frames + audit.todo[0]
        frames = [data for _, data in groups.sum_frames_of(layout, audit.total)]
        tree = merkle.Tree([merkle.leaf_hash(frame) for frame in frames])
        path = tree.inclusion_path(chunk)
        part = audit.policy.parts(audit.header.survivors)[audit.wrong]
        pieces = tuple(audit.pieces[site] for site in part)
        return cls(result=result, chunk=chunk, published=frames[chunk], path=path, pieces=pieces)

    def file(self) -> bytes:
        """The bytes of the evidence file."""
        return HEADING + self.to_bytes()

    @classmethod
    def parse(cls, data: bytes) -> WrongSumEvidence:
        """Read an evidence file."""
        if not data.startswith(HEADING):
            raise CodecError("not an evidence file of a wrong sum")
        return cls.from_bytes(data.removeprefix(HEADING))

    def verify(self, policy: AggregationPolicy) -> None:
        """Check it with the manifest alone.

        :raises VerificationFailed: if it does not show that the published sum is wrong.
        """
        result, chunks = self.result, policy.chunks * policy.sums
        kx, survivors, result_hash = published.result_digests(result)
        result_checks.check_result_signature(policy, result_hash, result.signature)
        result_checks.check_result_agreements(policy, kx, survivors, result)
        result_checks.check_result_opened(result.context, result)
        leaf = merkle.leaf_hash(self.published)
        merkle.verify_inclusion(leaf=leaf, index=self.chunk, size=chunks, path=self.path, root=result.sum_root)
        number, index = divmod(self.chunk, policy.chunks)
        alive = [line.site for line in result.uploads]
        part, group = (policy.parts(sites)[number] for sites in (alive, result.context.sites))
        roots = {line.site: line.root for line in result.uploads if line.site in part}
        if [piece.site for piece in self.pieces] != list(roots) or any(p.chunk != index for p in self.pieces):
            raise VerificationFailed("pieces are not those of the survivors", where="evidence")
        if {len(data) for data in (self.published, *(piece.data for piece in self.pieces))} != {
            policy.layout.frame_bytes(index)
        }:
            raise VerificationFailed("a piece is not as long as the chunk", where="evidence")
        ring = policy.layout.ring
        recomputed = np.zeros(len(self.published) // ring.word_bytes, dtype=ring.dtype)
        for piece in self.pieces:
            result_checks.check_chunk_path(piece, root=roots[piece.site], chunks=policy.chunks)
            recomputed += ring.unpack(piece.data)
        masks = opened_masks(result.context, kx, alive, result, group=group)
        masking.unmask_chunk(recomputed, masks, ring, index=index)
        if ring.pack(recomputed).tobytes() == self.published:
            raise VerificationFailed("the chunk is the sum of the uploads: it is not wrong", where="evidence")


class Intake:
    """The newest model, the result that is arriving to replace it, and this site's part in checking it."""

    def __init__(self, core: SiteCore, model: Vector, before: Vector | None = None) -> None:
        self.core = core
        self.model = model
        self._before = before  # stands again if the sites vote against `model`
        self.audit: ChunkAudit | None = None
        self._download: Download | None = None
        self._successor: states.Successor | None = None
        self._jump: tuple[Jump, Vector, int] | None = None
        if states.state_hash(model) != core.head.state_hash:
            raise PolicyViolation("the loaded model is not the newest one accepted", where="start")

    def header(self, result: Result) -> Effects:
        """Check a header; the frames of its sum follow."""
        self._successor = None
        _, _, result_hash = published.result_digests(result)
        if result_hash == self.core.head.result and not self.core.head.certified:
            self._download = Download(self._known_header(result), self.core.policy)
            return ()
        memory = self.core.journal.attempts.get(result.context.ctx())
        checked = check_header(self.core.policy, self.core.head, memory, self.core.site, result)
        self._download = Download(checked, self.core.policy)
        return ()

    def _known_header(self, result: Result) -> CheckedHeader:
        """The accepted result is shown again. The header that was checked first stays: R does not cover signatures,
        and the evidence of a wrong sum needs good ones. After a restart there is none, and it is checked again."""
        if self.audit is not None and self.audit.header.result_hash == self.core.head.result:
            return self.audit.header
        return result_checks.check_header_again(self.core.policy, result)

    def frame(self, frame: SumFrame) -> tuple[Effects, bool]:
        """Take a frame of the sum; returns whether it was the last one and the model has moved."""
        download = self._download
        if download is None:
            raise RemoteProtocolError("frame of a sum without a header", where="result")
        download.take(frame)
        if download.complete:
            self._download = None  # also if a check below refuses the sum: it takes no other frame
        if download.header.result_hash == self.core.head.result:
            if not download.complete:
                return (), False
            download.finish()
            return self._begin_audit(download), True
        policy = self.core.policy
        if policy.sums > 1:
            return (self._advance(download), True) if download.complete else ((), False)
        if self._successor is None:
            self._successor = states.Successor(policy.layout, self.model, download.total)
        start, values = self._successor.extend(download.ready)
        draft = (DraftState(start, values),) if len(values) else ()
        if not download.complete:
            return draft, False
        successor, self._successor = self._successor, None
        return (*draft, *self._advance(download, successor)), True

    def _advance(self, download: Download, successor: states.Successor | None = None) -> Effects:
        header, result, policy = download.header, download.header.result, self.core.policy
        total = download.finish()
        rule, known = policy.movement, self.core.head.movements
        if successor is not None:
            outcome = successor.outcome(survivors=len(header.survivors), rule=rule, movements=known)
        else:
            outcome = groups.outcome_of(
                policy.layout,
                policy.groups,
                self.model,
                total,
                survivors=header.survivors,
                rule=rule,
                movements=known,
            )
        result_checks.check_next_state(outcome, result)
        state_hash, good = outcome.state_hash, outcome.verdict is SumVerdict.GOOD
        accepted = records.ResultAccepted(
            round=result.context.round,
            result=header.result_hash,
            prev_result=result.context.prev_result,
            trained_on=result.context.state_hash,
            state_hash=state_hash,
            quorum=result.context.t,
            verdict=outcome.verdict,
            survivors=header.survivors,
            movements=outcome.movements,
            movements_before=known,
        )
        self._before = self.model if policy.vote else None
        before = differences.exposures(self.core.policy, self.core.journal.sums, self.core.site)
        self.model = outcome.state
        # The draft was made before the whole sum was there, without the caps.
        saved = SaveState(state_hash, outcome.state, drafted=successor is not None and good and not outcome.capped)
        effects: list[Effect] = [saved, self.core.record(accepted)]
        effects.append(
            Advanced(
                result.context.round,
                header.result_hash,
                state_hash,
                outcome.verdict,
                header.survivors,
                groups.everything(policy.layout, total),
                outcome.state,
            )
        )
        exposed = differences.exposures(self.core.policy, self.core.journal.sums, self.core.site)
        for what, height in exposed.items():
            if height >= differences.ALARM_LEVERAGE and height > before[what]:
                effects.append(Isolated(result.context.round, height, what))
        # The answers of this round are not needed any more; what is not in the compacted log is erased (section 9).
        effects.append(self._forget())
        return (*effects, *self._begin_audit(download))

    def _begin_audit(self, download: Download) -> Effects:
        if self.audit is not None and self.audit.header.result_hash == download.header.result_hash:
            self.audit.restart_chunk()
            self.audit.assign(self.core.storage_key, c=self.core.policy.c)
            return self._next_chunk()
        self.audit = None
        # A site that has joined a later round has left this one, and does not acknowledge its result.
        if self.core.head.round >= self.core.journal.high_water[0]:
            self.audit = ChunkAudit(self.core.policy, self.core.site, download.header, download.total)
            self.audit.assign(self.core.storage_key, c=self.core.policy.c)
        return *self._ask_vote(download), *self._next_chunk()

    def _ask_vote(self, download: Download) -> Effects:
        """A vote that was signed before stays. A void sum leaves nothing to vote on."""
        audit, head, journal = self.audit, self.core.head, self.core.journal
        if audit is None or not self.core.policy.vote:
            return ()
        if journal.acked == head.result:
            audit.vote = Vote(journal.vote)
        elif download.header.result.verdict == SumVerdict.VOID:
            audit.vote = Vote.ACCEPT
        elif self._before is not None:
            return (AskVote(head.round, head.result, self._before, self.model),)
        return ()

    def vote(self, result: bytes, vote: Vote) -> Effects:
        """Take what this site thinks of the newest model, and acknowledge it if its chunks are checked."""
        audit = self.audit
        if audit is None or audit.header.result_hash != result or audit.vote is not Vote.NONE:
            return ()
        audit.vote = vote
        return () if audit.todo else self._next_chunk()

    def _forget(self) -> Compact:
        kept = self.core.journal.compacted(done_round=self.core.head.round, standing=self.core.standing)
        self.core.journal = Journal.replay(kept)
        return Compact(kept)

    def _next_chunk(self) -> Effects:
        """Ask for the next chunk to check, or acknowledge if all are good."""
        audit = self.audit
        if audit is None:
            return ()
        if audit.todo:
            request = ChunkRequest(site=self.core.site, result=audit.header.result_hash, chunk=audit.todo[0])
            return in_order(request)
        head = self.core.head
        if self.core.policy.vote and audit.vote is Vote.NONE:
            return ()
        result_checks.check_may_ack(self.core.journal, head)
        statement = statements.ack(head.result, head.state_hash, audit.bitmap, audit.vote)
        ack = Ack(
            site=self.core.site,
            result=head.result,
            state_hash=head.state_hash,
            bitmap=audit.bitmap,
            vote=audit.vote,
            signature=self.core.signer.sign(statement),
        )
        acked = self.core.record(records.ResultAcked(round=head.round, result=head.result, vote=audit.vote))
        return in_order(ack, record=acked)

    def piece(self, piece: ChunkPiece) -> Effects:
        """Take a piece of a chunk under audit. A piece that comes too late to matter is dropped."""
        if self.audit is None or piece.result != self.audit.header.result_hash:
            return ()
        return self._next_chunk() if self.audit.take(piece) else ()

    def order(self, order: AuditOrder) -> Effects:
        """Take over the chunks of absent sites; the coordinator also sends it to a site that has restarted."""
        if self.audit is None or order.result != self.audit.header.result_hash:
            raise RemoteProtocolError("order is for a result that is not under audit", where="audit")
        waiting = bool(self.audit.todo)
        self.audit.assign(self.core.storage_key, order.absent, c=self.core.policy.c)
        return () if waiting else self._next_chunk()

    def end_audit(self) -> None:
        """The next aggregation begins: other sites have certified the result."""
        self.audit = None

    def certify(self, message: ResultCertificate | TrainOrder) -> Effects:
        """Take the acknowledgements that cover the newest result."""
        head = self.core.head
        if message.check is None or head.certified:
            return ()
        if isinstance(message, ResultCertificate) and message.result != head.result:
            raise RemoteProtocolError("acknowledgements are of another result", where="check certificate")
        follows = certificate_checks.check_certificate(
            self.core.policy, message.check, result=head.result, state_hash=head.state_hash, quorum=head.quorum
        )
        covered = Certified(head.result, message.check)
        if not self.core.policy.vote:
            return self.core.record(records.ResultCertified(result=head.result)), covered
        self.audit = None
        taken = self._voted(head.result, message.check, accepted=follows)
        entry = entries.voted(head, message.check, accepted=follows)
        if follows:
            return self.core.record(taken), entry, covered
        if self._before is None:
            raise PolicyViolation("the model before this one is not in memory", where="vote", hint="restart the agent")
        self.model, self._before = self._before, None
        down = VotedDown(head.round, head.result, head.trained_on)
        return SaveState(head.trained_on, self.model), self.core.record(taken), entry, down

    def _voted(self, result: bytes, check: CheckCertificate, *, accepted: bool) -> records.VotesTaken:
        """One vote set for each result: whichever other one is shown later leads to another link."""
        link = certificate_checks.link_after(self.core.policy, result, check)
        return records.VotesTaken(result=result, link=link, accepted=int(accepted))

    def jump(self, jump: Jump) -> Effects:
        """Begin to take a covered state in place of the sums that led to it."""
        policy, context = self.core.policy, jump.result.context
        _, _, result_hash = published.result_digests(jump.result)
        result_checks.check_result_signature(policy, result_hash, jump.result.signature)
        result_checks.check_jump_context(policy, self.core.head, context)
        follows = certificate_checks.check_certificate(
            policy, jump.check, result=result_hash, state_hash=jump.result.state_hash, quorum=context.t
        )
        if not follows:
            raise VerificationFailed("the sites have voted against this state", where="jump")
        self._jump = (jump, np.empty(policy.layout.state_words, dtype="<f4"), 0)
        return ()

    def state_frame(self, frame: StateFrame) -> tuple[Effects, bool]:
        """Take a frame of a covered state, whose hash decides; returns whether the model has moved."""
        if self._jump is None or frame.state_hash != self._jump[0].result.state_hash or frame.index != self._jump[2]:
            raise RemoteProtocolError("frame is not the next one of a state asked for", where="jump")
        jump, state, index = self._jump
        target = state.view(np.uint8).data
        start = index * FRAME_BYTES
        if not frame.data or len(frame.data) != min(FRAME_BYTES, len(target) - start):
            raise RemoteProtocolError("frame has the wrong length", where="jump")
        target[start : start + len(frame.data)] = frame.data
        self._jump = (jump, state, index + 1)
        return (self._land(jump, state), True) if start + len(frame.data) == len(target) else ((), False)

    def _land(self, jump: Jump, state: Vector) -> Effects:
        # A sum that was still coming is one of those that the jump leaves out.
        self._jump = self._download = self._successor = None
        # Again: the site may have gone on by sums while the frames of the state were held back.
        result_checks.check_jump_context(self.core.policy, self.core.head, jump.result.context)
        state_hash = states.state_hash(state)
        if state_hash != jump.result.state_hash:
            raise VerificationFailed("state does not have the acknowledged hash", where="jump")
        _, _, result_hash = published.result_digests(jump.result)
        context = jump.result.context
        accepted = records.ResultAccepted(
            round=context.round,
            result=result_hash,
            prev_result=context.prev_result,
            trained_on=context.state_hash,
            state_hash=state_hash,
            quorum=context.t,
            verdict=jump.result.verdict,
            survivors=tuple(line.site for line in jump.result.uploads),
            movements=jump.result.movements,
        )
        self.model, self.audit, self._before = state, None, None
        covered: Wire = records.ResultCertified(result=result_hash)
        if self.core.policy.vote:
            covered = self._voted(result_hash, jump.check, accepted=True)
        saved = (SaveState(state_hash, state), self.core.record(accepted), self.core.record(covered))
        nothing = np.zeros(0, dtype=self.core.policy.layout.dtype)
        verdict = SumVerdict(jump.result.verdict)
        moved = Advanced(context.round, result_hash, state_hash, verdict, accepted.survivors, nothing, state)
        return (*saved, moved, self._forget())
