"""What the coordinator receives in an attempt: adverts and share lists (S1, S2) and uploads (S3).

Also what it works with in every attempt (`CoordinatorCore`, `Timeouts`), and what a site is asked for again after it
has reconnected (`owed`). Frames of an upload go to the spool and into one running sum as they arrive, so that memory is
one vector however many sites send. An upload that stays incomplete, or does not have the root that its site signed, is
subtracted again, frame by frame from the spool (docs/spec/secure-aggregation.md, section 6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from lazaret.errors import RemoteProtocolError, VerificationFailed
from security.clock import Clock
from security.crypto import encoding, key_agreement, merkle
from security.crypto.masking import Accumulator
from security.crypto.prg import Words
from security.identity.membership import AggregationPolicy, Mandate
from security.secagg import context as hashes
from security.secagg import messages, statements
from security.secagg.certificates import Advert
from security.secagg.context import RoundContext
from security.secagg.coordinator.spool import Gone, Spool
from security.secagg.effects import Discard, Effects, Send
from security.secagg.fields import Wire
from security.secagg.messages import (
    Adverts,
    ChunkPiece,
    Deliver,
    DeliveredShare,
    Shares,
    SignedRoot,
    Survivors,
    UploadFrame,
    UploadHeader,
)
from security.secagg.site import checks
from security.secagg.site.attempt import deal_leaves, deal_root
from security.secagg.statements import Signer
from security.secagg.transitions import CoordinatorState

if TYPE_CHECKING:
    from security.secagg.coordinator.attempt import CoordinatorAttempt

# What a coordinator works with in every attempt.

_S = CoordinatorState
_TIMED = (_S.ADVERTISING, _S.DEALING, _S.AGREEING, _S.ABORTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the coordinator waits for each step, in milliseconds."""

    step_ms: int = 30_000
    upload_ms: int = 60_000
    upload_bytes_per_ms: int = 125  # one megabit a second
    release_ms: int = 600_000

    def of(self, state: CoordinatorState, vector_bytes: int) -> int | None:
        if state is _S.UPLOADING:
            return self.upload_ms + vector_bytes // self.upload_bytes_per_ms
        if state is _S.UNMASKING:
            return self.release_ms
        return self.step_ms if state in _TIMED else None


@dataclass(kw_only=True)
class CoordinatorCore:
    """The coordinator's identity, policy and tools.

    :param mandate: the policy and the signing key in force, always read through: certificates begin and end in mid-run.
    :param load_deals: gives the share lists of a round under these keys from the records; None: they stay in memory.
    :ivar movements: those of the newest result of the chain; the attempt that publishes a result sets it.
    """

    mandate: Mandate
    spool: Spool
    clock: Clock
    timeouts: Timeouts = field(default_factory=Timeouts)
    workers: int = 1
    load_deals: Callable[[int, bytes], Iterable[Shares]] | None = None
    movements: bytes = b""

    @property
    def policy(self) -> AggregationPolicy:
        return self.mandate.policy

    @property
    def signer(self) -> Signer:
        return self.mandate.signer


# S1 and S2: adverts and share lists are collected, and each site gets what is for it.


class Equivocation(VerificationFailed):
    """Two signed answers to one message: the signer is dishonest, or its state was restored from an old copy."""

    def __init__(self, site: str, what: str) -> None:
        super().__init__(f"two different {what} in one attempt", where=f"site {site}")
        self.site = site
        self.what = what


class Dealing:
    """Keys and share lists of one attempt, as the sites signed them."""

    def __init__(self, policy: AggregationPolicy, context: RoundContext) -> None:
        self._policy = policy
        self.context = context
        self.ctx = context.ctx()
        self.kx = b""
        self.deals = b""
        self.adverts: dict[str, Advert] = {}
        self.shares: dict[str, Shares] = {}
        self._trees: dict[str, merkle.Tree] = {}
        self.roots: dict[str, bytes] = {}
        self._away: Callable[[], Iterable[Shares]] | None = None

    def take_advert(self, advert: Advert) -> Adverts | None:
        """Take S1; returns C1 once it is complete."""
        if advert.ctx != self.ctx:
            raise VerificationFailed("advert is of another attempt", where=f"site {advert.site}")
        statements.verify(self._policy.entry(advert.site), statements.advert(self.context, advert), advert.signature)
        known = self.adverts.get(advert.site)
        if known is not None and known != advert:
            raise Equivocation(advert.site, "adverts")
        if known is not None:
            return None
        # Refused here, because the sites would refuse it: otherwise its sender could stall every attempt unnoticed.
        checks.check_advert_keys([*self.adverts.values(), advert])
        key_agreement.require_usable(
            advert.mask_key, advert.share_key, kems=(advert.mask_kem, advert.share_kem)
        )
        if len(advert.pair_hashes) != self.context.n - self.context.position(advert.site):
            raise VerificationFailed("advert has no hash for each later member", where=f"site {advert.site}")
        self.adverts[advert.site] = advert
        if len(self.adverts) < self.context.n:
            return None
        shown = self.shown()
        self.fix_adverts(shown)
        return shown

    def shown(self) -> Adverts:
        """C1."""
        return Adverts(ctx=self.ctx, adverts=tuple(self.adverts[site] for site in self.context.sites))

    def fix_adverts(self, shown: Adverts) -> None:
        self.adverts = {advert.site: advert for advert in shown.adverts}
        self.kx = hashes.key_transcript(self.ctx, [advert.body() for advert in shown.adverts])

    def take_shares(self, shares: Shares) -> tuple[Shares, ...] | None:
        """Take S2; returns all of them in order once they are complete."""
        site = shares.site
        at = self.context.position(site) - 1
        empty = [index for index, share in enumerate(shares.shares) if not share.box]
        paired = [index for index, share in enumerate(shares.shares) if share.pair]
        fits = len(shares.shares) == self.context.n and empty == [at] and paired == [*range(at + 1, self.context.n)]
        if shares.kx != self.kx or not fits:
            raise VerificationFailed("share list does not fit the cohort", where=f"site {site}")
        root = deal_root(self.kx, site, [self.adverts[name] for name in self.context.sites], shares.shares)
        statements.verify(self._policy.entry(site), statements.deal(self.kx, root), shares.signature)
        known = self.shares.get(site)
        if known is not None and known != shares:
            raise Equivocation(site, "share lists")
        self.shares[site] = shares
        if known is not None or len(self.shares) < self.context.n:
            return None
        ordered = tuple(self.shares[member] for member in self.context.sites)
        self.fix_shares(ordered)
        return ordered

    def fix_shares(self, ordered: tuple[Shares, ...]) -> None:
        self.shares = {shares.site: shares for shares in ordered}
        holders = [self.adverts[site] for site in self.context.sites]
        self._trees = {s.site: merkle.Tree(deal_leaves(self.kx, s.site, holders, s.shares)) for s in ordered}
        self.roots = {site: tree.root() for site, tree in self._trees.items()}
        self.deals = hashes.deals_digest(self.kx, [(site, self.roots[site]) for site in self.context.sites])

    def restore_shares(self, shares: Shares) -> bool:
        """One list from the records, in their order; returns whether it was the last one."""
        self.shares[shares.site] = shares
        if len(self.shares) < self.context.n:
            return False
        self.fix_shares(tuple(self.shares.values()))
        return True

    def put_away(self, load: Callable[[], Iterable[Shares]]) -> None:
        """Keep hashes and signatures, and no boxes: with a hundred sites these are larger than a vector.

        :param load: gives the lists again, if they are asked for.
        """
        if self._away is not None:
            return
        self.shares = {
            site: replace(shares, shares=tuple(replace(line, box=b"", pair=b"") for line in shares.shares))
            for site, shares in self.shares.items()
        }
        self._away = load

    def whole(self, dealer: str) -> Shares:
        """A dealer's list with its boxes."""
        if self._away is not None:
            self.shares, self._away = {shares.site: shares for shares in self._away()}, None
        return self.shares[dealer]

    def path(self, dealer: str, holder: str) -> tuple[bytes, ...]:
        """From a holder's line to the dealer's signed root."""
        return self._trees[dealer].inclusion_path(self.context.position(holder) - 1)

    def deliver_to(self, holder: str) -> Deliver:
        """C2 for one site."""
        index = self.context.position(holder) - 1
        roots = tuple(
            SignedRoot(site=site, root=self.roots[site], signature=self.shares[site].signature)
            for site in self.context.sites
        )
        boxes = tuple(
            DeliveredShare(dealer=dealer, share=self.whole(dealer).shares[index], path=self.path(dealer, holder))
            for dealer in self.context.sites
            if dealer != holder
        )
        return Deliver(kx=self.kx, roots=roots, shares=boxes)


# What a site that (re)connects is asked for again; it gives exactly the same answer as before (section 3).


def owed(attempt: CoordinatorAttempt, site: str, open_ctx: bytes) -> Effects:
    """The coordinator's newest message to a site that has not answered it.

    :param open_ctx: the attempt that is still open at the site, as its Hello says.
    """
    published = attempt.publication
    if attempt.state is _S.PUBLISHED and published is not None and site not in published.acks:
        return Send(published.result, to=site), published.sum_to(site)
    if site not in attempt.context.sites:
        return ()
    message = _message(attempt, site, open_ctx)
    asked = attempt.disputes.of_dealer(site) if attempt.state is _S.UPLOADING else []
    return tuple(Send(owing, to=site) for owing in (message, *asked) if owing is not None)


def _message(attempt: CoordinatorAttempt, site: str, open_ctx: bytes) -> Wire | None:
    state, dealing = attempt.state, attempt.dealing
    if state is _S.ADVERTISING:
        return attempt.plan if site not in dealing.adverts else None
    if state is _S.DEALING:
        return dealing.shown() if site not in dealing.shares else None
    if site in attempt.aborts:
        return None
    if state is _S.UPLOADING and site not in attempt.uploads.complete:
        there = attempt.uploads.next_frame(site)
        return dealing.deliver_to(site) if there is None else messages.UploadResume(kx=dealing.kx, next_frame=there)
    if state in (_S.AGREEING, _S.UNMASKING):
        return attempt.quorum if site in attempt.agreements and attempt.quorum else attempt.survivors
    if state in (_S.ABORTING, _S.DEAD) and open_ctx == attempt.ctx:
        return attempt.abort_request()
    return None


# S3: uploads.


def spool_key(header: UploadHeader) -> bytes:
    """By attempt, site and root, so that no site can write into the file of another one."""
    return hashlib.sha256(header.kx + encoding.text(header.site) + header.root).digest()


@dataclass
class Arriving:
    """An upload on its way."""

    header: UploadHeader
    leaves: list[bytes] = field(default_factory=list)


class Uploads:
    """All uploads of one attempt.

    :param policy: says into which of the sums an upload goes; without groups there is one.
    """

    def __init__(self, policy: AggregationPolicy, spool: Spool) -> None:
        layout = self._layout = policy.layout
        self._policy = policy
        self._spool = spool
        self.sums = [Accumulator(layout.words, layout.ring) for _ in range(policy.sums)]
        self.arriving: dict[str, Arriving] = {}
        self.complete: dict[str, UploadHeader] = {}
        self._trees: dict[str, merkle.Tree] = {}

    def begin(self, header: UploadHeader) -> int:
        """Take a header; returns how many frames are already there, from before a restart."""
        upload = self.arriving[header.site] = Arriving(header)
        key = spool_key(header)
        for index in range(min(self._spool.frames(key), self._layout.frames - 1)):
            self._count(upload, self._spool.read(key, index))
        return len(upload.leaves)

    def take(self, site: str, frame: UploadFrame) -> UploadHeader | None:
        """Take a frame; returns the header once the upload is complete and has its root.

        :raises VerificationFailed: if it is complete and has another root; the upload is deleted.
        """
        upload = self.arriving.get(site)
        if upload is None or frame.kx != upload.header.kx or frame.index > len(upload.leaves):
            raise RemoteProtocolError("frame is not the next one of an upload", where=f"site {site}")
        if frame.index < len(upload.leaves):
            return None  # sent again after a reconnect
        if len(frame.data) != self._layout.frame_bytes(frame.index):
            raise RemoteProtocolError("frame has the wrong length", where=f"site {site}")
        self._spool.write(spool_key(upload.header), frame.index, frame.data)
        self._count(upload, frame.data)
        return self._finish(site, upload) if len(upload.leaves) == self._layout.frames else None

    def sum_of(self, site: str) -> Accumulator:
        return self.sums[self._policy.sum_of(site)]

    def total(self) -> Words:
        """All sums, one after the other."""
        return self.sums[0].total if len(self.sums) == 1 else np.concatenate([found.total for found in self.sums])

    def _count(self, upload: Arriving, data: bytes) -> None:
        self.sum_of(upload.header.site).add(len(upload.leaves), data)
        upload.leaves.append(merkle.leaf_hash(data))

    def _finish(self, site: str, upload: Arriving) -> UploadHeader:
        if merkle.root(upload.leaves) != upload.header.root:
            self.drop(site)
            raise VerificationFailed("upload does not have the root its site signed", where=f"site {site}")
        self._spool.seal(spool_key(upload.header))
        self.complete[site] = upload.header
        self._trees[site] = merkle.Tree(upload.leaves)
        del self.arriving[site]
        return upload.header

    def drop(self, site: str) -> None:
        """Subtract an unfinished upload from the sum again."""
        upload = self.arriving.pop(site, None)
        if upload is None:
            return
        key = spool_key(upload.header)
        for index in range(len(upload.leaves)):
            self.sum_of(site).take_out(index, self._spool.read(key, index))
        self._spool.remove(key)

    def restore(self, header: UploadHeader, *, count: bool = True) -> None:
        """After a restart: count a complete upload from the spool, and add it if the sum is not opened yet."""
        key = spool_key(header)
        leaves = []
        for index in range(self._layout.frames):
            data = self._spool.read(key, index)
            leaves.append(merkle.leaf_hash(data))
            if len(data) != self._layout.frame_bytes(index):
                break  # incomplete: its root will differ
            if count:
                self.sum_of(header.site).add(index, data)
        if merkle.root(leaves) != header.root:
            raise VerificationFailed("spooled upload is not what its site signed", where=f"site {header.site}")
        self.complete[header.site] = header
        self._trees[header.site] = merkle.Tree(leaves)

    def survivors(self, kx: bytes, members: Sequence[str]) -> Survivors:
        """C3: whose upload is complete, in the order of the members."""
        headers = [self.complete[site] for site in members if site in self.complete]
        roots = (SignedRoot(site=up.site, root=up.root, signature=up.signature) for up in headers)
        return Survivors(kx=kx, uploads=tuple(roots))

    def header(self, site: str) -> UploadHeader | None:
        """What a site has announced, arriving or complete."""
        upload = self.arriving.get(site)
        return upload.header if upload is not None else self.complete.get(site)

    def next_frame(self, site: str) -> int | None:
        """The next frame of an unfinished upload."""
        upload = self.arriving.get(site)
        return None if upload is None else len(upload.leaves)

    def pieces(self, result: bytes, chunk: int, survivors: Sequence[str]) -> Iterator[ChunkPiece]:
        """One chunk of every upload, each with its path; ends early if the uploads were deleted in the meantime."""
        if not 0 <= chunk < self._layout.frames:
            raise RemoteProtocolError("there is no such chunk", where="audit")
        with suppress(Gone):
            for site in survivors:
                yield self._piece(result, chunk, site)

    def _piece(self, result: bytes, chunk: int, site: str) -> ChunkPiece:
        data = self._spool.read(spool_key(self.complete[site]), chunk)
        return ChunkPiece(
            result=result, chunk=chunk, site=site, data=data, path=self._trees[site].inclusion_path(chunk)
        )

    def discard(self) -> Discard:
        """Every file: after the acknowledgements, or when the attempt has ended."""
        headers = [*self.complete.values(), *(upload.header for upload in self.arriving.values())]
        return Discard(tuple(spool_key(header) for header in headers))
