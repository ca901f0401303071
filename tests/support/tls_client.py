"""The beginning of an HTTP/2 connection over TLS, by Python's own ssl: what, if anything, a server answers."""

from __future__ import annotations

import socket
import ssl

from security.identity.enrolment import Identity

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


def context_of(identity: Identity, version: ssl.TLSVersion, *, certificate: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(identity.root_path))
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    if certificate:
        context.load_cert_chain(identity.tls_path, identity.tls_key_path())
    return context


def bytes_back(context: ssl.SSLContext, port: int, host: str = "127.0.0.1") -> bytes:
    with (
        socket.create_connection((host, port), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname=host) as secure,
    ):
        secure.sendall(PREFACE)
        return secure.recv(64)
