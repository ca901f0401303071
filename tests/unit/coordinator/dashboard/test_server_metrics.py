"""`/metrics` of both sides: names and labels from fixed lists, no class counts, no patients; what Grafana asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from coordinator.dashboard.server import OTHER, REASONS, RunCollector
from coordinator.phases import RunPhase
from coordinator.round_history import Figures
from lazaret import checks, software
from lazaret.alerts import CERTIFICATE_DAYS, LEAST_FREE
from lazaret.web.server import exposition
from security.log.roster import audit_roster
from security.secagg import records
from security.secagg.effects import Persist
from security.secagg.relay import FROM_COORDINATOR, FROM_SITE
from site_agent.config import SiteConfig
from site_agent.metrics import AgentCollector
from site_agent.session import SessionPhase as AgentPhase
from tests.support.hub_world import Hub, Sample
from tests.support.site_world import SiteWorld

ROOT = Path(__file__).parents[4]
MESSAGES = {kind.__name__ for kind in (*FROM_SITE, *FROM_COORDINATOR)}
SITES = {"graz", "linz", "vienna"}
VERSION = {software.version()}

# Sample name -> label -> the values it may have. What is not here is not told.
RUN = {
    "lazaret_round": {},
    "lazaret_rounds_planned": {},
    "lazaret_rounds_total": {"outcome": {"published", "void", "lost"}},
    "lazaret_round_seconds_count": {},
    "lazaret_round_seconds_sum": {},
    "lazaret_aborts_total": {"reason": {*REASONS, OTHER}},
    "lazaret_hindered": {},
    "lazaret_certificate_end_timestamp_seconds": {"member": SITES | {"hub"}},
    "lazaret_manifest_end_timestamp_seconds": {},
    "lazaret_disk_free_bytes": {},
    "lazaret_phase": {"phase": set(RunPhase)},
    "lazaret_phase_seconds_total": {"phase": set(RunPhase)},
    "lazaret_sites": {"state": {"listed", "connected", "ready", "excluded"}},
    "lazaret_site_up": {"site": SITES},
    "lazaret_site_seen_timestamp_seconds": {"site": SITES},
    "lazaret_bytes_total": {"direction": {"in", "out"}, "message": MESSAGES},
    "lazaret_log_entries": {},
    "lazaret_build_info": {"version": VERSION},
}
AGENT = {
    "lazaret_agent_phase": {"phase": set(AgentPhase)},
    "lazaret_agent_training": {},
    "lazaret_agent_round": {},
    "lazaret_agent_rounds_total": {},
    "lazaret_agent_bytes_total": {"message": MESSAGES},
    "lazaret_agent_blocked_total": {},
    "lazaret_agent_log_entries": {},
    "lazaret_agent_epsilon": {},
    "lazaret_agent_epsilon_cap": {},
    "lazaret_agent_certificate_end_timestamp_seconds": {},
    "lazaret_agent_manifest_end_timestamp_seconds": {},
    "lazaret_agent_disk_free_bytes": {},
    "lazaret_agent_declined": {},
    "lazaret_agent_build_info": {"version": VERSION},
}
ONLY_PRIVATE = {"lazaret_agent_epsilon", "lazaret_agent_epsilon_cap"}


def scraped(collector: Collector, allowed: dict[str, dict[str, set[str]]]) -> dict[str, float]:
    """Every sample by its name and labels, after holding all of them against the list."""
    text = exposition(collector).body.decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.name in allowed, sample.name
            assert set(sample.labels) == set(allowed[sample.name]), sample
            for label, value in sample.labels.items():
                assert value in allowed[sample.name][label], sample
            found[",".join([sample.name, *sample.labels.values()])] = sample.value
    return found


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub.make(tmp_path)
    yield made
    made.close()


def test_a_run_tells_its_figures_and_no_others(hub: Hub, tmp_path: Path) -> None:
    shell = hub.ready.shell
    shell.traffic.received["UploadFrame"] += 1000
    shell.traffic.sent["SumFrame"] += 77
    sample = Sample.of(tmp_path / "engine", 4)
    sample.write(hub.storage, 1, now_ms=hub.world.now, open_round=False)
    hub.storage.note_figures(1, Figures(weight=987_654_321, loss=123_456.789, hits=55_555))
    hub.storage.note_session("graz", 3, now_ms=7000)
    hub.look()
    hub.world.clock.advance(2500)
    hub.look()
    found = scraped(RunCollector(hub.page, hub.phases), RUN)
    assert found["lazaret_rounds_total,published"] == 1
    assert found["lazaret_round_seconds_sum"] == 60
    assert found["lazaret_bytes_total,in,UploadFrame"] == 1000
    assert found["lazaret_bytes_total,out,SumFrame"] == 77
    assert found["lazaret_phase_seconds_total,waiting"] == 2.5
    assert found["lazaret_site_seen_timestamp_seconds,graz"] == 7
    assert found["lazaret_log_entries"] == shell.books.log.size
    # Even what comes out of the sum is for the page, not for a monitoring system that keeps it for years.
    assert not {987_654_321, 123_456.789, 55_555} & set(found.values())


def test_a_reason_that_nobody_knows_is_no_label(hub: Hub, tmp_path: Path) -> None:
    plan = Sample.of(tmp_path / "engine", 4).planned
    closed = records.AttemptClosed(ctx=plan.plan.context.ctx(), state="dead", reason=b'patient-4711 "} 1\nx{a="')
    hub.storage.keep([Persist(plan, 1), Persist(closed, 1)], now_ms=1)
    found = scraped(RunCollector(hub.page, hub.phases), RUN)
    assert found[f"lazaret_aborts_total,{OTHER}"] == 1
    assert b"4711" not in exposition(RunCollector(hub.page, hub.phases)).body


def test_the_roster_is_where_names_of_sites_come_from(hub: Hub) -> None:
    assert {party.name for party in audit_roster(hub.ready.manifest).sites} == SITES


def test_an_agent_tells_nothing_of_its_patients(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path)
    site = next(iter(world.learners))
    world.start_all()
    world.run_round()
    agent = world.agents[site]
    planted = {"names": ["melanoma-4711"], "train": [314_159], "test": [271_828]}
    agent.state_dir.note_data(planted)
    agent.state_dir.note_metrics({"round": 1, "test": {"bacc": 0.123456, "confusion": [[161_803]], "images": 577_215}})
    collector = AgentCollector(agent, SiteConfig.read(world.configs[site]))
    found = scraped(collector, AGENT)
    assert set(AGENT) - {name.partition(",")[0] for name in found} == ONLY_PRIVATE
    assert found["lazaret_agent_bytes_total,UploadFrame"] > 0
    assert found["lazaret_agent_rounds_total"] == 1
    assert found["lazaret_agent_log_entries"] == agent.log.size
    text = exposition(collector).body.decode()
    for secret in ("4711", "melanoma", "314159", "271828", "161803", "577215", "0.123456", site):
        assert secret not in text
    assert not {314_159, 271_828, 161_803, 577_215} & set(found.values())


def test_the_list_would_notice_a_class_count_twin() -> None:
    """The check itself, turned on a collector that leaks."""
    from prometheus_client.core import GaugeMetricFamily

    class Leaking(Collector):
        def collect(self):  # type: ignore[no-untyped-def]  # the shape is the library's
            counts = GaugeMetricFamily("lazaret_agent_images", "Images by class.", labels=("class",))
            counts.add_metric(("melanoma",), 314_159)
            yield counts

    with pytest.raises(AssertionError, match="lazaret_agent_images"):
        scraped(Leaking(), AGENT)


# Grafana.

BOARD = ROOT / "deploy" / "grafana" / "lazaret.json"


def test_the_grafana_file_asks_for_nothing_that_is_not_told() -> None:
    told = json.loads(BOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in told["panels"] for target in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"\blazaret_\w+", query)}
    assert asked <= set(RUN) | set(AGENT)
    assert {"lazaret_rounds_total", "lazaret_aborts_total", "lazaret_bytes_total", "lazaret_agent_epsilon"} <= asked
    labels = {name for query in queries for name in re.findall(r"by \(([a-z, ]+)\)", query)}
    known = {label for allowed in (*RUN.values(), *AGENT.values()) for label in allowed} | {"instance"}
    assert {part.strip() for names in labels for part in names.split(",")} <= known


RULES = ROOT / "deploy" / "prometheus" / "lazaret.rules.yml"


def test_the_alert_rules_ask_for_nothing_that_is_not_told() -> None:
    text = RULES.read_text(encoding="utf-8")
    asked = set(re.findall(r"\blazaret_\w+", text))
    assert asked <= set(RUN) | set(AGENT)
    alerts = re.findall(r"- alert: (\w+)\n\s+expr: (.+)\n\s+for: \w+\n\s+labels: .+\n\s+annotations: .+\n", text)
    assert len(alerts) == text.count("- alert:") >= 8, "each has an expression, a time, a severity and words"
    assert len(dict(alerts)) == len(alerts), "each has a name of its own"


@pytest.mark.parametrize("side", ["lazaret_", "lazaret_agent_"])
def test_the_alert_rules_say_what_the_hooks_say_of_ends_and_disk(side: str) -> None:
    rules = RULES.read_text(encoding="utf-8")
    for days in CERTIFICATE_DAYS:
        for what in ("certificate", "manifest"):
            assert f"expr: {side}{what}_end_timestamp_seconds - time() < {days} * 86400\n" in rules
    (least,) = re.findall(rf"expr: {side}disk_free_bytes < (\d+) \* 1024 \* 1024\n", rules)
    assert int(least) * 1024 * 1024 == LEAST_FREE


def test_both_sides_tell_when_the_manifest_ends_and_how_much_room_there_is(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: asked.append(folder) or SimpleNamespace(free=4711))
    hub.look()
    run = scraped(RunCollector(hub.page, hub.phases), RUN)
    world = SiteWorld(tmp_path / "sites")
    agent = world.start("graz")
    own = scraped(AgentCollector(agent, SiteConfig.read(world.configs["graz"])), AGENT)
    assert run["lazaret_disk_free_bytes"] == own["lazaret_agent_disk_free_bytes"] == 4711
    assert asked == [hub.storage.folder, agent.state_dir.folder]
    assert run["lazaret_manifest_end_timestamp_seconds"] == hub.ready.manifest.expires_at_ms / 1000
    assert own["lazaret_agent_manifest_end_timestamp_seconds"] == agent.manifest.expires_at_ms / 1000


def test_its_panels_do_not_lie_upon_each_other_and_have_names_of_their_own() -> None:
    panels = json.loads(BOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = set(product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])))
        assert place["x"] + place["w"] <= 24
        assert not cells & own, panel["title"]
        cells |= own
        assert panel["type"] == "row" or panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
