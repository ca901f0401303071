"""Request and answer: what a member asks the consortium for, and what it gets.

Small canonical JSON files for a mail or a USB stick. The request contains two certificate signing requests. Nothing in
them is secret; people compare a fingerprint over another channel to know that they are genuine.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field, ValidationError

from lazaret.errors import CertificateNameMismatch, CodecError, ConfigError, VerificationFailed
from security import labels
from security.crypto import encoding
from security.crypto.signing import VerifyKey
from security.identity import pki
from security.identity.manifest import Document, Hash, MayNameIssuer, MlDsaKey, Name, describe
from security.identity.peers import read_issuer
from security.identity.pki import Purpose, Role, Subject, grouped
from security.log.note import KeyType, VerifierKey

MAX_DOCUMENT: Final = 1024 * 1024
Pem = Annotated[str, Field(max_length=4096)]
SignatureText = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def origin(subject: Subject) -> str:
    """The name of a party's privacy log, and of its root key."""
    return f"{subject.member}.{subject.federation}/audit"


def witness_name(subject: Subject) -> str:
    """The name of the key with which a party cosigns the logs of others."""
    return f"{subject.member}.{subject.federation}/witness"


class BundleFile(Document):
    """A small canonical JSON document that people carry between machines.

    :cvar source: who makes it, for one who does not have it.
    """

    source: ClassVar[str] = "check the path"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        if len(data) > MAX_DOCUMENT:
            raise ConfigError(f"file is larger than {MAX_DOCUMENT} bytes", where=where)
        try:
            value = encoding.loads(data.removesuffix(b"\n"))
            return cls.model_validate_json(encoding.dumps(value))
        except CodecError as error:
            hint = f"it may be cut off or edited; {cls.source}"
            raise ConfigError(f"file is {error.message}", where=where, hint=hint) from error
        except ValidationError as error:
            raise ConfigError(describe(error), where=where, hint=f"is it the right file? {cls.source}") from None

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.from_bytes(read_file(path, hint=cls.source), str(path))

    def to_bytes(self) -> bytes:
        return encoding.dumps(self.model_dump(mode="json")) + b"\n"


class EnrolmentRequest(BundleFile, MayNameIssuer):
    """What a new or renewing member asks for. Its fingerprint is read out over another channel, such as a telephone.

    `signature` is by the key to be certified, `renewal` by the one that is certified now: together they say that the
    holder of the old key wants exactly these new ones. A site may name an authority of its own for TLS certificates.
    """

    source: ClassVar[str] = "the member's `init` or `renew` writes it, as identity/request.json"

    format: Literal["lazaret-enrolment-request/1"] = "lazaret-enrolment-request/1"
    federation: Name
    role: Literal["site", "coordinator"]
    member: Name
    tls_request: Pem
    signing_request: Pem
    audit_root: str
    cosigner: str
    draw: Hash
    log_ml_dsa: MlDsaKey = None
    signature: SignatureText | None = None
    renewal: SignatureText | None = None

    @property
    def subject(self) -> Subject:
        return Subject(federation=self.federation, role=Role(self.role), member=self.member)

    @property
    def digest(self) -> bytes:
        body: dict[str, Any] = self.model_dump(mode="json", exclude={"signature", "renewal"})
        return hashlib.sha256(labels.ENROLMENT + encoding.dumps(body)).digest()

    @property
    def fingerprint(self) -> str:
        return grouped(self.digest.hex())


class EnrolmentAnswer(BundleFile):
    """The consortium's reply: the root, and the certificates that were asked for."""

    source: ClassVar[str] = "the consortium's `enroll` or `renew` writes it, as answers/NAME.json, and sends it"

    format: Literal["lazaret-enrolment-answer/1"] = "lazaret-enrolment-answer/1"
    federation: Name
    role: Literal["site", "coordinator"]
    member: Name
    root_certificate: Pem
    tls_certificate: Pem
    signing_certificate: Pem

    @property
    def subject(self) -> Subject:
        return Subject(federation=self.federation, role=Role(self.role), member=self.member)


def check_request(request: EnrolmentRequest) -> tuple[pki.CertificateRequest, pki.CertificateRequest]:
    """The two signing requests inside, if their maker holds both keys and names itself the same everywhere."""
    where = f"request of {request.member}"
    tls = pki.read_request(request.tls_request, Purpose.TLS, where)
    signing = pki.read_request(request.signing_request, Purpose.SIGNING, where)
    if {tls.member, signing.member} != {request.member}:
        raise CertificateNameMismatch("the signing requests are for another member", where=where)
    if tls.hosts and request.subject.role is not Role.COORDINATOR:
        raise CertificateNameMismatch("only a coordinator may ask for host names", where=where)
    if request.tls_issuer is not None:
        if request.subject.role is not Role.SITE:
            raise CertificateNameMismatch("only a site may name an authority of its own", where=where)
        read_issuer(request.tls_issuer, where)
    check_request_signature(request, signing, where)
    root, cosigner = VerifierKey.parse(request.audit_root), VerifierKey.parse(request.cosigner)
    names = (origin(request.subject), witness_name(request.subject))
    if (root.name, cosigner.name) != names or (root.kind, cosigner.kind) != (KeyType.LOG, KeyType.COSIGNER):
        raise CertificateNameMismatch("the log keys are not named after this member", where=where)
    return tls, signing


def check_request_signature(request: EnrolmentRequest, signing: pki.CertificateRequest, where: str) -> None:
    """The request is unchanged: no log key or TLS request was exchanged on the way."""
    if request.signature is None or not isinstance(signing.public_key, Ed25519PublicKey):
        raise VerificationFailed("the request is not signed", where=where)
    key = VerifyKey(signing.public_key.public_bytes_raw())
    key.verify(bytes.fromhex(request.signature), labels.SIGN_ENROLMENT, request.member, request.digest)


def read_file(path: Path, *, hint: str = "check the path") -> bytes:
    """:param hint: where the file comes from, for one who does not have it."""
    try:
        with open(path, "rb") as file:
            return file.read(8 * 1024 * 1024)
    except FileNotFoundError as error:
        raise ConfigError("file not found", where=str(path), hint=hint) from error
    except OSError as error:
        reason = f"file cannot be read: {(error.strerror or 'the disk reports an error').lower()}"
        raise ConfigError(reason, where=str(path), hint="is the path right, and may this user read it?") from error
