"""Files of a folder that somebody else made: regular ones only, inside the folder, and never more than they may have.

A copy of a log may come from a party that wants the audit to hang, to run out of memory or to read another file of the
auditor's. So nothing is opened before it was looked at, a FIFO or a device is never opened, a link is not followed, and
no more is read than the cap of its kind. What is refused is a finding, once for each folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from lazaret.errors import CannotDecide, CodecError
from security.audit.findings import Finding
from security.log.store import LogFolder

NOTE_BYTES: Final = 1 << 20
SEGMENT_BYTES: Final = 1 << 29  # 65,536 entries of 8 kB each; real ones have half a kilobyte
LEAVES_BYTES: Final = 1 << 36
SPARSE_FROM: Final = 1 << 26
SPARSE_SHARE: Final = 100  # a file of which less than a hundredth is on disk was not written by a log
MOST_FILES: Final = 10_000_000


def read_capped(path: Path, most: int) -> bytes:
    """The whole of a regular file.

    :raises CodecError: if it is something else, or larger than it may be.
    :raises FileNotFoundError: if there is none.
    """
    # O_NONBLOCK: a FIFO without a writer would otherwise hold us here for ever.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CodecError("not a regular file, or not readable", where=path.name[:80]) from error
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise CodecError("not a regular file", where=path.name[:80])
        data = file.read(min(most, about.st_size) + 1)
    if len(data) > most:
        raise CodecError(f"larger than the {most} bytes that it may have", where=path.name[:80])
    return data


def is_leftover(name: str) -> bool:
    """A file that was not put in its place yet when its writer was killed, or when the folder was copied."""
    return name.startswith(".") and name.endswith(".new")


def list_files(folder: Path, problems: list[Finding], *, limit: int) -> list[Path]:
    """The files of a folder, sorted; none where it does not exist."""
    if not folder.is_dir() or folder.is_symlink():
        return []
    with os.scandir(folder) as found:
        names = [entry.name for entry in islice(found, limit + 1)]
    if len(names) > limit:
        problems.append(Finding(code="HostileFolder", log="", detail=f"{folder.name}/ has more than {limit} files"))
    return [folder / name for name in sorted(names[:limit]) if not is_leftover(name)]


def hostile(folder: LogFolder) -> Iterator[str]:
    """What of a log folder cannot be what a party writes. Nothing in it is opened."""
    caps = {
        folder.segments: SEGMENT_BYTES,
        folder.checkpoints: NOTE_BYTES,
        folder.epochs: NOTE_BYTES,
        folder.witness: NOTE_BYTES,
        folder.evidence: SEGMENT_BYTES,
        folder.annex: NOTE_BYTES,
        folder.manifests: 4 * NOTE_BYTES + 1,
        **dict.fromkeys(folder.archives(), SEGMENT_BYTES),
    }
    tops = {
        folder.format: NOTE_BYTES,
        folder.manifest: 4 * NOTE_BYTES + 1,
        folder.cosigned: NOTE_BYTES,
        folder.leaves: LEAVES_BYTES,
    }
    for path, most in tops.items():
        yield from _fault(path, path.name, most)
    for path, most in caps.items():
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            yield f"{path.name} is no folder"
            continue
        if not path.is_dir():
            continue
        with os.scandir(path) as found:
            for entry in islice(found, MOST_FILES):
                # A torn write is as large as a segment may be, and is never read; evidence of a fork is two notes.
                cap = NOTE_BYTES if path == folder.evidence and not entry.name.startswith("torn-") else most
                yield from _fault(Path(entry.path), f"{path.name}/{entry.name[:60]}", cap)


def refuse_hostile(path: Path) -> None:
    """For commands that read entries without verifying them first.

    :raises CannotDecide: if the folder holds what no party writes.
    """
    fault = next(hostile(LogFolder(path)), None)
    if fault is not None:
        raise CannotDecide(fault, where=str(path), hint="`privacy-audit verify` lists what is wrong with this folder")


def _fault(path: Path, name: str, most: int) -> Iterator[str]:
    try:
        about = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        yield f"{name}: {(error.strerror or 'cannot be looked at').lower()}"
        return
    if not stat.S_ISREG(about.st_mode):
        yield f"{name} is a link, a folder, a FIFO or a device"
    elif about.st_size > most:
        yield f"{name} has {about.st_size} bytes, more than {most}"
    elif about.st_size > SPARSE_FROM and about.st_blocks * 512 < about.st_size // SPARSE_SHARE:
        yield f"{name} has {about.st_size} bytes of which almost none are on disk"
