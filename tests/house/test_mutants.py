"""The list of `scripts/mutants` fits the code: every place is there once, every change is one, every test exists."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from scripts.mutation import ROOT, Mutant, NoSuchPlace, read_mutants
from security.secagg import thresholds

MUTANTS = read_mutants()
NEWER = 20


def test_there_are_enough_and_no_two_are_the_same() -> None:
    assert len(MUTANTS) >= 60
    assert len({(mutant.file, mutant.was, mutant.now) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name[:90])
def test_each_place_is_in_the_code_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.was) == 1
    assert mutant.was != mutant.now
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test
        assert (ROOT / file).exists(), test


def test_the_last_whole_run_left_nothing_open() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "secagg" / "mutants.json").read_text())
    assert found["survived"] == [] and found["killed"] + found["explained"] == found["mutants"] >= 60
    assert Counter(found["verdicts"].values()) == {name: found[name] for name in ("killed", "explained")}
    # A change or two may be newer than the run.
    apart = found["verdicts"].keys() ^ {mutant.key for mutant in MUTANTS}
    assert len(apart) <= NEWER, f"scripts/mutants --missing --into FILE: {len(apart)} without a verdict"


def test_a_change_takes_the_place_of_the_function() -> None:
    mutant = Mutant(file="security/secagg/thresholds.py", was="return c + 3", now="return c + 9", tests=("tests",))
    original = thresholds.most_attempts.__code__
    try:
        assert mutant.apply() == 1 and thresholds.most_attempts(1) == 10
    finally:
        thresholds.most_attempts.__code__ = original
    assert thresholds.most_attempts(1) == 4


def test_a_lost_place_is_reported() -> None:
    with pytest.raises(NoSuchPlace, match="stands there 0 times"):
        Mutant(file="security/secagg/thresholds.py", was="nowhere", now="", tests=("tests",)).source()
