"""Bootstrap intervals of balanced recall: whole patients (or lesions) are drawn again, never single images.

Recall is a ratio of two sums over units, so one draw is one vector of how often each unit was drawn, and all draws
together are a matrix product. Figures are conditional on the trained models: they show what the test images leave
open, not how much another training seed would change.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import DataError
from npr.metrics import Predictions, balanced_auc, pooled

# What is averaged: one pool; each site pooled over folds and seeds; or each site, fold and seed by itself.
Level = Literal["pooled", "site", "cell"]

_CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its percentile interval; `below_zero` is the share of draws at or under zero (differences)."""

    value: float
    low: float
    high: float
    level: float
    draws: int
    units: int
    below_zero: float


@dataclass(frozen=True, slots=True)
class _Table:
    """Images and hits per unit, group and class: (units, groups, classes)."""

    shown: NDArray[np.float64]
    hits: NDArray[np.float64]

    def figure(self, drawn: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean over groups of the mean recall over the classes drawn; (draws,)."""
        units, groups, classes = self.shown.shape
        shown = (drawn @ self.shown.reshape(units, -1)).reshape(-1, groups, classes)
        hits = (drawn @ self.hits.reshape(units, -1)).reshape(-1, groups, classes)
        recall = np.divide(hits, shown, out=np.full_like(hits, np.nan), where=shown > 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a group with no image drawn is left out of that draw
            return np.asarray(np.nanmean(np.nanmean(recall, axis=2), axis=1))


def bootstrap_interval(
    predictions: Sequence[Predictions],
    *,
    over: Level = "pooled",
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The balanced recall of `predictions` (primary figure: `over="pooled"`) with its interval."""
    units = np.unique(np.concatenate([p.units for p in predictions]))
    table = _table(predictions, units, over)
    values = np.concatenate([table.figure(drawn) for drawn in _draws(len(units), draws, seed)])
    return _interval(float(table.figure(np.ones((1, len(units))))[0]), values, level, len(units))


def paired_difference(
    ours: Sequence[Predictions],
    reference: Sequence[Predictions],
    *,
    over: Level = "pooled",
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """`ours` minus `reference` on the same images, both seen through the same draws."""
    _check_paired(ours, reference)
    units = np.unique(np.concatenate([p.units for p in ours]))
    first, second = _table(ours, units, over), _table(reference, units, over)

    def gap(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
        return first.figure(drawn) - second.figure(drawn)

    values = np.concatenate([gap(drawn) for drawn in _draws(len(units), draws, seed)])
    return _interval(float(gap(np.ones((1, len(units))))[0]), values, level, len(units))


def bootstrap_auc(
    predictions: Sequence[Predictions], *, draws: int = 500, level: float = 0.95, seed: int = 0
) -> Interval:
    """The pooled balanced AUC with its interval; ranks must be taken anew in every draw, so this one is slower."""
    labels, scores = pooled(predictions)
    units, place = np.unique(np.concatenate([p.units for p in predictions]), return_inverse=True)
    values = []
    for drawn in _draws(len(units), draws, seed):
        for times in drawn:
            rows = np.repeat(np.arange(len(labels)), times[place].astype(np.int64))
            values.append(balanced_auc(labels[rows], scores[rows]))
    return _interval(balanced_auc(labels, scores), np.array(values), level, len(units))


def _table(predictions: Sequence[Predictions], units: NDArray[np.int64], over: Level) -> _Table:
    def group(p: Predictions) -> tuple[object, ...]:
        return {"pooled": (), "site": (p.site,), "cell": (p.site, p.fold, p.seed)}[over]

    groups = {key: number for number, key in enumerate(dict.fromkeys(group(p) for p in predictions))}
    shape = (len(units), len(groups), predictions[0].num_classes)
    shown, hits = np.zeros(shape), np.zeros(shape)
    for p in predictions:
        cell = (np.searchsorted(units, p.units), np.full(len(p), groups[group(p)]), p.labels)
        np.add.at(shown, cell, 1.0)
        np.add.at(hits, cell, (p.scores.argmax(axis=1) == p.labels).astype(np.float64))
    return _Table(shown, hits)


def _draws(units: int, draws: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """How often each unit is drawn, `units` draws with replacement; in chunks that bound memory."""
    if units == 0 or draws < 1:
        raise DataError(f"cannot draw {draws} times from {units} units")
    rng = np.random.default_rng(seed)
    for start in range(0, draws, _CHUNK):
        chunk = np.empty((min(_CHUNK, draws - start), units))
        for row in chunk:
            row[:] = np.bincount(rng.integers(0, units, size=units), minlength=units)
        yield chunk


def _interval(value: float, values: NDArray[np.float64], level: float, units: int) -> Interval:
    tail = (1.0 - level) / 2.0
    low, high = np.nanquantile(values, [tail, 1.0 - tail])
    below = float(np.mean(values[~np.isnan(values)] <= 0.0))
    return Interval(
        value=value, low=float(low), high=float(high), level=level, draws=len(values), units=units, below_zero=below
    )


def _check_paired(ours: Sequence[Predictions], reference: Sequence[Predictions]) -> None:
    mine, other = ({(p.site, p.fold, p.seed): p for p in side} for side in (ours, reference))
    if mine.keys() != other.keys():
        raise DataError("the two methods were not run on the same sites, folds and seeds", hint="compare common cells")
    for key, p in mine.items():
        if not (np.array_equal(p.ids, other[key].ids) and np.array_equal(p.labels, other[key].labels)):
            raise DataError(f"the two methods were not tested on the same images of {key[0]}")
