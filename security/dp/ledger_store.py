"""Where a ledger is kept: a file with an anchor in another folder, or memory for simulations.

docs/spec/differential-privacy.md, section 5. The anchor holds number and hash of the newest line. It is in another
folder, so that it is noticed if one of the two is lost or restored from an old copy. The order of writing is: line,
fsync, anchor, fsync. A crash in between leaves the ledger one line ahead of the anchor; that line is charged. The
ledger can never be behind the anchor, unless somebody changed it.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Final, Protocol, Self

from lazaret import files
from lazaret.errors import LedgerError
from security.dp.ledger import LedgerAnchor, LedgerState, read

_RESTORE: Final = (
    "if it was moved, let [privacy] ledger and anchor say where it is; otherwise restore it from the newest copy: "
    "without it this population's budget counts as spent"
)


class LedgerStore(Protocol):
    """Where the lines are kept."""

    def create(self, line: bytes, head: LedgerAnchor) -> None:
        """Begin a ledger. Raises LedgerError if there is or ever was one."""
        ...

    def load(self) -> tuple[list[bytes], LedgerAnchor]:
        """All lines, and the anchor, which is kept apart from them. Raises LedgerError if either is missing."""
        ...

    def append(self, line: bytes, head: LedgerAnchor) -> None:
        """Durable when it returns."""
        ...


class MemoryStore:
    """For simulations, whose patients need no protection from a restart."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.head: LedgerAnchor | None = None

    def create(self, line: bytes, head: LedgerAnchor) -> None:
        if self.lines:
            raise LedgerError("there is already a ledger")
        self.append(line, head)

    def load(self) -> tuple[list[bytes], LedgerAnchor]:
        if self.head is None:
            raise LedgerError("there is no ledger")
        return list(self.lines), self.head

    def append(self, line: bytes, head: LedgerAnchor) -> None:
        self.lines.append(line)
        self.head = head


class FileStore:
    """JSON lines with an exclusive lock for as long as the store is open."""

    def __init__(self, ledger: Path, anchor: Path) -> None:
        if ledger.resolve().parent == anchor.resolve().parent:
            raise LedgerError(
                "ledger and anchor are in the same folder",
                where=str(ledger),
                hint="put the anchor on another disk: otherwise an old copy of the folder is not noticed",
            )
        self._ledger = ledger
        self._anchor = anchor
        self._file: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def create(self, line: bytes, head: LedgerAnchor) -> None:
        anchor = self._read_anchor()
        # An anchor at line one means that there was never a reservation: the creation was interrupted and may be
        # repeated.
        if self._ledger.exists() or (anchor is not None and anchor.seq > 0):
            raise LedgerError(
                "this population already has a ledger",
                where=str(self._ledger),
                hint="use it: a budget never restarts; before its first booking `site-agent ledger --undo` removes it",
            )
        self._write_anchor(head)
        self._lock(os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        self._write_line(line)
        _sync_directory(self._ledger.parent)

    def lock(self) -> None:
        """Keep everybody else from booking, whatever the file holds."""
        self._lock(os.O_RDWR | os.O_APPEND)

    def load(self) -> tuple[list[bytes], LedgerAnchor]:
        # The anchor first: a ledger that another process extends meanwhile is then ahead of it, and never behind.
        anchor = self._whole()
        self._lock(os.O_RDWR | os.O_APPEND)
        data = self._ledger.read_bytes()
        whole, newline, torn = data.rpartition(b"\n")
        lines = whole.split(b"\n") if newline else []
        if torn and len(lines) > anchor.seq:
            # A crash interrupted the last write: its reservation was never returned, so nothing was trained on it.
            os.ftruncate(self._descriptor, len(data) - len(torn))
            os.fsync(self._descriptor)
        return lines, anchor

    def append(self, line: bytes, head: LedgerAnchor) -> None:
        self._write_line(line)
        self._write_anchor(head)

    def undo(self) -> None:
        """Remove a ledger that was begun and never booked in, as one begun under an outdated manifest.

        :raises LedgerError: where something was booked; then it stays for good. Nothing is removed then.
        """
        lines, anchor = self.load()
        if len(lines) != 1 or anchor.seq != 0:
            raise LedgerError(
                "this ledger has been used", where=str(self._ledger), hint="what was booked stays booked for good"
            )
        # The ledger first: an anchor at line one, alone, is a creation that was interrupted.
        self._ledger.unlink()
        _sync_directory(self._ledger.parent)
        self._anchor.unlink()
        self.close()

    # What a restore of a site needs (site_agent/backup.py). Each may be repeated after a kill.

    def newest(self) -> LedgerAnchor | None:
        """How far the ledger is, or was: of one that is lost or closed the anchor is left. None if there never was one.

        :raises LedgerError: if the lines are behind the anchor, or have none.
        """
        if self._ledger.exists():
            state = self.peek()
            return None if state is None else state.head
        return self._read_anchor()

    def close_for_good(self, head: LedgerAnchor) -> None:
        """Leave an anchor without a ledger: none can be begun here, and the budget counts as spent."""
        here = self._read_anchor()
        if here is None or here.seq < head.seq:
            self._write_anchor(head)

    def take_over(self, lines: bytes, head: LedgerAnchor) -> None:
        """A ledger that has moved here. The anchor first: what a crash leaves counts as spent.

        :raises LedgerError: if a ledger is here, or was here and this is not what became of it.
        """
        here, state = self._read_anchor(), read(lines.split(b"\n")[:-1])
        kept = not self._ledger.exists() or self._ledger.read_bytes() == lines
        if not kept or not state.contains(head) or (here is not None and not state.contains(here)):
            raise LedgerError(
                "another privacy ledger is here, or was", where=str(self._ledger), hint="two ledgers cannot be joined"
            )
        self._write_anchor(head)
        if not self._ledger.exists():
            files.write_atomically(self._ledger, lines, mode=0o600, replace=False)

    def peek(self) -> LedgerState | None:
        """The state of the ledger without its lock, to show it while an agent writes; None if there is no ledger.

        A line that is just being written is left out, so nothing may be reserved on what this returns.
        """
        if self._read_anchor() is None and not self._ledger.exists():
            return None
        # The anchor first: it is written after its line, so that lines read later contain it.
        anchor = self._whole()
        state = read(self._ledger.read_bytes().split(b"\n")[:-1])
        if not state.contains(anchor):
            raise LedgerError("the newest line of the ledger is missing", where=str(self._ledger), hint=_RESTORE)
        return state

    def _whole(self) -> LedgerAnchor:
        """The content of the anchor, if both files are there."""
        anchor = self._read_anchor()
        if anchor is None or not self._ledger.exists():
            missing = self._anchor if anchor is None else self._ledger
            raise LedgerError("a file of the privacy ledger is missing", where=str(missing), hint=_RESTORE)
        return anchor

    @property
    def _descriptor(self) -> int:
        if self._file is None:
            raise LedgerError("the ledger is not open", where=str(self._ledger))
        return self._file

    def _lock(self, flags: int) -> None:
        if self._file is None:
            self._ledger.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._ledger, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise LedgerError(
                "another process uses this ledger", where=str(self._ledger), hint="one agent per population at a time"
            ) from error

    def _write_line(self, line: bytes) -> None:
        data = line + b"\n"
        if os.write(self._descriptor, data) != len(data):
            raise LedgerError("the ledger could not be written in full", where=str(self._ledger), hint="check the disk")
        os.fsync(self._descriptor)

    def _read_anchor(self) -> LedgerAnchor | None:
        try:
            value = json.loads(self._anchor.read_bytes())
            return LedgerAnchor(seq=int(value["seq"]), digest=str(value["digest"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError("the ledger's anchor cannot be read", where=str(self._anchor)) from error

    def _write_anchor(self, head: LedgerAnchor) -> None:
        self._anchor.parent.mkdir(parents=True, exist_ok=True)
        draft = self._anchor.with_name(self._anchor.name + ".new")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(file, json.dumps({"seq": head.seq, "digest": head.digest}).encode() + b"\n")
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(draft, self._anchor)
        _sync_directory(self._anchor.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
