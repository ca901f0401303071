"""Epoch keys: each signs the heads of about a day, endorses its successor, and is erased.

The offline root key endorses epoch 0, each epoch key the next one. An intruder who takes today's key can therefore
not re-sign yesterday. Python cannot promise that erased bytes are gone from memory or disk; what lasts is that other
parties hold the old heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from lazaret import files
from lazaret.errors import AuditLogError, CodecError, ConfigError, LocalProtocolError, VerificationFailed
from security.identity import keystore
from security.log.note import KeyType, Note, Signer, VerifierKey, check_key_name
from security.rng import Randomness

HEADER: Final = "lazaret/epoch-key/v1"
EPOCH_MS: Final = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Endorsement:
    """The statement that `key` signs the heads of `origin` in `epoch`."""

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


def endorse(signer: Signer, endorsement: Endorsement) -> Note:
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
            if endorsement.origin != origin or endorsement.epoch != number:
                raise VerificationFailed("epoch keys are not contiguous", where=f"{origin} epoch {number}")
            note.verify((signer,))
            if len(note.signatures) != 1:
                raise VerificationFailed("an endorsement has one signature", where=f"{origin} epoch {number}")
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

    def create(self, epoch: int) -> Signer:
        """Make and save the key of an epoch."""
        seed = self._rng.bytes(32)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keystore.save_secret(self._path(epoch), seed)
        return Signer.from_seed(self._origin, seed)

    def load(self, epoch: int) -> Signer:
        """The signer of an epoch that has not been erased."""
        if epoch not in self.held():
            raise AuditLogError(
                f"the key of epoch {epoch} is not here",
                where=self._origin,
                hint="restore the key folder; if it is lost, enroll the log anew",
            )
        return Signer.from_seed(self._origin, keystore.load_secret(self._path(epoch)))

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


# ----------------------------------------
# Who is who: the parties of a federation, with the keys that speak for their logs.
#
# The consortium's signed manifest is where these come from; the verifier sees only this small view of it.

PEERS_FOR_QUORUM: Final = 2
COORDINATOR: Final = "coordinator"
SITE: Final = "site"


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """One hospital or the coordinator, as far as its log is concerned."""

    name: str
    role: str
    origin: str
    root: VerifierKey
    cosigner: VerifierKey

    def __post_init__(self) -> None:
        if self.role not in (SITE, COORDINATOR):
            raise ConfigError(f"a party is a site or the coordinator, not {self.role!r}", where=self.name)
        if self.root.kind is not KeyType.LOG or self.cosigner.kind is not KeyType.COSIGNER:
            raise ConfigError("root and cosigner keys are mixed up", where=self.name)


@dataclass(frozen=True, kw_only=True)
class Roster:
    """All parties; names, origins and keys are each unique."""

    parties: tuple[Party, ...]
    digest: str = field(default="")  # SHA-256 of the manifest, in hexadecimal; empty where there was none
    vector_bytes: int | None = None  # what a whole masked vector of the manifest's layout has

    def __post_init__(self) -> None:
        for what in ("name", "origin"):
            if len({getattr(party, what) for party in self.parties}) != len(self.parties):
                raise ConfigError(f"two parties share one {what}", where="roster")
        keys = [key.public for party in self.parties for key in (party.root, party.cosigner)]
        if len(set(keys)) != len(keys):
            raise ConfigError("one key serves two purposes", where="roster")
        if sum(party.role == COORDINATOR for party in self.parties) > 1:
            raise ConfigError("more than one coordinator", where="roster")

    @cached_property
    def by_origin(self) -> dict[str, Party]:
        """Parties by the origin line of their log."""
        return {party.origin: party for party in self.parties}

    @cached_property
    def by_name(self) -> dict[str, Party]:
        """Parties by name."""
        return {party.name: party for party in self.parties}

    @property
    def sites(self) -> tuple[Party, ...]:
        """The hospitals."""
        return tuple(party for party in self.parties if party.role == SITE)

    @property
    def coordinator(self) -> Party | None:
        """The coordinator, where the roster has one."""
        return next((party for party in self.parties if party.role == COORDINATOR), None)

    def cosigners_for(self, origin: str) -> tuple[VerifierKey, ...]:
        """Whose cosignatures count for a log: everybody's but its owner's."""
        return tuple(party.cosigner for party in self.parties if party.origin != origin)

    def missing_for_quorum(self, origin: str, cosigners: Iterable[VerifierKey]) -> tuple[str, ...]:
        """What a head still lacks to count as witnessed; empty when it does.

        A site's head needs the coordinator and two other sites (all others, where there are fewer); the coordinator's
        needs two sites. One honest witness among them is what the evidence rests on.
        """
        have = set(cosigners)
        peers = [party for party in self.sites if party.origin != origin]
        missing = [
            party.name
            for party in self.parties
            if party.role == COORDINATOR and party.origin != origin and party.cosigner not in have
        ]
        lacking = min(PEERS_FOR_QUORUM, len(peers)) - sum(party.cosigner in have for party in peers)
        if lacking > 0:
            missing.append(f"{lacking} more of {', '.join(p.name for p in peers if p.cosigner not in have)}")
        return tuple(missing)
