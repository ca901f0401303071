"""Every message of the protocol (docs/spec/secure-aggregation.md, section 3).

C0..C5 go from the coordinator to a site, S1..S5 from a site to the coordinator. There is no field for a plaintext
update. Each class states at `@message` what `registry` derives everything else from; Advert and Ack, which certificates
hold as well, are in `certificates`. On the wire a message is one field of a parcel (protos/parse.py); the shell that
logs and sends adds its number on the stream and the newest checkpoint of its privacy log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from lazaret.errors import CodecError
from security.crypto.key_agreement import BOX_BYTES, PAIR_BYTES
from security.crypto.ring import FRAME_BYTES
from security.secagg.certificates import (
    SHARE_BYTES,
    AbortCertificate,
    AbortCode,
    Advert,
    CheckCertificate,
    Movements,
    NamedRoots,
    RepeatCertificate,
    SignedList,
)
from security.secagg.context import RoundContext
from security.secagg.fields import (
    DIGEST,
    Bounded,
    Count,
    DataClass,
    Digest,
    Fixed,
    Many,
    Maybe,
    Nested,
    Number,
    Signature,
    SiteId,
    SiteIds,
    Small,
    Wire,
)
from security.secagg.registry import Filing, Lengths, Sender, Shape, message

MAX_PATH: Final = 32
Path = Annotated[tuple[bytes, ...], Many(DIGEST, limit=MAX_PATH)]
OpenedMasks = Annotated[tuple[bytes, ...], Many(DIGEST), DataClass.OPENED_MASK]
OpenedPairs = Annotated[tuple[bytes, ...], Many(DIGEST, limit=128 * 128), DataClass.OPENED_MASK]
Context = Annotated[RoundContext, Nested(RoundContext)]


@message(1, Sender.SITE, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Wire):
    """A site on connecting: the attempt it still holds open (zeros if none), and the newest result it has accepted."""

    site: SiteId
    open_ctx: Digest
    round: Count
    result: Digest


@message(2, Sender.COORDINATOR, DataClass.CONTROL, filing=Filing.ROUND)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOrder(Wire):
    """Train this round on this state under this configuration; `check` confirms the state where it is known."""

    round: Annotated[int, Number(least=1)]
    state_hash: Digest
    config_hash: Digest
    prev_result: Digest
    check: Annotated[CheckCertificate | None, Maybe(Nested(CheckCertificate))]


@message(3, Sender.SITE, DataClass.CONTROL, filing=Filing.ROUND)
@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Wire):
    """The update of a round is encoded and kept. No size, no loss, no time."""

    site: SiteId
    round: Count


# Sealed and opened shares too: a repeat certificate may hold fraud proofs, which open those of a convicted dealer.
@message(10, Sender.COORDINATOR, DataClass.MASK_SHARE, filing=Filing.ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Wire):
    """C0: the context of an attempt, with what a site asks to see before it joins one."""

    context: Context
    check: Annotated[CheckCertificate | None, Maybe(Nested(CheckCertificate))]
    aborts: Annotated[tuple[AbortCertificate, ...], Many(Nested(AbortCertificate), limit=64)]
    repeats: Annotated[tuple[RepeatCertificate, ...], Many(Nested(RepeatCertificate), limit=64)]
    signature: Signature


@message(11, Sender.SITE, DataClass.CONTROL, filing=Filing.PAST_ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Wire):
    """A site will not join an attempt. Unsigned, and binds it to nothing: nothing has left it yet."""

    site: SiteId
    ctx: Digest


@message(13, Sender.COORDINATOR, DataClass.PUBLIC_KEY, filing=Filing.ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Adverts(Wire):
    """C1: the adverts of the whole cohort, in the order of the members."""

    ctx: Digest
    adverts: Annotated[tuple[Advert, ...], Many(Nested(Advert))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtShare(Wire):
    """One line of a dealer's list; the box is empty for the dealer itself, the pair's box for members before it too."""

    b_hash: Digest
    s_hash: Digest
    box: Annotated[bytes, Bounded(BOX_BYTES), DataClass.SEALED_SHARE]
    pair: Annotated[bytes, Bounded(PAIR_BYTES), DataClass.SEALED_SHARE]

    def __post_init__(self) -> None:
        Wire.__post_init__(self)
        if len(self.box) not in (0, BOX_BYTES) or len(self.pair) not in (0, PAIR_BYTES):
            raise CodecError(f"boxes are empty, or {BOX_BYTES} and {PAIR_BYTES} bytes", where="DealtShare")


def _boxes(shape: Shape) -> Lengths:
    """A box for each other member of the cohort, and the pair's secret for each one after the dealer. How many these
    are does not follow from the size of the cohort, which is all that a log holds of it."""
    later = len(shape.cohort) - shape.path
    return {
        "shares": [
            {"box": 0 if member == shape.site else BOX_BYTES, "pair": PAIR_BYTES if at >= later else 0}
            for at, member in enumerate(shape.cohort)
        ]
    }


@message(
    14,
    Sender.SITE,
    DataClass.SEALED_SHARE,
    filing=Filing.ATTEMPT,
    size=_boxes,
    mentions=lambda message: {"path": sum(bool(line.pair) for line in message.shares)},
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Shares(Wire):
    """S2: a share of the self-mask seed and of the mask key for each member, in the order of the members."""

    site: SiteId
    kx: Digest
    shares: Annotated[tuple[DealtShare, ...], Many(Nested(DealtShare))]
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRoot(Wire):
    """A dealer's or an uploader's Merkle root with the signature over it."""

    site: SiteId
    root: Digest
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredShare(Wire):
    """A box for the receiver, and the path from its line to the dealer's root."""

    dealer: SiteId
    share: Annotated[DealtShare, Nested(DealtShare)]
    path: Path


@message(15, Sender.COORDINATOR, DataClass.SEALED_SHARE, filing=Filing.ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver(Wire):
    """C2: the receiver's n - 1 boxes and all n signed dealer roots."""

    kx: Digest
    roots: Annotated[tuple[SignedRoot, ...], Many(Nested(SignedRoot))]
    shares: Annotated[tuple[DeliveredShare, ...], Many(Nested(DeliveredShare))]


@message(
    16,
    Sender.BOTH,
    DataClass.CONTROL,
    filing=Filing.ATTEMPT,
    size=lambda shape: {"dealer": len(shape.named)},
    mentions=lambda message: {"named": message.dealer},
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Accusation(Wire):
    """A dealer's line is as it signed it, yet the box does not hold those shares. Dealer or accuser lies.

    The coordinator passes it on to the dealer, which answers with a Disclosure.
    """

    site: SiteId
    kx: Digest
    dealer: SiteId
    signature: Signature


@message(
    26,
    Sender.BOTH,
    DataClass.MASK_SHARE,
    filing=Filing.ATTEMPT,
    size=lambda shape: {"holder": len(shape.named), "pair": 32 * (shape.named.encode() > shape.site.encode())},
    mentions=lambda message: {"named": message.holder},
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Disclosure(Wire):
    """A dealer's answer to an accusation: what its boxes should hold, as anybody can check with the hashes it signed.

    The coordinator passes it on to the accuser, which goes on with these shares.
    """

    site: SiteId
    kx: Digest
    holder: SiteId
    b_share: Annotated[bytes, Fixed(SHARE_BYTES), DataClass.MASK_SHARE]
    s_share: Annotated[bytes, Fixed(SHARE_BYTES), DataClass.MASK_SHARE]
    pair: Annotated[bytes, Bounded(SHARE_BYTES), DataClass.MASK_SHARE]
    signature: Signature


@message(17, Sender.SITE, DataClass.CONTROL, filing=Filing.ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class UploadHeader(Wire):
    """S3: the masked vector that follows in frames, by length and Merkle root."""

    site: SiteId
    kx: Digest
    deals: Digest
    length: Count
    root: Digest
    signature: Signature


def _frame(shape: Shape) -> Lengths:
    """All frames are full, but for the last one of the vector."""
    return {"data": min(FRAME_BYTES, shape.vector_bytes - shape.frame * FRAME_BYTES)}


@message(18, Sender.SITE, DataClass.MASKED_VECTOR, filing=Filing.ATTEMPT, frame=True, size=_frame)
@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFrame(Wire):
    """One leaf of the masked vector."""

    kx: Digest
    index: Small
    data: Annotated[bytes, Bounded(FRAME_BYTES), DataClass.MASKED_VECTOR]


@message(19, Sender.COORDINATOR, DataClass.CONTROL, filing=Filing.ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResume(Wire):
    """The coordinator holds the frames before `next_frame`; go on from there with the same bytes."""

    kx: Digest
    next_frame: Small


@message(20, Sender.COORDINATOR, DataClass.CONTROL, filing=Filing.ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors(Wire):
    """C3: whose uploads are complete, each with its signed root."""

    kx: Digest
    uploads: Annotated[tuple[SignedRoot, ...], Many(Nested(SignedRoot))]


@message(21, Sender.SITE, DataClass.CONTROL, filing=Filing.ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Agree(Wire):
    """S4: this set and no other. Releases nothing yet."""

    site: SiteId
    kx: Digest
    survivors: Digest
    signature: Signature


@message(22, Sender.COORDINATOR, DataClass.CONTROL, filing=Filing.ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum(Wire):
    """C4: at least t members agree to the same set."""

    kx: Digest
    survivors: Digest
    agreements: SignedList


def _one_share_each(shape: Shape) -> Lengths:
    return {"shares": [None] * len(shape.cohort)}


@message(23, Sender.SITE, DataClass.MASK_SHARE, filing=Filing.ATTEMPT, size=_one_share_each)
@dataclass(frozen=True, slots=True, kw_only=True)
class Unmask(Wire):
    """S5: for each member one share, of its seed if it survived and of its mask key if not; never both."""

    site: SiteId
    kx: Digest
    survivors: Digest
    shares: Annotated[tuple[bytes, ...], Many(Fixed(SHARE_BYTES)), DataClass.MASK_SHARE]
    signature: Signature


@message(24, Sender.COORDINATOR, DataClass.OPENED_MASK, filing=Filing.ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Wire):
    """C5: everything that a site needs to check the sum, be it a member of the cohort or one that catches up."""

    context: Context
    adverts: Annotated[tuple[Advert, ...], Many(Nested(Advert))]
    deals: Digest
    uploads: NamedRoots
    agreements: SignedList
    verdict: Annotated[int, Number(limit=1)]
    sum_root: Digest
    seeds: OpenedMasks
    keys: OpenedMasks
    pairs: OpenedPairs
    state_hash: Digest
    movements: Movements
    signature: Signature


@message(25, Sender.COORDINATOR, DataClass.AGGREGATE, frame=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class SumFrame(Wire):
    """One leaf of the sum. The leaf that holds the weight comes first, the others in order."""

    result: Digest
    index: Small
    data: Annotated[bytes, Bounded(FRAME_BYTES), DataClass.AGGREGATE]


@message(50, Sender.COORDINATOR, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCertificate(Wire):
    """The acknowledgements that cover a result: what a site that catches up needs before it takes the next one."""

    result: Digest
    check: Annotated[CheckCertificate, Nested(CheckCertificate)]


@message(51, Sender.COORDINATOR, DataClass.OPENED_MASK)
@dataclass(frozen=True, slots=True, kw_only=True)
class Jump(Wire):
    """A covered result whose state follows in frames, in place of the sums that led to it."""

    result: Annotated[Result, Nested(Result)]
    check: Annotated[CheckCertificate, Nested(CheckCertificate)]


@message(52, Sender.COORDINATOR, DataClass.MODEL, frame=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class StateFrame(Wire):
    """A part of a state, f32 in layout order."""

    state_hash: Digest
    index: Small
    data: Annotated[bytes, Bounded(FRAME_BYTES), DataClass.MODEL]


@message(40, Sender.COORDINATOR, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOrder(Wire):
    """Check this result's chunks as if the named sites were not there: the next in line take theirs."""

    result: Digest
    absent: SiteIds


@message(41, Sender.SITE, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest(Wire):
    """A site asks for one chunk of every upload of a result, to add them up for itself."""

    site: SiteId
    result: Digest
    chunk: Small


@message(42, Sender.COORDINATOR, DataClass.MASKED_VECTOR, frame=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPiece(Wire):
    """One chunk of one upload, with its path to the root that the uploader signed."""

    result: Digest
    chunk: Small
    site: SiteId
    data: Annotated[bytes, Bounded(FRAME_BYTES), DataClass.MASKED_VECTOR]
    path: Path


@message(30, Sender.COORDINATOR, DataClass.CONTROL, filing=Filing.PAST_ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest(Wire):
    """The coordinator gives an attempt up and asks for signed ABORTs, also of sites that never saw its Plan."""

    context: Context
    signature: Signature


@message(31, Sender.SITE, DataClass.CONTROL, filing=Filing.PAST_ATTEMPT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Wire):
    """A site will never release in this attempt, under whichever keys."""

    site: SiteId
    ctx: Digest
    code: Annotated[int, Number(limit=max(AbortCode), least=min(AbortCode))]
    signature: Signature


@message(
    32,
    Sender.BOTH,
    DataClass.CONTROL,
    size=lambda shape: {"advert": {"site": len(shape.named), "pair_hashes": [None] * shape.path}},
    mentions=lambda message: {"named": message.advert.site, "path": len(message.advert.pair_hashes)},
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback(Wire):
    """An advert of the receiver's own: if it does not remember it, its state was restored from an old copy."""

    advert: Annotated[Advert, Nested(Advert)]
