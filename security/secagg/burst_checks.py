"""What a site asks of C1 to C4, and what both sides ask of signed pieces (docs/spec/secure-aggregation.md, section 3).

One function for each rule, called by name from the machines, so that a test can take away exactly one and show the
attack it stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from security import merkle
from security.errors import RemoteProtocolError, VerificationFailed
from security.secagg import certificate_checks, statements
from security.secagg import context as hashes
from security.secagg.certificates import Advert, Opened
from security.secagg.context import RoundContext
from security.secagg.journal import AttemptMemory, Journal
from security.secagg.messages import Adverts, DeliveredShare, Quorum, SignedRoot
from security.secagg.policy import AggregationPolicy
from security.secagg.records import Outcome
from security.secrets import Secret

# C1


def check_adverts_cohort(context: RoundContext, adverts: Sequence[Advert]) -> None:
    """Exactly the planned cohort, all in this context."""
    if tuple(advert.site for advert in adverts) != context.sites:
        raise VerificationFailed("adverts are not those of the planned cohort", where="adverts")
    if any(advert.ctx != context.ctx() for advert in adverts):
        raise VerificationFailed("an advert is of another context", where="adverts")


def check_advert_signatures(policy: AggregationPolicy, adverts: Sequence[Advert]) -> None:
    """Keys belong to the sites that the consortium listed; a coordinator cannot put its own in their place."""
    for advert in adverts:
        statements.verify(policy.entry(advert.site), statements.advert(policy, advert), advert.signature)


def check_advert_keys(adverts: Sequence[Advert]) -> None:
    """All 2n keys are distinct: a key shown under two names would give a site a mask with itself."""
    keys = [key for advert in adverts for key in (advert.mask_key, advert.share_key)]
    if len(set(keys)) != len(keys):
        raise VerificationFailed("two adverts share a key", where="adverts")


def check_own_advert(own: Advert, adverts: Sequence[Advert]) -> None:
    if own not in adverts:
        raise VerificationFailed("this site's own advert was changed", where="adverts")


class SetBack(VerificationFailed):
    """A site has signed an advert that it does not remember: its memory was restored from a copy."""

    def __init__(self, known: Advert) -> None:
        super().__init__(
            "adverts do not count up: the site's state directory was set back",
            where=f"site {known.site}",
            hint="the consortium must enrol it anew",
        )
        self.known = known


def check_advert_sequences(peers: Mapping[str, Advert], adverts: Sequence[Advert], own: str) -> None:
    """A site that was set back could answer twice; its peers notice, because they remember its last advert."""
    for advert in adverts:
        known = peers.get(advert.site)
        if advert.site != own and known is not None and advert.sequence <= known.sequence:
            raise SetBack(known)


# C2


def check_deal_roots(policy: AggregationPolicy, context: RoundContext, kx: bytes, roots: Sequence[SignedRoot]) -> None:
    """Every member dealt (U2 = U1): a whole class of states does not exist."""
    if tuple(line.site for line in roots) != context.sites:
        raise VerificationFailed("dealer roots are not those of the whole cohort", where="deliver")
    for line in roots:
        statements.verify(policy.entry(line.site), statements.deal(kx, line.root), line.signature)


def check_own_deal(own: bytes, site: str, roots: Sequence[SignedRoot]) -> None:
    if next((line.root for line in roots if line.site == site), None) != own:
        raise VerificationFailed("this site's own dealer root was changed", where="deliver")


def check_delivered_path(
    context: RoundContext, kx: bytes, holder: str, delivered: DeliveredShare, roots: Mapping[str, bytes]
) -> None:
    """A line is in its dealer's signed list; else the coordinator tampered, and nobody is to be accused."""
    share = delivered.share
    leaf = hashes.share_leaf(
        kx, dealer=delivered.dealer, holder=holder, b_hash=share.b_hash, s_hash=share.s_hash, box=share.box
    )
    merkle.verify_inclusion(
        leaf=merkle.leaf_hash(leaf),
        index=context.position(holder) - 1,
        size=context.n,
        path=delivered.path,
        root=roots[delivered.dealer],
    )


def check_delivered_shares(
    b_share: Secret, s_share: Secret, *, kx: bytes, holder: str, delivered: DeliveredShare
) -> None:
    """The box holds the shares whose hashes the dealer signed; else the dealer is accused."""
    for share, kind, expected in (
        (b_share, Opened.SEED, delivered.share.b_hash),
        (s_share, Opened.MASK_KEY, delivered.share.s_hash),
    ):
        certificate_checks.check_share_hash(
            share, kx=kx, dealer=delivered.dealer, holder=holder, kind=kind, expected=expected
        )


# C3


def check_survivors_members(context: RoundContext, sites: Sequence[str]) -> None:
    """A subset of the cohort in its order; all of it in an exact repeat."""
    if [site for site in context.sites if site in set(sites)] != list(sites):
        raise VerificationFailed("survivors are not distinct members in order", where="survivors")
    if context.repeats and len(sites) != context.n:
        raise VerificationFailed("an exact repeat needs every member", where="survivors")


def check_survivors_count(context: RoundContext, sites: Sequence[str]) -> None:
    if len(sites) < context.t:
        raise VerificationFailed(f"{len(sites)} survivors are fewer than the quorum of {context.t}", where="survivors")


def check_upload_roots(
    policy: AggregationPolicy, uploads: Sequence[SignedRoot], *, kx: bytes, deals: bytes, length: int
) -> None:
    """Every survivor uploaded under the same keys and the same deals: a dealer of two lists is caught here."""
    for line in uploads:
        statements.verify(policy.entry(line.site), statements.upload(kx, deals, length, line.root), line.signature)


def check_own_upload(site: str, own_root: bytes, uploads: Sequence[SignedRoot]) -> None:
    """A site may be left out, but not be counted with something it never sent."""
    if any(line.site == site and line.root != own_root for line in uploads):
        raise VerificationFailed("this site's own upload was changed", where="survivors")


def check_not_agreed(memory: AttemptMemory) -> None:
    """At most one AGREE in an attempt."""
    if memory.agreed is not None or memory.outcome is not None:
        raise RemoteProtocolError("this site has already decided in this attempt", where="survivors")


def check_same_set(agreed: bytes, survivors: bytes) -> None:
    """Asked again after AGREE: the same set gets the same answer, another one gets none."""
    if survivors != agreed:
        raise RemoteProtocolError("this site has agreed to another set", where="survivors")


# C4


def check_quorum(policy: AggregationPolicy, context: RoundContext, quorum: Quorum) -> None:
    certificate_checks.check_agreements(
        policy,
        context.sites,
        context.t,
        kx=quorum.kx,
        survivors=quorum.survivors,
        agreements=quorum.agreements,
    )


def check_quorum_is_ours(agreed: bytes, quorum: Quorum) -> None:
    """Shares are released only for the very set that this site agreed to."""
    if quorum.survivors != agreed:
        raise RemoteProtocolError("quorum is for another set than this site agreed to", where="quorum")


def check_may_release(memory: AttemptMemory) -> None:
    if memory.outcome is Outcome.ABORTED:
        raise RemoteProtocolError("this site has aborted the attempt", where="quorum")


# ABORT


def check_abort_request(policy: AggregationPolicy, context: RoundContext, signature: bytes) -> None:
    statements.verify(policy.coordinator, statements.abort_request(context.ctx()), signature)


def check_may_abort(journal: Journal, ctx: bytes) -> None:
    """RELEASE and ABORT never both: an abort certificate says that no sum can exist."""
    if ctx in journal.released:
        raise RemoteProtocolError("this site has released in that attempt", where="abort request")


# Start-up


def check_own_advert_known(journal: Journal, policy: AggregationPolicy, site: str, advert: Advert) -> None:
    """Somebody shows this site an advert of its own: it must remember it, or else its memory was set back.

    :raises SetBack: if this site has signed something that it does not know of.
    """
    if advert.site != site:
        raise VerificationFailed("advert is another site's", where="rollback")
    statements.verify(policy.entry(site), statements.advert(policy, advert), advert.signature)
    remembered = {memory.advert.sequence: memory.advert for memory in journal.attempts.values()}
    if advert.sequence > journal.sequence or remembered.get(advert.sequence, advert) != advert:
        raise SetBack(advert)


def check_adverts_context(adverts: Adverts, ctx: bytes) -> None:
    if adverts.ctx != ctx:
        raise VerificationFailed("adverts are of another attempt", where="adverts")
