"""A single entry with everything needed to check it, in C2SP's tlog-proof form: to hand one fact to one person.

`check_file` checks such a file, and the other files of evidence that travel: a claim, a fork, a wrong sum, and what a
witness holds.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lazaret.errors import CodecError, ConfigError, VerificationFailed
from security.audit.agreement import manifest_from
from security.audit.safe_files import refuse_hostile
from security.audit.text import when
from security.crypto import encoding
from security.crypto.merkle import MAX_PATH, Tree, leaf_hash, verify_inclusion
from security.log.keys import EpochChain
from security.log.note import Note, VerifierKey, checkpoint_of
from security.log.reader import LogReader
from security.log.roster import Party, Roster, audit_roster
from security.log.schema import read_line
from security.log.store import LogFolder
from security.log.witness import Fork, HeldCheckpoint

if TYPE_CHECKING:
    from security.identity.manifest import Manifest
    from security.secagg.site.results import WrongSumEvidence

PROOF_BYTES: Final = 1 << 28  # evidence of a wrong sum holds a chunk of every upload
HEADER: Final = "c2sp.org/tlog-proof@v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """An entry, its place, the path to a checkpoint, and the endorsements that lead to its key."""

    line: bytes
    index: int
    path: tuple[bytes, ...]
    note: Note
    endorsements: tuple[Note, ...]

    def encode(self) -> bytes:
        """The proof file. The entry and the endorsements travel in `extra`, which nobody has to believe."""
        notes = [note.encode().decode() for note in self.endorsements]
        extra = encoding.dumps({"endorsements": notes, "entry": self.line.decode()})
        lines = [HEADER, f"extra {_b64(extra)}", f"index {self.index}", *map(_b64, self.path), "", ""]
        return "\n".join(lines).encode() + self.note.encode()

    @classmethod
    def parse(cls, data: bytes) -> Proof:
        """Read a proof file strictly."""
        try:
            top, signed = data.split(b"\n\n", 1)
            header, extra, index, *path = top.decode("ascii").split("\n")
            value = encoding.loads(base64.b64decode(extra.removeprefix("extra "), validate=True))
            if header != HEADER or not index.startswith("index ") or len(path) > MAX_PATH:
                raise CodecError("not a proof of an entry")
            return cls(
                line=value["entry"].encode(),
                index=int(index.removeprefix("index ")),
                path=tuple(base64.b64decode(step, validate=True) for step in path),
                note=Note.parse(signed),
                endorsements=tuple(Note.parse(text.encode()) for text in value["endorsements"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CodecError("not a proof of an entry") from error

    def check(self, root: VerifierKey, ml_dsa: VerifierKey | None = None) -> dict[str, Any]:
        """The entry, if it is in the log that `root` speaks for, and `ml_dsa` where the manifest lists one.

        :raises VerificationFailed: if that is not shown.
        """
        checkpoint = checkpoint_of(self.note)
        if checkpoint.origin != root.name:
            raise VerificationFailed("the proof is of another log", where=checkpoint.origin)
        # In C2SP's form `extra` is outside of what is signed: the endorsements in it count by their own signatures, and
        # the entry by its leaf and path.
        chain = EpochChain.verify(checkpoint.origin, root, self.endorsements)
        self.note.verify(chain.keys)
        if ml_dsa is not None:
            self.note.verify((ml_dsa,))
        leaf = leaf_hash(self.line)
        verify_inclusion(leaf=leaf, index=self.index, size=checkpoint.size, path=self.path, root=checkpoint.root)
        entry = read_line(self.line)
        if entry["seq"] != self.index or entry["origin"] != checkpoint.origin:
            raise VerificationFailed("the entry is not the one the proof names")
        return entry

    def witnesses(self, roster: Roster) -> dict[str, int]:
        """Who cosigned the checkpoint, and when."""
        keys = roster.cosigners_for(checkpoint_of(self.note).origin)
        known = {(key.name, key.id) for key in keys}
        if not any((line.name, line.key_id) in known for line in self.note.signatures):
            return {}
        return {key.name: time or 0 for key, time in self.note.verify(keys).items()}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def prove(path: Path, seq: int) -> Proof:
    """Prove one entry under the newest witnessed checkpoint that covers it, or else the newest one."""
    return prove_all(path, [seq])[0]


def prove_all(path: Path, numbers: Sequence[int]) -> tuple[Proof, ...]:
    """Prove some entries under one checkpoint: the newest witnessed one that covers them all, or else the newest."""
    refuse_hostile(path)
    folder = LogFolder(path)
    folder.check_format()
    tree, wanted, last = Tree(), dict[int, bytes](), max(numbers)
    for block in LogReader(path).blocks():
        wanted |= {
            seq: block.lines[seq - tree.size] for seq in numbers if tree.size <= seq < tree.size + len(block.lines)
        }
        tree.extend(block.leaves())
    sizes = [size for size in folder.checkpoint_sizes() if last < size <= tree.size]
    if len(wanted) != len(set(numbers)) or not sizes:
        raise ConfigError(f"entry {last} is not under a signed head", where=str(path), hint=f"there are {tree.size}")
    size = sizes[-1]
    if folder.cosigned.exists():
        cosigned = checkpoint_of(Note.parse(folder.cosigned.read_bytes())).size
        size = cosigned if cosigned in sizes else size
    note, endorsements = folder.checkpoint_note(size), tuple(folder.endorsements())
    return tuple(
        Proof(line=wanted[seq], index=seq, path=tree.inclusion_path(seq, size), note=note, endorsements=endorsements)
        for seq in numbers
    )


# Files of evidence, of every kind that travels.


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceVerdict:
    """What a file proves; None where it cannot be told without the keys."""

    proves: str | None
    detail: str
    lines: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


def check_file(content: bytes, manifest: Path | None, root_key: Path | None) -> EvidenceVerdict:
    """Check a file of evidence of any kind.

    :raises CodecError: if it is none.
    :raises VerificationFailed: if what it claims is false.
    """
    from security.audit.claim import HEADING, Claim
    from security.secagg.site.results import HEADING as WRONG_SUM
    from security.secagg.site.results import WrongSumEvidence

    about: object
    check: Callable[[Manifest], EvidenceVerdict]
    if content.startswith(f"{HEADING}\n".encode()):
        about, check = Claim.parse(content).subject, partial(_check_claim, content)
    elif content.startswith(b'{"endorsements":') and b'"held":' not in content:
        held = HeldCheckpoint.parse(content)
        about, check = held.checkpoint.origin, partial(_check_held, held)
    elif content.startswith(b"{"):
        fork = Fork.parse(content)
        about, check = fork.origin, partial(_check_fork, fork)
    elif content.startswith(WRONG_SUM):
        about, check = "a result", partial(_check_sum, WrongSumEvidence.parse(content))
    else:
        proof = Proof.parse(content)
        about, check = checkpoint_of(proof.note).origin, partial(_check_entry, proof)
    if manifest is None:
        return EvidenceVerdict(proves=None, detail=f"{about}: whose key signed this is not known")
    return check(manifest_from(manifest, root_key))


def _roster(manifest: Manifest, origin: str) -> tuple[Roster, Party]:
    """The parties, and the owner of a log among them."""
    roster = audit_roster(manifest)
    if origin not in roster.by_origin:
        raise VerificationFailed("the manifest knows no log of this name", where=origin)
    return roster, roster.by_origin[origin]


def _seen(witnesses: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {when(time)}" for name, time in sorted(witnesses.items())) or "nobody"


def _check_entry(proof: Proof, manifest: Manifest) -> EvidenceVerdict:
    head = checkpoint_of(proof.note)
    roster, owner = _roster(manifest, head.origin)
    entry = proof.check(owner.root, owner.ml_dsa)
    witnesses = proof.witnesses(roster)
    return EvidenceVerdict(
        proves="Entry",
        detail=f"entry {entry['seq']} of {head.origin}: {entry['type']} at {when(entry['ts'] / 1000)}",
        lines=(f"head {head.size}, cosigned by {_seen(witnesses)}",),
        facts={"origin": head.origin, "entry": entry, "witnesses": witnesses},
    )


def _check_claim(content: bytes, manifest: Manifest) -> EvidenceVerdict:
    from security.audit.claim import Claim

    roster = audit_roster(manifest)
    claim = Claim.check(content, roster)
    if strangers := claim.unknown_signers(roster):
        return EvidenceVerdict(proves=None, detail=f"{strangers[0][:80]} is on the page and not in this manifest")
    witnesses = claim.proofs[0].witnesses(roster)
    head = checkpoint_of(claim.proofs[0].note)
    return EvidenceVerdict(
        proves="Claim",
        detail=f"{claim.subject}: every sentence of the page is an entry of {head.origin}",
        lines=(f"head {head.size}, cosigned by {_seen(witnesses)}",),
        facts={"subject": str(claim.subject), "entries": [one.index for one in claim.proofs], "witnesses": witnesses},
    )


def _check_held(held: HeldCheckpoint, manifest: Manifest) -> EvidenceVerdict:
    """What a witness keeps: a checkpoint that the log signed and the witness cosigned."""
    head = held.checkpoint
    roster, owner = _roster(manifest, head.origin)
    held.verify(owner.root, head.origin)
    known = {key.name: time or 0 for key, time in held.note.verify(roster.cosigners_for(head.origin)).items()}
    return EvidenceVerdict(
        proves="Seen",
        detail=f"a head of {head.size} entries of {head.origin} was seen by {_seen(known)}",
        facts={"origin": head.origin, "size": head.size, "witnesses": known},
    )


def _check_fork(fork: Fork, manifest: Manifest) -> EvidenceVerdict:
    _, owner = _roster(manifest, fork.origin)
    fork.verify(owner.root)
    return EvidenceVerdict(proves="Fork", detail=f"{fork.origin} signed two histories")


def _check_sum(evidence: WrongSumEvidence, manifest: Manifest) -> EvidenceVerdict:
    from security.identity.membership import aggregation_policy

    # As of the day it was issued: signatures do not lapse with the certificates that were valid when they were made.
    evidence.verify(aggregation_policy(manifest, now_ms=manifest.issued_at_ms))
    where = f"chunk {evidence.chunk} of round {evidence.result.context.round}"
    return EvidenceVerdict(
        proves="WrongSum", detail=f"{manifest.coordinator.id} signed a sum that is not that of the uploads: {where}"
    )
