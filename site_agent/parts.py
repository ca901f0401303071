"""A manifest that comes in frames, put together again."""

from __future__ import annotations

from security.errors import CodecError, RemoteProtocolError
from security.relay import ManifestFrame
from security.ring import FRAME_BYTES


class ManifestParts:
    """Frames of one manifest, in order. Nothing is believed of them: the root's signature decides."""

    def __init__(self) -> None:
        self._version = 0
        self._data = b""
        self._next = 0

    def clear(self) -> None:
        """Forget what has come so far; a new stream begins anew."""
        self._version, self._data, self._next = 0, b"", 0

    def take(self, frame: ManifestFrame) -> bytes | None:
        """The whole manifest, once its last frame is there."""
        if frame.index == 0:
            self.clear()
            self._version = frame.version
        if frame.index != self._next or frame.version != self._version:
            raise RemoteProtocolError("frames of the manifest are out of order", where="manifest")
        self._data += frame.data
        self._next += 1
        missing = frame.length - len(self._data)
        if missing < 0 or (missing > 0 and len(frame.data) != FRAME_BYTES):
            raise CodecError("manifest has another length than its frames say", where="manifest")
        if missing:
            return None
        whole = self._data
        self.clear()
        return whole
