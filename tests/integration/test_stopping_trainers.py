"""Signals at random moments of a round, to agents, trainers and the coordinator: exit 0, nothing lost, sums exact.

`LAZARET_LONG=1` sends fifty SIGTERMs and twenty SIGKILLs; else a few of each.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from scripts.local_federation import demo_report
from scripts.local_federation.federation import wait_until
from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.audit.findings import Severity
from tests.support.learning_federation import LearningFederation, end
from tests.support.processes import running

LONG = os.environ.get("LAZARET_LONG") == "1"
# How many of each, where somebody wants fewer or more: LAZARET_TERMS, LAZARET_KILLS.
TERMS = int(os.environ.get("LAZARET_TERMS", 50 if LONG else 3))
KILLS = int(os.environ.get("LAZARET_KILLS", 20 if LONG else 1))
SIGNALS = (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which everything here inherits
    SIGNALS = SIGNALS[:-1]
pytestmark = pytest.mark.timeout(3600 if LONG else 400)


def check_everything(federation: LearningFederation) -> None:
    """Every sum is that of the updates put aside, and no log has a fault."""
    exact, _ = demo_report.check_sums(federation.folders)
    assert exact
    logs, root = federation.folders.logs, federation.folders.consortium / "root.pem"
    found = cross(logs, {path: keys_for(path, root) for path in logs})
    assert [finding for finding in found.findings if finding.severity is Severity.FAIL] == []


def kill_trainers(federation: LearningFederation) -> None:
    chance, begun = random.Random(16), len(federation.outcomes())
    for _ in range(KILLS):
        site = federation.sites[chance.choice(sorted(federation.sites))]
        trainings = site.text().count(": training")
        wait_until(lambda site=site, n=trainings: site.text().count(": training") > n, "training", seconds=120)
        time.sleep(chance.uniform(0.0, 0.4))
        before, lost = federation.published, site.text().count("it was killed by SIGKILL")
        os.kill(federation.trainer_of(site), signal.SIGKILL)
        wait_until(
            lambda site=site, lost=lost: site.text().count("it was killed by SIGKILL") > lost,
            "the agent noticing", seconds=30, output=site.output,
        )  # fmt: skip
        assert site.code is None, "the agent stays"
        federation.wait_published(before + 1)
    outcomes = [outcome for outcome in federation.outcomes()[begun:] if outcome is not None]
    print(f"{KILLS} trainers killed, {len(outcomes)} rounds, {outcomes.count('published')} published")
    assert set(outcomes) <= {"published"}


def kill_an_agent(federation: LearningFederation) -> None:
    """Its trainer, which hangs, does not outlive it; and the next start goes on."""
    site = next(iter(federation.sites.values()))
    trainer = federation.trainer_of(site)
    os.kill(trainer, signal.SIGSTOP)
    site.kill()
    wait_until(lambda: not running(trainer), "the end of a trainer without agent", seconds=60)
    site.start()


def send_signals(federation: LearningFederation) -> None:
    chance = random.Random(15)
    slowest = 0.0
    for number in range(TERMS):
        time.sleep(chance.uniform(0.0, 3.0 if LONG else 1.0))
        which = ("agent", "trainer", "coordinator")[number % 3]
        site = federation.sites[chance.choice(sorted(federation.sites))]
        told = chance.choice(SIGNALS)
        if which == "trainer":
            ended, trainer = site.text().count("it ended with code"), federation.trainer_of(site)
            started = time.monotonic()
            os.kill(trainer, told)
            wait_until(
                lambda site=site, ended=ended: site.text().count("it ended with code") > ended,
                "the end of a trainer", seconds=15, output=site.output,
            )  # fmt: skip
            taken = time.monotonic() - started
        else:
            party = site if which == "agent" else federation.coordinator
            # A Python program that has not yet read its first lines can promise nothing: this one has.
            party.wait_for("starting", times=party.starts, seconds=300)
            code, taken = end(party, told)
            assert code == 0, (which, told, party.text()[-2000:])
            party.start()
        slowest = max(slowest, taken)
    print(f"{TERMS} signals, the slowest end took {slowest:.1f} s")
    assert all("it ended with code 0" in line for site in federation.sites.values() for line in site.text().splitlines()
               if "it ended with code" in line)  # fmt: skip
    federation.wait_published(federation.published + 1)


def test_signals_and_kills_lose_nothing(tmp_path: Path) -> None:
    federation = LearningFederation(tmp_path / "federation", rounds=900)
    federation.start()
    try:
        federation.wait_published(1)
        kill_trainers(federation)
        kill_an_agent(federation)
        send_signals(federation)
    finally:
        codes = federation.stop()
    assert set(codes) == {0}
    check_everything(federation)
