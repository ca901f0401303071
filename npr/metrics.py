"""How good predictions are: balanced accuracy, balanced AUC, calibration, per site and pooled over folds.

Only classes present in the labels count in a mean: a test set without melanoma says nothing about melanoma. Predicting
a class that the site does not have is an error like any other. Intervals are in npr/bootstrap.py. Temperature scaling
is at the end of this file.

Labels are classes (N,); or zeros and ones (N, L) where an image may have several. Then each label is a question with
two answers, and recall and accuracy are over answers (`answered`).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import DataError
from npr.data.dataset import Samples

Labels = NDArray[np.int64]
Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """Scores (softmax once, one row per image) of one site's test side in one fold and seed.

    `units` and `ids` are 63-bit codes: enough to resample by patient and to check that two methods are compared on the
    same images. They are pseudonyms, not anonymous, and stay where the predictions stay.
    """

    site: str
    labels: Labels
    scores: Scores
    units: NDArray[np.int64]
    ids: NDArray[np.int64]
    fold: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        rows = len(self.labels)
        if self.scores.ndim != 2 or not rows == len(self.scores) == len(self.units) == len(self.ids):
            raise DataError(f"{rows} labels do not fit scores {self.scores.shape}", where=f"predictions of {self.site}")
        if self.labels.ndim == 2 and self.labels.shape != self.scores.shape:
            raise DataError(f"labels {self.labels.shape} do not fit the scores", where=f"predictions of {self.site}")
        if rows and not (self.labels.min() >= 0 and self.labels.max() < self.scores.shape[1]):
            raise DataError("a label has no score column", where=f"predictions of {self.site}")
        if not np.isfinite(self.scores).all():
            raise DataError("a score is not a finite number", where=f"predictions of {self.site}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return int(self.scores.shape[1])

    @classmethod
    def of(
        cls, site: str, samples: Samples, scores: NDArray[Any], *, fold: str | int = "", seed: int = 0
    ) -> Predictions:
        return cls(
            site=site,
            labels=samples.labels,
            scores=np.ascontiguousarray(scores, dtype=np.float32),
            units=codes(samples.units),
            ids=codes(samples.ids),
            fold=str(fold),
            seed=seed,
        )


def codes(names: Iterable[str]) -> NDArray[np.int64]:
    """Stable 63-bit codes of names."""
    digests = (hashlib.sha256(name.encode()).digest()[:8] for name in names)
    return np.array([int.from_bytes(d, "little") >> 1 for d in digests], dtype=np.int64)


def confusion_matrix(labels: Labels, predicted: Labels, num_classes: int) -> NDArray[np.int64]:
    """Rows are true classes, columns predicted ones."""
    flat = np.bincount(labels * num_classes + predicted, minlength=num_classes * num_classes)
    return flat.reshape(num_classes, num_classes).astype(np.int64)


def answered(labels: Labels, scores: Scores) -> tuple[Labels, Labels, int]:
    """True answers, predicted answers, and how many different ones there are.

    With one label of each image the answers are the classes, and the largest score is predicted. With several labels an
    image answers L questions, one after the other: 2l is "without label l", 2l + 1 is "with it", predicted from a
    probability of 0.5 on.
    """
    if labels.ndim == 1:
        return labels, scores.argmax(axis=1), scores.shape[1]
    first = 2 * np.arange(labels.shape[1])
    return (first + labels).ravel(), (first + (scores >= 0.5)).ravel(), 2 * labels.shape[1]


def recalls(labels: Labels, scores: Scores) -> NDArray[np.float64]:
    """Recall of each class (or answer); NaN where it is absent from the labels."""
    matrix = confusion_matrix(*answered(labels, scores))
    present = matrix.sum(axis=1)
    out = np.full(len(matrix), np.nan)
    np.divide(matrix.diagonal(), present, out=out, where=present > 0)
    return out


def balanced_accuracy(labels: Labels, scores: Scores) -> float:
    """Mean recall over the classes present; NaN without any image."""
    return _mean_of_present(recalls(labels, scores))


def class_aucs(labels: Labels, scores: Scores) -> NDArray[np.float64]:
    """Area under the ROC curve of each class against the rest, or of each label, by midranks (ties count half); NaN
    without positives or negatives."""
    rows, classes = scores.shape
    if rows == 0:
        return np.full(classes, np.nan)
    # Not scikit-learn's: it adds up the curve and differs in the last bit from figures that are published, it takes
    # seven times as long in the bootstrap, and every site that trains would load it.
    ranks = np.stack([_midranks(column) for column in scores.T], axis=1)
    member = labels == 1 if labels.ndim == 2 else labels[:, None] == np.arange(classes)
    positives = member.sum(axis=0).astype(np.float64)
    pairs = positives * (rows - positives)
    above = (ranks * member).sum(axis=0) - positives * (positives + 1) / 2
    out = np.full(classes, np.nan)
    np.divide(above, pairs, out=out, where=pairs > 0)
    return out


def _midranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = np.sort(values)
    below, upto = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return np.asarray((below + upto + 1) / 2)


def balanced_auc(labels: Labels, scores: Scores) -> float:
    """Mean one-vs-rest AUC over the classes present."""
    return _mean_of_present(class_aucs(labels, scores))


def _as_classes(labels: Labels, scores: Scores) -> tuple[Labels, Scores]:
    """Each question as an image of two classes; images of one class as they are."""
    if labels.ndim == 1:
        return labels, scores
    return labels.ravel(), np.stack([1.0 - scores.ravel(), scores.ravel()], axis=1)


def expected_calibration_error(labels: Labels, scores: Scores, *, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy of the predicted class, over equal-width bins (Guo et al., 2017)."""
    labels, scores = _as_classes(labels, scores)
    if len(labels) == 0:
        return float("nan")
    confidence = scores.max(axis=1).astype(np.float64)
    hit = (scores.argmax(axis=1) == labels).astype(np.float64)
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(place, weights=hit, minlength=bins) - np.bincount(place, weights=confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(labels))


def pooled(predictions: Sequence[Predictions]) -> tuple[Labels, Scores]:
    """All rows of all sites, folds and seeds."""
    if not predictions:
        raise DataError("there are no predictions to pool")
    if len({p.num_classes for p in predictions}) != 1:
        raise DataError("predictions with different numbers of classes cannot be pooled")
    return np.concatenate([p.labels for p in predictions]), np.concatenate([p.scores for p in predictions])


def pooled_recall(predictions: Sequence[Predictions]) -> float:
    """The primary figure: mean over classes of the recall pooled over sites and out-of-fold predictions."""
    return balanced_accuracy(*pooled(predictions))


def site_mean(predictions: Sequence[Predictions], metric: Callable[[Labels, Scores], float]) -> float:
    """The paper's figure: the metric per site (and fold and seed), averaged plainly over those where it is defined."""
    return _mean_of_present(np.array([metric(p.labels, p.scores) for p in predictions]))


def _mean_of_present(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSummary:
    """Figures of one set of predictions; NaN is written as null."""

    images: int
    pooled_recall: float
    pooled_auc: float
    mean_bacc: float
    mean_bauc: float
    sd_bacc: float
    sd_bauc: float
    ece: float
    recall_by_class: tuple[float, ...]
    sites: dict[str, dict[str, float]]
    confusion: tuple[tuple[int, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return plain


def summarise(predictions: Sequence[Predictions]) -> MetricsSummary:
    """Pooled figures, the plain mean over sites with its spread over repetitions, and each site pooled over folds."""
    labels, scores = pooled(predictions)
    repetitions = dict.fromkeys((p.fold, p.seed) for p in predictions)
    groups = [[p for p in predictions if (p.fold, p.seed) == key] for key in repetitions]
    baccs = np.array([site_mean(group, balanced_accuracy) for group in groups])
    baucs = np.array([site_mean(group, balanced_auc) for group in groups])
    sites = {}
    for name in dict.fromkeys(p.site for p in predictions):
        own_labels, own_scores = pooled([p for p in predictions if p.site == name])
        sites[name] = {
            "images": float(len(own_labels)),
            "bacc": balanced_accuracy(own_labels, own_scores),
            "bauc": balanced_auc(own_labels, own_scores),
            "ece": expected_calibration_error(own_labels, own_scores),
        }
    matrix = confusion_matrix(*answered(labels, scores))
    return MetricsSummary(
        images=len(labels),
        pooled_recall=balanced_accuracy(labels, scores),
        pooled_auc=balanced_auc(labels, scores),
        mean_bacc=_mean_of_present(baccs),
        mean_bauc=_mean_of_present(baucs),
        sd_bacc=_spread(baccs),
        sd_bauc=_spread(baucs),
        ece=expected_calibration_error(labels, scores),
        recall_by_class=tuple(recalls(labels, scores).tolist()),
        sites=sites,
        confusion=tuple(tuple(row) for row in matrix.tolist()),
    )


def _spread(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else float("nan")


def save_predictions(path: Path, predictions: Sequence[Predictions]) -> None:
    """One npz without pickles, complete or absent."""
    arrays: dict[str, NDArray[Any]] = {
        "index": np.array(
            [json.dumps({"site": p.site, "fold": p.fold, "seed": p.seed}) for p in predictions], dtype=str
        )
    }
    for number, p in enumerate(predictions):
        for name in ("labels", "scores", "units", "ids"):
            arrays[f"{number}.{name}"] = getattr(p, name)
    handle, name = tempfile.mkstemp(prefix=".predictions-", suffix=".npz", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load_predictions(path: Path) -> list[Predictions]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return [
                Predictions(
                    **json.loads(str(entry)),
                    **{name: archive[f"{number}.{name}"] for name in ("labels", "scores", "units", "ids")},
                )
                for number, entry in enumerate(archive["index"])
            ]
    except FileNotFoundError:
        raise DataError("predictions are missing", where=str(path)) from None
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"not a predictions file ({type(error).__name__})", where=str(path)) from None


# Temperature scaling (Guo et al. 2017): one number, fitted on held-out images, that makes probabilities calibrated. It
# works on probabilities, softmax(log p / T), so that it is the same for heads, prototypes and mixtures of both. The
# order of the classes never changes, and a class that was ruled out stays ruled out.

# Fewer images say more about chance than about the model.
LEAST_IMAGES: Final = 20
# Images that are all predicted right would drive T to zero, and the next mistake would be made with certainty.
COLDEST, HOTTEST = 0.2, 10.0
FLOOR: Final = 1e-30
_STEPS: Final = 50


def fit_temperature(labels: Labels, scores: Scores, *, least: int = LEAST_IMAGES) -> float | None:
    """The T with the least cross-entropy on these images; None where there are too few of them, or of one class only.

    The loss is convex in 1/T, so its slope has one zero; where that lies outside the bounds, the bound is taken.
    """
    if len(labels) < least or len(np.unique(labels)) < 2:
        return None
    logits = _log(scores)
    if _slope(logits, labels, 1 / COLDEST) <= 0:
        return COLDEST
    if _slope(logits, labels, 1 / HOTTEST) >= 0:
        return HOTTEST
    low, high = 1 / HOTTEST, 1 / COLDEST
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _slope(logits, labels, middle) > 0 else (middle, high)
    return float(2 / (low + high))


def helpful_temperature(labels: Labels, scores: Scores, units: Sequence[str]) -> float | None:
    """The T of `fit_temperature`, where it helps on images that it was not fitted on; None where it does not, and for
    several labels of an image, whose probabilities are as a balanced sigmoid gives them.

    Patients (or what `units` name) are halved. Each half is calibrated with the T of the other one, and cross-entropy
    and calibration error over both must fall.
    """
    if labels.ndim == 2:
        return None
    fitted = fit_temperature(labels, scores)
    names = {unit: number for number, unit in enumerate(sorted(set(units), key=_shuffled))}
    first = np.array([names[unit] % 2 == 0 for unit in units], dtype=bool)
    held_back = np.array(scores, dtype=np.float32)
    for half in (first, ~first):
        other = fit_temperature(labels[~half], scores[~half], least=LEAST_IMAGES // 2)
        if fitted is None or other is None:
            return None
        held_back[half] = with_temperature(scores[half], other)
    falls = (cross_entropy, expected_calibration_error)
    return fitted if all(figure(labels, held_back) < figure(labels, scores) for figure in falls) else None


def _shuffled(unit: str) -> bytes:
    return hashlib.sha256(unit.encode()).digest()


def cross_entropy(labels: Labels, scores: Scores) -> float:
    """Mean of -log p of the true class, or answer."""
    labels, scores = _as_classes(labels, scores)
    return float(-_log(scores)[np.arange(len(labels)), labels].mean())


def with_temperature(scores: Scores, temperature: float) -> Scores:
    """softmax(log p / T); zeros stay zeros."""
    if temperature == 1.0:
        return scores
    weights = _softmax(_log(scores) / temperature) * (scores > 0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


def _log(scores: Scores) -> NDArray[np.float64]:
    return np.asarray(np.log(np.maximum(scores.astype(np.float64), FLOOR)))


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _slope(logits: NDArray[np.float64], labels: Labels, inverse: float) -> float:
    """Derivative of the mean cross-entropy by 1/T: the logit expected minus the logit of the true class."""
    expected = (_softmax(logits * inverse) * logits).sum(axis=1)
    return float(np.mean(expected - logits[np.arange(len(labels)), labels]))
