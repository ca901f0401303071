"""What makes a certificate valid: distinct members, enough of them, each signature over the right statement.

Sections are those of docs/spec/secure-aggregation.md. There are four kinds: agreements of `t` members on one set,
aborts of `a` members, the exact repeat of a certified set, and acknowledgements that cover a result. Proofs of fraud,
disputes about share boxes and the sharing of work in an audit are here too, because both sides need them. One function
for each rule, called by name, so that a test can switch off exactly one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from lazaret.errors import PolicyViolation, VerificationFailed
from security.crypto import key_agreement, merkle, shamir
from security.crypto.encoding import text, u64
from security.identity.membership import AggregationPolicy, AuditMode
from security.secagg import context as hashes
from security.secagg import statements
from security.secagg.certificates import (
    AbortCertificate,
    Ack,
    Advert,
    CheckCertificate,
    DealtLine,
    FraudProof,
    Opened,
    PairFraud,
    RepeatCertificate,
    Signed,
    Vote,
)
from security.secagg.context import RoundContext
from security.secagg.messages import Accusation, DealtShare
from security.secagg.thresholds import Thresholds
from security.secrets import Secret


def check_distinct_members(sites: Sequence[str], members: Collection[str], where: str) -> None:
    """Certificates count members, not signatures: one colluder can sign often (section 5)."""
    if len(set(sites)) != len(sites) or not set(sites) <= set(members):
        raise VerificationFailed("signers are not distinct members of the cohort", where=where)


def check_agreements(
    policy: AggregationPolicy,
    members: Collection[str],
    t: int,
    *,
    kx: bytes,
    survivors: bytes,
    agreements: Sequence[Signed],
) -> None:
    """At least t members agreed to exactly this set under exactly these keys (sections 2 and 8).

    :param members: the cohort; signatures of other roster sites do not count.
    :param survivors: the digest U, not the list.
    """
    check_distinct_members([line.site for line in agreements], members, "agreements")
    if len(agreements) < t:
        raise VerificationFailed(f"{len(agreements)} agreements are fewer than the quorum of {t}", where="agreements")
    statement = statements.agree(kx, survivors)
    for line in agreements:
        statements.verify(policy.entry(line.site), statement, line.signature)


def check_abort_certificate(
    policy: AggregationPolicy, members: Collection[str], thresholds: Thresholds, certificate: AbortCertificate
) -> None:
    """At least `a` members will never release. Even if c of these signatures are dishonest, fewer than t releases can
    exist: a = n + c - t + 1 (section 2)."""
    check_distinct_members([line.site for line in certificate.lines], members, "abort certificate")
    if len(certificate.lines) < thresholds.a:
        raise VerificationFailed(
            f"{len(certificate.lines)} aborts are fewer than the abort quorum of {thresholds.a}",
            where="abort certificate",
        )
    for line in certificate.lines:
        statements.verify(policy.entry(line.site), statements.abort(certificate.ctx, line.code), line.signature)


def check_repeat_certificate(policy: AggregationPolicy, old: RoundContext, certificate: RepeatCertificate) -> bytes:
    """The old set was certified by t agreements, so it is the only one that the old attempt can open. Returns its U
    (section 8)."""
    roots = [(line.site, line.root) for line in certificate.roots]
    check_distinct_members([site for site, _ in roots], old.sites, "repeat certificate")
    survivors = hashes.survivors_digest(certificate.kx, certificate.deals, roots)
    check_agreements(
        policy, old.sites, old.t, kx=certificate.kx, survivors=survivors, agreements=certificate.agreements
    )
    for fraud in certificate.frauds:
        # A proof from another attempt would remove an honest dealer from the set.
        if fraud.kx != certificate.kx:
            raise VerificationFailed("fraud proof is of another attempt", where="repeat certificate")
        check_fraud_proof(policy, old, fraud)
    for pair_fraud in certificate.pair_frauds:
        if pair_fraud.kx != certificate.kx:
            raise VerificationFailed("fraud proof is of another attempt", where="repeat certificate")
        check_pair_fraud(policy, old, pair_fraud)
    return survivors


def check_fraud_proof(policy: AggregationPolicy, context: RoundContext, proof: FraudProof) -> None:
    """Exactly t shares, each as the dealer signed it, that do not open what the dealer committed to (section 11).

    Each share is checked against the dealer's own signed list, so that holders cannot invent a proof together.
    """
    advert = proof.advert
    _check_dealer(policy, context, proof)
    check_distinct_members([share.line.holder for share in proof.shares], context.sites, "fraud proof")
    kind = Opened(proof.kind)
    for share in proof.shares:
        _check_line(context, proof, share.line)
        check_share_hash(
            Secret(share.share),
            kx=proof.kx,
            dealer=advert.site,
            holder=share.line.holder,
            kind=kind,
            expected=share.line.b_hash if kind is Opened.SEED else share.line.s_hash,
        )
    opened = shamir.join(
        {context.position(share.line.holder): Secret(share.share) for share in proof.shares}, threshold=context.t
    )
    if opens(context, kind, opened, advert):
        raise VerificationFailed("the shares do give the dealer's secret", where="fraud proof")


def _check_dealer(policy: AggregationPolicy, context: RoundContext, proof: FraudProof | PairFraud) -> None:
    advert = proof.advert
    entry = policy.entry(advert.site)
    if advert.ctx != context.ctx():
        raise VerificationFailed("advert is of another attempt", where="fraud proof")
    statements.verify(entry, statements.advert(policy, advert), advert.signature)
    statements.verify(entry, statements.deal(proof.kx, proof.root), proof.deal_signature)


def check_pair_fraud(policy: AggregationPolicy, context: RoundContext, proof: PairFraud) -> None:
    """The dealer sealed another secret to a later member than its advert names (section 11).

    The dealer signed to which key it sealed it, and this key belongs to the opened seed: nobody can invent a proof.
    """
    line, dealer, ctx = proof.line, proof.advert.site, context.ctx()
    _check_dealer(policy, context, proof)
    if line.holder not in context.sites or line.holder.encode() <= dealer.encode():
        raise VerificationFailed("no secret was owed to this holder", where="fraud proof")
    _check_line(context, proof, line)
    keys = key_agreement.HybridPair.from_seed(Secret(proof.seed), ctx=ctx, site=line.holder)
    if keys.kem_public != line.kem_key:
        raise VerificationFailed("the seed is not that of the key it was sealed to", where="fraud proof")
    if sealed_pair(context, proof.advert, keys, line.pair, kx=proof.kx, holder=line.holder) is not None:
        raise VerificationFailed("the sealed secret is the one of the advert", where="fraud proof")


def sealed_pair(
    context: RoundContext, dealer: Advert, keys: key_agreement.HybridPair, box: bytes, *, kx: bytes, holder: str
) -> Secret | None:
    """The secret of a pair, as the later member reads it; None if it is not the one in the dealer's advert."""
    try:
        found = key_agreement.open_pair(keys, box, kx=kx, source=dealer.site, destination=holder)
    except VerificationFailed:
        return None
    return found if pair_opens(context, dealer, holder, found) else None


def pair_opens(context: RoundContext, dealer: Advert, holder: str, pair: Secret) -> bool:
    """Whether a secret is the one that a dealer's advert names for a later member."""
    at = context.position(holder) - context.position(dealer.site) - 1
    expected = dealer.pair_hashes[at] if 0 <= at < len(dealer.pair_hashes) else b""
    return hashes.pair_hash(context.ctx(), dealer.site, holder, pair.reveal()) == expected


def _check_line(context: RoundContext, proof: FraudProof | PairFraud, line: DealtLine) -> None:
    leaf = hashes.share_leaf(
        proof.kx,
        dealer=proof.advert.site,
        holder=line.holder,
        b_hash=line.b_hash,
        s_hash=line.s_hash,
        box=line.box,
        pair=line.pair,
        kem_key=line.kem_key,
    )
    merkle.verify_inclusion(
        leaf=merkle.leaf_hash(leaf),
        index=context.position(line.holder) - 1,
        size=context.n,
        path=line.path,
        root=proof.root,
    )


def check_share_hash(share: Secret, *, kx: bytes, dealer: str, holder: str, kind: Opened, expected: bytes) -> None:
    """A share is the one that its dealer listed under a signed root.

    :param kind: which of the two secrets it belongs to; the hashes differ, so that one cannot pass for the other.
    """
    letter: shamir.ShareKind = "b" if kind is Opened.SEED else "s"
    if hashes.share_hash(share, kx=kx, dealer=dealer, holder=holder, kind=letter) != expected:
        raise VerificationFailed("share is not the one that was dealt", where=f"dealer {dealer}")


def opens(context: RoundContext, kind: Opened, secret: Secret, advert: Advert) -> bool:
    """Whether a secret is the one behind a site's commitment, or behind all its mask keys and the secrets of pairs."""
    ctx, site = context.ctx(), advert.site
    if kind is Opened.SEED:
        return hashes.commitment(ctx, site, secret.reveal()) == advert.commitment
    keys = key_agreement.HybridPair.from_seed(secret, ctx=ctx, site=site)
    return (keys.public, keys.kem_public) == (advert.mask_key, advert.mask_kem) and advert.pair_hashes == tuple(
        hashes.pair_hash(ctx, site, peer, key_agreement.pair_secret(secret, ctx=ctx, site=site, peer=peer).reveal())
        for peer in context.sites[context.position(site) :]
    )


def bitmap_of(chunks: Collection[int], total: int) -> bytes:
    """Bits of the chunks found good, chunk 0 in the lowest bit of the first byte."""
    bits = bytearray(-(-total // 8))
    for chunk in chunks:
        bits[chunk // 8] |= 1 << (chunk % 8)
    return bytes(bits)


def chunks_in(bitmap: bytes, total: int) -> set[int]:
    """The chunks whose bits are set; a bitmap of another length, or with bits beyond the end, is refused."""
    if len(bitmap) != -(-total // 8) or int.from_bytes(bitmap, "little") >> total:
        raise VerificationFailed("bitmap does not fit the vector", where="acknowledgement")
    return {chunk for chunk in range(total) if bitmap[chunk // 8] >> (chunk % 8) & 1}


def check_ack(policy: AggregationPolicy, ack: Ack, *, result: bytes, state_hash: bytes) -> set[int]:
    """An acknowledgement of this result by a roster site; returns the chunks that it has checked."""
    if ack.result != result or ack.state_hash != state_hash:
        raise VerificationFailed("acknowledgement is of another result", where=f"site {ack.site}")
    if bool(ack.vote) != policy.vote:
        raise VerificationFailed("acknowledgement without the vote that is due, or with one", where=f"site {ack.site}")
    statement = statements.ack(ack.result, ack.state_hash, ack.bitmap, ack.vote)
    statements.verify(policy.entry(ack.site), statement, ack.signature)
    return chunks_in(ack.bitmap, policy.chunks)


def covers(policy: AggregationPolicy, seen: Sequence[tuple[str, set[int]]], *, quorum: int) -> bool:
    """Whether acknowledgements by distinct sites are enough (section 10).

    Covered: each chunk by c + 1 sites, so that an honest one recomputed it. Sampled: a quorum, whatever chunks.

    :param seen: sites with the chunks that each has checked.
    """
    if policy.audit is AuditMode.SAMPLED:
        return len(seen) >= quorum
    counts = [0] * policy.chunks
    for _, chunks in seen:
        for chunk in chunks:
            counts[chunk] += 1
    return min(counts) > policy.c


def check_distinct_acks(check: CheckCertificate) -> None:
    """A site counts once, however often it signs: otherwise one colluder alone could certify a forged sum."""
    sites = [ack.site for ack in check.acks]
    if len(set(sites)) != len(sites):
        raise VerificationFailed("a site acknowledges twice", where="check certificate")


def check_certificate(
    policy: AggregationPolicy, check: CheckCertificate | None, *, result: bytes, state_hash: bytes, quorum: int
) -> bool:
    """A certificate of success, because the coordinator could drop a warning but cannot hide a missing certificate
    (section 10).

    :returns: whether the model follows: False if the sites have voted against it.
    """
    if check is None:
        raise VerificationFailed("the newest result comes without its check certificate", where="plan")
    check_distinct_acks(check)
    # The roster may have changed since: signatures of sites that were removed no longer count.
    standing = [ack for ack in check.acks if policy.lists(ack.site)]
    seen = [(ack.site, check_ack(policy, ack, result=result, state_hash=state_hash)) for ack in standing]
    if not covers(policy, seen, quorum=quorum):
        raise VerificationFailed("the acknowledgements do not cover the result", where="check certificate")
    if not policy.vote:
        return True
    if len(standing) < len(check.acks):
        # Without its vote the set would be another one, and perhaps have another outcome.
        raise VerificationFailed("a site that has voted is not listed any more", where="check certificate")
    check_vote_count(check, quorum)
    return accepted(check.acks, quorum)


# Votes (section 10).


def check_vote_count(check: CheckCertificate, quorum: int) -> None:
    """Absence is not acceptance, and no refusal either: a set of fewer than `quorum` votes decides nothing."""
    if len(check.acks) < quorum:
        raise VerificationFailed(f"{len(check.acks)} votes are fewer than the quorum of {quorum}", where="vote")


def accepted(acks: Sequence[Ack], quorum: int) -> bool:
    """A model follows if a quorum accepts it: with `c` liars among them, more honest sites than liars have said so."""
    return sum(ack.vote == Vote.ACCEPT for ack in acks) >= quorum


def link_after(policy: AggregationPolicy, result: bytes, check: CheckCertificate | None) -> bytes:
    """What the next context names: the result or, where sites vote, the result together with its vote set."""
    if not policy.vote or check is None:
        return result
    return hashes.voted_digest(result, sorted((ack.site, ack.vote) for ack in check.acks))


def audit_rank(result: bytes, chunk: int, site: str) -> bytes:
    """The order in which sites are assigned to a chunk. It only spreads work; safety needs c + 1 of them."""
    return hashlib.sha256(result + u64(chunk) + text(site)).digest()


# Disputes about a share box (section 11). A holder whose box is wrong accuses its dealer, and the dealer publishes the
# shares of that holder. No key is revealed, and nobody is left out.


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
        check_share_hash(share, kx=kx, dealer=dealer, holder=holder, kind=kind, expected=expected)


def check_pair(context: RoundContext, dealer: Advert, holder: str, pair: Secret | None) -> None:
    """A later member has the secret that the dealer's advert names for it, an earlier one has none (section 4)."""
    later = context.position(holder) > context.position(dealer.site)
    if later != (pair is not None):
        raise VerificationFailed("a secret of the pair is missing, or one too many", where=f"dealer {dealer.site}")
    if pair is not None and not pair_opens(context, dealer, holder, pair):
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


def still_secret(certificate: AbortCertificate, disclosed: Collection[str]) -> AbortCertificate:
    """The aborts that keep a share of a site secret: not those of holders whose share is public (section 11)."""
    return replace(certificate, lines=tuple(line for line in certificate.lines if line.site not in disclosed))
