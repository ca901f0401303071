"""The folder of a log: its files, how an entry is made durable, and the private annex.

FORMAT                    the version of this layout
manifest.json             the signed manifest in force: who is who
manifests/<sha256>.json   every signed manifest that was ever in force here, under the digest of its file
segments/00000000.jsonl   the entries, 65,536 to a file; the only thing synced for every entry
leaves.bin                32 bytes for each entry; derived, rebuilt at will, never aged out
checkpoints/<size>.note   signed checkpoints, with the cosignatures they collected
cosigned.note             the newest checkpoint with a full quorum
epochs/<n>.note           endorsements of the epoch keys
witness/                  the newest checkpoints seen of other logs
annex/<seq>.json          what a leaf only commits to
evidence/                 torn writes and proofs of forks
archive                   the folder that older segments were moved to (`log-archive`), for the party itself
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from lazaret import files
from lazaret.errors import OTHER_VERSION, AuditLogError, CodecError, VerificationFailed
from lazaret.files import naming
from security.crypto import encoding
from security.crypto.merkle import HASH_SIZE
from security.log.machine import SEGMENT, LogEntry
from security.log.note import Note

FORMAT: Final = b"lazaret audit log 2\n"
SALT_SIZE: Final = 32
_MOST_NAME: Final = 400

# Folders with archived segments. None: the party's own process, which follows the file `archive` of its own log. An
# auditor is told by a person, and never by the copy of a log.
ARCHIVES: Final[ContextVar[tuple[Path, ...] | None]] = ContextVar("archives", default=None)
ARCHIVE_NAME: Final = "LOG"  # in an archive: whose segments they are

# The one spelling of a size: other digits and leading zeros would name files that are then not found.
is_size = re.compile(r"0|[1-9][0-9]{0,15}").fullmatch


class LogFolder:
    """Paths and reads; enough for an auditor with a copy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segments = path / "segments"
        self.leaves = path / "leaves.bin"
        self.checkpoints = path / "checkpoints"
        self.cosigned = path / "cosigned.note"
        self.epochs = path / "epochs"
        self.witness = path / "witness"
        self.annex = path / "annex"
        self.evidence = path / "evidence"
        self.format = path / "FORMAT"
        self.manifest = path / "manifest.json"
        self.manifests = path / "manifests"
        self.archive = path / "archive"

    def segment(self, number: int) -> Path:
        """The file of one segment, here or in an archive."""
        here = self.segments / f"{number:08d}.jsonl"
        if here.exists():
            return here
        return next((path for folder in self.archives() if (path := folder / here.name).exists()), here)

    def archives(self) -> list[Path]:
        """The folders with older segments of this log, as far as they are known and there."""
        known = ARCHIVES.get()
        if known is None:
            known = (Path(self.archive.read_text(encoding="utf-8").strip()),) if self.archive.is_file() else ()
        return [folder for folder in known if self._is_of_this_log(folder / ARCHIVE_NAME)]

    def _is_of_this_log(self, name: Path) -> bool:
        """By name only: what is in the segments is checked against the signed tree, as if they were here."""
        sizes = self.checkpoint_sizes()
        if not sizes or not name.is_file() or name.is_symlink():
            return False
        with name.open("rb") as file:
            named = file.read(_MOST_NAME)
        newest = self.checkpoint_path(sizes[-1])
        if not stat.S_ISREG(newest.lstat().st_mode):  # asked before anything in the folder was looked at
            return False
        with newest.open("rb") as file:
            return file.read(_MOST_NAME).split(b"\n", 1)[0] == named.strip()

    def checkpoint_sizes(self) -> list[int]:
        """Sizes of the signed checkpoints, smallest first."""
        return sorted(int(path.stem) for path in self.checkpoints.glob("*.note") if is_size(path.stem))

    def checkpoint_path(self, size: int) -> Path:
        """The file of one checkpoint."""
        return self.checkpoints / f"{size}.note"

    def checkpoint_note(self, size: int) -> Note:
        """One signed checkpoint, not yet verified."""
        return Note.parse(self.checkpoint_path(size).read_bytes())

    def endorsements(self) -> list[Note]:
        """The endorsements of epochs 0, 1, ..., as far as they go without a gap."""
        notes: list[Note] = []
        while (path := self.epochs / f"{len(notes)}.note").exists():
            notes.append(Note.parse(path.read_bytes()))
        return notes

    def manifest_path(self, digest: str) -> Path:
        """Where one version of the manifest is kept, for as long as the log."""
        return self.manifests / f"{digest}.json"

    def annex_path(self, seq: int) -> Path:
        """The file of one annex."""
        return self.annex / f"{seq}.json"

    def witness_path(self, origin: str) -> Path:
        """Where the newest checkpoint of another log is kept; the name cannot climb out of the folder."""
        return self.witness / f"{quote(origin, safe='')}.json"

    def check_format(self) -> None:
        """Refuse a folder of another version, or none at all."""
        try:
            found = self.format.read_bytes()
        except FileNotFoundError:
            raise AuditLogError(
                "no privacy log here", where=str(self.path), hint="give the folder with FORMAT"
            ) from None
        if found != FORMAT:
            raise AuditLogError("a log of another format", where=str(self.format), hint=OTHER_VERSION)


def read_leaves(path: Path) -> list[bytes]:
    """The leaf hashes of leaves.bin."""
    data = path.read_bytes()
    if len(data) % HASH_SIZE:
        raise CodecError("leaves.bin is not a whole number of hashes", where=str(path))
    return [data[at : at + HASH_SIZE] for at in range(0, len(data), HASH_SIZE)]


# Durable writes


class Disk:
    """The three things a log does to a disk. Tests put one here that fails or stops in between."""

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all of it."""
        written = os.write(descriptor, data)
        while written < len(data):
            written += os.write(descriptor, data[written:])

    def sync(self, descriptor: int) -> None:
        """Return when it is on stable storage."""
        os.fsync(descriptor)

    def publish(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        """Put a whole file in place at once, durably."""
        files.write_atomically(path, data, mode=mode)


class DurableFolder(LogFolder):
    """A log folder with its one writer, who holds its lock. `append` is where an entry is made durable."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path)
        self.disk = disk
        self._segment: tuple[int, int] | None = None  # number, file descriptor
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise AuditLogError(
                "another process writes this log",
                where=str(path),
                hint="a log has one writer: stop the agent first; it goes on where it was",
            ) from error

    def tidy(self) -> None:
        """Remove what writes left behind that a kill cut short. None of it was ever part of the log."""
        for leftover in self.path.rglob(".*.new"):
            leftover.unlink()

    def initialise(self, manifest: bytes) -> None:
        """Lay out an empty folder, over what a crash may have left of an earlier try. `declare` comes last."""
        rooms = (self.segments, self.checkpoints, self.epochs, self.witness, self.annex, self.evidence, self.manifests)
        for folder in rooms:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700 if folder == self.annex else 0o755)
        self.leaves.unlink(missing_ok=True)
        self.keep_manifest(manifest)
        self.disk.publish(self.manifest, manifest)

    def keep_manifest(self, data: bytes) -> None:
        """Keep a version of the manifest for as long as the log: entries are judged under the one in force."""
        self.disk.publish(self.manifest_path(sha256(data).hexdigest()), data)

    def declare(self) -> None:
        """Write FORMAT: from here on there is a log."""
        self.disk.publish(self.format, FORMAT)

    def append(self, entries: Sequence[LogEntry]) -> None:
        """Write entries and return when they are durable. One sync for all of them that share a segment."""
        rest = entries
        while rest:
            number, place = divmod(rest[0].seq, SEGMENT)
            here, rest = rest[: SEGMENT - place], rest[SEGMENT - place :]
            descriptor = self._open_segment(number)
            self.disk.write(descriptor, b"".join([entry.line + b"\n" for entry in here]))
            self.disk.sync(descriptor)

    def _open_segment(self, number: int) -> int:
        if self._segment is not None and self._segment[0] == number:
            return self._segment[1]
        self.close_segment()
        path = self.segment(number)
        fresh = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._segment = (number, descriptor)
        if fresh:
            self._sync_folder(self.segments)
        return descriptor

    def _sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.disk.sync(descriptor)
        finally:
            os.close(descriptor)

    def write_leaves(self, leaves: Sequence[bytes], *, anew: bool = False) -> None:
        """Add to leaves.bin, or write it anew; without a sync: it is derived."""
        with naming(self.leaves), open(self.leaves, "wb" if anew else "ab") as file:
            file.write(b"".join(leaves))

    def erase_annexes(self, first: int, last: int) -> None:
        """Delete the annexes of a range of entries, as far as there are any."""
        for path in self.annex.glob("*.json"):
            if is_size(path.stem) and first <= int(path.stem) <= last:
                path.unlink()

    def truncate_segment(self, number: int, length: int) -> None:
        """Cut a torn write off the last segment; the caller has put its bytes into evidence."""
        self.close_segment()
        with open(self.segment(number), "r+b") as file:
            file.truncate(length)
            self.disk.sync(file.fileno())

    def close_segment(self) -> None:
        """Close the open segment file, if any."""
        if self._segment is not None:
            os.close(self._segment[1])
            self._segment = None

    def close(self) -> None:
        """Give the lock back."""
        self.close_segment()
        os.close(self._lock)


# The private annex: details behind a salted commitment, for the site's own auditor, erasable at any time


@dataclass(frozen=True, slots=True, kw_only=True)
class Annex:
    """A salt and the details. Without the salt, a commitment to a small count could be guessed."""

    salt: bytes
    details: Mapping[str, Any]

    def commitment(self) -> str:
        """SHA-256(salt || canonical details), in hexadecimal."""
        return sha256(self.salt + encoding.dumps(self.details)).hexdigest()

    def encode(self) -> bytes:
        """The bytes of the annex file."""
        return encoding.dumps({"details": self.details, "salt": self.salt.hex()}) + b"\n"

    @classmethod
    def open(cls, data: bytes, commitment: str) -> Annex:
        """Read an annex file and check it against its leaf.

        :raises VerificationFailed: if it is not what was committed to.
        """
        if not data.endswith(b"\n"):
            raise CodecError("not an annex")
        value = encoding.loads(data[:-1])
        if not isinstance(value, dict) or value.keys() != {"details", "salt"} or not isinstance(value["details"], dict):
            raise CodecError("not an annex")
        try:
            annex = cls(salt=bytes.fromhex(value["salt"]), details=value["details"])
        except (TypeError, ValueError) as error:
            raise CodecError("not an annex") from error
        if annex.encode() != data:
            raise CodecError("not an annex")  # one spelling: hexadecimal digits could be small or large
        if len(annex.salt) != SALT_SIZE or not hmac.compare_digest(annex.commitment(), commitment):
            raise VerificationFailed("the annex is not what the entry commits to")
        return annex
