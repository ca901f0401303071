"""MODEL_CARD.md: what an exported model is, told by the signed manifest, this site's own log and its own measurements.

Every figure comes from there; the paragraphs on use and limits are the same for every model of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, Final

from security.secagg import thresholds
from site_agent.history import History
from site_agent.predictor import Predictor

USE: Final = """\
Research on the kind of images it was trained on, at the hospital that exported it or at one whose images look alike. It
gives probabilities for the classes above and for no others: an image of something else still gets one of them.

It is not a medical device and not for diagnosis. Nobody has examined it for safety, for fairness between groups of
patients, or on images of other devices than those of the hospitals that took part."""

LIMITS: Final = """\
- The figures are of this hospital's held-out images. They say little about other hospitals, cameras and years.
- The intervals draw patients (or what the table names) anew. They do not know how another training would have ended.
- Probabilities were calibrated for the mix of diagnoses at this hospital, if at all (see above).
- What other hospitals trained on is known to them alone. That they trained honestly is not proven.
- The files hold layers that were fitted to this hospital's patients. A model can remember what it has seen: before
  these files leave the hospital, treat them as derived from patients' data. Masks and epsilon are about what the agent
  sent, not about these files."""


def model_card(
    predictor: Predictor,
    sidecar: Mapping[str, Any],
    files: Mapping[str, str],
    figures: Mapping[str, Any],
    history: History,
) -> str:
    manifest = predictor.place.manifest
    parts = [
        f"# Model card: {manifest.federation}, run {manifest.run}, model of {predictor.place.site} after round "
        f"{predictor.trained.round}",
        "Written by `site-agent export` from the consortium's signed manifest and this site's own privacy log.",
        _section("What it is", _table(_what(predictor, sidecar))),
        _section("How it was trained", _table(_training(predictor, history))),
        _section("Settings", _table(sorted(manifest.training.settings.items()))),
        _section("Privacy", _privacy(predictor, history)),
        _section("How good it is here", _figures(figures)),
        _section("Files", _table((f"`{name}`", f"`{digest}`") for name, digest in files.items()), _checked(sidecar)),
        _section("What this card rests on", _table(_grounds(predictor, history)), _verdict(history)),
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


def _what(predictor: Predictor, sidecar: Mapping[str, Any]) -> list[tuple[str, Any]]:
    shape, input_ = sidecar["input"]["shape"], sidecar["input"]
    return [
        ("architecture", sidecar["architecture"]),
        ("classes", ", ".join(sidecar["classes"])),
        ("input", f"{shape[1]} x {shape[2]} pixels, {input_['colour']}, decoded by: {input_['decoding']}"),
        ("kind", f"{sidecar['predicts']} model, {predictor.trained.which} of this site"),
        ("predicts by", sidecar["predicts_by"]),
        ("SHA-256 over its tensors", f"`{predictor.trained.digest}`"),
    ]


def _training(predictor: Predictor, history: History) -> list[tuple[str, Any]]:
    manifest = predictor.place.manifest
    cohorts = list(history.cohorts.values())
    rows: list[tuple[str, Any]] = [
        ("federation", manifest.federation),
        ("hospitals in the manifest", len(manifest.roster)),
        ("method", manifest.training.method),
        ("rounds planned", manifest.training.rounds),
        ("rounds trained here", _rounds(history.trained)),
        ("sums this hospital was part of", len(cohorts)),
    ]
    if cohorts:
        rows.append(("hospitals in those sums", f"{min(cohorts)} to {max(cohorts)}, median {median(cohorts):g}"))
        rows.append(("dropouts in them", history.dropouts))
    rows.append(("rounds and attempts declined here", history.declined))
    rows.append(("weights of hospitals", manifest.training.weights))
    for opened in history.data:
        rows.append(("data of this hospital", f"{opened['purpose']}; legal basis: {opened['legal_basis']}"))
    return rows


def _rounds(numbers: tuple[int, ...]) -> str:
    return f"{len(numbers)} (from {min(numbers)} to {max(numbers)})" if numbers else "none"


def _privacy(predictor: Predictor, history: History) -> str:
    manifest = predictor.place.manifest
    numbers = manifest.aggregation
    quorum = thresholds.derive(n=len(manifest.roster), c=numbers.colluders, m=numbers.least_survivors)
    colluders = f"no more than {numbers.colluders} hospitals collude" if numbers.colluders else "no hospital colludes"
    text = (
        f"Updates left under masks. As long as {colluders} with the coordinator, all that can be opened are sums over "
        f"a quorum of the cohort ({quorum.t} where all hospitals take part). The hospitals checked the sums "
        f"(`{manifest.audit.mode}`)."
    )
    spent = history.privacy
    if manifest.privacy is None:
        return f"{text}\n\nNo differential privacy: what sums and the model itself tell about patients is not bounded."
    if spent is None:
        return f"{text}\n\nThe manifest asks for differential privacy, and this log has no booking under it."
    return (
        f"{text}\n\nDifferential privacy at this hospital, up to the head below: epsilon {spent['epsilon_total']} of "
        f"at most {spent['cap']} at delta {spent['delta']}; unit {spent['unit']}, neighbours {spent['relation']}, "
        f"accountant {spent['accountant']}."
    )


def _figures(figures: Mapping[str, Any]) -> str:
    rows = ["| | validation | test |", "|---|---|---|"]
    sides = [figures.get(side) for side in ("validation", "test")]
    for name, key in (("balanced accuracy", "bacc"), ("balanced AUC", "bauc"), ("calibration error", "ece")):
        rows.append(f"| {name} | {' | '.join(_shown(side, key) for side in sides)} |")
    rows.append(f"| calibration error, calibrated | {' | '.join(_shown(side, 'ece_calibrated') for side in sides)} |")
    for number, name in enumerate(figures["class_names"]):
        rows.append(f"| recall of {name} | {' | '.join(_recall(side, number) for side in sides)} |")
    rows.append(f"| images | {' | '.join(str(side['images']) if side else 'none' for side in sides)} |")
    kind = next((side["unit_kind"] for side in sides if side), "image")
    fitted = (
        f"Temperature {figures['temperature']:.3f}, fitted on the validation images."
        if figures["temperature"] is not None
        else "Not calibrated: there were too few validation images to fit a temperature."
    )
    return "\n".join(rows) + f"\n\n95 % intervals over {kind}s drawn again. {fitted}"


def _shown(side: Mapping[str, Any] | None, key: str) -> str:
    if side is None or side[key] is None:
        return "none"
    bounds = side.get(f"{key}_interval")
    return f"{side[key]:.3f}" + (f" ({bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else "")


def _recall(side: Mapping[str, Any] | None, number: int) -> str:
    value = side["recall_by_class"][number] if side else None
    return "none" if value is None else f"{value:.3f}"


def _checked(sidecar: Mapping[str, Any]) -> str:
    found = sidecar["checked"].get("onnx")
    if found is None:
        return ""
    return (
        f"ONNX Runtime and torch differed by {found['relative_difference']:.1e} relative at most on {found['images']} "
        f"images of this hospital (limit {found['limit']:.0e})."
    )


def _grounds(predictor: Predictor, history: History) -> list[tuple[str, Any]]:
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


def _verdict(history: History) -> str:
    if not history.findings:
        return "Every check of `privacy-audit verify` passed on that log."
    listed = "\n".join(f"- {finding}" for finding in history.findings)
    return f"`privacy-audit verify` has findings on that log, which put the above in doubt:\n\n{listed}"
