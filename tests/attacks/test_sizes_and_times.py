"""A17: what a coordinator reads off sizes and times. Two hospitals, one with ten times the work, in one trace."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from security.audit.facts import History, read_history
from tests.support.federation import NumberFederation

pytestmark = [pytest.mark.xdist_group("federation"), pytest.mark.timeout(120)]
SMALL, LARGE = "site0", "site1"
LITTLE, MUCH = 0.08, 0.8
ROUNDS = 5


def trace(folder: Path, ready_slot: float) -> History:
    """What the coordinator saw, from its own log; the first round, when processes start, is left out below."""
    federation = NumberFederation(folder, rounds=ROUNDS, ready_slot=ready_slot)
    for site, seconds in ((SMALL, LITTLE), (LARGE, MUCH)):
        (federation.grounds.site(site) / "work").write_text(str(seconds))
    with federation.running():
        federation.wait_published(ROUNDS)
        federation.wait_checked(ROUNDS)
    return read_history(federation.grounds.logs[0], origin="", name="", role="")


def lateness(history: History) -> float:
    """By how much the large site is ready later than the small one, in seconds: the middle of some rounds."""
    ready: dict[tuple[str, int], int] = {}
    for record in history.of("ingress"):
        if record.body["message"] == "Ready" and record.round is not None:
            ready.setdefault((record.body["sender"], record.round), record.ts)
    gaps = [ready[LARGE, number] - ready[SMALL, number] for number in range(2, ROUNDS + 1)]
    return statistics.median(gaps) / 1000


def sizes(history: History, site: str) -> dict[tuple[int, str], set[int]]:
    """Bytes of every message of a burst, by round and type."""
    found: dict[tuple[int, str], set[int]] = {}
    for record in history.of("ingress"):
        if record.body["sender"] == site and record.round is not None and record.round > 1:
            found.setdefault((record.round, record.body["message"]), set()).add(record.body["bytes"])
    return found


def test_neither_sizes_nor_times_tell_how_much_data_there_is(tmp_path: Path) -> None:
    history = trace(tmp_path / "slots", 1.6)
    assert abs(lateness(history)) < (MUCH - LITTLE) / 2
    small, large = sizes(history, SMALL), sizes(history, LARGE)
    assert {kind for _, kind in small} >= {"Ready", "Advert", "Shares", "UploadFrame", "Agree"}
    shared = small.keys() & large.keys()
    assert len(shared) >= 5 * (ROUNDS - 1)
    assert all(small[key] == large[key] for key in shared)


def test_without_slots_the_time_tells_twin(tmp_path: Path) -> None:
    assert lateness(trace(tmp_path / "at-once", 0.001)) > (MUCH - LITTLE) / 2
