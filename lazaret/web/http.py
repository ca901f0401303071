"""Requests and answers as values (RFC 9110, RFC 9112), as much of them as a read-only page needs: GET and HEAD."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Final

MAX_HEAD: Final = 8 * 1024
MAX_FIELDS: Final = 64
_REQUEST_LINE: Final = re.compile(r"([A-Z]{1,16}) (/[!-~]{0,2048}) HTTP/1\.1")
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\x20-\x7e\t]*?)[ \t]*")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The head of a request. Names of fields are in lower case; bodies are refused."""

    method: str
    path: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, head: bytes) -> Request:
        """Read everything up to and with the empty line.

        :raises BadRequest: if it is anything but a plain GET or HEAD.
        """
        if len(head) > MAX_HEAD:
            raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        match = _REQUEST_LINE.fullmatch(first)
        if match is None or len(lines) > MAX_FIELDS:
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        fields: dict[str, str] = {}
        for line in lines:
            found = _FIELD.fullmatch(line)
            if found is None or (found[1].lower() == "host" and "host" in fields):
                raise BadRequest(HTTPStatus.BAD_REQUEST)
            fields[found[1].lower()] = found[2]
        if match[1] not in ("GET", "HEAD"):
            raise BadRequest(HTTPStatus.METHOD_NOT_ALLOWED)
        if "transfer-encoding" in fields or fields.get("content-length", "0") != "0":
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        return cls(method=match[1], path=match[2].partition("?")[0], fields=fields)

    @property
    def keeps_open(self) -> bool:
        return self.fields.get("connection", "").lower() != "close"


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

    def encode(self, *, head_only: bool = False, keep_open: bool = False) -> bytes:
        told = {
            "Date": formatdate(usegmt=True),
            "Content-Type": self.kind,
            **HEADERS,
            **self.fields,
            "Connection": "keep-alive" if keep_open else "close",
        }
        if self.status is not HTTPStatus.NOT_MODIFIED:
            told["Content-Length"] = str(len(self.body))
        if self.etag is not None:
            told["ETag"] = self.etag
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{key}: {told[key]}" for key in told)]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return head if head_only else head + self.body
