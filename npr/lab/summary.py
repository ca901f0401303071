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
from npr.metrics import Predictions, load_predictions

Json = dict[str, Any]
Loader = Callable[[Json, str], list[Predictions] | None]

KINDS = ("global", "local", "personal")


def predictions_loader(out: Path) -> Loader:
    """Predictions from the working directories below `out`, or None if there are none."""

    def load(cell: Json, kind: str) -> list[Predictions] | None:
        path = out / "cells" / cell["slug"] / f"predictions-{kind}.npz"
        return load_predictions(path) if path.exists() else None

    return load


def summarise_cells(
    cells: Sequence[Json], load: Loader, reference: str = "fedavg", earlier: Sequence[Json] = ()
) -> list[Json]:
    """One row per variant and kind, with the paired difference against the reference on the cells that both have.

    Without the predictions the figures still follow from the stored confusion matrices; only their intervals do not.

    :param reference: a variant, or `variant:kind`. Without a kind a row is compared with the reference's row of the
        same kind, and a personal model with the reference's locally updated model, as in the paper.
    :param earlier: rows of an earlier summary, whose intervals stay where the predictions are gone since.
    """
    known = {(row["variant"], row["kind"]): row for row in earlier}
    rows = []
    for variant in dict.fromkeys(cell["variant"] for cell in cells):
        for kind in KINDS:
            mine = [cell for cell in cells if cell["variant"] == variant and kind in cell["final"]]
            if mine:
                row = _row(mine, kind, load) | {"difference": _difference(mine, kind, cells, load, reference)}
                rows.append(_with_intervals(row, known.get((variant, kind))))
    return rows


def _row(mine: Sequence[Json], kind: str, load: Loader) -> Json:
    finals = [cell["final"][kind] for cell in mine]
    predictions = _all(mine, kind, load)
    recall = _percent(bootstrap_interval(predictions)) if predictions else [round(_pooled_recall(finals), 2)]
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
    if not pairs:
        return None
    finals = {(a["seed"], a["fold"]): (a["final"][kind], b["final"][other]) for a, b in pairs}
    ours_p, theirs_p = _all((a for a, _ in pairs), kind, load), _all((b for _, b in pairs), other, load)
    if ours_p and theirs_p:
        recall = _percent(paired_difference(ours_p, theirs_p))
        over_sites = _percent(paired_difference(ours_p, theirs_p, over="cell"))
    else:
        recall = [_gap(finals.values())]
        over_sites = _mean_sd(ours["mean_bacc"] - theirs["mean_bacc"] for ours, theirs in finals.values())[:1]
    seeds = sorted({seed for seed, _ in finals})
    return {
        "reference": f"{name}:{other}",
        "cells": len(pairs),
        "pooled_recall": recall,
        "mean_bacc": over_sites,
        "by_seed": {str(seed): _gap(pair for at, pair in finals.items() if at[0] == seed) for seed in seeds},
    }


def _with_intervals(row: Json, before: Json | None) -> Json:
    """The row, with the intervals that were drawn when the predictions of the same cells were available."""
    cells = ("seeds", "folds", "cells")
    if before is None or any(row[name] != before[name] for name in cells):
        return row
    recall = _wider(row["pooled_recall"], before["pooled_recall"])
    ours, theirs = row["difference"], before["difference"]
    same = ours and theirs and all(ours[name] == theirs[name] for name in ("reference", "cells", "by_seed"))
    if same:
        ours = ours | {name: _wider(ours[name], theirs[name]) for name in ("pooled_recall", "mean_bacc")}
    return row | {"pooled_recall": recall, "difference": ours}


def _wider(figure: list[float], before: list[float]) -> list[float]:
    """The same figure with its interval, if it had one."""
    return before if len(figure) < len(before) and figure[0] == before[0] else figure


def _all(cells: Iterable[Json], kind: str, load: Loader) -> list[Predictions]:
    """All or nothing: an interval over a part of the cells would not belong to the row's figure."""
    loaded = [load(cell, kind) for cell in cells]
    return [] if any(part is None for part in loaded) else [p for part in loaded if part is not None for p in part]


def _gap(pairs: Iterable[tuple[Json, Json]]) -> float:
    """How far the pooled recall of the first of each pair is above that of the second."""
    ours, theirs = zip(*pairs, strict=True)
    return round(_pooled_recall(ours) - _pooled_recall(theirs), 2)


def _pooled_recall(finals: Iterable[Json]) -> float:
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


def _best(cell: Json, kind: str) -> float | None:
    """The paper's protocol, the best round on the test images: shown only beside the paper, never to be relied on."""
    curve = [entry["evaluation"][kind]["mean_bacc"] for entry in cell["rounds"] if kind in entry["evaluation"]]
    known = [value for value in (*curve, cell["final"][kind]["mean_bacc"]) if value is not None]
    return max(known, default=None)
