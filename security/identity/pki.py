"""Certificates of one federation: a root, and under it TLS and signing certificates that never replace each other.

The chain has exactly one link. TLS keys are ECDSA P-256 (what gRPC accepts everywhere), signing keys are Ed25519 with
an extended key usage of their own, so a TLS certificate is never accepted as a signing certificate. Who a certificate
belongs to stands in a URI name, ``urn:lazaret:<federation>:<role>:<id>``. Verification raises; each check is a
function of its own. See docs/consortium.md. At the end: fingerprints that people read out.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lazaret.errors import (
    CertificateError,
    CertificateExpired,
    CertificateNameMismatch,
    CertificateNotYetValid,
    CertificatePurposeMismatch,
    CertificateRevoked,
    CertificateUntrusted,
    ConfigError,
)

Extension = TypeVar("Extension", bound=x509.ExtensionType)
PublicKey: TypeAlias = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey

NAME_PATTERN: Final = r"^[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?$"
# An arc under 2.25 needs no registration: it is a UUID (ITU-T X.667) that we drew once for this purpose.
SIGNING_USAGE: Final = x509.ObjectIdentifier("2.25.147695741438034892461935015198594014753")
# A certificate is valid from an hour before it was made, so that a clock that is a little behind does no harm.
BACKDATE: Final = dt.timedelta(hours=1)
ROOT_DAYS: Final = 3650
MEMBER_DAYS: Final = 365


class Role(StrEnum):
    SITE = "site"
    COORDINATOR = "coordinator"


class Purpose(StrEnum):
    TLS = "tls"
    SIGNING = "signing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Who a certificate speaks for."""

    federation: str
    role: Role
    member: str

    def __post_init__(self) -> None:
        check_name(self.federation, "federation id")
        check_name(self.member, "member id")

    @property
    def urn(self) -> str:
        return f"urn:lazaret:{self.federation}:{self.role}:{self.member}"


def check_name(value: str, what: str) -> str:
    if not re.fullmatch(NAME_PATTERN, value):
        raise ConfigError(
            f"{what} {value!r} is not allowed",
            hint="use 1 to 63 lower-case letters, digits, dots and hyphens, beginning and ending in a letter or digit",
        )
    return value


def new_tls_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def new_signing_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the DER form, in hex: what manifests pin and revocations name."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def key_fingerprint(key: PublicKey) -> str:
    """SHA-256 of SubjectPublicKeyInfo, in hex; it survives a renewal that keeps the key."""
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def read_certificate(pem: str | bytes, where: str = "certificate") -> x509.Certificate:
    """Parse exactly one PEM certificate."""
    data = pem.encode("utf-8", "replace") if isinstance(pem, str) else pem
    try:
        certificates = x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise CertificateError("not a PEM certificate", where=where) from error
    if len(certificates) != 1:
        raise CertificateError(f"{len(certificates)} certificates where one is expected", where=where)
    return certificates[0]


def certificate_key(certificate: x509.Certificate, where: str = "certificate") -> PublicKey:
    """The public key, if it is of one of the two kinds in use here."""
    key = certificate.public_key()
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise CertificateError("key is neither Ed25519 nor ECDSA P-256", where=where)


# Requests


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateRequest:
    """What a checked signing request asks for. Names are claims: the consortium decides whether they are true."""

    public_key: PublicKey
    member: str
    hosts: tuple[str, ...]


def make_request(
    key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey, member: str, hosts: Sequence[str] = ()
) -> str:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_name(member, "member id"))])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM).decode("ascii")


def read_request(pem: str, purpose: Purpose, where: str = "request") -> CertificateRequest:
    """Parse a signing request and check that its maker holds the private key."""
    try:
        request = x509.load_pem_x509_csr(pem.encode("ascii"))
        names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key = request.public_key()
    except ValueError as error:
        raise CertificateError("not a PEM signing request", where=where) from error
    check_possession(request, where)
    wanted = ed25519.Ed25519PublicKey if purpose is Purpose.SIGNING else ec.EllipticCurvePublicKey
    if not isinstance(key, wanted) or (isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name != "secp256r1"):
        raise CertificatePurposeMismatch(
            f"the key of a {purpose} request must be {'Ed25519' if purpose is Purpose.SIGNING else 'ECDSA P-256'}",
            where=where,
        )
    if len(names) != 1:
        raise CertificateError("request names no member", where=where)
    try:
        hosts = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return CertificateRequest(public_key=key, member=str(names[0].value), hosts=())
    listed = [*hosts.get_values_for_type(x509.DNSName), *map(str, hosts.get_values_for_type(x509.IPAddress))]
    return CertificateRequest(public_key=key, member=str(names[0].value), hosts=tuple(listed))


def check_possession(request: x509.CertificateSigningRequest, where: str) -> None:
    if not request.is_signature_valid:
        raise CertificateError("request is not signed with the key in it", where=where)


# Issuing


def make_root(
    key: ec.EllipticCurvePrivateKey, federation: str, *, now_ms: int, days: int = ROOT_DAYS
) -> x509.Certificate:
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, check_name(federation, "federation id")),
            x509.NameAttribute(NameOID.COMMON_NAME, f"{federation} root"[:64]),
        ]
    )
    usage = _usage(certificates=True)
    builder = _builder(name, name, key.public_key(), now_ms, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.sign(key, hashes.SHA256())


def issue(
    root_key: ec.EllipticCurvePrivateKey,
    root: x509.Certificate,
    subject: Subject,
    purpose: Purpose,
    public_key: PublicKey,
    *,
    hosts: Sequence[str] = (),
    now_ms: int,
    days: int = MEMBER_DAYS,
) -> x509.Certificate:
    """A certificate for one member and one purpose, never living longer than the root."""
    if root_key.public_key() != root.public_key():
        raise ConfigError("root key and root certificate do not belong together")
    check_dates(root, now_ms, "root certificate")
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, subject.federation),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, f"{subject.role} {purpose}"),
            x509.NameAttribute(NameOID.COMMON_NAME, subject.member),
        ]
    )
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(subject.urn), *(_host(host) for host in hosts)]
    root_identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key())
    builder = _builder(name, root.subject, public_key, now_ms, days, latest=root.not_valid_after_utc)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(certificates=False), critical=True)
    # Critical, so that software that does not know our usage refuses a signing certificate instead of guessing.
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([_extended_usage(purpose, subject.role)]), critical=purpose is Purpose.SIGNING
    )
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    builder = builder.add_extension(root_identifier, critical=False)
    return builder.sign(root_key, hashes.SHA256())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: PublicKey,
    now_ms: int,
    days: int,
    latest: dt.datetime | None = None,
) -> x509.CertificateBuilder:
    now = _instant(now_ms)
    end = now + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(end if latest is None else min(end, latest))
    )


def _usage(*, certificates: bool) -> x509.KeyUsage:
    # The root also signs manifests, hence digital_signature for both.
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _extended_usage(purpose: Purpose, role: Role) -> x509.ObjectIdentifier:
    if purpose is Purpose.SIGNING:
        return SIGNING_USAGE
    return ExtendedKeyUsageOID.SERVER_AUTH if role is Role.COORDINATOR else ExtendedKeyUsageOID.CLIENT_AUTH


def _host(value: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(value))
    except ValueError:
        if re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", value):
            return x509.DNSName(value)
        raise ConfigError(f"{value!r} is neither a host name nor an address") from None


def _instant(now_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(now_ms // 1000, dt.UTC)


# Verifying


def verify_certificate(
    certificate: x509.Certificate,
    root: x509.Certificate,
    subject: Subject,
    purpose: Purpose,
    *,
    now_ms: int,
    revoked: Collection[str] = (),
    where: str = "certificate",
) -> PublicKey:
    """Return the key if the certificate is this subject's, for this purpose, from this root, today; else raise."""
    check_issuer(certificate, root, where)
    check_dates(root, now_ms, "root certificate")
    check_dates(certificate, now_ms, where)
    check_revoked(certificate, revoked, where)
    check_purpose(certificate, purpose, subject.role, where)
    check_subject(certificate, subject, where)
    return certificate_key(certificate, where)


def check_issuer(certificate: x509.Certificate, root: x509.Certificate, where: str) -> None:
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CertificateUntrusted(
            "certificate was not issued by this federation's root",
            where=where,
            hint="compare the root's fingerprint with the one the consortium published",
        ) from error


def check_dates(certificate: x509.Certificate, now_ms: int, where: str) -> None:
    now = _instant(now_ms)
    if now < certificate.not_valid_before_utc:
        raise CertificateNotYetValid(
            f"valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M}Z, this clock says {now:%Y-%m-%d %H:%M}Z",
            where=where,
            hint="set this machine's clock",
        )
    if now > certificate.not_valid_after_utc:
        raise CertificateExpired(
            f"expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M}Z, this clock says {now:%Y-%m-%d %H:%M}Z",
            where=where,
            hint="check this machine's clock; if it is right, ask the consortium to renew the certificate",
        )


def check_revoked(certificate: x509.Certificate, revoked: Collection[str], where: str) -> None:
    if fingerprint(certificate) in revoked:
        raise CertificateRevoked(
            "certificate was revoked by the consortium", where=where, hint="ask the consortium for a new one"
        )


def check_purpose(certificate: x509.Certificate, purpose: Purpose, role: Role, where: str) -> None:
    usages = _extension(certificate, x509.ExtendedKeyUsage, where)
    constraints = _extension(certificate, x509.BasicConstraints, where)
    key = certificate_key(certificate, where)
    right_key = isinstance(key, ed25519.Ed25519PublicKey) == (purpose is Purpose.SIGNING)
    if list(usages) != [_extended_usage(purpose, role)] or constraints.ca or not right_key:
        raise CertificatePurposeMismatch(
            f"not a {role}'s {purpose} certificate", where=where, hint="TLS and signing certificates are separate files"
        )


def check_subject(certificate: x509.Certificate, subject: Subject, where: str) -> None:
    if subject_of(certificate, where) != subject:
        raise CertificateNameMismatch(f"certificate does not belong to {subject.urn}", where=where)


def subject_of(certificate: x509.Certificate, where: str = "certificate") -> Subject:
    """Who the certificate names: one URI of our form, and the same member as common name."""
    names = _extension(certificate, x509.SubjectAlternativeName, where)
    urns = names.get_values_for_type(x509.UniformResourceIdentifier)
    parts = urns[0].split(":") if len(urns) == 1 else []
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    well_formed = len(parts) == 5 and parts[:2] == ["urn", "lazaret"] and parts[3] in set(Role)
    if not well_formed or [name.value for name in common] != parts[4:]:
        raise CertificateNameMismatch("certificate names no member of a federation", where=where)
    return Subject(federation=parts[2], role=Role(parts[3]), member=parts[4])


def days_left(certificate: x509.Certificate, now_ms: int) -> int:
    return (certificate.not_valid_after_utc - _instant(now_ms)).days


def _extension(certificate: x509.Certificate, kind: type[Extension], where: str) -> Extension:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError) as error:
        raise CertificatePurposeMismatch("certificate does not have a required extension", where=where) from error


# Fingerprints as two people compare them: hexadecimal digits in groups of four, or a short phrase. The phrase is made
# of the first 96 bits, 16 to a word of five letters, consonants and vowels in turn: it can be spoken over a telephone.
# Who wanted to have another root or request taken for this one would need about 2^96 trials.

WORDS: Final = 6
_CONSONANTS: Final = "bdfghjklmnprstvz"
_VOWELS: Final = "aiou"


def grouped(text: str) -> str:
    """Hex in groups of four, as people read it out."""
    return " ".join(text[at : at + 4] for at in range(0, len(text), 4))


def phrase(fingerprint: str) -> str:
    """Six words for a fingerprint of 64 hexadecimal digits."""
    bits = bytes.fromhex(_bare(fingerprint))
    if len(bits) < 2 * WORDS:
        raise ValueError("a fingerprint is too short for a phrase")
    return " ".join(_word(int.from_bytes(bits[2 * at : 2 * at + 2])) for at in range(WORDS))


def _word(value: int) -> str:
    """16 bits as five letters: 4, 2, 4, 2 and 4 of them."""
    consonants, vowels = (value >> 12, (value >> 6) & 15, value & 15), ((value >> 10) & 3, (value >> 4) & 3)
    first, second, third = (_CONSONANTS[at] for at in consonants)
    return first + _VOWELS[vowels[0]] + second + _VOWELS[vowels[1]] + third


def same_fingerprint(fingerprint: str, announced: str) -> bool:
    """Whether what a person has typed is this fingerprint: all its digits, or all words of its phrase."""
    known = _bare(fingerprint)
    if len(known) != 64:
        return False
    return _bare(announced) in (known, _bare(phrase(known)))


def _bare(text: str) -> str:
    return "".join(text.split()).replace(":", "").replace("-", "").lower()
