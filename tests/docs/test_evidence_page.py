"""The page of evidence is what its script makes of the committed results; and the script on a small copy of a run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import evidence, evidence_tables
from benchmarks.evidence_rows import without_npr
from lazaret.errors import ConfigError
from npr.config import TrainConfig
from npr.lab.store import read_results

PAGE = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()


def test_the_page_is_made_from_the_committed_results():
    assert evidence.page(read_results(evidence.RESULTS)) == PAGE


@pytest.mark.parametrize("results", [evidence.RESULTS, evidence.FINE], ids=["five-folds", "fine-tuned"])
def test_every_difference_follows_from_the_cells_that_are_committed(results):
    """Worked out again from confusion matrices alone: a row minus its reference of the same run."""
    content = read_results(results)

    def recall(cells, kind, predictor):
        found = [(c["final"][c["chosen"]["model"]][c["chosen"]["predictor"]] if kind == "chosen" else
                  c["final"].get(kind, {}).get(predictor)) for c in cells]
        total = np.sum([each["confusion"] for each in found], axis=0)
        shown = total.sum(1)
        return 100 * float(np.mean(total.diagonal()[shown > 0] / shown[shown > 0]))

    for gap in content["comparisons"]:
        later = [c for c in content.get("again", []) if gap["variant"] in c["beside"]]
        again = [c for c in later if c["variant"] == gap["against"]]
        sides = (content["cells"], gap["variant"]), (again or content["cells"], gap["against"])
        mine, base = (
            {(c["seed"], c["fold"]): c for c in side if c["variant"] == name and "final" in c} for side, name in sides
        )
        common = [at for at in mine if at in base]
        ours, theirs = (recall([s[at] for at in common], gap["model"], gap["predictor"]) for s in (mine, base))
        assert len(common) == gap["cells"] and ours - theirs == pytest.approx(gap["pooled_recall"][0], abs=0.011), gap


def test_the_readme_carries_the_headline_whatever_it_says():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    content = read_results(evidence.RESULTS)
    assert evidence.readme_block(content) in readme
    block, headline = evidence.readme_block(content), evidence.headline(read_results(evidence.FINE))
    assert headline in block and "(docs/evidence.md)" in block
    assert headline.count("\n") == 2, "three short sentences"


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
    assert evidence.MARK in text and f"folds {first}; seeds" in text and plot.stat().st_size > 5000
    assert "not shown" in evidence.headline(small), "without intervals no lead is claimed"


def test_the_default_mixture_of_a_site_is_what_the_validation_sides_prefer():
    """Over all methods and models with cells in all folds; and half and half is above the head for each of them."""
    found = evidence_tables.by_predictor(read_results(evidence.RESULTS))
    half, head = "0.50 head + 0.50 prototypes", "head"
    assert len(found) == 8 and TrainConfig().predict_mix == 0.5
    assert all(row[half][n] > row[head][n] for row in found.values() for n in (0, 1))
    mixtures = [name for name in evidence_tables.MIXTURES if "refit" not in name]
    totals = {name: [sum(row[name][n] for row in found.values()) for n in (0, 1)] for name in mixtures}
    assert all(max(mixtures, key=lambda name: totals[name][n]) == half for n in (0, 1))


def test_a_run_that_chose_the_learning_rate_says_so_and_among_what():
    content = read_results(evidence.RATES)
    text = evidence_tables.tuned_tables(content)
    assert "Folds 0; seeds 0; 5 cells." in text and "learning_rate=0.003" in text
    cell = next(cell for cell in content["cells"] if cell["variant"] == "fednpr-per")
    better = {kind: {name: {"pooled_recall": 0.99} for name in by} for kind, by in cell["validation"].items()}
    other = cell | {"tuned": cell["tuned"] | {"lambda_npr": 1}, "validation": better}
    line = evidence_tables.rate_table(content | {"cells": [*content["cells"], other]}).splitlines()[-1]
    assert "99.0 (" in line and "lambda_npr=1)" in line, "of several values with one rate the best is told"
    assert evidence_tables.tuned_tables(None) == "Not run yet."


def test_what_the_same_options_give_without_npr_stands_beside_a_row_of_fednpr():
    """A lead that FedAvg has with the same fine-tuning is not one of the regulariser."""
    assert without_npr("fednpr[finetune_epochs=5]") == "fedavg[finetune_epochs=5]"
    assert [without_npr(name) for name in ("fednpr-per", "moon+npr", "fedper")] == ["fedper", "moon", "fedper"]
    fine, content = read_results(evidence.FINE), read_results(evidence.RESULTS)
    tried = {row["variant"] for row in fine["summary"] if row["variant"].startswith("fednpr[")}
    controls = {c["variant"]: c for c in evidence_tables.controls(fine)}
    assert tried and tried <= controls.keys()
    block = evidence.readme_block(content)
    for line in (*evidence_tables.control_lines(fine), evidence_tables.fixed_rate_line(content)):
        assert line in block and line in PAGE
    figures = controls["fednpr[finetune_epochs=5]"]["pooled_recall"]
    assert evidence_tables.interval(figures, "+") in block


def test_no_variant_has_earned_to_be_the_default():
    """docs/methods.md says why the defaults are the paper's; a variant that is clearly ahead would change that."""
    content, config = read_results(evidence.RESULTS), TrainConfig()
    tried = {"clusters_by": "count", "lambda_rounds": 0, "personal_after": 0}
    assert {name: getattr(config, name) for name in tried} == tried
    lower = {c["variant"]: c["pooled_recall"][1] for c in content["comparisons"]
             if c["model"] == "chosen" and c["against"] == "fedavg" and c["variant"].startswith("fednpr")}
    assert all(any(f"[{name}=" in variant for variant in lower) for name in tried)
    assert max(lower.values()) <= 0


@pytest.fixture(scope="module")
def committed():
    """What is committed, cut to a reference and one row beside it, with the intervals that were drawn of both."""
    content = read_results(evidence.RESULTS)
    kept = {
        part: [entry for entry in content[part] if entry["variant"] in ("fedavg", "fedbabu")]
        for part in ("cells", "summary", "comparisons", "choices")
    }
    return content | kept | {"again": [], "not_run": []}


def later_run(committed, *, again):
    """A run elsewhere, of a row that is new and of its reference; the reference may come out a little differently."""
    cells = [cell for cell in committed["cells"] if (cell["seed"], cell["fold"]) == (0, 0)]
    row = {"variant": "fedbabu+npr", "key": "fedbabu+npr seed=0 fold=0", "slug": "new"}
    cells = [cell | again if cell["variant"] == "fedavg" else cell | row for cell in cells]
    choices = [{**choice, "variant": "fedbabu+npr"} for choice in committed["choices"] if choice["fold"] == 0]
    return committed | {"cells": cells, "choices": choices, "summary": [], "comparisons": []}


def collected(folder, committed, run):
    """The results after a run was added to those that were there."""
    for name, content in (("results", committed), ("run", run)):
        (folder / name).mkdir(parents=True)
        (folder / name / "results.json").write_text(json.dumps(content))
    evidence.main(["collect", str(folder / "run"), "--results", str(folder / "results")])
    return read_results(folder / "results")


def test_a_later_run_adds_rows_and_leaves_those_that_are_there(tmp_path, committed):
    run = later_run(committed, again={"config_hash": "of another version"})
    found = collected(tmp_path, committed, run)
    references = [cell for cell in run["cells"] if cell["variant"] == "fedavg"]
    assert found["again"] == [cell | {"beside": ["fedbabu+npr"]} for cell in references]
    for part in ("cells", "summary", "comparisons", "choices"):
        old = [entry for entry in found[part] if entry["variant"] != "fedbabu+npr"]
        assert sorted(map(str, old)) == sorted(map(str, committed[part])), "intervals too, though predictions are gone"
        assert len(old) < len(found[part])
    again = collected(tmp_path / "once more", found, run)
    assert again == found, "the same run once more adds nothing"


def test_pairs_of_a_later_run_are_of_that_run(tmp_path, committed):
    """Its rows are compared with the reference that was trained beside them, not with the one that is there."""
    worse = next(cell for cell in committed["cells"] if cell["variant"] == "fedavg" and cell["seed"] == 1)
    found = collected(tmp_path, committed, later_run(committed, again={k: worse[k] for k in ("chosen", "final")}))
    gaps = {c["variant"]: c["pooled_recall"][0] for c in found["comparisons"] if c["model"] == "chosen"}
    assert gaps["fedbabu+npr"] != gaps["fedbabu"]


def test_a_row_of_two_runs_and_other_settings_are_refused(tmp_path, committed):
    run = later_run(committed, again={})
    mixed = [cell | {"variant": "fedbabu"} for cell in run["cells"] if cell["variant"] == "fedbabu+npr"]
    with pytest.raises(ConfigError, match="of another run"):
        collected(tmp_path / "a", committed, run | {"cells": mixed})
    with pytest.raises(ConfigError, match="other settings"):
        collected(tmp_path / "b", committed, run | {"settings": committed["settings"] | {"rounds": 5}})
    older = {key: value for key, value in committed["settings"].items() if key != "computing"}
    assert collected(tmp_path / "c", committed | {"settings": older}, run)["settings"] == committed["settings"]


def test_a_longer_run_of_a_row_takes_its_place(tmp_path, committed):
    """Whole, with its pairs; no row is of cells of two runs, and a shorter one changes nothing."""
    run = later_run(committed, again={})
    second = [cell | {"seed": 1, "key": cell["key"].replace("seed=0", "seed=1")} for cell in run["cells"]]
    longer = run | {"cells": [cell | {"seconds": -1} for cell in (*run["cells"], *second)]}
    one = collected(tmp_path / "one", committed, run)
    two = collected(tmp_path / "two", one, longer)
    row = [cell for cell in two["cells"] if cell["variant"] == "fedbabu+npr"]
    assert len(row) == 2 and all(cell["seconds"] == -1 for cell in row)
    assert {c["cells"] for c in two["comparisons"] if c["variant"] == "fedbabu+npr"} == {2}
    shorter = run | {"cells": [cell | {"seconds": -2} for cell in run["cells"]]}
    three = collected(tmp_path / "three", two, shorter)
    assert [cell for cell in three["cells"] if cell["variant"] == "fedbabu+npr"] == row


def test_the_spread_between_cells_is_that_of_their_paired_differences():
    def cell(variant, seed, recall):
        final = {"local": {"head": {"pooled_recall": recall, "mean_bacc": 0.5}}}
        chosen = {"model": "local", "predictor": "head"}
        return {"variant": variant, "seed": seed, "fold": 0, "chosen": chosen, "final": final}

    rows = {"fedavg": (0.5, 0.4), "fedper": (0.5, 0.4), "fednpr": (0.53, 0.47), "local": (0.9,)}
    cells = [cell(variant, seed, value) for variant, row in rows.items() for seed, value in enumerate(row)]
    (figure, least, most), sites = evidence_tables.between_cells({"cells": cells})
    assert figure == "pooled_recall" and least == 0.0 and most == pytest.approx(4 / 2**0.5)
    assert sites[1:] == (0.0, 0.0)
    assert evidence_tables.between_cells({"cells": cells[:1]}) == []
    cells[2]["final"]["local"]["head"]["pooled_recall"] = 0.6  # of FedPer in the cell that the short row has, too
    told = evidence_tables.shared_luck({"cells": cells})
    assert "FedPer minus FedAvg is +10.0 points, and +5.0 over all cells" in told
    assert evidence_tables.shared_luck({"cells": cells[:4]}) == "", "no row has one cell"


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
    assert "most often refit (1 of 1 choices)." in evidence.headline(content(-0.1))


def test_the_headline_counts_the_predictors_of_the_methods_that_it_compares():
    """Of the variant named and of both references, over all folds; other rows do not count."""
    content = read_results(evidence.RESULTS)
    named = ("fedavg", "fedper", "fednpr-per")
    choices = [c["predictor"] for row in content["summary"] if row["kind"] == "chosen" and row["variant"] in named
               for c in row["choices"].values()]
    text = evidence.headline(content)
    times, of = map(int, re.search(r"\((\d+) of (\d+) choices\)", text).groups())
    predictor = re.search(r"most often (.*) \(", text)[1]
    assert of == len(choices) and times == choices.count(predictor) == max(map(choices.count, choices))
    assert all(f"`{name}`" not in text for name in evidence.WANTED if name not in named)


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
