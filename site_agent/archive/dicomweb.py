"""The DICOMweb client: search (QIDO-RS), retrieve (WADO-RS) and store (STOW-RS), DICOM PS3.18 chapter 10.

Small on purpose. An answer is another machine's: every one has a most number of bytes and a longest time, texts of it
are shown to nobody (they may name a patient), redirections are not followed (they would carry the login elsewhere), and
what is not of the form that the standard gives is refused. Images are written as they arrive and never held in memory.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from threading import Event, Timer
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from lazaret.errors import ArchiveError, ArchiveObjectError
from site_agent.archive.access import ArchiveAccess

STUDY, SERIES, INSTANCE, MODALITY, ACCESSION = "0020000D", "0020000E", "00080018", "00080060", "00080050"
_FAILED, _STORED, _REFERENCED = "00081198", "00081199", "00081155"
_JSON: Final = "application/dicom+json"
_IMAGE: Final = 'multipart/related; type="application/dicom"; transfer-syntax=*'
_PIECE: Final = 65_536
_PAGE: Final = 200
MOST_ANSWER: Final = 64 * 1024 * 1024
MOST_ROWS: Final = 2_000_000
LONGEST: Final = 1800.0  # seconds for one answer: one that trickles would keep the command for ever
# Seconds before each new try. The first is at once: archives close connections that were idle for a moment.
WAITS: Final = (0.0, 1.0, 4.0, 15.0)
_PASSING: Final = (408, 429, 500, 502, 503, 504)
_UID: Final = re.compile(r"[0-9]+(\.[0-9]+)+")
_MOST_UID: Final = 64  # characters
_AGAIN: Final = "what is fetched or sent already is kept: run the command again"
Result = TypeVar("Result")


def is_uid(text: object) -> bool:
    """DICOM PS3.5 section 9.1. Such a text is also safe as the name of a file and in an address."""
    return isinstance(text, str) and len(text) <= _MOST_UID and _UID.fullmatch(text) is not None


class _Passing(Exception):
    """Worth another try."""


@dataclass(frozen=True, slots=True, order=True)
class InstanceName:
    """One image of the archive."""

    study: str
    series: str
    instance: str
    modality: str = ""


class ArchiveClient:
    """One connection, used again until it breaks.

    :param sleep: waits before a new try.
    :param clock: seconds, for the longest time of an answer.
    :param longest: seconds until an answer begins, and then for the answer itself.
    """

    def __init__(
        self,
        access: ArchiveAccess,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        longest: float = LONGEST,
    ) -> None:
        self._access = access
        self._longest = longest
        self._sleep = sleep
        self._clock = clock
        self._link: http.client.HTTPConnection | None = None

    # Search.

    def search(self, path: str, query: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
        """Rows of the answer, page by page, until a page has nothing new: archives may ignore limit and offset."""
        seen, offset = set[bytes](), 0
        while True:
            rows = self._page(path, {**query, "limit": str(_PAGE), "offset": str(offset)})
            named = {hashlib.sha256(json.dumps(row, sort_keys=True).encode()).digest(): row for row in rows}
            fresh = [row for name, row in named.items() if name not in seen]
            if not fresh:
                return
            seen.update(named)
            offset += len(rows)
            if offset > MOST_ROWS:
                raise ArchiveError(f"the archive found more than {MOST_ROWS} images", hint="name fewer")
            yield from fresh

    def instances(self, study: str, series: str | None = None) -> Iterator[InstanceName]:
        """All images of a study, or of one series of it."""
        within = f"/series/{series}" if series else ""
        for row in self.search(f"/studies/{study}{within}/instances", {"includefield": MODALITY}):
            found = InstanceName(
                value_of(row, STUDY) or study,
                value_of(row, SERIES) or series or "",
                value_of(row, INSTANCE),
                value_of(row, MODALITY),
            )
            if found.study != study or (series and found.series != series):
                continue  # not what was asked for
            if not is_uid(found.series) or not is_uid(found.instance):
                raise ArchiveError("the archive lists an image without a valid UID")
            yield found

    def _page(self, path: str, query: Mapping[str, str]) -> list[Mapping[str, Any]]:
        def take(answer: http.client.HTTPResponse) -> list[Mapping[str, Any]]:
            if answer.status == 204:
                return []
            rows = self._json(answer)
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ArchiveError("the archive's answer to a search is no list")
            return rows

        return self._ask("GET", f"{path}?{urlencode(query, quote_via=quote)}", {"Accept": _JSON}, take)

    # Retrieve.

    def retrieve(self, name: InstanceName, begin: Callable[[], Callable[[bytes], None]]) -> None:
        """One image. Whoever gave `begin` may keep what was written only when this returns.

        :param begin: called before every try; gives what takes the bytes.
        """

        def take(answer: http.client.HTTPResponse) -> None:
            write = begin()
            reader = PartReader(boundary_of(answer.headers.get("content-type", "")))
            for piece in self._pieces(answer):
                for content in reader.feed(piece):
                    write(content)
            if not reader.complete:
                raise _Passing

        path = f"/studies/{name.study}/series/{name.series}/instances/{name.instance}"
        self._ask("GET", path, {"Accept": _IMAGE}, take)

    # Store.

    def store(self, instance: str, content: bytes) -> None:
        """One object, by its UID. A second time does no harm: the archive knows it by that UID.

        :raises ArchiveError: unless the archive says that it has stored exactly this one.
        """
        boundary = secrets.token_hex(16)
        head = f"--{boundary}\r\nContent-Type: application/dicom\r\n\r\n".encode()
        body = head + content + f"\r\n--{boundary}--\r\n".encode()
        kind = f'multipart/related; type="application/dicom"; boundary={boundary}'

        def take(answer: http.client.HTTPResponse) -> None:
            report = self._json(answer)
            stored = _items(report, _STORED)
            if _items(report, _FAILED) or [value_of(item, _REFERENCED) for item in stored] != [instance]:
                raise ArchiveObjectError("the archive did not store the report", hint="its own log says why")

        self._ask("POST", "/studies", {"Accept": _JSON, "Content-Type": kind}, take, body)

    # Connection, tries and bounds.

    def _ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        take: Callable[[http.client.HTTPResponse], Result],
        body: bytes | None = None,
    ) -> Result:
        for wait in (None, *WAITS):
            if wait is not None:
                self.close()
                self._sleep(wait)
            try:
                with self._answer(method, path, headers, body) as answer:
                    _check_status(answer.status)
                    return take(answer)
            except ssl.SSLCertVerificationError as error:
                reason = f"the archive's certificate is not trusted: {error.verify_message}"
                raise ArchiveError(reason, hint="[archive] ca names the file of who issued it") from None
            except (_Passing, OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.filename is not None:
                    raise  # of our own disk
        raise ArchiveError("the archive does not answer, or its answers break off", hint=_AGAIN)

    @contextmanager
    def _answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Iterator[http.client.HTTPResponse]:
        link = self._link or self._new_link()
        self._link = None
        own = {"User-Agent": "lazaret", **({"Authorization": a} if (a := self._access.authorization) else {})}
        try:
            with _ended_after(self._longest, link):
                if link.sock is None:
                    self._open(link)
                link.request(method, self._access.root + path, body, {**headers, **own})
                answer = link.getresponse()
            yield answer
        except BaseException:
            link.close()
            raise
        # An answer that was not read to its end would be the beginning of the next one.
        if answer.will_close or not answer.isclosed():
            link.close()
        else:
            self._link = link

    def _new_link(self) -> http.client.HTTPConnection:
        to = self._access
        if to.tls is None:
            return http.client.HTTPConnection(to.host, to.port, timeout=to.timeout)
        return http.client.HTTPSConnection(to.host, to.port, timeout=to.timeout, context=to.tls)

    def _open(self, link: http.client.HTTPConnection) -> None:
        """As `link.connect()` does; but the socket is known to the link before the handshake, so that it can be cut."""
        to = self._access
        link.sock = socket.create_connection((to.host, to.port), to.timeout)
        link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if to.tls is not None:
            secure = to.tls.wrap_socket(link.sock, server_hostname=to.host, do_handshake_on_connect=False)
            link.sock = secure
            secure.do_handshake()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _pieces(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        end = self._clock() + self._longest
        # `read1` gives what has come: `read` would wait for a whole piece, and no time would be looked at meanwhile.
        while piece := answer.read1(_PIECE):
            yield piece
            if self._clock() > end:
                raise _too_long(self._longest)
        if answer.length:  # less than was announced
            raise _Passing

    def _json(self, answer: http.client.HTTPResponse) -> Any:
        kind = answer.headers.get_content_type()
        if kind not in (_JSON, "application/json"):
            raise ArchiveError(
                "the archive's answer is not DICOM JSON", hint="does its address end in the DICOMweb root?"
            )
        content = bytearray()
        for piece in self._pieces(answer):
            content += piece
            if len(content) > MOST_ANSWER:
                raise ArchiveError(f"the archive's answer to a search is longer than {MOST_ANSWER} bytes")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise ArchiveError("the archive's answer is not DICOM JSON") from None


@contextmanager
def _ended_after(seconds: float, link: http.client.HTTPConnection) -> Iterator[None]:
    """A timeout of the socket begins anew with every byte: an archive that sends its headers one by one would keep the
    command for ever. So the connection is cut from beside.

    :raises ArchiveError: if it was.
    """
    late = Event()

    def cut() -> None:
        late.set()
        with suppress(OSError):
            if link.sock is not None:
                link.sock.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if late.is_set():
            raise _too_long(seconds) from None
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise _too_long(seconds)


def _too_long(seconds: float) -> ArchiveError:
    return ArchiveError(f"an answer of the archive took more than {seconds:.0f} seconds", hint=_AGAIN)


def _check_status(status: int) -> None:
    """:raises ArchiveError: with the number. The text of the answer is not shown: it may name a patient."""
    if status in (200, 202, 204):
        return
    if status in _PASSING:
        raise _Passing
    if status in (401, 403):
        hint = "[archive] token_file, login_file or certificate says who we are"
        raise ArchiveError(f"the archive does not let us in (status {status})", hint=hint)
    if 300 <= status < 400:
        raise ArchiveError(f"the archive is elsewhere (status {status})", hint="write its new address")
    if status == 404:
        hint = "is its address right?"
        raise ArchiveObjectError("the archive does not have what was asked for (status 404)", hint=hint)
    raise ArchiveObjectError(f"the archive refuses (status {status})", hint="its own log says why")


def value_of(row: Any, tag: str) -> str:
    """The first value of an attribute in DICOM JSON (PS3.18 annex F) if it is text, else nothing."""
    values = row.get(tag, {}) if isinstance(row, dict) else {}
    values = values.get("Value") if isinstance(values, dict) else None
    found = values[0] if isinstance(values, list) and values else ""
    return found if isinstance(found, str) else ""


def _items(row: Any, tag: str) -> list[Any]:
    found = row.get(tag, {}) if isinstance(row, dict) else {}
    values = found.get("Value", []) if isinstance(found, dict) else []
    return values if isinstance(values, list) else []


# The one part of a `multipart/related` answer, as it arrives (RFC 2046 section 5.1). Without input and output.
#
# The answer is another machine's: its preamble and headers are bounded, a second part is refused, and a part counts
# only when its closing delimiter has been seen, so that a connection that was cut cannot pass for a file.


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
