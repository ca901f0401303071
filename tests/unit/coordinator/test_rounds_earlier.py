"""Attempts of which it is not known whether they have a sum, when the next round begins on the same model."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.effects import PUBLISHED
from coordinator.phases import RunPhase
from security.secagg import messages
from security.secagg.coordinator.earlier import EarlierAttempt
from security.secagg.transitions import CoordinatorState
from tests.support.engine_world import EngineWorld

_S = CoordinatorState


def reach(world: EngineWorld, state: CoordinatorState) -> None:
    for _ in range(2000):
        attempt = world.engine.round.current if world.engine.round else None
        if attempt is not None and attempt.state is state:
            return
        if not world.step():
            world.clock.advance(300)
            world.do_coordinator(world.engine.tick())
    raise AssertionError(f"never {state}")


def lost(world: EngineWorld, state: CoordinatorState = _S.UPLOADING) -> EarlierAttempt:
    """All lines break in mid-aggregation, and nobody aborts: the round is lost with neither certificate."""
    reach(world, state)
    world.silent |= {(name, messages.Abort) for name in world.names}
    for name in world.names:
        world.disconnect(name)
    reach(world, _S.LOST)
    for name in world.names:
        world.connect(name)
    world.run(until=1)
    assert world.closed == [(1, "an attempt ended with neither certificate")]
    (known,) = world.engine.round.unsettled
    return known


def abort_again(world: EngineWorld) -> None:
    """The sites are back on new streams, and answer what they are asked."""
    world.silent.clear()
    for name in world.names:
        world.disconnect(name)
        world.connect(name)


@pytest.mark.parametrize("state", [_S.DEALING, _S.UPLOADING, _S.AGREEING])
@pytest.mark.parametrize("killed", [False, True])
def test_aborts_that_come_after_a_lost_round_let_the_next_one_begin(
    tmp_path: Path, state: CoordinatorState, killed: bool
) -> None:
    world = EngineWorld(tmp_path, rounds=1)
    known = lost(world, state)
    if killed:
        world.kill_coordinator()
        world.start_coordinator()
        (again,) = world.engine.round.unsettled
        assert (again.ctx, again.kx, again.roots) == (known.ctx, known.kx, known.roots)
    abort_again(world)
    world.run(until=2)
    assert world.closed[1] == (2, PUBLISHED)
    plan = world.engine.previous.attempts[0].plan
    assert [found.ctx for found in plan.aborts] == [known.ctx] and not plan.context.sums
    assert world.engine.round is not None and not world.engine.book.strikes


def test_the_aborts_are_on_disk_when_they_have_come(tmp_path: Path) -> None:
    world = EngineWorld(tmp_path, rounds=1)
    known = lost(world)
    abort_again(world)
    while len(known.aborts) < known.context.a:
        assert world.step()
    world.kill_coordinator()
    world.silent |= {(name, messages.Abort) for name in world.names}
    world.start_coordinator()
    assert not world.engine.round.unsettled
    world.run(until=2)
    assert world.closed[1] == (2, PUBLISHED)


def test_no_plan_is_made_before_and_the_time_for_training_ends_the_wait(tmp_path: Path) -> None:
    """Then it is tried: the operators of sites may have set the attempt aside. Who has not refuses."""
    world = EngineWorld(tmp_path, rounds=1)
    lost(world)
    while world.step():
        pass
    assert world.engine.sites.ready == set(world.names) and world.engine.phase is RunPhase.TRAINING
    world.clock.advance(world.plan.train_ms - 1000)
    world.do_coordinator(world.engine.tick())
    assert world.engine.phase is RunPhase.TRAINING
    world.run(until=2)
    assert world.closed[1][1] != PUBLISHED
    said = {error.message for error in world.errors}
    assert said == {"it is not shown whether an earlier attempt on this model has a sum"}


def test_a_set_that_was_certified_is_listed_and_shown(tmp_path: Path) -> None:
    """The shares do not come, and the repeat fails: the sum may exist, and the next round has the same sites."""
    world = EngineWorld(tmp_path, rounds=1)
    world.silent |= {(name, kind) for name in world.names for kind in (messages.Unmask, messages.Abort)}
    world.run(until=1)
    world.silent.clear()
    world.run(until=2)
    assert world.closed[1] == (2, PUBLISHED)
    plan = world.engine.previous.attempts[0].plan
    assert {found.sites for found in plan.context.sums} == {tuple(world.names)}
    assert {found.round for found in plan.context.sums} == {1} and plan.repeats and not plan.context.repeats
