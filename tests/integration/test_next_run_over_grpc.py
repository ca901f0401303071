"""Agents and coordinator go from run to run over mTLS: the same processes, no file copied, and a clean audit. The first
run has scores, and its best model is exported.
"""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from coordinator.cli import cli as coordinator_command
from coordinator.database import FILE
from coordinator.round_history import ReadOnlyHistory
from coordinator.status import overview
from scripts.local_federation.federation import FederationFolders, command
from scripts.local_federation.known_updates import write_numbers
from security.audit.agreement import keys_of
from security.audit.compare import cross
from security.log.reader import LogReader
from tests.support.federation import WAIT, WORDS, NumberFederation

pytestmark = pytest.mark.timeout(300)

# All four sites are in every sum of scores. An export describes the images that a model takes.
SCORES = '[scores]\nsites = ["site0", "site1", "site2", "site3"]\n'
IMAGES = '"model.image_size" = 32\n"model.in_channels" = 3\n'


def publish_second(federation: NumberFederation) -> FederationFolders:
    """The consortium gives manifest and model of run 2 to the operator alone."""
    first = federation.folders
    plan = first.plan.replace('"run-1"', '"run-2"').replace(SCORES, "")
    second = replace(first, plan=plan, initial=first.folder / "second.safetensors")
    write_numbers(second.initial, WORDS + 6000)  # another layout, too
    second.publish()
    return second


def export_best(federation: NumberFederation, target: Path) -> None:
    """`coordinator export --best`, beside the running coordinator, of the first model: all were scored alike."""
    home = federation.folders.coordinator
    said = command(coordinator_command, "export", target, "--best", "--json", "--config", home / "coordinator.toml")
    written = json.loads(said)
    assert written["round"] == 1 and json.loads(target.with_suffix(".json").read_text())["round"] == 1
    with ReadOnlyHistory(home / "state" / FILE) as history:
        found = history.scores()
    assert found[1].count == 4 and found[1].mean == Fraction(51, 64), "0.8 on the grid, at each site"


def test_four_agents_and_a_coordinator_go_from_run_1_to_run_2_over_grpc(tmp_path: Path) -> None:
    """Run 2 waits in the coordinator's queue, the operator ends run 1 early, and nothing is started again."""
    numbers = "colluders = 0\nleast_survivors = 4\n" + SCORES
    policy = 'accept_runs = "within_policy"\nshare_scores = true'
    federation = NumberFederation(tmp_path, rounds=400, aggregation=numbers, settings=IMAGES, policy=policy)
    config = federation.folders.coordinator / "coordinator.toml"
    with federation.running():
        federation.wait_checked(2)
        export_best(federation, tmp_path / "best.safetensors")
        processes = {party.name: party.pid for party in federation.parties}
        federation.folders = publish_second(federation)
        folders = federation.folders
        command(coordinator_command, "queue", folders.manifest, folders.initial, "--config", config)
        assert overview(config)["queue"] == ["run-2"]
        command(coordinator_command, "end-run", "run-1", "--reason", "enough", "--config", config)
        federation.coordinator.wait_for("run run-1 is over, run run-2 begins", seconds=2 * WAIT)
        federation.coordinator.wait_for("the sum of round 1 is checked", seconds=2 * WAIT, times=2)
        assert {party.name: party.pid for party in federation.parties} == processes
    survivors = [len(survivors) for _, survivors in federation.check_sums()]
    assert survivors and survivors[0] == 4
    for name in federation.sites:
        home = folders.site(name)
        assert (home / "initial.safetensors").read_bytes() != folders.initial.read_bytes()
        (fetched,) = (home / "state" / "initial").iterdir()
        assert fetched.read_bytes() == folders.initial.read_bytes()
        log = LogReader(home / "state" / "log")
        (accepted,) = log.checked("run.accepted")
        assert accepted.body["fetched"] and accepted.body["by"] == "policy" and accepted.run == "run-2"
        assert len(list(log.checked("run.stopped"))) == 1
    crossed = cross(folders.logs, keys_of(folders.logs, folders.consortium / "root.pem"))
    assert [finding for finding in crossed.findings if finding.severity.value != "note"] == []
