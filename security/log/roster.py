"""Who is who: the parties of a federation, with the keys that speak for their logs, and what counts as witnessed.

The signed manifest is where these come from; writers, witnesses and auditors see only this small view of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from lazaret.errors import ConfigError
from security.log.note import KeyType, VerifierKey

if TYPE_CHECKING:
    from security.identity.manifest import Manifest, Member

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
    ml_dsa: VerifierKey | None = None  # signs the heads of this log beside its epoch keys, where the manifest lists it

    def __post_init__(self) -> None:
        if self.role not in (SITE, COORDINATOR):
            raise ConfigError(f"a party is a site or the coordinator, not {self.role!r}", where=self.name)
        if self.root.kind is not KeyType.LOG or self.cosigner.kind is not KeyType.COSIGNER:
            raise ConfigError("root and cosigner keys are mixed up", where=self.name)
        if self.ml_dsa is not None and (self.ml_dsa.kind, self.ml_dsa.name) != (KeyType.ML_DSA, self.origin):
            raise ConfigError("the ML-DSA key is not of this log", where=self.name)


@dataclass(frozen=True, kw_only=True)
class Roster:
    """All parties of one manifest; names, origins and keys are each unique."""

    parties: tuple[Party, ...]
    digest: str = field(default="")  # SHA-256 of the manifest, in hexadecimal; empty where there was none
    vector_bytes: int | None = None  # what a whole masked vector of the manifest's layout has
    isolation: str = "best"  # what the manifest asks of a process that sees images
    observers: tuple[VerifierKey, ...] = ()  # witnesses without a log: a regulator, an ethics board

    def __post_init__(self) -> None:
        for what in ("name", "origin"):
            if len({getattr(party, what) for party in self.parties}) != len(self.parties):
                raise ConfigError(f"two parties share one {what}", where="roster")
        keys = [key.public for party in self.parties for key in (party.root, party.cosigner)]
        keys += [key.public for key in self.observers]
        if any(key.kind is not KeyType.COSIGNER for key in self.observers):
            raise ConfigError("the key of a witness is not a cosigner's", where="roster")
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
        """Whose cosignatures are known for a log: everybody's but its owner's. Those of observers make no quorum."""
        return (*(party.cosigner for party in self.parties if party.origin != origin), *self.observers)

    def missing_for_quorum(self, origin: str, cosigners: Iterable[VerifierKey]) -> tuple[str, ...]:
        """What a checkpoint still lacks to count as witnessed; empty when it does.

        A site's checkpoint needs the coordinator and two other sites (all others, where there are fewer); one of the
        coordinator needs two sites. The evidence rests on one honest witness among them.
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


def audit_roster(manifest: Manifest) -> Roster:
    """The parties and the keys that speak for their privacy logs. A log's origin is the name of its root key."""
    parties = [_party(manifest.coordinator, COORDINATOR), *(_party(member, SITE) for member in manifest.roster)]
    vector = manifest.aggregation.layout.byte_length
    return Roster(
        parties=tuple(parties),
        digest=manifest.digest.hex(),
        vector_bytes=vector,
        isolation=manifest.training.isolation,
        observers=tuple(VerifierKey.parse(key) for key in manifest.audit.witnesses),
    )


def _party(member: Member, role: str) -> Party:
    root, cosigner = VerifierKey.parse(member.audit_root), VerifierKey.parse(member.cosigner)
    ml_dsa = None
    if member.log_ml_dsa is not None:
        ml_dsa = VerifierKey(name=root.name, kind=KeyType.ML_DSA, public=bytes.fromhex(member.log_ml_dsa))
    return Party(name=member.id, role=role, origin=root.name, root=root, cosigner=cosigner, ml_dsa=ml_dsa)
