"""A plan: fixed settings and the cells (method x hyper-parameters x fold x seed) to run under them."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from lazaret.errors import ConfigError
from npr.config import DeviceSettings

Scalar = bool | int | float | str | None
Value = Scalar | tuple[Scalar, ...]
Grid = Mapping[str, Sequence[Value]]


class Frozen(BaseModel):
    """Base of the plan's records: immutable, and a key nobody knows is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSettings(Frozen):
    """Which images, at which size, and how they are divided into folds.

    :ivar validation: the share of a fold's training images that is held back to choose by, whole patients or lesions.
    """

    source: str
    folds: int = Field(default=5, ge=2)
    validation: float = Field(default=0.2, gt=0.0, le=0.5)
    image_size: int = Field(default=64, ge=8)
    seed: int = Field(default=0, ge=0)


class ModelSettings(Frozen):
    """The network every site starts from."""

    architecture: str = "tf_efficientnet_lite0"
    weights: str = "none"


# Sums in floating point, or by the protocol in the default ring or in that of 16 bits.
Aggregation = Literal["plain", "secure", "secure-16"]


class Settings(Frozen):
    """What all cells of one results directory have in common, so that they may be compared."""

    data: DataSettings
    model: ModelSettings = ModelSettings()
    rounds: int = Field(default=15, ge=1)
    evaluate_every: int = Field(default=5, ge=1)
    aggregation: Aggregation = "plain"
    computing: DeviceSettings = DeviceSettings()
    train: dict[str, Value] = {}


class Cell(Frozen):
    """One run: a method with its options on one fold from one seed.

    :ivar options: what makes it another row of the table.
    :ivar tuned: values that are tried for one row; the validation side says which of them is judged on test images.
    """

    method: str
    seed: int = Field(ge=0)
    fold: int | str
    options: tuple[tuple[str, Value], ...] = ()
    tuned: tuple[tuple[str, Value], ...] = ()

    @property
    def variant(self) -> str:
        """The method as a row of a table: its name, and what was changed."""
        return f"{self.method}[{format_options(self.options)}]" if self.options else self.method

    @property
    def key(self) -> str:
        tried = f" with {format_options(self.tuned)}" if self.tuned else ""
        return f"{self.variant}{tried} seed={self.seed} fold={self.fold}"

    @property
    def values(self) -> dict[str, Value]:
        """Everything the cell sets: its row's options and the values it tries."""
        return {**dict(self.options), **dict(self.tuned)}

    @property
    def slug(self) -> str:
        """A file name: readable, and unique by the digest at its end."""
        readable = re.sub(r"[^A-Za-z0-9.+=-]+", "_", self.key.partition(" seed=")[0])[:80]
        return f"{readable}.s{self.seed}.f{self.fold}.{_digest(self.model_dump(mode='json'))[:8]}"


class LabPlan(Frozen):
    """Settings and the cells in the order in which they run.

    :ivar dropped: cells that were asked for and would only repeat another one.
    """

    settings: Settings
    cells: tuple[Cell, ...]
    dropped: tuple[Cell, ...] = ()


def make_cells(
    methods: Sequence[str],
    seeds: Sequence[int],
    folds: Sequence[int | str],
    grids: Mapping[str | None, Grid] | None = None,
    tuned: Mapping[str | None, Grid] | None = None,
) -> tuple[Cell, ...]:
    """All cells, methods innermost: a run that is stopped early has still compared methods on the same seed and fold.

    `grids` and `tuned` map a method, or None for all of them, to the values of its options; a method's own values come
    first. Each point of a grid is a row of the table; the points of `tuned` compete for one row.
    """

    def points(method: str, of: Mapping[str | None, Grid] | None) -> Iterable[tuple[tuple[str, Value], ...]]:
        return _points({**(of or {}).get(None, {}), **(of or {}).get(method, {})})

    variants = [
        (method, options, tried)
        for method in methods
        for options in points(method, grids)
        for tried in points(method, tuned)
    ]
    cells = [
        Cell(method=method, seed=seed, fold=fold, options=options, tuned=tried)
        for seed, fold in itertools.product(seeds, folds)
        for method, options, tried in variants
    ]
    return tuple(dict.fromkeys(cells))


def _points(grid: Grid | None) -> Iterable[tuple[tuple[str, Value], ...]]:
    if not grid:
        return ((),)
    keys = sorted(grid)
    return (tuple(zip(keys, values, strict=True)) for values in itertools.product(*(grid[key] for key in keys)))


def parse_value(text: str) -> Value:
    """`0.1` is a number, `true` a truth value, `null` nothing, `[12,14]` a list; everything else is the text itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if isinstance(value, list) and all(isinstance(part, bool | int | float | str | None) for part in value):
        return tuple(value)
    return value if isinstance(value, bool | int | float | str | None) else text


def parse_assignments(texts: Iterable[str], *, where: str) -> dict[str, Value]:
    """`KEY=VALUE`, as often as wanted; a later one wins."""
    values: dict[str, Value] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"cannot read {text!r}", where=where, hint="write KEY=VALUE")
        values[key] = parse_value(value)
    return values


def parse_integers(text: str) -> tuple[int, ...]:
    """`0,1,4` or `0-4`, or both mixed."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise ConfigError(f"{text!r} is not a list of whole numbers", hint="write 0,1,2 or 0-4")
        first, last = int(match[1]), int(match[2] or match[1])
        numbers.extend(range(first, last + 1))
    return tuple(dict.fromkeys(numbers))


def parse_folds(text: str) -> tuple[int | str, ...]:
    """Numbers as in `parse_integers`, or names of splits that came with the data, such as fold_lesion."""
    folds: list[int | str] = []
    for part in text.split(","):
        folds.extend(parse_integers(part) if part.strip()[:1].isdigit() else [part.strip()])
    return tuple(dict.fromkeys(folds))


def parse_grids(texts: Iterable[str], *, where: str = "--grid") -> dict[str | None, dict[str, list[Value]]]:
    """`KEY=V1,V2` for all methods, `METHOD:KEY=V1,V2` for one."""
    grids: dict[str | None, dict[str, list[Value]]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        method, colon, key = name.rpartition(":")
        if not equals or not key or not values:
            raise ConfigError(
                f"cannot read {text!r}", where=where, hint="write lambda_npr=0.1,1 or fednpr:lambda_npr=0.1,1"
            )
        grids.setdefault(method if colon else None, {})[key] = [parse_value(value) for value in values.split(",")]
    return grids


def format_options(options: Iterable[tuple[str, Value]]) -> str:
    return ",".join(f"{key}={format_value(value)}" for key, value in options)


def format_value(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
