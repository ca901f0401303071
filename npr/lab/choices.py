"""What is chosen, where, and in which order: values, model and predictor on the validation side, then one look at test.

One choice is made for each row of the table and each fold, from the validation sides of that fold alone: images that
are test images of this fold never have a part in it. It is written to OUT/choices.json before the test side is opened,
it is never changed afterwards, and a cell is judged once. Seeds that run later are judged by the same choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lazaret.errors import ConfigError
from npr.data.dataset import FederatedDataset
from npr.lab.cell import build_federation, load_data, predictions_file
from npr.lab.models import FITTED, MODELS, ByKind, TrainedCell
from npr.lab.plan import Cell, Frozen, Settings, Value, format_options
from npr.lab.plugins import load_plugins
from npr.lab.predictors import PREDICTORS, predictors_from
from npr.lab.store import Json, ResultStore, read_json, write_json
from npr.metrics import Predictions, load_predictions, pooled_recall, save_predictions, summarise

CHOICES = "choices.json"
JUDGED = "judged.json"
# When set, the models of a judged cell are kept, so that they can be looked at again.
KEEP_MODELS = "LAZARET_LAB_KEEP_MODELS"


class Choice(Frozen):
    """What one row was judged by in one fold, and the figure on the validation side that decided it."""

    variant: str
    fold: int | str
    tuned: tuple[tuple[str, Value], ...]
    model: str
    predictor: str
    validation: float
    seeds: tuple[int, ...]
    candidates: int

    def fits(self, cell: Cell) -> bool:
        return (self.variant, self.fold) == (cell.variant, cell.fold)


class Choices:
    """The choices of one results folder. They can be added to and not changed."""

    def __init__(self, out: Path) -> None:
        self._path = out / CHOICES
        source = self._path if self._path.exists() else out / "results.json"  # a copy of the results alone goes on
        stored = read_json(source).get("choices", []) if source.exists() else []
        self.all = [Choice.model_validate(entry) for entry in stored]

    def of(self, cell: Cell) -> Choice | None:
        return next((choice for choice in self.all if choice.fits(cell)), None)

    def fix(self, choice: Choice) -> None:
        if any((known.variant, known.fold) == (choice.variant, choice.fold) for known in self.all):
            raise ConfigError(f"the choice for {choice.variant} in fold {choice.fold} is fixed already")
        self.all.append(choice)
        write_json(self._path, {"choices": [each.model_dump(mode="json") for each in self.all]})

    def require_open(self, cells: Iterable[Cell]) -> None:
        """Refuses values that come after the test images of their row were seen."""
        for cell in cells:
            if self._settled_otherwise(cell):
                raise ConfigError(
                    f"{cell.key}: the choice for this row was made without it, and its test images have been read",
                    where=str(self._path),
                    hint="tune in another --out",
                )

    def without_losers(self, cells: Iterable[Cell], store: ResultStore) -> tuple[Cell, ...]:
        """Later seeds of a row are judged by its choice: values that were tried and not chosen need no training."""
        tried = {(found["variant"], found["fold"], format_options(found["tuned"].items())) for found in store.cells}
        return tuple(
            cell
            for cell in cells
            if store.finished(cell)
            or not self._settled_otherwise(cell)
            or (cell.variant, cell.fold, format_options(cell.tuned)) not in tried
        )

    def _settled_otherwise(self, cell: Cell) -> bool:
        choice = self.of(cell)
        return choice is not None and cell.tuned != choice.tuned


def choose(cells: Sequence[Cell], directory: Callable[[Cell], Path]) -> Choice:
    """The best of all values, models and predictors for one row and fold, by pooled recall over the same seeds."""
    seeds = sorted(set.intersection(*(_seeds(cells, tuned) for tuned in dict.fromkeys(cell.tuned for cell in cells))))
    if not seeds:
        raise ConfigError(f"{cells[0].variant}: the values of --tune have no seed in common")
    best: Choice | None = None
    count = 0
    for tuned in dict.fromkeys(cell.tuned for cell in cells):
        folders = [directory(cell) for cell in cells if cell.tuned == tuned and cell.seed in seeds]
        for kind, parts in _available(folders[0]).items():
            by_part = {part: _validation(folders, kind, part) for part in parts}
            for predictor in predictors_from(parts):
                count += 1
                figure = round(pooled_recall(predictor.combine(by_part)), 5)
                if best is None or figure > best.validation:
                    best = Choice(
                        variant=cells[0].variant,
                        fold=cells[0].fold,
                        tuned=tuned,
                        model=kind,
                        predictor=predictor.name,
                        validation=figure,
                        seeds=tuple(seeds),
                        candidates=0,
                    )
    assert best is not None
    return best.model_copy(update={"candidates": count})


def _validation(folders: Iterable[Path], kind: str, part: str) -> list[Predictions]:
    name = predictions_file("validation", kind, part)
    return [predictions for folder in folders for predictions in load_predictions(folder / name)]


def _seeds(cells: Sequence[Cell], tuned: tuple[tuple[str, Value], ...]) -> set[int]:
    return {cell.seed for cell in cells if cell.tuned == tuned}


def _available(folder: Path) -> dict[str, tuple[str, ...]]:
    """Models and parts that a cell was scored by."""
    result = read_json(folder / "result.json")
    return {
        kind: tuple(part for part in by_name if len(PREDICTORS[part].parts) == 1)
        for kind, by_name in result["validation"].items()
    }


def open_test(out: Path, settings: Settings, cell: Cell, directory: Path) -> FederatedDataset:
    """The only way to the test images of a cell.

    :raises ConfigError: before the choice is fixed, for values that were not chosen, and for a second look.
    """
    choice = Choices(out).of(cell)
    if choice is None:
        raise ConfigError(f"{cell.key}: nothing is chosen yet, so that its test images stay closed", where=str(out))
    if choice.tuned != cell.tuned:
        raise ConfigError(f"{cell.key}: these values were not chosen ({format_options(choice.tuned)} was)")
    if (directory / JUDGED).exists():
        raise ConfigError(f"{cell.key} was judged already: test images are read once", where=str(directory / JUDGED))
    return load_data(settings, cell.fold, with_test=True)


def judge(out: Path, settings: Settings, cell: Cell, directory: Path) -> Json:
    """One look at the test images: scores by every model and part, and figures of single parts and of the choice."""
    load_plugins()
    choice = Choices(out).of(cell)
    dataset = open_test(out, settings, cell, directory)
    assert choice is not None
    found = TrainedCell(build_federation(settings, cell, dataset), directory).test()
    for kind, by_part in found.items():
        for part, predictions in by_part.items():
            save_predictions(directory / predictions_file("test", kind, part), predictions)
    judged = {
        "counts": {site.name: site.test.class_counts().tolist() for site in dataset.sites},
        "chosen": {"model": choice.model, "predictor": choice.predictor},
        "final": _finals(found, choice),
    }
    write_json(directory / JUDGED, judged)
    return judged


def _finals(found: ByKind, choice: Choice) -> Json:
    finals: Json = {}
    for kind, by_part in found.items():
        names = [*by_part, *([choice.predictor] if kind == choice.model else [])]
        finals[kind] = {name: summarise(PREDICTORS[name].combine(by_part)).as_dict() for name in dict.fromkeys(names)}
    return finals


def settle(settings: Settings, cells: Sequence[Cell], store: ResultStore) -> None:
    """Chooses for every row and fold whose cells have all run, then judges the cells that were chosen."""
    choices = Choices(store.out)
    for first in {(cell.variant, cell.fold): cell for cell in cells}.values():
        group = [cell for cell in cells if (cell.variant, cell.fold) == (first.variant, first.fold)]
        if any(not store.finished(cell) and cell.key not in store.failed for cell in group):
            continue
        finished = [cell for cell in group if store.finished(cell)]
        if choices.of(first) is None and finished:
            choices.fix(choose(finished, store.directory))
        for cell in finished:
            _settle_cell(settings, cell, store, choices)


def _settle_cell(settings: Settings, cell: Cell, store: ResultStore, choices: Choices) -> None:
    result, choice, directory = store.result(cell), choices.of(cell), store.directory(cell)
    assert result is not None
    assert choice is not None
    if "final" not in result and cell.tuned == choice.tuned:
        known = directory / JUDGED
        judged = read_json(known) if known.exists() else judge(store.out, settings, cell, directory)
        counts = {**result["counts"], "test": judged["counts"]}
        store.record(cell, {**result, "counts": counts, "chosen": judged["chosen"], "final": judged["final"]})
    if not os.environ.get(KEEP_MODELS):
        for name in (MODELS, FITTED):
            (directory / name).unlink(missing_ok=True)
