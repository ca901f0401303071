"""Who may look: the address that is listened on, the name that was asked for, and a token where one is needed."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

from lazaret import files
from lazaret.errors import ConfigError
from lazaret.web.http import Request, Response

LEAST_TOKEN: Final = 22  # characters; 128 bits in base64
_LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a page listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, where: str) -> Address:
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65_535:
            raise ConfigError("is not of the form host:port", where=where, hint="for example 127.0.0.1:7480")
        return cls(host=host.strip("[]"), port=int(port))

    @property
    def is_loopback(self) -> bool:
        """Only a literal address counts: what a name resolves to is not ours to decide."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def require_loopback(text: str, *, where: str) -> Address:
    """An address that only this machine can reach.

    :raises ConfigError: if it is any other.
    """
    address = Address.parse(text, where=where)
    if not address.is_loopback:
        raise ConfigError(
            "this page is for the machine it runs on", where=where, hint="listen on 127.0.0.1, and use an SSH tunnel"
        )
    return address


def read_token(path: Path) -> str:
    """A token from a file that nobody else can read.

    :raises ConfigError: if others can, or if it could be guessed.
    """
    token = files.read_private(path).decode("utf-8", errors="replace").strip()
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"a token has at least {LEAST_TOKEN} printable characters and no space",
            where=str(path),
            hint="for example: openssl rand -base64 32",
        )
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Stands before every page.

    :param names: host names that may be asked for besides those of this machine. A page of somebody else whose name was
        made to resolve to this machine asks for another one, and gets nothing (DNS rebinding).
    :param token: has to come with every request, as a Bearer token or as the password of Basic (RFC 6750, RFC 7617).
    :param folder: has to be the first part of every path: a token for browsers, good for one start.
    """

    names: Collection[str] = ()
    token: str | None = field(default=None, repr=False)
    folder: str | None = field(default=None, repr=False)

    def refusal(self, request: Request) -> Response | None:
        """Why a request gets nothing, or None."""
        host = request.fields.get("host", "").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if name not in (*_LOOPBACK_NAMES, *self.names):
            return Response.refusal(HTTPStatus.MISDIRECTED_REQUEST)
        if self.token is not None and not _same(_presented_token(request), self.token):
            challenge = 'Basic realm="Lazaret", charset="UTF-8"'
            return Response.refusal(HTTPStatus.UNAUTHORIZED, WWW_Authenticate=challenge)
        first, slash, _ = request.path[1:].partition("/")
        if self.folder is not None and not (_same(first, self.folder) and slash):
            return Response.refusal(HTTPStatus.NOT_FOUND)
        return None

    def path(self, request: Request) -> str:
        """The path that is asked for, without what was only for us."""
        return request.path if self.folder is None else "/" + request.path[1:].partition("/")[2]


def _same(presented: str, wanted: str) -> bool:
    """Constant time, so that how long a refusal takes tells nothing about the token."""
    return hmac.compare_digest(presented.encode("utf-8", errors="replace"), wanted.encode())


def _presented_token(request: Request) -> str:
    scheme, _, value = request.fields.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode(errors="replace").partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""
