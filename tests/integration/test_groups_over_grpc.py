"""Groups of sites over loopback TLS: each group's sum is exact, with a dropout and restarts, and the logs show it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from scripts.local_federation.party import COORDINATOR_STEPS, SITE_STEPS
from scripts.local_federation.sums import manifest_at
from security.identity.membership import groups_of
from tests.support.federation import WAIT, NumberFederation

pytestmark = pytest.mark.timeout(300)

SITES = 10  # groups of four, three and three: one of the four can be spared


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> NumberFederation:
    """After a round of all, one in which a site was killed before its upload, and one with the coordinator killed."""
    made = NumberFederation(
        tmp_path_factory.mktemp("groups"), sites=SITES, rounds=30, words=400, aggregation="colluders = 1\ngroups = 3\n"
    )
    split = groups_of(manifest_at(made.folders.coordinator / "identity").aggregation)
    assert split is not None
    spared = made.sites[max(split.members, key=len)[0]]
    with made.running():
        made.wait_published(1)
        spared.kill_at("before-S3")
        assert spared.wait_dead(seconds=WAIT) == -signal.SIGKILL
        spared.start()
        made.wait_published(2)
        spared.wait_for(f"sum of {SITES} sites accepted", times=2, seconds=WAIT)
        made.coordinator.kill_at("before-C5")
        assert made.coordinator.wait_dead(seconds=WAIT) == -signal.SIGKILL
        made.coordinator.start()
        before = made.published
        made.wait_published(before + 1)
        for site in made.sites.values():
            site.wait_for(f"round {made.rounds[before]['number']}: sum of", seconds=WAIT)
            os.kill(site.pid, signal.SIGTERM)
    return made


def test_each_groups_sum_is_exact(federation: NumberFederation) -> None:
    survivors = [sites for _, sites in federation.check_sums()]
    assert {len(sites) for sites in survivors} == {SITES - 1, SITES}


def test_every_site_has_computed_the_same_model(federation: NumberFederation) -> None:
    federation.check_models()


def test_all_logs_together_are_clean(federation: NumberFederation) -> None:
    federation.check_logs()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_groups_with_somebody_killed_at_every_step(tmp_path: Path) -> None:
    made = NumberFederation(tmp_path, sites=12, rounds=80, words=70_000, aggregation="colluders = 1\ngroups = 3\n")
    deaths = [(made.coordinator, f"after-{step}") for step in COORDINATOR_STEPS]
    deaths += [(made.sites[f"site{place}"], f"before-{step}") for place, step in enumerate(SITE_STEPS)]
    with made.running():
        made.wait_published(1)
        for party, ending in deaths:
            party.kill_at(ending)
            assert party.wait_dead(seconds=WAIT) == -signal.SIGKILL, ending
            before = made.published
            party.start()
            made.wait_published(before + 1, seconds=2 * WAIT)
        made.sites["site0"].wait_for("sum of 12 sites accepted", times=2, seconds=WAIT)
    assert {len(sites) for _, sites in made.check_sums()} >= {11, 12}
    made.check_logs()
