"""From judged cells to the rows of a table: one for every variant, model and predictor, and one for what was chosen.

Two figures always stand side by side. Pooled recall takes all out-of-fold predictions together and then the mean recall
over classes. The mean over sites is the paper's: balanced accuracy of each site, where one image can be a whole class.
Intervals draw folds, seeds and patients or lesions again (npr/bootstrap.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npr.bootstrap import Interval, bootstrap_interval, paired_difference
from npr.lab.predictors import PARTS, PREDICTORS
from npr.metrics import Predictions, load_predictions

Json = dict[str, Any]
Loader = Callable[[Json, str, str], list[Predictions] | None]

KINDS = ("global", "local", "personal", "best site")
# In place of a model and a predictor: those that the validation side chose in each fold.
CHOSEN = "chosen"


def predictions_loader(out: Path) -> Loader:
    """Test predictions of a model and predictor from the folders below `out`, or None if they are gone."""

    def load(cell: Json, kind: str, predictor: str) -> list[Predictions] | None:
        folder = out / "cells" / cell["slug"]
        by_part = {}
        for part in PREDICTORS[predictor].parts:
            path = folder / f"test-{kind.replace(' ', '-')}-{part}.npz"
            if not path.exists():
                return None
            by_part[part] = load_predictions(path)
        return PREDICTORS[predictor].combine(by_part)

    return load


def no_predictions(cell: Json, kind: str, predictor: str) -> list[Predictions] | None:
    """For figures without intervals."""
    del cell, kind, predictor
    return None


@dataclass(frozen=True, slots=True)
class TableRow:
    """A variant with the model and the predictor it is judged by, or `chosen` for both."""

    variant: str
    kind: str
    predictor: str

    def of(self, cell: Json) -> tuple[str, str] | None:
        """Model and predictor of this row in one cell; None where the cell has no such figure."""
        if cell["variant"] != self.variant or "final" not in cell:
            return None
        chosen = cell["chosen"]
        kind = chosen["model"] if self.kind == CHOSEN else self.kind
        predictor = chosen["predictor"] if self.kind == CHOSEN else self.predictor
        return (kind, predictor) if predictor in cell["final"].get(kind, {}) else None

    @property
    def name(self) -> str:
        return f"{self.variant}:{CHOSEN}" if self.kind == CHOSEN else f"{self.variant}:{self.kind}:{self.predictor}"


def rows_of(cells: Sequence[Json]) -> list[TableRow]:
    """What was chosen first, then every model by every single part."""
    found: list[TableRow] = []
    for variant in dict.fromkeys(cell["variant"] for cell in cells):
        single = [TableRow(variant, kind, part) for kind in KINDS for part in PARTS]
        chosen = TableRow(variant, CHOSEN, CHOSEN)
        found.extend(row for row in (chosen, *single) if any(row.of(cell) for cell in cells))
    return found


def summarise_cells(
    cells: Sequence[Json], load: Loader, reference: str = "fedavg", earlier: Sequence[Json] = ()
) -> list[Json]:
    """One row per variant, model and predictor, with the paired difference against the reference on common cells.

    Without the predictions the figures still follow from the stored confusion matrices; only their intervals do not.

    :param reference: a variant, or `variant:model:predictor`. Without those a row is compared with the reference's row
        of the same model and predictor (a personal model with the global one), and chosen with chosen.
    :param earlier: rows of an earlier summary, whose intervals stay where the predictions are gone since.
    """
    known = {(row["variant"], row["kind"], row["predictor"]): row for row in earlier}
    rows = rows_of(cells)
    return [
        _with_intervals(
            _figures(row, cells, load) | {"difference": _difference(row, _other(row, reference, rows), cells, load)},
            known.get((row.variant, row.kind, row.predictor)),
        )
        for row in rows
    ]


def _figures(row: TableRow, cells: Sequence[Json], load: Loader) -> Json:
    mine = [(cell, at) for cell in cells if (at := row.of(cell))]
    finals = [cell["final"][kind][predictor] for cell, (kind, predictor) in mine]
    predictions = _all([(cell, at) for cell, at in mine], load)
    first = mine[0][0]
    return {
        "variant": row.variant,
        "method": first["method"],
        "options": first["options"],
        "kind": row.kind,
        "predictor": row.predictor,
        "choices": _choices(cell for cell, _ in mine) if row.kind == CHOSEN else None,
        "seeds": sorted({cell["seed"] for cell, _ in mine}),
        "folds": sorted({cell["fold"] for cell, _ in mine}, key=str),
        "cells": len(mine),
        "pooled_recall": _percent(bootstrap_interval(predictions)) if predictions else [round(_recall(finals), 2)],
        "mean_bacc": _percent(bootstrap_interval(predictions, over="cell"))
        if predictions
        else _mean_sd(final["mean_bacc"] for final in finals)[:1],
        "mean_bauc": _mean_sd(final["mean_bauc"] for final in finals),
    }


def _choices(cells: Iterable[Json]) -> Json:
    """By fold: model, predictor and tuned values that the validation side chose."""
    return {str(cell["fold"]): {**cell["chosen"], **cell["tuned"]} for cell in cells}


def _other(row: TableRow, reference: str, rows: Sequence[TableRow]) -> TableRow | None:
    name, *rest = reference.split(":")
    kind, predictor = [*rest, row.predictor if rest != [CHOSEN] else CHOSEN][:2] if rest else (row.kind, row.predictor)
    wanted = [TableRow(name, kind, predictor)]
    if not rest and kind == "personal":  # the aggregate with a site's own parts, against the aggregate
        wanted.append(TableRow(name, "global", predictor))
    return next((other for other in wanted if other in rows and other != row), None)


def compare(ours: TableRow, theirs: TableRow, cells: Sequence[Json], load: Loader) -> Json | None:
    """The paired difference of two rows on the cells that both have."""
    return _difference(ours, theirs, cells, load)


def _difference(row: TableRow, other: TableRow | None, cells: Sequence[Json], load: Loader) -> Json | None:
    if other is None:
        return None
    base = {(cell["seed"], cell["fold"]): (cell, at) for cell in cells if (at := other.of(cell))}
    mine = {(cell["seed"], cell["fold"]): (cell, at) for cell in cells if (at := row.of(cell))}
    common = [at for at in mine if at in base]
    if not common:
        return None
    finals = {at: (_final(mine[at]), _final(base[at])) for at in common}
    ours, theirs = _all([mine[at] for at in common], load), _all([base[at] for at in common], load)
    resolvable = None
    if ours and theirs:
        pooled = paired_difference(ours, theirs)
        recall, resolvable = _percent(pooled), round(100 * pooled.resolvable, 2)
        over_sites = _percent(paired_difference(ours, theirs, over="cell"))
    else:
        recall = [_gap(finals.values())]
        over_sites = _mean_sd(a["mean_bacc"] - b["mean_bacc"] for a, b in finals.values())[:1]
    seeds = sorted({seed for seed, _ in finals})
    return {
        "reference": other.name,
        "cells": len(common),
        "pooled_recall": recall,
        "mean_bacc": over_sites,
        "mean_bauc": _mean_sd(
            a["mean_bauc"] - b["mean_bauc"] for a, b in finals.values() if None not in (a["mean_bauc"], b["mean_bauc"])
        ),
        "resolvable": resolvable,
        "by_seed": {str(seed): _gap(pair for at, pair in finals.items() if at[0] == seed) for seed in seeds},
    }


def _final(found: tuple[Json, tuple[str, str]]) -> Json:
    cell, (kind, predictor) = found
    final: Json = cell["final"][kind][predictor]
    return final


def _with_intervals(row: Json, before: Json | None) -> Json:
    """The row, with the intervals that were drawn when the predictions of the same cells were available."""
    if before is None or any(row[name] != before[name] for name in ("seeds", "folds", "cells")):
        return row
    kept = {name: _wider(row[name], before[name]) for name in ("pooled_recall", "mean_bacc")}
    ours, theirs = row["difference"], before["difference"]
    same = ours and theirs and all(ours[name] == theirs[name] for name in ("reference", "cells", "by_seed"))
    if same:
        resolvable = ours["resolvable"] if ours["resolvable"] is not None else theirs["resolvable"]
        ours = ours | {name: _wider(ours[name], theirs[name]) for name in ("pooled_recall", "mean_bacc")}
        ours = ours | {"resolvable": resolvable}
    return row | kept | {"difference": ours}


def _wider(figure: list[float], before: list[float]) -> list[float]:
    """The same figure with its interval, if it had one."""
    return before if len(figure) < len(before) and figure[:1] == before[:1] else figure


def _all(found: Iterable[tuple[Json, tuple[str, str]]], load: Loader) -> list[Predictions]:
    """All or nothing: an interval over a part of the cells would not belong to the row's figure."""
    loaded = [load(cell, kind, predictor) for cell, (kind, predictor) in found]
    return [] if any(part is None for part in loaded) else [p for part in loaded if part is not None for p in part]


def _gap(pairs: Iterable[tuple[Json, Json]]) -> float:
    """How far the pooled recall of the first of each pair is above that of the second."""
    ours, theirs = zip(*pairs, strict=True)
    return round(_recall(ours) - _recall(theirs), 2)


def _recall(finals: Iterable[Json]) -> float:
    total = np.sum([np.asarray(final["confusion"]) for final in finals], axis=0)
    present = total.sum(axis=1) > 0
    return 100 * float(np.mean(np.diag(total)[present] / total.sum(axis=1)[present]))


def _percent(interval: Interval) -> list[float]:
    return [round(100 * number, 2) for number in (interval.value, interval.low, interval.high)]


def percent(value: float | None) -> str:
    """A share as people read it."""
    return "none" if value is None else f"{100 * value:.1f}"


def _mean_sd(values: Iterable[float | None]) -> list[float]:
    """In percent: the mean over the cells that have the figure, and the deviation when there are at least two."""
    numbers = [100 * value for value in values if value is not None]
    if not numbers:
        return []
    mean = round(float(np.mean(numbers)), 2)
    return [mean, round(float(np.std(numbers, ddof=1)), 2)] if len(numbers) > 1 else [mean]
