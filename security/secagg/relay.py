"""Messages around the aggregation protocol: opening a stream, the manifest, receipts, and heads between witnesses.

They register themselves beside the protocol's own messages, which this file imports: with it the registry is complete.
They use the same field kinds as the protocol's own messages, so that every byte a site can send has a type and a bound.
Hospitals do not connect to each other: the coordinator carries heads and cosignatures. It can drop them, which shows as
staleness, but not forge them. Notes travel in typed pieces, never as text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, Any, Final

from lazaret.errors import CodecError, RemoteProtocolError
from security import labels
from security.crypto import encoding
from security.crypto.encoding import Reader
from security.crypto.ring import FRAME_BYTES
from security.crypto.signing import ML_DSA_SIGNATURE_BYTES
from security.log.keys import Endorsement
from security.log.note import Checkpoint, KeyType, Note, Signature, VerifierKey, checkpoint_of
from security.log.witness import HeldCheckpoint, Submission
from security.secagg import messages as _protocol  # noqa: F401  # registers the protocol's messages
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
    SiteId,
    Small,
    Wire,
)
from security.secagg.fields import Signature as SignatureBytes
from security.secagg.registry import REGISTRY, Filing, Lengths, Sender, Shape, message

MAX_LOG_NAME: Final = 160
MAX_EPOCHS: Final = 4096
MAX_SIGNATURES: Final = 64
MAX_PATH: Final = 63
COSIGNATURE_BYTES: Final = 72
MANIFEST_BYTES: Final = 4 * 1024 * 1024
MODEL_BYTES: Final = 4 << 30  # as much as a kit holds
MAX_DECLINE: Final = 7 * 86_400
LOG_SIGNATURE_BYTES: Final = 64
_LOG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(frozen=True)
class LogName:
    """The origin of a log or the name of a key: `graz.lesions/audit`."""

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, str) or len(value) > MAX_LOG_NAME or not _LOG_NAME.fullmatch(value):
            raise CodecError(
                f"expected a log name of at most {MAX_LOG_NAME} letters, digits, dots or slashes", where=where
            )

    def encode(self, value: Any) -> bytes:
        return encoding.text(value)

    def decode(self, reader: Reader) -> str:
        return reader.text(limit=MAX_LOG_NAME)


Origin = Annotated[str, LogName(), DataClass.CHECKPOINT]
Path = Annotated[tuple[bytes, ...], Many(DIGEST, limit=MAX_PATH)]


class CloseReason(IntEnum):
    """Why the coordinator closes a stream, as coarsely as a site needs to know."""

    STOPPING = 1
    REPLACED = 2
    OTHER_PROTOCOL = 3
    NOT_LISTED = 4
    OLD_MANIFEST = 5
    OUT_OF_ORDER = 6
    OTHER_HISTORY = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSignature(Wire):
    """One signature line of a head: 64 bytes by a log key, 72 with its time by a cosigner."""

    name: Origin
    key_id: Annotated[bytes, Fixed(4), DataClass.CHECKPOINT]
    value: Annotated[bytes, Bounded(COSIGNATURE_BYTES), DataClass.SIGNATURE]

    def __post_init__(self) -> None:
        Wire.__post_init__(self)
        if len(self.value) not in (LOG_SIGNATURE_BYTES, COSIGNATURE_BYTES):
            raise CodecError("a signature has 64 or 72 bytes", where="HeadSignature.value")

    @classmethod
    def of(cls, line: Signature) -> HeadSignature:
        return cls(name=line.name, key_id=line.key_id, value=line.value)

    @property
    def line(self) -> Signature:
        return Signature(name=self.name, key_id=self.key_id, value=self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedHead(Wire):
    """A signed checkpoint in typed pieces; `note` gives back the very bytes that were signed."""

    origin: Origin
    size: Annotated[int, Number(limit=2**53 - 1)]
    root: Digest
    signatures: Annotated[tuple[HeadSignature, ...], Many(Nested(HeadSignature), limit=MAX_SIGNATURES)]

    @classmethod
    def of(cls, note: Note) -> SignedHead:
        """Without an ML-DSA line, which stays in the log's folder: it is for those who verify the log in years."""
        head = checkpoint_of(note)
        short = (line for line in note.signatures if len(line.value) != ML_DSA_SIGNATURE_BYTES)
        signatures = tuple(HeadSignature.of(line) for line in short)
        return cls(origin=head.origin, size=head.size, root=head.root, signatures=signatures)

    @property
    def note(self) -> Note:
        text = Checkpoint(origin=self.origin, size=self.size, root=self.root).text
        return Note(text=text, signatures=tuple(signature.line for signature in self.signatures))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochKey(Wire):
    """The key of one epoch, and the endorsement of it by the key before; its number is its place in the list."""

    public: Key
    endorser: Annotated[bytes, Fixed(4), DataClass.CHECKPOINT]
    signature: SignatureBytes

    @classmethod
    def of(cls, note: Note, number: int) -> EpochKey:
        told = Endorsement.parse(note.text)
        line = note.signatures[0]
        if told.epoch != number or len(note.signatures) != 1 or line.name != told.origin:
            raise CodecError("epoch keys are not in order", where=told.origin)
        return cls(public=told.key.public, endorser=line.key_id, signature=line.value)

    def note(self, origin: str, number: int) -> Note:
        key = VerifierKey(name=origin, kind=KeyType.LOG, public=self.public)
        line = Signature(name=origin, key_id=self.endorser, value=self.signature)
        return Note(text=Endorsement(origin=origin, epoch=number, key=key).text, signatures=(line,))


def head_lengths(origin: str, signatures: int, witnesses: Sequence[str] = ()) -> Lengths:
    """The open lengths of a signed head: by its own log's keys and by witnesses."""
    own = [{"name": len(origin), "value": LOG_SIGNATURE_BYTES}] * signatures
    others = [{"name": len(name), "value": COSIGNATURE_BYTES} for name in witnesses]
    return {"origin": len(origin), "signatures": [*own, *others]}


EpochKeys = Annotated[tuple[EpochKey, ...], Many(Nested(EpochKey), limit=MAX_EPOCHS)]


def _epoch_keys(notes: tuple[Note, ...]) -> tuple[EpochKey, ...]:
    return tuple(EpochKey.of(note, number) for number, note in enumerate(notes))


def _endorsements(keys: tuple[EpochKey, ...], origin: str) -> tuple[Note, ...]:
    return tuple(key.note(origin, number) for number, key in enumerate(keys))


@message(60, Sender.SITE, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Open(Wire):
    """First on a stream: who speaks which protocol, the number of this connection, and under which manifest."""

    protocol: Count
    federation: SiteId
    site: SiteId
    session: Annotated[int, Number(least=1)]
    manifest_version: Count
    manifest_hash: Digest


@message(61, Sender.COORDINATOR, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Wire):
    """The coordinator's answer to Open; a newer manifest follows in frames."""

    protocol: Count
    manifest_version: Count
    manifest_hash: Digest


@message(62, Sender.COORDINATOR, DataClass.MANIFEST, frame=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFrame(Wire):
    """A piece of the consortium's signed manifest; the site believes the signature, not the messenger."""

    version: Count
    length: Annotated[int, Number(limit=MANIFEST_BYTES)]
    index: Small
    data: Annotated[bytes, Bounded(FRAME_BYTES), DataClass.MANIFEST]


def manifest_frames(data: bytes, version: int) -> list[ManifestFrame]:
    """A manifest in frames, for `ManifestParts` at the other end."""
    return [
        ManifestFrame(
            version=version, length=len(data), index=start // FRAME_BYTES, data=data[start : start + FRAME_BYTES]
        )
        for start in range(0, len(data), FRAME_BYTES)
    ]


class ManifestParts:
    """Frames of one manifest, put together in order. Nothing is believed of them: the root's signature decides."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what has come so far; a new stream begins anew."""
        self._version, self._data, self._next = 0, b"", 0

    def take(self, frame: ManifestFrame) -> bytes | None:
        """The whole manifest, once its last frame is there."""
        if frame.index == 0:
            self.clear()
            self._version = frame.version
        if frame.index != self._next or frame.version != self._version:
            raise RemoteProtocolError("frames of the manifest are out of order", where="manifest")
        self._data += frame.data
        self._next += 1
        missing = frame.length - len(self._data)
        if missing < 0 or (missing > 0 and len(frame.data) != FRAME_BYTES):
            raise CodecError("manifest has another length than its frames say", where="manifest")
        if missing:
            return None
        whole = self._data
        self.clear()
        return whole


@message(63, Sender.COORDINATOR, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Wire):
    """Is the site there? Only sites that answered lately are planned for."""

    number: Count


@message(64, Sender.SITE, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Pong(Wire):
    """The answer to a Ping, with its number."""

    number: Count


@message(65, Sender.SITE, DataClass.CONTROL, filing=Filing.ROUND)
@dataclass(frozen=True, slots=True, kw_only=True)
class Decline(Wire):
    """The site does not train this round. It does not say why: policy, hours and budget are its own affair. It may say
    in how many seconds to ask it again; 0 says nothing."""

    site: SiteId
    round: Count
    seconds: Annotated[int, Number(limit=MAX_DECLINE)] = 0


@message(66, Sender.COORDINATOR, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt(Wire):
    """A message of the site is entry `entry` of the coordinator's log; the head is the one that travels with this."""

    sequence: Count
    entry: Count
    path: Path


@message(67, Sender.COORDINATOR, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(Wire):
    """The coordinator closes the stream, for the reason of this code."""

    code: Annotated[int, Number(limit=max(CloseReason), least=min(CloseReason))]


@message(68, Sender.SITE, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(Wire):
    """The site lacks the initial model of the run that this manifest begins, from this frame on."""

    manifest_version: Count
    next_frame: Small


@message(69, Sender.COORDINATOR, DataClass.MODEL, frame=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFrame(Wire):
    """A piece of a run's initial model; the site believes the digest in the signed manifest, not the messenger."""

    digest: Digest
    length: Annotated[int, Number(limit=MODEL_BYTES)]
    index: Small
    data: Annotated[bytes, Bounded(FRAME_BYTES), DataClass.MODEL]


@message(70, Sender.COORDINATOR, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessCall(Wire):
    """A witness holds this much of the receiver's log; a Head that grows from there can be cosigned."""

    witness: SiteId
    held_size: Count


def _offer(shape: Shape) -> Lengths:
    head = head_lengths(shape.origin, shape.head_signatures)
    epochs: list[Lengths] = [{}] * shape.epochs
    return {"witness": len(shape.named), "path": [None] * shape.path, "head": head, "epochs": epochs}


def _offered(message: Head) -> dict[str, Any]:
    return {"named": message.witness, "path": len(message.path), "epochs": len(message.epochs)}


@message(71, Sender.BOTH, DataClass.CHECKPOINT, size=_offer, mentions=_offered)
@dataclass(frozen=True, slots=True, kw_only=True)
class Head(Wire):
    """A head offered to a witness, with the proof that it extends the one held and the keys that lead to it."""

    witness: SiteId
    old_size: Count
    path: Path
    head: Annotated[SignedHead, Nested(SignedHead)]
    epochs: EpochKeys

    @classmethod
    def of(cls, witness: str, offer: Submission) -> Head:
        head = SignedHead.of(offer.note)
        epochs = _epoch_keys(offer.endorsements)
        return cls(witness=witness, old_size=offer.old_size, path=offer.path, head=head, epochs=epochs)

    @property
    def submission(self) -> Submission:
        endorsements = _endorsements(self.epochs, self.head.origin)
        return Submission(old_size=self.old_size, path=self.path, note=self.head.note, endorsements=endorsements)


def _confirming(shape: Shape) -> Lengths:
    return {"origin": len(shape.named), "signature": {"name": len(shape.witness), "value": COSIGNATURE_BYTES}}


@message(
    72, Sender.BOTH, DataClass.CHECKPOINT, size=_confirming, mentions=lambda message: {"named": message.origin}
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Cosignature(Wire):
    """A witness confirms a head of the log named."""

    origin: Origin
    size: Count
    signature: Annotated[HeadSignature, Nested(HeadSignature)]


def _held(shape: Shape) -> Lengths:
    head = head_lengths(shape.named, shape.head_signatures, witnesses=[shape.witness] * shape.cosigned)
    epochs: list[Lengths] = [{}] * shape.epochs
    return {"witness": len(shape.site), "head": head, "epochs": epochs}


def _holds(message: Held) -> dict[str, Any]:
    cosigned = sum(len(line.value) == COSIGNATURE_BYTES for line in message.head.signatures)
    return {"named": message.head.origin, "epochs": len(message.epochs), "cosigned": cosigned}


@message(73, Sender.BOTH, DataClass.CHECKPOINT, size=_held, mentions=_holds)
@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Wire):
    """The newest head a witness holds of a log: its answer to an offer that grows from elsewhere, and at each start."""

    witness: SiteId
    head: Annotated[SignedHead, Nested(SignedHead)]
    epochs: EpochKeys

    @classmethod
    def of(cls, witness: str, held: HeldCheckpoint) -> Held:
        return cls(witness=witness, head=SignedHead.of(held.note), epochs=_epoch_keys(held.endorsements))

    @property
    def held(self) -> HeldCheckpoint:
        return HeldCheckpoint(note=self.head.note, endorsements=_endorsements(self.epochs, self.head.origin))


@message(74, Sender.COORDINATOR, DataClass.CONTROL)
@dataclass(frozen=True, slots=True, kw_only=True)
class RunStop(Wire):
    """The operator ends the run before its last round. It can only stop: the newest model stays what it is."""

    run: SiteId
    manifest_hash: Digest
    signature: SignatureBytes


# All messages are registered now. What the rest of the tree asks most often, derived from what they state.

FROM_SITE: Final = REGISTRY.from_site()
FROM_COORDINATOR: Final = REGISTRY.from_coordinator()
PERMITTED: Final = MappingProxyType(REGISTRY.permitted())
# Pieces of something that was announced with a head; everything else carries the sender's newest one.
FRAMES: Final = REGISTRY.frames()


def message_id(site: str, session: int, sequence: int, *, from_site: bool) -> str:
    """The name under which both ends log a message. It follows from its place, so no free bytes travel for it."""
    place = encoding.text(site) + encoding.u64(session) + encoding.u64(sequence) + encoding.u64(int(from_site))
    return hashlib.sha256(labels.MESSAGE_ID + place).hexdigest()[:32]
