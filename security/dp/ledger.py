"""The privacy ledger of one patient population: reserve before training, never refund, stop before the cap.

docs/spec/differential-privacy.md, section 5. The first part of the file is pure: the bytes of a ledger and what they
add up to. The second part is `Ledger`, which writes them, and `Reservation`, the permission to train. Release functions
take sigma, rate and noise from a reservation, so that what is done is what was booked; each event can be claimed once.
A reservation is in memory only: after a crash the charge stays and the permission is lost, whether or not it was used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import rfc8785

from lazaret.errors import OTHER_VERSION, BudgetExhausted, LedgerError, PolicyViolation, ToolkitError
from security import labels
from security.clock import Clock, SystemClock
from security.dp.accountant import Mechanism, MechanismEvent, Parts, Spent, merged, spent
from security.dp.filter import BudgetFilter, PinnedSchedule, RunTerms
from security.dp.noise import NoiseSource

if TYPE_CHECKING:
    from security.dp.ledger_store import LedgerStore

# Lines. One canonical JSON object (RFC 8785) per line. Each line has its number and the hash of the line before, so
# that no line can be changed, removed or moved without breaking the chain. The cost is always recomputed from the
# events; the epsilon written beside them is for people, and must agree.

FORMAT: Final = 3
NO_SIDES: Final = "none"
MOST_UNCOMMITTED: Final = 3
"""Bookings of a run in a row whose training did not finish. More of them need an operator's `resume`."""

_FIELDS: Final = {
    "open": {"at", "cap", "delta", "format", "kind", "order", "plan", "population", "sides", "unit", "version"},
    "run": {"at", "epsilon", "kind", "order", "plan", "run"},
    "resume": {"at", "kind", "run"},
    "version": {"at", "kind", "version"},
    "reserve": {"at", "after", "before", "events", "kind", "round", "run"},
    "commit": {"at", "kind", "reserve"},
}


class Unit(StrEnum):
    """Whom epsilon protects (section 1). Two images of one patient under `IMAGE` are two units."""

    PATIENT = "patient"
    LESION = "lesion"
    STUDY = "study"
    IMAGE = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAnchor:
    """A point of the chain: line number and hash. Enough to detect a shortened or exchanged ledger."""

    seq: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a ledger guarantees for one population; fixed in its first line for good.

    :param cap: largest epsilon over all bookings.
    :param order: Renyi order of the filter (section 6).
    :param planned: the schedule for which the ledger was begun; None if none was known.
    """

    population: str
    unit: Unit
    delta: float
    cap: float
    order: float
    planned: PinnedSchedule | None = None

    def filter(self) -> BudgetFilter:
        return BudgetFilter(order=self.order, delta=self.delta, cap=self.cap, planned=self.planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """One reservation in the ledger. It counts whether or not it was committed: nothing is refunded."""

    seq: int
    run: str
    round: int
    events: tuple[MechanismEvent, ...]
    committed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """Everything a ledger's lines add up to.

    :param sides: digest of the key that gives patients their sides (npr/data/sides.py): made once, never drawn again.
    """

    terms: Terms
    version: str
    sides: str = NO_SIDES
    total: Parts = ()
    bookings: tuple[Booking, ...] = ()
    runs: tuple[RunTerms, ...] = ()
    resumed: tuple[tuple[str, int], ...] = ()
    digests: tuple[str, ...] = ()

    @property
    def head(self) -> LedgerAnchor:
        return LedgerAnchor(seq=len(self.digests) - 1, digest=self.digests[-1])

    @property
    def history(self) -> tuple[MechanismEvent, ...]:
        return tuple(event for booking in self.bookings for event in booking.events)

    @property
    def epsilon(self) -> float:
        return self.terms.filter().epsilon(self.total)

    def of_run(self, run: str) -> Parts:
        """What was booked for one run."""
        return merged(event for booking in self.bookings if booking.run == run for event in booking.events)

    def run_terms(self, run: str) -> RunTerms | None:
        return next((terms for terms in self.runs if terms.run == run), None)

    def uncommitted(self, run: str) -> int:
        """Bookings of this run since its last commit, or since an operator resumed it."""
        resumed = max((seq for name, seq in self.resumed if name == run), default=0)
        mine = [booking for booking in self.bookings if booking.run == run and booking.seq > resumed]
        last = max((number for number, booking in enumerate(mine) if booking.committed), default=-1)
        return len(mine) - 1 - last

    def contains(self, head: LedgerAnchor) -> bool:
        return 0 <= head.seq < len(self.digests) and self.digests[head.seq] == head.digest


def open_entry(terms: Terms, version: str, at: int, *, sides: str = NO_SIDES) -> dict[str, Any]:
    terms.filter()
    return {
        "kind": "open",
        "format": FORMAT,
        "population": terms.population,
        "unit": terms.unit.value,
        "delta": repr(float(terms.delta)),
        "cap": repr(float(terms.cap)),
        "order": repr(float(terms.order)),
        "plan": None if terms.planned is None else terms.planned.to_json(),
        "sides": sides,
        "version": version,
        "at": at,
    }


def reserve_entry(
    state: LedgerState, run: str, round_number: int, events: tuple[MechanismEvent, ...], at: int
) -> dict[str, Any]:
    """Raises BudgetExhausted instead of returning an entry that would exceed a limit."""
    _check_uncommitted(state, run)
    rule = state.terms.filter()
    # Before anything is read: who refuses afterwards has already looked at the patients (section 5).
    after = _admitted(state, run, events)
    return {
        "kind": "reserve",
        "run": run,
        "round": round_number,
        "events": [event.to_json() for event in events],
        "before": _shown(state.epsilon),
        "after": _shown(rule.epsilon(after)),
        "at": at,
    }


def commit_entry(booking: int, at: int) -> dict[str, Any]:
    return {"kind": "commit", "reserve": booking, "at": at}


def encode_line(entry: dict[str, Any], seq: int, previous: str) -> bytes:
    return rfc8785.dumps({"seq": seq, "prev": previous, "entry": entry})


def digest_of(line: bytes) -> str:
    return hashlib.sha256(labels.DP_LEDGER + line).hexdigest()


def extended(state: LedgerState | None, entry: dict[str, Any]) -> tuple[LedgerState, bytes]:
    """The state after one more entry, and the line to write for it."""
    seq = 0 if state is None else len(state.digests)
    line = encode_line(entry, seq, "" if state is None else state.head.digest)
    return _apply(state, entry, digest_of(line)), line


def read(lines: list[bytes]) -> LedgerState:
    """Check the whole chain. Raises LedgerError that names the first bad line."""
    state: LedgerState | None = None
    for seq, line in enumerate(lines):
        try:
            value = json.loads(line)
            entry = value["entry"]
            following, again = extended(state, entry)
            # One comparison covers number, previous hash, unknown fields and spelling: the line is made again from its
            # entry, and must have the same bytes.
            if again != line:
                raise ValueError("the chain is broken or the line is not canonical")
        except LedgerError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError, ToolkitError) as error:
            raise LedgerError(
                f"line {seq + 1} is not valid: {error}",
                hint="restore the newest copy; if there is none, this population's budget counts as spent",
            ) from error
        state = following
    if state is None:
        raise LedgerError("the ledger is empty", hint="restore the newest copy")
    return state


def _apply(state: LedgerState | None, entry: dict[str, Any], digest: str) -> LedgerState:
    kind = entry["kind"]
    if kind == "open" and entry["format"] != FORMAT:  # first: another format may have other fields
        raise LedgerError(f"ledger of format {entry['format']}, this version knows {FORMAT}", hint=OTHER_VERSION)
    if set(entry) != _FIELDS.get(kind) or type(entry["at"]) is not int:
        raise ValueError("unknown entry or unexpected fields")
    if (state is None) != (kind == "open"):
        raise ValueError("a ledger is opened once, in its first line")
    if state is None:
        return _opened(entry, digest)
    digests = (*state.digests, digest)
    match kind:
        case "version":
            return replace(state, version=_text(entry["version"]), digests=digests)
        case "run":
            return replace(_begun(state, entry), digests=digests)
        case "resume":
            return replace(state, resumed=(*state.resumed, (_text(entry["run"]), len(state.digests))), digests=digests)
        case "reserve":
            return replace(_reserved(state, entry), digests=digests)
        case _:
            return replace(state, bookings=_committed(state.bookings, entry["reserve"]), digests=digests)


def _opened(entry: dict[str, Any], digest: str) -> LedgerState:
    terms = Terms(
        population=_text(entry["population"]),
        unit=Unit(entry["unit"]),
        delta=_real(entry["delta"]),
        cap=_real(entry["cap"]),
        order=_real(entry["order"]),
        planned=None if entry["plan"] is None else PinnedSchedule.from_json(entry["plan"]),
    )
    terms.filter()
    return LedgerState(terms=terms, version=_text(entry["version"]), sides=_text(entry["sides"]), digests=(digest,))


def _begun(state: LedgerState, entry: dict[str, Any]) -> LedgerState:
    terms = RunTerms.from_json({name: entry[name] for name in ("run", "epsilon", "order", "plan")})
    terms.filter(state.terms.delta)
    # A plan that is fixed when something has been booked already was not fixed in advance (section 6).
    if state.run_terms(terms.run) is not None or state.of_run(terms.run):
        raise ValueError("a run is begun once, before its first booking")
    return replace(state, runs=(*state.runs, terms))


def _admitted(state: LedgerState, run: str, events: tuple[MechanismEvent, ...]) -> Parts:
    """The total after these events, if both limits hold: of the run, and of all runs."""
    if (terms := state.run_terms(run)) is not None:
        try:
            terms.filter(state.terms.delta).admit(state.of_run(run), events)
        except BudgetExhausted as error:
            raise BudgetExhausted(f"run {run}: {error.message}", hint=error.hint) from error
    return state.terms.filter().admit(state.total, events)


def _check_uncommitted(state: LedgerState, run: str) -> None:
    """A site whose training ends without a result would otherwise spend its whole budget on nothing."""
    if state.uncommitted(run) >= MOST_UNCOMMITTED:
        raise BudgetExhausted(
            f"the last {MOST_UNCOMMITTED} bookings of run {run} were booked, but their training did not finish",
            where=state.terms.population,
            hint="find out why training stops, then `site-agent ledger --resume`; what was booked stays booked",
        )


def _reserved(state: LedgerState, entry: dict[str, Any]) -> LedgerState:
    events = tuple(MechanismEvent.from_json(event) for event in entry["events"])
    if not events or type(entry["round"]) is not int:
        raise ValueError("a reservation names a round and at least one event")
    run, rule = _text(entry["run"]), state.terms.filter()
    after = _admitted(state, run, events)
    for name, epsilon in (("before", state.epsilon), ("after", rule.epsilon(after))):
        # Two machines may differ in the last bits of a logarithm, but not in the fourth digit (section 5).
        if not math.isclose(float(entry[name]), epsilon, rel_tol=1e-4, abs_tol=1e-4):
            raise ValueError(f"epsilon {name} is written as {entry[name]} but its events give {epsilon:.6f}")
    booking = Booking(seq=len(state.digests), run=run, round=entry["round"], events=events)
    return replace(state, total=after, bookings=(*state.bookings, booking))


def _committed(bookings: tuple[Booking, ...], seq: object) -> tuple[Booking, ...]:
    if not any(booking.seq == seq and not booking.committed for booking in bookings):
        raise ValueError("a commit names no open reservation")
    return tuple(replace(booking, committed=True) if booking.seq == seq else booking for booking in bookings)


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise ValueError("a name is missing or too long")
    return value


def _real(value: object) -> float:
    if not isinstance(value, str) or repr(float(value)) != value:
        raise ValueError("a number is not in canonical form")
    return float(value)


def _shown(epsilon: float) -> str:
    return f"{epsilon:.6f}"


# Writing.


class Reservation:
    """The events that were paid for, each to be used once, and the noise source for them.

    It is the only way to noise and parameters: a mechanism without a reservation has neither.
    """

    def __init__(self, *, seq: int, events: Sequence[MechanismEvent], noise: NoiseSource) -> None:
        self.seq = seq
        self.noise = noise
        self._unused = list(events)

    def holds(self, kind: Mechanism) -> int:
        """How many events of this kind are unused: what was paid for decides what is released (section 2)."""
        return sum(event.kind is kind for event in self._unused)

    def claim(self, kind: Mechanism) -> MechanismEvent:
        """The next unused event of this kind. Raises BudgetExhausted when there is none: it was not paid for."""
        for index, event in enumerate(self._unused):
            if event.kind is kind:
                return self._unused.pop(index)
        raise BudgetExhausted(f"no unused {kind} event in this reservation", hint="reserve it before the data are read")


class Ledger:
    """One writer at a time; readers use `read` on a copy of the lines."""

    def __init__(self, store: LedgerStore, state: LedgerState, clock: Clock) -> None:
        self._store = store
        self._state = state
        self._clock = clock
        self._failed = False

    @classmethod
    def create(
        cls, store: LedgerStore, terms: Terms, *, version: str, sides: str = NO_SIDES, clock: Clock | None = None
    ) -> Ledger:
        """A command of the operator, once per population; never done by the agent: a new ledger would be a new budget.

        :param version: name of the data set as it is now.
        :param sides: digest of the key that gives patients their sides.
        """
        clock = clock or SystemClock()
        state, line = extended(None, open_entry(terms, version, clock.now_ms(), sides=sides))
        store.create(line, state.head)
        return cls(store, state, clock)

    @classmethod
    def open(
        cls, store: LedgerStore, *, population: str, witnessed: Iterable[LedgerAnchor] = (), clock: Clock | None = None
    ) -> Ledger:
        """Check the chain, and that it contains the anchor and every line that is known from elsewhere (section 5).

        :param witnessed: lines known from outside of the ledger's folder: the privacy log, an operator's note.
        """
        lines, kept = store.load()
        state = read(lines)
        for head in (kept, *witnessed):
            if not state.contains(head):
                raise LedgerError(
                    f"the ledger ends at line {state.head.seq + 1} but line {head.seq + 1} was seen before, or differs",
                    hint="it is an old or shortened copy: restore the newest one, or the same budget is spent twice",
                )
        if state.terms.population != population:
            raise LedgerError("this ledger belongs to another patient population", hint="check the path in the config")
        return cls(store, state, clock or SystemClock())

    @property
    def state(self) -> LedgerState:
        return self._state

    def spent(self) -> Spent:
        """Both analyses of everything booked so far."""
        return spent(self._state.history, self._state.terms.delta)

    def reserve(
        self, *, run: str, round_number: int, events: Sequence[MechanismEvent], noise: NoiseSource
    ) -> Reservation:
        """Book the cost of a round before its data are read; durable when it returns.

        :raises BudgetExhausted: if epsilon would exceed the cap.
        """
        if not noise.secret:
            raise PolicyViolation(
                "noise from a seed can be repeated and subtracted again, so it cannot be booked",
                where="privacy ledger",
                hint="run without a noise seed; seeded runs are for experiments and are marked not private",
            )
        entry = reserve_entry(self._state, run, round_number, tuple(events), self._clock.now_ms())
        # The line and the anchor are on disk when this returns, and only then is there a permission to train.
        self._append(entry)
        return Reservation(seq=self._state.head.seq, events=events, noise=noise)

    def begin_run(self, terms: RunTerms) -> None:
        """Fix what a run may cost and what it plans, before its first booking. Does nothing if it was begun before: a
        plan that changes later was not fixed in advance."""
        if self._state.run_terms(terms.run) is None:
            self._append({"kind": "run", **terms.to_json(), "at": self._clock.now_ms()})

    def resume(self, run: str) -> None:
        """A command of the operator, after bookings that were not trained: book again. Nothing is refunded."""
        self._append({"kind": "resume", "run": run, "at": self._clock.now_ms()})

    def commit(self, reservation: Reservation) -> None:
        """Note that the round was trained. Changes no cost: an uncommitted reservation counts the same."""
        self._append(commit_entry(reservation.seq, self._clock.now_ms()))

    def new_version(self, version: str) -> None:
        """The data set changed. Earlier patients keep what was spent on them, so the ledger continues unchanged."""
        if version != self._state.version:
            self._append({"kind": "version", "version": version, "at": self._clock.now_ms()})

    def _append(self, entry: dict[str, Any]) -> None:
        if self._failed:
            raise LedgerError("an earlier write failed", hint="check the disk, then restart")
        state, line = extended(self._state, entry)
        try:
            self._store.append(line, state.head)
        except BaseException:
            # What is on disk is unknown now, so this process books nothing more.
            self._failed = True
            raise
        self._state = state
