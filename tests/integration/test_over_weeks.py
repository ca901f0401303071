"""What months bring: certificates that end in mid-run and are renewed, members who come back, a second run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.assembly import ACCEPTED_UNCHECKED
from coordinator.cli import cli as coordinator_command
from coordinator.phases import RunPhase
from lazaret.control import NowFile
from lazaret.errors import CertificateNameMismatch, ConfigError
from scripts.local_federation.federation import command
from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.audit.verify import verify
from security.identity.enrolment import renew
from security.identity.enrolment_files import EnrolmentAnswer, EnrolmentRequest
from security.identity.pki import Role, key_fingerprint
from security.secagg.certificates import Ack, Advert
from security.secagg.transitions import SiteState
from site_agent.cli import cli as site_command
from site_agent.config import SiteConfig
from site_agent.next_run import accept
from tests.support.consortium_world import DAY
from tests.support.site_world import write_wide_model
from tests.support.whole_federation import SITES, WholeFederation, whole_federation

pytestmark = pytest.mark.timeout(240)
LATE = "wels"


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[WholeFederation]:
    with whole_federation(tmp_path) as made:
        yield made


def renewed(federation: WholeFederation, member: str, *, new_keys: bool) -> EnrolmentAnswer:
    """What `site-agent renew`, `consortium renew` and `consortium publish` do."""
    world = federation.world
    role = Role.COORDINATOR if member == "hub" else Role.SITE
    request = renew(world.identity(member), role) if new_keys else None
    world.authority.renew(world.key, member, request, now_ms=world.now, days=365)
    federation.manifest = world.publish()
    return EnrolmentAnswer.read(world.authority.answer_path(member))


def install(federation: WholeFederation, member: str, answer: EnrolmentAnswer) -> None:
    federation.world.identity(member).install(answer, root_fingerprint=None, now_ms=federation.clock.now_ms())


def tls_key(federation: WholeFederation, member: str) -> str:
    return key_fingerprint(federation.world.identity(member).tls_certificate().public_key())  # type: ignore[arg-type]


def test_certificates_that_end_in_mid_run_are_renewed(federation: WholeFederation) -> None:
    """One site's certificates end while everything runs: it is left out, and back as soon as it has new ones."""
    world = federation.world
    for site in SITES:
        days = 10 if site == LATE else 365
        world.authority.renew(world.key, site, None, now_ms=world.now, days=days)
        world.install(site)
    federation.manifest = world.publish()
    for member in ("hub", *SITES):
        federation.give_manifest(member)
    federation.start_all()
    federation.run_rounds(1)
    federation.clock.advance(11 * DAY)
    federation.run_rounds(2)
    assert [LATE in found for found in federation.survivors()] == [True, False, False]

    answer = renewed(federation, LATE, new_keys=True)
    old = tls_key(federation, LATE)
    install(federation, LATE, answer)
    federation.adopt_at_hub()
    federation.run_rounds(3)
    assert LATE in federation.survivors()[-1]
    assert tls_key(federation, LATE) != old and not federation.left


def test_new_keys_are_used_only_when_the_coordinator_knows_them(federation: WholeFederation) -> None:
    federation.start_all()
    federation.run_rounds(1)
    answer = renewed(federation, "graz", new_keys=True)
    old = tls_key(federation, "graz")
    install(federation, "graz", answer)
    # The coordinator has not heard of it yet: connecting anew works, with the old key.
    federation.disconnect("graz")
    federation.run_rounds(1)
    assert tls_key(federation, "graz") == old and "graz" not in federation.refused
    federation.adopt_at_hub()
    federation.run_rounds(2)
    assert tls_key(federation, "graz") != old
    # The next connection is made with the new key, and taken.
    federation.disconnect("graz")
    federation.run_rounds(2)
    assert "graz" in federation.survivors()[-1] and not federation.refused and not federation.left


def test_a_key_that_is_not_listed_is_turned_away_twin(federation: WholeFederation) -> None:
    """Were the new key used at once, the site would be cut off until the operator has the new manifest."""
    federation.start_all()
    federation.run_rounds(1)
    answer = renewed(federation, "graz", new_keys=True)
    install(federation, "graz", answer)
    identity = federation.world.identity("graz")
    identity.next_tls_path.replace(identity.tls_path)
    federation.disconnect("graz")
    federation.run_rounds(1)
    assert isinstance(federation.refused["graz"], CertificateNameMismatch)


def test_the_coordinator_renews_its_keys(federation: WholeFederation) -> None:
    federation.start_all()
    federation.run_rounds(1)
    answer = renewed(federation, "hub", new_keys=True)
    install(federation, "hub", answer)
    federation.adopt_at_hub()
    federation.run_rounds(2)
    assert federation.survivors()[-1] == set(SITES) and not federation.left
    newest = federation.manifest.coordinator.tls_keys[-1]
    assert federation.agents["graz"].seat.destination == newest


def test_who_was_revoked_comes_back_with_its_old_log(federation: WholeFederation) -> None:
    world = federation.world
    federation.start_all()
    federation.run_rounds(1)
    world.authority.revoke("graz", "by mistake", now_ms=world.now)
    federation.manifest = world.publish()
    federation.kill("graz")
    federation.adopt_at_hub()
    federation.run_rounds(1)
    world.authority.enroll(world.key, renew(world.identity("graz"), Role.SITE), now_ms=world.now, days=365)
    federation.manifest = world.publish()
    install(federation, "graz", EnrolmentAnswer.read(world.authority.answer_path("graz")))
    federation.give_manifest("graz")
    federation.adopt_at_hub()
    federation.start("graz")
    federation.run_rounds(3)
    assert [len(found) for found in federation.survivors()][:2] == [4, 3]
    assert "graz" in federation.survivors()[-1] and not federation.refused


@pytest.mark.parametrize("lost", [SITES, ("graz", "linz", "wels")], ids=["no acks", "the ack of the leaver"])
def test_a_sum_is_checked_although_a_site_left_before_that(federation: WholeFederation, lost: tuple[str, ...]) -> None:
    """SIGKILL between a sum and its certificate, and the next manifest is without one of the sites in the sum."""
    federation.deaf = {(site, Ack) for site in lost}
    federation.start_all()
    federation.run(lambda: federation.published == 1)
    for _ in range(8):
        federation.step()
    assert federation.engine.check.open, "the sum of round 1 has no certificate yet"
    federation.world.authority.revoke("vienna", "left", now_ms=federation.world.now)
    federation.manifest = federation.world.publish()
    federation.kill("vienna")
    federation.deaf.clear()
    federation.kill_hub()
    joined_by_command(federation, "--unchecked")
    federation.start_hub()
    federation.run_rounds(2)
    assert federation.survivors() == [set(SITES), *[set(SITES) - {"vienna"}] * 2]


def in_the_second_round(federation: WholeFederation) -> None:
    """Everybody has trained for it, and nobody has been asked to add up yet."""
    federation.start_all()
    federation.run_rounds(1)
    federation.run(lambda: all(learner.trained == [1, 2] for learner in federation.learners.values()))
    assert federation.engine.phase is RunPhase.TRAINING and not federation.engine.round.attempts


def test_a_renewal_in_mid_round_costs_nobody_its_training(federation: WholeFederation) -> None:
    in_the_second_round(federation)
    install(federation, "graz", renewed(federation, "graz", new_keys=True))
    federation.adopt_at_hub()
    federation.run_rounds(1)
    assert [row.outcome for row in federation.rounds[:2]] == ["published", "published"]
    assert all(learner.trained[:3] in ([1, 2], [1, 2, 3]) for learner in federation.learners.values())
    assert federation.survivors()[-1] == set(SITES) and not federation.left


@pytest.mark.parametrize("change", ["other work", "an attempt", "the first round"])
def test_a_round_of_an_older_manifest_ends_where_it_cannot_go_on(federation: WholeFederation, change: str) -> None:
    """Twins: what sites have trained is of no use, or quorums of two rosters would sign for one round."""
    if change == "the first round":
        federation.start_all()
        federation.run(lambda: any(learner.trained for learner in federation.learners.values()))
    else:
        in_the_second_round(federation)
    if change == "an attempt":
        federation.deaf = {(site, Advert) for site in SITES}
        federation.run(lambda: bool(federation.engine.round.attempts))
    if change == "other work":
        world = federation.world
        world.write_plan(world.authority.plan_path.read_text().replace("rounds = 50", "rounds = 49"))
    renewed(federation, "graz", new_keys=False)
    federation.adopt_at_hub()
    federation.deaf.clear()
    ended = [row.outcome for row in federation.rounds]
    assert ended[-2:] == ["the manifest changed", None]
    federation.run_rounds(1)
    assert federation.survivors()[-1] == set(SITES) and not federation.left


def test_an_order_is_not_trained_under_the_manifest_before_it(federation: WholeFederation) -> None:
    """A site whose attempt is open when a hospital joins hears of the order first. The update that it would train then
    is for the slots of the smaller roster: it could not be used, and nobody would have asked for another one.
    """
    world = federation.world
    federation.start_all()
    federation.run_rounds(1)
    federation.deaf = {(site, Advert) for site in SITES}
    federation.run(lambda: bool(federation.engine.round.attempts))
    federation.pump()
    assert federation.agents["graz"].session.machine.state is SiteState.ADVERTISED
    world.enroll("zams")
    federation.manifest = world.publish()
    federation.give_manifest("zams")
    federation.adopt_at_hub()
    federation.deaf.clear()
    federation.run_for(10)
    federation.start("zams")
    assert federation.published >= 2, "the four have not waited for the end of the training time"
    federation.run(lambda: federation.survivors()[-1] == {*SITES, "zams"}, seconds=60)


def joined_by_command(federation: WholeFederation, *options: str) -> None:
    """`coordinator join --manifest`, of a coordinator that does not run."""
    hub, manifest = federation.folder / "coordinator.toml", federation.folder / "newer.json"
    hub.write_text('identity = "hub"\nstate = "hub-state"\nlisten = "127.0.0.1:1"\ninitial_model = "m"\n')
    manifest.write_bytes(federation.world.published())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.commands.SystemClock", lambda: federation.clock)
        command(coordinator_command, "join", "--manifest", manifest, *options, "--config", hub)


def test_a_manifest_waits_for_the_check_of_the_newest_sum(federation: WholeFederation) -> None:
    """A coordinator that was killed before anybody had its sum: under a newer manifest no site could take it."""
    federation.start_all()
    federation.run_rounds(1)
    federation.deaf = {(site, Ack) for site in SITES}
    federation.run(lambda: federation.published == 2)
    renewed(federation, "graz", new_keys=False)
    federation.kill_hub()
    with pytest.raises(ConfigError, match="the sum of round 2 is not checked yet"):
        joined_by_command(federation)
    federation.deaf.clear()
    federation.start_hub()
    federation.run(lambda: not federation.engine.check.open)
    federation.kill_hub()
    joined_by_command(federation)
    federation.start_hub()
    federation.run_rounds(1)


def test_a_manifest_that_came_beside_a_running_coordinator_waits_too(federation: WholeFederation) -> None:
    """It runs, or says so: `join` lets the manifest in. Then the coordinator is killed before its sum is checked. With
    the manifest that the privacy log still has, it starts, has the sum checked, and takes the newer one afterwards."""
    federation.start_all()
    federation.run_rounds(1)
    federation.deaf = {(site, Ack) for site in SITES}
    federation.run(lambda: federation.published == 2)
    renewed(federation, "graz", new_keys=False)
    state, identity = federation.folder / "hub-state", federation.world.identity("hub")
    now = federation.clock.now_ms()
    NowFile(state).beat({}, now_ms=now, mono_ms=0)
    joined_by_command(federation)
    federation.kill_hub()
    (state / ACCEPTED_UNCHECKED).write_text("00" * 32)  # what was accepted for another manifest does not count
    with pytest.raises(ConfigError, match="the sum of round 2 is not checked, and was made under another manifest"):
        federation.start_hub()
    newer = identity.manifest_path.read_bytes()
    identity.manifest_path.write_bytes((state / "log" / "manifest.json").read_bytes())
    federation.deaf.clear()
    federation.start_hub()
    federation.run(lambda: not federation.engine.check.open)
    federation.kill_hub()
    identity.manifest_path.write_bytes(newer)
    federation.start_hub()
    federation.run_rounds(1)


def test_certificates_alone_are_installed_at_any_time(federation: WholeFederation) -> None:
    """An answer without a manifest changes nothing that a sum depends on."""
    federation.start_all()
    federation.deaf = {(site, Ack) for site in SITES}
    federation.run(lambda: federation.published == 1)
    federation.kill_hub()
    world = federation.world
    request = world.identity("hub").renew(next(one.subject for one in world.authority.members() if one.member == "hub"))
    world.authority.renew(world.key, "hub", request, now_ms=world.now, days=365)
    hub = federation.folder / "coordinator.toml"
    hub.write_text('identity = "hub"\nstate = "hub-state"\nlisten = "127.0.0.1:1"\ninitial_model = "m"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordinator.commands.SystemClock", lambda: federation.clock)
        command(coordinator_command, "join", world.authority.answer_path("hub"), "--config", hub)


def test_a_manifest_can_be_installed_before_the_check_all_the_same(federation: WholeFederation) -> None:
    federation.start_all()
    federation.deaf = {(site, Ack) for site in SITES}
    federation.run(lambda: federation.published == 1)
    renewed(federation, "graz", new_keys=False)
    federation.kill_hub()
    joined_by_command(federation, "--unchecked")
    assert federation.world.identity("hub").manifest_path.read_bytes() == federation.world.published()
    federation.start_hub()


def test_a_second_run_goes_on_in_the_same_logs(federation: WholeFederation) -> None:
    """One log for each party over all its runs: nothing of a run can be left out without a gap in it."""
    federation.start_all()
    federation.run_rounds(2)
    logs = [federation.folder / "hub-state" / "log", *(federation.agents[site].state_dir.log for site in SITES)]
    first = [verify(path, keys_for(path, federation.world.authority.folder / "root.pem")) for path in logs]

    world = federation.world
    plan = world.authority.plan_path.read_text().replace('run = "run-1"', 'run = "run-2"')
    world.write_plan(plan)
    write_wide_model(federation.model_path)
    federation.manifest = world.publish()
    federation.adopt_at_hub()
    assert federation.rounds == [(1, federation.rounds[0][1], None, None)], "the new run counts from one"
    federation.run(lambda: all(agent.next_run.offer for agent in federation.agents.values()))
    for site in SITES:
        config = SiteConfig.read(federation.configs[site])
        accept(config, federation.agents[site].identity, "run-2", now_ms=federation.clock.now_ms())
    federation.run(lambda: sorted(federation.started) == sorted(SITES))
    federation.run_rounds(2)
    assert federation.survivors()[-1] == set(SITES)
    assert (federation.folder / "hub-state" / "runs" / "run-1" / "coordinator.sqlite").exists()
    assert (federation.agents["graz"].state_dir.folder / "runs" / "run-1" / "wal").exists()

    federation.stop_all()
    root = federation.world.authority.folder / "root.pem"
    crossed = cross(logs, {path: keys_for(path, root) for path in logs})
    assert crossed.exit_code == 0, [finding for finding in crossed.findings if finding.severity.value != "note"]
    assert [log.size for log in crossed.logs] > [log.size for log in first]
    assert {record.run for record in crossed.histories[0].of("aggregate.published")} == {"run-1", "run-2"}


def test_the_commands_write_requests_that_the_consortium_takes(federation: WholeFederation) -> None:
    world = federation.world
    site = federation.folder / "graz-agent" / "site.toml"
    federation.start("graz")
    hub = federation.folder / "coordinator.toml"
    hub.write_text('identity = "hub"\nstate = "hub-state"\nlisten = "127.0.0.1:1"\ninitial_model = "m"\n')
    command(site_command, "--config", site, "renew", "--json")
    command(coordinator_command, "renew", "--config", hub)
    for member in ("graz", "hub"):
        identity = world.identity(member)
        before = identity.tls_certificate()
        request = EnrolmentRequest.read(identity.request_path)
        record = world.authority.renew(world.key, member, request, now_ms=world.now, days=90)
        assert len(record.issued) == 4 and identity.tls_certificate() == before
