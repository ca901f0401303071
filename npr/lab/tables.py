"""Markdown tables: our own summary, and our figures beside those of the FedNPR paper, which are kept here as data."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from npr.config import TrainConfig
from npr.methods import registry

# Figures of the FedNPR paper, in percent, as (mean, standard deviation over five repetitions), for `npr-lab table
# --paper`. Each cell is (ISIC bACC, ISIC bAUC, ICH bACC, ICH bAUC). The paper evaluates every site's locally updated
# model (or personal model) by its head on its own test images and takes the mean over sites at the round that is best
# on those test images. Ours is the last round, which makes it the lower of the two by construction.

Figure = tuple[float, float]
Dataset = Literal["isic", "ich"]


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One printed row, and which of our variants stands beside it (method, and the options that were changed)."""

    label: str
    isic: tuple[Figure, Figure]
    ich: tuple[Figure, Figure]
    method: str
    options: tuple[tuple[str, bool | int | float | str], ...] = ()

    def figures(self, dataset: Dataset) -> tuple[Figure, Figure]:
        return self.isic if dataset == "isic" else self.ich


@dataclass(frozen=True, slots=True)
class PaperTable:
    name: str
    title: str
    rows: tuple[PaperRow, ...]


def _row(
    label: str, cells: str, method: str, options: tuple[tuple[str, bool | int | float | str], ...] = ()
) -> PaperRow:
    """`cells` are four "mean/sd" in the order of the printed columns."""
    numbers = [(float(mean), float(sd)) for mean, sd in (cell.split("/") for cell in cells.split())]
    first, second, third, fourth = numbers
    return PaperRow(label, (first, second), (third, fourth), method, options)


_FULL = "76.2/0.9 91.8/0.5 72.1/0.3 90.7/0.5"

# Without the supervised loss the head learns nothing, so the prediction comes from the nearest prototype.
_PROTOTYPES_ONLY = (("supervision", "none"),)

TABLES = (
    PaperTable("A", "Main comparison", (
        _row("Local", "70.0/0.7 88.3/1.2 60.7/0.8 89.0/0.5", "local"),
        _row("FedAvg", "69.5/0.6 91.3/0.7 59.8/0.4 84.8/0.2", "fedavg"),
        _row("FedProx", "70.0/1.1 90.2/0.2 64.8/0.5 89.4/0.4", "fedprox"),
        _row("MOON", "69.5/1.0 90.5/0.8 61.5/0.6 88.4/0.6", "moon"),
        _row("CReFF", "67.6/1.3 89.6/1.2 60.8/0.2 89.0/0.4", "creff"),
        _row("FedRS", "70.2/2.2 90.3/0.3 62.8/0.7 83.6/0.3", "fedrs"),
        _row("FedLC", "67.8/0.9 89.3/0.9 63.7/0.7 86.1/0.4", "fedlc"),
        _row("BalanceFL", "66.4/1.0 88.2/0.4 58.2/0.7 87.6/0.2", "balancefl"),
        _row("FedRep", "69.8/1.3 88.9/0.5 63.4/0.5 89.3/0.4", "fedrep"),
        _row("FedRoD", "66.1/0.8 90.5/1.5 64.7/0.5 89.8/0.4", "fedrod"),
        _row("FedBABU", "72.1/1.6 90.5/1.5 64.4/0.5 89.0/0.5", "fedbabu"),
        _row("FedNPR", "72.9/0.6 91.5/0.7 65.4/0.8 87.5/0.5", "fednpr"),
        _row("FedNPR-Per", _FULL, "fednpr-per"),
    )),
    PaperTable("B", "Components of FedNPR-Per", (
        _row("prototypes K=1, no BSM", "57.4/1.1 83.2/1.7 58.5/2.9 82.0/1.4", "fednpr-per",
             (*_PROTOTYPES_ONLY, ("clusters", 1))),
        _row("prototypes K>1, no BSM", "60.4/2.3 83.5/1.3 60.7/1.8 83.7/1.6", "fednpr-per", _PROTOTYPES_ONLY),
        _row("BSM + prototypes K=1", "73.3/0.1 91.4/0.9 70.8/0.6 88.8/0.3", "fednpr-per", (("clusters", 1),)),
        _row("BSM + prototypes K>1", _FULL, "fednpr-per"),
    )),
    PaperTable("C", "Number of prototypes K of FedNPR-Per", (
        _row("K=1", "73.3/0.1 91.4/0.9 70.8/0.6 88.8/0.3", "fednpr-per", (("clusters", 1),)),
        _row("K=2", "74.8/0.9 91.5/0.5 72.1/0.3 90.7/0.5", "fednpr-per", (("clusters", 2),)),
        _row("K=4", "76.2/0.9 91.8/0.5 70.6/0.3 89.4/0.7", "fednpr-per", (("clusters", 4),)),
        _row("K=8", "74.5/0.9 91.4/0.5 70.5/0.9 88.7/0.7", "fednpr-per", (("clusters", 8),)),
    )),
    PaperTable("D", "Weight lambda of FedNPR-Per", (
        _row("lambda=0.01", "71.8/0.6 91.9/0.3 70.5/2.1 89.4/0.5", "fednpr-per", (("lambda_npr", 0.01),)),
        _row("lambda=0.05", "72.7/0.8 90.9/0.3 72.1/0.3 90.7/0.5", "fednpr-per", (("lambda_npr", 0.05),)),
        _row("lambda=0.1", "76.2/0.9 91.8/0.5 70.5/0.5 90.5/0.4", "fednpr-per", (("lambda_npr", 0.1),)),
        _row("lambda=1", "73.3/0.6 92.1/0.5 69.2/1.1 88.5/1.3", "fednpr-per", (("lambda_npr", 1),)),
    )),
)

# Table E prints means and gains without deviations: (ISIC bACC, ISIC bAUC, ICH bACC, ICH bAUC), then the four gains.
TABLE_E: tuple[tuple[str, str, tuple[float, float, float, float], tuple[float, float, float, float]], ...] = (
    ("FedAvg + NPR", "fednpr", (72.9, 91.5, 65.4, 87.5), (3.4, 0.2, 5.6, 2.7)),
    ("FedBABU + NPR", "fedbabu+npr", (73.7, 90.8, 71.7, 90.3), (1.6, 0.3, 7.3, 1.3)),
    ("FedRep + NPR", "fedrep+npr", (70.8, 90.4, 70.4, 90.2), (1.0, 1.5, 7.0, 0.9)),
    ("FedRoD + NPR", "fedrod+npr", (67.3, 91.4, 67.1, 91.9), (1.2, 0.9, 2.4, 2.1)),
)


Json = dict[str, Any]


COLUMNS = (
    "method",
    "model",
    "predictor",
    "pooled recall [95 %]",
    "difference [95 %]",
    "by seed",
    "mean over sites bACC [95 %]",
    "difference [95 %]",
    "bAUC",
    "cells",
)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [" | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def summary_table(results: Json) -> str:
    """The table a run ends with: what was chosen on the validation sides first, then every model by every predictor."""
    rows = [
        (
            row["variant"],
            row["kind"],
            row["predictor"],
            _interval(row["pooled_recall"]),
            _gap(row["difference"], "pooled_recall"),
            " ".join(f"{value:+.1f}" for value in row["difference"]["by_seed"].values()) if row["difference"] else "",
            _interval(row["mean_bacc"]),
            _gap(row["difference"], "mean_bacc"),
            _spread(row["mean_bauc"]),
            str(row["cells"]),
        )
        for row in sorted(results["summary"], key=lambda row: row["kind"] != "chosen")
    ]
    return "\n".join([markdown(COLUMNS, rows), "", *_notes(results)]) + "\n"


def _gap(difference: Json | None, figure: str) -> str:
    if not difference:
        return ""
    text = _interval(difference[figure], signed=True)
    return f"{text} vs {difference['reference']}" if figure == "pooled_recall" else text


def _notes(results: Json) -> list[str]:
    settings, data = results["settings"], results["settings"]["data"]
    notes = [
        f"{data['source']} at {data['image_size']} px, {settings['model']['architecture']} "
        f"(weights: {settings['model']['weights']}), {settings['rounds']} rounds, last round, "
        f"{settings['aggregation']} aggregation, {data['validation']:.0%} of each fold's training images held back to "
        "choose by. Figures in percent, on test images that were read once, after the choices.",
        "Pooled recall: mean recall over classes of all out-of-fold predictions together. Intervals draw folds, seeds "
        "and whole lesions or patients again, differences on the same draws.",
        *_chosen(results),
    ]
    waiting = sum("final" not in cell for cell in results["cells"])
    if waiting:
        notes.append(f"Trained and not judged on test images (not chosen, or still to be chosen): {waiting} cells.")
    if results["failed"]:
        notes.append("Failed: " + "; ".join(f"{entry['key']} ({entry['error']})" for entry in results["failed"]) + ".")
    if results["not_run"]:
        notes.append("Not run: " + "; ".join(results["not_run"]) + ".")
    return [line for note in notes for line in (note, "")][:-1]


def _chosen(results: Json) -> list[str]:
    """What the validation sides chose, by row and fold."""
    lines = []
    for row in results["summary"]:
        if row["kind"] == "chosen":
            parts = [f"fold {fold}: {describe_choice(choice)}" for fold, choice in row["choices"].items()]
            lines.append(f"Chosen for {row['variant']}: {'; '.join(parts)}.")
    return lines


FIGURES: Final = ("pooled_recall", "mean_bacc", "mean_bauc")


def cells_csv(results: Json) -> str:
    """For pandas and the like: one row for each cell, side, model and predictor, figures as parts of one, options as
    columns. A figure that does not exist is empty."""
    options = sorted({name for cell in results["cells"] for name in cell["options"]})
    about = ("key", "method", "variant", "seed", "fold")
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*about, *(f"option.{name}" for name in options), "side", "model", "predictor", "chosen", *FIGURES])
    for cell in results["cells"]:
        first = [*(cell[name] for name in about), *(cell["options"].get(name, "") for name in options)]
        chosen = tuple(cell.get("chosen", {}).values())
        for side, by_kind in (("validation", cell["validation"]), ("test", cell.get("final", {}))):
            for kind, by_name in by_kind.items():
                for name, figures in by_name.items():
                    numbers = [figures.get(figure) for figure in FIGURES]
                    table.writerow([*first, side, kind, name, (kind, name) == chosen, *numbers])
    return text.getvalue()


def describe_choice(choice: Json) -> str:
    values = [f"{key}={value}" for key, value in choice.items() if key not in ("model", "predictor")]
    return ", ".join([f"{choice['model']} model by {choice['predictor']}", *values])


def paper_rows(results: Json, dataset: Dataset) -> list[Json]:
    """Tables A to E as data: the paper's figures and our row, or null where we have none."""
    at = 0 if dataset == "isic" else 2
    gains = [
        {
            "table": "E",
            "row": label,
            "paper": figures[at : at + 2],
            "paper_gain": gain[at : at + 2],
            "ours": (ours := _find(results, method)),
            "without": (without := _find(results, _without_npr(method))),
            "gain": [_gain(results, ours, without, figure) for figure in ("mean_bacc", "mean_bauc")],
        }
        for label, method, figures, gain in TABLE_E
    ]
    return [
        {
            "table": table.name,
            "row": row.label,
            "paper": row.figures(dataset),
            "ours": _find(results, row.method, dict(row.options)),
        }
        for table in TABLES
        for row in table.rows
    ] + gains


def _without_npr(method: str) -> str:
    return "fedavg" if method == "fednpr" else method.removesuffix("+npr")


def paper_comparison(results: Json, dataset: Dataset) -> str:
    """Our figures beside the paper's tables A to E. A row we have not run says so."""
    parts = [_paper_table(table, results, dataset) for table in TABLES]
    return "\n".join([*parts, _table_e(results, dataset), _what_differs(results)])


def _what_differs(results: Json) -> str:
    """Why the two columns are not the same experiment."""
    settings, data = results["settings"], results["settings"]["data"]
    folds = ", ".join(sorted({str(cell["fold"]) for cell in results["cells"]}))
    return (
        f"What differs from the paper: images ({data['source']} at {data['image_size']} px; the paper: 224 for ISIC, "
        f"128 for ICH), network ({settings['model']['architecture']}; EfficientNet-B0), "
        f"rounds ({settings['rounds']}; 80), the round shown (the last; the best on the test images), "
        f"training images ({data['validation']:.0%} held back for validation; none), folds ({folds}; five).\n"
    )


def _paper_table(table: PaperTable, results: Json, dataset: Dataset) -> str:
    header = ("row", "paper bACC", "ours bACC", "model, predictor", "folds x seeds", "paper bAUC", "ours bAUC",
              "ours pooled recall")
    rows = []
    for row in table.rows:
        (bacc, bacc_sd), (bauc, bauc_sd) = row.figures(dataset)
        ours = _find(results, row.method, dict(row.options))
        rows.append(
            (
                row.label,
                f"{bacc:.1f}±{bacc_sd:.1f}",
                _interval(ours["mean_bacc"]) if ours else "not run",
                *_of_what(ours),
                f"{bauc:.1f}±{bauc_sd:.1f}",
                _spread(ours["mean_bauc"]) if ours else "not run",
                _interval(ours["pooled_recall"]) if ours else "",
            )
        )
    return f"### Table {table.name}: {table.title} ({dataset.upper()})\n\n{markdown(header, rows)}\n"


def _of_what(ours: Json | None) -> tuple[str, str]:
    """Model and predictor of our figure, and the cells that it is the mean of."""
    if ours is None:
        return "", ""
    folds, seeds = len(ours["folds"]), len(ours["seeds"])
    size = f"{folds} x {seeds}" if ours["cells"] == folds * seeds else f"{ours['cells']} cells"
    return f"{ours['kind']}, {ours['predictor']}", size


def _table_e(results: Json, dataset: Dataset) -> str:
    """Gains by adding NPR; ours are differences of means over sites, on the folds and seeds that both rows have."""
    header = ("row", "paper bACC (gain)", "ours bACC (gain)", "model, predictor", "folds x seeds", "paper bAUC (gain)",
              "ours bAUC (gain)")
    rows = []
    at = 0 if dataset == "isic" else 2
    for label, method, figures, gains in TABLE_E:
        ours, without = _find(results, method), _find(results, _without_npr(method))
        with_gains = [_with_gain(results, ours, without, figure) for figure in ("mean_bacc", "mean_bauc")]
        rows.append(
            (
                label,
                f"{figures[at]:.1f} ({gains[at]:+.1f})",
                with_gains[0],
                *_of_what(ours),
                f"{figures[at + 1]:.1f} ({gains[at + 1]:+.1f})",
                with_gains[1],
            )
        )
    return f"### Table E: NPR added to other methods ({dataset.upper()})\n\n{markdown(header, rows)}\n"


def _with_gain(results: Json, ours: Json | None, without: Json | None, field: str) -> str:
    if ours is None:
        return "not run"
    if not ours[field]:
        return "none"
    gain = _gain(results, ours, without, field)
    return f"{ours[field][0]:.1f}" + ("" if gain is None else f" ({gain:+.1f})")


def _gain(results: Json, ours: Json | None, without: Json | None, field: str) -> float | None:
    """The mean difference over the cells that both rows have: folds differ by more than methods do."""
    if ours is None or without is None:
        return None
    mine, base = (_by_cell(results, row, field) for row in (ours, without))
    common = [mine[at] - base[at] for at in mine if at in base]
    return 100 * sum(common) / len(common) if common else None


def _by_cell(results: Json, row: Json, field: str) -> dict[tuple[object, object], float]:
    """The row's figure in each cell, by seed and fold; a cell that has none is left out."""
    found = {
        (cell["seed"], cell["fold"]): cell.get("final", {}).get(row["kind"], {}).get(row["predictor"], {}).get(field)
        for cell in results["cells"]
        if cell.get("variant") == row["variant"]
    }
    return {at: value for at, value in found.items() if value is not None}


def _find(results: Json, method: str, options: Mapping[str, object] | None = None) -> Json | None:
    """Our row of a method under the same settings, whether they come by option, from the whole run or by default.

    The row is of the model and the predictor that the paper's tables are about: mostly a site's own model as its local
    training leaves it, by its head.
    """
    wanted = _in_force(results, options or {})
    methods = {entry.name: entry for entry in registry.rows()}  # a plugin's is not among them, nor in the paper
    for row in results["summary"]:
        entry = methods.get(row["method"])
        if entry is not None and entry.original == method and _in_force(results, row["options"]) == wanted:
            kinds = {other["kind"] for other in results["summary"] if other["variant"] == row["variant"]}
            judged = entry.method.judged
            part = "prototypes" if row["options"].get("supervision") == "none" else "head"
            if (row["kind"], row["predictor"]) == (judged if judged in kinds else "personal", part):
                return dict(row)
    return None


def _in_force(results: Json, options: Mapping[str, object]) -> Json:
    defaults = {name: field.default for name, field in TrainConfig.model_fields.items()}
    return {**defaults, **results["settings"]["train"], **options}


def _interval(values: Sequence[float], *, signed: bool = False) -> str:
    form = "{:+.1f}" if signed else "{:.1f}"
    text = form.format(values[0])
    return f"{text} [{form.format(values[1])}, {form.format(values[2])}]" if len(values) == 3 else text


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "none"  # an AUC where every test image is of one class
    return f"{values[0]:.1f}±{values[1]:.1f}" if len(values) == 2 else f"{values[0]:.1f}"
