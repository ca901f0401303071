"""The ledger's bytes and what they add up to; pure (docs/spec/differential-privacy.md, section 5).

One canonical JSON object (RFC 8785) per line. Each line carries its number and the hash of the line before, so that a
line cannot be changed, left out or moved without breaking the chain. Cost is always recomputed from the events; the
epsilon written beside them is for the reader, and must agree.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import rfc8785

from security import labels
from security.dp.events import MechanismEvent
from security.dp.filter import RenyiFilter
from security.errors import LedgerError, ToolkitError

FORMAT: Final = 1
_FIELDS: Final = {
    "open": {"at", "cap", "delta", "format", "kind", "order", "population", "unit", "version"},
    "version": {"at", "kind", "version"},
    "reserve": {"at", "after", "before", "events", "kind", "round", "run"},
    "commit": {"at", "kind", "reserve"},
}


class Unit(StrEnum):
    """Whom epsilon protects. Two images of one patient under `IMAGE` are two units."""

    PATIENT = "patient"
    LESION = "lesion"
    STUDY = "study"
    IMAGE = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A point of the chain: line number and hash. Enough to recognise a shortened or exchanged ledger."""

    seq: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a ledger promises for one population; fixed when it is opened."""

    population: str
    unit: Unit
    delta: float
    cap: float
    order: float

    def filter(self) -> RenyiFilter:
        return RenyiFilter(order=self.order, delta=self.delta, cap=self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """One reservation as it stands in the ledger. It counts whether or not it was committed."""

    seq: int
    run: str
    round: int
    events: tuple[MechanismEvent, ...]
    committed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """Everything a ledger's lines add up to."""

    terms: Terms
    version: str
    divergence: float = 0.0
    bookings: tuple[Booking, ...] = ()
    digests: tuple[str, ...] = ()

    @property
    def head(self) -> Head:
        return Head(seq=len(self.digests) - 1, digest=self.digests[-1])

    @property
    def history(self) -> tuple[MechanismEvent, ...]:
        return tuple(event for booking in self.bookings for event in booking.events)

    @property
    def epsilon(self) -> float:
        return self.terms.filter().epsilon(self.divergence)

    def contains(self, head: Head) -> bool:
        return 0 <= head.seq < len(self.digests) and self.digests[head.seq] == head.digest


def open_entry(terms: Terms, version: str, at: int) -> dict[str, Any]:
    terms.filter()
    return {
        "kind": "open",
        "format": FORMAT,
        "population": terms.population,
        "unit": terms.unit.value,
        "delta": repr(float(terms.delta)),
        "cap": repr(float(terms.cap)),
        "order": repr(float(terms.order)),
        "version": version,
        "at": at,
    }


def reserve_entry(
    state: LedgerState, run: str, round_number: int, events: tuple[MechanismEvent, ...], at: int
) -> dict[str, Any]:
    """Raises BudgetExhausted instead of returning an entry that passes the cap."""
    rule = state.terms.filter()
    after = rule.admit(state.divergence, events)
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


def version_entry(version: str, at: int) -> dict[str, Any]:
    return {"kind": "version", "version": version, "at": at}


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
            # One comparison covers number, previous hash, unknown fields of the frame and spelling.
            if again != line:
                raise ValueError("the chain is broken or the line is not canonical")
        except (ValueError, KeyError, TypeError, RecursionError, ToolkitError) as error:
            raise LedgerError(
                f"line {seq + 1} does not belong here: {error}",
                hint="restore the newest copy; if there is none, this population's budget counts as spent",
            ) from error
        state = following
    if state is None:
        raise LedgerError("the ledger is empty", hint="restore the newest copy")
    return state


def _apply(state: LedgerState | None, entry: dict[str, Any], digest: str) -> LedgerState:
    kind = entry["kind"]
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
        case "reserve":
            return replace(_reserved(state, entry), digests=digests)
        case _:
            return replace(state, bookings=_committed(state.bookings, entry["reserve"]), digests=digests)


def _opened(entry: dict[str, Any], digest: str) -> LedgerState:
    if entry["format"] != FORMAT:
        raise ValueError(f"format {entry['format']} is not {FORMAT}")
    terms = Terms(
        population=_text(entry["population"]),
        unit=Unit(entry["unit"]),
        delta=_real(entry["delta"]),
        cap=_real(entry["cap"]),
        order=_real(entry["order"]),
    )
    terms.filter()
    return LedgerState(terms=terms, version=_text(entry["version"]), digests=(digest,))


def _reserved(state: LedgerState, entry: dict[str, Any]) -> LedgerState:
    events = tuple(MechanismEvent.from_json(event) for event in entry["events"])
    if not events or type(entry["round"]) is not int:
        raise ValueError("a reservation names a round and at least one event")
    rule = state.terms.filter()
    after = rule.admit(state.divergence, events)
    for name, epsilon in (("before", state.epsilon), ("after", rule.epsilon(after))):
        # Two machines may differ in the last bits of a logarithm, not in the fourth decimal.
        if not math.isclose(float(entry[name]), epsilon, rel_tol=1e-4, abs_tol=1e-4):
            raise ValueError(f"epsilon {name} is written as {entry[name]} but its events give {epsilon:.6f}")
    booking = Booking(seq=len(state.digests), run=_text(entry["run"]), round=entry["round"], events=events)
    return replace(state, divergence=after, bookings=(*state.bookings, booking))


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
        raise ValueError("a number is not in its one spelling")
    return float(value)


def _shown(epsilon: float) -> str:
    return f"{epsilon:.6f}"
