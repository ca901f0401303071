"""The coordinator's side of S5: shares are checked one by one, secrets put together, liars named (section 11)."""

from __future__ import annotations

from lazaret.errors import VerificationFailed
from security.crypto import shamir
from security.identity.membership import AggregationPolicy
from security.secagg import certificate_checks, statements
from security.secagg.certificates import FraudProof, Opened, OpenedShare
from security.secagg.coordinator.uploads import Dealing
from security.secagg.messages import Unmask
from security.secrets import Secret


class Opening:
    """Released shares of one certified set."""

    def __init__(self, policy: AggregationPolicy, dealing: Dealing, survivors: tuple[str, ...], digest: bytes) -> None:
        self._policy = policy
        self._dealing = dealing
        self._context = dealing.context
        self.survivors = survivors
        self._digest = digest
        self.replies: dict[str, Unmask] = {}
        self.frauds: list[FraudProof] = []

    def _kind(self, dealer: str) -> Opened:
        return Opened.SEED if dealer in self.survivors else Opened.MASK_KEY

    def take(self, message: Unmask) -> bool:
        """Take a reply; returns whether a quorum of good ones is there.

        :raises VerificationFailed: if a share is not the one that was dealt; the reply is signed, so that convicts it.
        """
        site, kx = message.site, self._dealing.kx
        if message.kx != kx or message.survivors != self._digest or len(message.shares) != self._context.n:
            raise VerificationFailed("reply is of another set", where=f"site {site}")
        statement = statements.unmask(message.kx, message.survivors, message.shares)
        statements.verify(self._policy.entry(site), statement, message.signature)
        index = self._context.position(site) - 1
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

    def open(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]] | None:
        """Seeds of the survivors and keys of the rest, in order; None if a dealer is proven to have cheated."""
        holders = sorted(self.replies)[: self._context.t]
        opened = {dealer: self._open_one(dealer, holders) for dealer in self._context.sites}
        if self.frauds:
            return None
        seeds = tuple(opened[site] for site in self._context.sites if site in self.survivors)
        keys = tuple(opened[site] for site in self._context.sites if site not in self.survivors)
        return seeds, keys

    def _open_one(self, dealer: str, holders: list[str]) -> bytes:
        at = self._context.position(dealer) - 1
        shares = {self._context.position(holder): Secret(self.replies[holder].shares[at]) for holder in holders}
        secret = shamir.join(shares, threshold=self._context.t)
        advert, kind = self._dealing.adverts[dealer], self._kind(dealer)
        if not certificate_checks.opens(
            self._dealing.ctx, dealer, kind, secret, commitment=advert.commitment, mask_key=advert.mask_key
        ):
            self.frauds.append(self._proof(dealer, holders, kind))
        return secret.reveal()

    def _proof(self, dealer: str, holders: list[str], kind: Opened) -> FraudProof:
        dealing, at = self._dealing, self._context.position(dealer) - 1
        lines = {holder: dealing.shares[dealer].shares[self._context.position(holder) - 1] for holder in holders}
        return FraudProof(
            advert=dealing.adverts[dealer],
            kx=dealing.kx,
            root=dealing.roots[dealer],
            deal_signature=dealing.shares[dealer].signature,
            kind=kind,
            shares=tuple(
                OpenedShare(
                    holder=holder,
                    share=self.replies[holder].shares[at],
                    b_hash=line.b_hash,
                    s_hash=line.s_hash,
                    box=line.box,
                    path=dealing.path(dealer, holder),
                )
                for holder, line in lines.items()
            ),
        )
