"""One log, from a copy of its folder: is the record whole, unchanged, signed and witnessed, and were the rules kept?

`verify` runs every check. The keys and rules that it believes come from the signed manifests in the folder, which the
auditor pins with the consortium's root certificate or takes as they are (`agreement.keys_for`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import file_digest, sha256
from itertools import islice
from operator import itemgetter
from pathlib import Path
from statistics import median_low
from typing import Any, Final
from urllib.parse import unquote

from lazaret.errors import AuditLogError, CodecError, ToolkitError, VerificationFailed
from lazaret.kernel_bytes import PROCESS
from security.audit.agreement import AgreedRules, Agreement, Agreements, Keys
from security.audit.checkpoints import (
    Checkpoints,
    check_epochs,
    check_ml_dsa,
    read_checkpoints,
    verify_fork,
    verify_held,
    witnessed,
)
from security.audit.egress_ledger import EgressLedger
from security.audit.findings import Concern, Finding, Findings, exit_code, verdict_on
from security.audit.safe_files import hostile
from security.audit.scan import Scan
from security.log.keys import EpochChain
from security.log.machine import SKEW_MS
from security.log.note import VerifierKey
from security.log.reader import LogReader
from security.log.roster import SITE, Roster
from security.log.schema import read_line
from security.log.store import FORMAT, Annex, LogFolder
from security.log.witness import Fork, HeldCheckpoint

MAX_ROUNDS_UNWITNESSED: Final = 3  # where the manifest is not known
LEAST_COUNTED: Final = 0.5  # of the bytes that left, the share that readings of the kernel must cover


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
    agreements: Agreements = field(default_factory=Agreements)
    adopted: tuple[tuple[int, str], ...] = ()
    annexes: int = 0  # entries that commit to one
    erased: int = 0  # of these, as the log says

    @property
    def covered(self) -> int:
        """How many entries witnesses cover. What follows them is outside of the verdict."""
        return self.checkpoints.witnessed.checkpoint.size if self.checkpoints.witnessed else 0

    def agreement_at(self, seq: int) -> Agreement | None:
        """The manifest in force when an entry was written."""
        place = bisect_right(self.adopted, seq, key=itemgetter(0))
        return self.agreements.of(self.adopted[place - 1][1] if place else None)

    def rules_at(self, seq: int) -> AgreedRules | None:
        """Its rules."""
        agreement = self.agreement_at(seq)
        return agreement.rules if agreement else None

    def verdict(self, concern: Concern) -> int:
        """0, 1 or 3 for one of the two verdicts."""
        return verdict_on(self.findings, concern)

    @property
    def exit_code(self) -> int:
        """0, 1 or 3."""
        return exit_code(self.findings)


def verify(path: Path, keys: Keys, held: Sequence[HeldCheckpoint] = ()) -> Verified:
    """Run every check on one log. What is wrong is a finding, also where there is no log at all.

    :param held: checkpoints of this log that others hold, if the auditor has them.
    """
    folder = LogFolder(path)
    faults = list(islice(hostile(folder), 20))
    if faults or not folder.segments.is_dir() or not any(folder.segments.iterdir()):
        return _unread(path, faults)
    genesis = _first_entry(folder)
    origin = _origin_of(folder, genesis)
    findings = Findings(origin)
    if not folder.format.exists() or folder.format.read_bytes() != FORMAT:
        findings.add("FormatUnknown", "FORMAT is not that of this version")
    # Manifests that list no log of this name say nothing about it: neither keys nor rules are taken from them.
    agreements = keys.agreements if keys.agreements.parties(origin) else Agreements()
    _note_keys(keys, agreements, findings)
    chain = _chain(folder, genesis, agreements, findings)
    signed = read_checkpoints(folder, chain, agreements, findings)
    scan = Scan(folder, signed, chain, findings, agreements, held)
    scan.run(_segments(folder, findings))
    checkpoints = witnessed(signed, lambda seq: _roster_at(scan, seq), origin)
    _check_genesis(genesis, scan, chain, findings)
    _check_manifest(folder, scan, findings)
    _check_counted(genesis, scan, findings)
    check_epochs(checkpoints, scan.rotations, findings)
    check_ml_dsa(signed, lambda seq: _roster_at(scan, seq), keys, findings)
    _check_chain_length(chain, scan, findings)
    _check_coverage(checkpoints, scan, findings)
    _check_times(checkpoints, scan, agreements.observers, findings)
    _check_witnesses(folder, agreements, scan, findings)
    _check_evidence(folder, agreements, findings)
    _check_torn(folder, scan, findings)
    _check_held(scan, held, findings)
    _check_annexes(folder, scan, findings)
    _check_cosignatures(folder, checkpoints, scan, findings)
    if scan.running:
        findings.add("NoStop", f"{scan.size} entries, and the last is not after agent.stop", max(scan.size - 1, 0))
    newest = agreements.newest
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
        roster=newest.roster if newest else None,
        agreements=agreements,
        adopted=scan.adoptions,
        annexes=len(scan.commitments),
        erased=len(erased_annexes(scan.commitments, scan.erased)),
    )


def _unread(path: Path, faults: Sequence[str]) -> Verified:
    """A folder of which nothing can be said, and why."""
    findings = Findings(path.name[:100])
    for fault in faults:
        findings.add("HostileFolder", fault)
    if not faults:
        findings.add("EmptyLog", "there are no segments here")
    return Verified(
        folder=path,
        origin=findings.log,
        role="unknown",
        size=0,
        checkpoints=Checkpoints(signed=(), witnessed=None, missing=("the log",)),
        epochs=0,
        ledger=EgressLedger(findings),
        findings=findings.listed(),
    )


def _roster_at(scan: Scan, seq: int) -> Roster | None:
    agreement = scan.agreement_at(seq)
    return agreement.roster if agreement else None


def origin_of(path: Path) -> str:
    """The name that a log gives itself, without a check of anything."""
    folder = LogFolder(path)
    return path.name[:100] if any(hostile(folder)) else _origin_of(folder, _first_entry(folder))


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


def _note_keys(keys: Keys, agreements: Agreements, findings: Findings) -> None:
    for problem in keys.agreements.problems:
        findings.add(problem.code, problem.detail)
    for one, other in keys.agreements.conflicts():
        findings.add("ManifestConflict", f"{one.digest[:16]} and {other.digest[:16]} are both version {one.version}")
    if agreements.versions:
        if not keys.pinned:
            findings.add("KeysNotPinned", "keys taken from the log itself; pin them with --root-key")
    elif keys.agreements.versions:
        findings.add("GenesisInvalid", "no manifest knows a log of this name")
    elif not keys.agreements.problems:
        findings.add("ManifestMissing", "no manifest in the folder, and none given")


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
    folder: LogFolder, genesis: Mapping[str, Any] | None, agreements: Agreements, findings: Findings
) -> EpochChain | None:
    origin = findings.log
    roots = [party.root for party in agreements.parties(origin)]
    try:
        if genesis is not None:
            named = VerifierKey.parse(genesis["body"]["root_vkey"])
            # A member that was enrolled again has another key now; the log goes on under the one it began with.
            root = named if named in roots or not roots else roots[0]
        elif roots:
            root = roots[0]
        else:
            findings.add("GenesisInvalid", "the first entry cannot be read, and no manifest names the log's key")
            return None
        return EpochChain.verify(origin, root, folder.endorsements())
    except (CodecError, VerificationFailed) as error:
        findings.add("EpochChain", str(error))
        return None


def _check_genesis(genesis: Mapping[str, Any] | None, scan: Scan, chain: EpochChain | None, findings: Findings) -> None:
    if genesis is None:
        findings.add("GenesisInvalid", "the first entry is no genesis", 0)
        return
    body = genesis["body"]
    if chain is not None and body["epoch_vkey"] != str(chain.keys[0]):
        findings.add("GenesisInvalid", "the key of epoch 0 is not the one endorsed", 0)
    roster = _roster_at(scan, 0)
    party = roster.by_origin.get(findings.log) if roster else None
    if roster is None:
        return
    named = (body["role"], body["root_vkey"], body["cosigner_vkey"])
    if party is None or named != (party.role, str(party.root), str(party.cosigner)):
        findings.add("GenesisInvalid", "the genesis names another role or other keys than the manifest", 0)


def _check_manifest(folder: LogFolder, scan: Scan, findings: Findings) -> None:
    """`manifest.json` is the one in force at the end, and every version that the log names is kept."""
    if not folder.manifest.exists():
        findings.add("ManifestMismatch", "manifest.json is missing")
    elif scan.manifest is not None and sha256(folder.manifest.read_bytes()).hexdigest() != scan.manifest:
        findings.add("ManifestMismatch", "manifest.json is not the manifest that the log names")
    for seq, digest in scan.adoptions:
        if digest and not folder.manifest_path(digest).exists():
            findings.add("ManifestMissing", f"manifests/ has no copy of the version in force from entry {seq} on", seq)


def _check_counted(genesis: Mapping[str, Any] | None, scan: Scan, findings: Findings) -> None:
    if genesis is not None and genesis["body"]["role"] == SITE and scan.ledger.count and not scan.ledger.readings:
        findings.add("NoNetworkCounter", f"{scan.ledger.count} messages left, and the log has no net.counter")
        return
    if not scan.ledger.bounded or not scan.ledger.readings:
        return
    if scan.ledger.share < LEAST_COUNTED:
        what = f"readings of the {scan.ledger.coverage} cover {100 * scan.ledger.share:.0f} %"
        findings.add("CounterCoverage", f"{what} of {scan.ledger.total} bytes that left")
    elif scan.ledger.coverage == PROCESS:
        findings.add("ProcessCount", "only TCP connections of the agent's own process are counted")


def _check_chain_length(chain: EpochChain | None, scan: Scan, findings: Findings) -> None:
    # A crash in mid-rotation may leave one endorsement too many; more than that was never announced.
    if chain is not None and len(chain.keys) > len(scan.rotations) + 2:
        findings.add("EpochChain", f"{len(chain.keys)} keys are endorsed, {len(scan.rotations) + 1} were announced")


def _check_coverage(checkpoints: Checkpoints, scan: Scan, findings: Findings) -> None:
    newest = checkpoints.newest
    here = {str(one.checkpoint.size) for one in checkpoints.signed}
    for shown, seq in scan.shown.items():
        if shown not in here:
            findings.add("HeadMissing", f"entry {seq} went out with head {shown}, which is not here", seq)
    if newest is None:
        findings.add("Unsealed", f"{scan.size} entries and not one valid signed head")
        return
    size = newest.checkpoint.size
    if size > scan.size:
        findings.add("TruncatedTail", f"the newest head covers {size} entries, {scan.size} are here", scan.size)
    elif size < scan.size:
        findings.add("UnsealedTail", f"entries {size} to {scan.size - 1} are not under a signed head", size)
    seen = checkpoints.witnessed
    if seen is None:
        findings.add("NotWitnessed", f"no head of this log has a quorum; missing: {'; '.join(checkpoints.missing)}")
        return
    covered = seen.checkpoint.size
    after = {(run, number) for seq, run, number in scan.uploads if seq >= covered}
    agreement = scan.agreement_at(covered)
    most = agreement.rules.max_rounds_unwitnessed if agreement and agreement.rules else MAX_ROUNDS_UNWITNESSED
    if len(after) > most:
        findings.add("NotWitnessed", f"{len(after)} rounds after the newest witnessed head {covered}", covered)
    elif covered < scan.size:
        outside = f"entries {covered} to {scan.size - 1} are outside of the verdict"
        findings.add("BeyondWitnessed", f"witnesses cover entries 0 to {covered - 1}; {outside}", covered)


def _check_times(
    checkpoints: Checkpoints, scan: Scan, observers: frozenset[VerifierKey], findings: Findings
) -> None:
    """An entry is no later than the time at which witnesses saw a checkpoint that covers it.

    The time in the middle counts, so that one witness with a false clock cannot make an honest log look backdated. Only
    members count: an observer may sign weeks later, and several of them would move the middle, or frame a party.
    """
    for one in checkpoints.signed:
        if not one.cosigners or one.checkpoint.size not in scan.tree.latest_at:
            continue
        latest, size = scan.tree.latest_at[one.checkpoint.size], one.checkpoint.size
        members = {key: time for key, time in one.cosigners.items() if key not in observers}
        # Of an even number the lower one: one witness whose clock is ahead does not move the bound (section 10,
        # Tolerances).
        middle = median_low(members.values()) * 1000 if members else latest
        if len(members) > 1 and latest > middle + SKEW_MS:
            late = (latest - middle) // 1000
            findings.add("Backdated", f"an entry under head {size} is {late} s later than witnesses saw it", size - 1)
            continue
        for key, time in one.cosigners.items():
            if latest > time * 1000 + SKEW_MS:
                late = (latest - time * 1000) // 1000
                detail = f"{key.name} says that it saw head {size} {late} s before its last entry"
                findings.add("Backdated" if members.keys() == {key} else "WitnessClock", detail, size - 1)


def _check_witnesses(folder: LogFolder, agreements: Agreements, scan: Scan, findings: Findings) -> None:
    """Checkpoints that this party keeps for others must be genuine, or they could not serve as evidence."""
    if not folder.witness.is_dir():
        findings.add("WitnessFolderMissing", "there is no folder witness/")
        return
    own = tuple(party.cosigner for party in agreements.parties(findings.log))
    held: dict[str, int] = {}
    for path in sorted(folder.witness.glob("*.json")):
        origin = unquote(path.stem)
        try:
            kept = HeldCheckpoint.parse(path.read_bytes())
            if agreements.versions:
                verify_held(kept, agreements, origin)
                kept.note.verify(own)
            held[origin] = kept.checkpoint.size
        except ToolkitError as error:
            findings.add("WitnessRecordInvalid", f"witness/{path.name[:80]}: {error.message}")
    for origin, size in scan.given.items():
        # The checkpoint is on disk before its cosignature is given, and only a larger one replaces it.
        if held.get(origin, 0) < size:
            detail = f"a checkpoint of {origin} of size {size} was cosigned here and is not held"
            findings.add("WitnessRecordInvalid", detail)


def _check_cosignatures(folder: LogFolder, checkpoints: Checkpoints, scan: Scan, findings: Findings) -> None:
    """Every cosignature that the log names is on its head, and `cosigned.note` is one of the heads as it is here."""
    names = {one.checkpoint.size: {key.name for key in one.cosigners} for one in checkpoints.signed}
    for size, cosigners in scan.cosigned.items():
        for name, seq in cosigners.items():
            if name not in names.get(size, ()):
                findings.add("CosignatureMissing", f"entry {seq}: {name} cosigned head {size}", seq)
    if folder.cosigned.exists():
        handed_out = folder.cosigned.read_bytes()
        if all(handed_out != one.note.encode() for one in checkpoints.signed):
            findings.add("CosignatureMissing", "cosigned.note differs from the head in checkpoints/")
    elif checkpoints.witnessed is not None and checkpoints.witnessed.cosigners:
        findings.add("CosignatureMissing", "there is a quorum, and no cosigned.note")


def _check_evidence(folder: LogFolder, agreements: Agreements, findings: Findings) -> None:
    """Anybody can put a file here: it counts with the signatures of the log that it is about, and only then."""
    for path in sorted(folder.evidence.glob("fork-*.json")):
        name = f"evidence/{path.name[:80]}"
        try:
            fork = Fork.parse(path.read_bytes())
            verify_fork(fork, agreements.confirmed)
        except ToolkitError as error:
            findings.add("EvidenceInvalid", f"{name}: {error.message}")
        else:
            findings.add("Fork", f"{fork.origin} signed two histories; this party holds the evidence: {name}")


def _check_torn(folder: LogFolder, scan: Scan, findings: Findings) -> None:
    """What was set aside after a crash is still there, so that somebody can look at it."""
    kept = set()
    for path in folder.evidence.glob("torn-*") if scan.torn else ():
        with path.open("rb") as file:
            kept.add(file_digest(file, "sha256").hexdigest())
    for digest, seq in scan.torn.items():
        if digest not in kept:
            findings.add("TornWriteMissing", f"entry {seq}: evidence/ has no file with SHA-256 {digest[:16]}", seq)


def _check_held(scan: Scan, held: Sequence[HeldCheckpoint], findings: Findings) -> None:
    """Checkpoints that others hold: one beyond the end means that the end was cut off. The scan compared the others."""
    largest = max((other.checkpoint.size for other in held), default=0)
    if largest > scan.size:
        findings.add("TruncatedTail", f"a witness holds a head of {largest} entries, {scan.size} are here", scan.size)


def erased_annexes(committed: Iterable[int], erased: Iterable[range]) -> set[int]:
    """The entries whose annex was erased. One pass over both: a party may write a great many of either."""
    ranges = sorted(erased, key=lambda entries: entries.start, reverse=True)
    found, stop = set[int](), 0
    for seq in sorted(committed):
        while ranges and ranges[-1].start <= seq:
            stop = max(stop, ranges.pop().stop)
        if seq < stop:
            found.add(seq)
    return found


def _check_annexes(folder: LogFolder, scan: Scan, findings: Findings) -> None:
    """A copy for an auditor has no annexes. The site's own folder has all of them but those that were erased."""
    own, missing = folder.annex.is_dir(), 0
    erased = erased_annexes(scan.commitments, scan.erased)
    for seq, commitment in scan.commitments.items():
        try:
            Annex.open(folder.annex_path(seq).read_bytes(), commitment)
            if seq in erased:
                findings.add("AnnexKept", f"the annex of entry {seq} was to be erased, and it is here", seq)
        except FileNotFoundError:
            missing += 1
            if own and seq not in erased:
                findings.add("AnnexLost", f"the annex of entry {seq} is gone, and no entry says why", seq)
        except (CodecError, VerificationFailed) as error:
            findings.add("AnnexMismatch", f"annex of entry {seq}: {error.message}", seq)
    if missing:
        findings.add("AnnexUnavailable", f"{missing} of {len(scan.commitments)} annexes cannot be opened here")
