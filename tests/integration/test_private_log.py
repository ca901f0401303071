"""What a site's log tells about the number of its images, under differential privacy: nothing, also not by its times.

Real agents, ledgers, logs and training; the clock is set forward by as much as a site has images.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from npr.training import LocalReport
from security.identity.manifest import Manifest
from security.log.events import TrainDone
from security.secagg.effects import Log
from site_agent import log_events
from site_agent.contribution import LocalResult
from site_agent.effects import LogCommits
from site_agent.session import Session
from tests.support.private_world import HOSPITALS, PrivateWorld
from tests.support.site_world import SLOT_SECONDS, SiteWorld

pytestmark = pytest.mark.timeout(300)
GRAZ, *_ = HOSPITALS
THREE = HOSPITALS[:3]
SMALL, LARGE = 0.004, 0.04
MS_PER_IMAGE = 10
DRAWN = re.compile(r"[0-9a-f]{32,}|[0-9A-Za-z+/=]{43,}")


class Hospital:
    """One agent whose training takes a time that grows with its images."""

    def __init__(self, folder: Path, scale: float) -> None:
        self.world = world = PrivateWorld(folder, sites=THREE)
        path = world.configs[GRAZ]
        path.write_text(path.read_text().replace("scale=0.004", f"scale={scale}"))
        world.create_ledgers()
        world.start(GRAZ)
        world.hub.connect(GRAZ)
        trainer = world.trainers[GRAZ]
        self.images = len(trainer.site.train)
        work = trainer._local_round

        def slow(number: int) -> LocalReport:
            report = work(number)
            world.clock.advance(MS_PER_IMAGE * self.images)
            return report

        trainer._local_round = slow  # type: ignore[method-assign]

    def train(self) -> None:
        self.world.hub.order((GRAZ,))
        self.world.work(GRAZ)

    def round(self) -> list[dict[str, Any]]:
        """Up to READY; what the log says of it."""
        self.train()
        self.world.tick(SLOT_SECONDS * 1000 - MS_PER_IMAGE * self.images)
        return [entry for entry in self.log() if entry["round"] in (None, self.world.hub.round)]

    def log(self) -> list[dict[str, Any]]:
        segments = sorted((self.world.agents[GRAZ].state_dir.log / "segments").glob("*.jsonl"))
        return [json.loads(line) for path in segments for line in path.read_text().splitlines()]


def public(value: Any) -> Any:
    """What differs between any two sites is left out: keys, keyed or chained digests. And the number of prototypes: it
    follows from the class counts, which are booked."""
    if isinstance(value, dict):
        booked = value.get("kind") == "private.vectors"
        return {name: public(part) for name, part in value.items() if not (booked and name == "elements")}
    if isinstance(value, list):
        return [public(part) for part in value]
    return DRAWN.sub("drawn", value) if isinstance(value, str) else value


def test_logs_of_few_and_many_images_are_the_same_and_twins_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twins: entries that are written when training ends, and entries with an exact duration."""
    few, many = (Hospital(tmp_path / str(scale), scale) for scale in (SMALL, LARGE))
    assert many.images >= 9 * few.images
    one, other = ([public(entry) for entry in hospital.round()] for hospital in (few, many))
    assert one == other
    kinds = [entry["type"] for entry in one]
    ready = max(place for place, kind in enumerate(kinds) if kind == "egress")
    assert kinds.index("dp.reserved") < kinds.index("dp.committed") < kinds.index("train.done") < ready
    assert next(entry for entry in one if entry["type"] == "train.done")["body"]["wall_ms"] == SLOT_SECONDS * 1000

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_at_slot", lambda self, entry, due: (LogCommits(), entry))
        one, other = ([public(entry) for entry in hospital.round()] for hospital in (few, many))
    assert [entry["type"] for entry in one] == [entry["type"] for entry in other]
    late = {entry["type"] for entry, same in zip(one, other, strict=True) if entry["ts"] != same["ts"]}
    assert late == {"dp.committed", "train.done"}

    with monkeypatch.context() as patch:
        patch.setattr(log_events, "train_done", exact)
        one, other = ([public(entry) for entry in hospital.round()] for hospital in (few, many))
    assert one != other


def exact(manifest: Manifest, number: int, result: LocalResult, *, slot_ms: int) -> Log:
    del slot_ms
    done = TrainDone(method=manifest.training.method, steps=result.steps, wall_ms=result.wall_ms, artefacts=())
    return Log(done, number)


def answers(folder: Path, *, trained: bool) -> list[type]:
    """What a coordinator hears that plans before READY: while a site trains, or when it has ended."""
    world = SiteWorld(folder)
    world.start_all()
    world.hub.order(tuple(world.agents))
    if trained:
        world.work(GRAZ)
    before = len(world.hub.seen)
    world.hub.plan(tuple(world.agents))
    world.hub.pump()
    return [type(message) for site, message in world.hub.seen[before:] if site == GRAZ]


def test_a_plan_before_the_slot_does_not_tell_that_training_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers(tmp_path / "trains", trained=False) == answers(tmp_path / "ended", trained=True)
    monkeypatch.setattr(Session, "_before_slot", lambda self, plan: self.machine.receive(plan))
    assert answers(tmp_path / "off", trained=False) != answers(tmp_path / "twin", trained=True)


def test_a_site_that_ends_before_its_slot_logs_the_round_when_it_is_back(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, SMALL)
    hospital.train()
    assert not {"dp.committed", "train.done"} & {entry["type"] for entry in hospital.log()}
    hospital.world.kill(GRAZ)
    hospital.world.start(GRAZ)
    entries = hospital.log()
    kinds = [entry["type"] for entry in entries]
    assert kinds.count("dp.committed") == kinds.count("train.done") == 1
    assert next(entry for entry in entries if entry["type"] == "train.done")["body"]["wall_ms"] == 0
    hospital.world.kill(GRAZ)
    hospital.world.start(GRAZ)
    assert [entry["type"] for entry in hospital.log()].count("train.done") == 1, "said once"
