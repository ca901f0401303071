"""Figures that a clinician asks for: one class against all others, with intervals by patient.

Sensitivity, specificity and predictive values at an operating point; areas under the ROC and the precision-recall
curve; calibration; decision curves (Vickers and Elkin, 2006). Every figure is of one *finding*: a class against all
others, by its probability. Patients (or lesions) are drawn again for intervals, never single images.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import ConfigError
from npr.bootstrap import times_drawn

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Bounds = tuple[float, float] | None

RULE: Final = r"^(youden|(sensitivity|specificity)=(0\.[0-9]{1,4}))$"
"""How an operating point is chosen, as a configuration writes it."""
LEAST_UNITS: Final = 3
"""Patients with and without the finding, below which nothing is chosen: fewer say more about chance."""
DRAWS: Final = 500
BINS: Final = 10
POINTS: Final = 200
"""Points of a curve that are kept for drawing."""
_LEVEL: Final = 0.95
# Numbers in one chunk of draws: about 32 MB.
_CHUNK: Final = 4_000_000
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, eq=False, slots=True)
class ClinicalFinding:
    """One class against all others, on one side of one site's images.

    :ivar truth: whether an image has the finding.
    :ivar probability: of the finding, by the model.
    :ivar units: a number for each patient (or lesion), the same for all images of one.
    """

    truth: Bools
    probability: Floats
    units: NDArray[np.int64]

    @classmethod
    def of(cls, labels: NDArray[np.int64], scores: NDArray[Any], units: Sequence[str], place: int) -> ClinicalFinding:
        numbers = np.unique(np.array(units, dtype=str), return_inverse=True)[1].astype(np.int64)
        truth = labels[:, place] == 1 if labels.ndim == 2 else labels == place
        return cls(truth, scores[:, place].astype(np.float64), numbers)

    def only(self, rows: Bools) -> ClinicalFinding:
        """Of these images alone."""
        units = np.unique(self.units[rows], return_inverse=True)[1].astype(np.int64)
        return ClinicalFinding(self.truth[rows], self.probability[rows], units)

    @property
    def both(self) -> bool:
        """Whether there are images with it and without it."""
        return bool(self.truth.any() and not self.truth.all())

    def patients(self, truth: bool) -> int:
        return len(np.unique(self.units[self.truth == truth]))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """From which probability on a finding counts as seen, and what that gave where it was chosen."""

    rule: str
    threshold: float
    sensitivity: float
    specificity: float
    images: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose_operating_point(finding: ClinicalFinding, rule: str = "youden") -> OperatingPoint | None:
    """The point of the ROC curve that the rule wants; None with too few patients, or where no point satisfies it.

    `youden` takes the largest sensitivity + specificity - 1. `sensitivity=0.9` takes the most specific of the points
    with at least this sensitivity, `specificity=0.9` the most sensitive of those with at least this specificity. The
    threshold lies half-way to the next lower probability, so that rounding in another program does not move an image
    over it.
    """
    from sklearn.metrics import roc_curve

    wanted = re.fullmatch(RULE, rule)
    if wanted is None:
        raise ConfigError(f"operating point {rule!r} is unknown", hint="youden, sensitivity=0.9 or specificity=0.9")
    if min(finding.patients(True), finding.patients(False)) < LEAST_UNITS:
        return None
    false, true, thresholds = (
        values[1:] for values in roc_curve(finding.truth, finding.probability, drop_intermediate=False)
    )  # the first point calls nothing positive
    if wanted[2] is None:
        place = int(np.argmax(true - false))
    else:
        bound = float(wanted[3])
        reached = true >= bound - _ROUNDING if wanted[2] == "sensitivity" else 1 - false >= bound - _ROUNDING
        if not reached.any():
            return None
        # Both rates only grow along the curve.
        place = int(np.argmax(reached)) if wanted[2] == "sensitivity" else int(np.flatnonzero(reached)[-1])
    lower = thresholds[place + 1] if place + 1 < len(thresholds) else thresholds[place]
    return OperatingPoint(
        rule=rule,
        threshold=float((thresholds[place] + lower) / 2),
        sensitivity=float(true[place]),
        specificity=float(1 - false[place]),
        images=len(finding.truth),
    )


# Figures with intervals.

Rate = Literal["sensitivity", "specificity", "ppv", "npv"]
RATES: Final[tuple[Rate, ...]] = ("sensitivity", "specificity", "ppv", "npv")


def counts_at(finding: ClinicalFinding, threshold: float) -> dict[str, int]:
    """How many images were called right and wrong, with and without the finding."""
    called, truth = finding.probability >= threshold, finding.truth
    kinds = {"tp": called & truth, "fp": called & ~truth, "tn": ~called & ~truth, "fn": ~called & truth}
    return {name: int(kind.sum()) for name, kind in kinds.items()}


def rates_at(finding: ClinicalFinding, threshold: float, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Any]:
    """Sensitivity, specificity and predictive values at a threshold, each with its interval over patients."""
    called, truth = finding.probability >= threshold, finding.truth
    # Each rate is a share: of these images, those.
    shares: dict[Rate, tuple[Bools, Bools]] = {
        "sensitivity": (truth, called),
        "specificity": (~truth, ~called),
        "ppv": (called, truth),
        "npv": (~called, ~truth),
    }

    def every(weights: Floats) -> Floats:
        return np.stack([_share(weights @ (of & those), weights @ of) for of, those in shares.values()], axis=1)

    values = every(np.ones((1, len(truth))))[0]
    bounds = _bounds_of(every, finding.units, draws, seed)
    found: dict[str, Any] = {}
    for name, value, interval in zip(shares, values, bounds, strict=True):
        found |= {name: _finite(value), f"{name}_interval": interval}
    return found


def areas_of(finding: ClinicalFinding, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Any]:
    """Areas under the ROC curve and the precision-recall curve (average precision), with intervals; and the Brier
    score. None where only one kind of image is there."""
    from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

    brier = float(brier_score_loss(finding.truth, finding.probability, pos_label=True)) if len(finding.truth) else None
    if not finding.both:
        return {"auc": None, "auc_interval": None, "pr_auc": None, "pr_auc_interval": None, "brier": brier}
    roc, precision = _bounds_of(weighted_areas(finding), finding.units, draws, seed)
    return {
        "auc": float(roc_auc_score(finding.truth, finding.probability)),
        "auc_interval": roc,
        "pr_auc": float(average_precision_score(finding.truth, finding.probability)),
        "pr_auc_interval": precision,
        "brier": brier,
    }


def weighted_areas(finding: ClinicalFinding) -> Callable[[Floats], Floats]:
    """Both areas for many weightings of the same images at once: (draws, images) to (draws, 2).

    scikit-learn gives one weighting at a time; a bootstrap has hundreds. A test compares both.
    """
    order = np.argsort(-finding.probability, kind="stable")
    ordered, truth = finding.probability[order], finding.truth[order].astype(np.float64)
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # equal probabilities are one step

    def areas(weights: Floats) -> Floats:
        drawn = weights[:, order]
        true, false = (np.cumsum(drawn * part, axis=1)[:, ends] for part in (truth, 1 - truth))
        more_true, more_false = (np.diff(part, axis=1, prepend=0.0) for part in (true, false))
        positives, negatives = true[:, -1], false[:, -1]
        under_roc = (more_false * (true - more_true / 2)).sum(axis=1)
        under_precision = (more_true * np.nan_to_num(_share(true, true + false))).sum(axis=1)
        return np.stack([_share(under_roc, positives * negatives), _share(under_precision, positives)], axis=1)

    return areas


def _share(part: Floats, whole: Floats) -> Floats:
    return np.asarray(np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0))


def _bounds_of(
    figures: Callable[[Floats], Floats], units: NDArray[np.int64], draws: int, seed: int
) -> list[Bounds]:
    """The percentile interval of each figure over patients drawn again; None where no draw gave the figure."""
    values = np.concatenate([figures(weights) for weights in _weights(units, draws, seed)])
    tail = (1 - _LEVEL) / 2
    found: list[Bounds] = []
    for column in values.T:
        known = column[~np.isnan(column)]
        low, high = np.quantile(known, [tail, 1 - tail]) if len(known) else (np.nan, np.nan)
        found.append((float(low), float(high)) if len(known) else None)
    return found


def _weights(units: NDArray[np.int64], draws: int, seed: int) -> Iterator[Floats]:
    """How often each image counts in each draw of patients, in chunks that bound memory."""
    rng, things = np.random.default_rng(seed), int(units.max()) + 1
    size = max(1, _CHUNK // max(1, len(units)))
    for start in range(0, draws, size):
        yield times_drawn(rng, min(size, draws - start), things)[:, units]


# Curves.


def roc_points(finding: ClinicalFinding) -> list[list[float]]:
    """1 - specificity and sensitivity."""
    from sklearn.metrics import roc_curve

    false, true, _ = roc_curve(finding.truth, finding.probability)
    return _thinned(false, true)


def precision_points(finding: ClinicalFinding) -> list[list[float]]:
    """Recall and precision, from the highest threshold on."""
    from sklearn.metrics import precision_recall_curve

    precision, recall, _ = precision_recall_curve(finding.truth, finding.probability, drop_intermediate=True)
    return _thinned(recall[::-1], precision[::-1])


def calibration_points(finding: ClinicalFinding) -> list[dict[str, float]]:
    """Ten equally wide bins that hold images: mean probability, share that has the finding, number of images."""
    from sklearn.calibration import calibration_curve

    share, mean = calibration_curve(finding.truth, finding.probability, n_bins=BINS, strategy="uniform")
    edges = np.linspace(0.0, 1.0, BINS + 1)
    held = np.bincount(np.searchsorted(edges[1:-1], finding.probability), minlength=BINS)
    return [
        {"predicted": float(p), "observed": float(s), "images": int(n)}
        for p, s, n in zip(mean, share, held[held > 0], strict=True)
    ]


def decision_points(finding: ClinicalFinding) -> list[dict[str, float]]:
    """Net benefit of the model and of treating everybody, at thresholds of 1 to 99 %; treating nobody gives 0.

    At a threshold t somebody accepts t / (1 - t) needless treatments for each needful one: net benefit is the share of
    true positives less the share of false positives at that price.
    """
    found, share = [], float(finding.truth.mean())
    for percent in range(1, 100):
        threshold = percent / 100
        price, counted = threshold / (1 - threshold), counts_at(finding, threshold)
        model = (counted["tp"] - counted["fp"] * price) / len(finding.truth)
        found.append({"threshold": threshold, "model": model, "all": share - (1 - share) * price})
    return found


def _thinned(xs: Floats, ys: Floats) -> list[list[float]]:
    places = np.unique(np.linspace(0, len(xs) - 1, min(POINTS, len(xs))).round().astype(np.int64))
    return [[round(float(xs[place]), 4), round(float(ys[place]), 4)] for place in places]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
