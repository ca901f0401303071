"""What a site keeps when a published sum is wrong: proof that convinces anybody who holds the manifest.

The coordinator signed the result, a quorum signed the roots of the uploads, and the chunk does not add up. No more is
needed, and nothing in it is secret: uploads are masked, and the opened masks stand in the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np

from security import masking, merkle
from security.errors import CodecError, VerificationFailed
from security.ring import FRAME_BYTES
from security.secagg import result_checks
from security.secagg.messages import ChunkPiece, Path, Result
from security.secagg.policy import AggregationPolicy
from security.secagg.result import ChunkAudit, opened_masks
from security.secagg.wire import Bounded, Many, Nested, Small, Wire

# What such a file begins with, so that a tool knows it from other proofs.
HEADING: Final = b"lazaret wrong-sum proof 1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongSumEvidence(Wire):
    """A chunk of a published sum, beside the same chunk of every upload that it is said to be the sum of."""

    result: Annotated[Result, Nested(Result)]
    chunk: Small
    published: Annotated[bytes, Bounded(FRAME_BYTES)]
    path: Path
    pieces: Annotated[tuple[ChunkPiece, ...], Many(Nested(ChunkPiece))]

    @classmethod
    def of(cls, audit: ChunkAudit) -> WrongSumEvidence:
        """From the chunk at hand, all of whose pieces have come."""
        result, chunk = audit.header.result, audit.todo[0]
        frames = [data for _, data in audit.policy.layout.ring.frames(audit.total)]
        tree = merkle.Tree([merkle.leaf_hash(frame) for frame in frames])
        path = tree.inclusion_path(chunk)
        pieces = tuple(audit.pieces[line.site] for line in result.uploads)
        return cls(result=result, chunk=chunk, published=frames[chunk], path=path, pieces=pieces)

    def file(self) -> bytes:
        """The bytes of the evidence file."""
        return HEADING + self.to_bytes()

    @classmethod
    def parse(cls, data: bytes) -> WrongSumEvidence:
        """Read an evidence file."""
        if not data.startswith(HEADING):
            raise CodecError("not the proof of a wrong sum")
        return cls.from_bytes(data.removeprefix(HEADING))

    def verify(self, policy: AggregationPolicy) -> None:
        """Check it without any state at hand.

        :raises VerificationFailed: if it does not convict the coordinator.
        """
        result, chunks = self.result, policy.chunks
        kx, survivors, result_hash = result_checks.result_digests(result)
        result_checks.check_result_signature(policy, result_hash, result.signature)
        result_checks.check_result_agreements(policy, kx, survivors, result)
        result_checks.check_result_opened(result.context, result)
        leaf = merkle.leaf_hash(self.published)
        merkle.verify_inclusion(leaf=leaf, index=self.chunk, size=chunks, path=self.path, root=result.sum_root)
        roots = {line.site: line.root for line in result.uploads}
        if [piece.site for piece in self.pieces] != list(roots) or any(p.chunk != self.chunk for p in self.pieces):
            raise VerificationFailed("pieces are not those of the survivors", where="evidence")
        if {len(data) for data in (self.published, *(piece.data for piece in self.pieces))} != {
            policy.layout.frame_bytes(self.chunk)
        }:
            raise VerificationFailed("a piece is not as long as the chunk", where="evidence")
        ring = policy.layout.ring
        recomputed = np.zeros(len(self.published) // ring.word_bytes, dtype=ring.dtype)
        for piece in self.pieces:
            result_checks.check_chunk_path(piece, root=roots[piece.site], chunks=chunks)
            recomputed += ring.unpack(piece.data)
        masks = opened_masks(kx, result.adverts, tuple(roots), result.seeds, result.keys)
        masking.unmask_chunk(recomputed, masks, ring, index=self.chunk)
        if ring.pack(recomputed).tobytes() == self.published:
            raise VerificationFailed("the chunk is the sum of the uploads: nobody is convicted", where="evidence")
