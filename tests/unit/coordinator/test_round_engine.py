"""The run as a whole, without a network: rounds, absences, kills and late comers."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.phases import TURNS, Phase, Turn, follow
from security.errors import LocalProtocolError
from security.secagg import messages
from tests.support.engine_world import WORDS, EngineWorld


def expected(world: EngineWorld, rounds: list[tuple[int, list[str]]]) -> np.ndarray:
    """The model after rounds with these survivors, in exact arithmetic but for the encoding's step."""
    value = 0.0
    for number, survivors in rounds:
        value += np.mean([(world.names.index(name) + 1) * number / 1000 for name in survivors])
    return np.full(WORDS, value)


def assert_model(world: EngineWorld, rounds: list[tuple[int, list[str]]]) -> None:
    np.testing.assert_allclose(world.engine.model, expected(world, rounds), atol=1e-6)


def test_three_rounds_with_everybody(tmp_path):
    world = EngineWorld(tmp_path)
    world.run(until=3)
    assert world.closed == [(1, "published"), (2, "published"), (3, "published")]
    assert world.engine.phase is Phase.DONE
    assert_model(world, [(number, world.names) for number in (1, 2, 3)])
    for site in world.base.sites.values():
        assert site.machine.core.head.round == 3
    assert world.engine.chain.head_check() is not None
    assert not world.errors


def test_an_absent_site_costs_the_grace_and_comes_back(tmp_path):
    world = EngineWorld(tmp_path)
    world.disconnect("site3")
    world.run(until=1)
    assert_model(world, [(1, world.names[:3])])
    world.connect("site3")
    world.run(until=3)
    assert_model(world, [(1, world.names[:3]), (2, world.names), (3, world.names)])
    assert world.base.sites["site3"].machine.core.head.round == 3


def test_a_site_that_dies_in_the_burst_is_left_out_of_the_sum(tmp_path):
    world = EngineWorld(tmp_path, sites=5)
    world.silent = {("site4", messages.UploadHeader)}
    world.run(until=1)
    assert world.closed[0] == (1, "published")
    assert_model(world, [(1, world.names[:4])])


@pytest.mark.parametrize("steps", range(0, 260, 13))
def test_a_killed_coordinator_goes_on_where_it_was(tmp_path, steps):
    world = EngineWorld(tmp_path, rounds=2)
    for _ in range(steps):
        if not world.step():
            world.clock.advance(300)
            world.do_coordinator(world.engine.tick())
    world.kill_coordinator()
    world.start_coordinator()
    world.run(until=2 - world.storage.completed() + len(world.closed))
    assert world.storage.completed() == 2
    rounds = [
        (link.round, [up.site for up in world.storage.result(link.result_hash).uploads])
        for link in world.storage.links()
    ]
    assert_model(world, rounds)
    assert {site.machine.core.head.result for site in world.base.sites.values()} == {
        world.storage.links()[-1].result_hash
    }


@pytest.mark.parametrize("steps", range(5, 260, 17))
def test_a_killed_site_goes_on_where_it_was(tmp_path, steps):
    world = EngineWorld(tmp_path, rounds=2)
    for _ in range(steps):
        if not world.step():
            world.clock.advance(300)
            world.do_coordinator(world.engine.tick())
    world.to_site = type(world.to_site)(item for item in world.to_site if item[0] != "site1")
    world.restart_site("site1")
    world.run(until=2)
    world.run(until=len(world.closed))
    assert [outcome for _, outcome in world.closed].count("published") >= 2
    rounds = [
        (link.round, [up.site for up in world.storage.result(link.result_hash).uploads])
        for link in world.storage.links()
    ]
    assert_model(world, rounds)


def test_a_site_that_was_away_for_long_gets_a_covered_state(tmp_path):
    world = EngineWorld(tmp_path, rounds=12)
    world.disconnect("site3")
    world.run(until=11)
    world.connect("site3")
    world.run(until=12)
    assert world.base.sites["site3"].machine.core.head.round == 12
    assert world.storage.links()[-1].round == 12


def test_every_turn_that_is_not_in_the_table_is_refused():
    for phase in Phase:
        for turn in Turn:
            if turn not in TURNS[phase]:
                with pytest.raises(LocalProtocolError):
                    follow(phase, turn)
