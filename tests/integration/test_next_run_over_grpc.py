"""Agents and coordinator go from run to run over mTLS: the same processes, no file copied, and a clean audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cli import cli as coordinator_command
from coordinator.status import overview
from scripts.local_federation.known_updates import write_numbers
from scripts.local_federation.setup import Grounds, command
from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.log.reader import LogReader
from tests.support.federation import WAIT, WORDS, NumberFederation

pytestmark = pytest.mark.timeout(300)


def publish_second(federation: NumberFederation) -> Grounds:
    """The consortium gives manifest and model of run 2 to the operator alone."""
    first = federation.grounds
    second = replace(first, plan=first.plan.replace('"run-1"', '"run-2"'), initial=first.folder / "second.safetensors")
    write_numbers(second.initial, WORDS + 6000)  # another layout, too
    second.publish()
    return second


def test_three_agents_and_a_coordinator_go_from_run_1_to_run_2_over_grpc(tmp_path: Path) -> None:
    """Run 2 waits in the coordinator's queue, the operator ends run 1 early, and nothing is started again."""
    federation = NumberFederation(tmp_path, sites=3, rounds=400, policy='accept_runs = "within_policy"')
    config = federation.grounds.coordinator / "coordinator.toml"
    with federation.running():
        federation.wait_checked(1)
        processes = {party.name: party.pid for party in federation.parties}
        federation.grounds = publish_second(federation)
        grounds = federation.grounds
        command(coordinator_command, "queue", grounds.manifest, grounds.initial, "--config", config)
        assert overview(config)["queue"] == ["run-2"]
        command(coordinator_command, "end-run", "run-1", "--reason", "enough", "--config", config)
        federation.coordinator.wait_for("run run-1 is over, run run-2 begins", seconds=2 * WAIT)
        federation.coordinator.wait_for("the sum of round 1 is checked", seconds=2 * WAIT, times=2)
        assert {party.name: party.pid for party in federation.parties} == processes
    survivors = [len(survivors) for _, survivors in federation.check_sums()]
    assert survivors and survivors[0] == 3
    for name in federation.sites:
        home = grounds.site(name)
        assert (home / "initial.safetensors").read_bytes() != grounds.initial.read_bytes()
        (fetched,) = (home / "state" / "initial").iterdir()
        assert fetched.read_bytes() == grounds.initial.read_bytes()
        log = LogReader(home / "state" / "log")
        (accepted,) = log.checked("run.accepted")
        assert accepted.body["fetched"] and accepted.body["by"] == "policy" and accepted.run == "run-2"
        assert len(list(log.checked("run.stopped"))) == 1
    keys = {path: keys_for(path, grounds.consortium / "root.pem") for path in grounds.logs}
    crossed = cross(grounds.logs, keys)
    assert [finding for finding in crossed.findings if finding.severity.value != "note"] == []
