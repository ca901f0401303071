"""The auditor's report in a real browser, made from a log that tries to put a script into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from security.audit.compare import cross
from security.audit.report import render
from security.log import events as ev
from tests.support.audit_logs import Federation

HOSTILE = "<img src=x onerror='window.ran=1'><script>window.ran=1</script>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    federation = Federation.make(folder)
    digests = dict.fromkeys(("package", "dependencies", "proto", "config"), "0" * 64)
    federation.members["graz"].log.append(
        ev.AgentStart(version=HOSTILE, image=None, sbom=None, insecure=(HOSTILE,), **digests)
    )
    federation.play(2)
    federation.stop()
    result = cross(federation.folders, dict.fromkeys(federation.folders, federation.pinned))
    (folder / "report.html").write_text(render(result, pinned=True), encoding="utf-8")
    return folder / "report.html"


@pytest.mark.parametrize("width", [1180, 700, 360])
def test_it_fits_asks_for_nothing_and_runs_nothing(report: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    assert "onerror" in page.locator("main").inner_text(), "the hostile text is shown, as text"
    assert page.evaluate("window.ran") is None
    assert page.locator("script, main img, iframe, object, link").count() == 0
    assert asked == [report.as_uri()]
    assert page.locator("svg.chart").count() == 3
    wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room
    cut = page.evaluate(
        "[...document.querySelectorAll('td, th, dd, li, pre')].filter(cell => cell.offsetParent && "
        "(cell.scrollWidth > cell.clientWidth + 1 || cell.getBoundingClientRect().right > innerWidth))"
        ".map(cell => cell.innerText)"
    )
    assert cut == [], "nothing is cut off"
    page.close()
