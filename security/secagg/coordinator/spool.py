"""Where a coordinator keeps vectors while it must be able to show them again: one file for each, named by digest.

Files grow with the number of sites; the coordinator's memory does not. This is the only module of the package that
touches files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from lazaret.errors import LocalProtocolError
from lazaret.files import naming
from security.crypto.ring import FRAME_BYTES


class Gone(LocalProtocolError):
    """A vector is not in the spool (any more)."""

    def __init__(self) -> None:
        super().__init__("vector is not in the spool", where="spool")


class Spool(Protocol):
    """Vectors in frames, the last one shorter."""

    def write(self, key: bytes, index: int, frame: bytes) -> None:
        """Write a frame of a vector; frames come in order."""
        ...

    def frames(self, key: bytes) -> int:
        """How many complete frames of a vector there are."""
        ...

    def read(self, key: bytes, index: int) -> bytes:
        """One frame.

        :raises Gone: if it is not there.
        """
        ...

    def seal(self, key: bytes) -> None:
        """Make a complete vector durable."""
        ...

    def remove(self, key: bytes) -> None:
        """Delete a vector, if it is there."""
        ...

    def vectors(self) -> list[bytes]:
        """The key of every vector in the spool, complete or not."""
        ...


class MemorySpool:
    """For simulations and tests."""

    def __init__(self) -> None:
        self._vectors: dict[bytes, list[bytes]] = {}

    def write(self, key: bytes, index: int, frame: bytes) -> None:
        frames = self._vectors.setdefault(key, [])
        frames[index:] = [bytes(frame)]

    def frames(self, key: bytes) -> int:
        return len(self._vectors.get(key, ()))

    def read(self, key: bytes, index: int) -> bytes:
        frames = self._vectors.get(key, [])
        if index >= len(frames):
            raise Gone
        return frames[index]

    def seal(self, key: bytes) -> None:
        del key

    def remove(self, key: bytes) -> None:
        self._vectors.pop(key, None)

    def vectors(self) -> list[bytes]:
        return list(self._vectors)


class FileSpool:
    """One file for each vector in a folder that nobody else may read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _path(self, key: bytes) -> str:
        # As text: this is asked for every frame, and putting a Path together takes about as long as writing one.
        if len(key) != 32:
            raise LocalProtocolError("a spooled vector is named by a digest of 32 bytes", where="spool")
        return f"{self._folder}/{key.hex()}"

    def write(self, key: bytes, index: int, frame: bytes) -> None:
        start = index * FRAME_BYTES
        descriptor = os.open(self._path(key), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with naming(self._folder):
                written = 0
                while written < len(frame):
                    written += os.pwrite(descriptor, memoryview(frame)[written:], start + written)
                os.ftruncate(descriptor, start + len(frame))
        finally:
            os.close(descriptor)

    def frames(self, key: bytes) -> int:
        try:
            return os.stat(self._path(key)).st_size // FRAME_BYTES
        except FileNotFoundError:
            return 0

    def read(self, key: bytes, index: int) -> bytes:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Gone from None
        try:
            frame = os.pread(descriptor, FRAME_BYTES, index * FRAME_BYTES)
        finally:
            os.close(descriptor)
        if not frame:
            raise Gone
        return frame

    def seal(self, key: bytes) -> None:
        with naming(self._folder), open(self._path(key), "rb") as file:
            os.fsync(file.fileno())

    def remove(self, key: bytes) -> None:
        Path(self._path(key)).unlink(missing_ok=True)

    def vectors(self) -> list[bytes]:
        return [bytes.fromhex(path.name) for path in self._folder.iterdir() if len(path.name) == 64]
