"""Sides keep units together; even ones spread every stratum and stay, keyed ones depend on one unit alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazaret.errors import DataError
from npr.data.catalogue import Catalogue, NamedSplit, assemble
from npr.data.sides import (
    KeyedSides,
    SideBook,
    SidePlace,
    StratifiedSides,
    check_grouped,
    check_spelling,
    grouped_folds,
    key_digest,
    keyed_sides,
    stratified_places,
    unit_key,
)

KEY = bytes(range(32))


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
def test_validation_is_about_the_fraction_of_the_training_side(fraction):
    units, strata = table()
    sides, _ = stratified_places(units, strata, validation=fraction)
    held = np.array(sides)
    assert (held == "test").mean() == pytest.approx(0.2, abs=0.02)
    assert (held == "validation").mean() == pytest.approx(0.8 * fraction, abs=0.03)
    check_grouped(units, sides, unit_kind="patient", names=[str(row) for row in range(len(units))])


def test_refusals():
    with pytest.raises(DataError, match="1 folds"):
        grouped_folds(["a", "b"], [0, 0], folds=1)
    with pytest.raises(DataError, match="2 units"):
        grouped_folds(["a", "b", "b"], [0, 0, 0], folds=3)
    with pytest.raises(DataError, match="one side empty"):
        stratified_places(["a", "b"], [0, 0], folds=2, validation=1.0)
    with pytest.raises(DataError, match="no fold 5"):
        keyed_sides(["a"], key=KEY, fold=5)


def test_a_patient_on_two_sides_is_named_by_rows_only():
    with pytest.raises(DataError) as caught:
        check_grouped(["p1", "p2", "p1"], ["train", "test", "test"], unit_kind="patient", names=["r1", "r2", "r3"])
    assert "r3" in str(caught.value) and "r1" in str(caught.value) and "p1" not in str(caught.value)
    check_grouped(["p1", "p2", "p1"], ["train", "test", "train"], unit_kind="patient", names=["r1", "r2", "r3"])


class TestKeyed:
    """Adding or removing a unit moves nobody else."""

    @given(seed=st.integers(0, 10_000))
    @settings(max_examples=30, deadline=None)
    def test_a_unit_more_or_less_moves_nobody(self, seed):
        units, _ = table(seed, units=60)
        left = [unit for unit in units if unit != units[0]]
        whole = dict(zip(units, keyed_sides(units, key=KEY, validation=0.2), strict=True))
        assert dict(zip(left, keyed_sides(left, key=KEY, validation=0.2), strict=True)) == {u: whole[u] for u in left}

    def test_the_twin_moves_others(self):
        units, strata = table(units=200)
        rows = [row for row, unit in enumerate(units) if unit != units[0]]
        whole = stratified_places(units, strata)[0]
        less = stratified_places([units[row] for row in rows], [strata[row] for row in rows])[0]
        assert [whole[row] for row in rows] != list(less)

    def test_shares_are_as_asked_for(self):
        sides = np.array(keyed_sides([str(number) for number in range(20_000)], key=KEY, validation=0.25))
        assert (sides == "test").mean() == pytest.approx(0.2, abs=0.01)
        assert (sides == "validation").mean() == pytest.approx(0.2, abs=0.01)
        assert "validation" not in keyed_sides(["a", "b", "c"], key=KEY, fold=None) and "test" not in keyed_sides(
            [str(number) for number in range(50)], key=KEY, fold=None
        )

    def test_folds_are_a_partition_and_another_key_is_another_one(self):
        units = [str(number) for number in range(300)]
        dealt = [zip(units, keyed_sides(units, key=KEY, fold=fold), strict=True) for fold in range(5)]
        tests = [{unit for unit, side in one if side == "test"} for one in dealt]
        assert sum(len(one) for one in tests) == 300 and set().union(*tests) == set(units)
        assert keyed_sides(units, key=KEY) != keyed_sides(units, key=bytes(32))
        assert key_digest(KEY) != key_digest(bytes(32))

    def test_another_spelling_is_the_same_side(self):
        units = [f"Pat-{number}" for number in range(100)]
        assert keyed_sides(units, key=KEY) == keyed_sides([f" PAT-{n}\u200b" for n in range(100)], key=KEY)

    def test_it_is_hmac_over_the_label(self):
        import hmac

        digest = hmac.new(KEY, b"FLSA1/sides\0" + b"p1", hashlib.sha256).digest()
        fold = int.from_bytes(digest[:8], "big") * 5 // 2**64
        assert [keyed_sides(["P1"], key=KEY, fold=k)[0] == "test" for k in range(5)] == [k == fold for k in range(5)]


class TestSpelling:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("P-17", "p-17"),
            ("P 17", "P17"),
            ("P17", "P17\u00a0"),
            ("Müller", "Mu\u0308ller"),
            ("P17", "\uff3017"),
            ("P17", "P\u200b17"),
            ("P17", "\ufeffP17"),
            ("P17", "P1\u00ad7"),
            ("P17", "P17\ufe0f"),
            ("STRASSE", "straße"),
            ("İ1", "i\u03071"),
            ("P\t17", "P\n17"),
        ],
    )
    def test_these_are_one(self, one, other):
        assert unit_key(one) == unit_key(other)
        with pytest.raises(DataError) as caught:
            check_spelling([one, "x", other], unit_kind="patient", names=["row 2", "row 3", "row 4"])
        assert "row 2" in str(caught.value) and "row 4" in str(caught.value)
        assert one not in str(caught.value) and other not in str(caught.value)

    @pytest.mark.parametrize(("one", "other"), [("P-17", "P-18"), ("P1", "P01"), ("P-1", "P_1"), ("a", "á")])
    def test_these_are_two(self, one, other):
        assert unit_key(one) != unit_key(other)
        check_spelling([one, other, one], unit_kind="patient", names=["1", "2", "3"])

    @given(st.text(max_size=12))
    @settings(max_examples=200, deadline=None)
    def test_a_key_is_its_own_key(self, text):
        assert unit_key(unit_key(text)) == unit_key(text)


def catalogue(units, labels, split=None):
    return Catalogue(
        name="t",
        class_names=("a", "b", "c"),
        images=np.zeros((len(units), 8, 8, 3), dtype=np.uint8),
        labels=np.array(labels, dtype=np.int64),
        ids=tuple(str(row) for row in range(len(units))),
        units=tuple(units),
        unit_kind="patient",
        sites=("s",) * len(units),
        splits={} if split is None else {"split": NamedSplit(sides=tuple(split))},
    )


class Kept:
    """A site that keeps its book."""

    def __init__(self, **settings):
        self.book, self.writes, self.settings = SideBook(), 0, settings

    def keep(self, book):
        # Through its bytes, as from a file.
        self.book, self.writes = SideBook.of_bytes(book.to_bytes(), where="sides.json"), self.writes + 1

    def sides(self, rows):
        rule = StratifiedSides(key=KEY, book=self.book, keep=self.keep, **self.settings)
        return dict(zip(rows.units, rule(rows), strict=True))


def moved(before, after):
    return {unit for unit, side in before.items() if after.get(unit, side) != side}


class TestKept:
    """A patient keeps its side for good when data are added."""

    def grown(self):
        rng = np.random.default_rng(5)
        patients = rng.integers(0, 60, 150)
        more = rng.integers(60, 75, 20)
        units = [f"p{number}" for number in [*patients, *more]]
        labels = [int(unit[1:]) % 3 for unit in units]
        return catalogue(units[:150], labels[:150]), catalogue(units, labels)

    @pytest.mark.parametrize("validation", [0.0, 0.1])
    def test_twenty_new_rows_move_nobody(self, validation):
        first, grown = self.grown()
        site = Kept(validation=validation)
        before = site.sides(first)
        after = site.sides(grown)
        assert moved(before, after) == set() and site.writes == 2
        assert site.sides(grown) == after and site.writes == 2, "written only where something was added"
        assert site.sides(first) == before, "and those who left are not forgotten"

    def test_who_was_away_while_others_came_is_where_it_was(self):
        first, grown = self.grown()
        site = Kept(validation=0.1)
        before = site.sides(first)
        site.sides(catalogue(grown.units[100:], grown.labels[100:]))
        assert site.writes == 2 and set(first.units[:100]) - set(grown.units[100:])
        assert site.sides(first) == before

    def test_the_twin_without_a_book_trains_on_former_test_images(self):
        first, grown = self.grown()
        before, after = Kept(validation=0.1).sides(first), Kept(validation=0.1).sides(grown)
        former = [unit for unit, side in before.items() if side == "test"]
        assert sum(after[unit] != "test" for unit in former) > len(former) / 2

    def test_new_units_fill_up_evenly(self):
        units = [f"p{number}" for number in range(400)]
        site = Kept()
        for size in (40, 80, 200, 400):
            sides = site.sides(catalogue(units[:size], [number % 3 for number in range(size)]))
            assert abs(sum(side == "test" for side in sides.values()) - size / 5) <= 3

    def test_without_a_book_sides_are_those_of_the_laboratory(self):
        first, _ = self.grown()
        plain = assemble(first, fold=0, validation=0.1)
        site = Kept(validation=0.1)
        rule = StratifiedSides(key=KEY, book=site.book, keep=site.keep, validation=0.1)
        kept = assemble(first, fold=0, rule=rule)
        for side in ("train", "test", "validation"):
            assert getattr(plain.sites[0], side).ids == getattr(kept.sites[0], side).ids

    def test_other_settings_are_refused(self):
        first, _ = self.grown()
        site = Kept(validation=0.1)
        site.sides(first)
        site.settings = {"validation": 0.2}
        with pytest.raises(DataError, match=r"were made by 'fold 0 of 5, validation 0\.1'"):
            site.sides(first)

    def test_a_column_holds_for_good_too(self):
        units, labels = ["a", "b", "c", "d", "e"], [0, 1, 2, 0, 1]
        site = Kept(fold="split", validation=0.5)
        before = site.sides(catalogue(units, labels, ["train", "test", "train", "train", "train"]))
        assert before["b"] == "test" and set(before.values()) == {"train", "test", "validation"}
        with pytest.raises(DataError, match="in 'train' now and was in 'test' before") as caught:
            site.sides(catalogue(units, labels, ["train"] * 5))
        assert "row 1" in str(caught.value)

    def test_the_book_names_nobody_and_a_damaged_one_is_refused(self):
        first, _ = self.grown()
        site = Kept()
        site.sides(first)
        assert b"p1" not in site.book.to_bytes()
        for damage in (b"", b"{}", b'{"format": 2, "rule": "", "places": {}}', site.book.to_bytes()[:-9]):
            with pytest.raises(DataError, match="damaged"):
                SideBook.of_bytes(damage, where="sides.json")
        assert SidePlace.parse("train.3") == SidePlace("train", 3) and str(SidePlace(2)) == "2"


def test_a_column_under_a_key():
    rows = catalogue(list("abcdefgh"), [0] * 8, ["train"] * 6 + ["test", ""])
    made = KeyedSides(key=KEY, fold="split", validation=0.5)(rows)
    assert made[6:] == ("test", "") and set(made[:6]) == {"train", "validation"}
