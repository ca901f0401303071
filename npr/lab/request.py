"""From what a user asks for to a plan: every name and value is checked before anything is loaded or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from npr.config import TrainConfig
from npr.dp.federation import PrivatePlan
from npr.dp.upstream import check_upstream
from npr.lab import private
from npr.lab.names import require_known
from npr.lab.plan import Cell, DataSettings, Grid, ModelSettings, Plan, Settings, Value, make_cells
from npr.lab.presets import Preset
from npr.methods import registry
from security.errors import ConfigError

OVERRIDES = ("fold_count", "rounds", "evaluate_every", "image_size", "architecture", "weights")
SETTINGS = TrainConfig.model_fields.keys() - {"method", "method_options"}
SOURCES = ("generated", "ham10000", "npz", "csv", "folders", "dicom", "fed-isic")


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
    train: Mapping[str, Value] | None = None,
    overrides: Mapping[str, Any] | None = None,
    aggregation: Literal["plain", "secure"] = "plain",
) -> Plan:
    """The preset with what was asked for put over it."""
    wanted = tuple(methods or preset.methods)
    for name in wanted:
        require_known("method", name, registry.names(), where="--methods")
    strangers = [name for name in grids or {} if name is not None and name not in wanted]
    if strangers:
        raise ConfigError(f"a grid for {strangers[0]!r}, which is not among the methods", where="--grid")
    source = data or preset.data
    if source is None:
        raise ConfigError("this preset needs to be told where the images are", hint=f"{preset.summary}")
    require_known("data source", source.partition(":")[0], SOURCES, where="--data")
    chosen = {name: getattr(preset, name) for name in OVERRIDES} | dict(overrides or {})
    try:
        settings = Settings(
            data=DataSettings(
                source=source,
                folds=chosen["fold_count"],
                image_size=chosen["image_size"],
            ),
            model=ModelSettings(architecture=chosen["architecture"], weights=chosen["weights"]),
            rounds=chosen["rounds"],
            evaluate_every=chosen["evaluate_every"],
            aggregation=aggregation,
            train={**preset.train, **(train or {})},
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error
    cells = make_cells(wanted, seeds or preset.seeds, folds or preset.folds, grids)
    for cell in cells:
        registry.build(train_config(settings, cell))
        private_plan(settings, cell)
    return Plan(settings=settings, cells=cells)


def private_plan(settings: Settings, cell: Cell) -> PrivatePlan | None:
    """The cell's promise of privacy, or None when it makes none. Settings that would void it are refused here."""
    options = private.PrivateOptions.of({**settings.train, **dict(cell.options)})
    plan = options.plan(rounds=settings.rounds, prototypes=registry.get(cell.method).npr)
    if plan is not None:
        check_upstream(train_config(settings, cell))
    return plan


def train_config(settings: Settings, cell: Cell) -> TrainConfig:
    """The training settings of a cell: those of the run, then the cell's own. Other keys are options of the method."""
    values = {**settings.train, **dict(cell.options)}
    own = registry.get(cell.method).method.Options.model_fields
    for key in values:
        require_known("setting", key, {*SETTINGS, *own, *private.KEYS}, where=cell.method)
    fields = {key: value for key, value in values.items() if key in SETTINGS}
    options = {key: value for key, value in values.items() if key in own}
    return TrainConfig.parse({**fields, "method": cell.method, "method_options": options}, where=cell.variant)
