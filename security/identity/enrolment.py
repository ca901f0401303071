"""How a site or a coordinator joins: a request to the consortium, its answer, and the identity folder.

Private keys never leave the folder in which they are made. The name of a key file contains the start of its public
key's hash, and the certificate decides which one is used: replacing a certificate is the one atomic step of a renewal,
and a round that began under the old certificate can still be finished.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

from lazaret import files
from lazaret.errors import CertificateNameMismatch, CertificateUntrusted, ConfigError
from security import labels
from security.crypto.signing import SigningKey
from security.identity import keystore, pki, token
from security.identity.acceptance import accept_newer, open_manifest
from security.identity.enrolment_files import EnrolmentAnswer, EnrolmentRequest, origin, read_file, witness_name
from security.identity.manifest import Manifest, TlsIssuer
from security.identity.peers import check_tls_peer
from security.identity.pki import Purpose, Role, Subject, same_fingerprint
from security.identity.token import TokenUri
from security.log.note import KeyType, NoteSigner
from security.rng import Randomness, SystemRandomness
from security.secagg.groups import draw_commitment

ml_dsa_option = click.option(
    "--ml-dsa", is_flag=True, help="Make an ML-DSA-65 key for the privacy log too; the consortium asks for it."
)


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
    def own_tls_path(self) -> Path:
        """A TLS certificate of this site's own authority, which renews it here; it is shown instead of the root's."""
        return self.folder / "tls-own.pem"

    @property
    def own_request_path(self) -> Path:
        return self.folder / "tls.csr"

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

    def shown_tls_path(self) -> Path:
        """The certificate to connect with: the own authority's, if there is one for the key in force."""
        if not self.own_tls_path.exists():
            return self.tls_path
        own = pki.read_certificate(read_file(self.own_tls_path), str(self.own_tls_path))
        same = own.public_key() == self.tls_certificate().public_key()
        return self.own_tls_path if same else self.tls_path

    def check_shown(self, manifest: Manifest, *, now_ms: int) -> None:
        """What this site will show is what the manifest accepts, today. The handshake would not say why it is not."""
        path = self.shown_tls_path()
        certificate = pki.read_certificate(read_file(path), str(path))
        pki.check_dates(certificate, now_ms, str(path))
        check_tls_peer(manifest, self.root(), certificate, now_ms=now_ms)

    def tls_key(self) -> ec.EllipticCurvePrivateKey:
        path = self.tls_key_path()
        key = keystore.load_tls_key(path)
        _check_pair(key, pki.certificate_key(self.tls_certificate()), path)
        return key

    def signing_key(self, certificate: x509.Certificate) -> SigningKey:
        """The key that the manifest's certificate of this member is for; older ones stay usable for older rounds."""
        public = pki.certificate_key(certificate)
        path = self._key_path(Purpose.SIGNING, public)
        key = keystore.load_ed25519_key(path)
        _check_pair(key, public, path)
        return SigningKey(key)

    def signing_certificate(self) -> x509.Certificate:
        return self._installed(self.signing_path)

    def token(self) -> TokenUri | None:
        """The token that the signing key in force is in, without the key; None if it is a file."""
        public = pki.certificate_key(self.signing_certificate())
        uri = keystore.token_of(self._key_path(Purpose.SIGNING, public))
        return uri and replace(uri, object=None, id=None)

    def audit_root(self, subject: Subject) -> NoteSigner:
        return NoteSigner(origin(subject), keystore.load_ed25519_key(self.folder / "keys" / "audit-root.key"))

    @property
    def ml_dsa_path(self) -> Path:
        """Signs the heads of the log beside the epoch keys, where the manifest lists it."""
        return self.folder / "keys" / "log-ml-dsa.key"

    def log_ml_dsa(self, log: str) -> NoteSigner:
        """:param log: the log's name."""
        return NoteSigner(log, keystore.load_ml_dsa_key(self.ml_dsa_path), KeyType.ML_DSA)

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

    def _new_pair(
        self, subject: Subject, hosts: Sequence[str], place: TokenUri | None, own_name: str | None, rng: Randomness
    ) -> tuple[Ed25519PrivateKey, str, str]:
        """Fresh TLS and signing keys on disk or in a token, and the signing requests for them.

        :param own_name: the host name under which this site's own authority is asked for a TLS certificate.

        gRPC signs in a token for a connection that it opens, not for one that it accepts: a coordinator's TLS key is a
        file in either case.
        """
        name = f"{subject.federation} {subject.member}"
        signing = pki.new_signing_key() if place is None else token.make_signing_key(place, f"{name} signing", rng)
        in_token = None if subject.role is Role.COORDINATOR else place
        tls = pki.new_tls_key() if in_token is None else token.make_tls_key(in_token, f"{name} tls", rng)
        keystore.save_private_key(self._key_path(Purpose.TLS, tls.public_key()), tls)
        keystore.save_private_key(self._key_path(Purpose.SIGNING, signing.public_key()), signing)
        if own_name is not None:
            files.write_atomically(self.own_request_path, pki.make_request(tls, subject.member, [own_name]).encode())
        return signing, pki.make_request(tls, subject.member, hosts), pki.make_request(signing, subject.member)

    def _own_name(self) -> str | None:
        """As in the last request to the own authority."""
        if not self.own_request_path.exists():
            return None
        data = read_file(self.own_request_path).decode("ascii", "replace")
        return pki.read_request(data, Purpose.TLS, str(self.own_request_path)).hosts[0]

    def create(
        self,
        subject: Subject,
        *,
        hosts: Sequence[str] = (),
        place: TokenUri | None = None,
        issuer: TlsIssuer | None = None,
        ml_dsa: bool = False,
        rng: Randomness | None = None,
    ) -> EnrolmentRequest:
        """Make every key this member needs, and the request for its certificates.

        :param place: the token in which the signing key is made, and the TLS key of a site; None: files.
        :param issuer: an authority of this site's own for TLS certificates.
        :param ml_dsa: make an ML-DSA-65 key for the log too; it is a file.
        """
        rng = rng or SystemRandomness()
        keys = self.folder / "keys"
        if self.request_path.exists() or keys.exists():
            raise ConfigError(
                "this folder already holds an identity",
                where=str(self.folder),
                hint="renew it, or choose another folder",
            )
        if place is not None:
            token.check_reachable(place, "--token")  # before anything is on disk
        keys.mkdir(mode=0o700, parents=True)
        name = issuer.name if issuer else None
        signing, tls_request, signing_request = self._new_pair(subject, hosts, place, name, rng)
        for name in ("audit-root", "cosigner"):
            keystore.save_private_key(keys / f"{name}.key", pki.new_signing_key())
        for name in ("sealing", "data"):
            keystore.save_secret(keys / f"{name}.key", rng.bytes(32))
        self._add_ml_dsa(ml_dsa)
        return self._finish_request(subject, signing, tls_request, signing_request, old=None, issuer=issuer)

    def renew(
        self,
        subject: Subject,
        *,
        hosts: Sequence[str] = (),
        place: TokenUri | None = None,
        issuer: TlsIssuer | None = None,
        ml_dsa: bool = False,
    ) -> EnrolmentRequest:
        """A request for new TLS and signing keys, signed with the signing key in force. Log keys stay.

        :param place: the token for them; None: where the signing key in force is.
        :param issuer: an own authority for TLS, or another one; None: as it is.
        """
        old, place = self.signing_key(self.signing_certificate()), place or self.token()
        name = issuer.name if issuer else self._own_name()
        signing, tls_request, signing_request = self._new_pair(subject, hosts, place, name, SystemRandomness())
        self._add_ml_dsa(ml_dsa)
        return self._finish_request(subject, signing, tls_request, signing_request, old=old, issuer=issuer)

    def _add_ml_dsa(self, wanted: bool) -> None:
        if wanted and not self.ml_dsa_path.exists():
            keystore.save_private_key(self.ml_dsa_path, MLDSA65PrivateKey.generate())

    def _finish_request(
        self,
        subject: Subject,
        signing: Ed25519PrivateKey,
        tls: str,
        csr: str,
        *,
        old: SigningKey | None,
        issuer: TlsIssuer | None,
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
            tls_issuer=issuer,
            log_ml_dsa=self.log_ml_dsa(origin(subject)).key.public.hex() if self.ml_dsa_path.exists() else None,
        )
        signature = SigningKey(signing).sign(labels.SIGN_ENROLMENT, subject.member, unsigned.digest)
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
                    hint=f"it is the answer for {answer.member}: was it meant for another member?",
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


def _check_pair(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, certified: pki.PublicKey, path: Path) -> None:
    """The address of a key in a token may lead to another one: labels are not unique, and can be given anew."""
    if pki.key_fingerprint(key.public_key()) != pki.key_fingerprint(certified):
        raise CertificateNameMismatch(
            "is not the key that the certificate is for", where=str(path), hint="is the file, or the URI in it, right?"
        )


def _is_listed(manifest: Manifest, subject: Subject, certificate: x509.Certificate) -> bool:
    pin = pki.key_fingerprint(pki.certificate_key(certificate))
    return any(member.id == subject.member and pin in member.tls_keys for member in manifest.roster)


def renew(
    identity: Identity,
    role: Role,
    *,
    hosts: Sequence[str] = (),
    place: TokenUri | None = None,
    issuer: TlsIssuer | None = None,
    ml_dsa: bool = False,
) -> EnrolmentRequest:
    """A request for new keys of a member, for either command. What is in force stays in force until the answer."""
    subject = pki.subject_of(identity.tls_certificate(), str(identity.tls_path))
    if subject.role is not role:
        raise ConfigError(f"the certificate is of a {subject.role}", where=str(identity.tls_path))
    return identity.renew(subject, hosts=hosts, place=place, issuer=issuer, ml_dsa=ml_dsa)


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
