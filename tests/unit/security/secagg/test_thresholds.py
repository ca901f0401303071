"""Sizes of quorums: the numbers of the specification, and why they are what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import ConfigError, PolicyViolation
from protos.loopback import LoopbackFederation
from security.secagg import thresholds
from tests.support.secagg_world import federation, random_updates, reference_sum


@pytest.mark.parametrize(
    ("n", "c", "t", "a"),
    [
        (3, 0, 3, 1),
        (3, 1, 3, 2),
        (4, 1, 3, 3),
        (5, 1, 4, 3),
        (6, 1, 4, 4),
        (7, 2, 5, 5),
        (10, 3, 7, 7),
        (20, 6, 14, 13),
        (50, 16, 34, 33),
        (100, 33, 67, 67),
    ],
)
def test_table(n: int, c: int, t: int, a: int) -> None:
    sizes = thresholds.derive(n=n, c=c, m=3)
    assert (sizes.t, sizes.a) == (t, a)


def test_default_colluders() -> None:
    assert [thresholds.default_colluders(n) for n in (2, 3, 4, 5, 6, 7, 8, 10, 100)] == [0, 1, 1, 1, 1, 2, 2, 3, 33]
    assert thresholds.default_colluders(3, two_sites=True) == 0


def test_colluders_that_cost_no_larger_quorum() -> None:
    """Three sites: c = 1 has the quorum of c = 0. At 5, 8, 11 one more would be free of a larger quorum, not of its
    other costs: c silent sites then stop an attempt, which the default avoids from four sites on."""
    assert [thresholds.free_colluders(n) for n in range(3, 13)] == [1, 1, 2, 1, 2, 3, 2, 3, 4, 3]
    for n in range(4, 100):
        c = thresholds.default_colluders(n)
        assert thresholds.quorum(n=n, c=c, m=3) <= n - c, "c sites that stay away do not stop a round"


def test_every_legal_cohort_has_the_three_properties() -> None:
    legal = 0
    for n in range(2, 80):
        for c in range(n):
            try:
                sizes = thresholds.derive(n=n, c=c, m=3)
            except PolicyViolation:
                continue
            legal += 1
            assert 2 * sizes.t - n > c, "two quorums share an honest site"
            assert sizes.t - c >= 2, "every sum has two honest terms"
            assert n - sizes.a + c < sizes.t <= n - (sizes.a - 1) + c, "a is the least number that kills a sum"
            assert c < sizes.a <= sizes.t, "colluders alone cannot abort"
    assert legal > 1000


def test_colluders_and_one_victim_are_no_cohort() -> None:
    with pytest.raises(PolicyViolation, match="smaller than its quorum") as caught:
        thresholds.derive(n=4, c=3, m=3)
    assert "at least 5" in str(caught.value.hint)


def test_smallest_cohorts() -> None:
    assert thresholds.least_cohort(c=33, m=3) == 35
    assert thresholds.least_cohort(c=3, m=3) == 5
    assert thresholds.least_cohort(c=3, m=3, roster=10) == 7
    assert thresholds.least_cohort(c=0, m=3) == 3


def two_sites(**options: bool) -> LoopbackFederation:
    made = federation(3, c=0)
    made.policy = replace(made.policy, **options)  # type: ignore[arg-type]
    return made


def test_two_sites_need_the_manifest_and_noise() -> None:
    for allow, noise in ((False, False), (True, False), (False, True)):
        with pytest.raises(PolicyViolation, match="each site the other's update"):
            two_sites(allow_two_site=allow, dp_active=noise).policy.thresholds(2)
    sizes = two_sites(allow_two_site=True, dp_active=True).policy.thresholds(2)
    assert (sizes.n, sizes.t, sizes.m) == (2, 2, 2)


def test_two_sites_with_noise_sum_their_vectors() -> None:
    run = federation(2, allow_two_site=True, dp_active=True)
    updates = random_updates(run.policy.layout, run.sites, 1)
    outcome = run.run_round(updates)
    assert outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, run.sites)
    assert federation(2).run_round(updates).total is None


def test_a_pair_out_of_a_larger_roster_leaves_room_for_a_second_history() -> None:
    policy = replace(federation(5).policy, allow_two_site=True, dp_active=True, c=0)
    with pytest.raises(PolicyViolation, match="second history"):
        policy.check_cohort(2)


def test_a_policy_refuses_confusion() -> None:
    policy = federation(3).policy
    one, two, three = policy.roster
    for roster, text in (
        ((one, replace(two, site=one.site), three), "same id"),
        ((one, replace(two, cert=one.cert), three), "same certificate"),
        ((one, replace(two, key=one.key), three), "same signing key"),
    ):
        with pytest.raises(ConfigError, match=text):
            replace(policy, roster=roster)
    with pytest.raises(ConfigError, match="m at least 3"):
        replace(policy, m=2)
    with pytest.raises(ConfigError, match="smaller roster"):
        replace(policy, roster=federation(4).policy.roster, coordinator=federation(4).policy.coordinator)


def test_unlisted_and_revoked_sites_have_no_entry() -> None:
    policy = federation(3).policy
    with pytest.raises(PolicyViolation, match="not in the roster"):
        policy.entry("stranger")
    revoked = replace(policy, revoked=frozenset({policy.roster[0].cert}))
    with pytest.raises(PolicyViolation, match="revoked"):
        revoked.entry(policy.roster[0].site)
    assert not revoked.lists(policy.roster[0].site) and revoked.lists(policy.roster[1].site)
