"""A3: a cohort of all colluders and one victim. `c` does not shrink with the cohort, so that it is illegal."""

from __future__ import annotations

import pytest

from lazaret.errors import PolicyViolation
from security.secagg.site import checks
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil


def alone_among_colluders(*, single_history: bool) -> EvilCoordinator:
    run = evil(7, colluders=2, c=2, single_history=single_history)
    run.lenient(c=0, single_history=False)
    run.open_round()
    run.launch(run.plan([VICTIM, *run.colluders]))
    return run


def test_the_cohort_is_illegal() -> None:
    run = alone_among_colluders(single_history=False)
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_thresholds")
    assert_safe(run)


def test_a_cohort_too_small_for_one_history_is_refused_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_thresholds", lambda *_: None)
    run = alone_among_colluders(single_history=True)
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_single_history")
    assert_safe(run)


def test_alone_among_colluders_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_thresholds", lambda *_: None)
    run = alone_among_colluders(single_history=False)
    assert_recovered(run)
