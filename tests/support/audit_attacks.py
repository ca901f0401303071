"""Tools of somebody who owns a log folder, and perhaps its live key, and wants to change what it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

import security.audit.verify as verify_module
from security.audit import compare, epsilon, facts
from security.audit.agreement import Agreements, Keys
from security.audit.checkpoints import TreeCheck
from security.audit.completeness import RoundBook
from security.audit.egress_ledger import EgressLedger
from security.audit.findings import Finding, Severity
from security.audit.scan import Scan
from security.audit.verify import verify
from security.clock import ManualClock
from security.crypto.merkle import Tree, leaf_hash
from security.log.egress import due_bytes
from security.log.keys import EpochKeys
from security.log.note import Checkpoint, Note, NoteSigner, Signature
from security.log.opening import continue_log, create_log
from security.log.reader import LogReader
from security.log.roster import SITE, Roster
from security.log.schema import ENVELOPE, SCHEMAS, match_line
from security.log.store import Annex, LogFolder
from security.log.witness import HeldCheckpoint, Witness
from security.log.writer import AuditLog
from security.rng import CountedRandomness
from tests.support.audit_parties import NOW, Member, QuickDisk, new_member

# What a log without a manifest, without whole rounds and without an orderly end says of itself.
FRAGMENT = frozenset({"RulesUnknown", "StepMissing", "NoStop", "NoNetworkCounter"})


def with_signatures(note: Note, *lines: Signature) -> Note:
    """The same text with further signatures, whoever they are of."""
    return replace(note, signatures=(*note.signatures, *lines))



def weighty(findings: Iterable[Finding]) -> set[str]:
    """Codes of findings that keep a log from being clean; of a lonely log, besides those it has by its nature."""
    codes = {finding.code for finding in findings if finding.severity is not Severity.NOTE}
    return codes - FRAGMENT if "RulesUnknown" in codes else codes


# The check behind each code, and what stands in its place where a twin has it off: nothing, or a comparison that
# believes what the entry says. A twin shows that this check, and nothing else, keeps a planted breach from being clean.


def _off(*_: object, **__: object) -> None:
    """A check that looks at nothing."""


def _reads_anything(scan: Scan, line: bytes) -> None:
    """Takes lines as most readers of JSON do: whatever `json.loads` makes of them; what it does not know it skips."""
    try:
        entry = json.loads(line.decode("utf-8-sig", errors="replace"))
        kept = {name: entry[name] for name in (*ENVELOPE, "body", "type")}
        kept["body"] = {name: kept["body"][name] for name in SCHEMAS[entry["type"]].kinds}
        plain = encode({**kept, "seq": scan.size, "v": 1}).replace(b"NaN", b"null")
        known = match_line(plain.decode()) is not None
    except (ValueError, KeyError, TypeError):
        known = False
    if known:
        ENTRY(scan, plain)
    else:
        scan.size += 1


def _counts_itself(scan: Scan, line: bytes) -> None:
    """Takes an entry to be the next one, whatever number it has."""
    ENTRY(scan, encode({**json.loads(line), "seq": scan.size}))


def _believes_the_vector(scan: Scan, message: str, shape: str, _seq: int) -> str:
    """The length of a message from the entry's own numbers alone."""
    return str(due_bytes(message[1:-1], scan.findings.log, json.loads(shape)))


ENTRY: Final = Scan._entry
FOREVER: Final = 1 << 50
CHECKS: Final[dict[str, tuple[tuple[object, str, object], ...]]] = {
    "AnnexKept": ((verify_module, "_check_annexes", _off),),
    "AnnexLost": ((verify_module, "_check_annexes", _off),),
    "AnnexMismatch": ((Annex, "open", _off),),
    "Backdated": ((verify_module, "SKEW_MS", FOREVER),),
    "ClockRollback": ((Scan, "_time", _off),),
    "ClockSkew": ((compare, "SKEW_MS", FOREVER),),
    "CosignatureMissing": ((verify_module, "_check_cosignatures", _off),),
    "DigestMismatch": ((compare, "_compare", _off),),
    "DpTermsChanged": ((epsilon, "_check_terms", _off),),
    "EgressUnacknowledged": ((compare, "_match_site", lambda *_: 0), (compare, "_match_left", _off)),
    "EpochUnsealed": ((verify_module, "check_epochs", _off),),
    "EpsilonMismatch": ((epsilon, "_close", lambda *_: True), (epsilon, "_check_commits", _off)),
    "ForbiddenMessage": ((Scan, "_check_class", _off),),
    "Fork": ((TreeCheck, "_contradicted", _off),),
    "HeadContradicted": ((compare, "join_seen", _off),),
    "HeartbeatGap": ((Scan, "_time", _off),),
    "IngressUnexplained": ((compare, "_settled", lambda *_: set()), (compare, "_match_left", _off)),
    "LayoutMismatch": ((Scan, "_recompute", _believes_the_vector),),
    "LogMissing": ((compare, "_check_all_here", _off),),
    "MalformedEntry": ((Scan, "_entry", _reads_anything),),
    "ManifestConflict": ((Agreements, "conflicts", lambda _: ()),),
    "MaskExposure": ((facts, "join_unmasking", _off), (RoundBook, "_one_kind", _off)),
    "ModelInconsistency": ((compare, "_join_models", _off),),
    "MonotonicRollback": ((Scan, "_time", _off),),
    "NotWitnessed": ((Roster, "missing_for_quorum", lambda *_: ()),),
    "ReceiptInvalid": (
        (compare, "_fault", _off),
        (EgressLedger, "receipt", lambda _, match, seq: match["body_msg_id"]),
    ),
    "RootMismatch": ((TreeCheck, "_compare_own", _off),),
    "RunEpsilonExceeded": ((epsilon, "check_run_epsilon", _off),),
    "SenderUnlisted": ((Scan, "_check_sender", _off), (Scan, "_partial", _off)),
    "SequenceGap": ((Scan, "_entry", _counts_itself),),
    "SettingsUnannounced": ((Scan, "_start", lambda scan, *_: setattr(scan, "running", True)),),
    "SplitCohort": ((compare, "_join_cohorts", _off),),
    "StepMissing": ((RoundBook, "_judge_opening", _off),),
    "SurplusBytes": ((Scan, "_check_length", _off),),
    "TruncatedTail": ((verify_module, "_check_held", _off),),
    "UnaccountedRound": ((epsilon, "join_payments", _off), (epsilon, "_check_paid", _off)),
    "UnknownSigner": ((Note, "unknown", lambda *_: ()),),
    "UnloggedTraffic": ((compare, "join_counts", _off),),
    "UnmaskedVector": ((Scan, "_check_mask", _off),),
    "Unsealed": ((verify_module, "_check_coverage", _off),),
    "WrongEpochKey": ((verify_module, "check_epochs", _off),),
}


@contextmanager
def unchecked(*codes: str) -> Iterator[None]:
    """The checks that give these codes are off. The finding could be given; nobody looks for it."""
    with pytest.MonkeyPatch.context() as patch:
        for code in codes:
            for owner, name, instead in CHECKS[code]:
                patch.setattr(owner, name, instead)
        yield


class Lonely:
    """One log without peers: nobody else's word, so what a check catches it catches by itself."""

    def __init__(self, folder: Path, name: str = "graz") -> None:
        self.rng = CountedRandomness(b"lonely")
        self.clock = ManualClock(wall=NOW)
        self.member: Member = new_member(name, SITE, folder, self.rng)
        self.roster = Roster(parties=(self.member.party,))
        self.log = create_log(
            self.member.folder,
            self.member.keys,
            party=self.member.party,
            roster=self.roster,
            manifest=b"{}\n",
            policy="0" * 64,
            root=self.member.root,
            clock=self.clock,
            rng=self.rng,
            disk=QuickDisk(),
        )

    @property
    def keys(self) -> Keys:
        return Keys.bare(self.roster)

    @property
    def folder(self) -> Path:
        return self.member.folder

    def reopen(self) -> AuditLog:
        self.log = continue_log(
            self.member.folder,
            self.member.keys,
            party=self.member.party,
            roster=self.roster,
            clock=self.clock,
            rng=self.rng,
            disk=QuickDisk(),
        )
        return self.log

    def signer(self, epoch: int) -> NoteSigner:
        """The live key, as an intruder would find it on disk."""
        return EpochKeys(self.member.keys, self.member.party.origin, self.rng).load(epoch)

    def watcher(self, folder: Path) -> Witness:
        """An outside party that remembers this log's heads."""
        other = new_member("outside", SITE, folder, self.rng)
        roster = Roster(parties=(self.member.party, other.party))
        return Witness(other.folder, lambda: roster, other.cosigner, self.clock, QuickDisk())

    def show(self, watcher: Witness) -> HeldCheckpoint:
        """Let somebody see the newest head."""
        watcher.consider(self.log.submission(watcher.held_size(self.log.origin)))
        held = watcher.held(self.log.origin)
        assert held is not None
        return held

    def codes(self, held: Sequence[HeldCheckpoint] = ()) -> set[str]:
        return weighty(verify(self.folder, self.keys, held).findings)


class Tampering:
    """Rewrites a log folder in place."""

    def __init__(self, path: Path) -> None:
        self.folder = LogFolder(path)

    @property
    def lines(self) -> list[bytes]:
        files = LogReader(self.folder.path).segments()
        return [line for file in files for line in file.read_bytes().split(b"\n")[:-1]]

    def write(self, lines: Sequence[bytes], *, leaves: bool = True) -> None:
        """Put other entries in place, and their hashes too, as somebody would who knows about leaves.bin."""
        self.folder.segment(0).write_bytes(b"".join(line + b"\n" for line in lines))
        if leaves:
            self.folder.leaves.write_bytes(b"".join(map(leaf_hash, lines)))

    def edit(self, seq: int, change: Callable[[dict[str, Any]], object]) -> None:
        """Change one entry and encode it properly again."""
        lines = self.lines
        entry = json.loads(lines[seq])
        change(entry)
        lines[seq] = encode(entry)
        self.write(lines)

    def renumber(self, lines: Sequence[bytes]) -> list[bytes]:
        """Give lines the sequence numbers of where they stand."""
        return [encode({**json.loads(line), "seq": number}) for number, line in enumerate(lines)]

    def resign(self, signer: NoteSigner, sizes: Iterable[int] | None = None, *, least: int = 0) -> None:
        """Drop heads from `least` on and sign new ones at the same sizes, or at those given."""
        tree = Tree(map(leaf_hash, self.lines))
        old = [size for size in self.folder.checkpoint_sizes() if size >= least]
        for size in old:
            self.folder.checkpoint_path(size).unlink()
        for size in old if sizes is None else sizes:
            if size <= tree.size:
                text = Checkpoint(origin=signer.key.name, size=size, root=tree.root(size)).text
                self.folder.checkpoint_path(size).write_bytes(Note(text=text, signatures=(signer.sign(text),)).encode())

    def cut(self, size: int) -> None:
        """Go back to an earlier head: entries, hashes and later heads are gone."""
        self.write(self.lines[:size])
        for head in self.folder.checkpoint_sizes():
            if head > size:
                self.folder.checkpoint_path(head).unlink()

    def strip_cosignatures(self) -> None:
        """Leave only the log's own signatures."""
        self.folder.cosigned.unlink(missing_ok=True)
        for size in self.folder.checkpoint_sizes():
            note = self.folder.checkpoint_note(size)
            own = tuple(line for line in note.signatures if line.name == note.text.split("\n", 1)[0])
            self.folder.checkpoint_path(size).write_bytes(Note(text=note.text, signatures=own).encode())


def encode(entry: dict[str, Any]) -> bytes:
    """Canonical JSON by the standard library alone."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def copied(source: Path, target: Path) -> Path:
    """A copy to ruin."""
    shutil.copytree(source, target)
    return target
