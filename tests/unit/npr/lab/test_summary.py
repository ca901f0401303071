"""Rows of a table, checked against figures worked out by hand from the predictions."""

import numpy as np
import pytest

from npr.lab.plots import ablation_lines
from npr.lab.summary import no_predictions, predictions_loader, summarise_cells
from npr.lab.tables import COLUMNS, markdown, paper_comparison, paper_rows, summary_table
from npr.metrics import Predictions, save_predictions, summarise


def predictions(site, labels, predicted, *, seed):
    labels = np.array(labels)
    scores = np.full((len(labels), 3), 0.1, dtype=np.float32)
    scores[np.arange(len(labels)), predicted] = 0.8
    codes = np.arange(len(labels)) + (0 if site == "a" else 1000)
    return Predictions(site=site, labels=labels, scores=scores, units=codes, ids=codes, fold="0", seed=seed)


def cell(out, method, seed, kinds, options=None, fold=0):
    """A judged cell as it is stored: predictions on disk, figures of the same predictions in the result.

    `kinds` maps a model to its predictions by the head; the first one is what the validation side chose.
    """
    variant = method if not options else f"{method}[{','.join(f'{k}={v}' for k, v in options.items())}]"
    slug = f"{variant}.{seed}.{fold}"
    (out / "cells" / slug).mkdir(parents=True)
    for kind, parts in kinds.items():
        save_predictions(out / "cells" / slug / f"test-{kind}-head.npz", parts)
    return {
        "variant": variant, "method": method, "options": options or {}, "tuned": {"learning_rate": 0.1}, "seed": seed,
        "fold": fold, "slug": slug, "key": slug, "rounds": [{"round": 1}],
        "chosen": {"model": next(iter(kinds)), "predictor": "head"},
        "final": {kind: {"head": summarise(parts).as_dict()} for kind, parts in kinds.items()},
    }


@pytest.fixture
def cells(tmp_path):
    # Site a has classes 0 and 1, site b one image of class 2. Pooled recall of fedavg: (1/2 + 1 + 0) / 3.
    def parts(seed, a, b):
        return [predictions("a", [0, 0, 1, 1], a, seed=seed), predictions("b", [2], b, seed=seed)]

    made = []
    for seed in (0, 1):
        made.append(cell(tmp_path, "fedavg", seed, {"local": parts(seed, [0, 1, 1, 1], [0])}))
        made.append(cell(tmp_path, "fednpr-per", seed, {"personal": parts(seed, [0, 0, 1, seed], [2])}))
    return tmp_path, made


def rows_of(cells, **options):
    out, made = cells
    rows = summarise_cells(made, predictions_loader(out), **options)
    return {(row["variant"], row["kind"]): row for row in rows}


def test_pooled_recall_and_mean_over_sites(cells):
    rows = rows_of(cells)
    reference = rows["fedavg", "local"]
    assert reference["pooled_recall"][0] == 50.0
    assert reference["mean_bacc"][0] == 37.5  # site a: (1/2 + 1) / 2, site b: 0
    assert reference["difference"] is None and reference["cells"] == 2 and reference["seeds"] == [0, 1]


def test_differences_are_paired_by_seed_and_fold(cells):
    row = rows_of(cells)["fednpr-per", "chosen"]
    # Seed 0 mistakes one image of class 1: (1 + 1/2 + 1) / 3; seed 1 is perfect.
    assert row["difference"]["by_seed"] == {"0": 33.33, "1": 50.0}
    assert row["difference"]["pooled_recall"][0] == pytest.approx(41.67)
    assert row["difference"]["reference"] == "fedavg:chosen" and row["difference"]["cells"] == 2
    low, high = row["difference"]["pooled_recall"][1:]
    assert low <= 41.67 <= high and row["difference"]["resolvable"] > 0


def test_every_row_names_model_and_predictor_and_is_compared_with_its_like(cells):
    rows = rows_of(cells)
    assert set(rows) == {("fedavg", kind) for kind in ("chosen", "local")} | {
        ("fednpr-per", kind) for kind in ("chosen", "personal")
    }
    assert all(row["predictor"] == ("chosen" if row["kind"] == "chosen" else "head") for row in rows.values())
    assert rows["fedavg", "chosen"]["choices"] == {"0": {"model": "local", "predictor": "head", "learning_rate": 0.1}}
    assert rows["fednpr-per", "personal"]["difference"] is None, "fedavg has no global model here"
    fixed = rows_of(cells, reference="fedavg:local")["fednpr-per", "personal"]["difference"]
    assert fixed["reference"] == "fedavg:local:head" and fixed["pooled_recall"][0] == pytest.approx(41.67)


def test_cells_without_test_figures_are_no_rows(cells):
    out, made = cells
    for each in made:
        if each["method"] == "fedavg":
            del each["final"]
    assert {row["variant"] for row in summarise_cells(made, predictions_loader(out))} == {"fednpr-per"}


def test_only_common_cells_are_compared(cells):
    out, made = cells
    rows = summarise_cells([c for c in made if c["method"] != "fedavg" or c["seed"] == 0], predictions_loader(out))
    row = next(row for row in rows if row["method"] == "fednpr-per")
    assert row["kind"] == "chosen" and row["difference"]["by_seed"] == {"0": 33.33} and row["cells"] == 2


def test_without_predictions_the_figures_stand_and_the_intervals_are_missing(cells):
    _, made = cells
    with_them = rows_of(cells)
    without = {(row["variant"], row["kind"]): row for row in summarise_cells(made, no_predictions)}
    assert without["fedavg", "chosen"]["pooled_recall"] == [50.0] and without["fedavg", "chosen"]["difference"] is None
    told, row = (rows["fednpr-per", "chosen"]["difference"] for rows in (with_them, without))
    assert row["by_seed"] == told["by_seed"] and (row["reference"], row["cells"]) == (told["reference"], told["cells"])
    assert row["pooled_recall"] == told["pooled_recall"][:1] and row["mean_bacc"] == told["mean_bacc"][:1]
    assert "+41.7 vs fedavg:chosen" in summary_table(results(cells) | {"summary": list(without.values())})


def test_intervals_outlive_the_predictions_of_the_same_cells(cells):
    _, made = cells
    before = list(rows_of(cells).values())
    assert summarise_cells(made, no_predictions, earlier=before) == before
    other = summarise_cells(made, no_predictions, reference="fednpr-per:chosen", earlier=before)
    assert other[0]["pooled_recall"] == before[0]["pooled_recall"] and len(other[0]["difference"]["mean_bacc"]) == 1
    fewer = [cell for cell in made if cell["seed"] == 0]
    assert all(len(row["pooled_recall"]) == 1 for row in summarise_cells(fewer, no_predictions, earlier=before))


def test_a_reference_that_was_not_run_gives_no_difference(cells):
    assert all(row["difference"] is None for row in rows_of(cells, reference="fedprox").values())


def results(cells):
    out, made = cells
    settings = {
        "data": {"source": "generated", "image_size": 32, "validation": 0.2},
        "model": {"architecture": "x", "weights": "none"},
        "rounds": 1, "aggregation": "plain", "train": {"clusters": 4},
    }
    rows = summarise_cells(made, predictions_loader(out))
    failed = [{"key": "moon seed=0 fold=0", "error": "no luck"}]
    waiting = [{"key": "moon seed=1 fold=0", "fold": 0}]
    return {
        "settings": settings, "summary": rows, "cells": [*made, *waiting], "failed": failed,
        "not_run": ["local seed=0 fold=0"],
    }


def test_the_table_says_what_failed_and_what_was_not_run(cells):
    table = summary_table(results(cells))
    assert "50.0 [" in table and "+41.7 [" in table and "vs fedavg:chosen" in table
    assert "Chosen for fedavg: fold 0: local model by head, learning_rate=0.1." in table
    assert "still to be chosen): 1 cells." in table
    assert "Failed: moon seed=0 fold=0 (no luck)." in table and "Not run: local seed=0 fold=0." in table


def test_the_papers_tables_stand_beside_ours(cells):
    text = paper_comparison(results(cells), "isic")
    for name in "ABCDE":
        assert f"### Table {name}:" in text
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "69.5±0.6" in lines["FedAvg"] and "37.5 [" in lines["FedAvg"] and "local, head" in lines["FedAvg"]
    assert "What differs from the paper: images (generated at 32 px" in text and "folds (0; five)" in text
    assert "| 1 x 2 " in lines["FedAvg"], "one fold and two seeds: rows are not of the same folds"
    assert "76.2±0.9" in lines["FedNPR-Per"] and "not run" in lines["MOON"]
    assert "not run" not in lines["K=4"], "the run's own setting of K is the paper's row K=4"
    assert "not run" in lines["K=2"]
    assert "not run" not in lines["lambda=0.1"], "nobody set lambda, and 0.1 is its default"
    assert "not run" in lines["lambda=1"]
    assert "72.1±0.3" in paper_comparison(results(cells), "ich")


def test_the_paper_as_data(cells):
    rows = paper_rows(results(cells), "ich")
    assert len(rows) == 13 + 4 + 4 + 4 + 4
    gain = next(row for row in rows if row["row"] == "FedBABU + NPR")
    assert (gain["table"], gain["paper"], gain["paper_gain"], gain["ours"]) == ("E", (71.7, 90.3), (7.3, 1.3), None)
    assert next(row for row in rows if row["row"] == "FedAvg")["paper"][0] == (59.8, 0.4)


def test_the_papers_rows_are_of_the_models_the_methods_are_for(tmp_path):
    """CReFF is its re-trained global model, FedBABU what the fine-tuning leaves; an alias is the method it names."""
    kinds = [("global", [0, 0, 1, 1], [2]), ("personal", [0, 0, 1, 1], [0]), ("local", [1, 1, 1, 1], [0])]
    made = []
    for method in ("creff", "fedbabu", "fedavg+npr"):
        parts = {
            kind: [predictions("a", [0, 0, 1, 1], a, seed=0), predictions("b", [2], b, seed=0)]
            for kind, a, b in kinds
            if method == "fedbabu" or kind != "personal"
        }
        made.append(cell(tmp_path, method, 0, parts))
    found = {row["row"]: row["ours"] for row in paper_rows(results((tmp_path, made)), "isic") if row["ours"]}
    assert {name: row["kind"] for name, row in found.items()} == {
        "CReFF": "global", "FedBABU": "personal", "FedNPR": "local", "FedAvg + NPR": "local",
    }
    assert {row["predictor"] for row in found.values()} == {"head"}


def test_a_gain_is_of_the_folds_that_both_rows_have(tmp_path):
    """Fold 1 is the easier one, and only the row without NPR has it: that must not look like a loss."""
    def parts(a, b):
        return {"personal": [predictions("a", [0, 0, 1, 1], a, seed=0), predictions("b", [2], b, seed=0)]}

    made = [
        cell(tmp_path, "fedbabu", 0, parts([0, 1, 1, 1], [0])),
        cell(tmp_path, "fedbabu", 0, parts([0, 0, 1, 1], [2]), fold=1),
        cell(tmp_path, "fedbabu+npr", 0, parts([0, 0, 1, 1], [0])),
    ]
    told = results((tmp_path, made))
    row = next(row for row in paper_rows(told, "isic") if row["row"] == "FedBABU + NPR")
    assert row["without"]["mean_bacc"][0] == 68.75 and row["ours"]["mean_bacc"][0] == 50.0
    assert row["gain"][0] == pytest.approx(12.5)
    line = next(line for line in paper_comparison(told, "isic").splitlines() if line.startswith("| FedBABU + NPR"))
    assert "50.0 (+12.5)" in line and "personal, head" in line and "1 x 1" in line
    alone = told | {"cells": made[1:]}
    assert next(row for row in paper_rows(alone, "isic") if row["row"] == "FedBABU + NPR")["gain"] == [None, None]


def test_an_ablation_joins_what_differs_in_one_option_alone(cells):
    def row(options, value):
        return {
            "method": "fednpr", "kind": "local", "predictor": "head", "options": options, "pooled_recall": [value],
        }

    grid = [row({"clusters": k, "lambda_npr": weight}, 10 * k + weight) for k in (1, 4) for weight in (0.1, 1)]
    told = results(cells) | {"summary": [row({}, 7), row({"clusters": 1}, 8), *grid]}
    assert ablation_lines(told, "clusters") == [
        ([(1.0, [8]), (4.0, [7])], "fednpr (local, head)"),
        ([(1.0, [10.1]), (4.0, [40.1])], "fednpr[lambda_npr=0.1] (local, head)"),
        ([(1.0, [11]), (4.0, [41])], "fednpr[lambda_npr=1] (local, head)"),
    ]
    assert ablation_lines(told, "dp.epsilon") == []


def test_markdown_lines_up():
    text = markdown(COLUMNS[:2], [("fednpr-per", "x"), ("a", "personal")]).splitlines()
    assert len({len(line) for line in text}) == 1 and text[1].startswith("| ---")
