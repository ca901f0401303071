"""What a site holds in memory during one attempt, and what the parts of its machine share.

`OpenAttempt` holds fresh keys, dealt and received shares, and the masked vector. None of it is ever written to disk, so
that a site which restarts before AGREE has lost it and aborts (docs/spec/secure-aggregation.md, section 9).
`SiteCore` holds identity, policy and journal of the site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lazaret.errors import RemoteProtocolError, ToolkitError, VerificationFailed
from security.clock import Clock
from security.crypto import key_agreement, masking, merkle, shamir
from security.crypto.key_agreement import HybridPair
from security.crypto.prg import Words
from security.crypto.ring import Packed, Ring
from security.identity.membership import AggregationPolicy, Mandate
from security.rng import Randomness
from security.secagg import certificate_checks, statements
from security.secagg import context as hashes
from security.secagg.certificates import Advert
from security.secagg.context import RoundContext
from security.secagg.effects import Persist
from security.secagg.fields import Wire
from security.secagg.messages import (
    DealtShare,
    Deliver,
    DeliveredShare,
    Disclosure,
    Shares,
    Unmask,
    UploadHeader,
)
from security.secagg.site import checks
from security.secagg.site.journal import Journal, NewestResult
from security.secagg.statements import Signer
from security.secrets import Secret

SHARE_BYTES = 32


@dataclass(frozen=True, slots=True)
class AdvertisedLog:
    """Checkpoint of the site's privacy log and commitment to its ledger, for the advert; zeros where there is none."""

    log_size: int = 0
    log_root: bytes = bytes(32)
    ledger: bytes = bytes(32)


@dataclass(slots=True)
class OpenAttempt:
    """The secrets of one attempt, and what follows from them step by step.

    :ivar dealt: the shares of this site's two secrets, by holder: it may have to disclose some of them.
    :ivar held: shares of the secrets of others, by dealer.
    :ivar pairs: r_ij by peer: this site's own for later members, received ones of earlier members.
    :ivar disputed: lines whose box does not hold what the dealer signed for, by dealer.
    """

    signer: Signer
    context: RoundContext
    ctx: bytes
    mask_seed: Secret
    mask_pair: HybridPair
    share_pair: HybridPair
    seed: Secret
    advert: Advert
    kx: bytes = b""
    adverts: tuple[Advert, ...] = ()
    own_root: bytes = b""
    deals: bytes = b""
    dealt: dict[str, tuple[Secret, Secret]] = field(default_factory=dict)
    held: dict[str, tuple[Secret, Secret]] = field(default_factory=dict)
    pairs: dict[str, Secret] = field(default_factory=dict)
    disputed: dict[str, DeliveredShare] = field(default_factory=dict)
    header: UploadHeader | None = None
    vector: Packed | None = field(default=None, repr=False)

    @classmethod
    def begin(
        cls, signer: Signer, context: RoundContext, *, sequence: int, heads: AdvertisedLog, randomness: Randomness
    ) -> OpenAttempt:
        """Make fresh keys and the advert for them (S1)."""
        ctx = context.ctx()
        mask_seed = Secret(randomness.bytes(shamir.SECRET_BYTES))
        mask_pair = HybridPair.from_seed(mask_seed, ctx=ctx, site=signer.site)
        share_pair = HybridPair.generate(randomness)
        pairs = own_pairs(context, mask_seed, signer.site)
        seed = Secret(randomness.bytes(shamir.SECRET_BYTES))
        unsigned = Advert(
            site=signer.site,
            ctx=ctx,
            mask_key=mask_pair.public,
            mask_kem=mask_pair.kem_public,
            share_key=share_pair.public,
            share_kem=share_pair.kem_public,
            pair_hashes=tuple(hashes.pair_hash(ctx, signer.site, peer, r.reveal()) for peer, r in pairs.items()),
            commitment=hashes.commitment(ctx, signer.site, seed.reveal()),
            sequence=sequence,
            log_size=heads.log_size,
            log_root=heads.log_root,
            ledger_head=heads.ledger,
            signature=bytes(64),
        )
        advert = replace(unsigned, signature=signer.sign(statements.advert(context, unsigned)))
        return cls(
            signer=signer,
            context=context,
            ctx=ctx,
            mask_seed=mask_seed,
            mask_pair=mask_pair,
            share_pair=share_pair,
            seed=seed,
            advert=advert,
            pairs=pairs,
        )

    @property
    def site(self) -> str:
        return self.signer.site

    def take_adverts(self, adverts: tuple[Advert, ...]) -> None:
        self.adverts = adverts
        self.kx = hashes.key_transcript(self.ctx, [advert.body() for advert in adverts])

    def deal(self, randomness: Randomness) -> Shares:
        """Share the seed and the mask key among the cohort, own shares included (S2)."""
        holders, threshold = self.context.n, self.context.t
        b_shares = shamir.split(self.seed, threshold=threshold, holders=holders, randomness=randomness)
        s_shares = shamir.split(self.mask_seed, threshold=threshold, holders=holders, randomness=randomness)
        dealt = tuple(
            self._deal_one(peer, b_share, s_share, randomness)
            for peer, b_share, s_share in zip(self.adverts, b_shares, s_shares, strict=True)
        )
        self.own_root = deal_root(self.kx, self.site, self.adverts, dealt)
        signature = self.signer.sign(statements.deal(self.kx, self.own_root))
        return Shares(site=self.site, kx=self.kx, shares=dealt, signature=signature)

    def _deal_one(self, peer: Advert, b_share: Secret, s_share: Secret, randomness: Randomness) -> DealtShare:
        b_hash = hashes.share_hash(b_share, kx=self.kx, dealer=self.site, holder=peer.site, kind="b")
        s_hash = hashes.share_hash(s_share, kx=self.kx, dealer=self.site, holder=peer.site, kind="s")
        self.dealt[peer.site] = (b_share, s_share)
        if peer.site == self.site:
            self.held[self.site] = (b_share, s_share)
            return DealtShare(b_hash=b_hash, s_hash=s_hash, box=b"", pair=b"")
        ends = {"source": self.site, "destination": peer.site}
        keys, both = (peer.share_key, peer.share_kem), Secret(b_share.reveal() + s_share.reveal())
        box = key_agreement.seal_shares(self.share_pair, keys, both, kx=self.kx, rng=randomness, **ends)
        pair = b""
        if peer.site in self.pairs:
            pair = key_agreement.seal_pair(peer.mask_kem, self.pairs[peer.site], kx=self.kx, rng=randomness, **ends)
        return DealtShare(b_hash=b_hash, s_hash=s_hash, box=box, pair=pair)

    def take_deals(self, policy: AggregationPolicy, deliver: Deliver) -> None:
        """Check and open the boxes of C2; fixes D. Boxes that do not open are disputed."""
        checks.check_deal_roots(policy, self.context, self.kx, deliver.roots)
        checks.check_own_deal(self.own_root, self.site, deliver.roots)
        others = [site for site in self.context.sites if site != self.site]
        if [delivered.dealer for delivered in deliver.shares] != others:
            raise VerificationFailed("boxes are not those of every other member", where="deliver")
        roots = {line.site: line.root for line in deliver.roots}
        for delivered in deliver.shares:
            checks.check_delivered_path(self.context, self.kx, self.advert, delivered, roots)
        for delivered in deliver.shares:
            try:
                self._open(delivered)
            except ToolkitError:
                self.disputed[delivered.dealer] = delivered
        self.deals = hashes.deals_digest(self.kx, [(line.site, line.root) for line in deliver.roots])

    def _open(self, delivered: DeliveredShare) -> None:
        dealer, line = delivered.dealer, delivered.share
        advert = self.adverts[self.context.position(dealer) - 1]
        ends = {"source": dealer, "destination": self.site}
        both = key_agreement.open_shares(self.share_pair, advert.share_key, line.box, kx=self.kx, **ends).reveal()
        pair = key_agreement.open_pair(self.mask_pair, line.pair, kx=self.kx, **ends) if self._later(dealer) else None
        self._take(dealer, (Secret(both[:SHARE_BYTES]), Secret(both[SHARE_BYTES:])), pair, line)

    def _later(self, dealer: str) -> bool:
        return self.context.position(self.site) > self.context.position(dealer)

    def _take(self, dealer: str, shares: tuple[Secret, Secret], pair: Secret | None, line: DealtShare) -> None:
        """Keep what a dealer has for this site, if it is what the dealer signed for."""
        advert = self.adverts[self.context.position(dealer) - 1]
        certificate_checks.check_dealt_shares(shares, line, kx=self.kx, dealer=dealer, holder=self.site)
        certificate_checks.check_pair(self.context, advert, self.site, pair)
        self.held[dealer] = shares
        if pair is not None:
            self.pairs[dealer] = pair

    def take_disclosure(self, answer: Disclosure) -> None:
        """Go on with the shares that an accused dealer has published, if they are those it signed for (section 11)."""
        delivered = self.disputed.get(answer.site)
        if delivered is None or answer.holder != self.site:
            raise RemoteProtocolError("no such share is in dispute", where=f"dealer {answer.site}")
        pair = Secret(answer.pair) if answer.pair else None
        self._take(answer.site, (Secret(answer.b_share), Secret(answer.s_share)), pair, delivered.share)
        del self.disputed[answer.site]

    def disclose(self, holder: str) -> Disclosure:
        """The answer to an accusation: the shares dealt to this holder, and nothing else (section 11)."""
        b_share, s_share = (share.reveal() for share in self.dealt[holder])
        later = self.context.position(holder) > self.context.position(self.site)
        pair = self.pairs[holder].reveal() if later else b""
        signature = self.signer.sign(statements.disclose(self.kx, holder, b_share, s_share, pair))
        return Disclosure(
            site=self.site, kx=self.kx, holder=holder, b_share=b_share, s_share=s_share, pair=pair, signature=signature
        )

    def mask(self, update: Words, ring: Ring, *, group: Sequence[str], workers: int) -> UploadHeader:
        """Mask a copy of the update with this attempt's keys, once, and sign its root (S3; section 6).

        :param group: the members whose vectors go into the same sum.
        """
        pairs = {
            advert.site: key_agreement.mask_key(
                self.mask_pair,
                advert.mask_key,
                self.pairs[advert.site],
                kx=self.kx,
                own_id=self.site,
                peer_id=advert.site,
            )
            for advert in self.adverts
            if advert.site != self.site and advert.site in group
        }
        self_key = key_agreement.self_mask_key(self.seed, kx=self.kx, site=self.site)
        masks = masking.SiteMasks.of(self.site, self_key, pairs)
        self.vector = ring.pack(masking.masked(update, masks, workers=workers))
        root = masking.vector_root(self.vector)
        length = self.vector.nbytes
        signature = self.signer.sign(statements.upload(self.kx, self.deals, length, root))
        self.header = UploadHeader(
            site=self.site, kx=self.kx, deals=self.deals, length=length, root=root, signature=signature
        )
        return self.header

    def reply(self, survivors: Sequence[str]) -> Secret:
        """The shares for this set and no other: of the seed of a survivor, of the mask key of a dropout (section 1)."""
        kept = set(survivors)
        return Secret(b"".join(self.held[site][0 if site in kept else 1].reveal() for site in self.context.sites))


def unmask_message(signer: Signer, kx: bytes, survivors: bytes, reply: Secret) -> Unmask:
    """S5 from a stored reply; signatures are deterministic, so that a repeated answer has the same bytes."""
    raw = reply.reveal()
    shares = tuple(raw[start : start + SHARE_BYTES] for start in range(0, len(raw), SHARE_BYTES))
    signature = signer.sign(statements.unmask(kx, survivors, shares))
    return Unmask(site=signer.site, kx=kx, survivors=survivors, shares=shares, signature=signature)


def own_pairs(context: RoundContext, seed: Secret, site: str) -> dict[str, Secret]:
    """r_ij of a site for all later members, from its seed."""
    ctx, later = context.ctx(), context.sites[context.position(site) :]
    return {peer: key_agreement.pair_secret(seed, ctx=ctx, site=site, peer=peer) for peer in later}


def deal_leaves(kx: bytes, dealer: str, holders: Sequence[Advert], dealt: Sequence[DealtShare]) -> list[bytes]:
    """The Merkle leaves of a dealer's list."""
    return [
        merkle.leaf_hash(certificate_checks.dealt_leaf(kx, dealer, holder, share))
        for holder, share in zip(holders, dealt, strict=True)
    ]


def deal_root(kx: bytes, dealer: str, holders: Sequence[Advert], dealt: Sequence[DealtShare]) -> bytes:
    return merkle.root(deal_leaves(kx, dealer, holders, dealt))


# What the parts of a site's machine share.

HOUR_MS = 3600 * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUpdate:
    """A site's encoded update of one round: made once, the same in every attempt."""

    round: int
    state_hash: bytes
    config_hash: bytes
    words: Words = field(repr=False)


@dataclass(kw_only=True)
class SiteCore:
    """A site's mandate and journal.

    :param mandate: the policy and the signing key in force, always read through: a newer manifest changes both.
    :param storage_key: seals the answer that must survive a restart between AGREE and RELEASE, and decides which chunks
        a sampled audit looks at.
    :param heads: gives the newest checkpoint of the privacy log and the ledger's commitment, for each advert.
    :param patience_ms: how long to wait for each of the coordinator's steps before AGREE.
    """

    mandate: Mandate
    journal: Journal
    storage_key: Secret
    randomness: Randomness
    clock: Clock
    heads: Callable[[], AdvertisedLog] = AdvertisedLog
    patience_ms: int = HOUR_MS
    workers: int = 1

    @property
    def policy(self) -> AggregationPolicy:
        return self.mandate.policy

    @property
    def signer(self) -> Signer:
        return self.mandate.signer

    @property
    def site(self) -> str:
        return self.signer.site

    @property
    def head(self) -> NewestResult:
        return self.journal.head(self.policy)

    @property
    def standing(self) -> set[bytes]:
        """The newest model, and the one that stands again if the sites vote against it."""
        head = self.head
        return {head.state_hash, head.trained_on} if self.policy.vote else {head.state_hash}

    def record(self, record: Wire) -> Persist:
        """Apply a record now; as an effect it is on disk before any effect after it is carried out (section 9)."""
        self.journal.apply(record)
        return Persist(record)
