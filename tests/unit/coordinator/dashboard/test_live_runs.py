"""Runs before and after this one, the estimated end, and the part of each log that nobody has witnessed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import database
from coordinator.dashboard.live import OtherRuns, estimated_end, with_gap
from coordinator.effects import PUBLISHED, CloseRound, OpenRound
from coordinator.storage import Storage
from security.secagg.coordinator.rounds import RoundStart
from tests.support.hub_world import Hub

MINUTE = 60_000


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub.make(tmp_path)
    yield made
    made.close()


def content(hub: Hub) -> dict[str, Any]:
    hub.look()
    return json.loads(hub.page.json().body)


def queue_next(hub: Hub, run: str) -> None:
    world, authority = hub.world, hub.world.authority
    plan = authority.plan_path.read_text().replace('run = "run-1"', f'run = "{run}"')
    world.write_plan(plan.replace("rounds = 5", "rounds = 7"))
    world.publish()
    manifest = world.folder / f"{run}.json"
    manifest.write_bytes(world.published())
    hub.ready.shell.queue.add(manifest, authority.folder / "initial.safetensors", hub.ready.identity, now_ms=world.now)


def ended_run(state: Path, name: str, *, opened: int, best: int | None = None) -> None:
    """A finished run as the storage leaves it."""
    storage = Storage(state / "runs" / name)
    storage.belongs_to("lesions", name)
    start = RoundStart(round=1, state_hash=bytes(32), config_hash=bytes(32), prev_result=bytes(32))
    storage.keep([OpenRound(start)], now_ms=opened)
    storage.keep([CloseRound(1, PUBLISHED)], now_ms=opened + MINUTE)
    if best is not None:
        storage.note_best(best)
    storage.close()


def test_runs_are_listed_in_their_order(hub: Hub) -> None:
    assert [(run["run"], run["state"]) for run in content(hub)["runs"]] == [("run-1", "now")]
    for name, opened in (("pilot-b", 2 * MINUTE), ("pilot-a", MINUTE)):
        ended_run(hub.storage.folder, name, opened=opened)
    queue_next(hub, "run-2")
    found = content(hub)["runs"]
    assert [(run["run"], run["state"]) for run in found] == [
        ("pilot-a", "over"), ("pilot-b", "over"), ("run-1", "now"), ("run-2", "waits"),
    ]  # fmt: skip
    assert found[0]["published"] == 1 and found[0]["began"] == MINUTE and found[0]["ended"] == 2 * MINUTE
    assert found[2]["planned"] == 5 and found[2]["best"] is None and found[3]["planned"] == 7


def test_the_best_round_of_a_run_stays_known_when_it_is_over(hub: Hub) -> None:
    ended_run(hub.storage.folder, "pilot", opened=MINUTE, best=1)
    ended_run(hub.storage.folder, "without-scores", opened=2 * MINUTE)
    assert [run["best"] for run in content(hub)["runs"]] == [1, None, None]


def test_a_run_whose_files_were_archived_or_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / database.FILE).write_bytes(b"not a database, but long enough to look at")
    found = OtherRuns(tmp_path).read({"run": "run-1"})
    assert {run["run"]: run.get("published") for run in found} == {"empty": None, "broken": None, "run-1": None}


def row(number: int, closed: int | None, outcome: str | None = PUBLISHED) -> list[Any]:
    return [number, 0, closed, outcome]


def test_the_end_is_estimated_from_the_newest_rounds() -> None:
    rounds = [row(number, number * MINUTE) for number in range(1, 6)]
    assert estimated_end([*rounds, row(6, None, None)], completed=5, planned=8) == 8 * MINUTE
    # One long night does not count for all rounds, and one that gave no model costs its time.
    late = [*rounds, row(6, 100 * MINUTE, "lost"), row(7, 700 * MINUTE)]
    assert estimated_end(late, completed=6, planned=8) == 702 * MINUTE


def test_nothing_is_estimated_from_nothing() -> None:
    assert estimated_end([], completed=0, planned=3) is None
    assert estimated_end([row(1, MINUTE)], completed=1, planned=3) is None
    assert estimated_end([row(1, MINUTE), row(2, 2 * MINUTE)], completed=2, planned=2) is None


def test_a_paused_run_has_no_end(hub: Hub) -> None:
    assert content(hub)["now"]["end"] is None


def test_the_gap_is_what_no_other_party_holds() -> None:
    witnesses = [{"name": "hub", "size": 90}, {"name": "linz", "size": 70}]
    log = {"log": "graz", "size": 90, "root": "", "witnesses": witnesses}
    assert with_gap(log, "hub")["gap"] == 20 and with_gap(log, "hub")["witnessed"] == 70
    assert with_gap(log | {"witnesses": []}, "hub")["gap"] == 90
    own = {"log": "hub", "size": 90, "entries": 95, "root": "", "witnesses": [{"name": "graz", "size": 90}]}
    assert with_gap(own, "hub")["gap"] == 5
    ahead = log | {"witnesses": [{"name": "linz", "size": 99}]}
    assert with_gap(ahead, "hub")["gap"] == 0
