"""Checks of an identity folder: certificates, key files, manifest, and the clock against the dates in them.

Nothing here is of one role only: a site and a coordinator have the same kinds of files.
"""

from __future__ import annotations

import datetime as dt
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cryptography import x509

from lazaret import files
from lazaret.checks import Line, found, ok, problem, shared, tried, warning
from lazaret.errors import CertificateExpired, ConfigError, ToolkitError
from security.clock import Clock
from security.identity import pki
from security.identity.acceptance import check_signatures, unseal
from security.identity.enrolment import Identity
from security.identity.enrolment_files import origin, read_file
from security.identity.manifest import Manifest, Member
from security.identity.peers import check_pinned
from security.identity.pki import Purpose, Role, Subject
from security.identity.rules import CLOCK_SKEW_MS

EXPIRY_WARNING_DAYS: Final = 30


class Credentials:
    """An identity folder, read once."""

    def __init__(self, identity: Identity, role: Role, clock: Clock, *, program: str) -> None:
        self.identity = identity
        self.role = role
        self.clock = clock
        self.program = program

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    @shared("there is no certificate to read")
    def subject(self) -> Subject:
        """Who this folder says that we are."""
        return pki.subject_of(self.identity.tls_certificate(), str(self.identity.tls_path))

    @shared("there is no valid manifest")
    def manifest(self) -> Manifest:
        """Signed and valid."""
        manifest = self.identity.manifest(now_ms=self.now_ms)
        if manifest is None:
            raise ConfigError(
                "there is no manifest yet",
                where=str(self.identity.manifest_path),
                hint=f"install the one the consortium has published: {self.program} join --manifest FILE",
            )
        return manifest

    def member(self) -> Member:
        """Our entry in the manifest."""
        manifest, name = self.manifest, self.subject.member
        if self.role is Role.COORDINATOR:
            return manifest.coordinator
        return manifest.site(name)


def certificates(credentials: Credentials) -> Iterator[Line]:
    """Root, TLS and signing certificate: whose they are, by whom, for what, until when."""
    identity = credentials.identity
    root = identity.root()
    yield _dated(root, "root certificate", str(identity.root_path), credentials.now_ms)
    subject = credentials.subject
    if subject.role is not credentials.role:
        yield problem(
            f"{identity.tls_path}: is the certificate of a {subject.role}, not of a {credentials.role}",
            "is this the right identity folder?",
        )
        return
    for purpose, path in ((Purpose.TLS, identity.tls_path), (Purpose.SIGNING, identity.signing_path)):
        yield _member_certificate(path, root, subject, purpose, credentials)


def _member_certificate(
    path: Path, root: x509.Certificate, subject: Subject, purpose: Purpose, credentials: Credentials
) -> Line:
    try:
        certificate = pki.read_certificate(read_file(path), str(path))
        pki.check_issuer(certificate, root, str(path))
        pki.check_purpose(certificate, purpose, subject.role, str(path))
        pki.check_subject(certificate, subject, str(path))
    except ToolkitError as error:
        return found(error)
    return _dated(certificate, f"{purpose} certificate of {subject.member}", str(path), credentials.now_ms)


def _dated(certificate: x509.Certificate, name: str, where: str, now_ms: int) -> Line:
    """Valid today, and for how long still."""
    try:
        pki.check_dates(certificate, now_ms, where)
    except CertificateExpired as error:
        return problem(f"{name}: {error}", f"{error.hint}; then `join` its answer")
    except ToolkitError as error:
        return found(error)
    left = pki.days_left(certificate, now_ms)
    until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    if left < EXPIRY_WARNING_DAYS:
        return warning(
            f"{name}: expires in {left} days, on {until}", "ask the consortium for a renewal: `consortium renew`"
        )
    return ok(f"{name}: valid for {left} more days, until {until}")


def key_files(credentials: Credentials) -> Iterator[Line]:
    """Every key file is readable by this user alone, and those in use belong to the certificates."""
    keys = credentials.identity.folder / "keys"
    if not keys.is_dir():
        raise ConfigError("there are no keys", where=str(keys), hint=f"`{credentials.program} init` makes them")
    paths = sorted(path for path in keys.rglob("*") if path.is_file())
    problems = [line for path in paths if (line := _open_to_others(path)) is not None]
    yield from problems
    if not problems:
        yield ok(f"{len(paths)} key files, for this user only")
    yield from (line for line in _keys_in_use(credentials) if line not in problems)


def _keys_in_use(credentials: Credentials) -> Iterator[Line]:
    identity = credentials.identity
    signing = pki.read_certificate(read_file(identity.signing_path), str(identity.signing_path))
    yield tried("TLS key belongs to the certificate", identity.tls_key)
    yield tried("signing key belongs to the certificate", lambda: identity.signing_key(signing))
    yield tried("keys for sealing, data and witnessing", lambda: _other_keys(credentials))


def _open_to_others(path: Path) -> Line | None:
    try:
        files.refuse_shared_mode(path, stat.S_IMODE(path.stat().st_mode))
    except ToolkitError as error:
        return found(error)
    return None


def _other_keys(credentials: Credentials) -> None:
    credentials.identity.sealing_key()
    credentials.identity.data_key()
    credentials.identity.cosigner(credentials.subject)


def audit_root(credentials: Credentials, log: Path) -> Line:
    """The key that begins a log; it may be in a safe place once there is one."""
    path = credentials.identity.folder / "keys" / "audit-root.key"
    if path.exists() or (log / "FORMAT").exists():
        return ok("key of the privacy log")
    return problem(f"{path}: is missing, and the privacy log has not begun", "restore the file for the first start")


def manifest(credentials: Credentials) -> Iterator[Line]:
    """Signed by our root, valid, in time, and listing this party."""
    opened = credentials.manifest
    yield ok(f"version {opened.version} of {opened.federation}, run {opened.run}, signed by the root")
    yield from _freshness(opened, credentials.now_ms)
    try:
        member = credentials.member()
        _check_listed(credentials, opened)
    except ToolkitError as error:
        yield problem(
            f"this {credentials.role} may not take part under this manifest: {error}",
            f"ask the consortium for a manifest that lists {credentials.subject.member} with it, and join",
        )
        return
    yield ok(f"{credentials.subject.member} is in it, with this certificate, among {len(opened.roster)} sites")
    yield from _own_certificate(credentials, opened)
    if member.log_ml_dsa is not None:
        yield tried("ML-DSA key of the privacy log is the listed one", lambda: _check_log_ml_dsa(credentials, member))
    left = pki.days_left(member.certificate, credentials.now_ms)
    if left < 0:
        yield problem(
            f"the signing certificate in the manifest ended {-left} days ago",
            "a renewal needs a new manifest as well: ask the consortium to publish one",
        )


def _check_log_ml_dsa(credentials: Credentials, member: Member) -> None:
    signer = credentials.identity.log_ml_dsa(origin(credentials.subject))
    if signer.key.public.hex() != member.log_ml_dsa:
        raise ConfigError(
            "is not the key that the manifest lists",
            where=str(credentials.identity.ml_dsa_path),
            hint="restore the file from a backup: without it the privacy log signs no head, and nothing is sent",
        )


def _freshness(opened: Manifest, now_ms: int) -> Iterator[Line]:
    """How long the manifest still holds; under an expired one no site takes part in a round."""
    left = opened.days_left(now_ms)
    publish = "the consortium publishes again: get the new version from it, and join it"
    if left < 0:
        yield problem(f"version {opened.version} has expired: no round under it", publish)
    elif left < EXPIRY_WARNING_DAYS:
        yield warning(f"version {opened.version} expires in {left} days", publish)


def _own_certificate(credentials: Credentials, opened: Manifest) -> Iterator[Line]:
    """The TLS certificate of this site's own authority, if it has one."""
    identity = credentials.identity
    path = identity.own_tls_path
    listed = next((member.tls_issuer for member in opened.roster if member.id == credentials.subject.member), None)
    if not path.exists():
        if listed is not None:
            yield warning(f"{path}: is missing", f"have {identity.own_request_path} signed for {listed.name}")
        return
    if identity.shown_tls_path() != path:
        yield warning(f"{path}: is for another TLS key", f"have {identity.own_request_path} signed anew")
        return
    try:
        identity.check_shown(opened, now_ms=credentials.now_ms)
    except ToolkitError as error:
        yield found(error)
        return
    own = pki.read_certificate(read_file(path), str(path))
    yield ok(f"TLS certificate of this site's own authority, until {own.not_valid_after_utc:%Y-%m-%d %H:%M}Z")


def _check_listed(credentials: Credentials, opened: Manifest) -> None:
    """Dates and issuer are checked by `certificates`."""
    where = str(credentials.identity.tls_path)
    certificate = credentials.identity.tls_certificate()
    pki.check_revoked(certificate, opened.revoked, where)
    check_pinned(opened, credentials.subject, pki.key_fingerprint(pki.certificate_key(certificate)), where)


def clock_by_dates(credentials: Credentials) -> Iterator[Line]:
    """Certificates and manifest were made before now. Says nothing about a clock that is ahead."""
    now = dt.datetime.fromtimestamp(credentials.now_ms / 1000, dt.UTC)
    latest, made = max(_made(credentials))
    if now + dt.timedelta(milliseconds=CLOCK_SKEW_MS) < latest:
        yield problem(
            f"this machine's clock says {now:%Y-%m-%d %H:%M}Z, but {made} was made at {latest:%Y-%m-%d %H:%M}Z",
            "set the clock, and keep it correct with NTP",
        )
    else:
        yield ok(f"{now:%Y-%m-%d %H:%M}Z is after the first valid day of every certificate")


def _made(credentials: Credentials) -> Iterator[tuple[dt.datetime, str]]:
    """When each was made; the manifest is unsealed without its rules, which would refuse one from the future."""
    identity = credentials.identity
    for name, read in (("the root", identity.root), ("the certificate", identity.tls_certificate)):
        yield read().not_valid_before_utc, name
    yield from _manifest_made(credentials)


def _manifest_made(credentials: Credentials) -> Iterator[tuple[dt.datetime, str]]:
    if not credentials.identity.manifest_path.exists():
        return
    try:
        content, signatures = unseal(read_file(credentials.identity.manifest_path))
        check_signatures(content, signatures, credentials.identity.root())
    except ToolkitError:
        return  # the check of the manifest reports it
    yield dt.datetime.fromtimestamp(content.issued_at_ms / 1000, dt.UTC), f"manifest version {content.version}"
