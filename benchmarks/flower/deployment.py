"""A SuperLink and SuperNodes as processes that speak TLS, one run of `app/`, and how long its round took."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.secagg import flower_python
from scripts.local_federation.federation import HOST, WaitFailed, free_port, wait_until
from security.secagg import thresholds

APP = Path(__file__).with_name("app")
ROUND_SECONDS = 300.0


class Deployment:
    """Everything of one run lies in a folder; every process is the head of a group, which is ended by its id."""

    def __init__(self, folder: Path, sites: int, params: int) -> None:
        self.folder = folder
        self.sites = sites
        self.params = params
        self.programs = flower_python().parent
        self.port = free_port()
        self.address = f"{HOST}:{self.port}"
        self.times = folder / "times.json"
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self) -> dict[str, Any]:
        """One round.

        :raises WaitFailed: if it does not come to an end.
        """
        shutil.copytree(APP, self.folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        self._make_certificates()
        home = self.folder / "home"
        home.mkdir()
        connection = f'address = "{self.address}"\nroot-certificates = "{self.folder / "ca.pem"}"\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\n{connection}')
        try:
            self._start_link()
            for number in range(self.sites):
                self._start("flower-supernode", *self._node_words(number), output=f"node{number}")
            settings = {"params": self.params, "sites": self.sites, "threshold": self._threshold()}
            words = " ".join([f"{key}={value}" for key, value in settings.items()] + [f'out="{self.times}"'])
            self._start("flwr", "run", self.folder / "app", "bench", "--run-config", words, output="run")
            wait_until(self.times.exists, "one round of Flower", seconds=ROUND_SECONDS, output=self.folder / "link.log")
            wait_until(self._is_told, "the figures of Flower", seconds=10)
            found: dict[str, Any] = json.loads(self.times.read_text())
        finally:
            self._end()
        if not found["exact"]:
            raise WaitFailed("Flower's aggregate is not the mean of what was put in")
        return found

    def _is_told(self) -> bool:
        with suppress(json.JSONDecodeError):
            return bool(json.loads(self.times.read_text()))
        return False

    def _threshold(self) -> int:
        """The one this toolkit takes for as many sites; Flower's must be less than the number of shares."""
        colluders = thresholds.default_colluders(self.sites)
        quorum = thresholds.quorum(n=self.sites, c=colluders, m=thresholds.LEAST_SURVIVORS)
        return min(quorum, self.sites - 1)

    # Processes.

    def _start_link(self) -> None:
        files = [f"--ssl-{name}={self.folder / file}" for name, file in _FILES.items()]
        self._start(
            "flower-superlink", "--host", HOST, "--port", self.port, *files,
            "--disable-runtime-dependency-installation", output="link",
        )  # fmt: skip
        wait_until(lambda: _listens(self.port), "SuperLink", seconds=120, output=self.folder / "link.log")

    def _node_words(self, number: int) -> Sequence[object]:
        files = [f"--ssl-{name}={self.folder / file}" for name, file in _FILES.items()]
        root = ["--root-certificates", self.folder / "ca.pem", "--superlink", self.address]
        place = ["--host", HOST, "--port", free_port(), "--node-config", f"partition-id={number}"]
        return [*root, *place, *files]

    def _start(self, program: str, *words: object, output: str) -> None:
        environment = os.environ | {
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "NO_PROXY": HOST,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.programs}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        with (self.folder / f"{output}.log").open("ab") as file:
            process = subprocess.Popen(
                [str(self.programs / program), *(str(word) for word in words)],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)

    def _end(self) -> None:
        for process in reversed(self._running):
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)

    # Certificates.

    def _make_certificates(self) -> None:
        root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        root_name, name = _name("bench root"), _name("bench")
        root = _certificate(root_name, root_name, root_key, root_key, authority=True)
        leaf = _certificate(name, root_name, key, root_key, authority=False)
        pem = serialization.Encoding.PEM
        (self.folder / "ca.pem").write_bytes(root.public_bytes(pem))
        (self.folder / "server.pem").write_bytes(leaf.public_bytes(pem))
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        with open(os.open(self.folder / "server.key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(private)


_FILES = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    *,
    authority: bool,
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )


def one_round(sites: int, params: int) -> float:
    """Seconds of one SecAgg+ round."""
    folder = Path(tempfile.mkdtemp(prefix="lazaret-flower-"))
    try:
        return float(Deployment(folder, sites, params).run()["seconds"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
