"""How the archive is reached: its address, TLS, and a token, a login or a client certificate from private files."""

from __future__ import annotations

import base64
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from lazaret import files
from lazaret.errors import ConfigError
from site_agent.config import SiteConfig

WHERE: Final = "site.toml [archive]"
_MOST_SECRET: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveAccess:
    """What the client needs to connect. Secrets are in no `repr`.

    :ivar tls: None for an address of this machine without TLS.
    :ivar authorization: the header, or nothing.
    """

    host: str
    port: int
    root: str
    tls: ssl.SSLContext | None
    authorization: str
    timeout: float

    def __repr__(self) -> str:
        return f"ArchiveAccess({self.host}:{self.port})"


def access_files(config: SiteConfig) -> list[Path]:
    """What the process with the network reads, besides the folder that it fills."""
    authority = config.archive.ca
    return [*([config.under(authority)] if authority else []), *config.secret_files]


def open_access(config: SiteConfig, url: str) -> ArchiveAccess:
    """Read the secrets. A file that others may read is refused.

    :raises ConfigError: with the key of `site.toml`, never with a secret.
    """
    parts = urlsplit(url)
    secure, (host, port) = parts.scheme == "https", _place(url)
    if config.secret_files and (host, port) not in _known_places(config):
        raise ConfigError(
            "this archive is not named in site.toml: token, login and certificate are not shown to it",
            where=f"{host}:{port}",
            hint=f'check the address; if it is right, {WHERE}: hosts = ["{host}:{port}"]',
        )
    return ArchiveAccess(
        host=host,
        port=port,
        root=parts.path,
        tls=_tls(config) if secure else None,
        authorization=_authorization(config),
        timeout=float(config.archive.timeout),
    )


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _known_places(config: SiteConfig) -> set[tuple[str, int]]:
    """What a person types once may be mistyped, or given to him by another: only these see a secret."""
    found = {_place(f"https://{address}") for address in config.archive.hosts}
    return found | ({_place(config.fetched.url)} if config.fetched is not None else set())


def _authorization(config: SiteConfig) -> str:
    table = config.archive
    if table.token_file and table.login_file:
        raise ConfigError("both a token and a login", where=WHERE, hint="leave out token_file or login_file")
    if table.token_file:
        return f"Bearer {_secret(config.under(table.token_file), 'token_file')}"
    if table.login_file:
        login = _secret(config.under(table.login_file), "login_file", spaces=True)
        if ":" not in login:
            raise ConfigError("the file is not of the form user:password", where=f"{WHERE} login_file")
        return f"Basic {base64.b64encode(login.encode()).decode()}"
    return ""


def _secret(path: Path, key: str, *, spaces: bool = False) -> str:
    """One line of printable text: anything else would be a second header."""
    try:
        text = files.read_private(path)[: _MOST_SECRET + 1].decode().strip()
    except UnicodeDecodeError:
        text = ""
    good = text.isprintable() if spaces else text.isascii() and text.isprintable() and " " not in text
    if not text or not good or len(text) > _MOST_SECRET:
        raise ConfigError("the file does not hold one line of text", where=f"{WHERE} {key}")
    return text


def _tls(config: SiteConfig) -> ssl.SSLContext:
    table = config.archive
    try:
        context = ssl.create_default_context(cafile=None if table.ca is None else str(config.under(table.ca)))
    except (OSError, ssl.SSLError):
        raise ConfigError("the file holds no certificates", where=f"{WHERE} ca", hint="PEM of who issued it") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if table.certificate is not None:
        key = config.under(table.key or table.certificate)
        if key.exists():
            files.refuse_shared_mode(key, os.stat(key).st_mode)
        try:
            # A passphrase is not asked for: nobody may be there.
            context.load_cert_chain(str(config.under(table.certificate)), str(key), password=lambda: b"")
        except (OSError, ssl.SSLError, ValueError):
            hint = "two PEM files that belong together, the key without a passphrase"
            raise ConfigError("certificate and key cannot be read", where=f"{WHERE} certificate", hint=hint) from None
    return context
