"""MODEL_CARD.md: what an exported model is, from the signed manifest, this site's log and its own measurements.

Every figure comes from there; the paragraphs on use and limits are the same for every model of this package.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from lazaret.terminal import as_range
from security.clock import SystemClock
from security.secagg import thresholds
from site_agent.trainer.evaluation import alone_line, figure_text, why_no_temperature
from site_agent.trainer.personal_state import LoggedRun
from site_agent.trainer.predictor import Predictor

# How a model was made, from this site's privacy log: rounds, cohorts, privacy spent, newest checkpoint.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHistory:
    """Read from the log up to its newest checkpoint, after every check of `privacy-audit verify` on it.

    :ivar cohorts: sites in the sum of each round that this site took part in, by round.
    :ivar privacy: the newest booking under differential privacy, None if there is none.
    :ivar findings: what the verifier found, as `code: detail`; empty for a clean log.
    """

    origin: str
    size: int
    root: str
    witnessed: int
    findings: tuple[str, ...]
    trained: tuple[int, ...]
    cohorts: dict[int, int]
    dropouts: int
    declined: int
    privacy: dict[str, Any] | None
    data: tuple[dict[str, Any], ...]
    package: dict[str, Any] | None


def history_of(logged: LoggedRun, upto: int) -> ModelHistory:
    """What led to the model after round `upto`. Privacy is told up to the checkpoint: what is spent is spent."""
    records = logged.records
    before = [(record.round, record) for record in records if record.round is not None and record.round <= upto]
    survivors = [(number, record.body) for number, record in before if record.type == "secagg.survivors"]
    booked = [record.body for record in records if record.type in ("dp.committed", "dp.reserved")]
    started = [record.body for record in records if record.type == "agent.start"]
    return ModelHistory(
        origin=logged.origin,
        size=logged.size,
        root=logged.root,
        witnessed=logged.witnessed,
        findings=logged.findings,
        trained=tuple(dict.fromkeys(number for number, record in before if record.type == "train.done")),
        cohorts={number: body["count"] for number, body in survivors},
        dropouts=sum(len(body["dropouts"]) for _, body in survivors),
        declined=sum(record.type == "round.declined" for _, record in before),
        privacy=booked[-1] if booked else None,
        data=tuple(_once(record.body for record in records if record.type == "data.opened")),
        package=started[-1] if started else None,
    )


def _once(bodies: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for body in bodies:
        if body not in found:
            found.append(body)
    return found


USE: Final = """\
Research on the kind of images it was trained on, at the hospital that exported it or at one with similar images. It
gives probabilities for the classes above and for no others: an image of something else still gets one of them.

It is not a medical device and not for diagnosis. It has not been examined for safety, for fairness between groups of
patients, or on images of other devices than those of the hospitals that took part."""

LIMITS: Final = """\
- The figures are of this hospital's held-out images. They say little about other hospitals, cameras and years.
- The intervals draw patients (or what the table names) again. They do not cover the variation between two trainings.
- Probabilities were calibrated for the mix of diagnoses at this hospital, if at all (see above).
- What other hospitals trained on is known to them alone. That they trained honestly is not proven.
- The files hold layers that were fitted to this hospital's patients. A model can contain information about single
  patients: before these files leave the hospital, treat them as derived from patients' data. Masks and epsilon are
  about what the agent sent, not about these files."""


HOSPITAL_ONLY: Final = "hospital-only.md"
NOT_SHOWN: Final = f"""\
This hospital trains under differential privacy. Exact figures of its images are not covered by epsilon, and so they
are not in this card: accuracy, recall of each class, numbers of images and the calibration are in
`{HOSPITAL_ONLY}`, which stays at the hospital. The files predict without a temperature of this hospital and for
all classes."""


def hospital_only(figures: Mapping[str, Any]) -> str:
    """The figures that a card has without differential privacy."""
    notice = "Exact figures of this hospital's images. Epsilon does not cover them: do not pass this file on."
    return f"# For this hospital only\n\n{notice}\n\n{_figures(figures)}\n"


def model_card(
    predictor: Predictor,
    sidecar: Mapping[str, Any],
    files: Mapping[str, str],
    figures: Mapping[str, Any],
    history: ModelHistory,
) -> str:
    manifest = predictor.place.manifest
    written = dt.datetime.fromtimestamp(SystemClock().now_ms() / 1000, dt.UTC)
    parts = [
        f"# Model card: {manifest.federation}, run {manifest.run}, model of {predictor.place.site} after round "
        f"{predictor.trained.round}",
        f"Written on {written:%Y-%m-%d} (UTC) by `site-agent export` from the consortium's signed manifest and this "
        "site's own privacy log.",
        _section("What it is", _table(_what(predictor, sidecar))),
        _section("How it was trained", _table(_training(predictor, history))),
        _section("Settings", _table(sorted(manifest.training.settings.items()))),
        _section("Privacy", _privacy(predictor, history)),
        _section("How good it is here", _figures(figures) if manifest.privacy is None else NOT_SHOWN),
        _section(
            "Files",
            _table((f"`{name}`", f"`{digest}`") for name, digest in files.items()),
            _checked(sidecar, "of this hospital" if manifest.privacy is None else "of noise"),
        ),
        _section("Sources of this card", _table(_sources(predictor, history)), _verdict(history)),
        _section("Intended use", USE),
        _section("Limits", LIMITS),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, *parts: str) -> str:
    return "\n\n".join([f"## {title}", *(part for part in parts if part)])


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return str(value).replace("|", "\\|").replace("\n", " ")

    return "\n".join(["| | |", "|---|---|", *(f"| {cell(name)} | {cell(value)} |" for name, value in rows)])


_LABELS: Final = {
    "one": "one: probabilities of the classes add up to 1",
    "many": "any number: each label has a probability of its own",
}


def _what(predictor: Predictor, sidecar: Mapping[str, Any]) -> list[tuple[str, Any]]:
    shape, input_ = sidecar["input"]["shape"], sidecar["input"]
    return [
        ("architecture", sidecar["architecture"]),
        ("classes", ", ".join(sidecar["classes"])),
        ("labels of an image", _LABELS[sidecar["labels"]]),
        ("input", f"{shape[1]} x {shape[2]} pixels, {input_['colour']}, decoded by: {input_['decoding']}"),
        ("kind", f"{sidecar['predicts']} model, {predictor.trained.which} of this site"),
        ("predicts by", sidecar["predicts_by"]),
        ("SHA-256 over its tensors", f"`{predictor.trained.digest}`"),
    ]


def _training(predictor: Predictor, history: ModelHistory) -> list[tuple[str, Any]]:
    manifest = predictor.place.manifest
    cohorts = list(history.cohorts.values())
    rows: list[tuple[str, Any]] = [
        ("federation", manifest.federation),
        ("hospitals in the manifest", len(manifest.roster)),
        ("method", manifest.training.method),
        ("rounds planned", manifest.training.rounds),
        ("rounds trained here", _rounds(history.trained)),
        ("device and precision here", predictor.trained.trained_on),
        ("sums this hospital was part of", len(cohorts)),
    ]
    if cohorts:
        rows.append(("hospitals in those sums", f"{min(cohorts)} to {max(cohorts)}, median {median(cohorts):g}"))
        rows.append(("dropouts in them", history.dropouts))
    rows.append(("rounds and attempts declined here", history.declined))
    rows.append(("weights of hospitals", manifest.training.weights))
    for opened in history.data:
        entry = f"{opened['purpose']}; legal basis: {opened['legal_basis']}; {opened['change']}"
        rows.append(("data of this hospital", entry))
    return rows


def _rounds(numbers: tuple[int, ...]) -> str:
    return f"{len(numbers)} (from {min(numbers)} to {max(numbers)})" if numbers else "none"


def _privacy(predictor: Predictor, history: ModelHistory) -> str:
    manifest = predictor.place.manifest
    numbers = manifest.aggregation
    quorum = thresholds.derive(n=len(manifest.roster), c=numbers.colluders, m=numbers.least_survivors)
    colluders = f"no more than {numbers.colluders} hospitals collude" if numbers.colluders else "no hospital colludes"
    text = (
        f"Updates were masked before they were sent. As long as {colluders} with the coordinator, only sums over a "
        f"quorum of the cohort can be opened ({quorum.t} where all hospitals take part). The hospitals checked the "
        f"sums (`{manifest.audit.mode}`)."
    )
    spent = history.privacy
    if manifest.privacy is None:
        return f"{text}\n\nNo differential privacy: what sums and the model reveal about patients is not bounded."
    if spent is None:
        return f"{text}\n\nThe manifest demands differential privacy, but this log has no booking for it."
    return (
        f"{text}\n\nDifferential privacy at this hospital, up to the checkpoint below: epsilon "
        f"{spent['epsilon_total']} of at most {spent['cap']} at delta {spent['delta']}; unit {spent['unit']}, "
        f"neighbours {spent['relation']}, "
        f"accountant {spent['accountant']}.{_shared(spent)}"
    )


def _shared(spent: Mapping[str, Any]) -> str:
    honest = [event["honest"] for event in spent["mechanisms"] if event["kind"] == "shared-sgd"]
    if not honest:
        return ""
    return (
        f" Noise was shared: this figure is inside the sum, and counts on {min(honest)} honest survivors of every sum, "
        "on the quorum and on one release of each sum. `privacy-audit epsilon` also gives the figure alone, if all "
        "other hospitals collude."
    )


def _figures(figures: Mapping[str, Any]) -> str:
    rows = ["| | validation | test |", "|---|---|---|"]
    sides = [figures.get(side) for side in ("validation", "test")]
    named = {"bacc": "balanced accuracy", "bauc": "balanced AUC", "ece": "calibration error"}
    named["ece_calibrated"] = "calibration error, calibrated"
    for key, name in named.items():
        rows.append(f"| {name} | {' | '.join(figure_text(side, key) for side in sides)} |")
    for number, name in enumerate(figures["class_names"]):
        for key, word in (("recall", "recall of"), ("specificity", "specificity for"), ("auc", "AUC of")):
            if key == "recall" or any(side and f"{key}_by_class" in side for side in sides):
                values = " | ".join(_by_class(side, f"{key}_by_class", number) for side in sides)
                rows.append(f"| {word} {name} | {values} |")
    rows.append(f"| images | {' | '.join(as_range(side['images'] if side else 0) for side in sides)} |")
    rows.append(f"| {as_range(figures['training_images'])} training images | | |")
    kind = next((side["unit_kind"] for side in sides if side), "image")
    fitted = (
        f"Temperature {figures['temperature']:.3f}, fitted on the validation images."
        if figures["temperature"] is not None
        else f"Not calibrated: {why_no_temperature(figures['labels'])}."
    )
    compared = alone_line(figures)
    compared = f"{compared[0].upper()}{compared[1:]}."
    return "\n".join(rows) + f"\n\n95 % intervals over {kind}s drawn again. {fitted}\n\n{compared}"


def _by_class(side: Mapping[str, Any] | None, key: str, number: int) -> str:
    value = side[key][number] if side else None
    return "none" if value is None else f"{value:.3f}"


def _checked(sidecar: Mapping[str, Any], whose: str) -> str:
    found = sidecar["checked"].get("onnx")
    if found is None:
        return ""
    return (
        f"ONNX Runtime and torch differed by {found['absolute_difference']:.1e} at most, "
        f"{found['relative_difference']:.1e} of an image's largest number, on {found['images']} images {whose} "
        f"(limit {found['limit']['absolute']:.0e} and {found['limit']['relative']:.0e})."
    )


def _sources(predictor: Predictor, history: ModelHistory) -> list[tuple[str, Any]]:
    manifest = predictor.place.manifest
    rows: list[tuple[str, Any]] = [
        ("manifest", f"version {manifest.version}, SHA-256 `{manifest.digest.hex()}`"),
        ("initial model", f"SHA-256 `{manifest.model.initial_file}`"),
        ("learning code", f"SHA-256 `{manifest.model.code_digest}`"),
        ("privacy log", f"{history.origin}, first {history.size} entries, root `{history.root}`"),
        ("of them seen by witnesses", history.witnessed),
    ]
    if history.package is not None:
        rows.append(("package", f"{history.package['version']}, SHA-256 `{history.package['package']}`"))
    return rows


def _verdict(history: ModelHistory) -> str:
    if not history.findings:
        return "Every check of `privacy-audit verify` passed on that log."
    listed = "\n".join(f"- {finding}" for finding in history.findings)
    return f"`privacy-audit verify` has findings on that log, so that the statements above may be wrong:\n\n{listed}"
