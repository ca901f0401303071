"""HTTP CONNECT proxies on loopback: one that only carries bytes, and one that opens TLS as inspecting gateways do."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import ipaddress
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

GATEWAY = "Clinic Web Gateway CA"


class Proxy(socketserver.ThreadingTCPServer):
    """Listens on a free port; `seen` holds the first line of every request.

    :param pretend: opens TLS with this context instead of carrying it through.
    :param login: `user:password` that it asks for.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *, pretend: ssl.SSLContext | None = None, answer: bytes, login: str | None = None) -> None:
        self.pretend, self.answer, self.login = pretend, answer, login
        self.seen: list[str] = []
        super().__init__(("127.0.0.1", 0), _Request)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, *, pretend: ssl.SSLContext | None = None, answer: bytes = b"200 OK", login: str | None = None
    ) -> Iterator[Proxy]:
        with cls(pretend=pretend, answer=answer, login=login) as proxy:
            thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            try:
                yield proxy
            finally:
                proxy.shutdown()
                thread.join()


class _Request(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        client: socket.socket = self.request
        client.settimeout(10)
        head = b""
        while b"\r\n\r\n" not in head:
            part = client.recv(4096)
            if not part:
                return
            head += part
        first = head.split(b"\r\n")[0].decode()
        self.server.seen.append(first)
        answer = self.server.answer if self._let_in(head) else b"407 Proxy Authentication Required"
        client.sendall(b"HTTP/1.1 " + answer + b"\r\n\r\n")
        if not answer.startswith(b"200"):
            return
        with contextlib.suppress(OSError):
            if self.server.pretend is not None:
                with self.server.pretend.wrap_socket(client, server_side=True) as opened:
                    opened.recv(4096)
            else:
                host, _, port = first.split(" ")[1].rpartition(":")
                with socket.create_connection((host, int(port)), timeout=10) as target:
                    _carry(client, target)


    def _let_in(self, head: bytes) -> bool:
        if self.server.login is None:
            return True
        wanted = b"basic " + base64.b64encode(self.server.login.encode())
        headers = [line.split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line]
        found = {name.strip().lower(): value.strip() for name, value in headers}
        given = found.get(b"proxy-authorization", b"")
        return given[:6].lower() + given[6:] == wanted


@contextlib.contextmanager
def listening(context: ssl.SSLContext | None, banner: bytes = b"SSH-2.0-other\r\n") -> Iterator[int]:
    """A port where TLS with this context is spoken, or, without one, something else."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                if context is None:
                    self.request.sendall(banner)
                    self.request.recv(4096)
                else:
                    with context.wrap_socket(self.request, server_side=True) as opened:
                        opened.recv(4096)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def _carry(client: socket.socket, target: socket.socket) -> None:
    back = threading.Thread(target=_pump, args=(target, client), daemon=True)
    back.start()
    _pump(client, target)
    back.join(timeout=10)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def gateway_context(folder: Path, host: str = "127.0.0.1") -> ssl.SSLContext:
    """What a gateway serves: a certificate for the host that is asked for, made by its own authority."""
    now = dt.datetime.now(dt.UTC)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder(
        issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, GATEWAY)]),
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - dt.timedelta(days=1),
        not_valid_after=now + dt.timedelta(days=1),
    )
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    certificate = builder.add_extension(names, critical=False).sign(authority, hashes.SHA256())
    path = folder / "gateway.pem"
    path.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    context.set_alpn_protocols(["h2"])
    return context
