"""What both sides check in a dispute about a share box (docs/spec/secure-aggregation.md, section 11).

One function for each rule, called by name, so that a test can switch off exactly one. A holder whose box is wrong
accuses its dealer, and the dealer publishes the shares of that holder. No key is revealed, and nobody is left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lazaret.errors import PolicyViolation, VerificationFailed
from security.identity.membership import AggregationPolicy
from security.secagg import certificate_checks, statements
from security.secagg import context as hashes
from security.secagg.certificates import AbortCertificate, Advert, Opened
from security.secagg.context import RoundContext
from security.secagg.messages import Accusation, DealtShare
from security.secagg.site.journal import AttemptMemory
from security.secrets import Secret


def dealt_leaf(kx: bytes, dealer: str, holder: Advert, line: DealtShare) -> bytes:
    """What a dealer signs for one holder; the holder's key is part of it."""
    return hashes.share_leaf(
        kx,
        dealer=dealer,
        holder=holder.site,
        b_hash=line.b_hash,
        s_hash=line.s_hash,
        box=line.box,
        pair=line.pair,
        kem_key=holder.mask_kem,
    )


def check_dealt_shares(
    shares: tuple[Secret, Secret], line: DealtShare, *, kx: bytes, dealer: str, holder: str
) -> None:
    """These are the shares whose hashes the dealer signed. If a box holds others, the dealer is accused; if its answer
    does, it is convicted (section 11)."""
    for share, kind, expected in zip(shares, (Opened.SEED, Opened.MASK_KEY), (line.b_hash, line.s_hash), strict=True):
        certificate_checks.check_share_hash(share, kx=kx, dealer=dealer, holder=holder, kind=kind, expected=expected)


def check_pair(context: RoundContext, dealer: Advert, holder: str, pair: Secret | None) -> None:
    """A later member has the secret that the dealer's advert names for it, an earlier one has none (section 4)."""
    later = context.position(holder) > context.position(dealer.site)
    if later != (pair is not None):
        raise VerificationFailed("a secret of the pair is missing, or one too many", where=f"dealer {dealer.site}")
    if pair is not None and not certificate_checks.pair_opens(context, dealer, holder, pair):
        raise VerificationFailed("secret of the pair is not the one in the advert", where=f"dealer {dealer.site}")


def check_accusation(policy: AggregationPolicy, context: RoundContext, kx: bytes, accusation: Accusation) -> None:
    """The holder itself asks for its shares. The coordinator alone could ask for those of everybody, and open both
    secrets of the dealer."""
    if accusation.kx != kx or not {accusation.site, accusation.dealer} <= set(context.sites):
        raise VerificationFailed("accusation is of another attempt", where=f"site {accusation.site}")
    if accusation.site == accusation.dealer:
        raise VerificationFailed("a site cannot accuse itself", where=f"site {accusation.site}")
    statement = statements.accuse(accusation.kx, accusation.dealer)
    statements.verify(policy.entry(accusation.site), statement, accusation.signature)


def check_disclosures(context: RoundContext, disclosed: Collection[str]) -> None:
    """Published shares and those of c colluders together stay below the t that open a secret (section 2)."""
    if len(set(disclosed)) + context.c >= context.t:
        raise PolicyViolation("more shares of this site are disputed than may be published", where="accusation")


def still_secret(memory: AttemptMemory, certificate: AbortCertificate) -> AbortCertificate:
    """The aborts that keep a share of this site secret: not those of holders whose share is public (section 11)."""
    return replace(certificate, lines=tuple(line for line in certificate.lines if line.site not in memory.disclosed))
