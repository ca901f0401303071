"""Epoch keys: each signs the checkpoints of about a day, endorses its successor, and is erased.

The offline root key endorses epoch 0, each epoch key the next one. An intruder who takes today's key can therefore
not re-sign yesterday. Python cannot promise that erased bytes are gone from memory or disk; what lasts is that other
parties hold the old checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazaret import files
from lazaret.errors import AuditLogError, CodecError, LocalProtocolError, VerificationFailed
from security.identity import keystore
from security.log.note import KeyType, Note, NoteSigner, VerifierKey, check_key_name
from security.rng import Randomness

HEADER: Final = "lazaret/epoch-key/v1"
EPOCH_MS: Final = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Endorsement:
    """The statement that `key` signs the checkpoints of `origin` in `epoch`."""

    origin: str
    epoch: int
    key: VerifierKey

    def __post_init__(self) -> None:
        check_key_name(self.origin)
        if self.key.kind is not KeyType.LOG or self.key.name != self.origin or self.epoch < 0:
            raise CodecError("an epoch key is a log key under the log's own name")

    @property
    def text(self) -> str:
        """The note text. Its first line can be no origin of a log, so it never passes for a checkpoint."""
        return f"{HEADER}\n{self.origin}\n{self.epoch}\n{self.key}\n"

    @classmethod
    def parse(cls, text: str) -> Endorsement:
        """Read the four lines."""
        lines = text.split("\n")
        if len(lines) != 5 or lines[0] != HEADER or lines[4] or not (lines[2].isascii() and lines[2].isdigit()):
            raise CodecError("not an endorsement of an epoch key")
        endorsement = cls(origin=lines[1], epoch=int(lines[2]), key=VerifierKey.parse(lines[3]))
        if endorsement.text != text:
            raise CodecError("an endorsement is not in its one spelling")
        return endorsement


def endorse(signer: NoteSigner, endorsement: Endorsement) -> Note:
    """Sign the next key with the current one (or with the root)."""
    return Note(text=endorsement.text, signatures=(signer.sign(endorsement.text),))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChain:
    """The verified keys of a log, one for each epoch from 0."""

    origin: str
    keys: tuple[VerifierKey, ...]

    @classmethod
    def verify(cls, origin: str, root: VerifierKey, notes: Iterable[Note]) -> EpochChain:
        """Follow the chain from the root.

        :raises VerificationFailed: at a link that is missing, repeated, foreign, or not signed by the one before.
        """
        signer, keys = root, list[VerifierKey]()
        for number, note in enumerate(notes):
            endorsement = Endorsement.parse(note.text)
            # Contiguous from 0 (section 5): a gap could hide an epoch whose checkpoints nobody has seen.
            if endorsement.origin != origin or endorsement.epoch != number:
                raise VerificationFailed("epoch keys are not contiguous", where=f"{origin} epoch {number}")
            # Signed by the key before it, and by nothing else: one chain leads from the offline root to today's key.
            note.verify((signer,))
            if len(note.signatures) != 1:
                raise VerificationFailed("an endorsement has one signature", where=f"{origin} epoch {number}")
            # A key that comes back would let whoever holds it sign for two epochs.
            if endorsement.key in keys or endorsement.key.public == root.public:
                raise VerificationFailed("an epoch key is used twice", where=f"{origin} epoch {number}")
            signer = endorsement.key
            keys.append(signer)
        if not keys:
            raise VerificationFailed("no epoch key is endorsed", where=origin)
        return cls(origin=origin, keys=tuple(keys))


class EpochKeys:
    """Private epoch keys in a folder of their own (never the log's, which gets copied), mode 0600."""

    def __init__(self, folder: Path, origin: str, rng: Randomness) -> None:
        self._folder = folder
        self._origin = origin
        self._rng = rng

    def _path(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch}.key"

    def held(self) -> tuple[int, ...]:
        """The epochs whose private keys are here."""
        return tuple(sorted(int(path.stem.removeprefix("epoch-")) for path in self._folder.glob("epoch-*.key")))

    def create(self, epoch: int) -> NoteSigner:
        """Make and save the key of an epoch."""
        seed = self._rng.bytes(32)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keystore.save_secret(self._path(epoch), seed)
        return NoteSigner.from_seed(self._origin, seed)

    def load(self, epoch: int) -> NoteSigner:
        """The signer of an epoch that has not been erased."""
        if epoch not in self.held():
            raise AuditLogError(
                f"the key of epoch {epoch} is not here",
                where=self._origin,
                hint="restore the key folder; if it is lost, enroll the log anew",
            )
        return NoteSigner.from_seed(self._origin, keystore.load_secret(self._path(epoch)))

    def erase(self, epoch: int) -> None:
        """Overwrite and delete a key."""
        files.erase(self._path(epoch))

    def settle(self, epoch: int) -> None:
        """After a crash: keep only the key that the log says is in force."""
        if epoch not in self.held():
            raise LocalProtocolError(f"refusing to erase keys: that of epoch {epoch} is missing")
        for other in self.held():
            if other != epoch:
                self.erase(other)
