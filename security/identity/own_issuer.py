"""TLS certificates of a site's own authority, the hospital's or a step-ca, besides those of the consortium's root.

The manifest keeps the roster: it lists for such a site the certificate that issues and one host name. What is shown
must be issued by it, for that name, and for a TLS key that the manifest lists. So the authority can renew certificates
on its own, and can let nobody else in: neither another host of the hospital nor another hospital.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID

from lazaret.errors import CertificateNameMismatch, CertificatePurposeMismatch, CertificateUntrusted, ManifestRejected
from security.identity import pki
from security.identity.manifest import Manifest, Member, TlsIssuer


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
