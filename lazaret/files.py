"""Reading and writing files so that an error of the disk names the file and says what to do; private files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from lazaret.errors import ConfigError

DISK_HINTS: Final[Mapping[int, str]] = {
    errno.ENOSPC: "free space on that disk and start again",
    errno.EDQUOT: "this account's quota on that disk is used up: free space or have it raised, and start again",
    errno.EFBIG: "this account, or that disk, allows no file of this size: check `ulimit -f`",
    errno.EIO: "that disk, or the connection to it, fails: read the system log before you start again",
    errno.EROFS: "that file system is mounted read-only, often after a fault: read the system log",
}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A write knows only a descriptor: where the disk refuses it, the error is given the name."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_HINTS and error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, replace: bool = True) -> None:
    """Write beside, fsync, then rename or link: a crash leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(beside, path)
        else:
            os.link(beside, path)
    except FileExistsError as error:
        raise ConfigError(
            "refusing to overwrite an existing file",
            where=str(path),
            hint="choose another folder, or move it away first",
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
    sync_directory(path.parent)


def open_private(path: Path) -> BinaryIO:
    """A file that is written bit by bit and becomes what it should be by `settle`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "wb")


def settle(file: BinaryIO, beside: Path, path: Path) -> None:
    """Close a file that was written under another name, and give it its own."""
    with naming(beside), file:
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_directory(path.parent)


def read_private(path: Path) -> bytes:
    """Read a secret file, refusing one that others on this machine can read."""
    try:
        with open(path, "rb") as file:
            # Checked on the open file, so that it cannot be swapped between the check and the read.
            refuse_shared_mode(path, os.fstat(file.fileno()).st_mode)
            return file.read()
    except FileNotFoundError as error:
        raise ConfigError("key file not found", where=str(path), hint="run `init` first or correct the path") from error
    except OSError as error:
        raise ConfigError(f"key file cannot be read: {error.strerror}", where=str(path)) from error


def refuse_shared_mode(path: Path, mode: int) -> None:
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"key file is open to others (mode {stat.S_IMODE(mode):04o})",
            where=str(path),
            hint=f"chmod 600 {path}; if others may have read it, make a new key and renew the certificate",
        )


def erase(path: Path) -> None:
    """Overwrite and unlink. Best effort: journals, snapshots and flash translation may keep the old bytes."""
    try:
        with open(path, "r+b", buffering=0) as file:
            file.write(bytes(os.fstat(file.fileno()).st_size))
            os.fsync(file.fileno())
    except FileNotFoundError:
        return
    path.unlink()
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
