"""What an attempt is bound to: the hash of every step (docs/spec/secure-aggregation.md, section 4).

Nothing hashes a later value: manifest, then CTX, adverts, KX, deals, D, uploads, U, certificate, opened secrets, R. A
coordinator that shows two sites different values at any step makes their hashes differ, and with them either the masks
or the signatures.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Final

from lazaret.errors import CodecError
from security import labels
from security.crypto import encoding
from security.crypto.shamir import ShareKind
from security.secagg import fields
from security.secagg.fields import Count, Digest, Many, Nested, SiteId, SiteIds, Wire
from security.secagg.thresholds import Thresholds
from security.secrets import Secret

PROTOCOL_VERSION = 1


def digest(label: bytes, *parts: bytes) -> bytes:
    hasher = hashlib.sha256(label)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortMember(Wire):
    """A site of the cohort, named together with the signing certificate it must use."""

    site: SiteId
    cert: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatOf(Wire):
    """An earlier attempt whose certified set this one repeats."""

    ctx: Digest
    survivors: Digest


MAX_EARLIER_SUMS: Final = 32  # on one model: a site sends three different updates on it, or six, before it waits


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierSum(Wire):
    """A sum of updates on the same model that exists, or may exist: of a round before, or of an attempt before."""

    round: Count
    sites: SiteIds


@dataclass(frozen=True, kw_only=True)  # without slots: CTX is asked for at every step and kept
class RoundContext(Wire):
    """Everything that an attempt's keys are bound to before the first key is made; its hash is CTX.

    `repeats` empty is a normal attempt; otherwise an exact repeat of the certified sets it names (section 8).
    `sums` are the certified sets of earlier attempts on this model, so that all members compare with the same ones
    (section 10, "Differences of sums").
    """

    version: Count
    federation: SiteId
    manifest_hash: Digest
    run: SiteId
    round: Count
    attempt: Count
    n: Count
    t: Count
    a: Count
    c: Count
    m: Count
    members: Annotated[tuple[CohortMember, ...], Many(Nested(CohortMember))]
    coordinator_cert: Digest
    suite: SiteId
    repeats: Annotated[tuple[RepeatOf, ...], Many(Nested(RepeatOf), limit=64)]
    sums: Annotated[tuple[EarlierSum, ...], Many(Nested(EarlierSum), limit=MAX_EARLIER_SUMS)]
    state_hash: Digest
    config_hash: Digest
    layout_hash: Digest
    prev_result: Digest

    def __post_init__(self) -> None:
        Wire.__post_init__(self)
        ids = [member.site.encode() for member in self.members]
        if any(low >= high for low, high in itertools.pairwise(ids)):
            raise CodecError("members must be distinct and sorted by id", where="RoundContext.members")
        if len({member.cert for member in self.members}) != len(ids) or len(ids) != self.n:
            raise CodecError("members must be n in number, each with its own certificate", where="RoundContext.members")

    @cached_property
    def sites(self) -> tuple[str, ...]:
        return tuple(member.site for member in self.members)

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(n=self.n, t=self.t, a=self.a, c=self.c, m=self.m)

    @property
    def place(self) -> tuple[int, int]:
        """Round and attempt: what the high-water mark compares."""
        return self.round, self.attempt

    def position(self, site: str) -> int:
        """The Shamir x-coordinate of a site, 1..n."""
        return self._positions[site]

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {site: index for index, site in enumerate(self.sites, start=1)}

    @cached_property
    def _ctx(self) -> bytes:
        return digest(labels.CONTEXT, self.to_bytes())

    def ctx(self) -> bytes:
        """CTX, the hash of everything above."""
        return self._ctx


def key_transcript(ctx: bytes, advert_bodies: Iterable[bytes]) -> bytes:
    """KX: all fresh keys of the attempt, in the order of the members."""
    return digest(labels.KEYS, ctx, encoding.array(encoding.tlv(body) for body in advert_bodies))


def commitment(ctx: bytes, site: str, seed: bytes) -> bytes:
    """com_i: fixes a site's self-mask seed before any share of it is dealt."""
    return digest(labels.SELF_MASK_COMMITMENT, ctx, encoding.text(site), encoding.tlv(seed))


def pair_hash(ctx: bytes, site: str, peer: str, pair: bytes) -> bytes:
    """Fixes what a site adds to the mask key of a later one, before either has sent it."""
    return digest(labels.PAIR, ctx, encoding.text(site), encoding.text(peer), encoding.tlv(pair))


def share_hash(share: Secret, *, kx: bytes, dealer: str, holder: str, kind: ShareKind) -> bytes:
    """Hash one whole share, so that a wrong one is blamed on the holder that sends it.

    A hash covers all 32 bytes at once: a hash of single bytes could be inverted by trying all values.
    """
    ends = encoding.text(dealer) + encoding.text(holder) + encoding.text(kind)
    return digest(labels.SHARE, kx, ends, encoding.tlv(share.reveal()))


def share_leaf(
    kx: bytes, *, dealer: str, holder: str, b_hash: bytes, s_hash: bytes, box: bytes, pair: bytes, kem_key: bytes
) -> bytes:
    """One line of a dealer's signed list: the two share hashes and the sealed boxes for one holder.

    :param pair: the box with the secret of the pair; empty for the dealer itself and members before it.
    :param kem_key: the holder's key that the box is sealed to: the dealer answers for its choice.
    """
    ends = encoding.text(dealer) + encoding.text(holder)
    sealed = hashlib.sha256(box).digest() + hashlib.sha256(encoding.tlv(kem_key) + pair).digest()
    return digest(labels.SHARE_LEAF, kx, ends, b_hash, s_hash, sealed)


def _named(pairs: Sequence[tuple[str, bytes]]) -> bytes:
    return encoding.array(encoding.text(site) + encoding.tlv(root) for site, root in pairs)


def deals_digest(kx: bytes, roots: Sequence[tuple[str, bytes]]) -> bytes:
    """D: every dealer's root, over the whole cohort."""
    return digest(labels.DEALS, kx, _named(roots))


def survivors_digest(kx: bytes, deals: bytes, roots: Sequence[tuple[str, bytes]]) -> bytes:
    """U: the survivors and the roots of their uploads; the one thing a site ever agrees to."""
    return digest(labels.SURVIVORS, kx, deals, _named(roots))


class SumVerdict(IntEnum):
    """What the range tests say of a sum; a VOID sum leaves the model as it was."""

    GOOD = 0
    VOID = 1


def result_digest(
    *,
    kx: bytes,
    survivors: bytes,
    verdict: SumVerdict,
    sum_root: bytes,
    seeds: Sequence[bytes],
    keys: Sequence[bytes],
    pairs: Sequence[bytes],
    state_hash: bytes,
    movements: bytes = b"",
) -> bytes:
    """R: the sum, the secrets that were opened for it, the model that follows and how far its tensors have moved
    lately; links the next round to this one."""
    opened = b"".join(encoding.array(map(encoding.tlv, kind)) for kind in (seeds, keys, pairs))
    return digest(labels.RESULT, kx, survivors, encoding.u64(verdict), sum_root, opened, state_hash, movements)


def voted_digest(result_hash: bytes, votes: Sequence[tuple[str, int]]) -> bytes:
    """What the next context names in the place of R where sites vote: the result and the one vote set on it."""
    return digest(
        labels.VOTED, result_hash, encoding.array(encoding.text(site) + encoding.u64(vote) for site, vote in votes)
    )


ZERO_DIGEST = bytes(fields.DIGEST.length)
