"""The folder of fetched files: only this user may enter it, it has a bound, and it lists what is complete.

    .fetched               the files that belong to the data set, one a line: replaced at the end of a fetch
    .lock                  held while a command works on the folder
    STUDY/INSTANCE.dcm     one image
    STUDY/.receiving       the file that is on its way; it has no other name until it is whole and on the disk

A reader takes what `.fetched` lists (npr/data/dicom.py). So a fetch that was cut leaves the old data set as it was, and
the next one finds the files that are here already.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lazaret import files
from lazaret.errors import ArchiveError, ArchiveObjectError, ConfigError
from npr.data.columns import LISTING
from site_agent.archive.dicomweb import InstanceName, is_uid

_LOCK, _RECEIVING = ".lock", ".receiving"
_PREAMBLE: Final = 128  # bytes before the four letters (DICOM PS3.10 section 7.1)


class ArchiveCache:
    """A folder that `open_cache` has opened."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most = most_bytes
        for study in self._studies():  # of a command that was killed
            (study / _RECEIVING).unlink(missing_ok=True)
        self.used = sum(path.stat().st_size for path in self._files())

    def _studies(self) -> list[Path]:
        """Folders that are ours by their name; nothing else is counted or removed."""
        return [path for path in self.folder.iterdir() if is_uid(path.name) and path.is_dir() and not path.is_symlink()]

    def _files(self) -> Iterator[Path]:
        for study in self._studies():
            yield from (path for path in study.iterdir() if path.suffix == ".dcm" and is_uid(path.stem))

    def path(self, name: InstanceName) -> Path:
        return self.folder / name.study / f"{name.instance}.dcm"

    def has(self, name: InstanceName) -> bool:
        return self.path(name).is_file()

    def receive(self, name: InstanceName, fetch: Callable[[Callable[[], Callable[[bytes], None]]], None]) -> None:
        """Keep what `fetch` writes, if it returns and if it is a DICOM file.

        :raises ArchiveError: if it is none, or if the folder would be larger than it may be.
        """
        try:
            self._receive(name, fetch)
        except OSError as error:  # the folders inside are named after studies
            error.filename, error.filename2 = str(self.folder), None
            raise

    def _receive(self, name: InstanceName, fetch: Callable[[Callable[[], Callable[[bytes], None]]], None]) -> None:
        target = self.path(name)
        beside = target.with_name(_RECEIVING)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        with files.open_private(beside) as file:
            size = 0

            def begin() -> Callable[[bytes], None]:
                nonlocal size
                size = 0
                file.seek(0)
                file.truncate()
                return write

            def write(content: bytes) -> None:
                nonlocal size
                size += len(content)
                if self.used + size > self._most:
                    raise ArchiveError(
                        f"the fetched files would be larger than {self._most} bytes",
                        hint="name fewer studies, or raise [archive] most_bytes",
                    )
                with files.naming(beside):
                    file.write(content)

            fetch(begin)
            file.flush()
            if not _is_dicom(beside):
                raise ArchiveObjectError("the archive sent something that is no DICOM file")
            files.settle(file, beside, target)
        self.used += size

    def finish(self, names: Iterable[InstanceName]) -> None:
        """From now on these are the data set, and what is not of it is gone."""
        listed = sorted({self.path(name).relative_to(self.folder).as_posix() for name in names})
        files.write_atomically(self.folder / LISTING, "".join(f"{name}\n" for name in listed).encode(), mode=0o600)
        kept = set(listed)
        for path in list(self._files()):
            if path.relative_to(self.folder).as_posix() not in kept:
                self._remove(path)

    def erase(self) -> int:
        """All files, and the folder itself if nothing else is in it. Returns how many files there were."""
        files.write_atomically(self.folder / LISTING, b"", mode=0o600)
        every = list(self._files())
        for path in every:
            self._remove(path)
        for study in self._studies():
            with contextlib.suppress(OSError):
                study.rmdir()
        for name in (LISTING, _LOCK):
            files.erase(self.folder / name)
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return len(every)

    def _remove(self, path: Path) -> None:
        size = path.stat().st_size
        files.erase(path)
        self.used -= size
        with contextlib.suppress(OSError):  # other images of the study are there
            path.parent.rmdir()


def prepare(folder: Path) -> Path:
    """Make the folder, before the process is closed off from everything beside it.

    :raises ConfigError: if others may enter it, or if it holds files that no fetch has brought.
    """
    fresh = not folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = folder.lstat().st_mode
    if not stat.S_ISDIR(mode) or stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            "the folder for fetched files is open to others, or is no folder", where=str(folder), hint="chmod 700"
        )
    if not fresh and not (folder / LISTING).exists() and any(folder.iterdir()):
        raise ConfigError(
            "the folder holds files that were not fetched", where=str(folder), hint="name an empty or a new folder"
        )
    if not (folder / LISTING).exists():
        # Empty at first: files that come are no data set until all of them are there.
        files.write_atomically(folder / LISTING, b"", mode=0o600)
    return folder


@contextmanager
def open_cache(folder: Path, most_bytes: int) -> Iterator[ArchiveCache]:
    """:raises ConfigError: if another command works on the folder."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError("another command works on this folder", where=str(folder), hint="let it end") from None
        yield ArchiveCache(folder, most_bytes)
    finally:
        os.close(descriptor)


def _is_dicom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(_PREAMBLE + 4)[_PREAMBLE:] == b"DICM"
