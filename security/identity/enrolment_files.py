"""Files between a member and the consortium: the request, the answer, and a kit with all that a member needs.

Request and answer are small canonical JSON files for a mail or a USB stick. The request contains two certificate
signing requests. Nothing in them is secret; people compare a fingerprint over another channel to know that they are
genuine.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field, ValidationError

from lazaret.errors import CertificateNameMismatch, CodecError, ConfigError, PolicyViolation, VerificationFailed
from lazaret.files import write_atomically
from lazaret.terminal import can_ask, say
from security import labels
from security.crypto import encoding
from security.crypto.signing import VerifyKey
from security.identity import pki
from security.identity.acceptance import accept_newer, open_manifest
from security.identity.manifest import Document, Hash, MayNameIssuer, MlDsaKey, Name, describe
from security.identity.peers import read_issuer
from security.identity.pki import Purpose, Role, Subject, grouped, phrase
from security.log.note import KeyType, VerifierKey

if TYPE_CHECKING:
    from security.identity.enrolment import Identity

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


# A kit: everything that one member needs from the consortium, in one file.
#
#     answer.json          the member's certificates, and the root
#     manifest.json        the signed manifest
#     initial.safetensors  the model that everybody starts from
#     kit.json             the format, and the coordinator's address
#
# A kit is an archive without compression and without any other entry, so that reading one costs no more than its size.
# It needs no signature of its own: the certificates and the manifest are signed under the root, the manifest holds the
# model's digest, and the root is compared over another channel (`pki.phrase`). The address is a convenience: who
# answers there has to own the TLS key that the manifest lists.

KIT_FORMAT: Final = "lazaret-kit/1"
MAX_KIT: Final = 4 << 30
_KIT_FILES: Final = {"answer.json": 1 << 16, "manifest.json": 1 << 24, "kit.json": 1 << 12}
_KIT_MODEL: Final = "initial.safetensors"
_KIT_HINT: Final = "the consortium's `kit` writes it, as kits/NAME.kit; was it cut off on its way?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """What is in the file, as it is: nothing is checked before `install`."""

    answer: EnrolmentAnswer
    manifest: bytes
    model: bytes
    address: str

    def to_bytes(self) -> bytes:
        """The same bytes for the same content: entries have no date."""
        about = json.dumps({"address": self.address, "format": KIT_FORMAT}, sort_keys=True).encode()
        content = {
            "answer.json": self.answer.to_bytes(),
            "manifest.json": self.manifest,
            _KIT_MODEL: self.model,
            "kit.json": about,
        }
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for name, data in content.items():
                archive.writestr(zipfile.ZipInfo(name), data)
        return packed.getvalue()

    @classmethod
    def read(cls, path: Path) -> Kit:
        """:raises ConfigError: if the file is no kit of this version."""
        try:
            if path.stat().st_size > MAX_KIT:
                raise ConfigError("is larger than a kit may be", where=str(path), hint=_KIT_HINT)
            with zipfile.ZipFile(path) as archive:
                content = {entry.filename: _content(archive, entry, path) for entry in archive.infolist()}
        except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
            # The last two for bytes that call an entry encrypted, of a later format, or its name something else.
            raise ConfigError(f"the kit cannot be read: {error}", where=str(path), hint=_KIT_HINT) from None
        if content.keys() != {*_KIT_FILES, _KIT_MODEL}:
            raise ConfigError("is not a kit: other files are in it", where=str(path), hint=_KIT_HINT)
        try:
            about = json.loads(content["kit.json"])
            if about["format"] != KIT_FORMAT or not isinstance(about["address"], str):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"is not a kit of the format {KIT_FORMAT}", where=str(path), hint=_KIT_HINT) from None
        answer = EnrolmentAnswer.from_bytes(content["answer.json"], f"{path}: answer.json")
        model, manifest = content[_KIT_MODEL], content["manifest.json"]
        return cls(answer=answer, manifest=manifest, model=model, address=about["address"])

    @property
    def root_fingerprint(self) -> str:
        return pki.fingerprint(pki.read_certificate(self.answer.root_certificate, "root certificate in the kit"))

    def install(
        self, identity: Identity, model_path: Path, *, root_fingerprint: str | None, now_ms: int
    ) -> Iterator[str]:
        """Put everything into place, after everything was checked: a kit that is wrong anywhere changes nothing.

        :raises ToolkitError: by the check that failed.
        """
        root = pki.read_certificate(self.answer.root_certificate, "root certificate in the kit")
        manifest = open_manifest(self.manifest, root, now_ms=now_ms, where="manifest in the kit")
        if all(self.answer.member != member.id for member in manifest.members):
            raise PolicyViolation(
                f"the manifest does not list {self.answer.member}",
                where="manifest in the kit",
                hint="ask the consortium to publish a manifest with this member, and for a new kit",
            )
        if identity.root_path.exists():
            accept_newer(identity.manifest(now_ms=now_ms), manifest)
        if _sha256(self.model) != manifest.model.initial_file:
            raise VerificationFailed(
                "the model is not the one that the manifest names", where="model in the kit", hint=_KIT_HINT
            )
        if model_path.exists() and _sha256(model_path.read_bytes()) != manifest.model.initial_file:
            raise ConfigError(
                "there is another model already", where=str(model_path), hint="move it away; the kit brings its own"
            )
        identity.install(self.answer, root_fingerprint=root_fingerprint, now_ms=now_ms)
        yield f"certificates of {self.answer.member} installed"
        write_atomically(model_path, self.model)
        accepted = identity.install_manifest(self.manifest, now_ms=now_ms)
        yield f"manifest version {accepted.version} of {accepted.federation} is in force; the model is {model_path}"


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> bytes:
    most = _KIT_FILES.get(entry.filename, MAX_KIT)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
        raise ConfigError(f"entry {entry.filename[:50]!r} is too large, or compressed", where=str(path), hint=_KIT_HINT)
    return archive.read(entry)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def kit_in(path: Path | None) -> Kit | None:
    """The kit that a member was given; None if the file is a single answer."""
    if path is None or not read_file(path, hint=_KIT_HINT).startswith(b"PK\x03\x04"):
        return None
    return Kit.read(path)


def compared_root(kit: Kit, identity: Identity, announced: str | None) -> str | None:
    """The fingerprint that a person has confirmed: typed, or on a terminal compared with what the consortium reads out.

    None where the root is known here already, or nobody can be asked; `Kit.install` refuses a new root then.
    """
    if announced is not None or identity.root_path.exists():
        return announced
    return ask_about_root(kit.answer.federation, kit.root_fingerprint)


def ask_about_root(federation: str, fingerprint: str) -> str | None:
    """The fingerprint, once a person has compared it; None where nobody can be asked."""
    if not can_ask():
        return None
    say(f"root of {federation}: {phrase(fingerprint)}")
    click.confirm("does the consortium read out the same, over the telephone?", abort=True, err=True)
    return fingerprint
