"""The run as a whole, without a network: rounds, absences, kills and late comers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.effects import StoreBlame
from coordinator.phases import TURNS, PhaseChange, RunPhase, follow
from lazaret.errors import LocalProtocolError, PolicyViolation, RemoteProtocolError
from security.secagg import messages
from security.secagg.certificates import Ack
from security.secagg.coordinator.rounds import CoordinatorRound, abort_certificate
from security.secagg.effects import Certified
from security.secagg.relay import Decline
from security.secagg.state import state_hash
from security.secagg.transitions import CoordinatorState
from tests.support.engine_world import WORDS, EngineWorld

_S = CoordinatorState


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
    assert world.engine.phase is RunPhase.DONE
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


def test_a_site_that_dies_in_the_aggregation_is_left_out_of_the_sum(tmp_path):
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
    world.run(until=2 - world.storage.history.completed() + len(world.closed))
    assert world.storage.history.completed() == 2
    rounds = [
        (link.round, [up.site for up in world.storage.history.result(link.result_hash).uploads])
        for link in world.storage.history.links()
    ]
    assert_model(world, rounds)
    assert {site.machine.core.head.result for site in world.base.sites.values()} == {
        world.storage.history.links()[-1].result_hash
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
        (link.round, [up.site for up in world.storage.history.result(link.result_hash).uploads])
        for link in world.storage.history.links()
    ]
    assert_model(world, rounds)


def test_a_site_that_was_away_for_long_gets_a_covered_state(tmp_path):
    world = EngineWorld(tmp_path, rounds=12)
    world.disconnect("site3")
    world.run(until=11)
    world.connect("site3")
    world.run(until=12)
    assert world.base.sites["site3"].machine.core.head.round == 12
    assert world.storage.history.links()[-1].round == 12


def test_a_kill_between_the_last_acknowledgement_and_its_certificate(tmp_path, monkeypatch):
    """Here each effect is a transaction: after the first one the sum is covered, and nobody has written that down."""
    world = EngineWorld(tmp_path, rounds=2)
    keep = world.storage.keep

    def dies(effects, **more):
        if any(isinstance(effect, Certified) for effect in effects):
            raise KeyboardInterrupt
        keep(effects, **more)

    monkeypatch.setattr(world.storage, "keep", dies)
    with pytest.raises(KeyboardInterrupt):
        world.run(until=2)
    assert world.storage.history.certificate(world.storage.history.links()[-1].result_hash) is None
    world.kill_coordinator()
    world.start_coordinator()
    world.run(until=2)
    assert world.storage.history.completed() == 2


def test_strikes_outlive_a_restart(tmp_path):
    """A site that stalls aggregations sits out ever more cohorts, also where the coordinator was killed in between."""
    world = EngineWorld(tmp_path, sites=5, rounds=20)
    world.silent = {("site4", messages.Shares)}
    for strikes in (1, 2, 3):
        while world.engine.book.strikes.get("site4") != strikes:
            world.run(until=len(world.closed) + 1)
        before = world.engine.book.to_dict()
        world.kill_coordinator()
        world.start_coordinator()
        assert world.engine.book.to_dict() == before
    world.silent.clear()
    while "site4" in world.engine.book.strikes:
        world.run(until=len(world.closed) + 1)
    newest = world.storage.history.result(world.storage.history.links()[-1].result_hash)
    assert "site4" in {up.site for up in newest.uploads}


def test_exclusion_holds_for_the_certificate_it_was_earned_under(tmp_path):
    world = EngineWorld(tmp_path)
    world.run(until=1)
    cert = world.base.policy.entry("site3").cert
    world.storage.keep([StoreBlame({}, {}, {"site3": ("two uploads", cert)}, {}, {})], now_ms=0)
    assert world.storage.history.excluded({"site3": cert}) == {"site3": "two uploads"}
    assert world.storage.history.excluded({"site3": bytes(32)}) == {}, "a new certificate is the consortium's word"
    assert world.storage.history.excluded({}) == {}


def test_old_models_go_and_late_sites_still_catch_up(tmp_path):
    world = EngineWorld(tmp_path, rounds=8)
    world.storage._keep_models = 3
    world.disconnect("site3")
    world.run(until=7)
    links = world.storage.history.links()
    kept = {path.stem for path in world.storage.models.iterdir()}
    assert kept == {state_hash(world.initial).hex(), *(link.state_hash.hex() for link in links[-3:])}
    world.connect("site3")
    world.run(until=8)
    assert world.base.sites["site3"].machine.core.head.round == 8


def test_a_restart_sweeps_the_spool(tmp_path):
    world = EngineWorld(tmp_path, rounds=3)
    world.run(until=2)
    left = world.storage.spool / ("ab" * 32)
    left.write_bytes(b"of an upload that no record knows")
    world.kill_coordinator()
    world.start_coordinator()
    assert not left.exists()
    world.run(until=3)
    assert len(list(world.storage.spool.iterdir())) == 3, "the sums, and no upload"


def test_a_restart_after_the_certificates_of_checkers_have_ended(tmp_path):
    """The newest sum has its certificate and its uploads are deleted, though its signers do not count any more."""
    world = EngineWorld(tmp_path)
    world.run(until=1)
    while world.engine.chain.unchecked:
        if not world.step():
            world.clock.advance(300)
            world.do_coordinator(world.engine.tick())
    world.kill_coordinator()
    policy = world.base.core.policy
    ended = frozenset(policy.entry(f"site{number}").cert for number in (0, 1, 2))
    world.base.core.mandate.policy = replace(policy, revoked=ended)
    world.start_coordinator()
    assert world.engine.phase is RunPhase.WAITING and not world.engine.chain.unchecked, "it waits for a manifest"
    world.kill_coordinator()


def test_every_turn_that_is_not_in_the_table_is_refused():
    for phase in RunPhase:
        for turn in PhaseChange:
            if turn not in TURNS[phase]:
                with pytest.raises(LocalProtocolError):
                    follow(phase, turn)


# Told to stop.


def reach(world: EngineWorld, true) -> None:
    """Deliver messages and let time pass until something is true of the engine."""
    for _ in range(5000):
        if true(world.engine):
            return
        if not world.step():
            world.clock.advance(300)
            world.do_coordinator(world.engine.tick())
    raise AssertionError(f"never came about; {world.engine.phase}")


def attempt_in(state: CoordinatorState):
    return lambda engine: engine.aggregating and (now := engine.round.current) is not None and now.state is state


def begins_again(world: EngineWorld) -> None:
    """After a restart the round under way is finished with everybody's update, and so are the others."""
    world.kill_coordinator()
    world.start_coordinator()
    world.run(until=world.plan.rounds)
    assert world.closed == [(number, "published") for number in range(1, world.plan.rounds + 1)]


@pytest.mark.parametrize("phase", [RunPhase.TRAINING, RunPhase.PINGING])
def test_a_stop_between_aggregations_begins_nothing_new(tmp_path, phase):
    world = EngineWorld(tmp_path, rounds=2)
    reach(world, lambda engine: engine.phase is phase)
    assert world.engine.stop() == () and not world.engine.aggregating
    for _ in range(100):
        if not world.step():
            world.clock.advance(300)
            world.do_coordinator(world.engine.tick())
    assert not world.engine.aggregating and world.closed == []
    begins_again(world)


@pytest.mark.parametrize("state", [_S.ADVERTISING, _S.DEALING])
def test_a_stop_before_anything_masked_exists_ends_the_attempt(tmp_path, state):
    world = EngineWorld(tmp_path, rounds=2)
    reach(world, attempt_in(state))
    world.do_coordinator(world.engine.stop())
    reach(world, lambda engine: not engine.aggregating)
    assert world.engine.phase is RunPhase.PINGING and world.engine.round.current.state is _S.DEAD
    begins_again(world)


@pytest.mark.parametrize("state", [_S.UPLOADING, _S.AGREEING])
def test_a_stop_in_mid_aggregation_waits_for_aborts(tmp_path, state):
    """Asked again and again, as the loop does: what it asked for first stands, or the round would lose its updates."""
    world = EngineWorld(tmp_path, rounds=2)
    reach(world, attempt_in(state))
    attempt = world.engine.round.current
    for _ in range(3):
        world.do_coordinator(world.engine.stop())
        assert attempt.state is _S.ABORTING and world.engine.aggregating
    reach(world, lambda engine: not engine.aggregating)
    assert attempt.state is _S.DEAD and abort_certificate(attempt) is not None
    begins_again(world)


@pytest.mark.parametrize("state", [_S.UPLOADING, _S.AGREEING, _S.UNMASKING])
def test_a_stop_that_nobody_answers_can_be_left_at_any_time(tmp_path, state):
    world = EngineWorld(tmp_path, rounds=2)
    reach(world, attempt_in(state))
    for name in world.names:
        world.disconnect(name)
    world.do_coordinator(world.engine.stop())
    assert world.engine.aggregating
    world.offline.clear()
    begins_again(world)


def test_a_stop_while_masks_are_opened_lets_them_be_opened(tmp_path):
    world = EngineWorld(tmp_path, rounds=2)
    reach(world, attempt_in(_S.UNMASKING))
    assert world.engine.stop() == () and world.engine.aggregating
    reach(world, lambda engine: not engine.aggregating)
    assert world.closed == [(1, "published")]
    begins_again(world)


def test_a_stop_when_all_is_done(tmp_path):
    world = EngineWorld(tmp_path, rounds=1)
    world.run(until=1)
    assert world.engine.stop() == () and world.engine.phase is RunPhase.DONE


# What a site says out of place.


def test_a_decline_before_a_hello_is_no_fault_of_ours(tmp_path):
    world = EngineWorld(tmp_path, rounds=3)
    world.run(until=1)
    world.engine.standings._at.clear()
    world.engine.receive("site3", Decline(site="site3", round=world.engine.round.start.round))
    world.run(until=3)
    assert world.storage.history.completed() == 3


def test_a_site_that_stands_elsewhere_costs_nobody_else_anything(tmp_path):
    """It says so again and again; the certificate of the next sum is written down and sent all the same."""
    world = EngineWorld(tmp_path, sites=5, rounds=3)
    world.run(until=1)
    zeros, elsewhere = bytes(32), bytes([7]) * 32
    with pytest.raises(RemoteProtocolError):
        world.engine.receive("site4", messages.Hello(site="site4", open_ctx=zeros, round=9, result=elsewhere))
    world.silent = {("site4", messages.Ready)}
    world.engine.receive("site4", Decline(site="site4", round=world.engine.round.start.round))
    world.run(until=3)
    assert world.storage.history.certificate(world.storage.history.links()[1].result_hash) is not None


def test_a_set_that_cannot_be_repeated_any_more_costs_the_round_and_not_the_service(tmp_path, monkeypatch):
    plans = CoordinatorRound.next_attempt

    def refuses_first(self, ready):
        if self.start.round == 1:
            raise PolicyViolation("signing certificate is revoked", where="site site1")
        return plans(self, ready)

    monkeypatch.setattr(CoordinatorRound, "next_attempt", refuses_first)
    world = EngineWorld(tmp_path, rounds=1)
    world.run(until=2)
    assert world.closed == [(1, "signing certificate is revoked"), (2, "published")]


@pytest.mark.parametrize("stalls", [False, True])
def test_a_site_that_is_there_and_does_not_acknowledge_keeps_nobody_waiting(tmp_path, stalls):
    """Its chunks are handed on, whichever they are: nor does it help to ask for the same chunk again and again."""
    for silent in range(4):
        world = EngineWorld(tmp_path / str(silent), rounds=1)
        world.silent = {(f"site{silent}", Ack)}
        world.run(until=1)
        result = world.engine.chain.head.result_hash
        for _ in range(1000):
            if not world.engine.chain.unchecked:
                break
            if not world.step():
                world.clock.advance(300)
                if stalls:
                    asked = messages.ChunkRequest(site=f"site{silent}", result=result, chunk=0)
                    world.do_coordinator(world.engine.receive(f"site{silent}", asked))
                world.do_coordinator(world.engine.tick())
        assert not world.engine.chain.unchecked
        world.storage.close()


def test_who_is_not_listed_any_more_when_a_round_ends_is_not_asked(tmp_path):
    """Its certificate ends while it would train: no site would take the sum."""
    world = EngineWorld(tmp_path)
    engine, policy = world.engine, world.engine.core.policy
    later = replace(policy, revoked=frozenset({policy.entry("site1").cert}))
    engine.candidates.policy_at = lambda _: later
    assert engine.candidates.able_until() == set(world.names)
    assert engine.candidates.able_until(1000) == set(world.names) - {"site1"}
    world.kill_coordinator()


def test_nobody_is_asked_under_a_manifest_that_ends_before_the_round(tmp_path):
    world = EngineWorld(tmp_path)
    engine = world.engine
    ending = replace(engine.core.policy, expires_ms=world.clock.now_ms() + 500)
    engine.candidates.policy_at = lambda _: ending
    assert engine.candidates.able_until() == set(world.names) == engine.candidates.able_until(400)
    assert engine.candidates.able_until(500) == set()
    gone = replace(engine.core.policy, revoked=frozenset({engine.core.policy.coordinator.cert}))
    engine.candidates.policy_at = lambda _: gone
    assert engine.candidates.able_until(1) == set(), "no site follows a coordinator without a certificate"
    world.kill_coordinator()
