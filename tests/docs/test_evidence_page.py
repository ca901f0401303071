"""The page of evidence is what its script makes of the committed results; and the script on a small copy of a run."""

import json
from pathlib import Path

import pytest

from benchmarks import evidence
from npr.lab.store import read_results

PAGE = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()


def test_the_page_is_made_from_the_committed_results():
    assert evidence.page(read_results(evidence.RESULTS)) == PAGE


def test_the_readme_carries_the_headline_whatever_it_says():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"{evidence.MARK}\n{evidence.headline(read_results(evidence.RESULTS))}\n{evidence.END}" in readme


def test_a_small_copy_makes_a_page_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    content = read_results(evidence.RESULTS)
    first = content["cells"][0]["fold"]
    cells = [cell for cell in content["cells"] if cell["fold"] == first and "final" in cell]
    (tmp_path / "results.json").write_text(json.dumps(content | {"cells": cells}))
    evidence.main(["collect", str(tmp_path), "--results", str(tmp_path / "small")])
    small = read_results(tmp_path / "small")
    assert {row["variant"] for row in small["summary"]} == {cell["variant"] for cell in cells}
    assert all(len(c["pooled_recall"]) == 1 for c in small["comparisons"]), "no predictions, no intervals"
    page, plot = tmp_path / "page.md", tmp_path / "plot.png"
    evidence.main(["page", "--results", str(tmp_path / "small"), "--page", str(page), "--plot", str(plot)])
    text = page.read_text()
    assert evidence.MARK in text and f"Folds run: {first}" in text and plot.stat().st_size > 5000
    assert "not shown" in evidence.headline(small), "without intervals no lead is claimed"


def test_a_lead_is_claimed_only_with_lower_ends_above_zero():
    def content(low, names=evidence.REFERENCES):
        how = {"model": "local", "predictor": "refit"}
        row = {"model": "chosen", "variant": "fednpr-per", "cells": 6, "mean_bacc": [1.0, 0.5, 2.0]}
        return {
            "settings": {"data": {"image_size": 64}, "rounds": 5},
            "summary": [{"kind": "chosen", "variant": "fednpr-per", "choices": {"0": how}}],
            "choices": [{"variant": "fednpr-per", "fold": 0, "validation": 0.5}],
            "comparisons": [row | {"against": name, "pooled_recall": [4.5, low, 6.0]} for name in names],
        }

    assert "not shown" in evidence.headline(content(0.1, ("fedavg",))), "one reference is not enough"
    assert evidence.headline(content(0.1)).startswith("A lead of FedNPR is shown")
    assert evidence.headline(content(-0.1)).startswith("A lead of FedNPR is not shown")
    assert "+4.5 [-0.1, +6.0] points of pooled recall" in evidence.headline(content(-0.1))
    assert "Chosen: `fednpr-per`: local model by refit." in evidence.headline(content(-0.1))


@pytest.mark.parametrize("validation", [0.4, 0.6])
def test_the_headline_is_about_the_variant_that_the_validation_side_prefers(validation):
    """One that is ahead on the test images alone is not named, and its lead not claimed."""
    rows = [
        {"model": "chosen", "variant": name, "against": against, "cells": 6, "mean_bacc": [1.0, 0.5, 2.0]}
        | {"pooled_recall": recall}
        for against in evidence.REFERENCES
        for name, recall in (("fednpr", [0.5, -1.0, 2.0]), ("fednpr-per", [6.0, 5.0, 7.0]))
    ]
    content = {
        "settings": {"data": {"image_size": 64}, "rounds": 5},
        "summary": [],
        "choices": [
            {"variant": "fednpr", "fold": 0, "validation": 0.5},
            {"variant": "fednpr-per", "fold": 0, "validation": validation},
        ],
        "comparisons": rows,
    }
    text = evidence.headline(content)
    assert text.startswith("A lead of FedNPR is shown") == ("`fednpr-per`" in text) == (validation > 0.5)
