"""Who is at the other end of a connection: checks of a TLS certificate against the manifest in force."""

from __future__ import annotations

from cryptography import x509

from lazaret.errors import CertificateNameMismatch
from security.identity import own_issuer, pki
from security.identity.manifest import Manifest, Member
from security.identity.pki import Purpose, Role, Subject


def check_tls_peer(
    manifest: Manifest, root: x509.Certificate, certificate: x509.Certificate, *, now_ms: int
) -> Subject:
    """Who a TLS peer is: its certificate is good today and its key is pinned for that very member."""
    if (member := own_issuer.claimed(manifest, certificate)) is not None:
        return _check_own_peer(manifest, member, certificate, now_ms=now_ms)
    subject = pki.subject_of(certificate, "TLS certificate of the peer")
    where = f"TLS certificate of {subject.role} {subject.member}"
    wanted = Subject(federation=manifest.federation, role=subject.role, member=subject.member)
    key = pki.verify_certificate(
        certificate, root, wanted, Purpose.TLS, now_ms=now_ms, revoked=manifest.revoked, where=where
    )
    check_pinned(manifest, subject, pki.key_fingerprint(key), where)
    return subject


def _check_own_peer(manifest: Manifest, member: Member, certificate: x509.Certificate, *, now_ms: int) -> Subject:
    """A site that shows a certificate of its own authority."""
    where = f"TLS certificate of site {member.id} by its own authority"
    own_issuer.check_own(member, certificate, now_ms=now_ms)
    pki.check_revoked(certificate, manifest.revoked, where)
    subject = Subject(federation=manifest.federation, role=Role.SITE, member=member.id)
    check_pinned(manifest, subject, pki.key_fingerprint(pki.certificate_key(certificate, where)), where)
    return subject


def check_coordinator_certificate(
    federation: str,
    root: x509.Certificate,
    certificate: x509.Certificate,
    *,
    revoked: frozenset[str] = frozenset(),
    now_ms: int,
) -> str:
    """A TLS certificate of this federation's coordinator, good today; returns SHA-256 of its key.

    It does not look for a pin: a renewed key is in a manifest that a site may only get over this connection.
    `check_coordinator_pin` must follow before anything else is said over it.
    """
    subject = pki.subject_of(certificate, "TLS certificate of the coordinator")
    where = f"TLS certificate of {subject.role} {subject.member}"
    if subject.role is not Role.COORDINATOR:
        raise CertificateNameMismatch("the other end is not a coordinator", hint="is [coordinator] address right?")
    wanted = Subject(federation=federation, role=Role.COORDINATOR, member=subject.member)
    key = pki.verify_certificate(certificate, root, wanted, Purpose.TLS, now_ms=now_ms, revoked=revoked, where=where)
    return pki.key_fingerprint(key)


def check_coordinator_pin(manifest: Manifest, pin: str) -> None:
    """The other end holds a TLS key that the manifest in force lists for the coordinator.

    A certificate of this root is not enough: an old key that was stolen and replaced still has one until it expires.
    """
    if pin not in manifest.coordinator.tls_keys:
        raise CertificateNameMismatch(
            f"the coordinator's TLS key is not in manifest version {manifest.version}",
            where="TLS certificate of the coordinator",
            hint="after a renewal the coordinator needs the new manifest too; if it was not renewed, inform the "
            "consortium: somebody answers with an old or foreign key",
        )


def check_pinned(manifest: Manifest, subject: Subject, pin: str, where: str) -> None:
    members = (manifest.coordinator,) if subject.role is Role.COORDINATOR else manifest.roster
    if not any(member.id == subject.member and pin in member.tls_keys for member in members):
        raise CertificateNameMismatch(
            f"not in the roster of manifest version {manifest.version}",
            where=where,
            hint="after enrolment or renewal the consortium must publish a new manifest",
        )


def check_signing_dates(member: Member, *, now_ms: int) -> None:
    """A member may sign today."""
    pki.check_dates(member.certificate, now_ms, f"signing certificate of {member.id}")
