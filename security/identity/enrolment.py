"""How a site or a coordinator joins: a request to the consortium, its answer, and the identity folder.

Private keys never leave the folder in which they are made. The name of a key file contains the start of its public
key's hash, and the certificate decides which one is used: replacing a certificate is the one atomic step of a renewal,
and a round that began under the old certificate can still be finished.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field, ValidationError

from lazaret import files
from lazaret.errors import CertificateNameMismatch, CertificateUntrusted, CodecError, ConfigError, VerificationFailed
from security import labels
from security.crypto import encoding
from security.crypto.signing import SigningKey, VerifyKey
from security.identity import keystore, pki
from security.identity.fingerprints import grouped, same_fingerprint
from security.identity.manifest import Document, Hash, Manifest, Name, describe
from security.identity.pki import Purpose, Role, Subject
from security.identity.rules import accept_newer, open_manifest
from security.log.note import KeyType, NoteSigner, VerifierKey
from security.rng import Randomness, SystemRandomness
from security.secagg.groups import draw_commitment
from security.secrets import Secret

# Request and answer: small canonical JSON files for a mail or a USB stick. The request contains two certificate signing
# requests. Nothing in them is secret; people compare a fingerprint over another channel to know that they are genuine.

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


class EnrolmentRequest(BundleFile):
    """What a new or renewing member asks for. Its fingerprint is read out over another channel, such as a telephone.

    `signature` is by the key to be certified, `renewal` by the one that is certified now: together they say that the
    holder of the old key wants exactly these new ones.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A member's folder: `keys/`, the certificates, the root it trusts and the manifest in force."""

    folder: Path

    @property
    def root_path(self) -> Path:
        return self.folder / "root.pem"

    @property
    def tls_path(self) -> Path:
        return self.folder / "tls.pem"

    @property
    def next_tls_path(self) -> Path:
        """A renewed certificate for a new key, until the coordinator knows that key."""
        return self.folder / "tls-next.pem"

    @property
    def signing_path(self) -> Path:
        return self.folder / "signing.pem"

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def request_path(self) -> Path:
        return self.folder / "request.json"

    def root(self) -> x509.Certificate:
        return self._installed(self.root_path)

    def tls_certificate(self) -> x509.Certificate:
        return self._installed(self.tls_path)

    def _installed(self, path: Path) -> x509.Certificate:
        """A certificate that came with the consortium's answer."""
        if (self.folder / "keys").exists():
            hint = "`join` installs it from the consortium's answer to request.json"
        else:
            hint = "is this the right identity folder? `init` makes keys, `join` installs the consortium's answer"
        return pki.read_certificate(read_file(path, hint=hint), str(path))

    def tls_key_path(self) -> Path:
        return self._key_path(Purpose.TLS, pki.certificate_key(self.tls_certificate()))

    def signing_key(self, certificate: x509.Certificate) -> SigningKey:
        """The key that the manifest's certificate of this member is for; older ones stay usable for older rounds."""
        return keystore.load_signing_key(self._key_path(Purpose.SIGNING, pki.certificate_key(certificate)))

    def audit_root(self, subject: Subject) -> NoteSigner:
        return NoteSigner(origin(subject), keystore.load_ed25519_key(self.folder / "keys" / "audit-root.key"))

    def cosigner(self, subject: Subject) -> NoteSigner:
        key = keystore.load_ed25519_key(self.folder / "keys" / "cosigner.key")
        return NoteSigner(witness_name(subject), key, KeyType.COSIGNER)

    def sealing_key(self) -> bytes:
        """Seals pending updates and agreed replies at rest."""
        return keystore.load_secret(self.folder / "keys" / "sealing.key")

    def data_key(self) -> bytes:
        """Keys the fingerprints of local data in the privacy log, so that nobody can guess what was hashed."""
        return keystore.load_secret(self.folder / "keys" / "data.key")

    def draw_secret(self) -> bytes:
        """This site's part in the draw of groups: committed to at enrolment, opened once all commitments are public."""
        return hmac.digest(self.data_key(), labels.DRAW_SECRET, "sha256")

    def manifest(self, *, now_ms: int) -> Manifest | None:
        if not self.manifest_path.exists():
            return None
        data = read_file(self.manifest_path)
        return open_manifest(data, self.root(), now_ms=now_ms, where=str(self.manifest_path))

    def _key_path(self, purpose: Purpose, key: pki.PublicKey) -> Path:
        return self.folder / "keys" / f"{purpose}-{pki.key_fingerprint(key)[:16]}.key"

    def _new_pair(self, subject: Subject, hosts: Sequence[str]) -> tuple[Ed25519PrivateKey, str, str]:
        """Fresh TLS and signing keys on disk, and the signing requests for them."""
        tls, signing = pki.new_tls_key(), pki.new_signing_key()
        keystore.save_private_key(self._key_path(Purpose.TLS, tls.public_key()), tls)
        keystore.save_private_key(self._key_path(Purpose.SIGNING, signing.public_key()), signing)
        return signing, pki.make_request(tls, subject.member, hosts), pki.make_request(signing, subject.member)

    def create(self, subject: Subject, *, hosts: Sequence[str] = (), rng: Randomness | None = None) -> EnrolmentRequest:
        """Make every key this member needs, and the request for its certificates."""
        rng = rng or SystemRandomness()
        keys = self.folder / "keys"
        if self.request_path.exists() or keys.exists():
            raise ConfigError(
                "this folder already holds an identity",
                where=str(self.folder),
                hint="renew it, or choose another folder",
            )
        keys.mkdir(mode=0o700, parents=True)
        signing, tls_request, signing_request = self._new_pair(subject, hosts)
        for name in ("audit-root", "cosigner"):
            keystore.save_private_key(keys / f"{name}.key", pki.new_signing_key())
        for name in ("sealing", "data"):
            keystore.save_secret(keys / f"{name}.key", rng.bytes(32))
        return self._finish_request(subject, signing, tls_request, signing_request, old=None)

    def renew(self, subject: Subject, *, hosts: Sequence[str] = ()) -> EnrolmentRequest:
        """A request for new TLS and signing keys, signed with the signing key in force. Log keys stay."""
        old = self.signing_key(self._installed(self.signing_path))
        signing, tls_request, signing_request = self._new_pair(subject, hosts)
        return self._finish_request(subject, signing, tls_request, signing_request, old=old)

    def _finish_request(
        self, subject: Subject, signing: Ed25519PrivateKey, tls: str, csr: str, *, old: SigningKey | None
    ) -> EnrolmentRequest:
        unsigned = EnrolmentRequest(
            federation=subject.federation,
            role=subject.role.value,
            member=subject.member,
            tls_request=tls,
            signing_request=csr,
            audit_root=str(self.audit_root(subject).key),
            cosigner=str(self.cosigner(subject).key),
            draw=draw_commitment(subject.member, self.draw_secret()).hex(),
        )
        key = SigningKey(Secret(signing.private_bytes_raw()))
        signature = key.sign(labels.SIGN_ENROLMENT, subject.member, unsigned.digest)
        renewal = old.sign(labels.SIGN_RENEWAL, subject.member, unsigned.digest).hex() if old else None
        request = unsigned.model_copy(update={"signature": signature.hex(), "renewal": renewal})
        files.write_atomically(self.request_path, request.to_bytes())
        return request

    def install(self, answer: EnrolmentAnswer, *, root_fingerprint: str | None, now_ms: int) -> None:
        """Take the consortium's answer, if it is for keys in this folder and from the root that was announced."""
        root = pki.read_certificate(answer.root_certificate, "root certificate in the answer")
        self._check_root(root, root_fingerprint)
        tls = pki.read_certificate(answer.tls_certificate, "TLS certificate in the answer")
        signing = pki.read_certificate(answer.signing_certificate, "signing certificate in the answer")
        for certificate, purpose in ((tls, Purpose.TLS), (signing, Purpose.SIGNING)):
            where = f"{purpose} certificate in the answer"
            key = pki.verify_certificate(certificate, root, answer.subject, purpose, now_ms=now_ms, where=where)
            if not self._key_path(purpose, key).exists():
                raise CertificateNameMismatch(
                    "is for a key that is not in this folder",
                    where=where,
                    hint="was the answer meant for another site?",
                )
        files.write_atomically(self.root_path, answer.root_certificate.encode())
        files.write_atomically(self.signing_path, answer.signing_certificate.encode())
        waits = self._must_wait(answer.subject, tls, now_ms)
        files.write_atomically(self.next_tls_path if waits else self.tls_path, answer.tls_certificate.encode())
        if not waits:
            self.next_tls_path.unlink(missing_ok=True)

    def _must_wait(self, subject: Subject, renewed: x509.Certificate, now_ms: int) -> bool:
        """A site is known by its TLS key: while the manifest in force lists the old one only, the old one is shown."""
        manifest = self.manifest(now_ms=now_ms) if subject.role is Role.SITE and self.tls_path.exists() else None
        if manifest is None or _is_listed(manifest, subject, renewed):
            return False
        return self._still_useful(manifest, subject, now_ms)

    def _still_useful(self, manifest: Manifest, subject: Subject, now_ms: int) -> bool:
        old = self.tls_certificate()
        return _is_listed(manifest, subject, old) and old.not_valid_after_utc.timestamp() * 1000 > now_ms

    def settle_tls(self, *, now_ms: int, known_there: bool = False) -> None:
        """Go over to a renewed TLS certificate, once its key is known to the coordinator or the old one is of no use.

        :param known_there: the manifest in force came from the coordinator, so that there the new key is known too.
        """
        manifest = self.manifest(now_ms=now_ms) if self.next_tls_path.exists() else None
        if manifest is None:
            return
        subject = pki.subject_of(self.tls_certificate(), str(self.tls_path))
        renewed = pki.read_certificate(read_file(self.next_tls_path), str(self.next_tls_path))
        known = known_there and _is_listed(manifest, subject, renewed)
        if known or not self._still_useful(manifest, subject, now_ms):
            self.next_tls_path.replace(self.tls_path)

    def _check_root(self, root: x509.Certificate, announced: str | None) -> None:
        """A root is taken once, on its fingerprint's word, and never changes afterwards. A word that is given counts
        each time: who gives it means to have it checked.
        """
        installed = pki.fingerprint(self.root()) if self.root_path.exists() else None
        known = [fingerprint for fingerprint in (announced, installed) if fingerprint is not None]
        if not known:
            raise ConfigError(
                "the root certificate is new to this folder and no fingerprint was given",
                where=str(self.root_path),
                hint="ask the consortium for the root's fingerprint over the telephone and pass --root-fingerprint",
            )
        for fingerprint in known:
            check_root_fingerprint(root, fingerprint)

    def install_manifest(self, data: bytes, *, now_ms: int) -> Manifest:
        """Take a manifest that is newer than the one in force, on disk before anyone acts on it."""
        current = self.manifest(now_ms=now_ms)
        accepted = self.check_manifest(data, now_ms=now_ms)
        if current is None or accepted.digest != current.digest:
            files.write_atomically(self.manifest_path, data)
        return accepted

    def check_manifest(self, data: bytes, *, now_ms: int) -> Manifest:
        """The manifest that would be in force with this one; nothing is installed."""
        return accept_newer(self.manifest(now_ms=now_ms), open_manifest(data, self.root(), now_ms=now_ms))


def _is_listed(manifest: Manifest, subject: Subject, certificate: x509.Certificate) -> bool:
    pin = pki.key_fingerprint(pki.certificate_key(certificate))
    return any(member.id == subject.member and pin in member.tls_keys for member in manifest.roster)


def renew(identity: Identity, role: Role, *, hosts: Sequence[str] = ()) -> EnrolmentRequest:
    """A request for new keys of a member, for either command. What is in force stays in force until the answer."""
    subject = pki.subject_of(identity.tls_certificate(), str(identity.tls_path))
    if subject.role is not role:
        raise ConfigError(f"the certificate is of a {subject.role}", where=str(identity.tls_path))
    return identity.renew(subject, hosts=hosts)


def join(
    identity: Identity, *, answer: Path | None, root_fingerprint: str | None, manifest: Path | None, now_ms: int
) -> Iterator[str]:
    """Install what the consortium has sent, for either command; says what is in force, as it comes into force."""
    if answer is None and manifest is None:
        raise ConfigError("nothing to install", hint="give the consortium's answer, a manifest, or both")
    if answer is not None:
        identity.install(EnrolmentAnswer.read(answer), root_fingerprint=root_fingerprint, now_ms=now_ms)
        waits = identity.next_tls_path.exists()
        later = "; the new TLS key is used as soon as the coordinator has the manifest that lists it" if waits else ""
        yield f"certificates installed{later}"
    elif root_fingerprint is not None:
        check_root_fingerprint(identity.root(), root_fingerprint)
    if manifest is not None:
        data = read_file(manifest, hint="the consortium's `publish` writes it, as manifest.json, for every member")
        accepted = identity.install_manifest(data, now_ms=now_ms)
        yield f"manifest version {accepted.version} of {accepted.federation} is in force"


def check_root_fingerprint(root: x509.Certificate, known: str) -> None:
    if not same_fingerprint(pki.fingerprint(root), known):
        raise CertificateUntrusted(
            "the root certificate is not the one that was announced",
            where="root certificate",
            hint="stop here; call the consortium and compare fingerprints",
        )


def installed_manifest(identity: Identity, *, now_ms: int, program: str) -> Manifest:
    """The manifest in force.

    :param program: whose command installs one.
    :raises ConfigError: if there is none yet.
    """
    manifest = identity.manifest(now_ms=now_ms)
    if manifest is None:
        raise ConfigError(
            "there is no manifest yet",
            where=str(identity.manifest_path),
            hint=f"install the one the consortium has published: {program} join --manifest FILE",
        )
    return manifest
