"""Bootstrap intervals of balanced recall, over everything that chance had a part in: folds, seeds, and patients.

A draw takes folds again with replacement, within each of them the seeds, and whole patients (or lesions) of its test
side, never single images. With one fold and one seed only patients are drawn. Recall is a ratio of two sums over units,
so one draw is one vector of how often each unit was drawn, and all draws together are a matrix product.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import DataError
from npr.metrics import Predictions, answered, balanced_auc, pooled

# What is averaged: one pool; each site pooled over folds and seeds; or each site, fold and seed by itself.
Level = Literal["pooled", "site", "cell"]
Floats = NDArray[np.float64]

_CHUNK = 128
# Standard errors that a true difference must measure to be found in four of five repetitions at a level of 5 %.
_FOUND = 1.96 + 0.84


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its percentile interval.

    :ivar below_zero: the share of draws at or under zero (differences).
    :ivar resolvable: the smallest true difference that a design like this finds four times in five.
    """

    value: float
    low: float
    high: float
    level: float
    draws: int
    units: int
    below_zero: float
    resolvable: float


@dataclass(frozen=True, slots=True)
class _Draw:
    """For a chunk of draws, one fold of each: which, how often each of its units, how often each of its seeds."""

    fold: int
    rows: NDArray[np.int64]
    units: Floats
    seeds: Floats


@dataclass(frozen=True, slots=True)
class _FoldTable:
    """Images and hits of one fold per unit, seed, site and class: (units, seeds, sites, classes)."""

    shown: Floats
    hits: Floats

    def sums(self, draw: _Draw) -> tuple[Floats, Floats]:
        """(draws, seeds, sites, classes), each seed as often as it was drawn."""
        units, *rest = self.shown.shape
        times = draw.seeds[:, :, None, None]
        shown, hits = ((draw.units @ part.reshape(units, -1)).reshape(-1, *rest) for part in (self.shown, self.hits))
        return shown * times, hits * times


@dataclass(frozen=True, slots=True)
class _Table:
    """The same folds, sites and classes for all methods of a comparison."""

    folds: tuple[_FoldTable, ...]

    def figure(self, draws: Sequence[_Draw], count: int, over: Level) -> Floats:
        """Mean over groups of the mean recall over the classes drawn; (count,)."""
        sites, classes = self.folds[0].shown.shape[2:]
        if over == "cell":
            total, weight = np.zeros(count), np.zeros(count)
            for draw in draws:
                shown, hits = self.folds[draw.fold].sums(draw)
                by_site = _balanced(shown, hits)  # (draws, seeds, sites)
                times = np.where(np.isnan(by_site), 0.0, draw.seeds[:, :, None])
                total[draw.rows] += (np.nan_to_num(by_site) * times).sum(axis=(1, 2))
                weight[draw.rows] += times.sum(axis=(1, 2))
            return np.asarray(np.divide(total, weight, out=np.full(count, np.nan), where=weight > 0))
        shown, hits = np.zeros((count, sites, classes)), np.zeros((count, sites, classes))
        for draw in draws:
            more_shown, more_hits = self.folds[draw.fold].sums(draw)
            shown[draw.rows] += more_shown.sum(axis=1)
            hits[draw.rows] += more_hits.sum(axis=1)
        if over == "pooled":
            return _balanced(shown.sum(axis=1), hits.sum(axis=1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return np.asarray(np.nanmean(_balanced(shown, hits), axis=1))


def _balanced(shown: Floats, hits: Floats) -> Floats:
    """Mean recall over the classes that are there, along the last axis; NaN without any."""
    recall = np.divide(hits, shown, out=np.full_like(hits, np.nan), where=shown > 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a group with no image drawn is left out of that draw
        return np.asarray(np.nanmean(recall, axis=-1))


@dataclass(frozen=True, slots=True)
class _Design:
    """Folds with their units and seeds, and the sites: what is drawn again."""

    folds: tuple[str, ...]
    units: tuple[NDArray[np.int64], ...]
    seeds: tuple[tuple[int, ...], ...]
    sites: tuple[str, ...]

    @classmethod
    def of(cls, predictions: Sequence[Predictions]) -> _Design:
        folds = tuple(dict.fromkeys(p.fold for p in predictions))
        within = [[p for p in predictions if p.fold == fold] for fold in folds]
        return cls(
            folds=folds,
            units=tuple(np.unique(np.concatenate([p.units for p in fold])) for fold in within),
            seeds=tuple(tuple(dict.fromkeys(p.seed for p in fold)) for fold in within),
            sites=tuple(dict.fromkeys(p.site for p in predictions)),
        )

    def table(self, predictions: Sequence[Predictions]) -> _Table:
        classes, tables = answered(predictions[0].labels, predictions[0].scores)[2], []
        for fold, units, seeds in zip(self.folds, self.units, self.seeds, strict=True):
            shown = np.zeros((len(units), len(seeds), len(self.sites), classes))
            hits = np.zeros_like(shown)
            for p in (p for p in predictions if p.fold == fold):
                seed, site, at = seeds.index(p.seed), self.sites.index(p.site), np.searchsorted(units, p.units)
                truth, predicted, _ = answered(p.labels, p.scores)
                at = np.repeat(at, len(truth) // max(1, len(at)))  # an image answers as often as it has questions
                np.add.at(shown[:, seed, site], (at, truth), 1.0)
                np.add.at(hits[:, seed, site], (at, truth), (predicted == truth).astype(np.float64))
            tables.append(_FoldTable(shown, hits))
        return _Table(tuple(tables))

    def everything(self) -> list[_Draw]:
        """Each fold, seed and unit once: the figure itself."""
        only = np.zeros(1, dtype=np.int64)
        return [
            _Draw(number, only, np.ones((1, len(units))), np.ones((1, len(seeds))))
            for number, (units, seeds) in enumerate(zip(self.units, self.seeds, strict=True))
        ]

    def draws(self, count: int, seed: int) -> Iterator[tuple[list[_Draw], int]]:
        """Chunks that bound memory: the draws of a chunk, and how many they are."""
        least = min((len(units) for units in self.units), default=0)
        if least == 0 or count < 1:
            raise DataError(f"cannot draw {count} times from {least} units")
        rng, above = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        for start in range(0, count, _CHUNK):
            size = min(_CHUNK, count - start)
            chunk = []
            for _ in self.folds:
                picked = above.integers(0, len(self.folds), size=size)
                for number, (units, seeds) in enumerate(zip(self.units, self.seeds, strict=True)):
                    rows = np.flatnonzero(picked == number)
                    if len(rows):
                        drawn = times_drawn(rng, len(rows), len(units)), times_drawn(above, len(rows), len(seeds))
                        chunk.append(_Draw(number, rows, *drawn))
            yield chunk, size


def times_drawn(rng: np.random.Generator, rows: int, things: int) -> Floats:
    """How often each thing is drawn, as many draws with replacement as there are things; one row per draw."""
    out = np.empty((rows, things))
    for row in out:
        row[:] = np.bincount(rng.integers(0, things, size=things), minlength=things)
    return out


def bootstrap_interval(
    predictions: Sequence[Predictions],
    *,
    over: Level = "pooled",
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The balanced recall of `predictions` (primary figure: `over="pooled"`) with its interval."""
    design = _Design.of(predictions)
    table = design.table(predictions)
    values = np.concatenate([table.figure(chunk, size, over) for chunk, size in design.draws(draws, seed)])
    return _interval(float(table.figure(design.everything(), 1, over)[0]), values, level, design)


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
    design = _Design.of(ours)
    first, second = design.table(ours), design.table(reference)

    def gap(chunk: Sequence[_Draw], size: int) -> Floats:
        return np.asarray(first.figure(chunk, size, over) - second.figure(chunk, size, over))

    values = np.concatenate([gap(chunk, size) for chunk, size in design.draws(draws, seed)])
    return _interval(float(gap(design.everything(), 1)[0]), values, level, design)


def bootstrap_auc(
    predictions: Sequence[Predictions], *, draws: int = 500, level: float = 0.95, seed: int = 0
) -> Interval:
    """The pooled balanced AUC with its interval over units; ranks must be taken anew in every draw, so it is slower."""
    labels, scores = pooled(predictions)
    units, place = np.unique(np.concatenate([p.units for p in predictions]), return_inverse=True)
    rng, values = np.random.default_rng(seed), []
    for times in times_drawn(rng, draws, len(units)):
        rows = np.repeat(np.arange(len(labels)), times[place].astype(np.int64))
        values.append(balanced_auc(labels[rows], scores[rows]))
    return _interval(balanced_auc(labels, scores), np.array(values), level, _Design.of(predictions))


def _interval(value: float, values: Floats, level: float, design: _Design) -> Interval:
    tail = (1.0 - level) / 2.0
    known = values[~np.isnan(values)]
    low = high = below = spread = math.nan  # of a side with one class only no draw has an area
    if len(known):
        low, high = np.quantile(known, [tail, 1.0 - tail])
        below, spread = float(np.mean(known <= 0.0)), float(np.std(known))
    return Interval(
        value=value,
        low=float(low),
        high=float(high),
        level=level,
        draws=len(values),
        units=len(np.unique(np.concatenate(design.units))),
        below_zero=below,
        resolvable=_FOUND * spread,
    )


def _check_paired(ours: Sequence[Predictions], reference: Sequence[Predictions]) -> None:
    mine, other = ({(p.site, p.fold, p.seed): p for p in side} for side in (ours, reference))
    if mine.keys() != other.keys():
        raise DataError("the two methods were not run on the same sites, folds and seeds", hint="compare common cells")
    for key, p in mine.items():
        if not (np.array_equal(p.ids, other[key].ids) and np.array_equal(p.labels, other[key].labels)):
            raise DataError(f"the two methods were not tested on the same images of {key[0]}")
