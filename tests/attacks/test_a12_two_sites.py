"""A12: a cohort of two. Each of the two subtracts its own update and has the other's.

With differential privacy at the site a cohort of two can be allowed; what is left of the update then is in
test_a12_a13_a24_noise_in_the_sum.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import ConfigError, PolicyViolation
from security.secagg import messages
from security.secagg.site import checks
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil


def only_two(*, allowed: bool = False, ledger: bool = False) -> EvilCoordinator:
    run = evil(3, c=0, single_history=False)
    for name in run.honest:
        core = run.machine(name).core
        core.mandate.policy = replace(core.policy, allow_two_site=allowed, dp_active=ledger)
    run.lenient(allow_two_site=True, dp_active=True)
    run.open_round()
    run.launch(run.plan([VICTIM, *run.colluders]))
    return run


@pytest.mark.parametrize(("allowed", "ledger"), [(False, False), (True, False), (False, True)])
def test_two_sites_need_the_manifest_and_a_ledger(allowed: bool, ledger: bool) -> None:
    run = only_two(allowed=allowed, ledger=ledger)
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_thresholds")
    assert_safe(run)


def test_with_both_it_is_a_choice() -> None:
    run = only_two(allowed=True, ledger=True)
    assert run.said(messages.Unmask, by=VICTIM), "allowed: the noise in the update is what protects it"


def test_two_sites_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_thresholds", lambda *_: None)
    assert_recovered(only_two())


def test_a_manifest_that_asks_for_fewer_than_three_survivors() -> None:
    with pytest.raises(ConfigError, match="at least 3"):
        replace(evil(3, wide=False).policy, m=2)
