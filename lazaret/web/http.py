"""Requests and answers as values, as much of HTTP (RFC 9110) as a read-only page needs: GET and HEAD.

The bytes of a request are read by h11, under uvicorn (`lazaret/web/connection.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Final

MAX_HEAD: Final = 8 * 1024
MAX_FIELDS: Final = 64
MAX_TARGET: Final = 2048
MAX_NAME: Final = 64  # characters in the name of a field

# No inline script or style, nothing from elsewhere, in nobody's frame. Everything a page shows goes in as text.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


class BadRequest(Exception):
    """What came is no request that is answered here; `status` says why."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


_LINE: Final = re.compile(rb"[\x21-\x7e][\x20-\x7e\t]*")


def check_head(head: bytes) -> None:
    """Check the bytes of a request's head, or of the part that has come, without the empty line at its end.

    :raises BadRequest: if it is too long, or a line begins with a space, ends in a bare line feed or holds a control.
    """
    if len(head) > MAX_HEAD:
        raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    # The last line may be cut anywhere, also before its line feed.
    lines = head.removesuffix(b"\r").split(b"\r\n")
    if not all(_LINE.fullmatch(line) for line in lines if line):
        raise BadRequest(HTTPStatus.BAD_REQUEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The head of a request. Names of fields are in lower case; bodies are refused."""

    method: str
    path: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_scope(cls, scope: Mapping[str, Any]) -> Request:
        """Take what the HTTP server has read (an ASGI scope), and refuse what a read-only page has no use for.

        The path stays as it was sent: `%2e` is no dot here, so no spelling leads to a file that has no route.

        :raises BadRequest: if it is anything but a plain GET or HEAD.
        """
        target, headers = scope["raw_path"], scope["headers"]
        if scope["http_version"] != "1.1" or len(headers) > MAX_FIELDS:
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        if not target.startswith(b"/") or len(target) + len(scope["query_string"]) > MAX_TARGET:
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        if not all(len(name) <= MAX_NAME and value.isascii() for name, value in headers):
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        if scope["method"] not in ("GET", "HEAD"):
            raise BadRequest(HTTPStatus.METHOD_NOT_ALLOWED)
        fields = {name.decode("ascii"): value.decode("ascii") for name, value in headers}
        if "transfer-encoding" in fields or fields.get("content-length", "0") != "0":
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        return cls(method=scope["method"], path=target.decode("ascii"), fields=fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An answer, whole."""

    status: HTTPStatus = HTTPStatus.OK
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    etag: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, body: bytes, kind: str) -> Response:
        """Content that is told apart from other content by its digest."""
        return cls(body=body, kind=kind, etag=f'"{sha256(body).hexdigest()[:32]}"')

    @classmethod
    def of_json(cls, value: Any) -> Response:
        data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        return cls.of(data, "application/json")

    @classmethod
    def refusal(cls, status: HTTPStatus, **fields: str) -> Response:
        named = {name.replace("_", "-"): value for name, value in fields.items()}
        return cls(status=status, body=f"{status.phrase.lower()}\n".encode(), fields=named)

    def for_request(self, request: Request) -> Response:
        """The same, or 304 where the other side has it already."""
        if self.etag is not None and self.etag in request.fields.get("if-none-match", ""):
            return Response(status=HTTPStatus.NOT_MODIFIED, etag=self.etag, kind=self.kind)
        return self

    def headers(self, *, close: bool = False) -> list[tuple[bytes, bytes]]:
        """The fields of the head as ASGI wants them; the server adds the date.

        :param close: whether this is the last answer on its connection.
        """
        named = {"Content-Type": self.kind, **HEADERS, **self.fields}
        if self.status is not HTTPStatus.NOT_MODIFIED:
            named["Content-Length"] = str(len(self.body))
        if self.etag is not None:
            named["ETag"] = self.etag
        if close:
            named["Connection"] = "close"
        return [(name.lower().encode("ascii"), value.encode("latin-1")) for name, value in named.items()]
