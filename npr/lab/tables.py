"""Markdown tables: our own summary, and our figures beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npr.config import TrainConfig
from npr.lab.paper_tables import TABLE_E, TABLES, Dataset, PaperTable
from npr.methods import registry

Json = dict[str, Any]


COLUMNS = (
    "method",
    "model",
    "pooled recall [95 %]",
    "difference [95 %]",
    "by seed",
    "mean over sites bACC",
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
    """The table a run ends with."""
    rows = []
    for row in results["summary"]:
        difference = row["difference"]
        rows.append(
            (
                row["variant"],
                row["kind"],
                _interval(row["pooled_recall"]),
                f"{_interval(difference['pooled_recall'], signed=True)} vs {difference['reference']}"
                if difference
                else "",
                " ".join(f"{value:+.1f}" for value in difference["by_seed"].values()) if difference else "",
                _spread(row["mean_bacc"]),
                _spread(row["mean_bauc"]),
                str(row["cells"]),
            )
        )
    return "\n".join([markdown(COLUMNS, rows), "", *_notes(results)]) + "\n"


def _notes(results: Json) -> list[str]:
    settings = results["settings"]
    notes = [
        f"{settings['data']['source']} at {settings['data']['image_size']} px, {settings['model']['architecture']} "
        f"(weights: {settings['model']['weights']}), {settings['rounds']} rounds, last round, "
        f"{settings['aggregation']} aggregation. Figures in percent.",
        "Pooled recall: mean recall over classes of all out-of-fold predictions together. Intervals draw whole lesions "
        "or patients again, differences on the same draws; they do not cover chance in training, which the differences "
        "by seed and the deviations over cells (±) show.",
    ]
    if results["failed"]:
        notes.append("Failed: " + "; ".join(f"{entry['key']} ({entry['error']})" for entry in results["failed"]) + ".")
    if results["not_run"]:
        notes.append("Not run: " + "; ".join(results["not_run"]) + ".")
    return [line for note in notes for line in (note, "")][:-1]


def paper_rows(results: Json, dataset: Dataset) -> list[Json]:
    """Tables A to E as data: the paper's figures and our row, or null where we have none."""
    at = 0 if dataset == "isic" else 2
    gains = [
        {
            "table": "E",
            "row": label,
            "paper": figures[at : at + 2],
            "paper_gain": gain[at : at + 2],
            "ours": _find(results, method),
            "without": _find(results, _without_npr(method)),
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
    return "\n".join([*parts, _table_e(results, dataset)])


def _paper_table(table: PaperTable, results: Json, dataset: Dataset) -> str:
    header = ("row", "paper bACC", "ours bACC", "ours, best round", "paper bAUC", "ours bAUC", "ours pooled recall")
    rows = []
    for row in table.rows:
        (bacc, bacc_sd), (bauc, bauc_sd) = row.figures(dataset)
        ours = _find(results, row.method, dict(row.options))
        rows.append(
            (
                row.label,
                f"{bacc:.1f}±{bacc_sd:.1f}",
                _spread(ours["mean_bacc"]) if ours else "not run",
                _spread(ours["best_round_mean_bacc"]) if ours else "",
                f"{bauc:.1f}±{bauc_sd:.1f}",
                _spread(ours["mean_bauc"]) if ours else "not run",
                _interval(ours["pooled_recall"]) if ours else "",
            )
        )
    return f"### Table {table.name}: {table.title} ({dataset.upper()})\n\n{markdown(header, rows)}\n"


def _table_e(results: Json, dataset: Dataset) -> str:
    """Gains by adding NPR; ours are differences of our own means over sites."""
    header = ("row", "paper bACC (gain)", "ours bACC (gain)", "paper bAUC (gain)", "ours bAUC (gain)")
    rows = []
    at = 0 if dataset == "isic" else 2
    for label, method, figures, gains in TABLE_E:
        ours, without = _find(results, method), _find(results, _without_npr(method))
        rows.append(
            (
                label,
                f"{figures[at]:.1f} ({gains[at]:+.1f})",
                _gain(ours, without, "mean_bacc"),
                f"{figures[at + 1]:.1f} ({gains[at + 1]:+.1f})",
                _gain(ours, without, "mean_bauc"),
            )
        )
    return f"### Table E: NPR added to other methods ({dataset.upper()})\n\n{markdown(header, rows)}\n"


def _gain(ours: Json | None, without: Json | None, field: str) -> str:
    if ours is None:
        return "not run"
    if without is None:
        return f"{ours[field][0]:.1f}"
    return f"{ours[field][0]:.1f} ({ours[field][0] - without[field][0]:+.1f})"


def _find(results: Json, method: str, options: Mapping[str, object] | None = None) -> Json | None:
    """Our row of a method under the same settings, whether they come by option, from the whole run or by default.

    The row is of the model that the paper's tables are about: mostly a site's own as its local training leaves it.
    """
    wanted = _in_force(results, options or {})
    methods = {entry.name: entry for entry in registry.rows()}  # a plugin's is not among them, nor in the paper
    for row in results["summary"]:
        entry = methods.get(row["method"])
        if entry is not None and entry.original == method and _in_force(results, row["options"]) == wanted:
            kinds = {other["kind"] for other in results["summary"] if other["variant"] == row["variant"]}
            judged = entry.method.judged
            if row["kind"] == (judged if judged in kinds else "personal"):
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
