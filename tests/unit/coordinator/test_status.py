"""What an operator is told: whether the service runs, what the run waits for, how each site is, who is alerted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.status import RunPresence, lines, overview
from lazaret.alerts import Alerts, AlertsTable
from lazaret.control import STALE_MS
from tests.support.consortium_world import DAY
from tests.support.whole_federation import SITES, WholeFederation

HOUR = 3_600_000


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[WholeFederation]:
    made = WholeFederation(tmp_path, rounds=1)
    model = f'initial_model = "{made.model_path}"'
    (tmp_path / "coordinator.toml").write_text(
        f'identity = "hub"\nstate = "hub-state"\nlisten = "127.0.0.1:1"\n{model}\n'
    )
    made.start_all()
    yield made
    if made.shell is not None:
        made.kill_hub()
    for site in list(made.agents):
        made.kill(site)


def told(federation: WholeFederation) -> str:
    found = overview(federation.folder / "coordinator.toml", federation.clock)
    return "\n".join(lines(found, federation.clock.now_ms()))


def present(federation: WholeFederation, heard: list[dict[str, object]]) -> RunPresence:
    config, _ = CoordinatorConfig.read(federation.folder / "coordinator.toml")
    assert federation.shell is not None
    alerts = Alerts("coordinator", AlertsTable(), heard.append)
    return RunPresence(federation.shell, federation.manifest, config, alerts)


def test_a_run_from_its_first_wait_to_its_end(federation: WholeFederation) -> None:
    heard: list[dict[str, object]] = []
    seen = present(federation, heard)
    seen.look()
    assert "running: waiting, round 1" in told(federation)
    assert "round 1 waits: 0 sites can take part, 3 are needed; not connected: graz, linz" in told(federation)
    federation.clock.advance(HOUR)
    seen.look()
    began = {str(one["alert"]) for one in heard}
    assert began == {"stalled", *(f"site-missing:{site}" for site in SITES)}
    federation.run_rounds(1)
    federation.clock.advance(HOUR)
    seen.look()
    assert {str(one["alert"]) for one in heard if one["state"] == "ended"} == began
    text = told(federation)
    assert "the run is complete" in text and "running: done, round 1" in text
    for site in SITES:
        assert f"  site {site}" in text
    federation.clock.advance(STALE_MS)
    assert "not running: last sign of it" in told(federation)
    seen.stop("stopped by a signal")
    assert "stopped by a signal" in told(federation)


def test_certificates_and_a_manifest_that_end_are_told_by_name(federation: WholeFederation) -> None:
    heard: list[dict[str, object]] = []
    seen = present(federation, heard)
    federation.clock.advance(65 * DAY)
    seen.look()
    assert {one["alert"] for one in heard} == {"manifest-30:1"}
    assert "manifest version 1 ends in 25 days: the consortium publishes a newer one" in told(federation)
    federation.clock.advance(275 * DAY)
    seen.look()
    assert "the certificate of graz ends in 25 days" in told(federation)
    assert "certificate-30:graz" in {one["alert"] for one in heard}
