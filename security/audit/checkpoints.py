"""The checkpoints of one log: read, checked against keys, sorted into epochs and witnesses, and held against the tree
over its entries. And those that others hold of a log: they count under a key that a manifest lists, and not otherwise.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lazaret.errors import CodecError, ToolkitError, VerificationFailed
from security.audit.agreement import Agreements, Keys
from security.audit.findings import Findings
from security.audit.safe_files import hostile, is_leftover
from security.crypto.merkle import HASH_SIZE, CompactRange
from security.log.keys import EpochChain
from security.log.note import Checkpoint, KeyType, Note, VerifierKey, checkpoint_of
from security.log.roster import Roster
from security.log.store import LogFolder, is_size
from security.log.witness import Fork, HeldCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCheckpoint:
    """One checkpoint whose signatures verify: who signed it, as which epoch, and which witnesses saw it when."""

    checkpoint: Checkpoint
    note: Note
    epochs: tuple[int, ...]
    cosigners: Mapping[VerifierKey, int] = field(default_factory=dict)
    ml_dsa: frozenset[VerifierKey] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """All checkpoints, smallest first, and the newest one with a full quorum."""

    signed: tuple[VerifiedCheckpoint, ...]
    witnessed: VerifiedCheckpoint | None
    missing: tuple[str, ...]

    @property
    def newest(self) -> VerifiedCheckpoint | None:
        """The largest checkpoint."""
        return self.signed[-1] if self.signed else None


def read_checkpoints(
    folder: LogFolder, chain: EpochChain | None, agreements: Agreements, findings: Findings
) -> tuple[VerifiedCheckpoint, ...]:
    """Check every signature on every checkpoint. What fails is a finding and is left out.

    A witness is anybody who was a member in any version; which of them make a quorum, `witnessed` decides.
    """
    known = bool(agreements.versions)
    others = (*agreements.cosigners_for(findings.log), *agreements.ml_dsa_keys(findings.log))
    keys = (*(chain.keys if chain else ()), *others)
    # Before the checkpoints: it is one of them, also while a running agent adds to both.
    handed_out = folder.cosigned.read_bytes() if folder.cosigned.exists() else None
    names = [path.name for path in folder.checkpoints.glob("*") if not is_leftover(path.name)]
    strange = [name for name in names if not _is_checkpoint_name(name)]
    for name in strange:
        findings.add("BadHead", f"checkpoints/ holds {name[:40]!r}, which is no head")
    found = []
    for size in folder.checkpoint_sizes():
        where = f"checkpoints/{size}.note"
        one = _read_checkpoint(folder.checkpoint_path(size).read_bytes(), where, keys, chain, known, findings)
        if one is not None and one.checkpoint.size != size:
            findings.add("BadHead", f"{where} is a head of size {one.checkpoint.size}")
        elif one is not None:
            found.append(one)
    if handed_out is not None:
        _check_cosigned_note(handed_out, found, keys, chain, known, findings)
    return tuple(found)


def _is_checkpoint_name(name: str) -> bool:
    return name.endswith(".note") and is_size(name.removesuffix(".note")) is not None


def _read_checkpoint(
    data: bytes,
    where: str,
    keys: Sequence[VerifierKey],
    chain: EpochChain | None,
    known: bool,
    findings: Findings,
) -> VerifiedCheckpoint | None:
    try:
        note = Note.parse(data)
        checkpoint = checkpoint_of(note)
    except CodecError as error:
        findings.add("BadHead", f"{where}: {error.message}")
        return None
    if checkpoint.origin != findings.log:
        findings.add("BadHead", f"{where} is a head of another log")
        return None
    if chain is None:
        return VerifiedCheckpoint(checkpoint=checkpoint, note=note, epochs=())
    try:
        verified = note.verify(keys)
    except VerificationFailed as error:
        findings.add("BadSignature", f"{where}: {error.message}")
        return None
    # Without a manifest the witnesses' keys are unknown, and C2SP says to ignore unknown signers.
    if known and note.unknown(keys):
        findings.add("UnknownSigner", f"{where} is also signed by {note.unknown(keys)[0].name[:60]!r}")
    epochs = tuple(number for number, key in enumerate(chain.keys) if key in verified)
    if not epochs:
        findings.add("BadSignature", f"{where} is not signed by the log itself")
        return None
    times = {key: time for key, time in verified.items() if key.kind is KeyType.COSIGNER and time is not None}
    second = frozenset(key for key in verified if key.kind is KeyType.ML_DSA)
    return VerifiedCheckpoint(checkpoint=checkpoint, note=note, epochs=epochs, cosigners=times, ml_dsa=second)


def witnessed(
    signed: Sequence[VerifiedCheckpoint], roster_at: Callable[[int], Roster | None], origin: str
) -> Checkpoints:
    """The newest checkpoint with a quorum, or else what the newest one lacks.

    A witness of a larger one has checked that it extends the smaller one, so its cosignature counts for both.

    :param roster_at: the parties in force when an entry was written.
    """
    missing: tuple[str, ...] = ("the manifest",)
    seen: dict[VerifierKey, int] = {}
    for one in reversed(signed):
        for key, time in one.cosigners.items():
            seen.setdefault(key, time)
        roster = roster_at(max(one.checkpoint.size - 1, 0))
        if roster is None:
            continue
        lacking = roster.missing_for_quorum(origin, seen)
        if not lacking:
            return Checkpoints(signed=tuple(signed), witnessed=replace(one, cosigners=dict(seen)), missing=())
        missing = lacking
    return Checkpoints(signed=tuple(signed), witnessed=None, missing=missing)


def _check_cosigned_note(
    data: bytes,
    found: Iterable[VerifiedCheckpoint],
    keys: Sequence[VerifierKey],
    chain: EpochChain | None,
    known: bool,
    findings: Findings,
) -> None:
    """cosigned.note is what a party hands out as proof: it must be one of the checkpoints, and genuine throughout."""
    handed_out = _read_checkpoint(data, "cosigned.note", keys, chain, known, findings)
    if handed_out is not None and all(other.checkpoint != handed_out.checkpoint for other in found):
        if handed_out.checkpoint.size > max((other.checkpoint.size for other in found), default=0):
            findings.add("TruncatedTail", f"cosigned.note speaks of {handed_out.checkpoint.size} entries")
        else:
            findings.add("BadHead", "cosigned.note is none of the heads in checkpoints/")


def check_epochs(checkpoints: Checkpoints, rotations: Sequence[int], findings: Findings) -> None:
    """A checkpoint inside an epoch is signed by that epoch's key only; the one at a rotation by both.

    :param rotations: the entry numbers of `key.rotated`, in order.
    """
    sealed = set()
    for one in checkpoints.signed:
        size = one.checkpoint.size
        epoch = sum(entry < size for entry in rotations)
        boundary = epoch > 0 and rotations[epoch - 1] == size - 1
        # Section 5: inside epoch e by key e only. A stolen newer key then cannot sign older entries again.
        due = (epoch - 1, epoch) if boundary else (epoch,)
        if one.epochs and one.epochs != due:
            signed = " and ".join(map(str, one.epochs))
            findings.add("WrongEpochKey", f"head {size} is signed by epoch {signed}, due is {due}", size - 1)
        if boundary:
            sealed.add(size - 1)
    for number, entry in enumerate(rotations):
        if entry not in sealed:
            findings.add("EpochUnsealed", f"no head of size {entry + 1} seals epoch {number}", entry)


def check_ml_dsa(
    signed: Sequence[VerifiedCheckpoint],
    roster_at: Callable[[int], Roster | None],
    keys: Keys,
    findings: Findings,
) -> None:
    """Every checkpoint has the ML-DSA signature that the manifest in force asks for.

    The newest one has it if any version asks for it: a log that never takes over such a version could be forged by
    whoever forges Ed25519 signatures. A party that has no such version may have stopped before there was one.
    """
    listed = keys.agreements.ml_dsa_keys(findings.log)
    for one in signed:
        size = one.checkpoint.size
        roster = roster_at(max(size - 1, 0))
        party = roster.by_origin.get(findings.log) if roster is not None else None
        due = {party.ml_dsa} if party is not None and party.ml_dsa is not None else set()
        if one is signed[-1] and listed:
            due = due or {listed[0]}
        if not due <= one.ml_dsa:
            findings.add("BadSignature", f"head {size} has no ML-DSA signature, which the manifest asks for", size - 1)
    if keys.ml_dsa and signed and not listed:
        size = signed[-1].checkpoint.size
        findings.add("OneSignature", f"the newest head, {size}, is from before ML-DSA was turned on", size - 1)


class TreeCheck:
    """The tree over the entries as they pass, against every checkpoint of the log and against leaves.bin.

    The scan puts leaves into `pending` and calls `reach` when it has come to the size `stop`.

    :ivar latest_at: for each checkpoint, the latest time among the entries it covers.
    """

    def __init__(
        self,
        folder: LogFolder,
        signed: Sequence[VerifiedCheckpoint],
        held: Sequence[HeldCheckpoint],
        findings: Findings,
    ) -> None:
        self.pending: list[bytes] = []
        self.latest_at: dict[int, int] = {}
        self._findings = findings
        self._range = CompactRange()
        self._size = self._fits = 0
        self._own = {one.checkpoint.size: one for one in signed}
        self._held: dict[int, list[HeldCheckpoint]] = {}
        for other in held:
            self._held.setdefault(other.checkpoint.size, []).append(other)
        self._stops = iter([*sorted({*self._own, *self._held}), 1 << 62])
        self.stop = next(self._stops)
        self._leaves = folder.leaves.open("rb") if folder.leaves.exists() else io.BytesIO()
        # As long as it is now: the entries are read later, and a running agent may have added to both by then.
        self._kept = self._leaves.seek(0, io.SEEK_END)
        self._leaves.seek(0)

    def reach(self, latest: int) -> bool:
        """Compare the root of what has passed; whether the log itself has a checkpoint here."""
        self._flush()
        size, own = self.stop, self._own.get(self.stop)
        if own is not None:
            self._compare_own(own, self._range.root())
            self.latest_at[size] = latest
        for other in self._held.get(size, ()):
            if self._range.root() != other.checkpoint.root:
                self._contradicted(other, size)
        self.stop = next(self._stops)
        return own is not None

    def _compare_own(self, own: VerifiedCheckpoint, root: bytes) -> None:
        size = own.checkpoint.size
        if root == own.checkpoint.root:
            self._fits = size
        else:
            between = f"a change between entries {self._fits} and {size - 1}"
            self._findings.add("RootMismatch", f"head {size} has another root: {between}", max(size - 1, 0))

    def close(self, latest: int) -> None:
        """Everything has passed."""
        self._flush()
        while self.stop <= self._size:
            self.reach(latest)
        if self._kept > 0:
            self._findings.add("LeavesMismatch", "leaves.bin has hashes of entries that are not here", self._size)
        self._leaves.close()

    def _flush(self) -> None:
        pending, self.pending = self.pending, []
        self._size += len(pending)
        self._range.extend(pending)
        kept = self._leaves.read(min(HASH_SIZE * len(pending), self._kept))
        self._kept -= len(kept)
        if kept == b"".join(pending):
            return
        start, sealed = self._size - len(pending), max(self._own, default=0)
        for index, leaf in enumerate(pending):
            mine = kept[index * HASH_SIZE : (index + 1) * HASH_SIZE]
            # The file is derived and not synced, so it may end early; but never below the newest checkpoint.
            # Beyond the newest checkpoint the file may end early (section 1): it is derived, and not synced.
            if mine != leaf and (mine or start + index < sealed):
                self._findings.add("LeavesMismatch", f"entry {start + index} has another hash", start + index)

    def _contradicted(self, other: HeldCheckpoint, size: int) -> None:
        """Entries that differ from what a witness saw: changed afterwards, or signed as another history?"""
        own = self._own.get(size)
        agrees = own is not None and own.checkpoint.root == other.checkpoint.root
        if agrees or "RootMismatch" in self._findings:
            self._findings.add("RootMismatch", f"a witness saw other entries up to {size}", max(size - 1, 0))
        else:
            self._findings.add("Fork", f"a witness holds another history of {size} entries", max(size - 1, 0))


# Checkpoints and forks that somebody brings


def verify_held(held: HeldCheckpoint, agreements: Agreements, origin: str) -> None:
    """Check that a checkpoint is signed under a key that a manifest lists for its log.

    :raises VerificationFailed: if it is not, so that it proves nothing about anybody.
    """
    _under_listed_keys(agreements, origin, lambda root: held.verify(root, origin))


def believed(held: HeldCheckpoint, keys: Keys, origin: str) -> bool:
    """Whether a checkpoint that somebody brought is a genuine one of this log; another proves nothing about it."""
    try:
        verify_held(held, keys.agreements.confirmed, origin)
    except ToolkitError:
        return False
    return held.checkpoint.origin == origin


def verify_fork(fork: Fork, agreements: Agreements) -> None:
    """Check evidence of a fork under the keys that a manifest lists for the log.

    :raises VerificationFailed: if it does not show that the holder of these keys signed two histories.
    """
    _under_listed_keys(agreements, fork.origin, fork.verify)


def _under_listed_keys(agreements: Agreements, origin: str, verify: Callable[[VerifierKey], object]) -> None:
    """Return when `verify` holds under one of the keys that a manifest lists for a log; otherwise its last error."""
    failure: ToolkitError = VerificationFailed("of a log that no manifest lists", where=origin)
    for party in agreements.parties(origin):
        try:
            verify(party.root)
            return
        except (VerificationFailed, CodecError) as error:
            failure = error
    raise failure


def held_checkpoints(paths: Iterable[Path], agreements: Agreements) -> dict[str, list[HeldCheckpoint]]:
    """For each log, the genuine checkpoints of it that the given folders hold: under a listed key, or not at all."""
    found: dict[str, list[HeldCheckpoint]] = {}
    for path in paths:
        folder = LogFolder(path)
        for file in sorted(folder.witness.glob("*.json")) if not any(hostile(folder)) else ():
            try:
                kept = HeldCheckpoint.parse(file.read_bytes())
                origin = kept.checkpoint.origin
                verify_held(kept, agreements, origin)
            except ToolkitError:
                continue  # verify() of the folder that holds it says so
            found.setdefault(origin, []).append(kept)
    return found


def hold_copies(
    copies: Mapping[str, Sequence[Path]], agreements: Agreements, held: dict[str, list[HeldCheckpoint]]
) -> None:
    """Where several folders are of one log, add the newest checkpoint of each to those that are held of it."""
    for origin, paths in copies.items():
        for folder in map(LogFolder, paths) if len(paths) > 1 else ():
            if any(hostile(folder)):
                continue
            try:
                note = folder.checkpoint_note(folder.checkpoint_sizes()[-1])
                newest = HeldCheckpoint(note=note, endorsements=tuple(folder.endorsements()))
                verify_held(newest, agreements, origin)
            except (ToolkitError, IndexError, OSError):
                continue  # verify() of this folder says so
            held.setdefault(origin, []).append(newest)
