"""The privacy ledger of a running agent: reserves before data are read, and writes each step into the privacy log.

Ledger, then log, then data: what a crash leaves out of the log is added at the next start, so that epsilon can be
recomputed from the log alone. The log in turn witnesses the ledger: if it names a reservation that the ledger does not
have, the ledger was restored from an old copy (docs/spec/differential-privacy.md, section 5).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from lazaret.errors import LedgerError, PolicyViolation
from security import labels
from security.clock import Clock
from security.crypto import encoding
from security.dp.accountant import ACCOUNTANT, MechanismEvent, added, merged
from security.dp.ledger import Booking, Ledger, LedgerState, Reservation
from security.dp.ledger_store import FileStore
from security.dp.noise import NoiseSource
from security.identity.manifest import Manifest
from security.log.events import DpCommitted, DpReserved, TrainDone
from security.log.reader import LogReader
from security.log.schema import decimal
from security.log.writer import AuditLog
from site_agent import log_events
from site_agent.config import SiteConfig
from site_agent.privacy import (
    LEDGER_HINT,
    Limits,
    PrivatePlan,
    check_sides_key,
    check_terms,
    ledger_files,
    validation_line,
)

say = logging.getLogger("site-agent")
RELATION: Final = "add-or-remove-one"


class Budget:
    """What this site may still spend. Reserve and commit are called from the training thread, the rest from anywhere.

    :ivar plan: the run as it will be trained here.
    """

    def __init__(self, plan: PrivatePlan, limits: Limits, ledger: Ledger, store: FileStore, log: AuditLog, key: bytes):
        self.plan = plan
        self._limits, self._ledger, self._store, self._log, self._key = limits, ledger, store, log, key
        self._unlogged: list[Booking] = []  # committed, and not in the log yet

    @property
    def shares_noise(self) -> bool:
        """Whether an update holds whole numbers with this site's part of the noise."""
        return self.plan.schedule.shared is not None

    @property
    def state(self) -> LedgerState:
        return self._ledger.state

    def reserve(
        self, *, run: str, round_number: int, events: Sequence[MechanismEvent], noise: NoiseSource
    ) -> Reservation:
        """Pay for a round, on disk in ledger and log before this returns.

        :raises BudgetExhausted: if this run or these patients have no room left; nothing was booked.
        """
        self._limits.admit(self.state, tuple(events))
        self._ledger.begin_run(self._limits.run)
        reservation = self._ledger.reserve(run=run, round_number=round_number, events=events, noise=noise)
        self.note_reserved(self.state.bookings[-1])
        return reservation

    def reserve_planned(self, round_number: int, events: Sequence[MechanismEvent]) -> Reservation:
        """Pay for a round that a trainer in another process asks for. Its noise is drawn there, under the same number.

        :raises PolicyViolation: if it asks for anything but what the plan says of a site's round.
        """
        planned = (self.plan.schedule.round_events(round_number, first=first) for first in (False, True))
        if not any(tuple(events) == tuple(known) for known in planned):
            raise PolicyViolation("a round asks for other releases than the plan has", where="privacy ledger")
        return self.reserve(run=self.plan.run, round_number=round_number, events=events, noise=NoiseSource())

    def commit(self, reservation: Reservation) -> None:
        """The round was trained. Changes no cost, but no vector may leave without it.

        The log is told by `log_commits`, at a public time: when training ended tells how many images there are.
        """
        self._ledger.commit(reservation)
        self._unlogged.append(next(booking for booking in self.state.bookings if booking.seq == reservation.seq))

    def log_commits(self) -> None:
        """To be called before `train.done` is logged, and so before READY."""
        while self._unlogged:
            self.note_committed(self._unlogged.pop(0))

    def note_committed(self, booking: Booking) -> None:
        self._log.append(DpCommitted(**self._fields(booking)), run=self._run(booking), round=booking.round)

    def note_reserved(self, booking: Booking) -> None:
        self._log.append(DpReserved(**self._fields(booking)), run=self._run(booking), round=booking.round)

    def take_version(self, version: str) -> None:
        """The data as they are now. What was spent on earlier patients stays spent, so that the ledger continues."""
        self._ledger.new_version(version)

    def commitment(self) -> bytes:
        """To the ledger's newest line, for the advert. Other sites learn nothing from it; the salt can be computed
        again for an auditor, and by nobody else (section 5).
        """
        line = encoding.u64(self.state.head.seq) + encoding.text(self.state.head.digest)
        salt = hmac.digest(self._key, labels.DP_LEDGER_SALT + line, hashlib.sha256)
        return hashlib.sha256(labels.DP_LEDGER_COMMITMENT + encoding.tlv(salt) + line).digest()

    def close(self) -> None:
        """Let the ledger go for another process."""
        self._store.close()

    def _run(self, booking: Booking) -> str:
        """The log's name of a run; of other federations' runs, the ledger's."""
        return booking.run.rpartition("/")[2] if booking.run == self.plan.run else booking.run

    def _fields(self, booking: Booking) -> dict[str, Any]:
        """What an entry about a booking says."""
        state = self.state
        terms, rule = state.terms, state.terms.filter()
        before = merged(event for other in state.bookings if other.seq < booking.seq for event in other.events)
        after = rule.epsilon(added(before, booking.events))
        return {
            "reservation": ident(state, booking),
            "mechanisms": tuple(event.to_json() for event in booking.events),
            "delta": decimal(terms.delta),
            "unit": terms.unit.value,
            "relation": RELATION,
            "accountant": ACCOUNTANT,
            "order": decimal(terms.order),
            "plan": None if terms.planned is None else terms.planned.to_json(),
            "epsilon_round": f"{after - rule.epsilon(before):.6f}",
            "epsilon_total": f"{after:.6f}",
            "cap": decimal(terms.cap),
        }


def ident(state: LedgerState, booking: Booking) -> str:
    """A reservation's name in the log: half of its ledger line's hash."""
    return state.digests[booking.seq][:32]


def open_budget(
    config: SiteConfig, manifest: Manifest, log: AuditLog, folder: Path, *, key: bytes, clock: Clock
) -> Budget | None:
    """Open this population's ledger and bring the privacy log up to it; None without differential privacy.

    :param folder: the privacy log's.
    :raises LedgerError: if the ledger is missing, damaged, rolled back or of other terms. Nothing may be trained then.
    """
    plan = PrivatePlan.of(config, manifest)
    if plan is None:
        return None
    store = ledger_files(config)
    if store.peek() is None:
        raise LedgerError("there is no privacy ledger for these patients", where=str(config.ledger), hint=LEDGER_HINT)
    try:
        ledger = Ledger.open(store, population=config.privacy.population, clock=clock)
        check_terms(plan, ledger.state.terms)
        check_sides_key(config, ledger.state)
        logged = logged_reservations(folder)
        check_logged(ledger.state, logged, str(config.ledger))
    except BaseException:
        store.close()
        raise
    budget = Budget(plan, Limits.of(config, plan, ledger.state), ledger, store, log, key)
    for booking in ledger.state.bookings:
        if ident(ledger.state, booking) not in logged:
            budget.note_reserved(booking)
    _log_ended_rounds(budget, manifest, log, folder)
    noise, epsilon = plan.schedule.multiplier, ledger.state.epsilon
    say.info("differential privacy: noise %g over the clip, epsilon %.3f is booked so far", noise, epsilon)
    say.info("%s", validation_line(plan.schedule))
    return budget


def _log_ended_rounds(budget: Budget, manifest: Manifest, log: AuditLog, folder: Path) -> None:
    """Rounds that were trained by an agent which ended before their public time came."""
    committed, trained = set[str](), set[tuple[str | None, int | None]]()
    for record in LogReader(folder).checked(DpCommitted.type, TrainDone.type):
        if record.type == DpCommitted.type:
            committed.add(record.body["reservation"])
        else:
            trained.add(record.key)
    for booking in budget.state.bookings:
        if booking.committed and booking.run == budget.plan.run and ident(budget.state, booking) not in committed:
            budget.note_committed(booking)
            if (manifest.run, booking.round) not in trained:
                done = log_events.trained_before(manifest, booking.round, steps=budget.plan.schedule.steps)
                log.append(done.event, run=manifest.run, round=booking.round)


def logged_reservations(folder: Path) -> frozenset[str]:
    """What the privacy log says was reserved."""
    return frozenset(record.body["reservation"] for record in LogReader(folder).checked(DpReserved.type))


def check_logged(state: LedgerState, logged: Collection[str], where: str) -> None:
    """Every reservation in the log must be in the ledger; otherwise it is not the ledger that was used."""
    known = {digest[:32] for digest in state.digests}
    missing = [reservation for reservation in logged if reservation not in known]
    if missing:
        raise LedgerError(
            f"the privacy log names {len(missing)} reservation(s) that this ledger does not have",
            where=where,
            hint="it is an old copy, or [privacy] population was changed during the run: restore the newest ledger",
        )
