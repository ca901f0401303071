"""A single entry with everything needed to check it, in C2SP's tlog-proof form: to hand one fact to one person."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lazaret.errors import CodecError, ConfigError, VerificationFailed
from security.crypto import encoding
from security.crypto.merkle import MAX_PATH, Tree, leaf_hash, verify_inclusion
from security.log.keys import EpochChain
from security.log.note import Note, VerifierKey, checkpoint_of
from security.log.reader import LogReader
from security.log.roster import Roster
from security.log.schema import read_line
from security.log.store import LogFolder

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

    def check(self, root: VerifierKey) -> dict[str, Any]:
        """The entry, if it is in the log that `root` speaks for.

        :raises VerificationFailed: if that is not shown.
        """
        checkpoint = checkpoint_of(self.note)
        if checkpoint.origin != root.name:
            raise VerificationFailed("the proof is of another log", where=checkpoint.origin)
        chain = EpochChain.verify(checkpoint.origin, root, self.endorsements)
        self.note.verify(chain.keys)
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
    folder = LogFolder(path)
    folder.check_format()
    tree, wanted = Tree(), b""
    for block in LogReader(path).blocks():
        if tree.size <= seq < tree.size + len(block.lines):
            wanted = block.lines[seq - tree.size]
        tree.extend(block.leaves())
    sizes = [size for size in folder.checkpoint_sizes() if seq < size <= tree.size]
    if not wanted or not sizes:
        raise ConfigError(f"entry {seq} is not under a signed head", where=str(path), hint=f"there are {tree.size}")
    size = sizes[-1]
    if folder.cosigned.exists():
        cosigned = checkpoint_of(Note.parse(folder.cosigned.read_bytes())).size
        size = cosigned if cosigned in sizes else size
    return Proof(
        line=wanted,
        index=seq,
        path=tree.inclusion_path(seq, size),
        note=folder.checkpoint_note(size),
        endorsements=tuple(folder.endorsements()),
    )
