"""Certificates: each way of being wrong has its own error, and each check a twin without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from lazaret import errors
from security.identity import pki
from security.identity.pki import Purpose, Role, Subject

NOW = 1_800_000_000_000
DAY = 86_400_000


@dataclass(frozen=True)
class Authority:
    key: ec.EllipticCurvePrivateKey
    root: x509.Certificate

    @classmethod
    def make(cls, federation: str = "lesions") -> Authority:
        key = pki.new_tls_key()
        return cls(key, pki.make_root(key, federation, now_ms=NOW))

    def issue(self, purpose: Purpose, subject: Subject | None = None, **options: Any) -> x509.Certificate:
        key = pki.new_signing_key() if purpose is Purpose.SIGNING else pki.new_tls_key()
        return pki.issue(self.key, self.root, subject or SITE, purpose, key.public_key(), **({"now_ms": NOW} | options))


SITE = Subject(federation="lesions", role=Role.SITE, member="vienna")
SERVER = Subject(federation="lesions", role=Role.COORDINATOR, member="hub")


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority.make()


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("subject", [SITE, SERVER])
def test_a_good_certificate_gives_its_key(ours: Authority, purpose: Purpose, subject: Subject) -> None:
    certificate = ours.issue(purpose, subject)
    key = pki.verify_certificate(certificate, ours.root, subject, purpose, now_ms=NOW)
    assert pki.key_fingerprint(key) == pki.key_fingerprint(pki.certificate_key(certificate))
    assert pki.subject_of(certificate) == subject
    assert pki.days_left(certificate, NOW) == pki.MEMBER_DAYS


def other_ca(ours: Authority) -> tuple[x509.Certificate, dict[str, Any]]:
    return Authority.make().issue(Purpose.SIGNING), {}


def expired(ours: Authority) -> tuple[x509.Certificate, dict[str, Any]]:
    return ours.issue(Purpose.SIGNING, days=30), {"now_ms": NOW + 31 * DAY}


def slow_clock(ours: Authority) -> tuple[x509.Certificate, dict[str, Any]]:
    return ours.issue(Purpose.SIGNING, now_ms=NOW + 3 * DAY), {}


def revoked(ours: Authority) -> tuple[x509.Certificate, dict[str, Any]]:
    certificate = ours.issue(Purpose.SIGNING)
    return certificate, {"revoked": {pki.fingerprint(certificate)}}


def tls_for_signing(ours: Authority) -> tuple[x509.Certificate, dict[str, Any]]:
    return ours.issue(Purpose.TLS), {}


def other_member(ours: Authority) -> tuple[x509.Certificate, dict[str, Any]]:
    return ours.issue(Purpose.SIGNING, Subject(federation="lesions", role=Role.SITE, member="graz")), {}


def other_role(ours: Authority) -> tuple[x509.Certificate, dict[str, Any]]:
    return ours.issue(Purpose.SIGNING, Subject(federation="lesions", role=Role.COORDINATOR, member="vienna")), {}


def other_federation(ours: Authority) -> tuple[x509.Certificate, dict[str, Any]]:
    return ours.issue(Purpose.SIGNING, Subject(federation="ct", role=Role.SITE, member="vienna")), {}


BAD: list[tuple[Callable[[Authority], tuple[x509.Certificate, dict[str, Any]]], type[errors.ToolkitError], str]] = [
    (other_ca, errors.CertificateUntrusted, "check_issuer"),
    (expired, errors.CertificateExpired, "check_dates"),
    (slow_clock, errors.CertificateNotYetValid, "check_dates"),
    (revoked, errors.CertificateRevoked, "check_revoked"),
    (tls_for_signing, errors.CertificatePurposeMismatch, "check_purpose"),
    (other_member, errors.CertificateNameMismatch, "check_subject"),
    (other_role, errors.CertificateNameMismatch, "check_subject"),
    (other_federation, errors.CertificateNameMismatch, "check_subject"),
]


@pytest.mark.parametrize(("bad", "error", "check"), BAD, ids=[row[0].__name__ for row in BAD])
def test_each_fault_has_its_error(ours: Authority, bad: Any, error: type[errors.ToolkitError], check: str) -> None:
    certificate, options = bad(ours)
    with pytest.raises(error) as caught:
        pki.verify_certificate(
            certificate, ours.root, SITE, Purpose.SIGNING, **({"now_ms": NOW, "where": "advert of vienna"} | options)
        )
    assert caught.value.where == "advert of vienna"
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("bad", "error", "check"), BAD, ids=[row[0].__name__ for row in BAD])
def test_each_fault_has_its_error_twin(
    ours: Authority, bad: Any, error: type[errors.ToolkitError], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pki, check, lambda *args, **kwargs: None)
    certificate, options = bad(ours)
    pki.verify_certificate(certificate, ours.root, SITE, Purpose.SIGNING, **({"now_ms": NOW} | options))


def test_a_client_certificate_is_no_server_certificate(ours: Authority) -> None:
    with pytest.raises(errors.CertificatePurposeMismatch):
        pki.check_purpose(ours.issue(Purpose.TLS, SITE), Purpose.TLS, Role.COORDINATOR, "server")


def test_a_clock_that_is_minutes_behind_does_no_harm(ours: Authority) -> None:
    certificate = ours.issue(Purpose.TLS)
    pki.verify_certificate(certificate, ours.root, SITE, Purpose.TLS, now_ms=NOW - 30 * 60_000)


def test_a_dead_root_confirms_nobody(ours: Authority) -> None:
    certificate = ours.issue(Purpose.SIGNING, days=10 * pki.ROOT_DAYS)
    assert certificate.not_valid_after_utc == ours.root.not_valid_after_utc
    with pytest.raises(errors.CertificateExpired, match="root certificate"):
        pki.verify_certificate(certificate, ours.root, SITE, Purpose.SIGNING, now_ms=NOW + (pki.ROOT_DAYS + 1) * DAY)
    with pytest.raises(errors.CertificateExpired, match="root certificate"):
        ours.issue(Purpose.TLS, now_ms=NOW + (pki.ROOT_DAYS + 1) * DAY)


def test_the_root_itself_is_no_member(ours: Authority) -> None:
    for purpose in Purpose:
        with pytest.raises(errors.CertificateError):
            pki.verify_certificate(ours.root, ours.root, SITE, purpose, now_ms=NOW)


def test_a_member_cannot_issue(ours: Authority) -> None:
    member = pki.new_tls_key()
    sub_ca = pki.issue(ours.key, ours.root, SITE, Purpose.TLS, member.public_key(), now_ms=NOW)
    forged = pki.issue(member, sub_ca, SITE, Purpose.TLS, pki.new_tls_key().public_key(), now_ms=NOW)
    with pytest.raises(errors.CertificateUntrusted):
        pki.verify_certificate(forged, ours.root, SITE, Purpose.TLS, now_ms=NOW)


def test_requests_prove_possession_of_the_key() -> None:
    key = pki.new_tls_key()
    pem = pki.make_request(key, "hub", ["hub.example.org", "10.0.0.7"])
    request = pki.read_request(pem, Purpose.TLS)
    assert (request.member, request.hosts) == ("hub", ("hub.example.org", "10.0.0.7"))
    assert request.public_key == key.public_key()
    signing = pki.read_request(pki.make_request(pki.new_signing_key(), "hub"), Purpose.SIGNING)
    assert signing.hosts == ()
    with pytest.raises(errors.CertificatePurposeMismatch, match="Ed25519"):
        pki.read_request(pem, Purpose.SIGNING)
    with pytest.raises(errors.CertificateError, match="not a PEM"):
        pki.read_request("hello", Purpose.TLS)


def stolen_key_request() -> str:
    """A request for somebody else's public key, under a signature of ours: all that a thief of a name can make."""
    honest = x509.load_pem_x509_csr(pki.make_request(pki.new_signing_key(), "vienna").encode())
    mine = x509.load_pem_x509_csr(pki.make_request(pki.new_signing_key(), "vienna").encode())
    der = honest.public_bytes(pki.serialization.Encoding.DER).replace(honest.signature, mine.signature)
    return x509.load_der_x509_csr(der).public_bytes(pki.serialization.Encoding.PEM).decode()


def test_a_request_for_a_key_one_does_not_hold_is_refused() -> None:
    with pytest.raises(errors.CertificateError, match="not signed with the key"):
        pki.read_request(stolen_key_request(), Purpose.SIGNING)


def test_a_request_for_a_key_one_does_not_hold_is_refused_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pki, "check_possession", lambda request, where: None)
    pki.read_request(stolen_key_request(), Purpose.SIGNING)


@pytest.mark.parametrize("name", ["", "Wien", "a b", "-a", "a-", "a" * 64, "ü", "a:b", "a/b", "../x"])
def test_names_that_could_confuse_are_refused(name: str) -> None:
    with pytest.raises(errors.ConfigError, match="not allowed"):
        Subject(federation="lesions", role=Role.SITE, member=name)


def test_foreign_certificates_raise_our_errors(ours: Authority) -> None:
    with pytest.raises(errors.CertificateError, match="not a PEM"):
        pki.read_certificate("nonsense")
    with pytest.raises(errors.CertificateError, match="2 certificates"):
        pki.read_certificate(pki.to_pem(ours.root) * 2)
    with pytest.raises(errors.CertificateNameMismatch):
        pki.subject_of(_bare(ours))
    with pytest.raises(errors.CertificatePurposeMismatch, match="extension"):
        pki.check_purpose(ours.root, Purpose.TLS, Role.SITE, "x")
    other_curve = ec.generate_private_key(ec.SECP384R1())
    with pytest.raises(errors.CertificateError, match="neither Ed25519 nor ECDSA P-256"):
        pki.certificate_key(pki.make_root(other_curve, "lesions", now_ms=NOW))
    with pytest.raises(errors.CertificatePurposeMismatch, match="P-256"):
        pki.read_request(pki.make_request(other_curve, "hub"), Purpose.TLS)
    with pytest.raises(errors.CertificateError, match="names no member"):
        pki.read_request(_nameless_request(), Purpose.SIGNING)
    with pytest.raises(errors.ConfigError, match="do not belong together"):
        pki.issue(pki.new_tls_key(), ours.root, SITE, Purpose.TLS, pki.new_tls_key().public_key(), now_ms=NOW)
    with pytest.raises(errors.ConfigError, match="neither a host name"):
        pki.make_request(pki.new_tls_key(), "hub", ["no such host"])


def _nameless_request() -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.sign(pki.new_signing_key(), None)
    return request.public_bytes(pki.serialization.Encoding.PEM).decode()


def _bare(ours: Authority) -> x509.Certificate:
    """A client certificate as another product of the same root would make it: no name of ours in it."""
    builder = pki._builder(ours.root.subject, ours.root.subject, pki.new_tls_key().public_key(), NOW, 10)
    names = x509.SubjectAlternativeName([x509.DNSName("vienna")])
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    return builder.sign(ours.key, pki.hashes.SHA256())
