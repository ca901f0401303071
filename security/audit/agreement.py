"""What the consortium had agreed when an entry was written: every manifest version of a log folder, as rules.

A log folder keeps each manifest that was ever in force there under the SHA-256 of its file. `Agreements` reads them
all; an entry is judged under the one that the log names before it. `Agreement` is a plain view of one manifest, so that
rules (`conformance`) compare numbers and sets and know nothing of certificates or pydantic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lazaret.errors import ConfigError, ToolkitError
from security.audit.findings import Finding
from security.audit.safe_files import list_files, read_capped
from security.log.note import VerifierKey
from security.log.roster import COORDINATOR, Party, Roster, audit_roster
from security.log.store import LogFolder

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from security.dp.noise import SharedNoise
    from security.identity.manifest import Manifest
    from security.secagg.groups import Groups

MOST_MANIFESTS: Final = 4096
MANIFEST_BYTES: Final = 4 * 1024 * 1024 + 1
EVER: Final = (0, 1 << 62)  # the dates of a certificate of which nothing is known,
NEVER: Final = (1 << 62, 0)  # and of whoever has none


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedPrivacy:
    """The differential privacy that a manifest demands of every site."""

    epsilon: float
    delta: float
    clip: float
    noise_floor: float
    unit: str
    steps: int | None = None
    rate: int | None = None
    shared: SharedNoise | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedRules:
    """One manifest in numbers and sets.

    :param certificates: for each member, the first and last millisecond of its signing certificate.
    :param ends_ms: from when on nobody joins a round under this manifest.
    :param destinations: SHA-256 of the keys that the coordinator may have; a message may go nowhere else.
    :param purposes: what data may be opened for; empty if the manifest does not say.
    :param groups: of sites whose sums are opened apart; `undrawn`: the manifest asks for groups that are not drawn yet.
    :param vote: whether sites vote on each model.
    :param packages: digests of the software that may run; empty if the manifest does not say. `schemas` likewise.
    """

    run: str
    rounds: int
    method: str
    configs: frozenset[str]
    layout: str
    initial_state: str
    initial_file: str
    modulus_bits: int
    plugin: str | None
    colluders: int
    least_survivors: int
    least_cohort: int
    max_rounds_unwitnessed: int
    destinations: frozenset[str]
    certificates: Mapping[str, tuple[int, int]]
    ends_ms: int
    sites: frozenset[str]
    groups: Groups | None = None
    undrawn: bool = False
    vote: bool = False
    privacy: AgreedPrivacy | None = None
    purposes: frozenset[str] = frozenset()
    legal_bases: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()
    schemas: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One manifest version: its parties and, where the auditor has the manifest itself, its rules.

    :param digest: SHA-256 of the file, which entries name.
    """

    digest: str
    roster: Roster
    version: int = 0
    issued_at_ms: int = 0
    rules: AgreedRules | None = None


@dataclass(frozen=True, kw_only=True)
class Agreements:
    """Every version that an auditor has, by digest of its file.

    :param fixed: what holds for every entry where an auditor brought the parties and no manifest.
    :param unconfirmed: those of which it cannot be decided whether the root has signed them with ML-DSA.
    """

    by_digest: Mapping[str, Agreement] = field(default_factory=dict)
    fixed: Agreement | None = None
    unconfirmed: frozenset[str] = frozenset()
    problems: tuple[Finding, ...] = ()

    def of(self, digest: str | None) -> Agreement | None:
        """The version that an entry names."""
        return self.fixed or self.by_digest.get(digest or "")

    @cached_property
    def versions(self) -> tuple[Agreement, ...]:
        """All versions, oldest first."""
        found = [self.fixed] if self.fixed else [*self.by_digest.values()]
        return tuple(sorted(found, key=lambda one: (one.version, one.digest)))

    @property
    def newest(self) -> Agreement | None:
        return self.versions[-1] if self.versions else None

    @cached_property
    def names(self) -> frozenset[str]:
        """Names and log origins of everybody who was ever a member."""
        parties = [party for one in self.versions for party in one.roster.parties]
        return frozenset(name for party in parties for name in (party.name, party.origin))

    def parties(self, origin: str) -> list[Party]:
        """A log's owner in each version that lists it, newest first and each key once."""
        found = [one.roster.by_origin[origin] for one in reversed(self.versions) if origin in one.roster.by_origin]
        return list(dict.fromkeys(found))

    def party(self, origin: str) -> Party | None:
        """A log's owner, as the newest version that lists it has it."""
        return next(iter(self.parties(origin)), None)

    def cosigners_for(self, origin: str) -> tuple[VerifierKey, ...]:
        """Whose cosignatures count for a log, in any version."""
        return tuple(dict.fromkeys(key for one in self.versions for key in one.roster.cosigners_for(origin)))

    def ml_dsa_keys(self, origin: str) -> tuple[VerifierKey, ...]:
        """The ML-DSA keys that a log has had in any version."""
        return tuple(party.ml_dsa for party in self.parties(origin) if party.ml_dsa is not None)

    @cached_property
    def observers(self) -> frozenset[VerifierKey]:
        """Witnesses that were a member in no version: they may sign at any time, also under an older manifest."""
        members = {party.cosigner for one in self.versions for party in one.roster.parties}
        return frozenset(key for one in self.versions for key in one.roster.observers) - members

    @property
    def confirmed(self) -> Agreements:
        """Those whose keys may speak against somebody."""
        sure = {digest: one for digest, one in self.by_digest.items() if digest not in self.unconfirmed}
        return replace(self, by_digest=sure)

    def conflicts(self) -> Iterator[tuple[Agreement, Agreement]]:
        """Pairs of different manifests of one version."""
        seen: dict[int, Agreement] = {}
        for one in self.by_digest.values():
            other = seen.setdefault(one.version, one)
            if other is not one:
                yield other, one

    def __or__(self, other: Agreements) -> Agreements:
        return Agreements(
            by_digest={**self.by_digest, **other.by_digest},
            fixed=self.fixed or other.fixed,
            unconfirmed=self.unconfirmed | other.unconfirmed,
            problems=(*self.problems, *other.problems),
        )


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Whom to believe: what was agreed, and whether the auditor pinned it or took it from the log folder itself.

    :param ml_dsa: whether the auditor has brought the root's ML-DSA key.
    """

    agreements: Agreements = field(default_factory=Agreements)
    pinned: bool = False
    ml_dsa: bool = False

    @classmethod
    def bare(cls, roster: Roster) -> Keys:
        """Parties that an auditor knows without a manifest. Rules are not known then, and the verdict says so."""
        return cls(agreements=Agreements(fixed=Agreement(digest="", roster=roster)), pinned=True)


def agreement_of(manifest: Manifest, digest: str) -> Agreement:
    """The view of one manifest that was accepted."""
    # pydantic and the X.509 code take longer to import than a small log takes to verify.

    return Agreement(
        digest=digest,
        roster=audit_roster(manifest),
        version=manifest.version,
        issued_at_ms=manifest.issued_at_ms,
        rules=_rules_of(manifest),
    )


def _rules_of(manifest: Manifest) -> AgreedRules:
    # pydantic and the X.509 code take longer to import than a small log takes to verify.
    from security.identity.membership import groups_of

    numbers, training = manifest.aggregation, manifest.training
    return AgreedRules(
        run=manifest.run,
        rounds=training.rounds,
        method=training.method,
        configs=frozenset(training.config_hashes),
        layout=numbers.layout.layout_hash.hex(),
        initial_state=manifest.model.initial_state,
        initial_file=manifest.model.initial_file,
        modulus_bits=numbers.layout.ring_bits,
        plugin=None if training.plugin is None else training.plugin.sha256,
        colluders=numbers.colluders,
        least_survivors=numbers.least_survivors,
        least_cohort=manifest.least_cohort,
        max_rounds_unwitnessed=manifest.audit.max_rounds_unwitnessed,
        destinations=frozenset(manifest.coordinator.tls_keys),
        groups=groups_of(numbers),
        undrawn=numbers.groups is not None and not numbers.groups.secrets,
        vote=manifest.audit.vote_drop is not None,
        certificates={member.id: member.valid_ms for member in manifest.members},
        ends_ms=manifest.expires_at_ms,
        sites=frozenset(manifest.sites),
        privacy=_privacy_of(manifest),
        purposes=frozenset(manifest.processing.purposes),
        legal_bases=frozenset(manifest.processing.legal_bases),
        packages=frozenset(manifest.processing.packages),
        schemas=frozenset(manifest.processing.schemas),
    )


def _privacy_of(manifest: Manifest) -> AgreedPrivacy | None:
    if manifest.privacy is None:
        return None
    from security.identity.manifest import real
    from security.identity.rules import least_noise

    terms, schedule = manifest.privacy, least_noise(manifest)
    return AgreedPrivacy(
        epsilon=real(terms.epsilon),
        delta=real(terms.delta),
        clip=real(terms.clip),
        noise_floor=real(terms.noise_floor),
        unit=terms.unit,
        steps=schedule.steps if schedule else None,
        rate=schedule.rate if schedule else None,
        shared=schedule.shared if schedule else None,
    )


# The auditor's keys


def keys_for(path: Path, root_key: Path | None) -> Keys:
    """Every manifest in a log folder, checked where the auditor brought the consortium's root."""
    return keys_of([path], root_key)[path]


def keys_of(paths: Sequence[Path], root_key: Path | None) -> dict[Path, Keys]:
    """The same for folders that are judged together: a manifest in one may confirm an older one in another."""
    root, second = read_root(root_key), read_root_ml_dsa(root_key)
    folders = {path: _manifests_in(LogFolder(path), root) for path in paths}
    everything = [manifest for one in folders.values() for manifest in one.manifests.values()]
    keys = {}
    for path, one in folders.items():
        unsure = set[str]()
        for digest, code, reason in unconfirmed(one.manifests, second, everything):
            one.note(code, f"version {one.agreed[digest].version} {reason}")
            if code == "OneSignature":
                unsure.add(digest)
            else:
                del one.agreed[digest]
        if root is not None and second is None and any(manifest.root_ml_dsa for manifest in one.manifests.values()):
            one.note("SecondKeyNotPinned", "manifests have the root's ML-DSA signature, and root.pem has no such key")
        agreements = Agreements(by_digest=one.agreed, unconfirmed=frozenset(unsure), problems=tuple(one.problems))
        keys[path] = Keys(agreements=agreements, pinned=root is not None, ml_dsa=second is not None)
    return keys


@dataclass(frozen=True, slots=True)
class _FolderManifests:
    """The manifests of one folder that have the root's signatures, by the SHA-256 of their file."""

    manifests: dict[str, Manifest] = field(default_factory=dict)
    agreed: dict[str, Agreement] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)

    def note(self, code: str, detail: str) -> None:
        self.problems.append(Finding(code=code, log="", detail=detail))


def _manifests_in(folder: LogFolder, root: Certificate | None) -> _FolderManifests:
    here = _FolderManifests()
    files = [*list_files(folder.manifests, here.problems, limit=MOST_MANIFESTS)]
    if folder.manifest.is_file():
        files.append(folder.manifest)
    for file in files:
        try:
            data = read_capped(file, MANIFEST_BYTES)
            digest = sha256(data).hexdigest()
            if file.parent == folder.manifests and file.name != f"{digest}.json":
                raise ConfigError("its name is not the digest of its content", where=file.name)
            if digest in here.manifests:
                continue
            manifest = open_signed(data, root, file.name)
            here.agreed[digest] = agreement_of(manifest, digest)
            here.manifests[digest] = manifest
        except ToolkitError as error:
            here.note("ManifestRejected", f"{file.name[:80]}: {error.message}")
    return here


def manifest_from(path: Path, root_key: Path | None) -> Manifest:
    """A manifest file that the auditor gave."""
    from security.identity.acceptance import check_root_key

    manifest = open_signed(read_capped(path, MANIFEST_BYTES), read_root(root_key), str(path))
    check_root_key(manifest, read_root_ml_dsa(root_key))
    return manifest


def read_root(root_key: Path | None) -> Certificate | None:
    """The consortium's root certificate, where the auditor has it."""
    from security.identity.pki import read_certificate

    if root_key is None:
        return None
    try:
        return read_certificate(read_capped(root_key, 1 << 16).decode("ascii"), str(root_key))
    except (OSError, UnicodeDecodeError, ToolkitError) as error:
        raise ConfigError("the root certificate cannot be read", where=str(root_key)) from error


def read_root_ml_dsa(root_key: Path | None) -> str | None:
    """The root's ML-DSA key after its certificate, if the consortium has turned it on."""
    from security.identity.acceptance import key_in

    return None if root_key is None else key_in(read_capped(root_key, 1 << 16), str(root_key))


def open_signed(data: bytes, root: Certificate | None, where: str) -> Manifest:
    """Dates are not checked: a log is audited years after its certificates have ended."""
    from security.identity.acceptance import check_signatures, unseal
    from security.identity.rules import check_federation

    manifest, signatures = unseal(data, where)
    if root is not None:
        check_signatures(manifest, signatures, root)
        check_federation(manifest, root)
    return manifest


def coordinator_keys(agreements: Agreements) -> dict[str, frozenset[str]]:
    """Every coordinator that there ever was, with its keys; of none where no rules are known."""
    found: dict[str, frozenset[str]] = {}
    for one in agreements.versions:
        if one.rules is not None and one.roster.coordinator is not None:
            name = one.roster.coordinator.name
            found[name] = found.get(name, frozenset()) | one.rules.destinations
    return found


def coordinator_name(agreements: Agreements) -> str | None:
    """The coordinator of the newest version."""
    newest = agreements.newest
    return newest.roster.coordinator.name if newest and newest.roster.coordinator else None


def site_names(agreements: Iterable[Agreement]) -> frozenset[str]:
    """Every hospital of some versions."""
    return frozenset(party.name for one in agreements for party in one.roster.parties if party.role != COORDINATOR)


# Which manifests count where a consortium has turned on ML-DSA: those that its signature reaches. Every version names
# the digest of the one before it. So one ML-DSA signature confirms all earlier versions, as far as none between them is
# missing. A party may skip versions; what its folder lacks, the folder of another may have, and what only a missing
# version could tell is not held against anybody.

_FORGED: Final = "is not signed with the root's ML-DSA key, and no later version names it"
_UNKNOWN: Final = "is from before the root's ML-DSA signature, and a version between them is not here"


def unconfirmed(
    found: Mapping[str, Manifest], known: str | None, beside: Iterable[Manifest] = ()
) -> list[tuple[str, str, str]]:
    """Manifests of a folder that a forger of ECDSA signatures could have made: name, code of the finding, reason.

    One that names the root's ML-DSA key has its signature. One that does not counts if the version after it, which
    counts, names its digest; and if the auditor has not brought the key, also before the first version that names it.
    All others are rejected, except where a version that is missing could name them: that cannot be decided.

    :param found: the folder's manifests by the name that entries have for them.
    :param known: the root's ML-DSA key, if the auditor has brought it.
    :param beside: manifests of other folders. They confirm those of this one, and never speak against them by
        themselves: the root's signature is on all that counts here.
    """
    own = min((one.version for one in found.values() if one.root_ml_dsa is not None), default=None)
    key = known or next((one.root_ml_dsa for one in found.values() if one.version == own), None)
    if key is None:
        return []
    named, lowest = _reached([*found.values(), *beside], key)
    wrong = []
    for digest, manifest in found.items():
        before = known is None and own is not None and manifest.version < own
        if before or manifest.root_ml_dsa == key or manifest.digest.hex() in named:
            continue
        # There is one manifest for each version, and no way back from ML-DSA.
        forged = manifest.root_ml_dsa is not None or (lowest is not None and manifest.version >= lowest)
        wrong.append((digest, "ManifestRejected", _FORGED) if forged else (digest, "OneSignature", _UNKNOWN))
    return wrong


def _reached(manifests: Iterable[Manifest], key: str) -> tuple[set[str], int | None]:
    """The digests that ML-DSA signatures lead back to, and the lowest version that they reach."""
    by_digest = {one.digest.hex(): one for one in manifests}
    waiting = [one for one in by_digest.values() if one.root_ml_dsa == key]
    named, versions = set[str](), set[int]()
    while waiting:
        one = waiting.pop()
        versions.add(one.version)
        if one.previous is None or one.previous in named:
            continue
        named.add(one.previous)
        versions.add(one.version - 1)
        if one.previous in by_digest:
            waiting.append(by_digest[one.previous])
    return named, min(versions, default=None)
