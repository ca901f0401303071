"""Whole rounds of real agents against the coordinator's machines: bytes of the wire, files on disk, no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from security import relay
from security.audit.verify import Keys, verify
from security.audit.witness import Held
from security.consortium.views import audit_roster
from security.errors import DataError, PolicyViolation, RollbackDetected
from security.secagg import messages
from security.secagg import state as states
from security.secagg.certificates import Advert
from security.secagg.fixed_point import decode
from security.secagg.transitions import CoordinatorState, SiteState
from security.secagg.wire import FRAME_BYTES
from site_agent.agent import Agent, Left
from site_agent.effects import Effect, Evaluate, Post
from tests.support.consortium_world import SITES
from tests.support.site_world import MORE, PLAN, SLOT_SECONDS, Dies, SiteWorld, policy_table

VICTIM = "linz"


@pytest.fixture
def world(tmp_path: Path) -> SiteWorld:
    return SiteWorld(tmp_path)


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
        world = SiteWorld(tmp_path / name, policy=table)
        world.start_all()
        world.hub.order(SITES)
        for site in SITES:
            world.work(site)
        world.tick(SLOT_SECONDS * 1000)
        attempt = world.hub.burst()
        assert attempt.publication is not None
        total = decode(world.manifest.aggregation.layout, attempt.publication.total)
        assert total.loss == pytest.approx(3 * loss, abs=0.01) and total.hits == 3 * hits and total.weight == 30


def test_the_log_of_a_site_verifies_and_tells_the_round(world: SiteWorld) -> None:
    world.start_all()
    world.run_round()
    agent = world.agents[VICTIM]
    agent.log.checkpoint()
    kinds = ("agent.start", "data.opened", "model.received", "train.done", "round.invited", "secagg.survivors")
    for kind in (*kinds, "secagg.unmasked"):
        assert len(world.entries(VICTIM, kind)) == 1, kind
    keys = Keys(roster=audit_roster(world.manifest), pinned=True)
    found = verify(agent.vault.log, keys)
    assert {finding.code for finding in found.findings} <= {"NotWitnessed"}
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
        agent.session.slot_ms = 1
    world.hub.order(SITES)
    world.work("graz")
    world.tick(1)
    assert world.hub.ready == {"graz"}


def test_a_killed_site_does_not_train_twice_and_sends_the_same_update(world: SiteWorld) -> None:
    world.start_all()
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    sealed = (world.agents[VICTIM].vault.pending / "1").read_bytes()
    plain = world.agents[VICTIM].session.machine.burst.update
    assert plain is not None and plain.words.tobytes() not in sealed
    world.kill(VICTIM)
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    again = world.agents[VICTIM].session.machine.burst.update
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
    assert world.hub.burst().state is CoordinatorState.CERTIFIED


def dying_after(kind: type) -> type[Agent]:
    class Dying(Agent):
        def execute(self, effect: Effect):  # type: ignore[no-untyped-def]
            yield from super().execute(effect)
            if isinstance(effect, Post) and isinstance(effect.message, kind):
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
        attempt = world.hub.burst(SITES)
    assert attempt.publication is not None and len(attempt.publication.survivors) == 3
    assert world.learners[VICTIM].trained == [1]
    # Also a site that was killed between AGREE and RELEASE says in its log whose masks it opened.
    assert world.entries(VICTIM, "secagg.unmasked")[-1]["self_mask"] == list(SITES)
    answers = {(message.kx, message.to_bytes()) for message in world.hub.sent_by(VICTIM, messages.Agree)}  # type: ignore[attr-defined]
    assert len(answers) == len({kx for kx, _ in answers})


def test_an_order_for_another_model_or_configuration_is_declined(world: SiteWorld) -> None:
    world.start_all()
    good = world.hub.order(())
    values = {"round": 1, "prev_result": good.prev_result, "check": None}
    for state_hash, config_hash in ((bytes(32), good.config_hash), (good.state_hash, bytes(32))):
        world.hub.send(VICTIM, messages.TrainOrder(state_hash=state_hash, config_hash=config_hash, **values))
    world.hub.pump()
    assert len(world.hub.sent_by(VICTIM, relay.Decline)) == 2 and world.learners[VICTIM].trained == []
    rules = [entry["rule"] for entry in world.entries(VICTIM, "round.declined")]
    assert "another model" in rules[0] and "another training configuration" in rules[1]


def test_policy_declines_by_name_and_the_coordinator_learns_nothing_of_it(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path, policy=policy_table(hours='"00:00-00:01"'))
    world.start_all()
    world.hub.order((VICTIM,))
    (decline,) = world.hub.sent_by(VICTIM, relay.Decline)
    assert decline == relay.Decline(site=VICTIM, round=1)
    (entry,) = world.entries(VICTIM, "round.declined")
    assert entry["rule"].startswith("[policy] hours")


def test_a_cohort_below_the_policys_is_refused(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path, policy=policy_table(least_cohort="4"))
    world.start_all()
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    assert world.hub.burst().state is CoordinatorState.DEAD
    assert world.hub.sent_by(VICTIM, messages.Refusal) and not world.hub.sent_by(VICTIM, Advert)
    assert world.entries(VICTIM, "round.declined")[0]["rule"].startswith("[policy] least_cohort")


def test_an_update_that_cannot_be_encoded_is_declined_and_its_value_stays_here(world: SiteWorld) -> None:
    world.start_all()
    world.learners[VICTIM].step = 9.0
    world.hub.order((VICTIM,))
    world.work(VICTIM)
    assert world.hub.sent_by(VICTIM, relay.Decline)
    (entry,) = world.entries(VICTIM, "round.declined")
    assert entry["rule"] == f"{DataError.code}: no update for this round"


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
    attempt = world.hub.burst()
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


def test_a_newer_manifest_is_adopted_on_connecting(world: SiteWorld) -> None:
    world.start_all()
    world.base.publish()
    data = world.base.published()
    newer = world.base.authority.latest(now_ms=world.base.now)
    assert newer is not None
    world.hub.send(VICTIM, relay.ManifestFrame(version=2, length=len(data), index=0, data=data))
    agent = world.agents[VICTIM]
    assert agent.manifest.version == 2 and agent.session.machine.core.policy.manifest_version == 2
    assert world.entries(VICTIM, "manifest.adopted")[0]["version"] == 2
    assert agent.identity.manifest(now_ms=world.base.now) == newer


def test_another_federations_manifest_stops_the_site(world: SiteWorld, tmp_path: Path) -> None:
    world.start_all()
    other = SiteWorld(tmp_path / "other")
    forged = other.base.signed(other.manifest.model_copy(update={"version": 2}))
    world.hub.send(VICTIM, relay.ManifestFrame(version=2, length=len(forged), index=0, data=forged))
    assert not world.left[VICTIM].retry
    assert world.agents[VICTIM].manifest.version == 1


@pytest.mark.parametrize(("code", "retry"), [(1, True), (2, False), (3, False), (4, False), (5, True), (6, False)])
def test_every_goodbye_says_whether_to_come_back(world: SiteWorld, code: int, retry: bool) -> None:
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    world.hub.send(VICTIM, relay.Goodbye(code=code))
    assert world.left[VICTIM].retry is retry and world.left[VICTIM].error.hint


def test_bytes_that_are_no_message_end_the_stream_and_nothing_else(world: SiteWorld) -> None:
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    with pytest.raises(Left) as caught:
        list(world.agents[VICTIM].received(b"\x00rubbish"))
    assert caught.value.retry


def test_a_head_that_our_log_does_not_reach_is_a_rollback(world: SiteWorld) -> None:
    world.start_all()
    agent = world.agents[VICTIM]
    head = agent.log.checkpoint()
    held = Held(head=head, endorsements=agent.log.submission(0).endorsements)
    world.kill(VICTIM)
    # The folder is set back: the newest entries and heads are gone.
    segment = next((agent.vault.log / "segments").glob("*.jsonl"))
    lines = segment.read_bytes().splitlines(keepends=True)
    sizes = sorted(int(path.stem) for path in (agent.vault.log / "checkpoints").glob("*.note"))
    for size in sizes[1:]:
        (agent.vault.log / "checkpoints" / f"{size}.note").unlink()
    segment.write_bytes(b"".join(lines[: sizes[0]]))
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    # It has written other entries since; the held head is of a history that it no longer has.
    with pytest.raises(RollbackDetected):
        world.hub.send(VICTIM, relay.Held.of("hub", held))


def test_pings_are_answered_at_once(world: SiteWorld) -> None:
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    world.hub.send(VICTIM, relay.Ping(number=41))
    world.hub.pump()
    assert world.hub.sent_by(VICTIM, relay.Pong) == [relay.Pong(number=41)]


def test_a_receipt_is_logged_under_the_messages_name(world: SiteWorld) -> None:
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    world.hub.send(VICTIM, relay.Receipt(sequence=1, entry=5, path=(bytes(32),)))
    (entry,) = world.entries(VICTIM, "receipt")
    (opened,) = (one for one in world.entries(VICTIM, "egress") if one["message"] == "Open")
    assert entry["msg_id"] == opened["msg_id"] and entry["ingress"] == 5


def test_witnesses_sign_what_grows_and_answer_what_does_not(world: SiteWorld) -> None:
    world.start_all()
    graz, linz = world.agents["graz"], world.agents["linz"]
    world.hub.send("graz", relay.WitnessCall(witness="linz", held_size=0))
    world.hub.pump()
    (offer,) = world.hub.sent_by("graz", relay.Head)
    world.hub.send("linz", offer)
    world.hub.pump()
    (cosignature,) = world.hub.sent_by("linz", relay.Cosignature)
    world.hub.send("graz", cosignature)
    assert len(world.entries("graz", "cosigned")) == 1 and len(world.entries("linz", "checkpoint.seen")) == 1
    graz.log.append(world_event())
    graz.log.checkpoint()
    world.hub.send("graz", relay.WitnessCall(witness="linz", held_size=0))
    world.hub.pump()
    world.hub.send("linz", world.hub.sent_by("graz", relay.Head)[-1])
    world.hub.pump()
    (held,) = world.hub.sent_by("linz", relay.Held)
    assert isinstance(held, relay.Held) and isinstance(offer, relay.Head) and held.head.size == offer.head.size
    assert linz.session.phase == "live"


def world_event():  # type: ignore[no-untyped-def]
    from security.audit.events import OperatorAction

    return OperatorAction(command="test", role="tester")


def test_a_state_directory_of_another_run_is_refused(world: SiteWorld) -> None:
    agent = world.start(VICTIM)
    world.kill(VICTIM)
    (agent.vault.folder / "run").write_text("run-0\n")
    with pytest.raises(Exception, match="belongs to run 'run-0'"):
        world.start(VICTIM)


def test_a_federation_that_the_policy_forbids_is_not_even_started(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path, policy=policy_table(methods='["fedavg"]'))
    with pytest.raises(PolicyViolation, match="fednpr-per is not among"):
        world.start(VICTIM)


def test_a_round_that_would_cost_too_much_is_refused_and_not_broken_off(tmp_path: Path) -> None:
    vector = SiteWorld(tmp_path / "size").manifest.aggregation.layout.byte_length
    world = SiteWorld(tmp_path / "world", policy=policy_table(most_bytes_per_round=str(vector + 100)))
    world.start_all()
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    assert world.hub.burst().state is CoordinatorState.DEAD
    assert world.hub.sent_by(VICTIM, messages.Refusal)
    assert world.entries(VICTIM, "round.declined")[0]["rule"].startswith("[policy] most_bytes_per_round")


def test_a_manifest_in_several_frames_must_come_in_order(world: SiteWorld) -> None:
    world.start_all()
    world.base.publish()
    data = world.base.published()
    padded = data + b" " * (2 * FRAME_BYTES - len(data) + 7)  # no manifest, but three frames long
    pieces = [padded[start : start + FRAME_BYTES] for start in range(0, len(padded), FRAME_BYTES)]
    frames = [
        relay.ManifestFrame(version=2, length=len(padded), index=index, data=piece)
        for index, piece in enumerate(pieces)
    ]
    agent = world.agents[VICTIM]
    for frame in (frames[0], frames[2], frames[0], frames[1]):
        world.hub.send(VICTIM, frame)
    assert agent.manifest.version == 1 and VICTIM not in world.left
    world.hub.send(VICTIM, frames[2])
    assert "manifest" in str(world.left[VICTIM].error)


def test_a_site_that_catches_up_looks_at_the_newest_model_only(world: SiteWorld) -> None:
    world.start_all()
    agent, learner = world.agents[VICTIM], world.learners[VICTIM]
    for number in (1, 2, 3):
        list(agent.execute(Evaluate(round=number, state=world.hub.model)))
    world.work(VICTIM)
    assert learner.evaluated == [3]


def test_a_layout_that_changes_during_training_voids_the_update(world: SiteWorld) -> None:
    world.start_all()
    world.hub.order((VICTIM,))
    agent = world.agents[VICTIM]
    finish = world.jobs[VICTIM].popleft()()
    agent.outbox.layout = replace(agent.outbox.layout, roster_size=4)
    world.hub.take(VICTIM, agent.run(finish()))
    world.hub.pump()
    assert world.hub.sent_by(VICTIM, relay.Decline) and not list(agent.vault.pending.iterdir())


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
