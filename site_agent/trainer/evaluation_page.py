"""`site-agent evaluate --html`: the figures as one page, self-contained, without script, for this hospital.

The page is `templates/evaluation.html`, with the parts and the look of the auditor's report: everything that is put in
is text and is escaped.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lazaret import files
from security.audit.pages import DASHES, Curve, Dot, Drawing, GridLine, Label, Scale, environment, ticks
from site_agent.trainer.clinical_figures import FEW, RATE_NAMES, with_interval
from site_agent.trainer.evaluation import alone_line, figure_text, plural, why_no_temperature

_WIDTH: Final = 420
_HEIGHT: Final = 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, _WIDTH - 14, 34, _HEIGHT - 46
_SIDES: Final = ("validation", "test")
Point = Sequence[float]


def write_page(figures: Mapping[str, Any], target: Path, *, now_ms: int) -> None:
    """Readable by this user only, as everything about this hospital's patients."""
    files.write_atomically(target, render(figures, now_ms=now_ms).encode(), mode=0o600)


def render(figures: Mapping[str, Any], *, now_ms: int) -> str:
    return environment(__package__ or "site_agent.trainer").get_template("evaluation.html").render(
        page_facts(figures, now_ms)
    )


def page_facts(figures: Mapping[str, Any], now_ms: int) -> dict[str, Any]:
    """Everything that the template shows."""
    shown = figures[figures["clinical_side"]] if figures["clinical"] else figures.get("test") or {}
    unit = plural(shown.get("unit_kind", "image"))
    return {
        "private": figures["private"],
        "about": _about(figures, now_ms),
        "sides": [side for side in _SIDES if side in figures],
        "overall": _overall(figures),
        "alone": alone_line(figures),
        "temperature": figures["temperature"],
        "no_temperature": why_no_temperature(figures["labels"]),
        "temperature_images": figures["temperature_images"],
        "side": figures["clinical_side"],
        "unit": unit,
        "few": FEW,
        "titles": _titles(unit),
        "rows": [(one["name"], *_row(one)) for one in figures["clinical"]],
        "findings": [_finding(one, unit) for one in figures["clinical"]],
        "classes": figures["class_names"],
        "confusion": [
            (name, *row) for name, row in zip(figures["class_names"], shown.get("confusion", ()), strict=False)
        ],
    }


def _about(figures: Mapping[str, Any], now_ms: int) -> list[tuple[str, str]]:
    written = dt.datetime.fromtimestamp(now_ms / 1000, dt.UTC)
    return [
        ("Hospital", figures["site"]),
        ("Model", f"the {figures['model']} of this hospital, of round {figures['round']} ({figures['kind']})"),
        ("Model (SHA-256)", figures["model_sha256"]),
        ("Rule of operating points", _rule(figures["operating_rule"])),
        ("Written on", f"{written:%Y-%m-%d} (UTC)"),
    ]


def _rule(rule: str) -> str:
    name, _, bound = rule.partition("=")
    if not bound:
        return "the largest sensitivity + specificity (Youden)"
    other = "specificity" if name == "sensitivity" else "sensitivity"
    return f"{name} of at least {bound}, then the largest {other}"


def _overall(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    named = {"bacc": "balanced accuracy", "bauc": "balanced AUC", "ece": "calibration error"}
    named["ece_calibrated"] = "calibration error, calibrated"
    sides = [figures[side] for side in _SIDES if side in figures]
    rows = [(name, *(figure_text(side, key) for side in sides)) for key, name in named.items()]
    counted = [f"{side['images']} of {side['units']} {plural(side['unit_kind'])}" for side in sides]
    return [*rows, ("images", *counted)]


def _titles(unit: str) -> tuple[str, ...]:
    return ("", f"{unit} with it", "threshold", *RATE_NAMES.values(), "AUC", "PR-AUC")


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    point = one["operating_point"]
    return (
        f"{one['units_with_finding']} of {one['units']}",
        "none" if point is None else f"{point['threshold']:.3f}",
        *(with_interval(one, name) for name in (*RATE_NAMES, "auc", "pr_auc")),
    )


def _finding(one: Mapping[str, Any], unit: str) -> dict[str, Any]:
    return {
        "name": one["name"],
        "point": one["operating_point"],
        "counts": one["counts"],
        "brier": one["brier"],
        "plots": _plots(one) if one["roc"] is not None else [],
        "group_titles": ("", "group", unit, "with it", "sensitivity", "specificity", "AUC", "PR-AUC"),
        "groups": [_group(group) for group in one["subgroups"]],
    }


def _group(group: Mapping[str, Any]) -> tuple[str, ...]:
    few = " (few)" if group["units"] < FEW else ""
    figures = (with_interval(group, name) for name in ("sensitivity", "specificity", "auc", "pr_auc"))
    return (group["column"], group["group"], f"{group['units']}{few}", str(group["units_with_finding"]), *figures)


# Plots.


def _plots(one: Mapping[str, Any]) -> list[tuple[Drawing, str]]:
    share = one["with_finding"] / one["images"]
    auc, precision = with_interval(one, "auc"), with_interval(one, "pr_auc")
    return [
        (roc_plot(one), f"ROC curve, area {auc}. The dot is the operating point."),
        (precision_plot(one), f"Precision and recall, area {precision}. Dashed: the share of images with it."),
        (calibration_plot(one), "Calibration in ten bins. On the dashed line, probabilities are true."),
        (decision_plot(one, share), "Decision curve. Long dashes: everybody is treated; dotted: nobody is."),
    ]


def roc_plot(one: Mapping[str, Any]) -> Drawing:
    drawing, x, y = _axes(f"ROC curve of {one['name']}", "1 - specificity", "sensitivity")
    drawing.curves.append(_curve(one["roc"], x, y))
    drawing.curves.append(_curve([(0, 0), (1, 1)], x, y, 2))
    if one["sensitivity"] is not None and one["specificity"] is not None:
        words = f"sensitivity {one['sensitivity']:.3f}, specificity {one['specificity']:.3f}"
        drawing.dots.append(Dot(x(1 - one["specificity"]), y(one["sensitivity"]), words))
    return drawing


def precision_plot(one: Mapping[str, Any]) -> Drawing:
    drawing, x, y = _axes(f"precision and recall of {one['name']}", "recall (sensitivity)", "precision")
    drawing.curves.append(_curve(one["precision"], x, y))
    share = one["with_finding"] / one["images"]
    drawing.curves.append(_curve([(0, share), (1, share)], x, y, 1))
    if one["sensitivity"] is not None and one["ppv"] is not None:
        words = f"recall {one['sensitivity']:.3f}, precision {one['ppv']:.3f}"
        drawing.dots.append(Dot(x(one["sensitivity"]), y(one["ppv"]), words))
    return drawing


def calibration_plot(one: Mapping[str, Any]) -> Drawing:
    drawing, x, y = _axes(f"calibration of {one['name']}", "predicted probability", "share that has it")
    drawing.curves.append(_curve([(0, 0), (1, 1)], x, y, 1))
    points = [(point["predicted"], point["observed"]) for point in one["calibration"]]
    drawing.curves.append(_curve(points, x, y))
    for point in one["calibration"]:
        words = f"{point['images']} images: predicted {point['predicted']:.3f}, have it {point['observed']:.3f}"
        drawing.dots.append(Dot(x(point["predicted"]), y(point["observed"]), words))
    return drawing


def decision_plot(one: Mapping[str, Any], share: float) -> Drawing:
    """Treating everybody falls without bound; what is far below zero is left out."""
    top, low = share * 1.1, -share * 0.35
    drawing, x, y = _axes(f"decision curve of {one['name']}", "threshold probability", "net benefit", low, top)
    for key, dashes in (("model", 0), ("all", 1)):
        points = [(point["threshold"], point[key]) for point in one["decision"]]
        drawing.curves.extend(_curve(run, x, y, dashes) for run in _above(points, low))
    drawing.curves.append(_curve([(0, 0), (1, 0)], x, y, 2))
    return drawing


def _above(points: Sequence[tuple[float, float]], low: float) -> list[list[tuple[float, float]]]:
    """The pieces of a curve that lie above a bound."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point[1] >= low:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _axes(title: str, across: str, up: str, low: float = 0.0, high: float = 1.0) -> tuple[Drawing, Scale, Scale]:
    drawing = Drawing(title=title, height=_HEIGHT, width=_WIDTH)
    x, y = Scale(0, 1, _LEFT, _RIGHT), Scale(low, high, _BOTTOM, _TOP)
    for value in ticks(high):
        drawing.lines.append(GridLine(_LEFT, _RIGHT, y(value)))
        drawing.labels.append(Label(_LEFT - 7, y(value) + 4, f"{value:g}", "end"))
    for part in range(0, 101, 25):
        drawing.labels.append(Label(x(part / 100), _BOTTOM + 17, f"{part / 100:g}", "middle"))
    drawing.labels.append(Label((_LEFT + _RIGHT) / 2, _BOTTOM + 38, across, "middle"))
    drawing.labels.append(Label(_LEFT, _TOP - 18, up))
    return drawing, x, y


def _curve(points: Sequence[Point], x: Scale, y: Scale, dashes: int = 0) -> Curve:
    return Curve(" ".join(f"{x(one[0])},{y(one[1])}" for one in points), DASHES[dashes])
