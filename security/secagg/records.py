"""What a party records before it sends (docs/spec/secure-aggregation.md, section 9).

A site's records are what it must never contradict after a restart. A coordinator's are what it has shown: a restart
never shows a second version.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

from lazaret.errors import CodecError
from security.crypto import encoding
from security.crypto.encoding import Reader
from security.secagg import messages
from security.secagg.certificates import AbortCode, Ack, Advert, Movements, Vote
from security.secagg.context import RoundContext
from security.secagg.fields import DIGEST, MAX_NAME, Bounded, Count, Digest, Many, Nested, Number, SiteId, SiteIds, Wire

MAX_SEALED: Final = 16 * 1024
MAX_SUMS: Final = 64  # the newest sums whose differences a site looks at (section 10)
Context = Annotated[RoundContext, Nested(RoundContext)]


class AttemptOutcome(IntEnum):
    """How an attempt ended for a site. It is set once."""

    RELEASED = 1
    ABORTED = 2


# A site's records.


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSeen(Wire):
    """The highest manifest version seen; a lower one, or another of the same version, is refused from then on."""

    version: Count
    manifest_hash: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBound(Wire):
    """The one encoded update of a round."""

    round: Count
    state_hash: Digest
    config_hash: Digest
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Wire):
    """A plan was accepted; moves the high-water mark and the advert sequence. Written before S1."""

    context: Context
    advert: Annotated[Advert, Nested(Advert)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysSeen(Wire):
    """KX, and the adverts behind it: the newest of each peer is kept, to notice a peer restored from an old copy."""

    ctx: Digest
    kx: Digest
    adverts: Annotated[tuple[Advert, ...], Many(Nested(Advert))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDisclosed(Wire):
    """This site has published the shares that it dealt to a holder. Written before they are sent."""

    ctx: Digest
    holder: SiteId


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadBound(Wire):
    """The upload's root. Written before the first frame: from here on a byte of it may be out."""

    ctx: Digest
    deals: Digest
    root: Digest
    state_hash: Digest
    update: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed(Wire):
    """The one set agreed to in an attempt, and the sealed answer that its certificate will release.

    :ivar sites: the members of that set, for the log: the digest does not tell them.
    """

    ctx: Digest
    survivors: Digest
    sites: SiteIds
    sealed: Annotated[bytes, Bounded(MAX_SEALED)]
    expires_ms: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(Wire):
    """RELEASED or ABORTED, before either is sent; `place` keeps the high-water mark for attempts never joined."""

    ctx: Digest
    round: Count
    attempt: Count
    outcome: Annotated[int, Number(least=1, limit=2)]
    code: Annotated[int, Number(limit=max(AbortCode))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyErased(Wire):
    """The sealed answer of a released attempt was erased after `secret_ttl`."""

    ctx: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSettled(Wire):
    """What became of an attempt in which this site has dealt shares: the one set that can have a sum, or no set."""

    ctx: Digest
    sites: SiteIds


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSeen(Wire):
    """A sum that exists, or may exist: the sites in it, and the model that their updates were trained on.

    :ivar ctx: the attempt in which this site has released shares for it, until it is known what became of it.
    :ivar shown_by: the certificate of the coordinator that has shown what became of its attempt: its plans list it.
    """

    round: Count
    state_hash: Digest
    sites: SiteIds
    ctx: Digest = bytes(32)
    shown_by: Digest = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultAccepted(Wire):
    """The next link of the chain.

    :ivar trained_on: the state before it, on which the updates in the sum were trained.
    :ivar movements_before: the lengths of steps before it, which count again if the sites vote against the model.
    """

    round: Count
    result: Digest
    prev_result: Digest
    trained_on: Digest
    state_hash: Digest
    quorum: Count
    verdict: Count
    survivors: SiteIds
    movements: Movements = b""
    movements_before: Movements = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class VotesTaken(Wire):
    """The one vote set on this result that this site has taken; a second one is never asked for.

    :ivar link: what the next context names: the result together with the vote set.
    """

    result: Digest
    link: Digest
    accepted: Annotated[int, Number(limit=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCertified(Wire):
    """Enough acknowledgements were seen for this result."""

    result: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultAcked(Wire):
    """This site's acknowledgement of a round: one result for each round, and one vote on it."""

    round: Count
    result: Digest
    vote: Annotated[int, Number(limit=max(Vote))] = Vote.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Wire):
    """The site has halted for its operator; nothing but a new enrolment starts it again."""

    reason: Annotated[bytes, Bounded(256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatesPermitted(Wire):
    """The operator permits as many further updates on a model that did not move as were permitted before."""

    state_hash: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered(Wire):
    """What compaction keeps: numbers that must survive the attempts they came from."""

    sequence: Count
    round: Count
    attempt: Count
    released: Annotated[tuple[bytes, ...], Many(Bounded(32), limit=encoding.U32_MAX)]
    peers: Annotated[tuple[Advert, ...], Many(Nested(Advert))]
    state_hash: Digest
    updates: Annotated[tuple[bytes, ...], Many(DIGEST, limit=4096)]
    permitted: Count
    sums: Annotated[tuple[SumSeen, ...], Many(Nested(SumSeen), limit=MAX_SUMS)]
    acked_round: Count
    acked: Digest = bytes(32)
    vote: Annotated[int, Number(limit=max(Vote))] = Vote.NONE
    aside_on: Digest = bytes(32)
    aside: Count = 0


# A coordinator's records.


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Wire):
    """C0 as it was sent."""

    plan: Annotated[messages.Plan, Nested(messages.Plan)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvertsShown(Wire):
    """C1 as it was sent."""

    adverts: Annotated[messages.Adverts, Nested(messages.Adverts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DealShown(Wire):
    """One site's S2; those of all sites are written in one step. C2 is made from them, and blame at S5 needs them.

    Not one record of all: the lists of a hundred sites have 18 MB, and would be in memory several times to be written.
    """

    shares: Annotated[messages.Shares, Nested(messages.Shares)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisclosureSeen(Wire):
    """A dealer's valid answer to an accusation: these shares are public."""

    disclosure: Annotated[messages.Disclosure, Nested(messages.Disclosure)]


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadCounted(Wire):
    """An upload that is complete in the spool and has the root its site signed."""

    header: Annotated[messages.UploadHeader, Nested(messages.UploadHeader)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorsShown(Wire):
    """C3 as it was sent."""

    survivors: Annotated[messages.Survivors, Nested(messages.Survivors)]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumShown(Wire):
    """C4 as it was sent."""

    quorum: Annotated[messages.Quorum, Nested(messages.Quorum)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultShown(Wire):
    """C5 as it was sent; the sum itself is in the spool under its root."""

    result: Annotated[messages.Result, Nested(messages.Result)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortSeen(Wire):
    """One site's ABORT of the attempt."""

    abort: Annotated[messages.Abort, Nested(messages.Abort)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AckSeen(Wire):
    """One site's acknowledgement of the result."""

    ack: Annotated[Ack, Nested(Ack)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptClosed(Wire):
    """The coordinator has nothing more to do in this attempt: DEAD or LOST."""

    ctx: Digest
    state: SiteId
    reason: Annotated[bytes, Bounded(MAX_NAME)]


KINDS: Final[dict[int, type[Wire]]] = {
    1: ManifestSeen,
    2: UpdateBound,
    3: Joined,
    4: KeysSeen,
    5: UploadBound,
    6: Agreed,
    7: AttemptEnded,
    8: ResultAccepted,
    9: ResultCertified,
    10: ResultAcked,
    11: Stopped,
    12: Remembered,
    13: ReplyErased,
    14: ShareDisclosed,
    15: UpdatesPermitted,
    16: VotesTaken,
    17: AttemptSettled,
    50: Planned,
    51: AdvertsShown,
    53: UploadCounted,
    54: SurvivorsShown,
    55: QuorumShown,
    56: ResultShown,
    57: AbortSeen,
    58: AckSeen,
    59: AttemptClosed,
    60: DisclosureSeen,
    61: DealShown,
}
_NUMBERS: Final = {cls: number for number, cls in KINDS.items()}


def heading(cls: type[Wire]) -> bytes:
    """What every record of a kind begins with."""
    return encoding.u32(_NUMBERS[cls])


def encode(record: Wire) -> bytes:
    return heading(type(record)) + record.to_bytes()


def decode(data: bytes) -> Wire:
    reader = Reader(data, "journal record")
    cls = KINDS.get(number := reader.u32())
    if cls is None:
        raise CodecError(f"unknown record kind {number}", where="journal")
    record = cls.read(reader)
    reader.finish()
    return record
