"""What a site's conversation asks its shell to do, beside the effects of the aggregation machine itself. In order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lazaret.errors import ToolkitError
from security.log.schema import Event
from security.secagg.effects import (
    Advanced,
    Certified,
    Compact,
    DraftState,
    Ended,
    KeepEvidence,
    LoneChange,
    Persist,
    Refused,
    SaveState,
    SendUpload,
    Vector,
)
from security.secagg.fields import Wire
from security.secagg.relay import Cosignature, Head, Held, WitnessCall
from security.secagg.site.attempt import PendingUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Send a message through the outbox.

    :param round: the round it belongs to, where it belongs to one: both ends log it under that number.
    :param cohort: the members of its attempt, from which its length follows.
    """

    message: Wire
    round: int | None = None
    cohort: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PostVector:
    """Send a masked vector, or the rest of one, through the outbox."""

    upload: SendUpload
    root: bytes
    round: int
    cohort: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Write an event to the privacy log."""

    event: Event
    round: int | None = None
    annex: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Seal:
    """Sign the privacy log as it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Begin the local work of a round; its end comes back as `Session.trained` or `Session.failed`."""

    round: int
    state: Vector = field(repr=False)
    state_hash: bytes
    config_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Look at the new model with the site's own images."""

    round: int
    state: Vector = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Put a round's work on disk: the personal memory first, then the sealed update, which says that both are there."""

    update: PendingUpdate
    memory: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Forget:
    """Erase the sealed updates of rounds up to this one."""

    round: int


@dataclass(frozen=True, slots=True)
class Attend:
    """A message between witnesses."""

    message: WitnessCall | Head | Cosignature | Held


@dataclass(frozen=True, slots=True)
class Adopt:
    """A newer manifest, as it came; the shell checks and installs it, then calls `Session.adopted`."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Complain:
    """Tell the operator; nothing else follows from it."""

    error: ToolkitError


@dataclass(frozen=True, slots=True)
class Leave:
    """Close the stream; come back later, or stop with this error."""

    error: ToolkitError
    retry: bool


Effect = (
    Post
    | PostVector
    | Note
    | Seal
    | Train
    | Evaluate
    | Keep
    | Forget
    | Attend
    | Adopt
    | Complain
    | Leave
    | Persist
    | Compact
    | DraftState
    | SaveState
    | Advanced
    | Certified
    | Ended
    | KeepEvidence
    | LoneChange
    | Refused
)
Effects = tuple[Effect, ...]
