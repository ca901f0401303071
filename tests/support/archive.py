"""A real archive: Orthanc with its DICOMweb plug-in on loopback, and a TLS gate before it that can cut and hold.

Debian's Orthanc crashes when it speaks TLS itself, and hospitals put such a gate before their archive in any case.
"""

from __future__ import annotations

import datetime as dt
import http.client
import ipaddress
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from base64 import b64encode
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support.web_server import QuietServer

PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
LOGIN = "fetcher:a password"


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


class Orthanc:
    """The program, with a database of its own."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("Orthanc") or shutil.which("Orthanc", path="/usr/sbin")
        if program is None or not PLUGIN.exists():
            pytest.skip("needs Orthanc with DICOMweb (Debian: orthanc, orthanc-dicomweb)")
        folder.mkdir(parents=True)
        self.port = free_port()
        user, _, password = LOGIN.partition(":")
        settings = {
            "StorageDirectory": str(folder / "db"),
            "IndexDirectory": str(folder / "db"),
            "Plugins": [str(PLUGIN)],
            "HttpPort": self.port,
            "HttpBindAddresses": ["127.0.0.1"],
            "DicomServerEnabled": False,
            "AuthenticationEnabled": True,
            "RegisteredUsers": {user: password},
            "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
        }
        (folder / "orthanc.json").write_text(json.dumps(settings))
        with (folder / "log").open("wb") as log:
            command = [program, str(folder / "orthanc.json")]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        end = time.monotonic() + 60
        while True:
            try:
                self.ask("GET", "/system")
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.05)

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            link.request(method, path, body, {"Authorization": f"Basic {b64encode(LOGIN.encode()).decode()}"})
            answer = link.getresponse()
            content = answer.read()
            assert answer.status == 200, content
            return content
        finally:
            link.close()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


class Gate:
    """TLS with client certificates, before an address on this machine.

    `hold_after` requests for images or stores hang until the test ends them; every `cut_every`-th such answer breaks
    off in the middle.
    """

    def __init__(self, folder: Path, behind: int) -> None:
        self.folder, self.behind = folder, behind
        self.asked = 0
        self.hold_after: int | None = None
        self.cut_every: int | None = None
        self.holding = threading.Event()
        folder.mkdir(parents=True)
        self._certificates()
        self.server = QuietServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem")
        context.load_verify_locations(folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server.server_address[1]}/dicom-web"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                gate.forward(self)

            do_POST = do_GET

        return Handler

    def forward(self, request: BaseHTTPRequestHandler) -> None:
        counted = request.command == "POST" or "/instances/" in request.path
        self.asked += counted
        if counted and self.hold_after is not None and self.asked > self.hold_after:
            self.holding.set()
            request.rfile.read(1)  # until the other side is gone
            request.close_connection = True
            return
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        link = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=20)
        names = ("Authorization", "Accept", "Content-Type")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        link.request(request.command, request.path, body or None, headers)
        answer = link.getresponse()
        content = answer.read()
        link.close()
        cut = counted and self.cut_every is not None and self.asked % self.cut_every == 0
        request.send_response(answer.status)
        request.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[: len(content) // 2] if cut else content)
        request.close_connection = cut

    def _certificates(self) -> None:
        """One authority; a server's and a client's certificate, each with its key in one file of mode 0600."""
        issuer = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)

        def certificate(name: str, key: ec.EllipticCurvePrivateKey, usage: x509.ObjectIdentifier | None) -> bytes:
            subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
            built = (
                x509.CertificateBuilder()
                .subject_name(subject)
                .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
                .public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - dt.timedelta(days=1))
                .not_valid_after(now + dt.timedelta(days=1))
                .add_extension(x509.BasicConstraints(ca=usage is None, path_length=None), critical=True)
                .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
                .add_extension(
                    x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False
                )
            )
            if usage is not None:
                address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
                built = built.add_extension(address, critical=False)
                built = built.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            else:
                signs = dict.fromkeys(("key_cert_sign", "crl_sign"), True)
                others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment")
                rest = dict.fromkeys((*others, "key_agreement", "encipher_only", "decipher_only"), False)
                built = built.add_extension(x509.KeyUsage(**signs, **rest), critical=True)
            return built.sign(issuer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

        (self.folder / "ca.pem").write_bytes(certificate("authority", issuer, None))
        for name, usage in (("server", ExtendedKeyUsageOID.SERVER_AUTH), ("client", ExtendedKeyUsageOID.CLIENT_AUTH)):
            key = ec.generate_private_key(ec.SECP256R1())
            pem = key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            path = self.folder / f"{name}.pem"
            path.touch(mode=0o600)
            path.write_bytes(certificate(name, key, usage) + pem)
