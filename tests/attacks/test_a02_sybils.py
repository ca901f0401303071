"""A2: the cohort is filled up with sites of the coordinator's own: unlisted ones, or ones whose key was revoked.

With three such sites beside one victim the sum, less what they put in, is the victim's update.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import PolicyViolation
from security.identity.membership import AggregationPolicy, RosterEntry
from security.secagg.site import checks
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil

COHORT = ["site-00", "site-05", "site-06", "site-07"]


def surrounded(how: str) -> EvilCoordinator:
    """Eight sites exist; for the honest ones the last three are unlisted, or revoked."""
    run = evil(8, colluders=3, c=1, single_history=False)
    roster = run.policy.roster
    for name in run.honest:
        core = run.machine(name).core
        if how == "unlisted":
            core.mandate.policy = replace(run.policy, roster=roster[:5])
        else:
            core.mandate.policy = replace(run.policy, revoked=frozenset(entry.cert for entry in roster[5:]))
    run.open_round()
    run.launch(run.plan(COHORT))
    return run


def trusting(run_policy: AggregationPolicy, how: str) -> object:
    """As if any certificate of the right root would do."""
    listed = {entry.site: entry for entry in run_policy.roster}

    def entry(self: AggregationPolicy, site: str) -> RosterEntry:
        return listed[site]

    return entry


@pytest.mark.parametrize("how", ["unlisted", "revoked"])
def test_sybils_are_refused(how: str) -> None:
    run = surrounded(how)
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_members")
    assert_safe(run)


@pytest.mark.parametrize("how", ["unlisted", "revoked"])
def test_their_adverts_are_refused_as_well(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the plan pass, no key of an unlisted or revoked site is taken."""
    monkeypatch.setattr(checks, "check_plan_members", lambda *_: None)
    run = surrounded(how)
    assert_refused(run, VICTIM, PolicyViolation, "check_advert_signatures")
    assert_safe(run)


@pytest.mark.parametrize("how", ["unlisted", "revoked"])
def test_sybils_twin(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = evil(8, colluders=3, c=1, single_history=False).policy
    monkeypatch.setattr(AggregationPolicy, "entry", trusting(policy, how))
    run = surrounded(how)
    assert_recovered(run)
