"""Every message of the protocol (docs/spec/secure-aggregation.md, section 3).

C0..C5 go from the coordinator to a site, S1..S5 from a site to the coordinator. There is no field for a plaintext
update. On the wire a message is ``kind || TLV(log_head) || fields``: `log_head` is the sender's newest signed
privacy-log checkpoint, added by the shell that logs and sends; a frame of a vector leaves it empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from lazaret.errors import CodecError
from security.crypto import encoding
from security.crypto.encoding import Reader
from security.crypto.ring import FRAME_BYTES
from security.secagg.certificates import (
    BOX_BYTES,
    SHARE_BYTES,
    AbortCertificate,
    AbortCode,
    Ack,
    Advert,
    CheckCertificate,
    NamedRoots,
    RepeatCertificate,
    SignedList,
)
from security.secagg.context import RoundContext
from security.secagg.fields import (
    DIGEST,
    Bounded,
    Count,
    Digest,
    Digests,
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

MAX_LOG_HEAD: Final = 4096
MAX_PATH: Final = 32
Path = Annotated[tuple[bytes, ...], Many(DIGEST, limit=MAX_PATH)]
Context = Annotated[RoundContext, Nested(RoundContext)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Wire):
    """A site on connecting: the attempt it still holds open (zeros if none), and the newest result it has accepted."""

    site: SiteId
    open_ctx: Digest
    round: Count
    result: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOrder(Wire):
    """Train this round on this state under this configuration; `check` vouches for the state where it is known."""

    round: Annotated[int, Number(least=1)]
    state_hash: Digest
    config_hash: Digest
    prev_result: Digest
    check: Annotated[CheckCertificate | None, Maybe(Nested(CheckCertificate))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Wire):
    """The update of a round is encoded and kept. No size, no loss, no time."""

    site: SiteId
    round: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Wire):
    """C0: the context of an attempt, with what a site asks to see before it joins one."""

    context: Context
    check: Annotated[CheckCertificate | None, Maybe(Nested(CheckCertificate))]
    aborts: Annotated[tuple[AbortCertificate, ...], Many(Nested(AbortCertificate), limit=64)]
    repeats: Annotated[tuple[RepeatCertificate, ...], Many(Nested(RepeatCertificate), limit=64)]
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Wire):
    """A site will not join an attempt. Unsigned, and binds it to nothing: nothing has left it yet."""

    site: SiteId
    ctx: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Adverts(Wire):
    """C1: the adverts of the whole cohort, in the order of the members."""

    ctx: Digest
    adverts: Annotated[tuple[Advert, ...], Many(Nested(Advert))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtShare(Wire):
    """One line of a dealer's list; the box is empty for the dealer itself."""

    b_hash: Digest
    s_hash: Digest
    box: Annotated[bytes, Bounded(BOX_BYTES)]

    def __post_init__(self) -> None:
        Wire.__post_init__(self)
        if len(self.box) not in (0, BOX_BYTES):
            raise CodecError(f"a share box is empty or {BOX_BYTES} bytes", where="DealtShare.box")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver(Wire):
    """C2: the receiver's n - 1 boxes and all n signed dealer roots."""

    kx: Digest
    roots: Annotated[tuple[SignedRoot, ...], Many(Nested(SignedRoot))]
    shares: Annotated[tuple[DeliveredShare, ...], Many(Nested(DeliveredShare))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accusation(Wire):
    """A dealer's line is as it signed it, yet the box does not hold those shares. Dealer or accuser lies."""

    site: SiteId
    kx: Digest
    dealer: SiteId
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadHeader(Wire):
    """S3: the masked vector that follows in frames, by length and Merkle root."""

    site: SiteId
    kx: Digest
    deals: Digest
    length: Count
    root: Digest
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFrame(Wire):
    """One leaf of the masked vector."""

    kx: Digest
    index: Small
    data: Annotated[bytes, Bounded(FRAME_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResume(Wire):
    """The coordinator holds the frames before `next_frame`; go on from there with the same bytes."""

    kx: Digest
    next_frame: Small


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors(Wire):
    """C3: whose uploads are complete, each with its signed root."""

    kx: Digest
    uploads: Annotated[tuple[SignedRoot, ...], Many(Nested(SignedRoot))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agree(Wire):
    """S4: this set and no other. Releases nothing yet."""

    site: SiteId
    kx: Digest
    survivors: Digest
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum(Wire):
    """C4: at least t members agree to the same set."""

    kx: Digest
    survivors: Digest
    agreements: SignedList


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmask(Wire):
    """S5: for each member one share, of its seed if it survived and of its mask key if not; never both."""

    site: SiteId
    kx: Digest
    survivors: Digest
    shares: Annotated[tuple[bytes, ...], Many(Fixed(SHARE_BYTES))]
    signature: Signature


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
    seeds: Digests
    keys: Digests
    state_hash: Digest
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class SumFrame(Wire):
    """One leaf of the sum. The leaf that holds the weight comes first, the others in order."""

    result: Digest
    index: Small
    data: Annotated[bytes, Bounded(FRAME_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouched(Wire):
    """The acknowledgements that cover a result: what a site that catches up needs before it takes the next one."""

    result: Digest
    check: Annotated[CheckCertificate, Nested(CheckCertificate)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump(Wire):
    """A covered result whose state follows in frames, in place of the sums that led to it."""

    result: Annotated[Result, Nested(Result)]
    check: Annotated[CheckCertificate, Nested(CheckCertificate)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFrame(Wire):
    """A part of a state, f32 in layout order."""

    state_hash: Digest
    index: Small
    data: Annotated[bytes, Bounded(FRAME_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOrder(Wire):
    """Check this result's chunks as if the named sites were not there: the next in line take theirs."""

    result: Digest
    absent: SiteIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest(Wire):
    """A site asks for one chunk of every upload of a result, to add them up for itself."""

    site: SiteId
    result: Digest
    chunk: Small


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPiece(Wire):
    """One chunk of one upload, with its path to the root that the uploader signed."""

    result: Digest
    chunk: Small
    site: SiteId
    data: Annotated[bytes, Bounded(FRAME_BYTES)]
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest(Wire):
    """The coordinator gives an attempt up and asks for signed ABORTs, also of sites that never saw its Plan."""

    context: Context
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Wire):
    """A site will never release in this attempt, under whichever keys."""

    site: SiteId
    ctx: Digest
    code: Annotated[int, Number(limit=max(AbortCode), least=min(AbortCode))]
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback(Wire):
    """An advert of the receiver's own that it should remember: if it does not, its state was set back."""

    advert: Annotated[Advert, Nested(Advert)]


KINDS: Final[dict[int, type[Wire]]] = {
    1: Hello,
    2: TrainOrder,
    3: Ready,
    10: Plan,
    11: Refusal,
    12: Advert,
    13: Adverts,
    14: Shares,
    15: Deliver,
    16: Accusation,
    17: UploadHeader,
    18: UploadFrame,
    19: UploadResume,
    20: Survivors,
    21: Agree,
    22: Quorum,
    23: Unmask,
    24: Result,
    25: SumFrame,
    30: AbortRequest,
    31: Abort,
    32: Rollback,
    40: AuditOrder,
    41: ChunkRequest,
    42: ChunkPiece,
    43: Ack,
    50: Vouched,
    51: Jump,
    52: StateFrame,
}
_NUMBERS: Final = {cls: number for number, cls in KINDS.items()}
FROM_SITE: Final = frozenset(
    {Hello, Ready, Refusal, Advert, Shares, Accusation, UploadHeader, UploadFrame, Agree, Unmask, Abort, Rollback}
    | {ChunkRequest, Ack}
)


def encode(message: Wire, *, log_head: bytes = b"") -> bytes:
    """The bytes of a message on the wire."""
    if len(log_head) > MAX_LOG_HEAD:
        raise CodecError(f"log head exceeds {MAX_LOG_HEAD} bytes", where=type(message).__name__)
    return encoding.u32(_NUMBERS[type(message)]) + encoding.tlv(log_head) + message.to_bytes()


def decode(data: bytes) -> tuple[Wire, bytes]:
    """The message and the sender's log head. Unknown kinds, leftovers and any second form of a value are refused."""
    reader = Reader(data)
    cls = KINDS.get(number := reader.u32())
    if cls is None:
        raise CodecError(f"unknown message kind {number}")
    log_head = reader.tlv(limit=MAX_LOG_HEAD)
    message = cls.read(reader)
    reader.finish()
    return message, log_head
