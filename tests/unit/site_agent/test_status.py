"""What a hospital's people are told: whether the agent runs, what it waits for, and what needs them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from lazaret.alerts import Alerts, AlertsTable
from lazaret.control import STALE_MS, PauseFile
from site_agent.config import SiteConfig
from site_agent.page import content
from site_agent.policy import SitePolicy
from site_agent.status import AgentPresence, clock_text, lines, overview
from tests.support.consortium_world import DAY
from tests.support.site_world import SiteWorld

SITE = "linz"
MINUTE = 60_000


@pytest.fixture
def world(tmp_path: Path) -> SiteWorld:
    made = SiteWorld(tmp_path)
    made.start_all()
    return made


def told(world: SiteWorld) -> str:
    config = SiteConfig.read(world.configs[SITE])
    return "\n".join(lines(overview(config, world.clock), world.clock.now_ms()))


def present(world: SiteWorld, heard: list[dict[str, object]] | None = None) -> AgentPresence:
    alerts = Alerts("site-agent", AlertsTable(), (heard if heard is not None else []).append)
    return AgentPresence(SiteConfig.read(world.configs[SITE]), world.agents[SITE], alerts)


def test_running_connected_and_dead(world: SiteWorld) -> None:
    assert told(world).startswith("not running: no agent has run here")
    seen = present(world)
    seen.look()
    assert told(world).startswith("running, connected since ") and "waiting for the next round" in told(world)
    world.hub.disconnect(SITE)
    seen.look()
    assert told(world).startswith("running, not connected")
    world.clock.advance(STALE_MS)
    assert told(world).startswith("not running: last sign of the agent") and "it was killed, or hangs" in told(world)
    seen.stop("stopped by a signal")
    assert "stopped by a signal" in told(world).splitlines()[0]


@pytest.mark.parametrize(("contact_ms", "told_s"), [(None, 17), (10_000, 17), (20_000, 20)])
def test_the_last_contact_is_never_before_the_connection(contact_ms: int | None, told_s: int, world: SiteWorld) -> None:
    """It is kept in whole tens of seconds, rounded down."""
    config = SiteConfig.read(world.configs[SITE])
    agent = {"running": True, "at_ms": 30_000, "connected_ms": 17_000, "contact_ms": contact_ms}
    first = lines(overview(config, world.clock) | {"agent": agent}, 30_000)[0]
    assert f"last contact {clock_text(1000 * told_s)}, " in first


def test_a_warning_of_hours_ago_is_over_on_a_stream_that_stands(world: SiteWorld) -> None:
    seen = present(world)
    seen.look()
    world.clock.advance(1000)
    logging.getLogger("site-agent").warning("the disk is slow")
    seen.look()
    assert "the disk is slow" in told(world)
    world.clock.advance(120 * MINUTE)
    seen.look()
    assert "the disk is slow" not in told(world)
    world.hub.disconnect(SITE)
    seen.look()
    assert "the disk is slow" in told(world), "not connected: it may be the reason"


def test_the_end_of_a_run_is_a_line(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said when the last planned round is verified, and not before."""
    seen = present(world)
    seen.look()
    config, now = SiteConfig.read(world.configs[SITE]), world.clock.now_ms()
    found = overview(config, world.clock)
    planned = found["rounds_planned"]
    for round_number, certified, training, said in (
        (planned - 1, True, None, False), (planned, False, None, False), (planned, True, planned + 1, False),
        (planned, True, None, True),
    ):  # fmt: skip
        agent = found["agent"] | {"training": training}
        shown = found | {"round": round_number, "certified": certified, "agent": agent}
        assert ("the run is complete" in "\n".join(lines(shown, now))) == said
        monkeypatch.setattr(content, "overview", lambda *_, shown=shown: shown)
        page = json.loads(content.Content(config, world.clock).state().body)
        assert page["health"]["sentence"].startswith("The run is complete") == said
        assert page["health"]["level"] == "good"


def test_the_last_warning_and_a_decline_are_told(world: SiteWorld) -> None:
    seen = present(world)
    world.agents[SITE].session.policy = SitePolicy(hours="00:00-00:01")
    world.hub.order((SITE,))
    logging.getLogger("site-agent").warning("the disk is slow")
    world.clock.advance(1000)
    seen.look()
    world.hub.disconnect(SITE)
    seen.look()
    text = told(world)
    assert "declined round 1: [policy] hours: " in text and "next at" in text and ", until " in text
    assert "the disk is slow" in text
    PauseFile(world.agents[SITE].state_dir.folder).set("new scanner", now_ms=0)
    assert "paused: new scanner" in told(world)
    seen.stop("stopped by a signal")


def test_status_needs_no_valid_certificate_and_says_when_it_and_the_manifest_end(world: SiteWorld) -> None:
    heard: list[dict[str, object]] = []
    seen = present(world, heard)
    world.clock.advance(85 * DAY)
    seen.look()
    assert "manifest version 1 ends in 5 days" in told(world)
    assert {one["alert"] for one in heard} == {"manifest-7:1"}
    seen.stop("stopped by a signal")
    world.clock.advance(255 * DAY)
    assert "the certificate of this site ends in 25 days" in told(world)
    world.clock.advance(100 * DAY)
    assert "the certificate of this site has ended" in told(world)


def test_the_hospital_is_told_that_an_error_has_ended_the_agent(world: SiteWorld) -> None:
    for reason, alerts in (("stopped by a signal", []), ("OSError: no space left on device", ["stopped"])):
        heard: list[dict[str, object]] = []
        present(world, heard).stop(reason)
        assert [one["alert"] for one in heard] == alerts
        assert not alerts or reason in str(heard[0]["text"])


def test_the_hospital_is_told_of_a_lost_connection_once(world: SiteWorld) -> None:
    heard: list[dict[str, object]] = []
    seen = present(world, heard)
    for _ in range(3):
        world.clock.advance(40 * MINUTE)
        seen.look()
    assert heard == []
    world.hub.disconnect(SITE)
    for _ in range(5):
        world.clock.advance(40 * MINUTE)
        seen.look()
    assert [(one["alert"], one["state"]) for one in heard] == [("disconnected", "began")]
    world.hub.connect(SITE)
    world.clock.advance(2 * MINUTE)
    seen.look()
    assert heard[-1]["state"] == "ended"
    seen.stop("stopped by a signal")
