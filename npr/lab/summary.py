"""From finished cells to the rows of a table: one row for every variant and every kind of model it is judged by.

The paper's figure is the mean over sites of each site's balanced accuracy. At a small site one image can be a whole
class, so that figure moves by points with a single image. The primary figure here pools all out-of-fold predictions
first and then takes the mean recall over classes; its interval draws patients or lesions again (npr/bootstrap.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npr.bootstrap import Interval, bootstrap_interval, paired_difference
from npr.metrics import Predictions, load_predictions, pooled_recall

Json = dict[str, Any]
Loader = Callable[[Json, str], list[Predictions] | None]

KINDS = ("global", "local", "personal")


def predictions_loader(out: Path) -> Loader:
    """Predictions from the working directories below `out`, or None where they are not at hand."""

    def load(cell: Json, kind: str) -> list[Predictions] | None:
        path = out / "cells" / cell["slug"] / f"predictions-{kind}.npz"
        return load_predictions(path) if path.exists() else None

    return load


def summarise_cells(cells: Sequence[Json], load: Loader, reference: str = "fedavg") -> list[Json]:
    """One row per variant and kind, with the paired difference against the reference on the cells that both have.

    :param reference: a variant, or `variant:kind`. Without a kind a row is compared with the reference's row of the
        same kind, and a personal model with the reference's locally updated model, as in the paper.
    """
    rows = []
    for variant in dict.fromkeys(cell["variant"] for cell in cells):
        for kind in KINDS:
            mine = [cell for cell in cells if cell["variant"] == variant and kind in cell["final"]]
            if mine:
                rows.append(_row(mine, kind, load) | {"difference": _difference(mine, kind, cells, load, reference)})
    return rows


def _row(mine: Sequence[Json], kind: str, load: Loader) -> Json:
    finals = [cell["final"][kind] for cell in mine]
    predictions = _all(mine, kind, load)
    # Without the predictions the figure still follows from the stored confusion matrices; only its interval does not.
    recall = _percent(bootstrap_interval(predictions)) if predictions else [_recall_from_confusion(finals)]
    return {
        "variant": mine[0]["variant"],
        "method": mine[0]["method"],
        "options": mine[0]["options"],
        "kind": kind,
        "seeds": sorted({cell["seed"] for cell in mine}),
        "folds": sorted({cell["fold"] for cell in mine}, key=str),
        "cells": len(mine),
        "pooled_recall": recall,
        "mean_bacc": _mean_sd(final["mean_bacc"] for final in finals),
        "mean_bauc": _mean_sd(final["mean_bauc"] for final in finals),
        "best_round_mean_bacc": _mean_sd(_best(cell, kind) for cell in mine),
    }


def _difference(mine: Sequence[Json], kind: str, cells: Sequence[Json], load: Loader, reference: str) -> Json | None:
    name, _, wanted = reference.partition(":")
    base = [cell for cell in cells if cell["variant"] == name]
    other = wanted or (kind if any(kind in cell["final"] for cell in base) else "local")
    if (mine[0]["variant"], kind) == (name, other):
        return None
    theirs = {(cell["seed"], cell["fold"]): cell for cell in base if other in cell["final"]}
    pairs = [(cell, theirs[at]) for cell in mine if (at := (cell["seed"], cell["fold"])) in theirs]
    ours_p, theirs_p = _all((a for a, _ in pairs), kind, load), _all((b for _, b in pairs), other, load)
    if not ours_p or not theirs_p:
        return None
    by_seed = {}
    for seed in sorted({p.seed for p in ours_p}):
        one, two = ([p for p in side if p.seed == seed] for side in (ours_p, theirs_p))
        by_seed[str(seed)] = round(100 * (pooled_recall(one) - pooled_recall(two)), 2)
    return {
        "reference": f"{name}:{other}",
        "cells": len(pairs),
        "pooled_recall": _percent(paired_difference(ours_p, theirs_p)),
        "mean_bacc": _percent(paired_difference(ours_p, theirs_p, over="cell")),
        "by_seed": by_seed,
    }


def _all(cells: Iterable[Json], kind: str, load: Loader) -> list[Predictions]:
    """All or nothing: an interval over a part of the cells would not belong to the row's figure."""
    loaded = [load(cell, kind) for cell in cells]
    return [] if any(part is None for part in loaded) else [p for part in loaded if part is not None for p in part]


def _recall_from_confusion(finals: Iterable[Json]) -> float:
    total = np.sum([np.asarray(final["confusion"]) for final in finals], axis=0)
    present = total.sum(axis=1) > 0
    return round(100 * float(np.mean(np.diag(total)[present] / total.sum(axis=1)[present])), 2)


def _percent(interval: Interval) -> list[float]:
    return [round(100 * number, 2) for number in (interval.value, interval.low, interval.high)]


def _mean_sd(values: Iterable[float]) -> list[float]:
    """In percent: the mean over cells, and the standard deviation when there are at least two."""
    numbers = [100 * value for value in values]
    mean = round(float(np.mean(numbers)), 2)
    return [mean, round(float(np.std(numbers, ddof=1)), 2)] if len(numbers) > 1 else [mean]


def _best(cell: Json, kind: str) -> float:
    """The paper's protocol, the best round on the test images: shown only beside the paper, never to be relied on."""
    curve = [entry["evaluation"][kind]["mean_bacc"] for entry in cell["rounds"] if kind in entry["evaluation"]]
    return float(max([*curve, cell["final"][kind]["mean_bacc"]]))
