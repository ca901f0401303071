"""Reaching a coordinator as far as TLS goes: who answers at the other end, directly or behind an HTTP CONNECT proxy.

The certificate is taken as it is served and judged here, so that the line can say who was in between: gRPC would only
say that the handshake failed. No certificate of ours is shown and nothing is sent but a ClientHello.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import unquote, urlsplit

from cryptography import x509
from cryptography.x509.oid import NameOID

from lazaret.checks import Line, found, ok, problem, warning
from lazaret.errors import CertificateNameMismatch, CertificateUntrusted, ToolkitError
from security.identity import pki
from security.identity.manifest import Manifest
from security.identity.peers import check_tls_peer
from security.identity.pki import Role
from security.rng import SystemRandomness

SECONDS: Final = 10.0


class NoTls(ToolkitError):
    """Something answers, and it is not a TLS server that we could speak with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A host and a port, and the proxy on the way there. The proxy's password never gets into a text."""

    host: str
    port: int
    proxy: str | None = None

    @classmethod
    def parse(cls, address: str, proxy: str | None = None) -> Self:
        host, _, port = address.rpartition(":")
        return cls(host=host.strip("[]"), port=int(port), proxy=proxy)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def way(self) -> str:
        return f" through the proxy {_netloc(self.proxy)}" if self.proxy else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the other end has shown.

    :ivar group: the key agreement that it chooses for TLS 1.3; empty if nobody asked, or it did not say.
    """

    certificate: x509.Certificate
    version: str
    group: str = ""


def _netloc(proxy: str) -> str:
    parts = urlsplit(proxy)
    return f"{parts.hostname}:{parts.port or 80}"


def ask(destination: Destination, *, seconds: float = SECONDS) -> Served:
    """Connect and take the certificate that is served.

    :raises ToolkitError: with what stood in the way.
    """
    with _connected(destination, seconds) as raw:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Judged afterwards, by `judge`: nothing is sent over this connection.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(raw, server_hostname=destination.host) as secure:
                shown, version = secure.getpeercert(binary_form=True), secure.version()
        except TimeoutError as error:
            raise ToolkitError(
                "the connection opens, but there is no answer to TLS",
                where=str(destination),
                hint="a firewall may accept the connection and drop what follows: ask to allow this destination",
            ) from error
        except (ssl.SSLError, OSError) as error:
            raise NoTls(
                f"the program that answers there does not use TLS ({_reason(error)})",
                where=str(destination),
                hint="is [coordinator] address right? Another program may listen on this port",
            ) from error
    if shown is None or version is None:
        raise ToolkitError("no certificate was served", where=str(destination), hint="ask the coordinator's operator")
    return Served(certificate=x509.load_der_x509_certificate(shown), version=version)


# Which key agreement the other end chooses. Neither `ssl` nor gRPC tells, so a ClientHello without a key share is sent:
# by RFC 8446, section 4.1.4, the server answers which group it wants one for, and the connection ends there.

HYBRID: Final = "X25519MLKEM768"
# Those that gRPC offers, in its order; a test compares them with what a channel of ours sends.
GROUPS: Final = {0x11EC: HYBRID, 0x1D: "X25519", 0x17: "P-256", 0x18: "P-384", 0x19: "P-521"}
# RFC 8446, section 4.1.3: the random value by which a HelloRetryRequest is known.
_RETRY: Final = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
_SERVER_HELLO, _KEY_SHARE = 2, 51


def ask_group(destination: Destination, *, seconds: float = SECONDS) -> str:
    """The name of the group that the other end chooses; empty if its answer is none that we can read."""
    with _connected(destination, seconds) as raw, suppress(OSError, IndexError, struct.error):
        raw.sendall(_client_hello(destination.host))
        answer = b""
        while len(answer) < 5 or len(answer) < 5 + int.from_bytes(answer[3:5], "big"):
            more = raw.recv(4096)
            if not more:
                return ""
            answer += more
        return _chosen(answer)
    return ""


def _prefixed(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size, "big") + data


def _client_hello(host: str) -> bytes:
    groups = b"".join(struct.pack(">H", group) for group in GROUPS)
    extensions = {
        10: _prefixed(2, groups),
        13: _prefixed(2, bytes.fromhex("040308070804050308050806")),  # signature algorithms
        16: _prefixed(2, _prefixed(1, b"h2")),
        43: _prefixed(1, bytes.fromhex("0304")),
        45: _prefixed(1, b"\x01"),
        _KEY_SHARE: _prefixed(2, b""),
    }
    if not _is_address(host):
        extensions = {0: _prefixed(2, b"\0" + _prefixed(2, host.encode("idna"))), **extensions}
    listed = b"".join(struct.pack(">H", kind) + _prefixed(2, data) for kind, data in extensions.items())
    suites = bytes.fromhex("130113021303")
    random, session = SystemRandomness().bytes(32), SystemRandomness().bytes(32)
    body = b"\x03\x03" + random + _prefixed(1, session) + _prefixed(2, suites) + b"\x01\x00" + _prefixed(2, listed)
    return b"\x16\x03\x01" + _prefixed(2, b"\x01" + _prefixed(3, body))


def _chosen(record: bytes) -> str:
    """From a HelloRetryRequest: record header, handshake header, version, random, session, suite, compression."""
    if record[0] != 0x16 or record[5] != _SERVER_HELLO or record[11:43] != _RETRY:
        return ""
    at = 44 + record[43] + 3
    end = at + 2 + int.from_bytes(record[at : at + 2], "big")
    at += 2
    while at < end:
        kind, length = struct.unpack(">HH", record[at : at + 4])
        if kind == _KEY_SHARE:
            (group,) = struct.unpack(">H", record[at + 4 : at + 6])
            return GROUPS.get(group, f"group {group:#06x}")
        at += 4 + length
    return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _reason(error: OSError) -> str:
    text = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or type(error).__name__
    return str(text).lower().replace("_", " ")


def _connected(destination: Destination, seconds: float) -> socket.socket:
    host, port = destination.host, destination.port
    try:
        if destination.proxy is None:
            return socket.create_connection((host, port), timeout=seconds)
        return _tunnel(destination, seconds)
    except socket.gaierror as error:
        asked = _netloc(destination.proxy) if destination.proxy else host
        raise ToolkitError(
            f"the name {asked} cannot be resolved",
            where=str(destination),
            hint="check its spelling, and this machine's DNS",
        ) from error
    except ConnectionRefusedError as error:
        if destination.proxy:
            what, hint = f"the proxy {_netloc(destination.proxy)} refuses connections", "is [coordinator] proxy right?"
        else:
            what, hint = "the port is closed", "ask the operator if the coordinator runs, and on which port"
        raise ToolkitError(what, where=str(destination), hint=hint) from error
    except TimeoutError as error:
        raise ToolkitError(
            f"no answer within {seconds:.0f} seconds{destination.way}",
            where=str(destination),
            hint="allow this one destination in the firewall, or set [coordinator] proxy",
        ) from error
    except OSError as error:
        raise ToolkitError(
            f"cannot be reached{destination.way}: {_reason(error)}",
            where=str(destination),
            hint="ask the network administrators to allow this one destination",
        ) from error


def _tunnel(destination: Destination, seconds: float) -> socket.socket:
    parts = urlsplit(destination.proxy or "")
    headers = {}
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=seconds)
    connection.set_tunnel(destination.host, destination.port, headers)
    try:
        connection.connect()
    except http.client.HTTPException as error:
        raise ToolkitError(
            f"{_netloc(destination.proxy or '')} is not an HTTP proxy",
            where="[coordinator] proxy",
            hint="check its port",
        ) from error
    except OSError as error:
        if str(error).startswith("Tunnel connection failed"):
            raise ToolkitError(
                f"the proxy refuses the connection: {str(error).partition(': ')[2].lower()}",
                where=str(destination),
                hint='it asks for a login: [coordinator] proxy = "http://user:password@host:port" (docs/hospitals.md)'
                if "407" in str(error)
                else "ask for CONNECT to this one destination; the agent needs nothing else of the proxy",
            ) from error
        raise
    made: socket.socket = connection.sock
    return made


# Judging what was served.


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Hosts and addresses that the certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def issuer_of(certificate: x509.Certificate) -> str:
    """The issuer's common name or organisation, for people."""
    for kind in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME):
        names = certificate.issuer.get_attributes_for_oid(kind)
        if names:
            return str(names[0].value)
    return certificate.issuer.rfc4514_string() or "nobody"


def check_name(certificate: x509.Certificate, host: str) -> None:
    """:raises CertificateNameMismatch: if the certificate is not for the host that is connected to."""
    names = names_of(certificate)
    if _plain(host) not in {_plain(name) for name in names}:
        raise CertificateNameMismatch(
            f"the coordinator's certificate is for {', '.join(names) or 'no host'}, not for {host}",
            where="[coordinator] address",
            hint=f"set the address to a name in the certificate, such as {names[0]}" if names else "ask the operator",
        )


def _plain(name: str) -> str:
    return str(ipaddress.ip_address(name)) if _is_address(name) else name.lower().rstrip(".")


def judge(
    served: Served, destination: Destination, root: x509.Certificate, manifest: Manifest | None, *, now_ms: int
) -> Iterator[Line]:
    """Is it our coordinator's own certificate, for the name that we connect to, over TLS 1.3?"""
    certificate = served.certificate
    try:
        pki.check_issuer(certificate, root, str(destination))
    except CertificateUntrusted:
        yield _stranger(certificate, destination)
        return
    try:
        pki.check_dates(certificate, now_ms, "the coordinator's certificate")
        check_name(certificate, destination.host)
        if manifest is not None:
            check_tls_peer(manifest, root, certificate, now_ms=now_ms)
        _check_role(certificate)
    except ToolkitError as error:
        yield found(error)
        return
    left = pki.days_left(certificate, now_ms)
    words = f"{pki.subject_of(certificate).member} answers at {destination}{destination.way} with its own certificate"
    if served.version != "TLSv1.3":
        yield problem(f"{words}, but over {served.version}", "only TLS 1.3 is accepted: update the coordinator")
    elif left < 7:
        yield warning(f"{words}, which expires in {left} days", "inform its operator")
    else:
        agreed = f" with {served.group} keys" if served.group else ""
        yield ok(f"{words}, over TLS 1.3{agreed}")


def _check_role(certificate: x509.Certificate) -> None:
    if pki.subject_of(certificate).role is not Role.COORDINATOR:
        raise CertificateNameMismatch("the other end is not a coordinator", hint="is [coordinator] address right?")


def _stranger(certificate: x509.Certificate, destination: Destination) -> Line:
    try:
        other = pki.subject_of(certificate)
    except ToolkitError:
        return problem(
            f"TLS to {destination}{destination.way} is intercepted: the certificate served was issued by "
            f"{issuer_of(certificate)!r}, not by this federation's root",
            f"ask for an exception from TLS inspection for {destination}; if there is none here, the address is wrong",
        )
    return problem(
        f"{destination} is a {other.role} of another federation, {other.federation!r}, "
        f"with a certificate issued by {issuer_of(certificate)!r}",
        "compare [coordinator] address and the root's fingerprint with those that the consortium gave",
    )
