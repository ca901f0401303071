"""Several runs wait at the coordinator, and one of them is outside of every hospital's policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli import cli as coordinator_command
from scripts.local_federation.federation import command
from security.clock import SystemClock
from security.consortium.cli import cli as consortium_command
from security.log.reader import LogReader
from tests.support.site_world import policy_table
from tests.support.study import StudyFederation, small_study

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StudyFederation]:
    with small_study(tmp_path, rounds=1) as made:
        monkeypatch.setattr(SystemClock, "now_ms", lambda self: made.clock.now_ms())
        yield made


def queue(study: StudyFederation, run: str, method: str) -> None:
    """The consortium gives manifest and model of one more run to the operator."""
    authority, config = study.world.authority, study.folder / "hub" / "coordinator.toml"
    text = authority.plan_path.read_text()
    newest = authority.latest(now_ms=study.clock.now_ms())
    assert newest is not None
    text = text.replace(f'run = "{newest.run}"', f'run = "{run}"')
    authority.plan_path.write_text(text.replace(f'"{newest.training.method}"', f'"{method}"'))
    command(consortium_command, "publish", "--no-passphrase", "--dir", authority.folder)
    model = authority.folder / "initial.safetensors"
    command(coordinator_command, "queue", authority.manifest_path, model, "--config", config)


def test_a_run_that_nobody_permits_is_ended_by_the_operator_and_the_next_one_begins(study: StudyFederation) -> None:
    """No hospital is touched: all of them decline run 2, and take part in run 3."""
    policy = policy_table(accept_runs='"within_policy"', methods='["fednpr-per"]')
    sites = sorted(study.manifest.sites)
    for name in sites:
        path = study.folder / name / "site.toml"
        path.write_text(path.read_text() + policy)
    study.start_hub()
    for name in sites:
        study.start(name)
    queue(study, "run-2", "fedavg")
    queue(study, "run-3", "fednpr-per")
    study.until(lambda: study.manifest.run == "run-2" and all(agent.next_run.offer for agent in study.agents.values()))
    study.settle(60)
    assert not study.started and study.manifest.run == "run-2" and not study.published
    assert {agent.manifest.run for agent in study.agents.values()} == {"run-1"}
    config = study.folder / "hub" / "coordinator.toml"
    command(coordinator_command, "end-run", "run-2", "--reason", "nobody permits it", "--config", config)
    study.until(lambda: sorted(study.started) == sites)
    study.run_rounds(1)
    for name in sites:
        agent = study.agents[name]
        log = LogReader(agent.state_dir.log)
        (offered,), (accepted,) = log.checked("run.offered"), log.checked("run.accepted")
        assert offered.body["next"] == "run-2" and offered.body["reason"].startswith("[policy] methods")
        assert accepted.run == "run-3" == agent.manifest.run and accepted.body["by"] == "policy"
