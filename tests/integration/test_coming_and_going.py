"""Sites that come back late, join anew or leave for good, while the others go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.cli import cli as coordinator_command
from coordinator.results import KEPT_SUMS
from scripts.local_federation.federation import command
from scripts.local_federation.sums import read_published
from security.consortium.cli import cli as consortium_command
from security.identity.enrolment import Identity
from security.identity.pki import fingerprint
from tests.support.federation import WAIT, NumberFederation

pytestmark = pytest.mark.timeout(300)

DEPARTURES: list[int] = []  # how many sums were published when a site had left


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumberFederation]:
    made = NumberFederation(tmp_path_factory.mktemp("going"), rounds=80, words=3000)
    with made.running():
        made.wait_published(1)
        yield made


def takes_part_again(federation: NumberFederation, name: str, of: int) -> None:
    """The site accepts a sum of everybody, itself among them."""
    words = f"sum of {of} sites accepted"
    seen = federation.sites[name].text().count(words)
    federation.sites[name].wait_for(words, times=seen + 2, seconds=WAIT)


def miss_rounds(federation: NumberFederation, name: str, count: int) -> None:
    site = federation.sites[name]
    assert site.stop() == 0
    federation.wait_published(federation.published + count)
    site.start()


def test_a_site_that_missed_some_rounds_replays_their_sums(federation: NumberFederation) -> None:
    before = federation.sites["site3"].text().count("accepted")
    miss_rounds(federation, "site3", 3)
    takes_part_again(federation, "site3", 4)
    assert federation.sites["site3"].text().count("sum of 3 sites accepted") >= 3
    assert federation.sites["site3"].text().count("accepted") > before + 3


def test_a_site_that_missed_too_many_takes_a_covered_state(federation: NumberFederation) -> None:
    replayed = federation.sites["site2"].text().count("sum of 3 sites accepted")
    miss_rounds(federation, "site2", KEPT_SUMS + 2)
    takes_part_again(federation, "site2", 4)
    # It did not go through the sums one by one.
    assert federation.sites["site2"].text().count("sum of 3 sites accepted") - replayed < KEPT_SUMS


def adopt(federation: NumberFederation) -> None:
    """The operator installs the newest manifest and restarts; the sites learn of it when they connect again."""
    folders = federation.folders
    assert federation.coordinator.stop() == 0
    config = folders.coordinator / "coordinator.toml"
    command(coordinator_command, "join", "--manifest", folders.manifest, "--config", config)
    federation.coordinator.start()


def test_a_new_site_joins_with_a_new_manifest(federation: NumberFederation) -> None:
    folders = federation.folders
    folders.sources["site4"] = "generated"  # type: ignore[index]  # a dict, as the federation made it
    folders.make_site("site4")
    folders.enroll(folders.site("site4"))
    folders.publish()
    root = fingerprint(Identity(folder=folders.coordinator / "identity").root())
    folders.join("site4", folders.site("site4"), root)
    adopt(federation)
    _, parties = folders.parties("--numbers")
    federation.sites["site4"] = parties["site4"]
    federation.sites["site4"].start()
    takes_part_again(federation, "site4", 5)
    for name in ("site0", "site1", "site2", "site3"):
        assert "manifest version 2 is in force" in federation.sites[name].text()


def test_a_site_leaves_for_good(federation: NumberFederation) -> None:
    folders = federation.folders
    assert federation.sites["site1"].stop() == 0
    DEPARTURES.append(federation.published)
    command(consortium_command, "revoke", "site1", "--reason", "left the federation", "--dir", folders.consortium)
    folders.publish()
    adopt(federation)
    takes_part_again(federation, "site0", 4)
    # Should it come back, it is told so in one line, and nothing of it is taken. It waits, as a new site does whose
    # operator has not the newest manifest yet.
    federation.sites["site1"].start()
    federation.sites["site1"].wait_for("refused by the coordinator: certificate is not accepted here", seconds=WAIT)
    assert federation.sites["site1"].stop() == 0


def test_all_sums_were_exact(federation: NumberFederation) -> None:
    federation.stop()
    results = read_published(federation.folders.coordinator)
    rosters = [set(result.survivors) for result in results]
    # Sums of five and of the four that stay are there, because both were waited for; a late site may miss any other.
    left = DEPARTURES[0]
    assert {f"site{number}" for number in range(5)} in rosters[:left]
    assert {"site0", "site2", "site3", "site4"} in rosters[left:]
    # The round under way when the site stopped may still have it; none after that.
    assert all("site1" not in roster for roster in rosters[left + 1 :]), rosters
    assert any(result.total is not None for result in results)
    federation.check_sums()
