"""What an agent refuses, adopts, witnesses and says no to: bytes of the wire, files on disk, no network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import rfc8785

from lazaret.errors import (
    CertificateExpired,
    CertificateNotYetValid,
    CertificateRevoked,
    DataError,
    ManifestRejected,
    PolicyViolation,
    RollbackDetected,
)
from security.crypto.ring import FRAME_BYTES
from security.log.witness import HeldCheckpoint
from security.secagg import messages, relay
from security.secagg.certificates import Advert
from security.secagg.effects import Send
from security.secagg.transitions import CoordinatorState, SiteState
from site_agent.effects import Adopt
from site_agent.run import Left
from site_agent.session import FAILED_SECONDS, SessionPhase
from tests.support.consortium_world import DAY, SITES
from tests.support.site_world import SLOT_SECONDS, SiteWorld, policy_table

VICTIM = "linz"


@pytest.fixture
def world(tmp_path: Path) -> SiteWorld:
    return SiteWorld(tmp_path)


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
    midnight = -(world.clock.now_ms() // 1000) % 86_400  # the machine of the tests is in UTC
    assert decline == relay.Decline(site=VICTIM, round=1, seconds=midnight)
    (entry,) = world.entries(VICTIM, "round.declined")
    assert entry["rule"].startswith("[policy] hours")


def test_a_cohort_below_the_policys_is_refused(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path, policy=policy_table(least_cohort="4"))
    world.start_all()
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    assert world.hub.aggregate().state is CoordinatorState.DEAD
    assert world.hub.sent_by(VICTIM, messages.Refusal) and not world.hub.sent_by(VICTIM, Advert)
    assert world.entries(VICTIM, "round.declined")[0]["rule"].startswith("[policy] least_cohort")


def test_an_update_that_cannot_be_encoded_is_declined_and_its_value_stays_here(world: SiteWorld) -> None:
    world.start_all()
    world.learners[VICTIM].step = 9.0
    world.hub.order((VICTIM,))
    world.work(VICTIM)
    (entry,) = world.entries(VICTIM, "round.declined")
    assert entry["rule"] == f"{DataError.code}: no update for this round"
    assert not world.hub.sent_by(VICTIM, relay.Decline), "when training ended would tell how much data is here"
    world.tick(1000 * SLOT_SECONDS)
    assert world.hub.sent_by(VICTIM, relay.Decline) and not world.hub.ready
    world.hub.order((VICTIM,))
    world.work(VICTIM)
    world.tick(1000 * SLOT_SECONDS)
    waits = [message.seconds for message in world.hub.sent_by(VICTIM, relay.Decline)]
    assert waits == [FAILED_SECONDS, 2 * FAILED_SECONDS], "it says when to ask again, later each time"


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
    assert world.learners[VICTIM].manifests == [2], "what trains is told too"


def test_a_newer_manifest_waits_for_an_open_attempt_and_the_site_says_hello_meanwhile(world: SiteWorld) -> None:
    """After a restart of the coordinator in mid-attempt: without Hello nobody could end the attempt."""
    world.start_all()
    world.base.publish()
    data = world.base.published()
    session = world.agents[VICTIM].session
    session.machine.state, session.machine.aggregation.ctx = SiteState.UPLOADED, b"c" * 32
    session.phase = SessionPhase.AWAITING_MANIFEST
    effects = session.receive(relay.ManifestFrame(version=2, length=len(data), index=0, data=data), None)
    (hello,) = [effect.message for effect in effects if isinstance(effect, Send)]
    assert isinstance(hello, messages.Hello) and hello.open_ctx == b"c" * 32
    assert session.phase is SessionPhase.LIVE and session.manifest.version == 1
    session.machine.state, session.machine.aggregation.ctx = SiteState.IDLE, b""
    assert any(isinstance(effect, Adopt) for effect in session.tick())


@pytest.mark.parametrize("state", [SiteState.AGREED, SiteState.RELEASED])
def test_a_newer_manifest_does_not_wait_for_an_attempt_that_only_the_coordinator_can_end(
    world: SiteWorld, state: SiteState
) -> None:
    """Under the newer manifest it has closed the round: plans would be refused as another manifest's for ever."""
    world.start_all()
    world.base.publish()
    data = world.base.published()
    session = world.agents[VICTIM].session
    session.machine.state, session.machine.aggregation.ctx = state, b"c" * 32
    world.hub.send(VICTIM, relay.ManifestFrame(version=2, length=len(data), index=0, data=data))
    assert session.manifest.version == 2 and session.machine.state is SiteState.IDLE


def test_another_federations_manifest_stops_the_site(world: SiteWorld, tmp_path: Path) -> None:
    world.start_all()
    other = SiteWorld(tmp_path / "other")
    forged = other.base.signed(other.manifest.model_copy(update={"version": 2}))
    world.hub.send(VICTIM, relay.ManifestFrame(version=2, length=len(forged), index=0, data=forged))
    assert not world.left[VICTIM].retry
    assert world.agents[VICTIM].manifest.version == 1


@pytest.mark.parametrize("blocks", [None, [None], [{"name": 1}], {"w": 1}])
def test_a_manifest_that_nobody_signed_is_refused_whatever_its_layout_says(world: SiteWorld, blocks: object) -> None:
    """It is read before its signature is checked."""
    world.start_all()
    forged = json.loads(world.base.published())
    forged["manifest"]["version"] = 2
    forged["manifest"]["aggregation"]["layout"]["blocks"] = blocks
    data = rfc8785.dumps(forged) + b"\n"
    world.hub.send(VICTIM, relay.ManifestFrame(version=2, length=len(data), index=0, data=data))
    assert isinstance(world.left[VICTIM].error, ManifestRejected)
    assert world.agents[VICTIM].manifest.version == 1


@pytest.mark.parametrize(
    ("code", "retry"),
    # Not listed may be for now only: the operator has not installed the manifest yet. The client waits ever longer.
    [(1, True), (2, False), (3, False), (4, True), (5, True), (6, False), (7, True)],
)
def test_every_goodbye_says_whether_to_come_back(world: SiteWorld, code: int, retry: bool) -> None:
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    world.hub.send(VICTIM, relay.Goodbye(code=code))
    assert world.left[VICTIM].retry is retry and (hint := world.left[VICTIM].error.hint)
    assert ("if the state folder was moved, let [site] state" in hint) is (code == relay.CloseReason.OUT_OF_ORDER)


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
    held = HeldCheckpoint(note=head, endorsements=agent.log.submission(0).endorsements)
    world.kill(VICTIM)
    # The folder is set back: the newest entries and heads are gone.
    segment = next((agent.state_dir.log / "segments").glob("*.jsonl"))
    lines = segment.read_bytes().splitlines(keepends=True)
    sizes = sorted(int(path.stem) for path in (agent.state_dir.log / "checkpoints").glob("*.note"))
    for size in sizes[1:]:
        (agent.state_dir.log / "checkpoints" / f"{size}.note").unlink()
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


@pytest.mark.parametrize("entry", [10**15, 2**64 - 1])
def test_an_impossible_receipt_is_refused(world: SiteWorld, entry: int) -> None:
    """It was found by fuzzing: the log cannot hold such a number, and the agent ended."""
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    world.hub.send(VICTIM, relay.Receipt(sequence=1, entry=entry, path=(bytes(32),)))
    assert world.entries(VICTIM, "receipt") == [] and world.agents[VICTIM].session.phase == "live"


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
    assert len(world.entries("graz", "cosigned")) == 1 and len(world.entries("linz", "cosigned")) == 1
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
    from security.log.events import OperatorAction

    return OperatorAction(command="test", role="tester")


def test_promises_of_another_run_are_set_aside(world: SiteWorld) -> None:
    agent = world.start(VICTIM)
    world.kill(VICTIM)
    (agent.state_dir.folder / "run").write_text("run-0\n")
    again = world.start(VICTIM)
    assert (agent.state_dir.folder / "runs" / "run-0" / "wal").exists()
    assert again.session.machine.core.journal.last is None and again.log.size > agent.log.size


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
    assert world.hub.aggregate().state is CoordinatorState.DEAD
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


def test_a_layout_that_changes_during_training_voids_the_update(world: SiteWorld) -> None:
    world.start_all()
    world.hub.order((VICTIM,))
    agent = world.agents[VICTIM]
    finish = world.jobs[VICTIM].popleft()()
    wider = replace(agent.seat.policy, layout=replace(agent.seat.layout, roster_size=4))
    agent.seat.take(replace(agent.seat.membership, policy=wider))
    world.hub.take(VICTIM, agent.run(finish()))
    world.hub.pump()
    world.tick(1000 * SLOT_SECONDS)
    assert world.hub.sent_by(VICTIM, relay.Decline) and not list(agent.state_dir.pending.iterdir())


@pytest.mark.parametrize(
    ("days", "error", "hint"), [(-9, CertificateNotYetValid, "clock"), (400, CertificateExpired, "renew")]
)
def test_a_clock_off_by_days_is_one_clear_line(world: SiteWorld, days: int, error: type[Exception], hint: str) -> None:
    world.clock.wall += days * DAY
    with pytest.raises(error) as caught:
        world.start(VICTIM)
    assert hint in caught.value.hint  # type: ignore[attr-defined]
    assert not (world.configs[VICTIM].parent / "state").exists()


def test_a_revoked_site_is_told_so_by_the_manifest_it_holds(world: SiteWorld) -> None:
    world.base.enroll("salzburg")
    world.base.authority.revoke(VICTIM, reason="stolen server", now_ms=world.base.now)
    world.base.publish()
    world.base.identity(VICTIM).install_manifest(world.base.published(), now_ms=world.base.now)
    with pytest.raises(CertificateRevoked):
        world.start(VICTIM)


def test_a_full_disk_stops_a_promise_before_it_is_said(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start_all()
    world.hub.order(SITES)
    for site in SITES:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    agent = world.agents[VICTIM]

    def full(record: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(agent.wal, "append", full)
    with pytest.raises(OSError, match="No space left"):
        world.hub.plan()
    world.hub.pump()
    assert not world.hub.sent_by(VICTIM, Advert)
    # Nothing is lost: with room again, the restarted site answers for the same update.
    world.kill(VICTIM)
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    assert world.agents[VICTIM].session.machine.aggregation.update is not None
