"""The page of `site-agent evaluate --html` in a real browser, with class names and groups that try to be a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from site_agent.trainer.evaluation_page import write_page
from tests.support.clinical_world import NAMES, drawn_figures


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation") / "evaluation.html"
    write_page(drawn_figures(private=True), path, now_ms=1_700_000_000_000)
    return path


@pytest.mark.parametrize("width", [1180, 360])
def test_it_fits_asks_for_nothing_and_runs_nothing(page_file: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    assert "onerror" in page.locator("main").inner_text(), "the hostile text is shown, as text"
    assert page.evaluate("window.ran") is None
    assert page.locator("script, main img, iframe, object, link").count() == 0
    assert asked == [page_file.as_uri()]
    assert page.locator("svg.chart").count() == 4 * len(NAMES)
    wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room
    cut = page.evaluate(
        "[...document.querySelectorAll('.rows td, .rows th, dd, li')].filter(cell => cell.offsetParent && "
        "(cell.scrollWidth > cell.clientWidth + 1 || cell.getBoundingClientRect().right > innerWidth))"
        ".map(cell => cell.innerText)"
    )
    assert cut == [], "nothing is cut off"
    crossed = page.evaluate(
        "[...document.querySelectorAll('svg.chart')].flatMap(chart => { const box = chart.getBoundingClientRect();"
        " return [...chart.querySelectorAll('text, polyline, circle')].map(one => one.getBoundingClientRect())"
        ".filter(one => one.right > box.right + 1 || one.left < box.left - 1 || one.bottom > box.bottom + 1) })"
    )
    assert crossed == [], "everything drawn is inside its chart"
    page.close()
