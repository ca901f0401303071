"""A run that waits: certificates that end on one day, hours, pauses. Nobody trains for a round that cannot end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.attendance import Candidates
from coordinator.phases import RunPhase
from coordinator.rounds import LOST_IN_A_ROW
from coordinator.run import hindrance
from lazaret.control import PauseFile
from lazaret.errors import PolicyViolation
from security.secagg.coordinator.rounds import CoordinatorRound
from site_agent import session as sessions
from site_agent.policy import SitePolicy
from tests.support.consortium_world import DAY
from tests.support.whole_federation import SITES, WholeFederation, whole_federation

pytestmark = pytest.mark.timeout(240)
HOUR = 3_600_000


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[WholeFederation]:
    with whole_federation(tmp_path) as made:
        yield made


def trained(federation: WholeFederation) -> int:
    """Rounds that were trained, over all sites: what a private federation would have booked."""
    return sum(len(agent.learner.trained) for agent in federation.agents.values())


def steps(federation: WholeFederation, seconds: float) -> None:
    for _ in range(int(4 * seconds)):
        federation.step()


def end_all_certificates(federation: WholeFederation, days: int = 10) -> None:
    """Everybody's certificates end on one day, in mid-run; streams stay as they are."""
    world = federation.world
    for site in SITES:
        world.authority.renew(world.key, site, None, now_ms=world.now, days=days)
        world.install(site)
    federation.manifest = world.publish()
    for member in ("hub", *SITES):
        federation.give_manifest(member)
    federation.start_all()
    federation.run_rounds(1)
    steps(federation, 3)
    federation.clock.advance((days + 1) * DAY)


def test_when_all_certificates_have_ended_nobody_trains_until_they_are_renewed(federation: WholeFederation) -> None:
    end_all_certificates(federation)
    before, rounds = trained(federation), len(federation.rounds)
    steps(federation, 15)
    assert trained(federation) - before <= len(SITES), "at most the round that was open"
    assert len(federation.rounds) <= rounds + 1 and federation.engine.phase is RunPhase.WAITING
    assert "certificate not valid until the deadline: graz, linz, vienna, wels" in (hindrance(federation.engine) or "")

    world = federation.world
    for site in SITES:
        world.authority.renew(world.key, site, None, now_ms=world.now, days=365)
        world.install(site)
    federation.manifest = world.publish()
    federation.adopt_at_hub()
    federation.run_rounds(2)
    assert federation.survivors()[-1] == set(SITES)


def test_when_all_certificates_have_ended_nobody_trains_twin(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: the order goes out to whoever is connected, and each round is lost and trained again."""
    monkeypatch.setattr(Candidates, "possible", lambda *_: True)
    monkeypatch.setattr(
        Candidates, "able_until", lambda self, later_ms=0: {entry.site for entry in self.core.policy.roster}
    )
    monkeypatch.setattr("coordinator.rounds.LOST_IN_A_ROW", 10**9)
    monkeypatch.setattr(sessions, "check_standing", lambda *_, **__: None)
    end_all_certificates(federation)
    before = trained(federation)
    steps(federation, 15)
    assert trained(federation) - before > 2 * len(SITES)


def test_an_order_is_not_sent_when_certificates_end_before_the_deadline(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 s before the end with 100 s for training: the next round waits, though everybody is valid still. The sites
    would train."""
    monkeypatch.setattr(sessions, "check_standing", lambda *_, **__: None)
    end_all_certificates(federation, days=10)  # and turn the clock back to just before
    federation.clock.advance(-DAY - 20_000)
    assert all(federation.engine.core.policy.lists(site) for site in SITES)
    federation.disconnect("wels")
    federation.connect("wels")
    before = trained(federation)
    steps(federation, 15)
    assert trained(federation) - before <= len(SITES)
    assert federation.engine.candidates.able_until(federation.engine.plan.train_ms) == set()
    assert federation.engine.phase is RunPhase.WAITING and "until the deadline" in (hindrance(federation.engine) or "")


def test_a_site_does_not_train_for_a_coordinator_that_orders_rounds_which_cannot_end(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator is not trusted: each site looks at the certificates of the roster itself."""
    end_all_certificates(federation)
    monkeypatch.setattr(Candidates, "possible", lambda *_: True)
    monkeypatch.setattr(
        Candidates, "able_until", lambda self, later_ms=0: {entry.site for entry in self.core.policy.roster}
    )
    before = trained(federation)
    steps(federation, 15)
    assert trained(federation) - before <= len(SITES)


def end_for_everybody(federation: WholeFederation, what: str) -> None:
    """20 s before the manifest or the coordinator's certificate ends, with 100 s for training."""
    world, days = federation.world, 10
    world.authority.renew(world.key, "hub", None, now_ms=world.now, days=days if what == "hub" else 365)
    world.install("hub")
    federation.manifest = world.publish()
    for member in ("hub", *SITES):
        federation.give_manifest(member)
    federation.start_all()
    federation.run_rounds(1)
    steps(federation, 3)
    manifest = federation.manifest
    ends = manifest.expires_at_ms if what == "manifest" else manifest.coordinator.valid_ms[1]
    federation.clock.advance(ends - 20_000 - federation.clock.now_ms())


NAMED = {"manifest": "manifest version 2 is not valid", "hub": "the coordinator's certificate is not valid"}


@pytest.mark.parametrize("what", NAMED)
def test_no_round_is_ordered_that_would_outlast_the_manifest_or_the_coordinators_certificate(
    federation: WholeFederation, what: str
) -> None:
    end_for_everybody(federation, what)
    before = trained(federation)
    steps(federation, 30)
    assert trained(federation) - before <= len(SITES), "at most the round that was open"
    assert federation.engine.phase is RunPhase.WAITING and NAMED[what] in (hindrance(federation.engine) or "")
    assert {row.outcome for row in federation.rounds} == {"published", None}, "no round was lost, nobody was blamed"
    world = federation.world
    world.authority.renew(world.key, "hub", None, now_ms=world.now, days=365)
    world.install("hub")
    federation.manifest = world.publish()
    federation.adopt_at_hub()
    federation.run_rounds(1)
    assert federation.survivors()[-1] == set(SITES)


def test_no_round_is_ordered_that_would_outlast_the_coordinators_certificate_twin(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: sites train round after round for plans that they refuse, and are blamed for it."""
    monkeypatch.setattr("security.identity.membership.AggregationPolicy.ended", lambda *_: None)
    end_for_everybody(federation, "hub")
    federation.clock.advance(30_000)
    before = trained(federation)
    steps(federation, 30)
    assert trained(federation) - before >= 2 * len(SITES) and federation.engine.paused is not None


@pytest.mark.parametrize("what", NAMED)
def test_a_site_does_not_train_for_a_round_that_would_outlast_the_manifest_or_the_coordinators_certificate(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    end_for_everybody(federation, what)
    monkeypatch.setattr(Candidates, "possible", lambda *_: True)
    monkeypatch.setattr(
        Candidates, "able_until", lambda self, later_ms=0: {entry.site for entry in self.core.policy.roster}
    )
    before = trained(federation)
    steps(federation, 15)
    assert trained(federation) - before <= len(SITES)
    declined = federation.agents["graz"].session.declined
    assert declined is not None and "must be valid until the end of the round" in declined[1]


def test_after_a_few_lost_rounds_the_run_pauses_and_names_the_cause(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self, ready):
        raise PolicyViolation("it cannot be", where="round")

    plans = CoordinatorRound.next_attempt
    monkeypatch.setattr(CoordinatorRound, "next_attempt", refuses)
    federation.start_all()
    federation.run(lambda: federation.engine.paused is not None)
    federation.clock.advance(HOUR)
    steps(federation, 5)
    assert [row.outcome for row in federation.rounds] == ["it cannot be"] * LOST_IN_A_ROW + [None]
    assert "lost in a row, the last because it cannot be" in (hindrance(federation.engine) or "")
    assert trained(federation) == LOST_IN_A_ROW * len(SITES)
    # It stays so over a restart, and goes on when the operator says so.
    federation.adopt_at_hub()
    steps(federation, 5)
    assert federation.engine.paused is not None and trained(federation) == LOST_IN_A_ROW * len(SITES)
    monkeypatch.setattr(CoordinatorRound, "next_attempt", plans)
    assert federation.shell is not None and federation.shell.pause.clear()
    federation.run_rounds(1)


def test_hours_end_by_themselves(federation: WholeFederation) -> None:
    """A stream that stands for days: who declined is asked again when its hours begin, and not before."""
    federation.start_all()
    federation.run_rounds(1)
    now = federation.clock.now_ms() % DAY
    start = (now + 2 * HOUR) // 60_000
    hours = f"{start // 60 % 24:02}:{start % 60:02}-{(start // 60 + 3) % 24:02}:{start % 60:02}"
    agents = [federation.agents[site] for site in SITES[:2]]
    for agent in agents:
        agent.session.policy = SitePolicy(hours=hours)
    federation.run(lambda: federation.engine.phase is RunPhase.WAITING)
    assert "declined: graz, linz" in (hindrance(federation.engine) or "")
    published, declines = federation.published, [agent.session.declined for agent in agents]
    assert all(told is not None and "next at" in told[1] for told in declines)
    waits = [federation.engine.sites.declined[site] - federation.clock.mono_ms() for site in SITES[:2]]
    assert all(1.9 * HOUR < wait <= 2 * HOUR for wait in waits), "the coordinator knows until when"
    federation.clock.advance(2 * HOUR - 5 * 60_000)
    steps(federation, 5)
    assert federation.published == published and [agent.session.declined for agent in agents] == declines
    federation.clock.advance(6 * 60_000)
    federation.run(lambda: federation.published > published, seconds=30)
    assert federation.survivors()[-1] == set(SITES) and not federation.left


def test_hours_end_by_themselves_twin(federation: WholeFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: who has declined is not asked again as long as its stream stands."""
    monkeypatch.setattr("coordinator.attendance.Attendance.ask_again", lambda *_: [])
    with pytest.raises(AssertionError, match="did not happen"):
        test_hours_end_by_themselves(federation)


def test_a_site_is_paused_and_resumed_while_it_runs(federation: WholeFederation) -> None:
    federation.start_all()
    federation.run_rounds(1)
    pause = PauseFile(federation.agents["graz"].state_dir.folder)
    pause.set("new disk", now_ms=federation.clock.now_ms())
    federation.run_rounds(3)
    assert "graz" not in federation.survivors()[-1]
    told = federation.agents["graz"].session.declined
    assert told is not None and "paused: new disk" in told[1]
    pause.clear()
    federation.run_rounds(2)
    assert "graz" in federation.survivors()[-1] and not federation.left


def test_the_run_is_paused_and_resumed_while_it_runs(federation: WholeFederation) -> None:
    federation.start_all()
    federation.run_rounds(1)
    assert federation.shell is not None
    federation.shell.pause.set("the microscope is moved", now_ms=0)
    federation.run(lambda: federation.engine.phase is RunPhase.WAITING)
    published, before = federation.published, trained(federation)
    federation.clock.advance(HOUR)
    steps(federation, 5)
    assert federation.published == published and trained(federation) == before
    assert hindrance(federation.engine) == "paused: the microscope is moved"
    federation.shell.pause.clear()
    federation.run_rounds(2)
    assert federation.survivors()[-1] == set(SITES)


def test_the_deadline_counts_from_the_moment_enough_sites_are_there(federation: WholeFederation) -> None:
    federation.start_hub()
    for site in SITES[:2]:
        federation.start(site)
        federation.connect(site)
    federation.clock.advance(500_000)  # five times as long as training may take
    steps(federation, 2)
    assert federation.engine.phase is RunPhase.WAITING and trained(federation) == 0
    federation.start("vienna")
    federation.connect("vienna")
    federation.step()
    assert federation.engine.phase is RunPhase.TRAINING
    left = federation.engine.deadline - federation.clock.mono_ms()
    assert left > 90_000
    federation.run_rounds(1)
    assert federation.survivors() == [set(SITES[:3])]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the operator's log says of waits."""
    told = [record.getMessage() for record in caplog.records if record.name == "coordinator"]
    return [line for line in told if line.startswith("round ") and (" waits" in line or " deadline" in line)]


def test_a_wait_is_said_again_while_it_lasts(federation: WholeFederation, caplog: pytest.LogCaptureFixture) -> None:
    federation.start_hub()
    for site in SITES[:2]:
        federation.start(site)
        federation.connect(site)
    steps(federation, 2)
    before = len(said(caplog))
    for _ in range(3):
        federation.clock.advance(HOUR)
        steps(federation, 2)
    lines = said(caplog)[before:]
    assert len(lines) == 2, "each time after as long as it has lasted"
    assert "not connected: vienna, wels (the run has waited for 120 min)" in lines[-1]


def test_sites_that_stand_still_are_named_while_the_others_wait(
    federation: WholeFederation, caplog: pytest.LogCaptureFixture
) -> None:
    federation.start_all()
    federation.run_rounds(1)
    for site in SITES[2:]:
        federation.agents[site].submit = lambda _: None  # training never ends
    for _ in range(4):
        federation.clock.advance(120_000)  # training may take 100 s
        steps(federation, 2)
    assert "past its deadline with 2 sites ready; still training: vienna, wels" in said(caplog)[-1]


def test_a_run_that_waits_for_paused_sites_goes_on_when_they_are_resumed(federation: WholeFederation) -> None:
    """No round ends meanwhile, after which they would be asked anyway: the sites ask themselves."""
    federation.start_all()
    federation.run_rounds(1)
    pauses = [PauseFile(federation.agents[site].state_dir.folder) for site in SITES[:2]]
    for pause in pauses:
        pause.set("new disk", now_ms=federation.clock.now_ms())
    federation.run(lambda: federation.engine.phase is RunPhase.WAITING)
    published = federation.published
    steps(federation, 10)
    assert federation.published == published and federation.engine.phase is RunPhase.WAITING
    for pause in pauses:
        pause.clear()
    federation.run(lambda: federation.published > published, seconds=30)
    assert federation.survivors()[-1] == set(SITES)
