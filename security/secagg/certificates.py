"""Signed statements that are passed on: aborts, agreements, acknowledgements and proofs of fraud.

A certificate counts distinct members, never distinct signatures. This file states their form; `certificate_checks`
checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from security.crypto.key_agreement import BOX_BYTES, KEM_KEY_BYTES, PAIR_BYTES
from security.crypto.ring import FRAME_BYTES
from security.secagg.fields import (
    DIGEST,
    Bounded,
    Count,
    DataClass,
    Digest,
    Fixed,
    Key,
    Many,
    Nested,
    Number,
    Signature,
    SiteId,
    Wire,
)
from security.secagg.registry import Filing, Lengths, Sender, Shape, message
from security.secagg.state import MAX_MOVEMENTS

MAX_BITMAP = 64 * 1024


class AbortCode(IntEnum):
    """Why a site aborted; only a general reason, because the coordinator reads it (section 3)."""

    FAILED_CHECK = 1
    TIMED_OUT = 2
    RESTARTED = 3
    REQUESTED = 4
    EXPIRED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed(Wire):
    """A member's name and its signature over what the enclosing certificate states."""

    site: SiteId
    signature: Signature


SignedList = Annotated[tuple[Signed, ...], Many(Nested(Signed))]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRoot(Wire):
    """A site and a Merkle root of its own."""

    site: SiteId
    root: Digest


NamedRoots = Annotated[tuple[NamedRoot, ...], Many(Nested(NamedRoot))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortLine(Wire):
    """One site's ABORT inside a certificate."""

    site: SiteId
    code: Annotated[int, Number(limit=max(AbortCode), least=min(AbortCode))]
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortCertificate(Wire):
    """At least `a` members of the cohort will never release in this attempt: its sum can never exist."""

    ctx: Digest
    lines: Annotated[tuple[AbortLine, ...], Many(Nested(AbortLine))]


KemKey = Annotated[bytes, Fixed(KEM_KEY_BYTES), DataClass.PUBLIC_KEY]


@message(
    12,
    Sender.SITE,
    DataClass.PUBLIC_KEY,
    filing=Filing.ATTEMPT,
    size=lambda shape: {"pair_hashes": [None] * shape.path},
    mentions=lambda message: {"path": len(message.pair_hashes)},
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Advert(Wire):
    """S1: a site's fresh keys for one attempt, the checkpoint of its privacy log, and a commitment to its ledger.

    Mask keys and the secrets behind `pair_hashes`, one for each later member, come from the seed that is shared; share
    keys do not.
    """

    site: SiteId
    ctx: Digest
    mask_key: Key
    mask_kem: KemKey
    share_key: Key
    share_kem: KemKey
    pair_hashes: Annotated[tuple[bytes, ...], Many(DIGEST)]
    commitment: Digest
    sequence: Annotated[int, Number(least=1)]
    log_size: Count
    log_root: Digest
    ledger_head: Digest
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtLine(Wire):
    """One line of a dealer's list, with the path to the root that it signed."""

    holder: SiteId
    b_hash: Digest
    s_hash: Digest
    box: Annotated[bytes, Bounded(BOX_BYTES), DataClass.SEALED_SHARE]
    pair: Annotated[bytes, Bounded(PAIR_BYTES), DataClass.SEALED_SHARE]
    kem_key: KemKey
    path: Annotated[tuple[bytes, ...], Many(DIGEST, limit=8)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedShare(Wire):
    """One share that was released, with the line of its dealer."""

    share: Annotated[bytes, DIGEST, DataClass.MASK_SHARE]
    line: Annotated[DealtLine, Nested(DealtLine)]


class Opened(IntEnum):
    """Which of a dealer's two secrets a share belongs to."""

    SEED = 0
    MASK_KEY = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FraudProof(Wire):
    """t shares, each as the dealer signed it, that do not give the secret the dealer committed to.

    There is no such proof against an honest dealer: its shares do give its secret.
    """

    advert: Annotated[Advert, Nested(Advert)]
    kx: Digest
    root: Digest
    deal_signature: Signature
    kind: Annotated[int, Number(limit=max(Opened))]
    shares: Annotated[tuple[OpenedShare, ...], Many(Nested(OpenedShare))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFraud(Wire):
    """A dealer has sealed another secret for a later member than its advert names; shown by that member's opened seed.

    There is no such proof against an honest dealer: it signed which key it sealed the secret to.
    """

    advert: Annotated[Advert, Nested(Advert)]
    kx: Digest
    root: Digest
    deal_signature: Signature
    seed: Annotated[bytes, DIGEST, DataClass.MASK_SHARE]
    line: Annotated[DealtLine, Nested(DealtLine)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatCertificate(Wire):
    """The only sum an earlier attempt can have is the one over this certified set; see the reuse rule (section 8)."""

    ctx: Digest
    kx: Digest
    deals: Digest
    roots: NamedRoots
    agreements: SignedList
    frauds: Annotated[tuple[FraudProof, ...], Many(Nested(FraudProof))]
    pair_frauds: Annotated[tuple[PairFraud, ...], Many(Nested(PairFraud))]

    @property
    def cheats(self) -> set[str]:
        """The dealers that a proof convicts."""
        return {proof.advert.site for proof in self.frauds} | {proof.advert.site for proof in self.pair_frauds}


def _bitmap(shape: Shape) -> Lengths:
    """One bit for each chunk of the sum."""
    chunks = -(-shape.vector_bytes // FRAME_BYTES)
    return {"bitmap": -(-chunks // 8)}


class Vote(IntEnum):
    """Whether a site accepts the model that follows from a result; NONE where the manifest asks for no vote."""

    NONE = 0
    ACCEPT = 1
    REFUSE = 2


@message(43, Sender.SITE, DataClass.CONTROL, size=_bitmap)
@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(Wire):
    """A site has recomputed the next model and the chunks whose bits are set, and found them correct.

    :ivar vote: what it thinks of that model, where the manifest asks for it (section 10, "Votes").
    """

    site: SiteId
    result: Digest
    state_hash: Digest
    bitmap: Annotated[bytes, Bounded(MAX_BITMAP), DataClass.CONTROL]
    vote: Annotated[int, Number(limit=max(Vote))] = Vote.NONE
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCertificate(Wire):
    """Acknowledgements that together cover a result as the manifest's audit mode demands; with votes, the vote set."""

    acks: Annotated[tuple[Ack, ...], Many(Nested(Ack), limit=1024)]


Movements = Annotated[bytes, Bounded(MAX_MOVEMENTS), DataClass.AGGREGATE]

SHARE_BYTES = 32
Share = Annotated[bytes, Fixed(SHARE_BYTES)]
