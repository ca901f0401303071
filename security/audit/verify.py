"""One log, from a copy of its folder: is it whole, unchanged, signed, witnessed, and did only masked bytes leave?

`verify` runs every check. The keys that it believes come from the signed manifest in the folder, which the auditor
pins with the consortium's root certificate or takes as it is (`keys_for`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from lazaret.errors import AuditLogError, CodecError, ConfigError, ToolkitError, VerificationFailed
from security.audit.checkpoints import Checkpoints, check_epochs, read_checkpoints
from security.audit.egress_ledger import EgressLedger
from security.audit.findings import Finding, Findings, exit_code
from security.audit.scan import SKEW_MS, Scan
from security.log.keys import EpochChain
from security.log.note import VerifierKey
from security.log.reader import LogReader
from security.log.roster import SITE, Roster
from security.log.schema import read_line
from security.log.store import FORMAT, Annex, LogFolder
from security.log.witness import HeldCheckpoint

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from security.identity.manifest import Manifest


MAX_ROUNDS_UNWITNESSED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Whom to believe: the roster, and whether the auditor pinned it or took it from the log folder itself."""

    roster: Roster | None
    pinned: bool
    problem: Finding | None = None


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What one log turned out to be."""

    folder: Path
    origin: str
    role: str
    size: int
    checkpoints: Checkpoints
    epochs: int
    ledger: EgressLedger
    types: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    roster: Roster | None = None

    @property
    def exit_code(self) -> int:
        """0, 1 or 3."""
        return exit_code(self.findings)


def verify(path: Path, keys: Keys, held: Sequence[HeldCheckpoint] = ()) -> Verified:
    """Run every check on one log.

    :param held: checkpoints of this log that others hold, if the auditor has them.
    :raises ConfigError: only where there is no log at all.
    """
    folder = LogFolder(path)
    if not folder.path.is_dir() or not (folder.segments.is_dir() or folder.format.exists()):
        raise ConfigError("no privacy log here", where=str(path), hint="give the folder that holds FORMAT")
    genesis = _first_entry(folder)
    origin = _origin_of(folder, genesis)
    findings = Findings(origin)
    if not folder.format.exists() or folder.format.read_bytes() != FORMAT:
        findings.add("FormatUnknown", "FORMAT is not that of this version")
    roster = keys.roster if keys.roster is None or origin in keys.roster.by_origin else None
    _note_keys(keys, roster, findings)
    chain = _chain(folder, genesis, roster, findings)
    checkpoints = read_checkpoints(folder, chain, roster, findings)
    names = {*roster.by_name, *roster.by_origin} if roster else set[str]()
    scan = Scan(folder, checkpoints, chain, findings, held, names)
    scan.run(_segments(folder, findings))
    _check_genesis(genesis, roster, chain, findings)
    _check_manifest(folder, scan, findings)
    _check_layout(roster, scan, findings)
    _check_isolation(roster, scan, findings)
    _check_counted(genesis, scan, findings)
    check_epochs(checkpoints, scan.rotations, findings)
    _check_chain_length(chain, scan, findings)
    _check_coverage(checkpoints, scan, findings)
    _check_times(checkpoints, scan, findings)
    _check_witnesses(folder, roster, findings)
    _check_held(scan, held, findings)
    _check_annexes(folder, scan, findings)
    return Verified(
        folder=path,
        origin=origin,
        role=genesis["body"]["role"] if genesis else "unknown",
        size=scan.size,
        checkpoints=checkpoints,
        epochs=len(scan.rotations) + 1,
        ledger=scan.ledger,
        types=scan.types,
        findings=findings.listed(),
        roster=roster,
    )


def _first_entry(folder: LogFolder) -> dict[str, Any] | None:
    try:
        entry = read_line(LogReader(folder.path).first_line())
    except (OSError, CodecError):
        return None
    return entry if entry["type"] == "log.genesis" else None


def _origin_of(folder: LogFolder, genesis: Mapping[str, Any] | None) -> str:
    """The log's own name; where its first entry is unreadable, that of its checkpoints."""
    if genesis is not None:
        return str(genesis["origin"])
    for size in folder.checkpoint_sizes():
        first = folder.checkpoint_path(size).read_bytes().split(b"\n", 1)[0]
        return first.decode(errors="replace")[:100]
    return folder.path.name


def _note_keys(keys: Keys, roster: Roster | None, findings: Findings) -> None:
    if keys.problem is not None:
        findings.add(keys.problem.code, keys.problem.detail)
    elif keys.roster is not None and roster is None:
        findings.add("GenesisInvalid", "the manifest knows no log of this name")
    elif roster is None:
        findings.add("ManifestMissing", "no manifest.json in the folder, and none given")
    elif not keys.pinned:
        findings.add("KeysNotPinned", "keys taken from the log itself; pin them with --root-key")


def _segments(folder: LogFolder, findings: Findings) -> list[Path]:
    try:
        files = LogReader(folder.path).segments()
    except AuditLogError as error:
        findings.add("SegmentMissing", error.message)
        return LogReader(folder.path, gaps=True).segments()
    if not files:
        findings.add("SegmentMissing", "there are no segments")
    return files


def _chain(
    folder: LogFolder, genesis: Mapping[str, Any] | None, roster: Roster | None, findings: Findings
) -> EpochChain | None:
    origin = findings.log
    try:
        if roster is not None:
            root = roster.by_origin[origin].root
        elif genesis is not None:
            root = VerifierKey.parse(genesis["body"]["root_vkey"])
        else:
            findings.add("GenesisInvalid", "the first entry cannot be read, and no roster names the log's key")
            return None
        return EpochChain.verify(origin, root, folder.endorsements())
    except (CodecError, VerificationFailed) as error:
        findings.add("EpochChain", str(error))
        return None


def _check_genesis(
    genesis: Mapping[str, Any] | None, roster: Roster | None, chain: EpochChain | None, findings: Findings
) -> None:
    if genesis is None:
        findings.add("GenesisInvalid", "the first entry is no genesis", 0)
        return
    body = genesis["body"]
    if chain is not None and body["epoch_vkey"] != str(chain.keys[0]):
        findings.add("GenesisInvalid", "the key of epoch 0 is not the one endorsed", 0)
    if roster is None:
        return
    party = roster.by_origin[findings.log]
    if (body["role"], body["root_vkey"], body["cosigner_vkey"]) != (party.role, str(party.root), str(party.cosigner)):
        findings.add("GenesisInvalid", "the genesis names another role or other keys than the roster", 0)


def _check_manifest(folder: LogFolder, scan: Scan, findings: Findings) -> None:
    if not folder.manifest.exists():
        findings.add("ManifestMismatch", "manifest.json is missing")
    elif scan.manifest is not None and sha256(folder.manifest.read_bytes()).hexdigest() != scan.manifest:
        findings.add("ManifestMismatch", "manifest.json is not the manifest that the log names")


def _check_layout(roster: Roster | None, scan: Scan, findings: Findings) -> None:
    """The size equation starts from the vector's length, which the manifest fixes: an entry cannot choose its own.

    Entries under an earlier manifest were checked when that one was in the folder; it is not here any more.
    """
    due = roster.vector_bytes if roster else None
    for size, seq in scan.vector_sizes.items():
        if due is not None and size != due:
            findings.add("LayoutMismatch", f"entry {seq} counts on a vector of {size} bytes, {due} are due", seq)


def _check_isolation(roster: Roster | None, scan: Scan, findings: Findings) -> None:
    """What the manifest asks for, of the entries under it; what a site asks of itself is judged in the pass."""
    if roster is not None and roster.isolation == "required":
        for seq in scan.open_trainers:
            findings.add("IsolationWeak", f"entry {seq}: the manifest requires isolation", seq)


def _check_counted(genesis: Mapping[str, Any] | None, scan: Scan, findings: Findings) -> None:
    if genesis is not None and genesis["body"]["role"] == SITE and scan.ledger.count and not scan.ledger.readings:
        findings.add("NoNetworkCounter", f"{scan.ledger.count} messages left, and the log has no net.counter")


def _check_chain_length(chain: EpochChain | None, scan: Scan, findings: Findings) -> None:
    # A crash in mid-rotation may leave one endorsement too many; more than that was never announced.
    if chain is not None and len(chain.keys) > len(scan.rotations) + 2:
        findings.add("EpochChain", f"{len(chain.keys)} keys are endorsed, {len(scan.rotations) + 1} were announced")


def _check_coverage(checkpoints: Checkpoints, scan: Scan, findings: Findings) -> None:
    newest = checkpoints.newest
    if newest is None:
        findings.add("Unsealed", f"{scan.size} entries and not one valid signed head")
        return
    size = newest.checkpoint.size
    if size > scan.size:
        findings.add("TruncatedTail", f"the newest head covers {size} entries, {scan.size} are here", scan.size)
    elif size < scan.size:
        findings.add("UnsealedTail", f"entries {size} to {scan.size - 1} are not under a signed head", size)
    witnessed = checkpoints.witnessed
    if witnessed is None:
        findings.add("NotWitnessed", f"no head of this log has a quorum; missing: {'; '.join(checkpoints.missing)}")
    elif len(scan.rounds_after_witness) > MAX_ROUNDS_UNWITNESSED:
        findings.add(
            "NotWitnessed",
            f"{len(scan.rounds_after_witness)} rounds after the newest witnessed head {witnessed.checkpoint.size}",
            witnessed.checkpoint.size,
        )
    elif witnessed.checkpoint.size < size:
        findings.add("BeyondWitnessed", f"witnessed up to {witnessed.checkpoint.size} of {size} entries")


def _check_times(checkpoints: Checkpoints, scan: Scan, findings: Findings) -> None:
    """An entry is no later than the first witness's time on a checkpoint that covers it."""
    for one in checkpoints.signed:
        if not one.cosigners or one.checkpoint.size not in scan.latest_at:
            continue
        seen = min(one.cosigners.values()) * 1000
        if scan.latest_at[one.checkpoint.size] > seen + SKEW_MS:
            late = scan.latest_at[one.checkpoint.size] - seen
            findings.add(
                "Backdated",
                f"an entry under head {one.checkpoint.size} is {late // 1000} s later than a witness saw it",
                one.checkpoint.size - 1,
            )


def _check_witnesses(folder: LogFolder, roster: Roster | None, findings: Findings) -> None:
    """Checkpoints that this party keeps for others must be genuine, or they could not serve as evidence."""
    for path in sorted(folder.witness.glob("*.json")):
        origin = unquote(path.stem)
        party = roster.by_origin.get(origin) if roster else None
        try:
            kept = HeldCheckpoint.parse(path.read_bytes())
            if party is not None and roster is not None:
                kept.verify(party.root, origin)
                kept.note.verify((roster.by_origin[findings.log].cosigner,))
            elif roster is not None:
                raise VerificationFailed("of a log that is not in the roster")
        except ToolkitError as error:
            findings.add("WitnessRecordInvalid", f"witness/{path.name[:80]}: {error.message}")
    for path in sorted(folder.evidence.glob("fork-*.json")):
        findings.add("Fork", f"this party holds evidence of a fork: evidence/{path.name[:80]}")


def _check_held(scan: Scan, held: Sequence[HeldCheckpoint], findings: Findings) -> None:
    """Checkpoints that others hold: one beyond the end means that the end was cut off. The scan compared the others."""
    largest = max((other.checkpoint.size for other in held), default=0)
    if largest > scan.size:
        findings.add("TruncatedTail", f"a witness holds a head of {largest} entries, {scan.size} are here", scan.size)


def _check_annexes(folder: LogFolder, scan: Scan, findings: Findings) -> None:
    missing = 0
    for seq, commitment in scan.commitments.items():
        try:
            Annex.open(folder.annex_path(seq).read_bytes(), commitment)
        except FileNotFoundError:
            missing += 1
        except (CodecError, VerificationFailed) as error:
            findings.add("AnnexMismatch", f"annex of entry {seq}: {error.message}", seq)
    if missing:
        findings.add("AnnexUnavailable", f"{missing} of {len(scan.commitments)} annexes cannot be opened here")


# The auditor's keys


def keys_for(path: Path, root_key: Path | None) -> Keys:
    """The roster of a log folder's own `manifest.json`, checked where the auditor brought the consortium's root."""
    root = _root(root_key)
    manifest = LogFolder(path).manifest
    if not manifest.exists():
        return Keys(roster=None, pinned=False)
    try:
        roster = _roster(manifest, root)
        older = [_roster(path, root) for path in sorted(LogFolder(path).older_manifests.glob("*.json"))]
        return Keys(roster=_with_former(roster, older), pinned=root is not None)
    except ToolkitError as error:
        return Keys(roster=None, pinned=False, problem=Finding(code="ManifestRejected", log="", detail=error.message))


def _with_former(newest: Roster, older: Sequence[Roster]) -> Roster:
    """The roster in force, and who has left it: the consortium has signed for their keys too."""
    left = {party.origin: party for roster in older for party in roster.parties if party.origin not in newest.by_origin}
    names = {party.name for party in newest.parties}
    return replace(newest, former=tuple(party for party in left.values() if party.name not in names))


def roster_from(manifest: Path, root_key: Path | None) -> Roster:
    """The roster of a manifest file that the auditor gave."""
    return _roster(manifest, _root(root_key))


def manifest_from(manifest: Path, root_key: Path | None) -> Manifest:
    """A manifest file that the auditor gave."""
    return _manifest(manifest, _root(root_key))


def _root(root_key: Path | None) -> Certificate | None:
    from security.identity.pki import read_certificate

    if root_key is None:
        return None
    try:
        return read_certificate(root_key.read_text(encoding="ascii"), str(root_key))
    except (OSError, UnicodeDecodeError, ToolkitError) as error:
        raise ConfigError("the root certificate cannot be read", where=str(root_key)) from error


def _roster(manifest_path: Path, root: Certificate | None) -> Roster:
    from security.identity.membership import audit_roster

    return audit_roster(_manifest(manifest_path, root))


def _manifest(path: Path, root: Certificate | None) -> Manifest:
    """Dates are not checked: a log is audited years after its certificates have ended."""
    # pydantic and the X.509 code take longer to import than a small log takes to verify.
    from security.identity.manifest import unseal
    from security.identity.rules import check_federation, check_signature

    manifest, signature = unseal(path.read_bytes(), str(path))
    if root is not None:
        check_signature(manifest, signature, root)
        check_federation(manifest, root)
    return manifest
