"""The log as a machine without files, clocks or randomness: event and time in, entries and checkpoints out.

What it guarantees: `seq` counts without gaps, time never goes back silently, a full segment is sealed by the next
entry, a key is announced before it signs, and a log that failed once takes nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import Any, Final

from lazaret.errors import AuditLogError, LocalProtocolError
from security.crypto import encoding
from security.crypto.merkle import Tree, leaf_hash
from security.log.events import AgentStart, AgentStop, ConfigChanged, ManifestAdopted, PolicyChanged
from security.log.note import Checkpoint, Note, NoteSigner
from security.log.schema import (
    ENVELOPE,
    MAX_COUNT,
    MAX_LINE,
    VERSION,
    Count,
    Digest,
    Event,
    Integer,
    Role,
    Text,
    VKey,
    encode,
    event_type,
)

# What a log writes about itself. Everything else that a log can hold is in `events`.


@event_type("log.genesis")
class LogGenesis(Event):
    """The first entry: whose log this is, in which format, and which keys speak for it."""

    format: Count
    role: Role
    root_vkey: VKey
    epoch_vkey: VKey
    cosigner_vkey: VKey
    manifest: Digest
    policy: Digest


@event_type("heartbeat")
class Heartbeat(Event):
    """Still running, still recording: the size of the log before this entry."""

    size: Count


@event_type("clock.adjusted")
class ClockAdjusted(Event):
    """The wall clock was moved, by so much and by what."""

    offset_ms: Integer
    source: Text


@event_type("key.rotated")
class KeyRotated(Event):
    """The next epoch begins after this entry, under the new key."""

    epoch: Count
    old_vkey: VKey
    new_vkey: VKey
    reason: Text


@event_type("log.recovered")
class LogRecovered(Event):
    """A torn write was set aside after a crash: its bytes lie in `evidence/` under this digest."""

    quarantined: Digest
    bytes: Count


@event_type("segment.sealed")
class SegmentSealed(Event):
    """A segment file is complete."""

    segment: Count
    sha256: Digest


@event_type("annex.erased")
class AnnexErased(Event):
    """Annexes of these entries were deleted, on somebody's authority; their commitments stay."""

    first: Count
    last: Count
    authority: Text


# The machine.

SEGMENT: Final = 65_536
HEARTBEAT_MS: Final = 15 * 60 * 1000
SKEW_MS: Final = 5 * 60 * 1000  # by how much the clocks of two parties may differ


class State(Enum):
    """Where a log can be."""

    NEW = "new"
    OPEN = "open"
    STOPPED = "stopped"
    FAILED = "failed"


class LogStep(Enum):
    """What can be asked of it."""

    GENESIS = "genesis"
    APPEND = "append"
    ROTATE = "rotate"
    CHECKPOINT = "checkpoint"
    STOP = "stop"
    FAIL = "fail"


# From FAILED there is no way out: what was not logged must not be sent, and only a restart reads the folder again.
TRANSITIONS: Final[dict[tuple[State, LogStep], State]] = {
    (State.NEW, LogStep.GENESIS): State.OPEN,
    (State.OPEN, LogStep.APPEND): State.OPEN,
    (State.OPEN, LogStep.ROTATE): State.OPEN,
    (State.OPEN, LogStep.CHECKPOINT): State.OPEN,
    (State.OPEN, LogStep.STOP): State.STOPPED,
    (State.STOPPED, LogStep.CHECKPOINT): State.STOPPED,
    (State.NEW, LogStep.FAIL): State.FAILED,
    (State.OPEN, LogStep.FAIL): State.FAILED,
    (State.STOPPED, LogStep.FAIL): State.FAILED,
    (State.FAILED, LogStep.FAIL): State.FAILED,
}


# Which fields of which entry say what configuration, policy and manifest are in force from there on.
_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    LogGenesis.type: {"policy": "policy", "manifest": "manifest"},
    AgentStart.type: {"config": "config"},
    ConfigChanged.type: {"config": "new"},
    PolicyChanged.type: {"policy": "new"},
    ManifestAdopted.type: {"manifest": "new"},
}
_STEP_OF: Final = {LogGenesis.type: LogStep.GENESIS, KeyRotated.type: LogStep.ROTATE, AgentStop.type: LogStep.STOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One reading of both clocks, and the boot that the monotonic one belongs to."""

    wall_ms: int
    mono_ms: int
    boot: str

    def __post_init__(self) -> None:
        if not 0 <= self.wall_ms <= MAX_COUNT or not 0 <= self.mono_ms <= MAX_COUNT:
            raise LocalProtocolError("a clock reading is out of range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What an event belongs to. `annex_commit` hides what only the site's own auditor may see.

    :ivar opening: its fields before the body, as the line has them.
    :ivar middle: its fields after the body.
    """

    run: str | None = None
    round: int | None = None
    actor: str = "agent"
    annex_commit: str | None = None
    opening: str = field(init=False, repr=False, compare=False)
    middle: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("actor", "run", "round", "annex_commit"):
            if not ENVELOPE[name].accepts(getattr(self, name)):
                raise LocalProtocolError(f"{name} is not {ENVELOPE[name].name}", where="scope of an entry")
        opening = encode({"actor": self.actor, "annex_commit": self.annex_commit})
        object.__setattr__(self, "opening", opening[1:-1])
        object.__setattr__(self, "middle", encode({"round": self.round, "run": self.run})[1:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One line of the log, without its newline."""

    seq: int
    line: bytes


NO_SCOPE: Final = Scope()


class LogMachine:
    """One party's log. Feed it events; write what it returns, in order, before anything else happens."""

    def __init__(self, origin: str) -> None:
        if not ENVELOPE["origin"].accepts(origin):
            raise LocalProtocolError(f"origin is not {ENVELOPE['origin'].name}", where="name of a log")
        self.origin = origin
        self.state = State.NEW
        self.failure: str | None = None  # why it failed, the first time
        self.size = 0  # how many entries there are
        self._tree = Tree()
        self._unhashed: list[bytes] = []  # lines that are not in the tree yet
        self.epoch = 0
        self.last: Moment | None = None
        self.epoch_running_ms = 0
        self.settings: dict[str, str] = {}  # digests of "config", "policy" and "manifest", as last written
        self._segment = sha256()

    def _step(self, step: LogStep) -> None:
        following = TRANSITIONS.get((self.state, step))
        if following is None:
            raise LocalProtocolError(f"a log that is {self.state.value} cannot {step.value}", where=self.origin)
        self.state = following

    def replay(self, line: bytes) -> dict[str, Any]:
        """Take over one entry that is already on disk; the store has checked its form."""
        entry: dict[str, Any] = encoding.parse(line)
        moment = Moment(wall_ms=entry["ts"], mono_ms=entry["mono_ms"], boot=entry["boot"])
        self._take(line, moment)
        if entry["type"] == KeyRotated.type:
            self._enter_epoch(entry["body"]["epoch"])
        self._remember(entry["type"], entry["body"])
        self.state = State.OPEN
        return entry

    def append(self, event: Event, now: Moment, scope: Scope = NO_SCOPE) -> tuple[LogEntry, ...]:
        """Log an event. More than one entry comes back where the clock went back or a segment became full."""
        if isinstance(event, KeyRotated) and event.epoch != self.epoch + 1:
            raise LocalProtocolError(f"epoch {event.epoch} does not follow {self.epoch}", where=self.origin)
        self._step(_STEP_OF.get(event.type, LogStep.APPEND))
        entries: list[LogEntry] = []
        try:
            if self.last is not None and now.wall_ms < self.last.wall_ms:
                offset = now.wall_ms - self.last.wall_ms
                self._emit(entries, ClockAdjusted(offset_ms=offset, source="seen by the log"), now, NO_SCOPE)
            self._emit(entries, event, now, scope)
        except LocalProtocolError as error:
            if entries:  # the tree has entries that nobody gets to write: the log on disk would have a gap
                raise self.fail(f"an entry was refused after others: {error.message}") from error
            raise
        if isinstance(event, KeyRotated):
            self._enter_epoch(event.epoch)
        if event.type in _SETTINGS:
            self._remember(event.type, event.body())
        return tuple(entries)

    def _remember(self, kind: str, body: Mapping[str, Any]) -> None:
        for name, source in _SETTINGS.get(kind, {}).items():
            self.settings[name] = body[source]

    def _emit(self, entries: list[LogEntry], event: Event, now: Moment, scope: Scope) -> None:
        seq = self.size
        if seq and seq % SEGMENT == 0 and event.type != SegmentSealed.type:
            self._hash()
            sealed = SegmentSealed(segment=seq // SEGMENT - 1, sha256=self._segment.hexdigest())
            self._emit(entries, sealed, now, NO_SCOPE)
            seq += 1
        if self.last is not None and now.boot == self.last.boot and now.mono_ms < self.last.mono_ms:
            raise LocalProtocolError("the monotonic clock went back", where=self.origin)
        # Event, scope and moment were checked and encoded when they were made: here the parts only meet, in the order
        # of RFC 8785, so that an append costs little beside the disk.
        line = (
            f'{{{scope.opening},"body":{event.json},"boot":"{now.boot}","epoch":{self.epoch},"mono_ms":{now.mono_ms},'
            f'"origin":"{self.origin}",{scope.middle},"seq":{seq},"ts":{now.wall_ms},"type":"{event.type}","v":{VERSION}}}'
        ).encode()
        if len(line) > MAX_LINE:
            raise LocalProtocolError(f"an entry of {len(line)} bytes is longer than {MAX_LINE}", where=event.type)
        self._take(line, now)
        entries.append(LogEntry(seq=seq, line=line))

    def _take(self, line: bytes, now: Moment) -> None:
        if self.last is not None and now.boot == self.last.boot:
            self.epoch_running_ms += now.mono_ms - self.last.mono_ms
        self._unhashed.append(line)
        self.size += 1
        self.last = now

    def _hash(self) -> None:
        """A message waits for its entry, and not for hashes: they are made together when the tree is asked for."""
        for at, line in enumerate(self._unhashed, self._tree.size):
            if at and at % SEGMENT == 0:
                self._segment = sha256()
            self._segment.update(line + b"\n")
        # RFC 6962, section 2.1: a leaf is SHA-256(0x00, line), so that no inner node passes for an entry.
        self._tree.extend(map(leaf_hash, self._unhashed))
        self._unhashed.clear()

    @property
    def tree(self) -> Tree:
        """The tree over all entries."""
        if self._unhashed:
            self._hash()
        return self._tree

    def _enter_epoch(self, epoch: int) -> None:
        self.epoch, self.epoch_running_ms = epoch, 0

    def heartbeat(self, now: Moment) -> tuple[LogEntry, ...]:
        """Say that the log is alive, where nothing else was said."""
        return self.append(Heartbeat(size=self.size), now)

    def heartbeat_due(self, now: Moment) -> bool:
        """Whether nothing was logged for as long as a reader may expect silence."""
        last = self.last
        return last is not None and (now.boot != last.boot or now.mono_ms - last.mono_ms >= HEARTBEAT_MS)

    def checkpoint(self, *signers: NoteSigner) -> Note:
        """The signed checkpoint over everything so far."""
        self._step(LogStep.CHECKPOINT)
        text = Checkpoint(origin=self.origin, size=self.size, root=self.tree.root()).text
        return Note(text=text, signatures=tuple(signer.sign(text) for signer in signers))

    def fail(self, reason: str) -> AuditLogError:
        """Refuse everything from now on; gives the error to raise. The first reason stays: others follow from it."""
        self._step(LogStep.FAIL)
        self.failure = self.failure or reason
        return AuditLogError(
            self.failure,
            where=self.origin,
            hint="nothing may be sent while the privacy log cannot be written; see docs/operators.md",
        )
