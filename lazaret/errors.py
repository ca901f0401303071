"""One error tree. Every error has a stable code, says what happened and where, and hints what to do.

Texts are lower case and carry no secret and no patient identifier. A cryptographic failure says only that it failed:
details would show an attacker which check failed (docs/errors.md lists every code).
"""

from __future__ import annotations

import os
from typing import ClassVar, Final

OTHER_VERSION: Final = "it was made by another version, whose files are not read: docs/releases.md, Upgrade"


class ToolkitError(Exception):
    """Base of everything this project raises on purpose.

    :param message: what happened, in lower case, with no full stop.
    :param where: the file and key, the message and field, or the round, that it happened in.
    :param hint: what the reader can do about it.
    """

    code: ClassVar[str] = "toolkit"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class ConfigError(ToolkitError):
    """A file, flag or environment variable that the user can correct."""

    code = "config"
    exit_code = 2


class DataError(ToolkitError):
    """A data set that cannot be used as it is: names the file and the row."""

    code = "data"
    exit_code = 2


class ArchiveError(ToolkitError):
    """The hospital's image archive does not answer, refuses, or answers something else. Names no patient."""

    code = "archive"


class ArchiveObjectError(ArchiveError):
    """One image or report that the archive does not give or take as it should; the others may go on."""

    code = "archive-object"


class WorkerLost(ToolkitError):
    """One of several processes that train together at a site has ended or does not answer; the round is not trained."""

    code = "worker"


class PolicyViolation(ToolkitError):
    """What was asked for is not allowed by the manifest or by the site's own policy; `where` names the rule."""

    code = "policy"


class NotNow(PolicyViolation):
    """Not allowed at this time; it may be in so many seconds."""

    code = "not-now"

    def __init__(self, message: str, *, seconds: int, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, where=where, hint=hint)
        self.seconds = seconds


class ProtocolError(ToolkitError):
    """Base of the two below; never raised itself."""

    code = "protocol"


class LocalProtocolError(ProtocolError):
    """Our own side used a machine wrongly: a bug here, not an attack."""

    code = "protocol-local"


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol does not allow."""

    code = "protocol-remote"


class CodecError(RemoteProtocolError):
    """Bytes that are not the one canonical encoding of a message."""

    code = "codec"


class VerificationFailed(RemoteProtocolError):
    """A signature, tag, hash or proof did not verify."""

    code = "verification"


class CertificateError(VerificationFailed):
    """Base of what can be wrong with a certificate; raised itself when it does not even parse as one of ours."""

    code = "certificate"


class CertificateExpired(CertificateError):
    code = "certificate-expired"


class CertificateNotYetValid(CertificateError):
    """Most often a clock that is behind."""

    code = "certificate-not-yet-valid"


class CertificateUntrusted(CertificateError):
    """Not issued by the consortium's root."""

    code = "certificate-untrusted"


class CertificateRevoked(CertificateError):
    code = "certificate-revoked"


class CertificatePurposeMismatch(CertificateError):
    """A TLS certificate offered for signing, or the other way round, or a client's offered as a server's."""

    code = "certificate-purpose"


class CertificateNameMismatch(CertificateError):
    """Valid, but of another member, role or federation."""

    code = "certificate-name"


class ManifestRejected(VerificationFailed):
    """A federation manifest that is malformed, of another federation, older than one already seen, or inconsistent."""

    code = "manifest"


class ForkDetected(VerificationFailed):
    """A log showed two histories; the two signed checkpoints are kept as evidence."""

    code = "fork"


class CheckpointConflict(RemoteProtocolError):
    """A head offered for cosigning grows from another size than the witness holds: go on from `held_size`."""

    code = "head-conflict"

    def __init__(self, message: str, *, held_size: int, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, where=where, hint=hint)
        self.held_size = held_size


class BudgetExhausted(ToolkitError):
    """The privacy budget does not allow another step."""

    code = "budget"


class LedgerError(ToolkitError):
    """The privacy ledger is missing, shortened, or not what it was; nothing may be trained."""

    code = "ledger"


class AuditLogError(ToolkitError):
    """The privacy log cannot be written or is not what it was; nothing may be sent."""

    code = "audit-log"


class RollbackDetected(AuditLogError):
    """Another party has a checkpoint that our log does not reach: our log was restored from an old copy."""

    code = "rollback"


class KeyUnavailable(ToolkitError):
    """A private key is in a token that does not answer. Nothing can be signed: the party ends."""

    code = "key"


class CannotDecide(ToolkitError):
    """Keys or parts are missing, so neither good nor bad can be said. Never to be shown as a pass."""

    code = "cannot-decide"
    exit_code = 3


def coarse(error: BaseException) -> str:
    """Why a party ends, for a log that others read. Not an error's own text, which may name a path or a patient."""
    if isinstance(error, ToolkitError):
        return error.code
    if isinstance(error, OSError) and error.errno is not None:
        return f"{type(error).__name__}: {os.strerror(error.errno).lower()}"
    return type(error).__name__
