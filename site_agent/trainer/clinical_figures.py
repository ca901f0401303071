"""The figures of `site-agent evaluate` that a clinician asks for: each finding, at its operating point, by subgroup.

They are exact and about this hospital's patients. They stay here; under differential privacy epsilon does not cover
them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import ConfigError, DataError
from npr import clinical
from npr.clinical import ClinicalFinding, OperatingPoint
from npr.data.columns import CsvTable, read_table
from npr.data.dataset import Samples
from npr.data.manifest import UNITS, image_id
from npr.data.sources import SourceName
from npr.metrics import Scores
from site_agent.config import EvaluationTable, SiteConfig

# Subgroups of this hospital's patients, from a column of its own table: by sex, age band, scanner. They stay here.
#
# The table is the one that lists the images, or another one of the hospital (`[evaluation] table`) with a column
# `image` or `patient`. Nothing else is read from it, and no value of it is repeated in an error.


NOT_RECORDED: Final = "not recorded"
MOST_GROUPS: Final = 20
"""More values than these are no groups: most probably the column names patients."""
_NAMING: Final = frozenset({"image", "label", "split", *UNITS, "AccessionNumber"})
_WHERE: Final = "site.toml [evaluation]"


@dataclass(frozen=True, eq=False, slots=True)
class Subgroup:
    """The images of one value, or band of values, of a column."""

    column: str
    name: str
    rows: NDArray[np.bool_]


def subgroups_of(config: SiteConfig, samples: Samples) -> list[Subgroup]:
    """The groups that `site.toml` asks for, column by column.

    :raises ConfigError: if a column names patients, or has too many values.
    :raises DataError: if the table does not have it.
    """
    wanted = config.evaluation
    check_columns(wanted)
    if not wanted.subgroups:
        return []
    table = _table_path(config)
    values = _values(table, wanted.subgroups, samples)
    return [group for column in wanted.subgroups for group in _groups(column, values[column], wanted)]


def check_columns(wanted: EvaluationTable) -> None:
    """What can be said without the table. Said before the model is loaded, which takes a while."""
    for column in wanted.subgroups:
        if column in _NAMING or column.endswith("UID"):
            raise ConfigError(f"column {column!r} makes no subgroups", where=f"{_WHERE} subgroups", hint="remove it")
    for column in wanted.bands:
        if column not in wanted.subgroups:
            raise ConfigError(f"bands of {column!r}, which is no subgroup", where=f"{_WHERE} bands")


def _table_path(config: SiteConfig) -> Path:
    if config.subgroup_table is not None:
        return config.subgroup_table
    name = SourceName.parse(config.data.source)
    if name.kind in ("csv", "dicom") and name.rest.lower().endswith((".csv", ".csv.gz")):
        return Path(name.rest)
    raise ConfigError(
        "the images are in no table with columns for subgroups",
        where=f"{_WHERE} subgroups",
        hint="name one in [evaluation] table, with a column image or patient",
    )


def _values(path: Path, columns: Sequence[str], samples: Samples) -> dict[str, list[str]]:
    """For each column the value of each image; what the table does not say is not recorded."""
    table = read_table(path, columns)
    key = next((name for name in ("image", samples.unit_kind) if name in table.columns), None)
    if key is None:
        raise DataError(
            f"column 'image' or {samples.unit_kind!r} is missing",
            where=f"{path.name} row 1",
            hint="it says which images a row is about",
        )
    # A frame of a file is an image of its own, with the row of its file.
    names = [name.partition("#")[0] for name in samples.ids] if key == "image" else list(samples.units)
    # Two patients may have one image: then the row must be of the same patient.
    unit = samples.unit_kind if key == "image" and samples.unit_kind in table.columns else None
    keys = list(zip(names, samples.units if unit else [""] * len(names), strict=True))
    return {column: [_said(found, one) for one in keys] for column, found in _by_key(table, key, unit, columns)}


def _by_key(
    table: CsvTable, key: str, unit: str | None, columns: Sequence[str]
) -> Iterator[tuple[str, dict[tuple[str, str], set[str]]]]:
    for column in columns:
        found: dict[tuple[str, str], set[str]] = {}
        for entry in table.entries:
            name = image_id(entry.fields["image"]) if key == "image" else entry.fields[key]
            found.setdefault((name, entry.fields[unit] if unit else ""), set()).add(entry.fields[column])
        yield column, found


def _said(found: Mapping[tuple[str, str], set[str]], key: tuple[str, str]) -> str:
    values = found.get(key, set()) - {""}
    return values.pop() if len(values) == 1 else NOT_RECORDED


def _groups(column: str, values: list[str], wanted: EvaluationTable) -> Iterator[Subgroup]:
    bounds = wanted.bands.get(column)
    if bounds is None:
        names, order = values, sorted(set(values) - {NOT_RECORDED})
    else:
        bands = band_names(bounds)
        names = [_band(value, bounds, bands) for value in values]
        order = [band for band in bands if band in set(names)]
    if len(order) > MOST_GROUPS:
        raise ConfigError(
            f"column {column!r} has {len(order)} different values",
            where=f"{_WHERE} subgroups",
            hint=f"at most {MOST_GROUPS}; cut numbers into bands, such as bands = {{ {column} = [40, 60, 80] }}",
        )
    listed = np.array(names, dtype=str)
    for name in (*order, NOT_RECORDED):
        rows = listed == name
        if rows.any():
            yield Subgroup(column, name, rows)


def band_names(bounds: Sequence[float]) -> list[str]:
    """`below 40`, `40 to below 60`, `60 and above`: a bound belongs to the band above it."""
    between = [f"{low:g} to below {high:g}" for low, high in pairwise(bounds)]
    return [f"below {bounds[0]:g}", *between, f"{bounds[-1]:g} and above"]


def _band(value: str, bounds: Sequence[float], bands: Sequence[str]) -> str:
    try:
        number = float(value)
    except ValueError:
        return NOT_RECORDED
    return bands[bisect_right(bounds, number)] if math.isfinite(number) else NOT_RECORDED


# The figures.

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
