"""What a machine asks its shell to do, in order. Each effect carries all that the shell needs to carry it out.

`Persist` must be on disk (fsync) before anything after it is carried out: a `Send` that follows may be the one thing
that a restarted machine must know it has said. `in_order` makes the order in which a site speaks: written down, logged,
sent. No layer turns the effects of another into its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from lazaret.errors import ToolkitError
from security.crypto.prg import Words
from security.crypto.ring import Packed, frames_of
from security.log.schema import Event
from security.secagg.certificates import CheckCertificate
from security.secagg.context import RoundContext, SumVerdict
from security.secagg.fields import Wire
from security.secagg.layout import Vector
from security.secagg.messages import UploadFrame

REFUSED: Final = "refused"


@dataclass(frozen=True, slots=True)
class Persist:
    """Append the record to the write-ahead log and wait until it is on disk.

    :ivar round: under which a coordinator files it, since its attempts of two rounds may speak in turn; a site has one
        log for all rounds.
    """

    record: Wire
    round: int = 0


@dataclass(frozen=True, slots=True)
class Compact:
    """Replace the write-ahead log by these records, atomically: what is left out must be forgotten."""

    records: tuple[Wire, ...]


@dataclass(frozen=True, slots=True)
class Log:
    """Write an event to the party's own privacy log, under the round it belongs to."""

    event: Event
    round: int | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the other side: to the coordinator, or to the site named.

    :param round: the round it belongs to, where it belongs to one: both ends log a site's message under that number.
    :param cohort: the members of its attempt, from which the length of a site's message follows.
    """

    message: Wire
    to: str | None = None
    round: int | None = None
    cohort: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SendUpload:
    """Send the masked vector in frames, from `first` on.

    :param root: of the whole vector, as its header has it; the log names the vector by it.
    """

    kx: bytes
    vector: Packed = field(repr=False)
    root: bytes
    round: int
    cohort: tuple[str, ...]
    first: int = 0

    def frames(self) -> Iterator[UploadFrame]:
        for index, data in frames_of(self.vector, first=self.first):
            yield UploadFrame(kx=self.kx, index=index, data=data)


@dataclass(frozen=True, slots=True)
class SendFrames:
    """Send something large to one site: a sum, a state, or a chunk of every upload for a check.

    The frames are made one by one when there is room for them on the way, so that nothing large waits in memory. What
    they are read from may have left the disk by then: they end there, with `Gone` or DataError.

    :ivar check: it is for the check of a sum, and may wait until the sum itself has arrived everywhere.
    """

    to: str
    frames: Callable[[], Iterator[Wire]] = field(repr=False)
    check: bool = False


@dataclass(frozen=True, slots=True)
class DraftState:
    """The values from `start` on of a state that may follow. They come in order; those at 0 begin a new draft."""

    start: int
    values: Vector = field(repr=False)


@dataclass(frozen=True, slots=True)
class SaveState:
    """Keep a new global state, by its hash, before the record that names it is persisted.

    :ivar drafted: the draft is complete and is this state.
    """

    state_hash: bytes
    state: Vector = field(repr=False)
    drafted: bool = False


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove these vectors from the spool: what was persisted before says that they are no longer needed."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Advanced:
    """The chain has moved on: a result was accepted (site) or published (coordinator)."""

    round: int
    result: bytes
    state_hash: bytes
    verdict: SumVerdict
    survivors: tuple[str, ...]
    total: Words = field(repr=False)
    state: Vector = field(repr=False)


@dataclass(frozen=True, slots=True)
class Isolated:
    """A combination of sums shows this site alone, under the changes of the others (docs/threat-model.md).

    :ivar leverage: how well: 1 over the norm of the combination; more is worse.
    :ivar what: its `update`, or its `score`.
    """

    round: int
    leverage: float
    what: str = "update"


@dataclass(frozen=True, slots=True)
class Certified:
    """Enough acknowledgements cover the result. A coordinator keeps them, for the next plan and for late sites."""

    result: bytes
    check: CheckCertificate = field(repr=False)


@dataclass(frozen=True, slots=True)
class AskVote:
    """Look at the model of a result, and at the one before it, on this site's own data; the answer is its vote."""

    round: int
    result: bytes
    before: Vector = field(repr=False)
    state: Vector = field(repr=False)


@dataclass(frozen=True, slots=True)
class VotedDown:
    """The sites have voted against a model: the one before it stands."""

    round: int
    result: bytes
    state_hash: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt ended at this party without a sum; `error` says why, where a check failed.

    With the reason `REFUSED` the plan was not joined, and nothing has left the site.
    """

    ctx: bytes
    reason: str
    error: ToolkitError | None = None


MISSING: Final = "missing"  # it missed a step: a strike
SILENT: Final = "silent"  # it gave no answer to an accusation: a strike, and the third in a row excludes it
ANSWERED: Final = "answered"  # it has answered one: nothing is held against it


@dataclass(frozen=True, slots=True)
class Blamed:
    """The coordinator takes note of what a site did; any reason but the three above is a lie that it signed."""

    site: str
    reason: str


@dataclass(frozen=True, slots=True)
class KeepEvidence:
    """Keep the proof of a lie where the operator finds it."""

    name: str
    proof: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Leave:
    """Close the stream: to come back later, or to stop for the operator."""

    error: ToolkitError
    retry: bool = False


Effect = (
    Persist
    | Compact
    | Log
    | Send
    | SendUpload
    | SendFrames
    | DraftState
    | SaveState
    | Discard
    | Advanced
    | Isolated
    | Certified
    | AskVote
    | VotedDown
    | Ended
    | Blamed
    | KeepEvidence
    | Leave
)
Effects = tuple[Effect, ...]


def in_order(
    message: Wire,
    context: RoundContext | None = None,
    *,
    record: Persist | None = None,
    entry: Log | None = None,
    filed: bool = True,
) -> Effects:
    """The order of everything a site sends: the record is written first, the log entry second, the message is sent
    third. A site that is killed in between has more on disk than it has sent, never less.

    :param context: of the attempt that the message belongs to.
    :param filed: whether both logs file the message under the attempt's round; some carry no number of their own.
    """
    number = context.round if context is not None and filed else None
    send = Send(message, round=number, cohort=context.sites if context is not None else ())
    return tuple(effect for effect in (record, entry, send) if effect is not None)
