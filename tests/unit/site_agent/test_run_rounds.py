"""Whole rounds of real agents against the coordinator's machines: bytes of the wire, files on disk, no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from security.audit.agreement import keys_for
from security.audit.verify import verify
from security.log.events import AgentStop
from security.secagg import messages
from security.secagg import state as states
from security.secagg.certificates import Advert
from security.secagg.context import SumVerdict
from security.secagg.effects import Advanced, Send
from security.secagg.fixed_point import decode
from security.secagg.transitions import CoordinatorState, SiteState
from security.secrets import Secret
from site_agent import contribution
from site_agent.effects import Effect
from site_agent.ready_slots import ReadySlots
from site_agent.run import Agent
from tests.support.consortium_world import SITES
from tests.support.site_world import MORE, PLAN, SLOT_SECONDS, Dies, SiteWorld, policy_table

VICTIM = "linz"


# Sites of ten samples: the cap above the largest, as the template asks for.
FITTING = PLAN + MORE + "\n[aggregation]\nweight_cap = 16\n"


@pytest.fixture
def world(tmp_path: Path) -> SiteWorld:
    return SiteWorld(tmp_path, plan=FITTING)


def test_two_rounds_give_everybody_the_same_model(world: SiteWorld) -> None:
    world.start_all()
    start = world.hub.model.copy()
    world.run_round()
    world.run_round()
    heads = {agent.session.machine.core.head.state_hash for agent in world.agents.values()}
    assert heads == {states.state_hash(world.hub.model)}
    # Every site moved every value by 0.001 in round 1 and by 0.002 in round 2.
    weights = world.manifest.aggregation.layout.slot("conv.weight")
    np.testing.assert_allclose((world.hub.model - start)[weights], 0.003, atol=2e-6)
    assert all(learner.trained == [1, 2] and learner.evaluated == [1, 2] for learner in world.learners.values())


def test_metrics_travel_inside_the_sum_only_if_the_policy_says_so(tmp_path: Path) -> None:
    for name, table, loss, hits in (("a", "", 3.5, 7), ("b", policy_table(share_metrics="false"), 0.0, 0)):
        world = SiteWorld(tmp_path / name, policy=table, plan=FITTING)
        world.start_all()
        world.hub.order(SITES)
        for site in SITES:
            world.work(site)
        world.tick(SLOT_SECONDS * 1000)
        attempt = world.hub.aggregate()
        assert attempt.publication is not None
        total = decode(world.manifest.aggregation.layout, attempt.publication.total)
        assert total.loss == pytest.approx(3 * loss, abs=0.01) and total.hits == 3 * hits and total.weight == 30


def test_the_log_of_a_site_verifies_and_tells_the_round(world: SiteWorld) -> None:
    world.start_all()
    world.run_round()
    agent = world.agents[VICTIM]
    agent.log.close(lambda log: log.append(AgentStop(reason="end")))
    kinds = ("agent.start", "data.opened", "model.received", "train.done", "round.invited", "secagg.survivors")
    for kind in (*kinds, "secagg.unmasked"):
        assert len(world.entries(VICTIM, kind)) == 1, kind
    # The folder has the manifest that was in force, and the auditor the consortium's root.
    found = verify(agent.state_dir.log, keys_for(agent.state_dir.log, world.base.authority.folder / "root.pem"))
    no_network = {"NotWitnessed", "NoNetworkCounter", "ReceiptMissing"}
    assert {finding.code for finding in found.findings} <= no_network
    # Every byte that arrived is explained by an entry, and the vector is one of them.
    logged = sum(entry["bytes"] for entry in world.entries(VICTIM, "egress"))
    assert logged == world.hub.connected[VICTIM].sent_bytes
    (upload,) = (entry for entry in world.entries(VICTIM, "egress") if entry["message"] == "UploadFrame")
    (header,) = world.hub.sent_by(VICTIM, messages.UploadHeader)
    assert isinstance(header, messages.UploadHeader) and upload["sha256"] == header.root.hex()


def test_ready_waits_for_its_slot_however_long_training_took(world: SiteWorld) -> None:
    world.start_all()
    world.hub.order(SITES)
    world.work("graz")
    world.clock.advance(3_000)
    world.work("linz")
    world.tick(1_900)
    assert not world.hub.ready
    world.tick(200)
    assert world.hub.ready == {"graz", "linz"}
    world.clock.advance(SLOT_SECONDS * 1000)
    world.work("vienna")  # more than one slot late: the next boundary
    world.tick(100)
    assert "vienna" not in world.hub.ready
    world.tick(SLOT_SECONDS * 1000)
    assert "vienna" in world.hub.ready


def test_twin_with_slots_of_a_millisecond_the_time_tells_the_size(world: SiteWorld) -> None:
    world.start_all()
    for agent in world.agents.values():
        agent.session.answers.slots = ReadySlots(most_ms=1, fixed_ms=1)
    world.hub.order(SITES)
    world.work("graz")
    world.tick(1)
    assert world.hub.ready == {"graz"}


def test_a_killed_site_does_not_train_twice_and_sends_the_same_update(world: SiteWorld) -> None:
    world.start_all()
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    sealed = (world.agents[VICTIM].state_dir.pending / "1").read_bytes()
    plain = world.agents[VICTIM].session.machine.aggregation.update
    assert plain is not None and plain.words.tobytes() not in sealed
    world.kill(VICTIM)
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    again = world.agents[VICTIM].session.machine.aggregation.update
    assert again is not None and np.array_equal(again.words, plain.words)
    world.tick(SLOT_SECONDS * 1000)
    order = messages.TrainOrder(
        round=1,
        state_hash=states.state_hash(world.hub.model),
        config_hash=world.agents[VICTIM].session.config_hash,
        prev_result=world.hub.prev_result,
        check=None,
    )
    world.hub.send(VICTIM, order)
    world.hub.pump()
    assert world.hub.ready == set(SITES) and world.learners[VICTIM].trained == [1]
    assert world.hub.aggregate().state is CoordinatorState.CERTIFIED


def dying_after(kind: type) -> type[Agent]:
    class Dying(Agent):
        def execute(self, effect: Effect):  # type: ignore[no-untyped-def]
            yield from super().execute(effect)
            if isinstance(effect, Send) and isinstance(effect.message, kind):
                raise Dies

    return Dying


@pytest.mark.parametrize("kind", [Advert, messages.Shares, messages.UploadHeader, messages.Agree, messages.Unmask])
def test_a_site_killed_after_any_of_its_steps_ends_the_round_with_the_others(tmp_path: Path, kind: type) -> None:
    world = SiteWorld(tmp_path, plan=PLAN + MORE + "\n[aggregation]\ncolluders = 0\n")
    world.start_all()
    world.kill(VICTIM)
    world.start(VICTIM, dying_after(kind))
    world.hub.connect(VICTIM)
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    attempt = world.hub.plan()
    world.hub.pump()
    assert VICTIM not in world.agents
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    attempt = world.hub.go_on(attempt)
    if attempt.state in (CoordinatorState.DEAD, CoordinatorState.LOST):
        attempt = world.hub.aggregate(SITES)
    assert attempt.publication is not None and len(attempt.publication.survivors) == 3
    assert world.learners[VICTIM].trained == [1]
    # Also a site that was killed between AGREE and RELEASE says in its log whose masks it opened.
    assert world.entries(VICTIM, "secagg.unmasked")[-1]["self_mask"] == list(SITES)
    answers = {(message.kx, message.to_bytes()) for message in world.hub.sent_by(VICTIM, messages.Agree)}  # type: ignore[attr-defined]
    assert len(answers) == len({kx for kx, _ in answers})


def test_a_site_that_was_away_gets_the_result_and_goes_on(world: SiteWorld) -> None:
    world.start_all()
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)

    def silent(site: str, message: object) -> bool:
        if site == VICTIM and isinstance(message, messages.Unmask):
            world.hub.disconnect(VICTIM)
        return True

    world.hub.hook = silent
    attempt = world.hub.aggregate()
    world.hub.hook = None
    assert attempt.publication is not None
    world.hub.connect(VICTIM)
    hello = world.hub.sent_by(VICTIM, messages.Hello)[-1]
    assert isinstance(hello, messages.Hello)
    if hello.round == 0:
        world.hub.send(VICTIM, attempt.publication.result)
        for frame in attempt.publication.sum_to(VICTIM).frames():
            world.hub.send(VICTIM, frame)
        world.hub.pump()
    assert world.agents[VICTIM].session.machine.core.head.round == 1
    assert world.agents[VICTIM].session.machine.state is SiteState.IDLE


def test_a_site_that_catches_up_looks_at_the_newest_model_only(world: SiteWorld) -> None:
    world.start_all()
    agent, learner = world.agents[VICTIM], world.learners[VICTIM]
    for number in (1, 2, 3):
        model = world.hub.model
        moved = Advanced(number, bytes(32), bytes(32), SumVerdict.GOOD, SITES, np.zeros(0, np.uint64), model)
        list(agent.execute(moved))
    world.work(VICTIM)
    assert learner.evaluated == [3]


def test_a_restarted_coordinator_that_orders_anew_ends_the_open_attempt(world: SiteWorld) -> None:
    world.start_all()
    order = world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    world.hub.plan()
    assert world.agents[VICTIM].session.machine.state is SiteState.ADVERTISED
    world.hub.ready.clear()
    world.hub.send(VICTIM, order)
    world.hub.pump()
    assert world.agents[VICTIM].session.machine.state is SiteState.IDLE
    assert world.hub.ready == {VICTIM} and world.hub.sent_by(VICTIM, messages.Abort)


# The ring of 16 bits.


def test_in_sixteen_bits_every_update_is_rounded_with_a_key_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key for several would round them alike, and their errors would add up instead of averaging out."""
    encode, keys = contribution.encode, list[bytes]()

    def noting(*told: Any, rounding: Secret | None, **more: Any) -> Any:
        assert rounding is not None
        keys.append(rounding.reveal())
        return encode(*told, rounding=rounding, **more)

    monkeypatch.setattr(contribution, "encode", noting)
    world = SiteWorld(tmp_path, plan=FITTING.replace("weight_cap", "ring_bits = 16\nweight_cap"))
    world.start_all()
    start = world.hub.model.copy()
    world.run_round()
    world.run_round()
    assert len(keys) == len(set(keys)) == 2 * len(SITES)
    layout = world.manifest.aggregation.layout
    assert layout.ring_bits == 16
    moved = (world.hub.model - start)[layout.slot("conv.weight")]
    assert float(moved.mean()) == pytest.approx(0.003, rel=0.1)
