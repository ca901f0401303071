"""What a disk refuses: which file or folder it was, and what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

DISK_HINTS: Final[Mapping[int, str]] = {
    errno.ENOSPC: "make room on that disk and start again",
    errno.EDQUOT: "this account's quota on that disk is used up: make room or have it raised, and start again",
    errno.EFBIG: "this account, or that disk, allows no file of this size: look at `ulimit -f`",
    errno.EIO: "that disk, or the line to it, fails: look at the system's log before you start again",
    errno.EROFS: "that file system is mounted read-only, often after a fault: look at the system's log",
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
