"""What a site's conversation asks its shell to do, beside what the aggregation machine itself asks for. In order.

Also which `Leave` follows from the coordinator's reason to close the stream: what the operator reads, and whether this
site tries again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from lazaret.errors import PolicyViolation, RemoteProtocolError, RollbackDetected, ToolkitError
from security.secagg.effects import Effect as ProtocolEffect
from security.secagg.effects import Leave
from security.secagg.layout import Vector
from security.secagg.relay import CloseReason, Goodbye, ModelFrame, RunStop
from security.secagg.site.attempt import PendingUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Begin the local work of a round; its end comes back as `Session.trained` or `Session.failed`.

    :param scores: whether sites that consent add their scores of this model (`score_due`).
    """

    round: int
    state: Vector = field(repr=False)
    state_hash: bytes
    config_hash: bytes
    scores: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepUpdate:
    """Count a round and put its sealed update on disk. The trainer has written the personal memory before.

    :param update: None if the chain has moved on meanwhile. What was learnt stays, and no update of the round is kept.
    """

    round: int
    update: PendingUpdate | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """A newer manifest, as it came; the shell checks and installs it, then calls `Session.adopted`."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeepPiece:
    """A piece of the next run's initial model; the shell checks where it belongs, and the whole by its digest."""

    frame: ModelFrame = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeepStop:
    """The operator's signed word that this run has ended, to be known after a restart."""

    word: RunStop


@dataclass(frozen=True, slots=True)
class LogCommits:
    """Tell the privacy log which bookings were trained: with the entry of the training, and at its time."""


@dataclass(frozen=True, slots=True)
class Complain:
    """Tell the operator; nothing else follows from it."""

    error: ToolkitError


Effect = ProtocolEffect | Train | KeepUpdate | KeepPiece | KeepStop | LogCommits | Adopt | Complain
Effects = tuple[Effect, ...]


# What went wrong, what to do, and whether this site tries again.
_REASONS: Final[dict[CloseReason, tuple[type[ToolkitError], str, str, bool]]] = {
    CloseReason.STOPPING: (RemoteProtocolError, "the coordinator is stopping", "this site tries again", True),
    CloseReason.REPLACED: (
        PolicyViolation,
        "another process has connected as this site",
        "two agents with one identity: stop one of them",
        False,
    ),
    CloseReason.OTHER_PROTOCOL: (
        RemoteProtocolError,
        "the coordinator uses another version of the protocol",
        "install the version of the package that the coordinator runs",
        False,
    ),
    CloseReason.NOT_LISTED: (
        PolicyViolation,
        "the coordinator's manifest does not list this site",
        "the operator must install the manifest that lists it; revoked sites stay out; this site tries again",
        True,
    ),
    CloseReason.OLD_MANIFEST: (
        PolicyViolation,
        "the coordinator's manifest is older than this site's",
        "the operator must install the newer one; this site tries again",
        True,
    ),
    CloseReason.OUT_OF_ORDER: (
        RollbackDetected,
        "the coordinator has seen later connections of this site than this state folder has recorded",
        "if the state folder was moved, let [site] state say where it is; if it was restored from an old copy: stop, "
        "keep it, and enrol this site again",
        False,
    ),
    CloseReason.OTHER_HISTORY: (
        RemoteProtocolError,
        "the coordinator does not know the newest result that this site holds",
        "its state was lost: send the operator a `site-agent handover FILE`; if this site's newest result was never "
        "verified (`status`), `site-agent step-back`; this site tries again",
        True,
    ),
}


def parting(message: Goodbye) -> Leave:
    """What this site does when the coordinator closes its stream."""
    kind, what, hint, retry = _REASONS[CloseReason(message.code)]
    return Leave(kind(what, where="coordinator", hint=hint), retry=retry)
