"""Votes over a whole run: what follows, what stands, and that a restart changes neither."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.effects import PUBLISHED, VOTED_DOWN
from coordinator.results import KEPT_SUMS
from security.secagg import statements
from security.secagg.certificates import Ack, Vote
from security.secagg.state import state_hash
from tests.support.engine_world import EngineWorld


class Voters:
    """Who does not accept which model: by the place of the model in the order in which they come."""

    def __init__(self, against: dict[int, set[str]]) -> None:
        self.against = against
        self.models: list[bytes] = []

    def __call__(self, name: str, before: np.ndarray, state: np.ndarray) -> bool:
        digest = state_hash(state)
        if digest not in self.models:
            self.models.append(digest)
        return name not in self.against.get(self.models.index(digest), set())


ALL = {"site0", "site1", "site2", "site3"}


def outcomes(world: EngineWorld) -> list[str | None]:
    return [row.outcome for row in world.storage.history.rounds()]


def check_one_history(world: EngineWorld) -> None:
    """Every party follows the same result, its vote set, and the same model."""
    heads = {(site.machine.core.head.link, site.machine.core.head.state_hash) for site in world.base.sites.values()}
    head = world.engine.chain.head
    assert head is not None and heads == {(world.engine.chain.follow, head.state_hash)}
    assert state_hash(world.engine.model) == head.state_hash
    movements = {site.machine.core.head.movements for site in world.base.sites.values()}
    assert movements == {world.engine.core.movements}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_model_that_is_voted_down_costs_a_round(tmp_path: Path, place: int) -> None:
    """The first, one in the middle, and the last: the run goes on until it has its three models."""
    world = EngineWorld(tmp_path, vote=Voters({place: {"site1", "site2"}}))
    world.run(until=4)
    world.run(until=4)
    expected = [PUBLISHED] * 4
    expected[place] = VOTED_DOWN
    assert outcomes(world)[:4] == expected
    check_one_history(world)
    stood = world.storage.history.links()
    before = state_hash(world.initial) if place == 0 else stood[place - 1].state_hash
    assert stood[place].state_hash == before, "whoever asks for the newest model gets the one that stands"


@pytest.mark.parametrize("liar", ["site0", "site3"])
def test_one_vote_against_a_model_does_not_stop_it(tmp_path: Path, liar: str) -> None:
    """Whether it comes first or last: a quorum may be there before all who accept have said so."""
    world = EngineWorld(tmp_path, vote=Voters({0: {liar}, 1: {liar}, 2: {liar}}))
    world.run(until=3)
    world.run(until=3)
    assert outcomes(world)[:3] == [PUBLISHED] * 3
    check_one_history(world)


def test_votes_that_do_not_come_are_not_waited_for_and_are_no_consent(tmp_path: Path) -> None:
    """Two accept, one does not, one is silent: there is no quorum for the model, and the run goes on."""
    world = EngineWorld(tmp_path, vote=Voters({0: {"site1"}}))
    world.silent = {("site0", Ack)}
    world.run(until=1)
    settle(world)
    world.silent = set()
    assert outcomes(world)[0] == VOTED_DOWN
    world.run(until=4)
    check_one_history(world)


def test_a_coordinator_starts_again_after_a_vote_that_one_site_withheld(tmp_path: Path) -> None:
    """The uploads went with the certificate. Votes that were waited for no longer are not waited for again."""
    world = EngineWorld(tmp_path, vote=Voters({0: {"site1"}}))
    world.silent = {("site0", Ack)}
    world.run(until=1)
    settle(world)
    world.silent = set()
    world.kill_coordinator()
    world.start_coordinator()
    assert not world.engine.chain.unchecked and outcomes(world)[0] == VOTED_DOWN
    world.run(until=4)
    check_one_history(world)


def test_a_site_votes_once(tmp_path: Path) -> None:
    """A second vote of the same site, while the others are waited for, does not take the place of the first."""
    world = EngineWorld(tmp_path, vote=Voters({}))
    world.silent = {(name, Ack) for name in ALL - {"site1"}}
    world.run(until=1)
    pump(world)
    checked = world.engine.previous
    assert checked is not None and checked.current is not None and checked.current.publication is not None
    acks = checked.current.publication.acks
    first, signer = acks["site1"], world.base.sites["site1"].machine.core.signer
    said = statements.ack(first.result, first.state_hash, first.bitmap, Vote.REFUSE)
    second = replace(first, vote=Vote.REFUSE, signature=signer.sign(said))
    assert world.engine.receive("site1", second) == () and acks == {"site1": first}
    world.storage.close()


def settle(world: EngineWorld) -> None:
    """Until the newest sum is checked; two minutes are more than enough for all that is waited for."""
    for _ in range(2000):
        if not world.engine.chain.unchecked:
            return
        pump(world, 1)
    raise AssertionError("the check stands still")


def pump(world: EngineWorld, steps: int = 300) -> None:
    for _ in range(steps):
        if not world.step():
            world.clock.advance(300)
            world.do_coordinator(world.engine.tick())


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("site", [None, "site2"])
def test_restarts_around_a_vote(tmp_path: Path, down: bool, site: str | None) -> None:
    """At some places of the first rounds, the coordinator or a site: one outcome. The long form tries many more."""
    for steps in range(88, 200, 2 if os.environ.get("LAZARET_LONG") == "1" else 23):
        world = EngineWorld(tmp_path / f"{site}{steps}", rounds=2, vote=Voters({0: {"site1", "site2"}} if down else {}))
        pump(world, steps)
        if site is None:
            world.kill_coordinator()
            world.start_coordinator()
        else:
            world.restart_site(site)
        world.run(until=3 if down else 2)
        pump(world)
        if site is not None:
            world.connect(site)  # a last round without it is what it missed
            pump(world)
        found = outcomes(world)
        assert found.count(PUBLISHED) == 2 and found.count(VOTED_DOWN) <= down, (steps, found)
        check_one_history(world)
        world.storage.close()


@pytest.mark.parametrize("rounds", [3, KEPT_SUMS + 3])
def test_a_site_that_was_away_takes_the_vote_sets_too(tmp_path: Path, rounds: int) -> None:
    """By one sum after the other, or by the newest model that the sites have accepted."""
    world = EngineWorld(tmp_path, rounds=rounds, vote=Voters({1: ALL, rounds - 1: ALL}))
    world.run(until=1)
    world.disconnect("site3")
    world.run(until=rounds)
    world.connect("site3")
    world.run(until=rounds + 1)
    world.run(until=rounds + 2)
    check_one_history(world)
    assert outcomes(world).count(VOTED_DOWN) == 2
