"""Folds keep units together, spread every stratum, and never change."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazaret.errors import DataError
from npr.data.catalogue import check_grouped, grouped_folds, grouped_holdout


def table(seed=0, units=400):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, units)
    site = rng.integers(0, 3, units)
    label = rng.choice(4, size=units, p=[0.7, 0.2, 0.07, 0.03])
    names = np.repeat([f"u{u}" for u in range(units)], sizes).tolist()
    return names, list(zip(np.repeat(site, sizes).tolist(), np.repeat(label, sizes).tolist(), strict=True))


@given(seed=st.integers(0, 10_000), folds=st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_every_unit_is_in_exactly_one_fold_and_every_stratum_is_spread(seed, folds):
    units, strata = table(seed, units=120)
    fold = grouped_folds(units, strata, folds=folds, seed=seed)
    assert set(fold) == set(range(folds))
    for unit in set(units):
        assert len({f for f, u in zip(fold, units, strict=True) if u == unit}) == 1
    for stratum in set(strata):
        rows = [f for f, s in zip(fold, strata, strict=True) if s == stratum]
        counts = np.bincount(rows, minlength=folds)
        assert counts.max() - counts.min() <= 4  # no more than the largest unit


def test_small_strata_do_not_pile_up_in_one_fold():
    units = [f"u{i}" for i in range(10)]
    fold = grouped_folds(units, [f"rare{i}" for i in range(10)], folds=5)
    assert np.bincount(fold).tolist() == [2, 2, 2, 2, 2]


def test_folds_are_pinned():
    # Published results name folds by number: these must not move with a library or with us.
    units, strata = [f"u{i % 37}" for i in range(150)], [i % 37 % 5 for i in range(150)]
    fold = grouped_folds(units, strata, folds=5, seed=0)
    assert fold[:12].tolist() == [0, 4, 3, 4, 1, 2, 0, 1, 0, 0, 2, 2]
    assert hashlib.sha256(fold.astype("<i8").tobytes()).hexdigest().startswith("686c1b237a878736")
    assert not np.array_equal(fold, grouped_folds(units, strata, folds=5, seed=1))


def test_order_of_rows_does_not_matter():
    units, strata = table()
    order = np.random.default_rng(1).permutation(len(units))
    fold = grouped_folds(units, strata, folds=5)
    shuffled = grouped_folds([units[i] for i in order], [strata[i] for i in order], folds=5)
    assert np.array_equal(fold[order], shuffled)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 0.8])
def test_holdout_is_about_the_fraction(fraction):
    units, strata = table()
    held = grouped_holdout(units, strata, fraction=fraction)
    assert held.mean() == pytest.approx(fraction, abs=0.03)
    assert not {u for u, h in zip(units, held, strict=True) if h} & {
        u for u, h in zip(units, held, strict=True) if not h
    }


def test_refusals():
    with pytest.raises(DataError, match="1 folds"):
        grouped_folds(["a", "b"], [0, 0], folds=1)
    with pytest.raises(DataError, match="2 units"):
        grouped_folds(["a", "b", "b"], [0, 0, 0], folds=3)
    with pytest.raises(DataError, match="one side empty"):
        grouped_holdout(["a", "b"], [0, 0], fraction=1.0)


def test_a_patient_on_two_sides_is_named_by_rows_only():
    with pytest.raises(DataError) as caught:
        check_grouped(["p1", "p2", "p1"], ["train", "test", "test"], unit_kind="patient", names=["r1", "r2", "r3"])
    assert "r3" in str(caught.value) and "r1" in str(caught.value) and "p1" not in str(caught.value)
    check_grouped(["p1", "p2", "p1"], ["train", "test", "train"], unit_kind="patient", names=["r1", "r2", "r3"])
