"""The figures of `site-agent evaluate` that a clinician asks for: each finding, at its operating point, by subgroup.

They are exact and about this hospital's patients. They stay here; under differential privacy epsilon does not cover
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lazaret.errors import ConfigError
from npr import clinical
from npr.clinical import ClinicalFinding, OperatingPoint
from npr.data.dataset import Samples
from npr.metrics import Scores
from site_agent.trainer.subgroups import Subgroup

FEW: Final = 10
"""Patients of a group below which its figures are marked: they say little."""
RATE_NAMES: Final = {
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ppv": "positive predictive value",
    "npv": "negative predictive value",
}


def check_findings(wanted: Sequence[str] | None, class_names: Sequence[str]) -> None:
    for name in wanted or ():
        if name not in class_names:
            raise ConfigError(
                f"{name!r} is no class of the federation",
                where="site.toml [evaluation] findings",
                hint=f"its classes are {', '.join(class_names)}",
            )


def clinical_figures(
    samples: Samples,
    scores: Scores,
    class_names: Sequence[str],
    points: Sequence[OperatingPoint | None],
    groups: Sequence[Subgroup],
    wanted: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """One entry for each finding, in the order of the classes.

    :param scores: calibrated where the model is, because operating points are.
    :param wanted: classes to tell of; all if left out.
    """
    found = []
    for number, (name, point) in enumerate(zip(class_names, points, strict=True)):
        if wanted is None or name in wanted:
            finding = ClinicalFinding.of(samples.labels, scores, samples.units, number)
            about = {"name": name, "operating_point": point and point.to_json()}
            parts = [
                {"column": group.column, "group": group.name} | _counted(part) | _figures(part, point)
                for group in groups
                for part in (finding.only(group.rows),)
            ]
            found.append(about | _counted(finding) | _figures(finding, point) | _curves(finding) | {"subgroups": parts})
    return found


def _counted(finding: ClinicalFinding) -> dict[str, int]:
    return {
        "images": len(finding.truth),
        "with_finding": int(finding.truth.sum()),
        "units": int(finding.units.max(initial=-1)) + 1,
        "units_with_finding": finding.patients(True),
    }


def _figures(finding: ClinicalFinding, point: OperatingPoint | None) -> dict[str, Any]:
    at = {"counts": None} | dict.fromkeys(clinical.RATES)
    if point is not None:
        at = {"counts": clinical.counts_at(finding, point.threshold)} | clinical.rates_at(finding, point.threshold)
    return at | clinical.areas_of(finding)


def _curves(finding: ClinicalFinding) -> dict[str, Any]:
    """None where only one kind of image is there: no curve is defined."""
    kinds = {
        "roc": clinical.roc_points,
        "precision": clinical.precision_points,
        "calibration": clinical.calibration_points,
        "decision": clinical.decision_points,
    }
    return {name: points(finding) if finding.both else None for name, points in kinds.items()}


def finding_lines(figures: Mapping[str, Any]) -> list[str]:
    """For people: one line for each finding."""
    lines = [f"each class against the others, on the {figures['clinical_side']} images:"]
    width = max(len(one["name"]) for one in figures["clinical"])
    for one in figures["clinical"]:
        words = [f"{name} {with_interval(one, key)}" for key, name in (("pr_auc", "pr-auc"), ("auc", "auc"))]
        point = one["operating_point"]
        if point is not None:
            words = [f"{name} {with_interval(one, name)}" for name in ("sensitivity", "specificity")] + words
            words.append(f"from {point['threshold']:.3f} on")
        lines.append(f"  {one['name']:<{width}} {'  '.join(words)}")
    return lines


def with_interval(figures: Mapping[str, Any], name: str) -> str:
    """A figure and its interval, if it has one, for people."""
    if figures[name] is None:
        return "none"
    bounds = figures.get(f"{name}_interval")
    return f"{figures[name]:.3f}" + (f" ({bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else "")
