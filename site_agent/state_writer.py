"""The write-ahead log of a site, and the next model, which is written to disk while its sum still arrives.

A draft of the next model saves time: with ten megabytes, most of the disk's work is done while the network is busy. It
is not used before the whole sum has passed every check and the file has its final name.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Final

import numpy as np

from lazaret import files
from lazaret.errors import OTHER_VERSION, ConfigError, DataError, LocalProtocolError
from lazaret.files import naming
from security.crypto import encoding
from security.secagg import records
from security.secagg.fields import Wire
from security.secagg.layout import Layout, Vector

# The write-ahead log (docs/spec/secure-aggregation.md, section 9): append, sync, read after a crash. A record is ``u32
# length || first 8 bytes of SHA-256 || bytes``. An incomplete record at the end was never followed by a message, so it
# is removed; damage anywhere else is refused, because a site that has lost a record may answer twice.

MAGIC: Final = b"lazaret write-ahead log 2\n"
_CHECK = 8


def _framed(record: Wire) -> bytes:
    data = records.encode(record)
    return encoding.u32(len(data)) + hashlib.sha256(data).digest()[:_CHECK] + data


def _whole(data: bytes, at: int) -> int | None:
    """Where a record that starts at `at` ends, if it is complete and undamaged."""
    start = at + 4 + _CHECK
    end = start + int.from_bytes(data[at : at + 4], "big")
    if end > len(data) or hashlib.sha256(data[start:end]).digest()[:_CHECK] != data[at + 4 : start]:
        return None
    return end


def _check_magic(data: bytes, path: Path) -> None:
    """Refuse another file, and a log of another version. The beginning alone is a log that a crash cut short."""
    if not data.startswith(MAGIC) and not MAGIC.startswith(data):
        raise DataError("not a write-ahead log of this version", where=str(path), hint=OTHER_VERSION)


def read_records(path: Path) -> tuple[Wire, ...]:
    """What a log holds, for looking at it: takes no lock and changes nothing, so that its writer may be at work."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    _check_magic(data, path)
    found, at = [], len(MAGIC)
    while at < len(data) and (end := _whole(data, at)) is not None:
        found.append(records.decode(data[at + 4 + _CHECK : end]))
        at = end
    return tuple(found)


class WriteAheadLog:
    """One file, one writer. `records` are those that were there when it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()
        self.records = self._read()

    def _open(self) -> FileIO:
        # Without a buffer: what could not be written must not be written later by a flush.
        file = open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115 - see `close`
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConfigError(
                "another process uses this state folder", where=str(self._path), hint="stop it first"
            ) from error
        return file

    def _read(self) -> tuple[Wire, ...]:
        data = self._file.read()
        _check_magic(data, self._path)
        if not data.startswith(MAGIC):
            self._reset(MAGIC)
            return ()
        found, at = [], len(MAGIC)
        while at < len(data):
            end = self._end(data, at)
            if end is None:
                self._cut(at)
                break
            found.append(records.decode(data[at + 4 + _CHECK : end]))
            at = end
        return tuple(found)

    def _end(self, data: bytes, at: int) -> int | None:
        """Where the record at `at` ends; None if it is the incomplete end."""
        end = _whole(data, at)
        if end is not None:
            return end
        # A complete record further on means that this one was not the last to be written: it was damaged later.
        if any(_whole(data, later) is not None for later in range(at + 1, len(data))):
            raise DataError(
                f"write-ahead log is damaged at byte {at}",
                where=str(self._path),
                hint="do not restore an older copy: the consortium must enrol this site again",
            )
        return None

    def _cut(self, at: int) -> None:
        self._file.truncate(at)
        os.fsync(self._file.fileno())

    def _reset(self, content: bytes) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._write(content)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())

    def append(self, record: Wire) -> None:
        """Return when the record is on disk; after a failure (a full disk) the log is as it was before."""
        start = self._file.seek(0, os.SEEK_END)
        try:
            self._write(_framed(record))
        except OSError:
            self._file.truncate(start)
            raise

    def compact(self, kept: Iterable[Wire]) -> None:
        """Replace the whole log at once; a crash leaves either the old one or the new one."""
        fresh = self._path.with_suffix(".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(MAGIC + b"".join(_framed(record) for record in kept))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._file.close()
        self._file = self._open()

    def close(self) -> None:
        self._file.close()


SYNC_BYTES: Final = 2 * 1024 * 1024


class Draft:
    """One file of safetensors, whose values come in the layout's order."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path = path
        self._left = layout.state_words
        self._done = 0
        self._unsynced = 0
        self._syncing: Future[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._file = files.open_private(path)
        with naming(path):
            self._file.write(_header(layout))

    def extend(self, start: int, values: Vector) -> None:
        """Write the next values; now and then a second thread has the disk take them, one call at a time."""
        if start != self._done or len(values) > self._left:
            raise LocalProtocolError("these are not the next values of a partial model", where=str(self._path))
        self._done += len(values)
        self._left -= len(values)
        self._unsynced += values.nbytes
        with naming(self._path):
            self._file.write(np.ascontiguousarray(values).view(np.uint8).data)
            if self._unsynced >= SYNC_BYTES and (self._syncing is None or self._syncing.done()):
                self._last_sync()
                self._file.flush()
                self._unsynced = 0
                self._syncing = self._worker.submit(os.fdatasync, self._file.fileno())

    def _last_sync(self) -> None:
        """A failed write is reported once: who does not ask would take lost pages for stored ones."""
        if self._syncing is not None:
            self._syncing.result()

    def keep(self, path: Path) -> None:
        """Make it durable under its name."""
        if self._left:
            raise LocalProtocolError("the partial model is not complete", where=str(self._path))
        with naming(self._path):
            self._last_sync()
        self._worker.shutdown()
        files.settle(self._file, self._path, path)

    def drop(self) -> None:
        """Another one begins; the file is written over."""
        self._worker.shutdown()
        self._file.close()


def _header(layout: Layout) -> bytes:
    """Of a safetensors file whose data are the state as it lies in memory."""
    tensors = {
        block.name: {"dtype": "F32", "shape": list(block.shape), "data_offsets": [4 * place.start, 4 * place.stop]}
        for block, place in layout.placed()
    }
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
