"""A17: what a coordinator reads off sizes and times. Two hospitals, one with ten times the work, in one trace."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from security.audit.facts import LogHistory, read_history
from site_agent.ready_slots import ReadySlots, slots_of
from tests.support.federation import NumberFederation

pytestmark = pytest.mark.timeout(120)
SMALL, LARGE = "site0", "site1"
LITTLE, MUCH = 0.08, 0.8
ROUNDS = 5


def trace(folder: Path, ready_slot: float) -> LogHistory:
    """What the coordinator saw, from its own log; the first round, when processes start, is left out below."""
    federation = NumberFederation(folder, rounds=ROUNDS, ready_slot=ready_slot)
    for site, seconds in ((SMALL, LITTLE), (LARGE, MUCH)):
        (federation.folders.site(site) / "work").write_text(str(seconds))
    with federation.running():
        federation.wait_published(ROUNDS)
        federation.wait_checked(ROUNDS)
    return read_history(federation.folders.logs[0], origin="", name="", role="")


def lateness(history: LogHistory) -> float:
    """By how much the large site is ready later than the small one, in seconds: the middle of some rounds."""
    ready: dict[tuple[str, int], int] = {}
    for record in history.of("ingress"):
        if record.body["message"] == "Ready" and record.round is not None:
            ready.setdefault((record.body["sender"], record.round), record.ts)
    gaps = [ready[LARGE, number] - ready[SMALL, number] for number in range(2, ROUNDS + 1)]
    return statistics.median(gaps) / 1000


def sizes(history: LogHistory, site: str) -> dict[tuple[int, str], set[int]]:
    """Bytes of every message of an aggregation, by round and type."""
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
    # An advert and a list of shares have a part for each later member: their lengths follow from a site's place in the
    # cohort, which is public.
    by_place = {"Advert", "Shares"}
    assert all(small[key] == large[key] for key in shared if key[1] not in by_place)
    for seen in (small, large):
        for kind in by_place:
            assert len({size for key in shared if key[1] == kind for size in seen[key]}) == 1


def test_without_slots_the_time_tells_twin(tmp_path: Path) -> None:
    assert lateness(trace(tmp_path / "at-once", 0.001)) > (MUCH - LITTLE) / 2


HOUR = 3600
# Training times of two hospitals in milliseconds, round by round: one has nearly twice the images of the other.
FEW = [40_100, 37_000, 39_900, 33_000]
MANY = [63_000, 57_500, 63_900, 60_200]


def times(slots: ReadySlots, elapsed: list[int]) -> list[int]:
    return [slots.due(milliseconds) for milliseconds in elapsed]


def test_two_hospitals_within_a_doubling_are_ready_at_the_same_times() -> None:
    assert times(slots_of(HOUR, None), FEW) == times(slots_of(HOUR, None), MANY) == [64_000] * 4


def test_a_quick_round_after_a_slow_one_tells_nothing_new() -> None:
    assert times(slots_of(HOUR, None), [900, 5_000, 900, 7_900]) == [1000, 8000, 8000, 8000]


def test_a_fixed_slot_that_training_fits_into_tells_nothing_at_all() -> None:
    assert set(times(slots_of(HOUR, 600), [1, 40_100, 599_000])) == {600_000}
    assert times(slots_of(HOUR, 600), [600_001]) == [1_200_000]


@given(st.integers(1, 7 * 86_400), st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_what_the_times_tell_is_bounded(train: int, elapsed: list[int]) -> None:
    """docs/threat-model.md: at most log2(T) + 2 times, never before the work is done, at most twice as late."""
    most = 900 * train
    told = times(slots_of(train, None), elapsed)
    within = {due for due in told if due <= most}
    assert len(within) <= math.log2(max(1, most / 1000)) + 2
    alone = [slots_of(train, None).due(milliseconds) for milliseconds in elapsed]
    for milliseconds, due, first in zip(elapsed, told, alone, strict=True):
        assert milliseconds <= first <= max(1000, 2 * milliseconds)
        assert due >= first


def test_without_slots_every_round_tells_twin() -> None:
    at_once = slots_of(HOUR, 0.001)
    assert times(at_once, FEW) == FEW and times(at_once, MANY) == MANY
