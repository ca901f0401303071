"""The coordinator's side of S1 and S2: it gathers adverts and share lists and passes on what belongs to whom."""

from __future__ import annotations

from security import key_agreement, merkle
from security.errors import VerificationFailed
from security.secagg import burst_checks, statements
from security.secagg import context as hashes
from security.secagg.attempt import deal_leaves, deal_root
from security.secagg.certificates import Advert
from security.secagg.context import RoundContext
from security.secagg.messages import Adverts, Deliver, DeliveredShare, Shares, SignedRoot
from security.secagg.policy import AggregationPolicy


class Equivocation(VerificationFailed):
    """Two signed answers to one question: the signer lied or was set back."""

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
        # What the sites would refuse must not count as there: else its sender stalls every attempt and is never missed.
        burst_checks.check_advert_keys([*self.adverts.values(), advert])
        key_agreement.require_usable(advert.mask_key, advert.share_key)
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
        empty = [index for index, share in enumerate(shares.shares) if not share.box]
        if shares.kx != self.kx or len(shares.shares) != self.context.n or empty != [self.context.position(site) - 1]:
            raise VerificationFailed("share list does not fit the cohort", where=f"site {site}")
        root = deal_root(self.kx, site, self.context.sites, shares.shares)
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
        sites = self.context.sites
        self._trees = {s.site: merkle.Tree(deal_leaves(self.kx, s.site, sites, s.shares)) for s in ordered}
        self.roots = {site: tree.root() for site, tree in self._trees.items()}
        self.deals = hashes.deals_digest(self.kx, [(site, self.roots[site]) for site in self.context.sites])

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
            DeliveredShare(dealer=dealer, share=self.shares[dealer].shares[index], path=self.path(dealer, holder))
            for dealer in self.context.sites
            if dealer != holder
        )
        return Deliver(kx=self.kx, roots=roots, shares=boxes)
