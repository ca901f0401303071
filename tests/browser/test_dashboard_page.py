"""The operator's page in a real browser: beside a federation of real processes, and with text that wants to be more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.effects import CloseRound
from coordinator.round_history import RoundHistory
from scripts.local_federation.federation import free_port
from security.identity.manifest import ScoreTable
from security.secagg import records
from security.secagg.effects import Persist
from security.secagg.layout import SCORE, SCORED, SQUARES, Layout
from security.secagg.scores import ScoreSum
from tests.support.browser_pages import until
from tests.support.federation import NumberFederation
from tests.support.hub_world import Hub, Sample

HOSTILE = "<img src=x onerror=window.ran=1><script>window.ran=1</script>"
SITES = 4


@pytest.fixture(scope="module")
def running(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NumberFederation, str]]:
    federation = NumberFederation(tmp_path_factory.mktemp("federation"), sites=SITES, rounds=40, ready_slot=0.5)
    config, port = federation.folders.coordinator / "coordinator.toml", free_port()
    config.write_text(config.read_text().replace("127.0.0.1:7480", f"127.0.0.1:{port}"))
    with federation.running():
        federation.wait_published(1, seconds=120)
        yield federation, f"http://127.0.0.1:{port}/"


def published(page: Any) -> int:
    return page.evaluate("Number(document.title.match(/([0-9]+)\\/[0-9]+/)[1])")


@pytest.mark.timeout(300)
def test_rounds_go_by_while_one_looks(running: tuple[NumberFederation, str], watch: Callable[..., Any]) -> None:
    federation, url = running
    watched = watch()
    page = watched.open(url)
    before = published(page)
    until(page, f"Number(document.title.match(/([0-9]+)\\/[0-9]+/)[1]) >= {before + 2}")
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1, "without loading the page again"
    assert page.locator("#sites tbody tr").count() == SITES
    assert page.locator("#rounds tbody tr").count() >= before + 2
    assert page.locator("#members rect.in").count() >= SITES
    until(page, "document.getElementById('progress').textContent.includes('the run ends on')")
    assert "run-1" in page.locator("#runs tbody").inner_text() and "of 40" in page.locator("#runs").inner_text()
    assert "not witnessed yet" in page.locator("#logs thead").inner_text().lower()
    assert page.locator("#loss polyline").count() == 1
    assert "site0" in page.locator("#logs").inner_text()
    newest = page.locator("#rounds code").first.get_attribute("title")
    assert (federation.folders.coordinator / "state" / "models" / f"{newest}.safetensors").exists()
    watched.check_calm(url)


@pytest.mark.timeout(300)
def test_it_is_readable_on_a_telephone_at_night(
    running: tuple[NumberFederation, str], watch: Callable[..., Any]
) -> None:
    _, url = running
    watched = watch(360, 740, "dark")
    page = watched.open(url)
    page.wait_for_selector("#rounds tbody tr")
    watched.check_narrow()
    assert page.evaluate("getComputedStyle(document.querySelector('#sites thead')).position") == "absolute"
    lines = page.evaluate("[...document.querySelectorAll('#sites td.number span')].map(one => one.offsetHeight)")
    assert lines and max(lines) < 30, "a number and its unit are on one line"
    watched.check_calm(url)


@pytest.mark.timeout(300)
def test_a_hospital_that_goes_away_is_seen_and_a_coordinator_that_does_as_well(
    running: tuple[NumberFederation, str], watch: Callable[..., Any]
) -> None:
    """The last test of this federation: it ends it."""
    federation, url = running
    page = watch().open(url)
    federation.sites["site3"].kill()
    until(page, "document.getElementById('remarks').textContent.includes('not connected: site3')")
    assert "look" in page.locator("#verdict").get_attribute("class")
    late = page.locator("#sites tbody tr", has_text="site3").locator("td").nth(2)
    assert "ago" in late.inner_text()
    federation.coordinator.stop()
    until(page, "document.getElementById('alive').textContent.startsWith('no answer')")
    assert page.evaluate("document.body.classList.contains('stale')"), "an old picture must not pass for a new one"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub.make(tmp_path / "hub")
    plan = Sample.of(tmp_path / "engine", 4).planned.plan
    planned = records.Planned(plan=replace(plan, context=replace(plan.context, round=1)))
    reason = HOSTILE.encode()[:64]
    closed = records.AttemptClosed(ctx=planned.plan.context.ctx(), state="dead", reason=reason)
    made.storage.keep([Persist(planned, 1), Persist(closed, 1), CloseRound(1, HOSTILE)], now_ms=made.world.now)
    made.look()
    yield made
    made.close()


def test_text_stays_text(hub: Hub, watch: Callable[..., Any]) -> None:
    with hub.serving() as server:
        watched = watch()
        page = watched.open(server.url)
        page.wait_for_selector("#aborts tbody tr")
        assert HOSTILE in page.locator("#aborts").inner_text()
        assert HOSTILE in page.locator("#rounds").inner_text()
        assert HOSTILE in page.locator("#remarks").inner_text()
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("window.ran") is None
        watched.check_calm(server.url)


@pytest.mark.parametrize("width", [1180, 360])
def test_the_best_round_is_shown(
    hub: Hub, watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """By a rule and slots that the manifest of this hub does not have; sums of scores as the database holds them."""
    rule = ScoreTable(figure="bacc", sites=("site0", "site1", "site2", "site3"), patience=3, least_gain="0.01")
    numbers = hub.page._manifest.aggregation
    blocks = [block for block in numbers.layout.blocks if block.kind in ("mean", "statistic")]
    layout = Layout.of(blocks, roster_size=4, weight_cap=numbers.layout.weight_cap, scores=(SCORED, SCORE, SQUARES))
    changed = {"scores": rule, "aggregation": numbers.model_copy(update={"layout": layout})}
    monkeypatch.setattr(hub.page._reader, "_manifest", hub.page._manifest.model_copy(update=changed))
    totals = {1: 150, 2: 190, 3: 180}
    sums = {number: ScoreSum(count=4, total=total, squares=total**2 // 4 + 9) for number, total in totals.items()}
    monkeypatch.setattr(RoundHistory, "scores", lambda self: sums)
    with hub.serving() as server:
        watched = watch(width)
        page = watched.open(server.url)
        page.wait_for_selector("#scores svg")
        assert page.locator("#scores polyline").count() == 1
        assert "Best so far: round 2, 0.742, spread 0.023, 4 hospitals." in page.locator("#scores").inner_text()
        assert page.locator("#runs thead th").all_inner_texts()[-1].lower() == "best round"
        assert page.locator("#runs tbody td").all_inner_texts()[-1] == "2"
        watched.check_narrow()
        watched.check_calm(server.url)


def test_the_same_text_as_markup_would_have_run_twin(browser: Any) -> None:
    page = browser.new_page()
    page.evaluate("text => { document.body.innerHTML = text; }", HOSTILE)
    until(page, "window.ran === 1")
    page.close()


def test_the_policy_stops_what_gets_in_as_markup(hub: Hub, watch: Callable[..., Any]) -> None:
    """The second wall: were a script ever to reach the page as markup, the browser would not run it."""
    with hub.serving() as server:
        page = watch().open(server.url)
        page.evaluate("text => { document.getElementById('foot').innerHTML = text; }", HOSTILE)
        until(page, "window.violations.length > 0")
        assert page.evaluate("window.ran") is None
