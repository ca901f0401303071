"""A symbolic model of keys, context and commitments (docs/spec/secure-aggregation.md, section 4), small enough to read.

Messages are terms, and cryptography is perfect unless it is named as broken. The attacker is the coordinator together
with site C: it has all that was ever sent, decides what A and B receive, and derives what the rules of `Attacker` give.
A comes before B, so that A deals r_AB. In attempt 1 A dropped out and its seed was opened; in attempt 2 all stay. Every
choice of the attacker is tried: which context and which adverts each of the two is shown, and which pair box B gets.

`attacks` says which of three promises a choice breaks, with or without each check of a site:

mask     the key of the mask between A and B in attempt 2 stays secret;
shares   what B dealt to A in attempt 1 stays secret, although the seed of A was opened;
view     if A and B share a mask key, they have seen the same context and the same adverts.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

Term = Any  # an atom (text), or (head, parts...)

HYBRID, CLASSIC = "x25519-mlkem768", "x25519"
CHECKS = {
    "suite": "the suite of the context is the manifest's",
    "signature": "adverts are signed by their site",
    "context": "an advert names the context it was made for",
    "commitment": "r_ij is compared with the hash in the dealer's advert",
    "both": "a mask key needs X25519 and r_ij, which ML-KEM carries",
    "both-shares": "a share box needs X25519 and ML-KEM",
    "pair": "r_ij depends on j",
    "apart": "share keys do not come from the seed that may be opened",
    "fresh": "every attempt has a new seed",
    "views": "mask keys depend on all adverts (KX)",
}


def tuple_of(*parts: Term) -> Term:
    return ("tuple", *parts)


def kdf(*parts: Term) -> Term:
    return ("kdf", *parts)


def dh(own: Term, public: Term) -> Term:
    """X25519: the same from both ends. A public key is ("x-pub", secret)."""
    return ("dh", frozenset((own, public[1])))


class Attacker:
    """What follows from a set of terms (Dolev and Yao), with some primitives broken."""

    def __init__(self, known: Collection[Term], broken: Collection[str]) -> None:
        self.known, self.broken = set(known), frozenset(broken)
        while new := {part for term in self.known for part in self._parts(term)} - self.known:
            self.known |= new

    def _parts(self, term: Term) -> Iterator[Term]:
        """What can be taken out of a term."""
        match term:
            case ("tuple", *parts):
                yield from parts
            case ("signed", _, message):
                yield message
            case ("box", key, message) if self.makes(key):
                yield message
            case ("kem", ("kem-pub", secret), message) if "ml-kem" in self.broken or self.makes(secret):
                yield message
            case ("x-pub", secret) if "x25519" in self.broken:
                yield secret

    def makes(self, term: Term) -> bool:
        """Whether it has the term, or can put it together."""
        if term in self.known:
            return True
        match term:
            case ("dh", ends):
                one, other = ends if len(ends) == 2 else (*ends, *ends)
                pairs = ((one, other), (other, one))
                return any(self.makes(own) and self.makes(("x-pub", peer)) for own, peer in pairs)
            case (_, *parts):
                return all(map(self.makes, parts))
            case _:
                return False


@dataclass(frozen=True)
class Advert:
    """What a site says of its keys."""

    ctx: Term
    mask: Term
    mask_kem: Term
    share: Term
    share_kem: Term
    pairs: tuple[tuple[str, Term], ...]

    def body(self, without: Collection[str]) -> Term:
        ctx = () if "context" in without else (self.ctx,)
        pairs = (part for peer, digest in self.pairs for part in (peer, digest))
        return tuple_of(*ctx, self.mask, self.mask_kem, self.share, self.share_kem, *pairs)


@dataclass(frozen=True)
class Party:
    """The secrets of one site in one attempt."""

    name: str
    attempt: int
    ctx: Term
    without: frozenset[str]

    @property
    def seed(self) -> Term:
        return f"seed of {self.name}" + ("" if "fresh" in self.without else f", attempt {self.attempt}")

    @property
    def mask(self) -> Term:
        return kdf(self.seed, self.ctx, "x25519")

    @property
    def mask_kem(self) -> Term:
        return kdf(self.seed, self.ctx, "ml-kem")

    def share(self, kind: str) -> Term:
        return kdf(self.seed, "share", kind) if "apart" in self.without else f"{kind} {self.name} {self.attempt}"

    def pair(self, peer: str) -> Term:
        return kdf(self.seed, self.ctx, "pair", *(() if "pair" in self.without else (peer,)))

    def advert(self) -> Advert:
        later = [peer for peer in "ABC" if peer > self.name]
        pairs = tuple((peer, ("hash", self.pair(peer))) for peer in later)
        keys = (("x-pub", self.mask), ("kem-pub", self.mask_kem))
        return Advert(self.ctx, *keys, ("x-pub", self.share("x")), ("kem-pub", self.share("kem")), pairs)

    def signed(self) -> Term:
        return ("signed", f"key of {self.name}", self.advert().body(self.without))


def share_box(dealer: Party, holder: Advert, content: Term, without: Collection[str]) -> Term:
    fresh = f"encapsulated by {dealer.name}"
    agreed = (dh(dealer.share("x"), holder.share),) if "both-shares" in without else (
        dh(dealer.share("x"), holder.share),
        fresh,
    )
    return tuple_of(("kem", holder.share_kem, fresh), ("box", kdf(*agreed, "shares"), content))


def mask_key(own: Term, public: Term, pair: Term, suite: str, kx: Term, without: Collection[str]) -> Term:
    material = [dh(own, public)] if suite == CLASSIC or "both" in without else [dh(own, public), pair]
    return kdf(*material, "mask", suite, *(() if "views" in without else (kx,)))


def context(attempt: int, suite: str) -> Term:
    return tuple_of("context", f"attempt {attempt}", suite)


def transcript(without: frozenset[str], parties: Collection[Party]) -> set[Term]:
    """What the attacker has of attempt 1, and its own secrets."""
    first = {name: Party(name, 1, context(1, HYBRID), without) for name in "AB"}
    known: set[Term] = {"A", "B", "C", "pair", "share", "shares", "mask", "x", "kem", "x25519", "ml-kem", "context"}
    known |= {"attempt 1", "attempt 2", HYBRID, CLASSIC, "key of C", "own secret", "other secret"}
    known |= {party.signed() for party in (*first.values(), *parties)}
    known.add(share_box(first["B"], first["A"].advert(), "shares of B for A", without))
    known.add(first["A"].seed)  # A dropped out of attempt 1
    # C is a member: what A and B deal to it, it has.
    known |= {party.pair("C") for party in (*first.values(), *parties)}
    return known


def _accepted(site: Party, peer: str, shown: Advert, attacker: Attacker) -> bool:
    """The checks of a site on the advert of another one."""
    if "context" not in site.without and shown.ctx != site.ctx:
        return False
    return "signature" in site.without or attacker.makes(("signed", f"key of {peer}", shown.body(site.without)))


def attacks(without: Collection[str] = (), broken: Collection[str] = ()) -> set[str]:
    """Which promises some choice of the attacker breaks."""
    without, found = frozenset(without), set[str]()
    suites = (HYBRID, CLASSIC) if "suite" in without else (HYBRID,)
    for suite_a, suite_b in itertools.product(suites, repeat=2):
        a, b = (Party(name, 2, context(2, suite), without) for name, suite in (("A", suite_a), ("B", suite_b)))
        attacker = Attacker(transcript(without, (a, b)), broken)
        if attacker.makes("shares of B for A"):
            found.add("shares")
        found.update(_second_attempt(a, b, attacker))
    return found


def _second_attempt(a: Party, b: Party, attacker: Attacker) -> Iterator[str]:
    without, old = a.without, context(1, HYBRID)
    of_a = [a.advert(), Party("A", 1, old, without).advert(), _forged(b.ctx, "B")]
    of_b = [b.advert(), Party("B", 1, old, without).advert(), _forged(a.ctx)]
    of_c = ("own secret", "other secret")  # C signs what it likes, to each another advert
    seen_by_a = [(peer, _forged(a.ctx, secret=c)) for peer in of_b for c in of_c if _accepted(a, "B", peer, attacker)]
    seen_by_b = [(peer, _forged(b.ctx, secret=c)) for peer in of_a for c in of_c if _accepted(b, "A", peer, attacker)]
    for (peer_of_a, third_a), (peer_of_b, third_b) in itertools.product(seen_by_a, seen_by_b):
        view_a = tuple_of(a.ctx, a.advert().body(()), peer_of_a.body(()), third_a.body(()))
        view_b = tuple_of(b.ctx, peer_of_b.body(()), b.advert().body(()), third_b.body(()))
        key_a = mask_key(a.mask, peer_of_a.mask, a.pair("B"), a.ctx[3], ("hash", view_a), without)
        # A sends r_AB in a box for the ML-KEM key that it was shown.
        box = ("kem", peer_of_a.mask_kem, a.pair("B"))
        after = Attacker(attacker.known | {box, view_a, view_b}, attacker.broken)
        for pair in (a.pair("B"), Party("A", 1, old, without).pair("B"), "own secret"):
            committed = dict(peer_of_b.pairs).get("B") == ("hash", pair)
            if not after.makes(("kem", b.advert().mask_kem, pair)) or not (committed or "commitment" in without):
                continue
            key_b = mask_key(b.mask, peer_of_b.mask, pair, b.ctx[3], ("hash", view_b), without)
            if after.makes(key_b):
                yield "mask"
            if key_a == key_b and view_a != view_b:
                yield "view"


def _forged(ctx: Term, *later: str, secret: str = "own secret") -> Advert:
    """Keys that the attacker has itself."""
    pairs = tuple((peer, ("hash", "own secret")) for peer in later)
    return Advert(ctx, *(("x-pub", secret), ("kem-pub", secret)) * 2, pairs)
