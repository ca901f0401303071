"""The next manifest from `federation.toml` and the enrolled members.

Everything that can be derived is: the colluder bound from the roster, the audit mode from its size, clips from the
learning rate and the initial statistics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import ValidationError

from lazaret.errors import ConfigError, PolicyViolation
from security.consortium.plan import FederationPlan
from security.dp.filter import check_delta
from security.dp.planner import PrivateSettings
from security.identity.manifest import (
    Aggregation,
    Audit,
    ClassNames,
    GroupTable,
    Manifest,
    Member,
    Model,
    PluginFile,
    Privacy,
    Processing,
    Revocation,
    ScoreTable,
    Setting,
    Timing,
    Training,
    decimal_text,
    describe,
)
from security.identity.membership import COVERED_ROSTER, DAY_MS
from security.identity.pinned_files import InitialModel, blocks_of, initial_state_hash, plugin_digest
from security.identity.rules import TWO_SITES_HINT
from security.secagg import thresholds
from security.secagg.clips import Clips
from security.secagg.layout import Block, Layout
from security.secagg.scores import score_slots

# A cross-entropy of 16 per sample is far worse than guessing among a million classes.
LOSS_PER_SAMPLE_EXPONENT = 4


def build(
    plan: FederationPlan,
    model: InitialModel,
    *,
    federation: str,
    previous: Manifest | None,
    roster: Sequence[Member],
    coordinator: Member,
    revocations: Sequence[Revocation],
    root_ml_dsa: str | None = None,
    plugin: bytes | None = None,
    now_ms: int,
) -> Manifest:
    """The next manifest of this federation.

    :param plugin: the content of the file that the plan names as the method's own.
    """
    if plan.audit.ml_dsa != (root_ml_dsa is not None):
        raise ConfigError("the root's ML-DSA key belongs to ml_dsa = true", where="federation.toml [audit] ml_dsa")
    refuse_two_sites(plan, len(roster))
    _check_private(plan, _settings(plan, model))
    _check_labels(plan, model)
    layout, initial_state = _layout(plan, model, [member.id for member in roster], previous)
    return Manifest(
        federation=federation,
        version=previous.version + 1 if previous else 1,
        previous=previous.digest.hex() if previous else None,
        run=plan.run,
        issued_at_ms=now_ms,
        expires_at_ms=now_ms + plan.timing.manifest_days * DAY_MS,
        roster=tuple(sorted(roster, key=lambda member: member.id.encode())),
        coordinator=coordinator,
        model=_model(plan, model, initial_state),
        training=_training(plan, model, _plugin(plan, model, plugin)),
        aggregation=_aggregation(plan, len(roster), layout, previous),
        audit=_audit(plan, len(roster)),
        timing=Timing(**plan.timing.model_dump(exclude={"manifest_days"})),
        privacy=_privacy(plan),
        processing=Processing(**plan.processing.model_dump()),
        revocations=tuple(revocations),
        scores=_scores(plan),
        root_ml_dsa=root_ml_dsa,
    )


def refuse_two_sites(plan: FederationPlan, sites: int) -> None:
    if sites < 2:
        raise PolicyViolation(f"{sites} enrolled site is no federation", where="roster", hint="enrol more sites first")
    if sites == 2 and not (plan.aggregation.allow_two_sites and plan.privacy):
        raise PolicyViolation("a federation of two sites is refused", where="roster", hint=TWO_SITES_HINT)


def _check_private(plan: FederationPlan, settings: Mapping[str, bool | int | float | str]) -> None:
    """A model that was exported for private rounds is never trained without them."""
    private = PrivateSettings.of(settings, where="federation.toml [training.settings]")
    if private is None:
        return
    if plan.privacy is None:
        raise ConfigError(
            "the initial model was exported for private rounds, but the plan has no [privacy]",
            where="federation.toml [privacy]",
            hint="write the table, or export the model without --dp",
        )
    if private.engine == "auto":
        raise ConfigError(
            "the initial model does not say which engine computes its private gradients",
            where="federation.toml [model] initial",
            hint="make it with `npr-lab model --dp`, which compares them with autograd and writes the result down",
        )
    if private.steps != plan.training.steps:
        raise ConfigError(
            f"steps = {plan.training.steps}, but private rounds have {private.steps}",
            where="federation.toml [training] steps",
            hint="the clips follow from the steps that a round really has",
        )


def _check_labels(plan: FederationPlan, model: InitialModel) -> None:
    """The exporter has looked whether the method can be trained on several labels of an image; a plan cannot."""
    exported = json.loads(model.metadata.get("settings", "{}"))
    if plan.training.settings.get("labels", "one") != "one" and "labels" not in exported:
        raise ConfigError(
            "the initial model was not exported for several labels of an image",
            where="federation.toml [training.settings] labels",
            hint="make it with `npr-lab model --set labels=many`, which refuses methods that cannot be trained so",
        )


def _layout(
    plan: FederationPlan, model: InitialModel, roster: Sequence[str], previous: Manifest | None
) -> tuple[Layout, str]:
    shared = model.shared(plan.model.personal, local_statistics=plan.training.local_statistics)
    numbers = plan.aggregation
    clips = _clips(plan, _settings(plan, model))
    blocks = [_override(block, numbers.clip_exponents) for block in blocks_of(shared, clips, str(model.path))]
    cap = numbers.weight_cap
    layout = Layout.of(
        blocks,
        roster_size=len(roster),
        weight_cap=cap,
        ring_bits=numbers.ring_bits,
        loss_exponent=cap.bit_length() + LOSS_PER_SAMPLE_EXPONENT if numbers.report_metrics else None,
        hits_maximum=cap if numbers.report_metrics else None,
        scores=_score_slots(plan, roster, previous),
    )
    return layout, initial_state_hash(layout, shared)


def _score_slots(plan: FederationPlan, roster: Sequence[str], previous: Manifest | None) -> tuple[str, ...]:
    """As many as the number of consenting sites allows; the rules of a manifest compute the same.

    The list stays the same for a run: it may name a site that has left since.
    """
    if plan.scores is None:
        return ()
    before = previous.scores.sites if previous and previous.scores and previous.run == plan.run else ()
    for site in plan.scores.sites:
        if site not in (*roster, *before):
            raise ConfigError(f"{site} is not enrolled", where="federation.toml [scores] sites")
    c, m = _thresholds(plan, len(roster))
    return score_slots(
        roster=len(roster),
        consenting=len(set(plan.scores.sites) & set(roster)),
        c=c,
        m=m,
        single_history=plan.aggregation.single_history,
        groups=plan.aggregation.groups is not None,
        private=plan.privacy is not None,
    )


def _scores(plan: FederationPlan) -> ScoreTable | None:
    asked = plan.scores
    if asked is None:
        return None
    gain = decimal_text(asked.least_gain)
    return ScoreTable(
        figure=asked.figure, sites=tuple(sorted(set(asked.sites))), patience=asked.patience, least_gain=gain
    )


def _settings(plan: FederationPlan, model: InitialModel) -> dict[str, bool | int | float | str]:
    """The plan's settings; an exporter's are taken over, and must not be contradicted: its config hash is of them."""
    asked: dict[str, bool | int | float | str] = dict(plan.training.settings)
    settings = dict(json.loads(model.metadata.get("settings", "{}")))
    for name, value in settings.items():
        if asked.setdefault(name, value) != value:
            raise ConfigError(
                f"{name} = {asked[name]}, but the initial model was exported for {value}",
                where="federation.toml [training.settings]",
                hint="leave it out here, or export the initial model again",
            )
    return asked


def _clips(plan: FederationPlan, settings: Mapping[str, bool | int | float | str]) -> Clips:
    """How far a weight can go in a round. Momentum counts for plain SGD only: Adam normalises its steps."""
    momentum = settings.get("momentum", 0) if settings.get("optimizer") == "sgd" else 0
    return Clips(
        learning_rate=_number("learning_rate", settings.get("learning_rate"), above=0),
        steps=plan.training.steps,
        momentum=_number("momentum", momentum, below=1),
        margin=float(plan.aggregation.clip_margin),
    )


def _number(name: str, value: object, *, above: float = -1, below: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < below:
        raise ConfigError(
            f"{name} is missing or not a usable number",
            where="federation.toml [training.settings]",
            hint="the clips follow from learning_rate x steps",
        )
    return float(value)


def _override(block: Block, exponents: dict[str, int]) -> Block:
    for pattern, exponent in exponents.items():
        if fnmatchcase(block.name, pattern):
            return block.with_clip(exponent)
    return block


def _model(plan: FederationPlan, model: InitialModel, initial_state: str) -> Model:
    asked, metadata = plan.model, model.metadata
    architecture = asked.architecture or metadata.get("architecture")
    code = asked.code_digest or metadata.get("code_digest")
    classes = _classes(asked.classes, metadata.get("classes"))
    if not (architecture and code and classes):
        raise ConfigError(
            "architecture, code_digest and classes are needed",
            where="federation.toml [model]",
            hint="write them there, or export the initial model with a tool that writes them into its metadata",
        )
    return Model(
        architecture=architecture,
        code_digest=code,
        initial_state=initial_state,
        initial_file=model.digest,
        classes=classes,
    )


def _classes(asked: ClassNames | None, exported: str | None) -> ClassNames | None:
    """The names in their order. An exporter's must not be contradicted: its head has one output for each."""
    if exported is None:
        return asked
    names = tuple(json.loads(exported))
    if asked not in (None, names):
        raise ConfigError(
            f"classes are not those that the initial model was exported for ({', '.join(names)})",
            where="federation.toml [model] classes",
            hint="leave it out there, or export the initial model again",
        )
    return names


def _plugin(plan: FederationPlan, model: InitialModel, source: bytes | None) -> PluginFile | None:
    """The method's own file, named by the plan; what the initial model was exported with must be the same."""
    found = None if source is None else plugin_digest(source)
    exported = model.metadata.get("plugin")
    if found != exported and (exported is not None or "method" in model.metadata):
        raise ConfigError(
            f"the plugin has SHA-256 {found or 'none'}, the initial model was exported with {exported or 'none'}",
            where="federation.toml [training] plugin",
            hint="name the file that `npr-lab --plugin FILE model` was given, or export the initial model again",
        )
    if plan.training.plugin is None or found is None:
        return None
    try:
        return PluginFile(name=Path(plan.training.plugin).name, sha256=found)
    except ValidationError:
        raise ConfigError(
            "the file's name has other characters than letters, digits, '.', '_' and '-', or more than 64",
            where="federation.toml [training] plugin",
            hint="rename the file",
        ) from None


def _training(plan: FederationPlan, model: InitialModel, plugin: PluginFile | None) -> Training:
    asked = plan.training
    method = asked.method or model.metadata.get("method")
    if not method or method != model.metadata.get("method", method):
        raise ConfigError(
            "method is missing, or not the one that the initial model was exported for",
            where="federation.toml [training] method",
        )
    listed = asked.config_hashes or tuple(model.metadata.get("config_hashes", "").split())
    if not listed:
        raise ConfigError(
            "no config hash is given",
            where="federation.toml [training] config_hashes",
            hint="list the hash of every training configuration that sites may be asked to run",
        )
    try:
        return Training(
            method=method,
            settings={name: _setting(value) for name, value in sorted(_settings(plan, model).items())},
            config_hashes=tuple(sorted(set(listed))),
            rounds=asked.rounds,
            weights=asked.weights,
            local_statistics=asked.local_statistics,
            isolation=asked.isolation,
            plugin=plugin,
        )
    except ValidationError as error:  # what a file's metadata say was not checked when it was read
        raise ConfigError(describe(error), where="federation.toml [training]") from None


def _setting(value: bool | int | float | str) -> Setting:
    return decimal_text(value) if isinstance(value, float) else value


def _aggregation(plan: FederationPlan, sites: int, layout: Layout, previous: Manifest | None) -> Aggregation:
    asked = plan.aggregation
    colluders, least = _thresholds(plan, sites)
    return Aggregation(
        colluders=colluders,
        least_survivors=least,
        single_history=asked.single_history,
        allow_two_sites=asked.allow_two_sites,
        key_agreement=asked.key_agreement,
        server_rule="mean",
        movement_window=asked.movement_window,
        movement_factor=decimal_text(asked.movement_factor),
        groups=_groups(plan, previous),
        layout=layout,
    )


def _thresholds(plan: FederationPlan, sites: int) -> tuple[int, int]:
    """Colluders and least survivors, asked for or by the size of the roster."""
    asked = plan.aggregation
    default = thresholds.default_colluders(sites, two_sites=asked.allow_two_sites)
    colluders = default if asked.colluders is None else asked.colluders
    return colluders, asked.least_survivors or (2 if sites == 2 else thresholds.LEAST_SURVIVORS)


def _groups(plan: FederationPlan, previous: Manifest | None) -> GroupTable | None:
    asked, before = plan.aggregation, None
    if previous is not None and previous.run == plan.run and previous.aggregation.groups is not None:
        before = previous.aggregation.groups.shown or previous.digest.hex()
    if asked.groups is None:
        if asked.secrets:
            raise ConfigError("secrets of a draw, but no groups", where="federation.toml [aggregation] groups")
        return None
    secrets = dict(sorted(asked.secrets.items()))
    if secrets and before is None:
        raise ConfigError(
            f"secrets of a draw, but no manifest of run {plan.run!r} has shown the commitments",
            where="federation.toml [aggregation.secrets]",
            hint="publish with `groups` and without secrets first; then each site prints its own (`site-agent draw`)",
        )
    return GroupTable(count=asked.groups, combine=asked.combine, secrets=secrets, shown=before if secrets else None)


def _audit(plan: FederationPlan, sites: int) -> Audit:
    asked = plan.audit
    covered = sites <= COVERED_ROSTER if asked.mode == "auto" else asked.mode == "covered"
    return Audit(
        mode="covered" if covered else "sampled",
        chunks_per_site=0 if covered else asked.chunks_per_site,
        strict=asked.strict,
        vote_drop=None if asked.vote_drop is None else decimal_text(asked.vote_drop),
        max_rounds_unwitnessed=asked.max_rounds_unwitnessed,
        witnesses=asked.witnesses,
    )


def _privacy(plan: FederationPlan) -> Privacy | None:
    asked = plan.privacy
    if asked is None:
        return None
    texts = {name: decimal_text(getattr(asked, name)) for name in ("epsilon", "delta", "clip", "noise_floor")}
    check_delta(float(asked.delta), least_patients=asked.least_patients, where="federation.toml [privacy] delta")
    return Privacy(**texts, unit=asked.unit, least_patients=asked.least_patients)
