"""The page of an evaluation: where things are drawn, what is escaped, what is said under differential privacy."""

from __future__ import annotations

import re
import stat
from html import unescape
from pathlib import Path

import pytest

from site_agent.trainer.evaluation_page import calibration_plot, decision_plot, render, roc_plot, write_page
from tests.support.clinical_world import HOSTILE, drawn_figures

NOW = 1_700_000_000_000


def test_nothing_runs_and_nothing_is_fetched(tmp_path: Path) -> None:
    write_page(drawn_figures(), tmp_path / "page.html", now_ms=NOW)
    page = (tmp_path / "page.html").read_text()
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o600
    assert HOSTILE not in page and HOSTILE in unescape(page)
    assert "<script" not in page and "<img" not in page and "<link" not in page
    assert re.findall(r"https?://[^\"< ]+", page) == ["http://www.w3.org/2000/svg"] * 12
    assert "default-src 'none'" in page and "2023-11-14 (UTC)" in page


def test_figures_and_subgroups_are_on_it() -> None:
    figures = drawn_figures()
    page = unescape(render(figures, now_ms=NOW))
    one = figures["clinical"][0]
    low, high = one["sensitivity_interval"]
    assert f"{one['sensitivity']:.3f} ({low:.3f} to {high:.3f})" in page
    assert page.count("4 (few)") == len(figures["clinical"]), "one small group for each finding"
    assert "decide about each one before it leaves" in page and "differential privacy" not in page


def test_under_differential_privacy_it_is_marked() -> None:
    page = render(drawn_figures(private=True), now_ms=NOW)
    assert "epsilon does not cover them" in page and "Do not pass this page on" in page


def test_without_held_out_images_there_is_a_page_too() -> None:
    figures = drawn_figures() | {"clinical": []}
    figures.pop("test")
    page = render(figures, now_ms=NOW)
    assert "<svg" not in page and "balanced accuracy" in page


def test_points_lie_where_their_numbers_are() -> None:
    """Zero is at the left and at the bottom: 50 and 284; one is at 406 and 34."""
    one = {
        "name": "x", "roc": [[0.0, 0.0], [0.5, 1.0], [1.0, 1.0]], "sensitivity": 1.0, "specificity": 0.5,
        "calibration": [{"predicted": 0.25, "observed": 0.5, "images": 4}],
        "decision": [{"threshold": 0.1, "model": 0.2, "all": 0.1}, {"threshold": 0.9, "model": 0.0, "all": -9.0}],
    }  # fmt: skip
    roc = roc_plot(one)
    assert roc.curves[0].points == "50.0,284.0 228.0,34.0 406.0,34.0"
    assert (roc.dots[0].x, roc.dots[0].y) == (228.0, 34.0)
    calibration = calibration_plot(one)
    assert (calibration.dots[0].x, calibration.dots[0].y) == (139.0, 159.0) and "4 images" in calibration.dots[0].words
    decision = decision_plot(one, 0.2)
    assert len(decision.curves) == 3
    assert len(decision.curves[1].points.split()) == 1, "what is far below zero is not drawn"
    for curve in decision.curves:
        assert all(34 <= float(point.split(",")[1]) <= 284 for point in curve.points.split())


@pytest.mark.parametrize("rule", ["youden", "sensitivity=0.9", "specificity=0.95"])
def test_the_rule_is_in_words(rule: str) -> None:
    page = render(drawn_figures() | {"operating_rule": rule}, now_ms=NOW)
    assert {"y": "(Youden)", "se": "sensitivity of at least 0.9", "sp": "specificity of at least 0.95"}[
        rule[: 1 if rule == "youden" else 2]
    ] in page
