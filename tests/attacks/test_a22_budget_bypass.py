"""A22: a coordinator that wants more rounds than the budget holds, by ordering, by killing, or by a cut ledger.

The attacker's aim is always the same: many noisy copies of one update, whose mean has no noise left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lazaret.errors import BudgetExhausted, LedgerError
from security.dp import filter as rule
from security.dp.accountant import MechanismEvent, added, dp_sgd_event, pld_epsilon, rate_at_least
from security.dp.ledger import Ledger, LedgerState, Reservation, Terms, Unit
from security.dp.ledger_store import FileStore
from security.dp.noise import NoiseSource

TERMS = Terms(population="skin", unit=Unit.PATIENT, delta=1e-5, cap=2.0, order=12.0)
ROUND = dp_sgd_event(multiplier=2.0, clip=1.0, rate=rate_at_least(0.05), steps=100)


def store(directory: Path) -> FileStore:
    return FileStore(directory / "data" / "ledger.jsonl", directory / "state" / "anchor")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    with store(tmp_path) as files:
        Ledger.create(files, TERMS, version="v1")
    return tmp_path


def ordered_rounds(directory: Path, rounds: int) -> int:
    """An honest site that does every round it is ordered to do, and sends. Returns how often it sent."""
    sent = 0
    with store(directory) as files:
        ledger = Ledger.open(files, population="skin")
        for number in range(rounds):
            try:
                reservation = ledger.reserve(run="r", round_number=number, events=[ROUND], noise=NoiseSource())
            except BudgetExhausted:
                break
            sent += 1
            ledger.commit(reservation)
    return sent


def test_rounds_past_the_cap_are_not_trained(site: Path) -> None:
    first = ordered_rounds(site, 500)
    assert 1 < first < 500
    # Restarting the site and ordering again gives the coordinator nothing.
    assert ordered_rounds(site, 500) == 0
    assert pld_epsilon([ROUND] * first, TERMS.delta) <= TERMS.cap


def test_rounds_past_the_cap_twin(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule.BudgetFilter, "admit", lambda self, before, events: added(before, events))
    sent = ordered_rounds(site, 60)
    assert sent == 60
    assert pld_epsilon([ROUND] * sent, TERMS.delta) > TERMS.cap


CRASHING_SITE = """
import os, signal, sys
from pathlib import Path
from security.dp.accountant import dp_sgd_event, rate_at_least
from security.dp.ledger import Ledger
from security.dp.ledger_store import FileStore
from security.dp.noise import NoiseSource
from lazaret.errors import BudgetExhausted
directory = Path(sys.argv[1])
files = FileStore(directory / "data" / "ledger.jsonl", directory / "state" / "anchor")
ledger = Ledger.open(files, population="skin")
event = dp_sgd_event(multiplier=2.0, clip=1.0, rate=rate_at_least(0.05), steps=100)
try:
    ledger.reserve(run="r", round_number=1, events=[event], noise=NoiseSource())
except BudgetExhausted:
    sys.exit(7)
with open(directory / "released", "a") as released:
    released.write("one noisy update\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_site_killed_in_every_round_still_stops_at_its_cap(site: Path) -> None:
    command = [sys.executable, "-c", CRASHING_SITE, str(site)]
    codes = [subprocess.run(command, timeout=60, check=False).returncode for _ in range(4)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 7, 7]
    assert (site / "released").read_text().count("\n") == 2
    with store(site) as files:
        state = Ledger.open(files, population="skin").state
    assert [booking.committed for booking in state.bookings] == [False, False]
    assert state.epsilon <= TERMS.cap


def releases_of_a_crashing_site(directory: Path, lives: int) -> int:
    """Each life opens the ledger, reserves, releases, and ends before it can commit."""
    released = 0
    for _ in range(lives):
        with store(directory) as files:
            ledger = Ledger.open(files, population="skin")
            try:
                ledger.reserve(run="r", round_number=1, events=[ROUND], noise=NoiseSource())
            except BudgetExhausted:
                continue
            released += 1
    return released


def test_a_site_killed_in_every_round_twin(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that charged when a round is done, not before it begins, would release the same round for ever."""
    assert releases_of_a_crashing_site(site, 8) == 2

    def charge_later(
        ledger: Ledger, *, run: str, round_number: int, events: list[MechanismEvent], noise: NoiseSource
    ) -> Reservation:
        return Reservation(seq=0, events=events, noise=noise)

    monkeypatch.setattr(Ledger, "reserve", charge_later)
    released = releases_of_a_crashing_site(site, 8)
    assert released == 8
    assert pld_epsilon([ROUND] * released, TERMS.delta) > TERMS.cap


@pytest.mark.parametrize("cut", [1, 30, 400])
def test_a_cut_ledger_sends_nothing(site: Path, cut: int) -> None:
    ordered_rounds(site, 2)
    path = site / "data" / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(LedgerError):
        ordered_rounds(site, 1)


def test_a_cut_ledger_twin(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the anchor, a ledger cut back to its first line starts the budget anew."""
    first = ordered_rounds(site, 500)
    path = site / "data" / "ledger.jsonl"
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    monkeypatch.setattr(LedgerState, "contains", lambda self, head: True)
    assert ordered_rounds(site, 500) == first
    assert pld_epsilon([ROUND] * 2 * first, TERMS.delta) > TERMS.cap
