"""Time stamps of checkpoints, by a real authority on this machine: `openssl ts`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from lazaret.errors import CodecError, ToolkitError, VerificationFailed
from security.audit import timestamps
from security.audit.cli import main
from security.audit.timestamps import check, request
from tests.support.audit_attacks import Lonely

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

CONFIG = """
[tsa]
default_tsa = one
[one]
serial = {folder}/serial
signer_digest = {digest}
default_policy = 1.2.3.4
digests = sha256
ess_cert_id_chain = no
ess_cert_id_alg = {named}
[stamping]
extendedKeyUsage = critical,timeStamping
[anything]
extendedKeyUsage = timeStamping,serverAuth
"""


@dataclass
class TimeAuthority:
    """A root, and a certificate under it that may stamp."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, *, kind: str = "ec", usage: str = "stamping", named: str = "sha256") -> TimeAuthority:
        folder.mkdir()
        made = cls(folder)
        (folder / "ts.cnf").write_text(CONFIG.format(folder=folder, digest="sha256", named=named))
        new = {"ec": ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"], "rsa": ["rsa:2048"]}[kind]
        made.run(
            "req", "-x509", "-newkey", *new, "-noenc", "-keyout", "root.key", "-out", "root.pem", "-subj", "/CN=Root"
        )
        made.run(
            "req", "-newkey", *new, "-noenc", "-keyout", "tsa.key", "-out", "tsa.csr", "-subj", "/CN=Time authority"
        )
        made.run(
            "x509",
            "-req",
            "-in",
            "tsa.csr",
            "-CA",
            "root.pem",
            "-CAkey",
            "root.key",
            "-days",
            "2",
            "-out",
            "tsa.pem",
            "-extfile",
            "ts.cnf",
            "-extensions",
            usage,
        )
        return made

    def run(self, *words: str) -> None:
        done = subprocess.run(["openssl", *words], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def stamp(self, asked: bytes) -> bytes:
        (self.folder / "asked.tsq").write_bytes(asked)
        self.run(
            "ts",
            "-reply",
            "-config",
            "ts.cnf",
            "-queryfile",
            "asked.tsq",
            "-signer",
            "tsa.pem",
            "-inkey",
            "tsa.key",
            "-out",
            "answer.tsr",
        )
        return (self.folder / "answer.tsr").read_bytes()

    @property
    def roots(self) -> Sequence[x509.Certificate]:
        return timestamps.read_roots(self.folder / "root.pem")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TimeAuthority:
    return TimeAuthority.make(tmp_path_factory.mktemp("authority") / "ec")


@pytest.mark.parametrize(("kind", "named"), [("ec", "sha256"), ("ec", "sha1"), ("rsa", "sha512")])
def test_a_stamp_of_an_authority_is_read(kind: str, named: str, tmp_path: Path) -> None:
    made = TimeAuthority.make(tmp_path / "authority", kind=kind, named=named)
    found = check(made.stamp(request(b"data")), b"data", made.roots)
    assert found.authority == "CN=Time authority" and found.time.tzinfo is not None


def test_openssl_checks_the_same(authority: TimeAuthority, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    (tmp_path / "answer").write_bytes(authority.stamp(request(b"data")))
    authority.run(
        "ts", "-verify", "-data", str(tmp_path / "data"), "-in", str(tmp_path / "answer"), "-CAfile", "root.pem"
    )


def test_a_stamp_of_something_else(authority: TimeAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = authority.stamp(request(b"data"))
    with pytest.raises(VerificationFailed, match="something else"):
        check(answer, b"other data", authority.roots)


def test_another_authority_counts_for_nothing(
    authority: TimeAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = TimeAuthority.make(tmp_path / "other")
    answer = other.stamp(request(b"data"))
    with pytest.raises(VerificationFailed, match="root certificates"):
        check(answer, b"data", authority.roots)
    monkeypatch.setattr(timestamps, "_check_chain", lambda *_: None)
    assert check(answer, b"data", authority.roots), "twin: anybody is an authority"


def test_a_certificate_for_other_things_counts_for_nothing(tmp_path: Path) -> None:
    """openssl itself does not sign under it, so that the extension is taken from a good certificate's check."""
    made = TimeAuthority.make(tmp_path / "authority", usage="anything")
    signer = x509.load_pem_x509_certificate((made.folder / "tsa.pem").read_bytes())
    with pytest.raises(VerificationFailed, match="not for time stamps"):
        timestamps._check_chain(signer, [], made.roots, signer.not_valid_before_utc)


def test_a_certificate_that_has_ended_counts_for_nothing(authority: TimeAuthority) -> None:
    signer = x509.load_pem_x509_certificate((authority.folder / "tsa.pem").read_bytes())
    timestamps._check_chain(signer, [], authority.roots, signer.not_valid_after_utc)
    late = signer.not_valid_after_utc.replace(year=signer.not_valid_after_utc.year + 1)
    with pytest.raises(VerificationFailed, match="not valid at the time"):
        timestamps._check_chain(signer, [], authority.roots, late)


def test_a_refusal_is_no_stamp(authority: TimeAuthority) -> None:
    with pytest.raises(VerificationFailed, match="did not grant"):
        check(authority.stamp(b"nonsense"), b"data", authority.roots)


def test_every_changed_byte_is_refused_or_says_the_same(authority: TimeAuthority) -> None:
    """Never a traceback, and never another time or name."""
    answer = bytearray(authority.stamp(request(b"data")))
    right, same = check(bytes(answer), b"data", authority.roots), 0
    for place in range(len(answer)):
        answer[place] ^= 1 << place % 8
        try:
            assert check(bytes(answer), b"data", authority.roots) == right
            same += 1
        except ToolkitError:
            pass
        answer[place] ^= 1 << place % 8
    assert same < 40, "the answer's words, the list of digests, and the version numbers are not signed"


@pytest.mark.parametrize(
    "data", [b"", b"0", b"\x30\x80", b"\x30\x84\xff\xff\xff\xff", b"\x30\x03\x02\x01\x00", b"\x1f" * 9]
)
def test_what_is_no_stamp_is_one_error(data: bytes, authority: TimeAuthority) -> None:
    with pytest.raises(CodecError):
        check(data, b"data", authority.roots)


def test_command(authority: TimeAuthority, tmp_path: Path) -> None:
    lonely = Lonely(tmp_path)
    lonely.log.checkpoint()
    log, asked, answer = str(lonely.folder), tmp_path / "asked.tsq", tmp_path / "answer.tsr"
    assert CliRunner().invoke(main, ["timestamp", log, "--request", str(asked)]).exit_code == 0
    answer.write_bytes(authority.stamp(asked.read_bytes()))
    words = ["timestamp", log, "--response", str(answer), "--ca", str(authority.folder / "root.pem")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0 and "says CN=Time authority" in done.output
    answer.write_bytes(authority.stamp(request(b"something else")))
    assert CliRunner().invoke(main, words).exit_code == 1
    assert CliRunner().invoke(main, ["timestamp", log]).exit_code == 2
