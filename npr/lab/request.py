"""From what a user asks for to a plan: names, presets, options of differential privacy, and the plan itself.

Every name and value is checked before anything is loaded or written.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field, ValidationError

from lazaret.errors import ConfigError
from npr.config import DeviceSettings, LabelsOfImage, TrainConfig
from npr.dp.engine import check_upstream
from npr.dp.federation import PrivateFederation, PrivateSchedule
from npr.federation import Federation
from npr.lab.plan import (
    Aggregation,
    Cell,
    DataSettings,
    Frozen,
    Grid,
    LabPlan,
    ModelSettings,
    Settings,
    Value,
    make_cells,
)
from npr.lab.plugins import data_names
from npr.methods import registry
from security.dp.filter import MOST_DELTA
from security.dp.planner import PREFIX, Noise, PrivateSettings, Trains
from security.secagg.thresholds import LEAST_SURVIVORS

# Names that a user types.


def require_known(kind: str, name: str, known: Iterable[str], *, where: str | None = None) -> None:
    """Raises one clear error with the near matches when `name` is not among `known`."""
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are: {', '.join(names)}"
    raise ConfigError(f"unknown {kind} {name!r}", where=where, hint=hint)


# Presets of `npr-lab run`. Every value can be overridden by an option.

PAPER_METHODS = (
    "local",
    "fedavg",
    "fedprox",
    "moon",
    "creff",
    "fedrs",
    "fedlc",
    "balancefl",
    "fedrep",
    "fedrod",
    "fedbabu",
    "fedper",
    "fednpr",
    "fednpr-per",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Defaults of one preset; `data` is None where the user has to say where the images are."""

    summary: str
    data: str | None
    image_size: int
    architecture: str
    weights: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    folds: tuple[int | str, ...]
    fold_count: int = 5
    validation: float = 0.2
    rounds: int
    evaluate_every: int
    train: dict[str, Value] = field(default_factory=dict)


# Settings the paper prints: Adam, 80 rounds of one local epoch, ImageNet weights, five-fold cross-validation.
_PAPER: dict[str, Value] = {
    "learning_rate": 1e-3,
    "weight_decay": 5e-4,
    "batch_size": 64,
    "local_epochs": 1,
    "milestones": (60, 70),
    "augmentation": "paper",
}

_PAPER_ISIC = Preset(
    summary="the paper's skin lesion settings; needs --data fed-isic:PATH",
    data=None,
    image_size=224,
    architecture="efficientnet_b0",
    weights="timm",
    methods=PAPER_METHODS,
    seeds=(0,),
    folds=(0, 1, 2, 3, 4),
    rounds=80,
    evaluate_every=1,
    train={**_PAPER, "clusters": 4, "lambda_npr": 0.1},
)

PRESETS = {
    "quick": Preset(
        summary="generated lesions, small images, a few minutes: does everything work here?",
        data="generated:scale=0.03",
        image_size=48,
        architecture="tf_efficientnet_lite0",
        weights="package",
        methods=("local", "fedavg", "fedper", "fednpr", "fednpr-per"),
        seeds=(0,),
        folds=(0,),
        rounds=5,
        evaluate_every=1,
    ),
    "paper-isic": _PAPER_ISIC,
    "paper-ich": replace(
        _PAPER_ISIC,
        summary="the paper's intracranial haemorrhage settings; needs --data dicom:PATH",
        image_size=128,
        train={**_PAPER, "clusters": 2, "lambda_npr": 0.05},
    ),
}


def preset(name: str) -> Preset:
    require_known("preset", name, PRESETS, where="--preset")
    return PRESETS[name]


# Differential privacy as options of a cell: `dp.epsilon` turns it on, the others set the details. They are options like
# any other, so that `--grid dp.epsilon=null,8,3` compares accuracy at several epsilons in one run.


class PrivateOptions(Frozen):
    """What `dp.KEY` may be. The noise of the gradients follows from epsilon and the rest."""

    epsilon: float | None = Field(default=None, gt=0)
    delta: float = Field(default=1e-5, gt=0, le=MOST_DELTA)
    steps: int = Field(default=10, ge=1)
    rate: float = Field(default=0.25, gt=0, le=1)
    clip: float = Field(default=1.0, gt=0)
    counts_sigma: float = Field(default=5.0, gt=0)
    prototypes_sigma: float = Field(default=10.0, gt=0)
    prototypes_every: int = Field(default=5, ge=1)
    dimensions: int = Field(default=64, ge=1)
    trainable: Trains = "all"
    projection: int = Field(default=0, ge=0)
    views: int = Field(default=1, ge=1)
    noise: Noise = "site"
    colluders: int | None = Field(default=None, ge=0)
    least_survivors: int = Field(default=LEAST_SURVIVORS, ge=LEAST_SURVIVORS)

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> PrivateOptions:
        """From the options of a cell; those without the prefix are not for us."""
        given = {key.removeprefix(PREFIX): value for key, value in values.items() if key.startswith(PREFIX)}
        try:
            options = cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{PREFIX}{first['loc'][0]}: {first['msg'].lower()}", where="--dp") from error
        if given and "epsilon" not in given:
            raise ConfigError("differential privacy with no epsilon", where="--dp", hint="--dp epsilon=8")
        return options

    def plan(self, *, rounds: int, prototypes: bool) -> PrivateSchedule | None:
        """The schedule with the least noise that keeps the whole run within epsilon; None when privacy is off."""
        if self.epsilon is None:
            return None
        settings = PrivateSettings(
            steps=self.steps,
            rate=self.rate,
            counts_sigma=self.counts_sigma,
            prototypes_sigma=self.prototypes_sigma if prototypes else None,
            prototypes_every=self.prototypes_every,
            dimensions=self.dimensions,
            trainable=self.trainable,
            projection=self.projection,
            views=self.views,
        )
        schedule = settings.schedule(rounds=rounds, multiplier=1.0, clip=self.clip)
        names = ("dimensions", "trainable", "projection", "views")
        more: dict[str, Any] = {name: getattr(self, name) for name in names}
        more["micro_batch"] = 4096 if self.trainable == "head" else 64
        if self.noise == "site":
            return PrivateSchedule.for_epsilon(self.epsilon, delta=self.delta, schedule=schedule, **more)
        if prototypes:
            raise ConfigError("shared noise is for methods without NPR", where="--dp noise", hint="--methods fedavg")
        more |= {name: getattr(self, name) for name in ("noise", "colluders", "least_survivors")}
        return PrivateSchedule(schedule=schedule, cap=self.epsilon, delta=self.delta, **more)


KEYS = frozenset(PREFIX + name for name in PrivateOptions.model_fields)


def privacy_of(federation: Federation) -> dict[str, Any] | None:
    """What each site has spent, for the results; None without privacy."""
    if not isinstance(federation, PrivateFederation):
        return None
    spent = federation.spent()
    shared = federation.shared
    inside: dict[str, Any] = {} if shared is None else {"honest": shared.honest, "sites": shared.sites}
    if shared is not None:
        inside["alone"] = {name: round(epsilon, 4) for name, epsilon in federation.alone().items()}
    return inside | {
        "unit": federation.dataset.sites[0].train.unit_kind,
        "spent": {name: {"rdp": round(each.rdp, 4), "pld": round(each.pld, 4)} for name, each in spent.items()},
    }


OVERRIDES = ("fold_count", "validation", "rounds", "evaluate_every", "image_size", "architecture", "weights")
# Prediction is an axis of its own (npr/lab/predictors.py): no cell sets it.
SETTINGS = TrainConfig.model_fields.keys() - {"method", "method_options", "predict", "predict_mix"}


def method_rows() -> list[dict[str, Any]]:
    """The rows of `npr-lab list`, aliases as rows of their own."""
    return [
        {"name": entry.name, "summary": entry.summary, "npr": entry.npr, "alias_of": entry.alias_of}
        for entry in registry.rows()
    ]


def make_plan(
    preset: Preset,
    *,
    data: str | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    folds: Sequence[int | str] | None = None,
    grids: Mapping[str | None, Grid] | None = None,
    tuned: Mapping[str | None, Grid] | None = None,
    train: Mapping[str, Value] | None = None,
    overrides: Mapping[str, Any] | None = None,
    aggregation: Aggregation = "plain",
    computing: Mapping[str, Any] | None = None,
) -> LabPlan:
    """The preset with what was asked for put over it."""
    wanted = tuple(methods or preset.methods)
    for name in wanted:
        require_known("method", name, registry.names(), where="--methods")
    for where, values in (("--grid", grids or {}), ("--tune", tuned or {})):
        strangers = [name for name in values if name is not None and name not in wanted]
        if strangers:
            raise ConfigError(f"values for {strangers[0]!r}, which is not among the methods", where=where)
    source = data or preset.data
    if source is None:
        raise ConfigError("this preset needs the path of the images", hint=f"{preset.summary}")
    require_known("data source", source.partition(":")[0], data_names(), where="--data")
    chosen = {name: getattr(preset, name) for name in OVERRIDES} | dict(overrides or {})
    try:
        settings = Settings(
            data=DataSettings(
                source=source,
                folds=chosen["fold_count"],
                image_size=chosen["image_size"],
                validation=chosen["validation"],
            ),
            model=ModelSettings(architecture=chosen["architecture"], weights=chosen["weights"]),
            rounds=chosen["rounds"],
            evaluate_every=chosen["evaluate_every"],
            aggregation=aggregation,
            train={**preset.train, **(train or {})},
            computing=DeviceSettings(**(computing or {})),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error
    cells = make_cells(wanted, seeds or preset.seeds, folds or preset.folds, grids, tuned)
    for cell in cells:
        if "labels" in cell.values:
            raise ConfigError("all rows have the same labels", where="--grid or --tune", hint="--set labels=many")
        registry.build(train_config(settings, cell))
        private_plan(settings, cell)
    unlike: dict[str, Cell] = {}
    for cell in cells:
        unlike.setdefault(_training_of(settings, cell), cell)
    kept = tuple(unlike.values())
    return LabPlan(settings=settings, cells=kept, dropped=tuple(cell for cell in cells if cell not in kept))


# Keys of the regulariser that neither training without it nor any predictor reads.
_REGULARISER_ONLY = {
    "lambda_npr",
    "lambda_rounds",
    "lambda_added",
    "npr_balance",
    "logit_norm",
    "prototype_source",
    "prototype_momentum",
    "alternations",
}


def _training_of(settings: Settings, cell: Cell) -> str:
    """Equal for two cells that would come out the same: another name of a method, or a value that it does not read."""
    entry = registry.get(cell.method)
    config = train_config(settings, cell).model_dump(mode="json", exclude=set() if entry.npr else _REGULARISER_ONLY)
    private = {key: value for key, value in cell.values.items() if key in KEYS}
    return repr((entry.original, {**config, "method": entry.original}, private, cell.seed, cell.fold))


def private_plan(settings: Settings, cell: Cell) -> PrivateSchedule | None:
    """The cell's promise of privacy, or None when it makes none. Settings that would void it are refused here."""
    options = PrivateOptions.of({**settings.train, **cell.values})
    plan = options.plan(rounds=settings.rounds, prototypes=registry.get(cell.method).npr)
    if plan is not None:
        check_upstream(train_config(settings, cell))
    return plan


def labels_of(settings: Settings) -> LabelsOfImage:
    """Whether an image of the run's data has one label or several."""
    return "many" if settings.train.get("labels") == "many" else "one"


# A fixed value, since no cell mixes in training: the name of a configuration must not follow what sites use by default.
_NO_MIXTURE = {"predict_mix": 0.25}


def train_config(settings: Settings, cell: Cell) -> TrainConfig:
    """The training settings of a cell: those of the run, then the cell's own. Other keys are options of the method."""
    values = {**settings.train, **cell.values}
    for key in values.keys() & {"predict", "predict_mix"}:
        raise ConfigError(
            f"{key!r} is not a setting of training here",
            where=cell.variant,
            hint="every trained model is scored by every predictor; the table names them",
        )
    own = registry.get(cell.method).method.Options.model_fields
    for key in values:
        require_known("setting", key, {*SETTINGS, *own, *KEYS}, where=cell.method)
    fields = {key: value for key, value in values.items() if key in SETTINGS}
    options = {key: value for key, value in values.items() if key in own}
    # Whatever a method was registered to predict with has no say in a comparison.
    predict = "prototype" if fields.get("supervision") == "none" else "head"
    given = {**fields, **_NO_MIXTURE, "predict": predict, "method": cell.method, "method_options": options}
    return TrainConfig.parse(given, where=cell.variant)
