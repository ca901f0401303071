"""A hospital's own authority issues TLS certificates: for the listed name and key, and for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from lazaret import errors
from security.identity import enrolment, peers, pki
from security.identity.acceptance import open_manifest
from security.identity.enrolment import Identity
from security.identity.enrolment_files import EnrolmentRequest, check_request
from security.identity.manifest import Manifest, TlsIssuer
from security.identity.pki import Role
from tests.support.consortium_world import DAY, NOW, World, subject
from tests.support.own_authority import HOST, OwnAuthority


class Hospital:
    """A federation in which graz has its own authority."""

    def __init__(self, folder: Path) -> None:
        self.authority = OwnAuthority()
        self.world = World.make(folder)
        request = enrolment.renew(self.world.identity("graz"), Role.SITE, issuer=self.authority.listed())
        self.world.authority.renew(self.world.key, "graz", request, now_ms=NOW, days=365)
        self.world.install("graz")
        self.manifest = self.world.publish()

    @property
    def identity(self) -> Identity:
        return self.world.identity("graz")

    def key(self, member: str = "graz") -> Any:
        return self.world.identity(member).tls_certificate().public_key()

    def check(self, certificate: x509.Certificate, *, now_ms: int = NOW) -> pki.Subject:
        return peers.check_tls_peer(self.manifest, self.world.authority.root, certificate, now_ms=now_ms)


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Hospital:
    return Hospital(tmp_path_factory.mktemp("hospital"))


def test_a_site_is_known_by_a_certificate_of_its_own_authority(hospital: Hospital) -> None:
    csr = x509.load_pem_x509_csr(hospital.identity.own_request_path.read_bytes())
    assert csr.public_key() == hospital.key() and csr.is_signature_valid
    certificate = hospital.authority.issue(csr.public_key(), HOST, "another.graz.example")
    assert hospital.check(certificate) == subject("graz")
    assert hospital.check(hospital.identity.tls_certificate()) == subject("graz")  # the root's is good as well
    opened = open_manifest(hospital.world.published(), hospital.world.authority.root, now_ms=NOW)
    assert opened.site("graz").tls_issuer == hospital.authority.listed() and opened.site("linz").tls_issuer is None


def other_name(it: Hospital) -> x509.Certificate:
    """Another host of the hospital, with a key and a certificate of its own."""
    return it.authority.issue(pki.new_tls_key().public_key(), "printer.graz.example")


def other_key(it: Hospital) -> x509.Certificate:
    """Somebody whom the hospital's authority gave the agent's name."""
    return it.authority.issue(pki.new_tls_key().public_key(), HOST)


def other_authority(it: Hospital) -> x509.Certificate:
    return OwnAuthority().issue(it.key(), HOST)


def server_only(it: Hospital) -> x509.Certificate:
    return it.authority.issue(it.key(), HOST, usage=ExtendedKeyUsageOID.SERVER_AUTH)


def another_hospital(it: Hospital) -> x509.Certificate:
    """The authority of graz makes a certificate that names linz as the root would."""
    return it.authority.issue(it.key("linz"), HOST, urn=subject("linz").urn)


REFUSED = [
    (other_name, errors.CertificateError),
    (other_key, errors.CertificateNameMismatch),
    (other_authority, errors.CertificateUntrusted),
    (server_only, errors.CertificatePurposeMismatch),
    (another_hospital, errors.CertificateError),
]


@pytest.mark.parametrize(("peer", "error"), REFUSED)
def test_what_the_authority_may_not_do(hospital: Hospital, peer: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        hospital.check(peer(hospital))


def any_claim(manifest: Manifest, certificate: x509.Certificate) -> Any:
    return manifest.site("graz")


@pytest.mark.parametrize(
    ("peer", "off"),
    [
        (other_name, ((peers, "claimed", any_claim), (peers, "check_own_name"), (peers, "check_pinned"))),
        (other_key, ((peers, "check_pinned"),)),
        (other_authority, ((peers, "check_own_issuer"),)),
        (server_only, ((peers, "check_own_usage"),)),
        (another_hospital, ((peers, "claimed", any_claim), (peers, "check_pinned"))),
    ],
)
def test_what_the_authority_may_not_do_twin(
    hospital: Hospital, peer: Any, off: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name, *instead in off:
        monkeypatch.setattr(place, name, instead[0] if instead else lambda *args, **more: None)
    assert hospital.check(peer(hospital)) == subject("graz")


def test_another_name_alone_is_refused_with_the_right_key(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is a check of its own: the key of the agent does not make up for it."""
    certificate = hospital.authority.issue(hospital.key(), "printer.graz.example")
    with pytest.raises(errors.CertificateNameMismatch):
        hospital.check(certificate)
    with pytest.raises(errors.CertificateNameMismatch, match=HOST):
        peers.check_own(hospital.manifest.site("graz"), certificate, now_ms=NOW)
    monkeypatch.setattr(peers, "check_own_name", lambda *args: None)
    peers.check_own(hospital.manifest.site("graz"), certificate, now_ms=NOW)  # the twin


def test_days_count(hospital: Hospital) -> None:
    certificate = hospital.authority.issue(hospital.key(), HOST)
    with pytest.raises(errors.CertificateExpired):
        hospital.check(certificate, now_ms=NOW + 2 * DAY)


def test_an_authority_whose_own_certificate_has_ended_lets_nobody_in(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although what it issued has not: who keeps its key may not have looked after it any more."""
    certificate, graz = hospital.authority.issue(hospital.key(), HOST, days=4000), hospital.manifest.site("graz")
    with pytest.raises(errors.CertificateExpired, match="authority of graz"):
        peers.check_own(graz, certificate, now_ms=NOW + 3700 * DAY)
    check = pki.check_dates
    ignoring = lambda found, now, where: None if found == hospital.authority.certificate else check(found, now, where)  # noqa: E731
    monkeypatch.setattr(pki, "check_dates", ignoring)
    peers.check_own(graz, certificate, now_ms=NOW + 3700 * DAY)  # the twin


def test_a_site_shows_it_once_it_is_there_and_for_the_key_in_force(tmp_path: Path) -> None:
    it = Hospital(tmp_path)
    identity = it.identity
    assert identity.shown_tls_path() == identity.tls_path
    identity.own_tls_path.write_text(pki.to_pem(other_key(it)))
    assert identity.shown_tls_path() == identity.tls_path
    identity.own_tls_path.write_text(pki.to_pem(it.authority.issue(it.key(), HOST)))
    assert identity.shown_tls_path() == identity.own_tls_path
    identity.check_shown(it.manifest, now_ms=NOW)
    with pytest.raises(errors.CertificateExpired):
        identity.check_shown(it.manifest, now_ms=NOW + 2 * DAY)
    # A renewal asks the own authority again, under the same name, and the consortium keeps what it knows.
    renewal = enrolment.renew(identity, Role.SITE)
    asked = x509.load_pem_x509_csr(identity.own_request_path.read_bytes())
    names = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [HOST] and asked.public_key() != it.key()
    record = it.world.authority.renew(it.world.key, "graz", renewal, now_ms=NOW, days=365)
    assert record.tls_issuer == it.authority.listed()


def test_requests_and_manifests_with_a_wrong_authority_are_refused(tmp_path: Path, hospital: Hospital) -> None:
    leaf = TlsIssuer(certificate=pki.to_pem(hospital.authority.issue(hospital.key(), HOST)), name=HOST)
    request = Identity(folder=tmp_path / "wels").create(subject("wels"), issuer=leaf)
    with pytest.raises(errors.CertificatePurposeMismatch, match="not the certificate of an authority"):
        check_request(request)
    hub = Identity(folder=tmp_path / "hub").create(
        subject("hub", Role.COORDINATOR), hosts=("localhost",), issuer=hospital.authority.listed()
    )
    with pytest.raises(errors.CertificateNameMismatch, match="only a site"):
        check_request(hub)
    manifest, issuer = hospital.manifest, hospital.authority.listed()
    twice = [member.model_copy(update={"tls_issuer": issuer}) for member in manifest.roster]
    for update in (
        {"roster": tuple(twice)},
        {"coordinator": manifest.coordinator.model_copy(update={"tls_issuer": issuer})},
    ):
        with pytest.raises(errors.ManifestRejected):
            peers.check_issuers(manifest.model_copy(update=update))


def test_without_an_own_authority_no_byte_is_different(hospital: Hospital, tmp_path: Path) -> None:
    request = Identity(folder=tmp_path / "wels").create(subject("wels"))
    assert b"tls_issuer" not in request.to_bytes() and request.tls_issuer is None
    assert EnrolmentRequest.from_bytes(request.to_bytes(), "test") == request
    assert "tls_issuer" not in hospital.manifest.site("linz").model_dump()
    with_it = hospital.manifest.site("graz")
    assert with_it.model_dump()["tls_issuer"]["name"] == HOST
    # A changed authority changes what the telephone compares.
    own = Identity(folder=tmp_path / "steyr").create(subject("steyr"), issuer=hospital.authority.listed("a.example"))
    assert own.model_copy(update={"tls_issuer": hospital.authority.listed("b.example")}).fingerprint != own.fingerprint
