"""One federation of real processes; in each round somebody is killed by SIGKILL at another step of the protocol.

The suite kills before one step and after the next; `LAZARET_LONG=1` before and after each of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable

import pytest

from coordinator.results import KEPT_SUMS
from scripts.local_federation.federation import ROOT
from scripts.local_federation.party import COORDINATOR_STEPS, SITE_STEPS
from security.audit.facts import read_history
from tests.support.federation import WAIT, NumberFederation


def endings(steps: Iterable[str]) -> list[str]:
    both = ("before", "after")
    if os.environ.get("LAZARET_LONG") == "1":
        return [f"{when}-{step}" for step in steps for when in both]
    return [f"{both[place % 2]}-{step}" for place, step in enumerate(steps)]


SITE_ENDINGS = [*endings(SITE_STEPS), "during-S3"]
COORDINATOR_ENDINGS = endings(COORDINATOR_STEPS)

ALL = "sum of 4 sites accepted"

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@pytest.fixture(scope="module")
def survivors(tmp_path_factory: pytest.TempPathFactory) -> NumberFederation:
    """The federation after all its deaths."""
    federation = NumberFederation(tmp_path_factory.mktemp("deaths"), rounds=70)
    names = list(federation.sites)
    deaths = [(federation.coordinator, ending) for ending in COORDINATOR_ENDINGS]
    deaths += [(federation.sites[names[place % len(names)]], ending) for place, ending in enumerate(SITE_ENDINGS)]
    with federation.running():
        federation.wait_published(1)
        for party, ending in deaths:
            party.kill_at(ending)
            assert party.wait_dead(seconds=WAIT) == -signal.SIGKILL, ending
            before = federation.published
            party.start()
            federation.wait_published(before + 1)
        # The last one to die is in a sum again.
        witness = federation.sites[names[0]]
        whole = witness.text().count(ALL)
        witness.wait_for(ALL, times=whole + 1, seconds=WAIT)
        federation.wait_checked(federation.published)
    return federation


def test_every_sum_is_exact_over_its_survivors(survivors: NumberFederation) -> None:
    results = survivors.check_sums()
    assert len(results) > len(SITE_ENDINGS) + len(COORDINATOR_ENDINGS)
    # Some were left out of a sum by their death, and none for longer than that.
    assert {len(sites) for _, sites in results} == {3, 4}


def test_every_round_is_published_or_ends_clean(survivors: NumberFederation) -> None:
    outcomes = [row["outcome"] for row in survivors.rounds]
    assert outcomes.count("published") == len(survivors.check_sums())
    assert outcomes[-1] in ("published", None)


def test_nobody_says_two_things_about_one(survivors: NumberFederation) -> None:
    for home in survivors.folders.homes().values():
        said = survivors.said(home)
        assert len(said) > 20
        assert [about for about, words in said.items() if len(words) > 1] == []


def test_logs_agree_about_everything(survivors: NumberFederation) -> None:
    root = survivors.folders.consortium / "root.pem"
    words = ["cross", *map(str, survivors.folders.logs), "--root-key", str(root)]
    code = "from security.audit.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    # A process that is killed takes its kernel's count with it; after so many kills a count may cover too little to
    # decide by. Nothing else may be open, and nothing may be found.
    undecided = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("????")}
    assert undecided <= {"CounterCoverage"}, done.stdout[-3000:]
    assert done.returncode == (3 if undecided else 0), done.stdout[-3000:] + done.stderr[-1000:]


def test_one_vector_in_each_attempt_and_one_set_of_survivors(survivors: NumberFederation) -> None:
    """From the logs alone: what a site sent again after a death had the same root, what it agreed to was one set."""
    for path in survivors.folders.logs[1:]:
        history = read_history(path, origin="", name="", role="")
        agreed: dict[str, set[str]] = {}
        for record in history.of("secagg.survivors"):
            agreed.setdefault(record.body["context"], set()).add(record.body["survivors"])
        assert agreed and all(len(sets) == 1 for sets in agreed.values())


def test_dead_processes_left_no_promise_behind(survivors: NumberFederation) -> None:
    """A site that died came back and was in later sums: nobody is stuck, halted or excluded."""
    assert {len(sites) for _, sites in survivors.check_sums()[-2:]} & {4}
    for party in survivors.parties:
        assert party.code == 0, party.text()[-2000:]


def test_nothing_is_left_in_the_spool_but_the_last_sums(survivors: NumberFederation) -> None:
    spool = survivors.folders.coordinator / "state" / "spool"
    assert len(list(spool.iterdir())) <= KEPT_SUMS + len(survivors.sites) + 1
