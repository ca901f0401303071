"""`site-agent evaluate`: this site's model on its own held-out images, from what lies in the state directory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from lazaret import files
from lazaret.errors import ConfigError
from lazaret.terminal import progress
from npr.bootstrap import Interval, bootstrap_auc, bootstrap_interval
from npr.data.dataset import Samples, SiteData
from npr.device import PROCESSOR, Device
from npr.methods import registry
from npr.methods.local import Local
from npr.methods.site import Site
from npr.metrics import (
    Labels,
    Predictions,
    Scores,
    answered,
    balanced_accuracy,
    balanced_auc,
    class_aucs,
    confusion_matrix,
    expected_calibration_error,
    recalls,
    with_temperature,
)
from npr.recipe import Recipe
from npr.wire_layout import build_initial, spec_of
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel
from site_agent.config import SiteConfig
from site_agent.trainer.clinical_figures import (
    check_columns,
    check_findings,
    clinical_figures,
    finding_lines,
    subgroups_of,
    with_interval,
)
from site_agent.trainer.personal_state import SiteRecord
from site_agent.trainer.predictor import Predictor, Which, deploy, scores_of

SideScores = tuple[Samples, Scores]


def evaluate_site(
    config: SiteConfig, record: SiteRecord, *, model: Which | None = None, alone: bool = False
) -> dict[str, Any]:
    """Figures of the personal model that was best on the validation images, or of the newest one.

    The images are read anyway, so that temperature and prototypes are made anew and kept for `predict`.

    The figures are kept for the hospital's page.

    :param alone: first train as many rounds without the federation, to compare with; kept for the model card.
    """
    check_columns(config.evaluation)
    check_findings(config.evaluation.findings, record.manifest.model.classes)
    predictor = Predictor.open(config, record, model, refit=True)
    if alone:
        _compare_alone(predictor)
    scored = scores_by_side(predictor)
    figures = figures_of(predictor, scored) | clinical_of(predictor, scored)
    files.write_atomically(predictor.place.personal.evaluation, json.dumps(figures).encode(), mode=0o600)
    return figures


def scores_by_side(predictor: Predictor) -> dict[str, SideScores]:
    """Validation and test images with what the model says of them, before calibration; sides without images are left
    out."""
    data = predictor.place.trainer.data
    plain = deploy(predictor.place, predictor.trained, predictor.companion, calibrated=False)
    sides = {"validation": data.validation, "test": data.test}
    return {side: (some, scores_of(plain, some)) for side, some in sides.items() if some is not None and len(some)}


def clinical_of(predictor: Predictor, scored: Mapping[str, SideScores]) -> dict[str, Any]:
    """The figures that a clinician asks for, on the test images; without any, on the images for validation."""
    place, companion = predictor.place, predictor.companion
    side = "test" if "test" in scored else "validation"
    found: list[dict[str, Any]] = []
    if side in scored:
        samples, scores = scored[side]
        if companion.temperature is not None:
            scores = with_temperature(scores, companion.temperature)
        groups, wanted = subgroups_of(place.config, samples), place.config.evaluation.findings
        found = clinical_figures(samples, scores, companion.class_names, companion.points, groups, wanted)
    return {"operating_rule": companion.rule, "clinical_side": side, "clinical": found}


def _compare_alone(predictor: Predictor) -> None:
    place, rounds = predictor.place, predictor.trained.round
    data = place.trainer.data
    if not len(data.test):
        raise ConfigError("there are no test images to compare on", where="site.toml [data]", hint="see fold and folds")
    with progress("training alone") as tell:
        scores = train_alone(
            place.manifest, place.initial, place.recipe, data, rounds=rounds, device=place.device, tell=tell
        )
    about = {"run": place.manifest.run, "rounds": rounds, "data": place.fingerprint}
    figures = about | {"test": side_figures(place.site, data.test, scores, None)}
    files.write_atomically(place.personal.alone, json.dumps(figures).encode(), mode=0o600)


def alone_of(predictor: Predictor) -> dict[str, Any] | None:
    """Figures of training alone, if they are of this run, as many rounds and the same images."""
    place, path = predictor.place, predictor.place.personal.alone
    if not path.exists():
        return None
    figures: dict[str, Any] = json.loads(files.read_private(path))
    wanted = (place.manifest.run, predictor.trained.round, place.fingerprint)
    return figures if (figures["run"], figures["rounds"], figures["data"]) == wanted else None


def figures_of(predictor: Predictor, scored: Mapping[str, SideScores] | None = None) -> dict[str, Any]:
    """All figures, on the validation and on the test side. The temperature was fitted on the validation side."""
    place, companion = predictor.place, predictor.companion
    data = place.trainer.data
    figures: dict[str, Any] = {
        "site": place.site,
        "model": predictor.trained.which,
        "round": predictor.trained.round,
        "kind": place.method.reports[0],
        "model_sha256": predictor.trained.digest,
        "class_names": list(companion.class_names),
        "labels": place.recipe.config.labels,
        "temperature": companion.temperature,
        "temperature_images": companion.validation_images,
        "private": place.manifest.privacy is not None,
        "training_images": len(data.train),
        "alone": alone_of(predictor),
    }
    for side, (samples, scores) in (scores_by_side(predictor) if scored is None else scored).items():
        figures[side] = side_figures(place.site, samples, scores, companion.temperature)
    return figures


def side_figures(site: str, samples: Samples, scores: Scores, temperature: float | None) -> dict[str, Any]:
    predictions = [Predictions.of(site, samples, scores)]
    labels = samples.labels
    calibrated = with_temperature(scores, temperature) if temperature is not None else None
    return {
        "images": len(samples),
        "units": len(set(samples.units)),
        "unit_kind": samples.unit_kind,
        "bacc": _finite(balanced_accuracy(labels, scores)),
        "bacc_interval": _bounds(bootstrap_interval(predictions)),
        "bauc": _finite(balanced_auc(labels, scores)),
        "bauc_interval": _bounds(bootstrap_auc(predictions)),
        "ece": _finite(expected_calibration_error(labels, scores)),
        "ece_calibrated": None if calibrated is None else _finite(expected_calibration_error(labels, calibrated)),
        **_by_class(labels, scores),
    }


def _by_class(labels: Labels, scores: Scores) -> dict[str, Any]:
    """Recall and confusion of classes. Several labels of an image have no confusion: each has the recall of
    images with it, that of images without it (specificity), both from a probability of 0.5 on, and an AUC."""
    found = [_finite(value) for value in recalls(labels, scores).tolist()]
    if labels.ndim == 1:
        return {"recall_by_class": found, "confusion": confusion_matrix(*answered(labels, scores)).tolist()}
    areas = [_finite(value) for value in class_aucs(labels, scores).tolist()]
    return {"recall_by_class": found[1::2], "specificity_by_class": found[::2], "auc_by_class": areas}


def _finite(value: float) -> float | None:
    """None where a figure does not exist, as an AUC over a single class."""
    return float(value) if math.isfinite(value) else None


def _bounds(interval: Interval) -> list[float] | None:
    """The 95 % interval over patients (or lesions) drawn again; None where no draw gave a figure."""
    low, high = _finite(interval.low), _finite(interval.high)
    return None if low is None or high is None else [low, high]


def as_text(figures: dict[str, Any]) -> str:
    """For people: a line for each figure, then the confusion matrix of the test images."""
    digest = figures["model_sha256"][:16]
    lines = [f"model {figures['model']} of round {figures['round']} ({figures['kind']}), {digest}"]
    for side in ("validation", "test"):
        if side in figures:
            lines += _lines(side, figures[side])
    lines.append(alone_line(figures))
    if figures["temperature"] is None:
        lines.append(f"not calibrated: {why_no_temperature(figures['labels'])}")
    else:
        images = figures["temperature_images"]
        lines.append(f"temperature {figures['temperature']:.3f}, fitted on {images} validation images")
    if figures.get("clinical"):
        lines += finding_lines(figures)
    if figures.get("private"):
        lines.append("these figures are exact: do not pass them on, or epsilon is no longer valid")
    shown = figures.get("test") or figures.get("validation")
    if shown is not None and "confusion" in shown:
        lines += _matrix(figures["class_names"], shown["confusion"])
    elif shown is not None:
        lines += _label_rows(figures["class_names"], shown)
    return "\n".join(lines)


def why_no_temperature(labels: str) -> str:
    if labels == "many":
        return "a temperature is for classes that exclude each other"
    return "no temperature helps on held-back validation images, or there are too few of them"


def alone_line(figures: Mapping[str, Any]) -> str:
    """The comparison with training alone, for people; or how to get it."""
    alone = figures["alone"]
    if alone is None:
        how = "`site-agent evaluate --alone` trains as many rounds without the federation"
        return f"not compared with training alone: {how}"
    scores = "  ".join(f"{name} {figure_text(alone['test'], name)}" for name in ("bacc", "bauc"))
    return f"trained alone, {alone['rounds']} rounds on the same images: {scores} on the test images"


def figure_text(figures: Mapping[str, Any] | None, name: str) -> str:
    """A figure and its interval, if it has one, for people."""
    return "none" if figures is None else with_interval(figures, name)


def _lines(side: str, figures: dict[str, Any]) -> list[str]:
    after = figures["ece_calibrated"]
    counted = f"{figures['images']} images of {figures['units']} {plural(figures['unit_kind'])}"
    return [
        f"{side:<10} bacc {figure_text(figures, 'bacc')}  bauc {figure_text(figures, 'bauc')}  {counted}",
        f"{'':<10} ece {figure_text(figures, 'ece')}" + (f", {after:.3f} calibrated" if after is not None else ""),
    ]


def plural(unit: str) -> str:
    return "studies" if unit == "study" else f"{unit}s"


def _label_rows(names: list[str], shown: dict[str, Any]) -> list[str]:
    """A row for each label."""
    width = max(5, *(len(name) for name in names)) + 1
    columns = ("recall_by_class", "specificity_by_class", "auc_by_class")
    rows = zip(names, *(shown[column] for column in columns), strict=True)
    return [
        "each label by itself, recall and specificity from a probability of 0.5 on:",
        f"{'label':<{width}}{'recall':>13}{'specificity':>13}{'auc':>13}",
        *(f"{name:<{width}}" + "".join(_column(value) for value in row) for name, *row in rows),
    ]


def _column(value: float | None) -> str:
    return f"{'none':>13}" if value is None else f"{value:>13.3f}"


def _matrix(names: list[str], rows: list[list[int]]) -> list[str]:
    """Rows are true classes, columns predicted ones."""
    width = max(5, *(len(name) for name in names)) + 1
    head = f"{'true':<{width}}" + "".join(f"{name:>{width}}" for name in names)
    body = [
        f"{name:<{width}}" + "".join(f"{count:>{width}}" for count in row)
        for name, row in zip(names, rows, strict=True)
    ]
    return ["confusion, columns are predictions:", head, *body]


# The same hospital without a federation: same images, model, loss and number of rounds, nothing exchanged.
# What it gives is what a federation must be compared with: `--alone` shows it and keeps it for the model card, and the
# demo prints it.


def train_alone(
    manifest: Manifest,
    initial: InitialModel,
    recipe: Recipe,
    data: SiteData,
    *,
    rounds: int,
    device: Device = PROCESSOR,
    tell: Callable[[int, int], Any] | None = None,
) -> Scores:
    """Probabilities for the test images, of a model that has seen this hospital's training images only."""
    spec = spec_of(manifest.model.architecture, len(manifest.model.classes), recipe)
    method = Local(recipe.config, name="local", npr=registry.get(manifest.training.method).npr)
    model = build_initial(method, spec, initial.tensors)
    site = Site.of(data.name, data.train, model, spec, recipe.config, seed=recipe.seed, device=device)
    for number in range(1, rounds + 1):
        method.local_round(site, number)
        if tell is not None:
            tell(number, rounds)
    return method.predictor(site, site.model, "local")(data.test)
