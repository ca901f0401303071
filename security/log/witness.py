"""Witnesses: each party remembers the newest checkpoint of every other log and cosigns only what extends it.

The rules are those of C2SP tlog-witness. Checking against the checkpoint held and replacing it is one atomic step; else
two requests at once could roll the log back by the difference. The new checkpoint is on disk before the cosignature is
given.
"""

from __future__ import annotations

import base64
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from lazaret.errors import CheckpointConflict, CodecError, ForkDetected, VerificationFailed
from security.clock import Clock
from security.crypto import encoding
from security.crypto.merkle import EMPTY_ROOT, MAX_PATH, verify_consistency
from security.log.keys import EpochChain
from security.log.note import Checkpoint, Note, NoteSigner, Signature, VerifierKey, checkpoint_of
from security.log.roster import Roster
from security.log.store import Disk, LogFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A checkpoint offered for cosigning: what it grows from, the proof, and the epoch keys behind its signature."""

    old_size: int
    path: tuple[bytes, ...]
    note: Note
    endorsements: tuple[Note, ...]

    def __post_init__(self) -> None:
        if self.old_size < 0 or len(self.path) > MAX_PATH or not self.endorsements:
            raise CodecError("not a head to be witnessed")

    def encode(self) -> bytes:
        """One JSON object; notes as text, hashes in base64."""
        return encoding.dumps(
            {
                "endorsements": [note.encode().decode() for note in self.endorsements],
                "head": self.note.encode().decode(),
                "old_size": self.old_size,
                "path": [base64.b64encode(step).decode() for step in self.path],
            }
        )

    @classmethod
    def parse(cls, data: bytes) -> Submission:
        """Read one strictly."""
        value = encoding.loads(data)
        try:
            return cls(
                old_size=_integer(value["old_size"]),
                path=tuple(base64.b64decode(step, validate=True) for step in value["path"]),
                note=Note.parse(value["head"].encode()),
                endorsements=tuple(Note.parse(note.encode()) for note in value["endorsements"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CodecError("not a head to be witnessed") from error


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise CodecError("a size is an integer")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CodecError("the name of a log is text")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCheckpoint:
    """The newest checkpoint seen of one log, with our cosignature on it and the keys it was checked with."""

    note: Note
    endorsements: tuple[Note, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        """What the note says."""
        return checkpoint_of(self.note)

    def encode(self) -> bytes:
        """The bytes of the file it is kept in."""
        notes = [note.encode().decode() for note in self.endorsements]
        return encoding.dumps({"endorsements": notes, "head": self.note.encode().decode()}) + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> HeldCheckpoint:
        """Read it back strictly."""
        if not data.endswith(b"\n"):
            raise CodecError("not a held head")
        value = encoding.loads(data[:-1])
        if not isinstance(value, dict) or value.keys() != {"endorsements", "head"}:
            raise CodecError("not a held head")
        try:
            notes = tuple(Note.parse(note.encode()) for note in value["endorsements"])
            return cls(note=Note.parse(value["head"].encode()), endorsements=notes)
        except (TypeError, AttributeError) as error:
            raise CodecError("not a held head") from error

    def verify(self, root: VerifierKey, origin: str) -> EpochChain:
        """Check that it is signed by an epoch key that leads back to the log's root key."""
        chain = EpochChain.verify(origin, root, self.endorsements)
        self.note.verify(chain.keys)
        if self.checkpoint.origin != origin:
            raise VerificationFailed("a held head is of another log", where=origin)
        return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Two checkpoints of one log, both signed by its keys, that no one history explains: proof that travels.

    :param other_root: the root that the shown history has at the size of the held one; it differs.
    :param path: the consistency proof from `other_root` to the shown checkpoint.
    """

    origin: str
    held: Note
    shown: Note
    endorsements: tuple[Note, ...]
    other_root: bytes
    path: tuple[bytes, ...] = ()

    def verify(self, root: VerifierKey) -> None:
        """Check the evidence without any log at hand.

        :raises VerificationFailed: if it does not convict the holder of the log's keys.
        """
        chain = EpochChain.verify(self.origin, root, self.endorsements)
        checkpoints = []
        for note in (self.held, self.shown):
            note.verify(chain.keys)
            checkpoints.append(checkpoint_of(note))
        held, shown = checkpoints
        if held.origin != self.origin or shown.origin != self.origin or self.other_root == held.root:
            raise VerificationFailed("this is no fork", where=self.origin)
        verify_consistency(
            old_size=held.size, old_root=self.other_root, new_size=shown.size, new_root=shown.root, path=self.path
        )

    def encode(self) -> bytes:
        """The bytes of the evidence file."""
        evidence = {
            "endorsements": [note.encode().decode() for note in self.endorsements],
            "held": self.held.encode().decode(),
            "origin": self.origin,
            "other_root": base64.b64encode(self.other_root).decode(),
            "path": [base64.b64encode(step).decode() for step in self.path],
            "shown": self.shown.encode().decode(),
        }
        return encoding.dumps(evidence) + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> Fork:
        """Read an evidence file."""
        value = encoding.loads(data.removesuffix(b"\n"))
        try:
            return cls(
                origin=_text(value["origin"]),
                held=Note.parse(value["held"].encode()),
                shown=Note.parse(value["shown"].encode()),
                endorsements=tuple(Note.parse(note.encode()) for note in value["endorsements"]),
                other_root=base64.b64decode(value["other_root"], validate=True),
                path=tuple(base64.b64decode(step, validate=True) for step in value["path"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CodecError("not evidence of a fork") from error


def decide(held: HeldCheckpoint | None, offer: Submission, root: VerifierKey, origin: str) -> Checkpoint:
    """Whether a checkpoint may be cosigned, given the one held. Pure.

    :raises VerificationFailed: bad signature, or a proof that does not lead to the checkpoint.
    :raises CheckpointConflict: the offer grows from another size than the one held.
    :raises ForkDetected: the same size with another root, both signed.
    """
    chain = EpochChain.verify(origin, root, offer.endorsements)
    offer.note.verify(chain.keys)
    offered = checkpoint_of(offer.note)
    if offered.origin != origin:
        raise VerificationFailed("the head is of another log", where=origin)
    old_size, old_root = (0, EMPTY_ROOT) if held is None else (held.checkpoint.size, held.checkpoint.root)
    # At one size there is one root: both heads are signed by the log, and together they are the proof of a fork.
    if offered.size == old_size and offered.root != old_root:
        raise ForkDetected("two signed heads of one size differ", where=f"{origin} size {offered.size}")
    # The sender assumed another size than the one held (C2SP tlog-witness answers 409): it asks again with the right
    # one.
    if offer.old_size != old_size or offered.size < old_size:
        raise CheckpointConflict("the head held has another size", where=origin, held_size=old_size)
    verify_consistency(
        old_size=old_size, old_root=old_root, new_size=offered.size, new_root=offered.root, path=offer.path
    )
    # Epochs only grow (section 5): other keys for epochs that were seen before would be a second history of the keys.
    if held is not None and offer.endorsements[: len(held.endorsements)] != held.endorsements:
        raise ForkDetected("the log shows other epoch keys than before", where=origin)
    return offered


class Witness:
    """The checkpoints this party holds of all other logs, in its own log folder.

    :param roster: gives the roster in force, which a newer manifest changes.
    """

    def __init__(
        self, folder: Path, roster: Callable[[], Roster], signer: NoteSigner, clock: Clock, disk: Disk | None = None
    ) -> None:
        self._folder = LogFolder(folder)
        self._roster = roster
        self._signer = signer
        self._clock = clock
        self._disk = disk or Disk()
        self._lock = Lock()

    @property
    def roster(self) -> Roster:
        return self._roster()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One decision at a time: between threads by a lock, between processes by the file system's."""
        with self._lock:
            self._folder.witness.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder.witness / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    def held(self, origin: str) -> HeldCheckpoint | None:
        """The newest checkpoint held of a log."""
        try:
            return HeldCheckpoint.parse(self._folder.witness_path(origin).read_bytes())
        except FileNotFoundError:
            return None

    def held_size(self, origin: str) -> int:
        """Its size, 0 where there is none."""
        held = self.held(origin)
        return held.checkpoint.size if held else 0

    def consider(self, offer: Submission) -> Signature:
        """Check a checkpoint against the one held, keep it, and cosign it; also if it is the one held."""
        origin = checkpoint_of(offer.note).origin
        party = self.roster.by_origin.get(origin)
        if party is None or self._signer.key == party.cosigner:
            raise VerificationFailed("not a log this party witnesses", where=origin)
        with self._exclusive():
            held = self.held(origin)
            try:
                checkpoint = decide(held, offer, party.root, origin)
            except ForkDetected as fork:
                self._keep_evidence(origin, held, offer)
                raise fork
            except VerificationFailed:
                if held is not None and self._is_signed(offer, party.root, origin):
                    self._keep_evidence(origin, held, offer)
                raise
            # On disk before the cosignature is given: a witness that forgets what it has signed could sign a second
            # history.
            cosignature = self._signer.cosign(checkpoint.text, self._clock.now_ms() // 1000)
            kept = Note(text=offer.note.text, signatures=(*self._by_log(offer, party.root), cosignature))
            self._disk.publish(
                self._folder.witness_path(origin), HeldCheckpoint(note=kept, endorsements=offer.endorsements).encode()
            )
        return cosignature

    @staticmethod
    def _by_log(offer: Submission, root: VerifierKey) -> tuple[Signature, ...]:
        """Only the log's own signatures are kept: those of others were not checked here."""
        chain = EpochChain.verify(checkpoint_of(offer.note).origin, root, offer.endorsements)
        known = {(key.name, key.id) for key in chain.keys}
        return tuple(line for line in offer.note.signatures if (line.name, line.key_id) in known)

    @staticmethod
    def _is_signed(offer: Submission, root: VerifierKey, origin: str) -> bool:
        try:
            offer.note.verify(EpochChain.verify(origin, root, offer.endorsements).keys)
        except (VerificationFailed, CodecError):
            return False
        return True

    def _keep_evidence(self, origin: str, held: HeldCheckpoint | None, offer: Submission) -> None:
        if held is None:
            return
        # At one size the two checkpoints are the whole proof; else the log's owner has to show where it branched.
        fork = Fork(
            origin=origin,
            held=held.note,
            shown=offer.note,
            endorsements=offer.endorsements,
            other_root=checkpoint_of(offer.note).root,
        )
        data = fork.encode()
        name = f"fork-{canonical_name(data)}.json"
        self._folder.evidence.mkdir(parents=True, exist_ok=True)
        self._disk.publish(self._folder.evidence / name, data)


def canonical_name(data: bytes) -> str:
    """A short name for a piece of evidence, from its content: the same evidence is kept once."""
    return sha256(data).hexdigest()[:16]
