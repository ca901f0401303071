"""What the consortium keeps of each member, and the checks of a request against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lazaret.errors import PolicyViolation, VerificationFailed
from security import labels
from security.crypto.signing import VerifyKey
from security.identity import pki
from security.identity.enrolment_files import BundleFile, EnrolmentRequest, Pem
from security.identity.manifest import Count, Hash, MayNameIssuer, Member, MlDsaKey, Name
from security.identity.pki import Purpose, Role, Subject


class IssuedCertificate(BundleFile):
    """A certificate that was given out, and whether it was taken back."""

    purpose: Literal["tls", "signing"]
    certificate: Pem
    revoked_at_ms: Count | None = None
    reason: str | None = None

    @property
    def parsed(self) -> x509.Certificate:
        return pki.read_certificate(self.certificate)


class MemberRecord(BundleFile, MayNameIssuer):
    """The consortium's record of a member; the newest certificates come last."""

    federation: Name
    role: Literal["site", "coordinator"]
    member: Name
    hosts: tuple[str, ...]
    audit_root: str
    cosigner: str
    draw: Hash
    log_ml_dsa: MlDsaKey = None
    issued: tuple[IssuedCertificate, ...]

    @property
    def subject(self) -> Subject:
        return Subject(federation=self.federation, role=Role(self.role), member=self.member)

    def unrevoked(self, purpose: Purpose) -> list[IssuedCertificate]:
        """Certificates for a purpose that were not revoked, oldest first."""
        return [entry for entry in self.issued if entry.purpose == purpose and entry.revoked_at_ms is None]

    @property
    def active(self) -> bool:
        return all(self.unrevoked(purpose) for purpose in Purpose)

    def listing(self, now_ms: int, *, ml_dsa: bool = False) -> Member:
        """The member as a manifest lists it: the newest signing certificate, and the TLS keys of all that still run."""
        running = [entry.parsed for entry in self.unrevoked(Purpose.TLS) if pki.days_left(entry.parsed, now_ms) >= 0]
        running = running or [self.unrevoked(Purpose.TLS)[-1].parsed]
        pins = dict.fromkeys(pki.key_fingerprint(pki.certificate_key(certificate)) for certificate in running)
        return Member(
            id=self.member,
            signing_certificate=self.unrevoked(Purpose.SIGNING)[-1].certificate,
            tls_keys=tuple(pins)[-4:],
            audit_root=self.audit_root,
            cosigner=self.cosigner,
            draw=self.draw,
            tls_issuer=self.tls_issuer,
            log_ml_dsa=self.log_ml_dsa if ml_dsa else None,
        )


def check_same_log(request: EnrolmentRequest, known: MemberRecord) -> None:
    """A name is the name of one log for ever: peers have its checkpoints, adverts and connections, and would take
    another log under it for the old one set back.
    """
    if (request.role, request.audit_root, request.cosigner) != (known.role, known.audit_root, known.cosigner):
        raise PolicyViolation(
            f"{request.member} was the name of another member, which has its own log",
            where=f"request of {request.member}",
            hint=f"choose a new name, such as {request.member}-2; or, if the old folder is complete, `renew` in it",
        )


def check_same_ml_dsa(request: EnrolmentRequest, known: MemberRecord) -> None:
    """Like the other keys of a log, its ML-DSA key stays; a log that has none may get one."""
    if known.log_ml_dsa is not None and request.log_ml_dsa not in (None, known.log_ml_dsa):
        raise PolicyViolation(
            f"the log of {request.member} has another ML-DSA key",
            where=f"request of {request.member}",
            hint="keys/log-ml-dsa.key was made anew: put the old one back, or choose a new name for a new log",
        )


def check_all_have_ml_dsa(active: Sequence[MemberRecord]) -> None:
    if missing := [record.member for record in active if record.log_ml_dsa is None]:
        raise PolicyViolation(
            f"no ML-DSA key of the logs of {', '.join(missing)}",
            where="federation.toml [audit] ml_dsa",
            hint="each runs `site-agent renew --ml-dsa` (or `coordinator renew --ml-dsa`); then "
            "`consortium renew NAME --request FILE`",
        )


def check_renewal(request: EnrolmentRequest, record: MemberRecord) -> None:
    """The holder of the signing key in force asks for the new keys."""
    hint = "compare the request's fingerprint over the telephone and pass it with --fingerprint"
    where = f"renewal of {record.member}"
    key = pki.certificate_key(record.unrevoked(Purpose.SIGNING)[-1].parsed)
    if request.renewal is None or not isinstance(key, Ed25519PublicKey):
        raise VerificationFailed("the request is not signed with the key it replaces", where=where, hint=hint)
    verifier = VerifyKey(key.public_bytes_raw())
    try:
        verifier.verify(bytes.fromhex(request.renewal), labels.SIGN_RENEWAL, record.member, request.digest)
    except VerificationFailed:
        raise VerificationFailed("the key in force did not sign this request", where=where, hint=hint) from None
