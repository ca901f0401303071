"""Bootstrap intervals against a slow loop, their coverage, and the pairing of two methods."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lazaret.errors import DataError
from npr import metrics
from npr.bootstrap import bootstrap_auc, bootstrap_interval, paired_difference
from npr.metrics import Predictions

CLASSES = 3


def cell(rng, *, site="a", fold="0", units=60, per_unit=3, skill=1.0, labels=None, noise=None):
    """Images of a unit share most of their difficulty, as several pictures of one lesion do."""
    rows = units * per_unit
    group = np.repeat(np.arange(units), per_unit)
    labels = rng.integers(0, CLASSES, units)[group] if labels is None else labels
    shared = rng.normal(size=(units, CLASSES))[group] if noise is None else noise
    logits = skill * np.eye(CLASSES)[labels] + shared + 0.1 * rng.normal(size=(rows, CLASSES))
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    offset = 10_000 * int(fold) + 100_000 * (site == "b")
    return Predictions(
        site=site, labels=labels.astype(np.int64), scores=scores.astype(np.float32), units=group + offset,
        ids=np.arange(rows) + offset, fold=fold,
    )  # fmt: skip


def test_equals_a_loop_that_really_resamples():
    rng = np.random.default_rng(0)
    cells = [cell(rng), cell(rng, site="b")]
    labels, scores = metrics.pooled(cells)
    groups = np.concatenate([p.units for p in cells])
    units = np.unique(groups)
    again = np.random.default_rng(4)
    values = []
    for _ in range(50):
        drawn = units[again.integers(0, len(units), size=len(units))]
        rows = np.concatenate([np.flatnonzero(groups == unit) for unit in drawn])
        values.append(metrics.balanced_accuracy(labels[rows], scores[rows]))
    interval = bootstrap_interval(cells, draws=50, seed=4)
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    assert interval.value == pytest.approx(metrics.pooled_recall(cells))
    assert interval.units == 120


def test_value_of_each_level_is_the_metric_of_that_level():
    rng = np.random.default_rng(1)
    cells = [cell(rng), cell(rng, fold="1"), cell(rng, site="b"), cell(rng, site="b", fold="1")]
    by_cell = metrics.site_mean(cells, metrics.balanced_accuracy)
    by_site = np.mean([metrics.pooled_recall(cells[:2]), metrics.pooled_recall(cells[2:])])
    assert bootstrap_interval(cells, over="cell", draws=20).value == pytest.approx(by_cell)
    assert bootstrap_interval(cells, over="site", draws=20).value == pytest.approx(by_site)


def test_seeded():
    cells = [cell(np.random.default_rng(2))]
    assert bootstrap_interval(cells, draws=99, seed=1) == bootstrap_interval(cells, draws=99, seed=1)
    assert bootstrap_interval(cells, draws=99, seed=1) != bootstrap_interval(cells, draws=99, seed=2)


def test_whole_units_give_the_wider_honest_interval():
    rng = np.random.default_rng(3)
    grouped = cell(rng, units=40, per_unit=8)
    single = Predictions(site="a", labels=grouped.labels, scores=grouped.scores, units=grouped.ids, ids=grouped.ids)
    honest, hopeful = bootstrap_interval([grouped], draws=400), bootstrap_interval([single], draws=400)
    assert honest.high - honest.low > 1.5 * (hopeful.high - hopeful.low)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    truth = metrics.pooled_recall([cell(rng, units=40_000)])
    inside = 0
    for repetition in range(60):
        interval = bootstrap_interval([cell(rng, units=80)], draws=200, seed=repetition)
        inside += interval.low <= truth <= interval.high
    assert 50 <= inside <= 60


def worlds(rng, *, folds, seeds):
    """Two equally good methods; each training, of a method, fold and seed, comes out a little better or worse."""
    sides = [], []
    for fold in range(folds):
        images = cell(rng, fold=str(fold), units=60)
        for seed, side in ((seed, side) for seed in range(seeds) for side in sides):
            skill = 0.4 * rng.normal(size=CLASSES)
            scores = images.scores * np.exp(skill * np.eye(CLASSES)[images.labels])
            side.append(replace(images, scores=(scores / scores.sum(1, keepdims=True)).astype(np.float32), seed=seed))
    return sides


@pytest.mark.parametrize(("folds", "seeds", "least", "most"), [(4, 2, 0.9, 1.0), (1, 1, 0.0, 0.85)])
def test_an_interval_covers_what_training_does_only_with_folds_and_seeds_to_draw(folds, seeds, least, most):
    """Twin: of one cell, patients alone are drawn; then no difference at all looks like one, time and again."""
    inside = 0
    for repetition in range(60):
        ours, theirs = worlds(np.random.default_rng(repetition), folds=folds, seeds=seeds)
        gap = paired_difference(ours, theirs, draws=200, seed=repetition)
        inside += gap.low <= 0.0 <= gap.high
    assert least <= inside / 60 <= most


def test_pairing_shrinks_the_interval_and_finds_the_difference():
    rng = np.random.default_rng(8)
    reference = cell(rng, units=150)
    noise = np.log(reference.scores)
    better = cell(rng, units=150, labels=reference.labels, noise=noise, skill=0.5)
    gap = paired_difference([better], [reference], draws=500)
    apart = bootstrap_interval([better], draws=500), bootstrap_interval([reference], draws=500)
    assert gap.value == pytest.approx(apart[0].value - apart[1].value)
    assert gap.low > 0 and gap.below_zero == 0.0
    assert gap.high - gap.low < 0.7 * sum(one.high - one.low for one in apart)
    same = paired_difference([reference], [reference], draws=50)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_only_the_same_images_can_be_paired():
    rng = np.random.default_rng(9)
    first, second = cell(rng), cell(rng)
    with pytest.raises(DataError, match="same images"):
        paired_difference([first], [second])
    with pytest.raises(DataError, match="same sites, folds and seeds"):
        paired_difference([first], [cell(rng, fold="1")])


def test_auc_interval_holds_its_value():
    cells = [cell(np.random.default_rng(10))]
    interval = bootstrap_auc(cells, draws=60)
    assert interval.low < metrics.balanced_auc(cells[0].labels, cells[0].scores) == interval.value < interval.high


def test_nothing_to_draw_from_is_refused():
    empty = cell(np.random.default_rng(0), units=0, noise=np.empty((0, CLASSES)), labels=np.empty(0, np.int64))
    with pytest.raises(DataError, match="cannot draw"):
        bootstrap_interval([empty])


@pytest.mark.filterwarnings("error")
def test_a_side_with_one_class_only_has_no_area_and_says_nothing_odd():
    """A hospital's validation side may hold one class: its terminal would show a warning of numpy."""
    rng = np.random.default_rng(3)
    interval = bootstrap_auc([cell(rng, labels=np.zeros(180, dtype=np.int64))], draws=20)
    assert np.isnan([interval.value, interval.low, interval.high, interval.below_zero]).all()
