"""What a site's conversation asks its shell to do, beside what the aggregation machine itself asks for. In order."""

from __future__ import annotations

from dataclasses import dataclass, field

from lazaret.errors import ToolkitError
from security.secagg.effects import Effect as ProtocolEffect
from security.secagg.layout import Vector
from security.secagg.relay import ModelFrame, RunStop
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
