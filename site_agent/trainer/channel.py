"""The one channel between the agent and the trainer: typed, bounded messages; vectors as sealed memory.

Both sides import this module, and it is all that they share while they run. A message is a frozen dataclass, sent as
JSON with its length before it, and read strictly: an unknown field, a number out of bounds or a text that is too long
is a `CodecError`. A vector travels as a file descriptor (`shared_memory`).

The agent trusts nothing that comes from the trainer: `RECEIVED_BY_AGENT` is what it reads, and `site_agent.supervisor`
checks each message against the order that is open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from lazaret.errors import CodecError, ToolkitError, WorkerLost
from security.dp.accountant import MechanismEvent
from security.dp.ledger import Terms
from security.log.schema import MAX_COUNT
from security.secagg.layout import Vector
from site_agent.trainer.shared_memory import share

MAX_MESSAGE: Final = 1 << 20
MAX_CLASSES: Final = 10_000
# Beyond this, one side's confusion matrix could be larger than a message.
SHOWN_CLASSES: Final = 256


def printable(text: str) -> str:
    """No control characters: a terminal would obey them, and a line of a log would become two."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Round = Annotated[int, Field(ge=1, lt=2**53)]
Natural = Annotated[int, Field(ge=0, le=MAX_COUNT)]  # what an entry of the privacy log can hold
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(printable)]
MAX_REMARK: Final = 2000
Remark = Annotated[str, Field(max_length=MAX_REMARK), AfterValidator(printable)]
Counts = Annotated[tuple[Natural, ...], Field(max_length=MAX_CLASSES)]


class Message:
    """Base of what crosses. `attached` is what a message brings along as shared memory."""

    attached: ClassVar[Literal["vector", "document"] | None] = None
    # Read by pydantic, also of a standard dataclass.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")


# What the agent says.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup(Message):
    """How to begin. The manifest comes along, as the agent has verified it.

    :ivar data_key: names this site's own artefacts in its own log; no other key crosses.
    :ivar best: balanced accuracy of the best model so far.
    :ivar terms: of the privacy ledger; None without differential privacy.
    """

    kind: Literal["setup"] = "setup"
    attached: ClassVar[Literal["vector", "document"] | None] = "document"
    site: Name
    data_key: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){16,64}$")] = field(repr=False)
    best: Share | None
    terms: Terms | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRound(Message):
    """Train this state."""

    kind: Literal["train"] = "train"
    attached: ClassVar[Literal["vector", "document"] | None] = "vector"
    round: Round


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRound(Message):
    """Look at the model after this round."""

    kind: Literal["evaluate"] = "evaluate"
    attached: ClassVar[Literal["vector", "document"] | None] = "vector"
    round: Round


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReserved(Message):
    """The round is paid for, on disk in ledger and log."""

    kind: Literal["reserved"] = "reserved"
    seq: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRefused(Message):
    """The round cannot be paid for: no data may be read."""

    kind: Literal["refused"] = "refused"
    code: Name
    message: Remark
    where: Remark | None = None
    hint: Remark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSetup(Message):
    """How to begin for `site-agent check`, which trains nothing that is kept. The manifest comes along.

    :ivar ledger: whether there is a privacy ledger.
    :ivar available: bytes of memory that can still be taken; None if the system does not report it.
    :ivar progress: whether somebody watches.
    """

    kind: Literal["check-setup"] = "check-setup"
    attached: ClassVar[Literal["vector", "document"] | None] = "document"
    site: Name
    data_key: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){16,64}$")] = field(repr=False)
    ledger: bool
    available: Natural | None
    progress: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder(Message):
    """Make one check of data or training."""

    kind: Literal["check"] = "check"
    name: Name


@dataclass(frozen=True, slots=True)
class TrainerStop(Message):
    """End. The end of the channel means the same."""

    kind: Literal["stop"] = "stop"


# What the trainer says.


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport(Message):
    """The first message: what was tried from inside, before any image or library for images was loaded.

    :ivar exception: why a network was left open on purpose; empty if it was not.
    """

    kind: Literal["isolation"] = "isolation"
    network_namespace: bool
    seccomp: bool
    landlock: bool
    connection_possible: bool
    keys_readable: bool
    exception: Annotated[str, Field(max_length=64)]
    attempts: Annotated[dict[Name, Name], Field(max_length=16)]
    missing: Annotated[dict[Name, Remark], Field(max_length=16)]
    sentence: Remark


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReady(Message):
    """The images are open: their fingerprint under the data key, how many of each class each side holds, of how many
    patients.

    :ivar fingerprint: of the content, for this hospital alone.
    :ivar version: what log and ledger call the data; the same, but under differential privacy the hospital's name of
        the version.
    :ivar images: of each side, where an image may have several labels: counts then add up to something else.
    :ivar plugin: SHA-256 of the method's own file, if it has one; it was run.
    """

    kind: Literal["ready"] = "ready"
    fingerprint: Hex32
    version: Hex32
    subjects: Natural
    class_names: Annotated[tuple[Name, ...], Field(max_length=MAX_CLASSES)]
    counts: Annotated[dict[Literal["train", "validation", "test"], Counts], Field(max_length=3)]
    images: Annotated[dict[Literal["train", "validation", "test"], Natural], Field(max_length=3)] | None = None
    plugin: Hex32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAlive(Message):
    """Every few seconds, whatever it works on: silence means that the process hangs."""

    kind: Literal["alive"] = "alive"
    processor_ms: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class OutwardAttempt(Message):
    """Code in the trainer has asked for a socket. The kernel has refused it; people should know."""

    kind: Literal["attempt"] = "attempt"
    what: Literal["socket.__new__", "socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRound(Message):
    """What this round would release: asked for before data are read."""

    kind: Literal["reserve"] = "reserve"
    round: Round
    events: Annotated[tuple[MechanismEvent, ...], Field(min_length=1, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """Something that was made and stays: its kind and size, and its digest under the data key."""

    kind: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]  # as the privacy log takes it
    elements: Natural
    hmac: Hex32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRound(Message):
    """Here is the update, as one vector, with the counts and the loss that go with it."""

    kind: Literal["trained"] = "trained"
    attached: ClassVar[Literal["vector", "document"] | None] = "vector"
    round: Round
    samples: Natural
    loss_sum: Annotated[float, Field(allow_inf_nan=False)]
    hits: Natural
    steps: Natural
    wall_ms: Natural
    artefacts: Annotated[tuple[Artefact, ...], Field(max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideScores:
    """Of one side's images. `confusion` is left out where there are very many classes."""

    bacc: Share | None
    bauc: Share | None
    images: Natural
    loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    confusion: Annotated[tuple[Counts, ...], Field(max_length=SHOWN_CLASSES)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRound(Message):
    """This hospital's own figures; nothing of them leaves."""

    kind: Literal["evaluated"] = "evaluated"
    round: Round
    predictor: Name | None = None
    private: bool = False
    best: bool = False
    validation: SideScores | None = None
    test: SideScores | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLine(Message):
    """One finding of a check."""

    kind: Literal["check-line"] = "check-line"
    verdict: Literal["ok", "warning", "problem", "unchecked"]
    what: Remark
    hint: Remark


@dataclass(frozen=True, slots=True)
class CheckDone(Message):
    """There is no further finding of this check."""

    kind: Literal["check-done"] = "check-done"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderFailed(Message):
    """The order was not carried out, for a reason that people can read. The trainer goes on."""

    kind: Literal["failed"] = "failed"
    code: Name
    message: Remark
    where: Remark | None = None
    hint: Remark | None = None


FromAgent = (
    TrainerSetup | TrainRound | EvaluateRound | RoundReserved | ReserveRefused | CheckSetup | CheckOrder | TrainerStop
)
FromTrainer = (
    IsolationReport
    | DataReady
    | TrainerAlive
    | OutwardAttempt
    | ReserveRound
    | TrainedRound
    | EvaluatedRound
    | CheckLine
    | CheckDone
    | OrderFailed
)
RECEIVED_BY_TRAINER: Final = TypeAdapter[Any](Annotated[FromAgent, Field(discriminator="kind")])
RECEIVED_BY_AGENT: Final = TypeAdapter[Any](Annotated[FromTrainer, Field(discriminator="kind")])
_ANY: Final = TypeAdapter[Any](FromAgent | FromTrainer)


# Errors, as they cross.


def _texts(error: ToolkitError) -> dict[str, str | None]:
    return {
        "code": error.code,
        "message": error.message[:MAX_REMARK],
        "where": error.where[:MAX_REMARK] if error.where else None,
        "hint": error.hint[:MAX_REMARK] if error.hint else None,
    }


def failed(error: ToolkitError) -> OrderFailed:
    return OrderFailed(**_texts(error))  # type: ignore[arg-type]


def refused(error: ToolkitError) -> ReserveRefused:
    return ReserveRefused(**_texts(error))  # type: ignore[arg-type]


def error_of(message: OrderFailed | ReserveRefused) -> ToolkitError:
    """As the class that has this code. What the other side invents becomes a `WorkerLost`, so that no word of its
    choice reaches the privacy log as a code."""
    kinds = {kind.code: kind for kind in _subclasses(ToolkitError) if kind.__init__ is ToolkitError.__init__}
    kind = kinds.get(message.code, WorkerLost)
    return kind(message.message or "no reason was given", where=message.where, hint=message.hint)


def _subclasses(kind: type[ToolkitError]) -> list[type[ToolkitError]]:
    return [kind, *(deeper for below in kind.__subclasses__() for deeper in _subclasses(below))]


# The channel itself.

_HEADER: Final = struct.Struct("<IB")
Received = tuple[Any, int | None]


class Channel:
    """One end. Several threads may send; one reads.

    :param reads: the messages that this side reads.
    """

    def __init__(self, connection: socket.socket, reads: TypeAdapter[Any]) -> None:
        self._socket = connection
        self._reads = reads
        self._sending = Lock()

    def send(self, message: Message, content: Vector | bytes | None = None) -> None:
        """:raises WorkerLost: if the other side is gone."""
        body = _ANY.dump_json(message)
        if len(body) > MAX_MESSAGE or (message.attached is None) != (content is None):
            raise CodecError(f"{type(message).__name__} cannot be sent like this", where="trainer")
        descriptors = [] if content is None else [share(content)]
        try:
            with self._sending:
                # The descriptors come with the first byte, so that the header is never sent without them.
                sent = socket.send_fds(self._socket, [_HEADER.pack(len(body), len(descriptors))], descriptors)
                self._socket.sendall(_HEADER.pack(len(body), len(descriptors))[sent:] + body)
        except OSError as error:
            raise WorkerLost("the other process is gone", where="trainer") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def receive(self) -> Received | None:
        """The next message and the descriptor that came with it; None when the other side has ended.

        :raises CodecError: if it is none of the messages that this side reads.
        :raises TimeoutError: if the other side was silent for the socket's time limit.
        """
        header, descriptors = self._header()
        if header is None:
            return None
        try:
            length, count = _HEADER.unpack(header)
            if length > MAX_MESSAGE or count != len(descriptors):
                raise CodecError("a message is too long, or its memory is missing", where="trainer")
            body = self._exactly(length)
            if body is None:
                _close(descriptors)
                return None
            try:
                message = self._reads.validate_json(body)
            except (ValidationError, ToolkitError) as error:
                raise CodecError("not a message of this channel", where="trainer") from error
            if (message.attached is not None) != bool(descriptors):
                raise CodecError(f"{type(message).__name__} comes with other memory", where="trainer")
        except BaseException:
            _close(descriptors)
            raise
        return message, descriptors[0] if descriptors else None

    def _header(self) -> tuple[bytes | None, list[int]]:
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._socket, _HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except OSError:
            return None, []
        if flags & socket.MSG_CTRUNC:
            _close(descriptors)
            raise CodecError("a message brings more than one piece of memory", where="trainer")
        if not data:
            return None, []
        rest = self._exactly(_HEADER.size - len(data))
        if rest is None:
            _close(descriptors)
            return None, []
        return data + rest, list(descriptors)

    def _exactly(self, length: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self._socket.recv(length - len(parts))
            except TimeoutError:
                raise
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """End the conversation: both sides read its end, also one that is waiting in another thread."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
