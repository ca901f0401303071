"""A result on its way into a site: the header is checked, the sum streams in, chunks of it are added up again.

`check_header`, `Download` and `ChunkAudit` do the work; the machine in `site` decides when
(docs/spec/secure-aggregation.md, section 10).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from security import key_agreement, masking, merkle
from security.errors import RemoteProtocolError
from security.key_agreement import KeyPair
from security.masking import OpenedMasks
from security.prg import Words
from security.rng import Randomness
from security.secagg import burst_checks, certificate_checks, result_checks
from security.secagg.certificates import Advert
from security.secagg.journal import AttemptMemory, Head
from security.secagg.layout import Layout
from security.secagg.messages import ChunkPiece, Result, SumFrame
from security.secagg.policy import AggregationPolicy, AuditMode
from security.secrets import Secret


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
    policy: AggregationPolicy, head: Head, memory: AttemptMemory | None, site: str, result: Result
) -> CheckedHeader:
    """Check everything a header says, for a member of the cohort or for a site that catches up."""
    context = result.context
    kx, survivors, result_hash = result_checks.result_digests(result)
    result_checks.check_result_signature(policy, result_hash, result.signature)
    result_checks.check_result_context(policy, context)
    result_checks.check_result_extends(head, context)
    burst_checks.check_adverts_cohort(context, result.adverts)
    if memory is None or memory.kx != kx:  # a member has checked them at C1, and KX binds their bodies
        burst_checks.check_advert_signatures(policy, result.adverts)
    result_checks.check_result_memory(memory, kx, result.deals, site, result)
    checked = CheckedHeader(result, kx, result_hash)
    result_checks.check_result_survivors(context, checked.survivors)
    result_checks.check_result_agreements(policy, kx, survivors, result)
    result_checks.check_result_opened(context, result)
    return checked


def opened_masks(
    kx: bytes, adverts: Sequence[Advert], survivors: Collection[str], seeds: Sequence[bytes], keys: Sequence[bytes]
) -> OpenedMasks:
    """The masks that are left on the sum of the survivors' uploads, from the opened secrets."""
    alive = [advert for advert in adverts if advert.site in survivors]
    dropped = [advert for advert in adverts if advert.site not in survivors]
    own = [
        key_agreement.self_mask_key(Secret(seed), kx=kx, site=advert.site)
        for advert, seed in zip(alive, seeds, strict=True)
    ]
    pairs = {}
    for gone, scalar in zip(dropped, keys, strict=True):
        pair = KeyPair(Secret(scalar))
        for advert in alive:
            pairs[advert.site, gone.site] = key_agreement.mask_key(
                pair, advert.mask_key, kx=kx, own_id=gone.site, peer_id=advert.site
            )
    return OpenedMasks.of(own, pairs)


class Download:
    """The sum of one result, frame by frame."""

    def __init__(self, header: CheckedHeader, layout: Layout) -> None:
        self.header = header
        self.total: Words = np.empty(layout.words, dtype=layout.dtype)
        self._layout = layout
        self._leaves: dict[int, bytes] = {}

    @property
    def complete(self) -> bool:
        return len(self._leaves) == self._layout.frames

    def take(self, frame: SumFrame) -> None:
        if frame.result != self.header.result_hash or self.complete or frame.index != self._next:
            raise RemoteProtocolError("frame is not the next one of this sum", where="result")
        if len(frame.data) != self._layout.frame_bytes(frame.index):
            raise RemoteProtocolError("frame has the wrong length", where="result")
        ring = self._layout.ring
        words = ring.unpack(frame.data)
        self.total[frame.index * ring.frame_words :][: len(words)] = words
        self._leaves[frame.index] = merkle.leaf_hash(frame.data)

    @property
    def _next(self) -> int:
        return self._layout.sum_order[len(self._leaves)]

    @property
    def ready(self) -> int:
        """How many words from the beginning on are there: all before the next frame, since only the first is early."""
        return self._layout.words if self.complete else self._next * self._layout.ring.frame_words

    def finish(self) -> Words:
        leaves = [leaf for _, leaf in sorted(self._leaves.items())]
        result_checks.check_sum_root(leaves, self.header.result.sum_root)
        return self.total


@dataclass
class ChunkAudit:
    """One site's part in checking a sum: chunks of all uploads are added up, unmasked and compared."""

    policy: AggregationPolicy
    site: str
    header: CheckedHeader
    total: Words = field(repr=False)
    todo: list[int] = field(default_factory=list)
    good: set[int] = field(default_factory=set)
    _masks: OpenedMasks | None = field(default=None, repr=False)
    pieces: dict[str, ChunkPiece] = field(default_factory=dict, repr=False)
    _partial: Words | None = field(default=None, repr=False)

    def assign(self, randomness: Randomness, absent: Collection[str] = ()) -> None:
        """Decide which chunks to look at; with `absent` sites, take over what would have been theirs."""
        wanted = assigned_chunks(self.policy, self.header, self.site, randomness, absent)
        self.todo += [chunk for chunk in wanted if chunk not in self.good and chunk not in self.todo]

    def take(self, piece: ChunkPiece) -> bool:
        """Add a piece; returns whether the chunk at hand is now complete and good."""
        roots = {line.site: line.root for line in self.header.result.uploads}
        if not self.todo or piece.result != self.header.result_hash or piece.chunk != self.todo[0]:
            raise RemoteProtocolError("piece is not of the chunk that was asked for", where="audit")
        if piece.site not in roots or piece.site in self.pieces:
            raise RemoteProtocolError("piece is of no survivor, or came before", where="audit")
        if len(piece.data) != self.policy.layout.frame_bytes(piece.chunk):
            raise RemoteProtocolError("piece has the wrong length", where="audit")
        result_checks.check_chunk_path(piece, root=roots[piece.site], chunks=self.policy.chunks)
        words = self.policy.layout.ring.unpack(piece.data)
        if self._partial is None:
            self._partial = np.zeros(len(words), dtype=self.total.dtype)
        np.add(self._partial, words, out=self._partial)
        self.pieces[piece.site] = piece
        if len(self.pieces) < len(roots):
            return False
        self._finish_chunk(self._partial)
        return True

    def _finish_chunk(self, partial: Words) -> None:
        if self._masks is None:
            result = self.header.result
            self._masks = opened_masks(self.header.kx, result.adverts, self.header.survivors, result.seeds, result.keys)
        index, ring = self.todo[0], self.policy.layout.ring
        masking.unmask_chunk(partial, self._masks, ring, index=index)
        result_checks.check_chunk_sum(partial, self.total[index * ring.frame_words :][: len(partial)])
        self.good.add(self.todo.pop(0))
        self._partial, self.pieces = None, {}

    @property
    def bitmap(self) -> bytes:
        return certificate_checks.bitmap_of(self.good, self.policy.chunks)


def assigned_chunks(
    policy: AggregationPolicy,
    header: CheckedHeader,
    site: str,
    randomness: Randomness,
    absent: Collection[str] = (),
) -> list[int]:
    """Covered: the chunks for which this site is among the first c + 1 by hash. Sampled: a few at random.

    Random chunks are drawn after the coordinator signed the result, by each site for itself: no one can know them.
    """
    if policy.audit is AuditMode.SAMPLED:
        wanted: set[int] = set()
        while len(wanted) < min(policy.spot_check_chunks, policy.chunks):
            wanted.add(int.from_bytes(randomness.bytes(8), "big") % policy.chunks)
        return sorted(wanted)
    present = [name for name in header.result.context.sites if name not in absent]
    if site not in present:
        return []
    chosen = []
    for chunk in range(policy.chunks):
        own = certificate_checks.audit_rank(header.result_hash, chunk, site)
        before = sum(certificate_checks.audit_rank(header.result_hash, chunk, name) < own for name in present)
        if before <= policy.c:
            chosen.append(chunk)
    return chosen
