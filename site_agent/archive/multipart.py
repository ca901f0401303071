"""The one part of a `multipart/related` answer, as it arrives (RFC 2046 section 5.1). Without input and output.

The answer is another machine's: its preamble and headers are bounded, a second part is refused, and a part counts only
when its closing delimiter has been seen, so that a connection that was cut cannot pass for a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from typing import Final

from lazaret.errors import ArchiveObjectError

_MOST_HEADER: Final = 16_384
_LONGEST_BOUNDARY: Final = 200
_BEFORE, _HEADERS, _CONTENT, _AFTER, _CLOSED = range(5)


def boundary_of(content_type: str) -> bytes:
    """:raises ArchiveObjectError: where the answer is of another kind."""
    header = Message()
    header["content-type"] = content_type
    try:
        found = header.get_param("boundary")
    except ValueError:  # numbered parts whose numbers are none
        found = None
    if header.get_content_type() != "multipart/related" or not isinstance(found, str):
        hint = "does its address end in the DICOMweb root?"
        raise ArchiveObjectError("the archive's answer holds no image", hint=hint)
    try:
        boundary = found.encode("ascii")
    except UnicodeEncodeError:
        boundary = b""
    if not 0 < len(boundary) <= _LONGEST_BOUNDARY:
        raise ArchiveObjectError("the archive's answer cannot be taken apart")
    return boundary


class PartReader:
    """Takes the bytes of an answer, and gives those of its part."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._state = _BEFORE
        # The first delimiter may stand at the very beginning.
        self._kept = b"\r\n"

    def feed(self, data: bytes) -> Iterator[bytes]:
        """:raises ArchiveObjectError: if the answer is not one part."""
        self._kept += data
        if self._state == _BEFORE and self._cut(self._delimiter) is not None:
            self._state = _HEADERS
        if self._state == _HEADERS and self._cut(b"\r\n\r\n") is not None:
            self._state = _CONTENT
        if self._state in (_BEFORE, _HEADERS):
            if len(self._kept) > _MOST_HEADER:
                raise ArchiveObjectError("the archive's answer cannot be taken apart")
            return
        if self._state == _CONTENT:
            yield from self._content()
        if self._state == _AFTER and len(self._kept) >= 2:
            if self._kept[:2] != b"--":
                raise ArchiveObjectError("the archive sent more than the one image it was asked for")
            self._state = _CLOSED
        if self._state == _CLOSED:
            self._kept = b""

    @property
    def complete(self) -> bool:
        return self._state == _CLOSED

    def _content(self) -> Iterator[bytes]:
        content = self._cut(self._delimiter)
        if content is not None:
            self._state = _AFTER
        else:
            # The end of what came may be the beginning of the delimiter.
            safe = max(0, len(self._kept) - len(self._delimiter) + 1)
            content, self._kept = self._kept[:safe], self._kept[safe:]
        if content:
            yield content

    def _cut(self, mark: bytes) -> bytes | None:
        """What stands before the mark; it and the mark are gone then."""
        before, found, rest = self._kept.partition(mark)
        if not found:
            return None
        self._kept = rest
        return before
