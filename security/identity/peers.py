"""Who is at the other end of a connection: checks of a TLS certificate against the manifest in force.

A certificate is of the consortium's root, or of a site's own authority.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID

from lazaret.errors import CertificateNameMismatch, CertificatePurposeMismatch, CertificateUntrusted, ManifestRejected
from security.identity import pki
from security.identity.manifest import Manifest, Member, TlsIssuer
from security.identity.pki import Purpose, Role, Subject


def check_tls_peer(
    manifest: Manifest, root: x509.Certificate, certificate: x509.Certificate, *, now_ms: int
) -> Subject:
    """Who a TLS peer is: its certificate is good today and its key is pinned for that very member."""
    if (member := claimed(manifest, certificate)) is not None:
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
    check_own(member, certificate, now_ms=now_ms)
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


# TLS certificates of a site's own authority, the hospital's or a step-ca, besides those of the consortium's root. The
# manifest keeps the roster: it lists for such a site the certificate that issues and one host name. What is shown must
# be issued by it, for that name, and for a TLS key that the manifest lists. So the authority can renew certificates on
# its own, and can let nobody else in: neither another host of the hospital nor another hospital.


def read_issuer(issuer: TlsIssuer, where: str) -> x509.Certificate:
    """:raises CertificatePurposeMismatch: if the certificate may not issue others."""
    certificate = pki.read_certificate(issuer.certificate, where)
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        constraints = x509.BasicConstraints(ca=False, path_length=None)
    if not constraints.ca:
        raise CertificatePurposeMismatch(
            "is not the certificate of an authority", where=where, hint="give the one that issues, not one it issued"
        )
    return certificate


def issuers(manifest: Manifest) -> list[x509.Certificate]:
    """Every authority in the roster: whose certificates a coordinator looks at. `check_own` says which it accepts."""
    return [read_issuer(member.tls_issuer, member.id) for member in manifest.roster if member.tls_issuer]


def check_issuers(manifest: Manifest) -> None:
    """A rule of manifests: a name is one site's, and the coordinator, whom sites find by its host, is the root's."""
    where = f"manifest version {manifest.version}"
    if manifest.coordinator.tls_issuer is not None:
        raise ManifestRejected("a coordinator's TLS certificates are issued by the root", where=where)
    issuers(manifest)
    names = [member.tls_issuer.name for member in manifest.roster if member.tls_issuer]
    if len(set(names)) != len(names):
        raise ManifestRejected("two sites have one host name", where=where)


def claimed(manifest: Manifest, certificate: x509.Certificate) -> Member | None:
    """The site whose host name a certificate has; None for certificates of the root, which name a member themselves."""
    names = _names(certificate, x509.UniformResourceIdentifier)
    if any(name.startswith("urn:lazaret:") for name in names):
        return None
    hosts = {name.lower() for name in _names(certificate, x509.DNSName)}
    found = [member for member in manifest.roster if member.tls_issuer and member.tls_issuer.name in hosts]
    return found[0] if len(found) == 1 else None


def check_own(member: Member, certificate: x509.Certificate, *, now_ms: int) -> None:
    """A certificate with the name of a site is of this site's own authority, for a TLS client, today."""
    where = f"TLS certificate of {member.id} by its own authority"
    if member.tls_issuer is None:
        raise CertificateUntrusted("the manifest lists no own authority", where=where)
    check_own_name(member.tls_issuer, certificate, where)
    issuer = read_issuer(member.tls_issuer, where)
    check_own_issuer(certificate, issuer, where)
    pki.check_dates(issuer, now_ms, f"authority of {member.id}")
    pki.check_dates(certificate, now_ms, where)
    check_own_usage(certificate, where)


def check_own_name(issuer: TlsIssuer, certificate: x509.Certificate, where: str) -> None:
    if issuer.name not in {name.lower() for name in _names(certificate, x509.DNSName)}:
        raise CertificateNameMismatch(
            f"certificate is not for {issuer.name}", where=where, hint="have it issued from identity/tls.csr"
        )


def check_own_issuer(certificate: x509.Certificate, issuer: x509.Certificate, where: str) -> None:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CertificateUntrusted(
            "certificate was not issued by the authority that the manifest lists for this site",
            where=where,
            hint="if the authority has a new certificate, the consortium needs a new request and publishes again",
        ) from error


def check_own_usage(certificate: x509.Certificate, where: str) -> None:
    try:
        usages = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        usages = []
    if ExtendedKeyUsageOID.CLIENT_AUTH not in usages:
        raise CertificatePurposeMismatch(
            "certificate is not for TLS clients", where=where, hint="it needs the usage client authentication"
        )


def _names(certificate: x509.Certificate, kind: type[x509.UniformResourceIdentifier] | type[x509.DNSName]) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return []
    return list(names.get_values_for_type(kind))
