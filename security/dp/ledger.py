"""The privacy ledger of one patient population: reserve before training, never refund, stop before the cap.

A `Reservation` is the permission to train: release functions take their sigma, rate and noise from it, so what is done
is what was booked, and each event can be claimed once. It lives in memory only: after a crash the charge stands and
the permission is gone, whatever had been done with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from security import codec, labels
from security.clock import Clock, SystemClock
from security.dp import ledger_entries as entries
from security.dp.accountant import Spent, spent
from security.dp.events import Mechanism, MechanismEvent
from security.dp.ledger_entries import Head, LedgerState, Terms
from security.dp.noise import NoiseSource
from security.errors import BudgetExhausted, LedgerError, LocalProtocolError, PolicyViolation


class LedgerStore(Protocol):
    """Where the lines are kept."""

    def create(self, line: bytes, head: Head) -> None:
        """Begin a ledger. Raises LedgerError if there is or ever was one."""
        ...

    def load(self) -> tuple[list[bytes], Head]:
        """All lines, and the newest head kept apart from them. Raises LedgerError if either is missing."""
        ...

    def append(self, line: bytes, head: Head) -> None:
        """Durable when it returns."""
        ...


class Reservation:
    """What was paid for, to be used once."""

    def __init__(self, *, seq: int, events: Sequence[MechanismEvent], noise: NoiseSource) -> None:
        self.seq = seq
        self.noise = noise
        self._unused = list(events)

    def holds(self, kind: Mechanism) -> int:
        """How many events of this kind are unused: what was paid for decides what is released."""
        return sum(event.kind is kind for event in self._unused)

    def claim(self, kind: Mechanism) -> MechanismEvent:
        """The next unused event of this kind. Raises BudgetExhausted when there is none: it was not paid for."""
        for index, event in enumerate(self._unused):
            if event.kind is kind:
                return self._unused.pop(index)
        raise BudgetExhausted(f"no unused {kind} event in this reservation", hint="reserve it before the data are read")


def commitment(head: Head, salt: bytes) -> bytes:
    """The salted head for the advert: tells peers nothing, and an auditor who is given the salt everything."""
    if len(salt) != 32:
        raise LocalProtocolError("the salt of a ledger commitment has 32 bytes")
    return hashlib.sha256(
        labels.DP_LEDGER_COMMITMENT + codec.tlv(salt) + codec.u64(head.seq) + codec.text(head.digest)
    ).digest()


class Ledger:
    """One writer at a time; readers use `ledger_entries.read` on a copy."""

    def __init__(self, store: LedgerStore, state: LedgerState, clock: Clock) -> None:
        self._store = store
        self._state = state
        self._clock = clock
        self._failed = False

    @classmethod
    def create(cls, store: LedgerStore, terms: Terms, *, version: str, clock: Clock | None = None) -> Ledger:
        """An act of the operator, once per population. `version` names the data set as it is now."""
        clock = clock or SystemClock()
        state, line = entries.extended(None, entries.open_entry(terms, version, clock.now_ms()))
        store.create(line, state.head)
        return cls(store, state, clock)

    @classmethod
    def open(
        cls, store: LedgerStore, *, population: str, witnessed: Iterable[Head] = (), clock: Clock | None = None
    ) -> Ledger:
        """Check the chain and that it still holds every head that was ever kept elsewhere.

        :param witnessed: heads remembered outside this machine's ledger: the privacy log, an operator's note.
        """
        lines, kept = store.load()
        state = entries.read(lines)
        for head in (kept, *witnessed):
            if not state.contains(head):
                raise LedgerError(
                    f"the ledger ends at line {state.head.seq + 1} but line {head.seq + 1} was seen before, or differs",
                    hint="it was rolled back or cut: restore the newest copy; a rolled-back ledger spends twice",
                )
        if state.terms.population != population:
            raise LedgerError("this ledger belongs to another patient population", hint="check the path in the config")
        return cls(store, state, clock or SystemClock())

    @property
    def state(self) -> LedgerState:
        return self._state

    def spent(self) -> Spent:
        """Both opinions on everything booked so far."""
        return spent(self._state.history, self._state.terms.delta)

    def reserve(
        self, *, run: str, round_number: int, events: Sequence[MechanismEvent], noise: NoiseSource
    ) -> Reservation:
        """Book the cost of a round before its data are touched. Raises BudgetExhausted past the cap."""
        if not noise.secret:
            raise PolicyViolation(
                "noise from a seed can be repeated and taken off again, so it cannot be booked",
                where="privacy ledger",
                hint="run without a noise seed; seeded runs are for experiments and are marked not private",
            )
        entry = entries.reserve_entry(self._state, run, round_number, tuple(events), self._clock.now_ms())
        self._append(entry)
        return Reservation(seq=self._state.head.seq, events=events, noise=noise)

    def commit(self, reservation: Reservation) -> None:
        """Note that the round was trained. Changes no cost: an uncommitted reservation counts the same."""
        self._append(entries.commit_entry(reservation.seq, self._clock.now_ms()))

    def new_version(self, version: str) -> None:
        """The data set changed. Its earlier patients have paid all there is, so the ledger goes on as it is."""
        if version != self._state.version:
            self._append(entries.version_entry(version, self._clock.now_ms()))

    def _append(self, entry: dict[str, Any]) -> None:
        if self._failed:
            raise LedgerError("an earlier write failed", hint="check the disk, then restart")
        state, line = entries.extended(self._state, entry)
        try:
            self._store.append(line, state.head)
        except BaseException:
            # What reached the disk is unknown, so nothing more may be built on it in this process.
            self._failed = True
            raise
        self._state = state
