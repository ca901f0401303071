"""The coordinator's side of S5: checks released shares, combines them, and proves which dealer was dishonest.

Sections are those of docs/spec/secure-aggregation.md. For a survivor the seed of its self mask is opened, for a dropout
its mask key, never both (section 1): with both, its vector would be readable. The sites enforce this, since each has
only sealed one answer for one set.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazaret.errors import VerificationFailed
from security.crypto import shamir
from security.crypto.key_agreement import HybridPair
from security.identity.membership import AggregationPolicy
from security.secagg import certificate_checks, published, statements
from security.secagg.certificates import Advert, DealtLine, FraudProof, Opened, OpenedShare, PairFraud
from security.secagg.coordinator.uploads import Dealing
from security.secagg.messages import Unmask
from security.secrets import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedByQuorum:
    """The secrets that t shares have opened: everything that takes the masks off the sum."""

    adverts: tuple[Advert, ...]
    seeds: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    pairs: tuple[bytes, ...]


class Opening:
    """Released shares of one certified set.

    :param survivors: the sites whose vectors are in the sum.
    :param digest: U of that set, as the quorum signed it.
    """

    def __init__(self, policy: AggregationPolicy, dealing: Dealing, survivors: tuple[str, ...], digest: bytes) -> None:
        self._policy = policy
        self._dealing = dealing
        self._context = dealing.context
        self.survivors = survivors
        self._digest = digest
        self.replies: dict[str, Unmask] = {}
        self.frauds: list[FraudProof] = []
        self.pair_frauds: list[PairFraud] = []

    def _kind(self, dealer: str) -> Opened:
        return Opened.SEED if dealer in self.survivors else Opened.MASK_KEY

    def take(self, message: Unmask) -> bool:
        """Take a reply; returns whether a quorum of good ones is there.

        :raises VerificationFailed: if a share is not the one that was dealt. The reply is signed, so that it is
            evidence against its sender (section 11).
        """
        site, kx = message.site, self._dealing.kx
        if message.kx != kx or message.survivors != self._digest or len(message.shares) != self._context.n:
            raise VerificationFailed("reply is of another set", where=f"site {site}")
        statement = statements.unmask(message.kx, message.survivors, message.shares)
        statements.verify(self._policy.entry(site), statement, message.signature)
        index = self._context.position(site) - 1
        # Against the hash that the dealer signed: otherwise one wrong share would spoil the secret, and nobody could
        # know whether the dealer or the holder was dishonest.
        for dealer, share in zip(self._context.sites, message.shares, strict=True):
            line, kind = self._dealing.shares[dealer].shares[index], self._kind(dealer)
            certificate_checks.check_share_hash(
                Secret(share),
                kx=kx,
                dealer=dealer,
                holder=site,
                kind=kind,
                expected=line.b_hash if kind is Opened.SEED else line.s_hash,
            )
        self.replies[site] = message
        return len(self.replies) >= self._context.t

    @property
    def cheats(self) -> list[str]:
        """The dealers against which there is a proof."""
        adverts = [proof.advert for proof in self.frauds] + [proof.advert for proof in self.pair_frauds]
        return sorted({advert.site for advert in adverts})

    def open(self) -> OpenedByQuorum | None:
        """Seeds of the survivors and keys of the dropouts, in order; None if there is a proof against a dealer."""
        # Any t shares give the same secret; exactly t, because a fraud proof has exactly t.
        holders = sorted(self.replies)[: self._context.t]
        opened = {dealer: self._open_one(dealer, holders) for dealer in self._context.sites}
        if self.frauds:
            return None
        adverts = tuple(self._dealing.adverts[site] for site in self._context.sites)
        pairs = [
            self._open_pair(dealer, gone, Secret(opened[gone.site]))
            for dealer, gone in published.earlier_survivors(adverts, self.survivors)
        ]
        if self.pair_frauds:
            return None
        return OpenedByQuorum(
            adverts=adverts,
            seeds=tuple(opened[site] for site in self._context.sites if site in self.survivors),
            keys=tuple(opened[site] for site in self._context.sites if site not in self.survivors),
            pairs=tuple(pairs),
        )

    def _open_pair(self, dealer: Advert, gone: Advert, seed: Secret) -> bytes:
        """What a survivor has sealed for a later dropout, with the dropout's key."""
        context, kx = self._context, self._dealing.kx
        keys = HybridPair.from_seed(seed, ctx=context.ctx(), site=gone.site)
        box = self._dealing.whole(dealer.site).shares[context.position(gone.site) - 1].pair
        found = certificate_checks.sealed_pair(context, dealer, keys, box, kx=kx, holder=gone.site)
        if found is None:
            # The dropout never saw it, or it would have accused the dealer: here is the proof in its place.
            self.pair_frauds.append(
                PairFraud(
                    advert=dealer,
                    kx=kx,
                    root=self._dealing.roots[dealer.site],
                    deal_signature=self._dealing.shares[dealer.site].signature,
                    seed=seed.reveal(),
                    line=self._line(dealer.site, gone.site),
                )
            )
            return b""
        return found.reveal()

    def _line(self, dealer: str, holder: str) -> DealtLine:
        line = self._dealing.whole(dealer).shares[self._context.position(holder) - 1]
        return DealtLine(
            holder=holder,
            b_hash=line.b_hash,
            s_hash=line.s_hash,
            box=line.box,
            pair=line.pair,
            kem_key=self._dealing.adverts[holder].mask_kem,
            path=self._dealing.path(dealer, holder),
        )

    def _open_one(self, dealer: str, holders: list[str]) -> bytes:
        at = self._context.position(dealer) - 1
        shares = {self._context.position(holder): Secret(self.replies[holder].shares[at]) for holder in holders}
        secret = shamir.join(shares, threshold=self._context.t)
        advert, kind = self._dealing.adverts[dealer], self._kind(dealer)
        if not certificate_checks.opens(self._context, kind, secret, advert):
            # All shares are those that were dealt, so the dealer shared another secret than it committed to.
            self.frauds.append(self._proof(dealer, holders, kind))
        return secret.reveal()

    def _proof(self, dealer: str, holders: list[str], kind: Opened) -> FraudProof:
        """Everything that a site needs to check it: the dealer's advert, its signed root, and t of its shares."""
        dealing, at = self._dealing, self._context.position(dealer) - 1
        return FraudProof(
            advert=dealing.adverts[dealer],
            kx=dealing.kx,
            root=dealing.roots[dealer],
            deal_signature=dealing.shares[dealer].signature,
            kind=kind,
            shares=tuple(
                OpenedShare(share=self.replies[holder].shares[at], line=self._line(dealer, holder))
                for holder in holders
            ),
        )
