"""A real rsyslog on this machine, with TLS: the log collector of the tests."""

from __future__ import annotations

import datetime as dt
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from scripts.local_federation.federation import free_port

DRIVERS = ("ossl", "gtls")


def driver() -> str:
    """The TLS driver of the rsyslog that is installed; skips the test where there is none."""
    if shutil.which("rsyslogd", path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
        pytest.skip("rsyslogd is not installed (Debian: rsyslog)")
    found = [name for name in DRIVERS if any(Path("/usr/lib").glob(f"**/rsyslog/lmnsd_{name}.so"))]
    if not found:
        pytest.skip("rsyslog has no TLS driver (Debian: rsyslog-gnutls or rsyslog-openssl)")
    return found[0]


def _certificate(folder: Path, name: str, issuer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None) -> None:
    """A key and a certificate of it, by the given authority or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    by, signing = issuer or (subject, key)
    now = dt.datetime.now(dt.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    )
    made = built.sign(signing, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / f"{name}.key").write_bytes(private)
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))


class Collector:
    """rsyslogd with one TLS input and one file. `start` and `stop` as often as a test wants."""

    def __init__(self, folder: Path) -> None:
        self.driver = driver()
        self.folder = folder
        folder.mkdir(parents=True)
        self.collected = folder / "collected.log"
        for name in ("root", "stranger"):
            _certificate(folder, name, None)
        root = x509.load_pem_x509_certificate((folder / "root.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "root.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        _certificate(folder, "localhost", (root.subject, key))
        self.port = free_port()
        (folder / "rsyslog.conf").write_text(self._configuration())
        self._process: subprocess.Popen[bytes] | None = None

    def _configuration(self) -> str:
        return f"""
global(workDirectory="{self.folder}" maxMessageSize="128k" defaultNetstreamDriverCAFile="{self.folder}/root.pem"
       defaultNetstreamDriverCertFile="{self.folder}/localhost.pem"
       defaultNetstreamDriverKeyFile="{self.folder}/localhost.key")
module(load="imtcp" streamDriver.name="{self.driver}" streamDriver.mode="1" streamDriver.authMode="anon")
input(type="imtcp" port="{self.port}" address="127.0.0.1")
action(type="omfile" file="{self.collected}" template="RSYSLOG_SyslogProtocol23Format" flushOnTXEnd="on")
"""

    def start(self) -> None:
        program = shutil.which("rsyslogd", path="/usr/sbin:/usr/bin:/sbin:/bin")
        assert program is not None
        command = [program, "-n", "-f", str(self.folder / "rsyslog.conf"), "-i", str(self.folder / "pid")]
        with (self.folder / "rsyslogd.err").open("ab") as errors:
            self._process = subprocess.Popen(command, stdout=errors, stderr=errors)
        trusted = ssl.create_default_context(cafile=self.folder / "root.pem")
        for _ in range(400):
            try:
                with (
                    socket.create_connection(("127.0.0.1", self.port), 5) as plain,
                    trusted.wrap_socket(plain, server_hostname="localhost"),
                ):
                    return  # it listens, and speaks TLS
            except OSError:
                assert self._process.poll() is None, (self.folder / "rsyslogd.err").read_text()
                time.sleep(0.05)
        raise AssertionError("rsyslogd does not listen")

    def stop(self) -> None:
        """In an orderly way, so that everything it has read is in the file."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None
