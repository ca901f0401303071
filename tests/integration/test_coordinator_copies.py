"""Copies of a coordinator: a move goes on in mid-run, and a backup takes a run up under another name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli import cli as coordinator_command
from lazaret import archive, files
from lazaret.errors import ConfigError
from security.clock import SystemClock
from security.consortium.cli import cli as consortium_command
from tests.integration.test_site_copies import audit_is_clean, begun, keys_of, known, site, typed
from tests.support.study import SITES, StudyFederation, small_study

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StudyFederation]:
    with small_study(tmp_path, SITES[:3]) as made:
        monkeypatch.setattr(SystemClock, "now_ms", lambda self: made.clock.now_ms())
        yield made


def hub(study: StudyFederation, *words: object) -> str:
    return typed(coordinator_command, *words, "--config", study.folder / "hub" / "coordinator.toml")


def move(study: StudyFederation) -> Path:
    """To another folder, which then has the place of the old one."""
    study.stop_hub()
    target, old, new = study.folder / "hub.move", study.folder / "hub", study.folder / "elsewhere"
    hub(study, "backup", target, "--move")
    typed(coordinator_command, "restore", target, new, *known(study))
    old.rename(study.folder / "hub-old")
    new.rename(old)
    return study.folder / "hub-old"


def test_a_coordinator_moves_in_mid_run(study: StudyFederation) -> None:
    begun(study)
    with pytest.raises(ConfigError, match="another coordinator runs"):
        hub(study, "backup", study.folder / "hub.move", "--move")
    old = move(study)
    study.start_hub()
    study.run_rounds(2)
    assert [row.outcome for row in study.rounds[:3]] == ["published"] * 3
    assert not keys_of(old)
    study.settle()
    names = list(study.agents)
    study.stop_all()
    audit_is_clean(study, *(study.folder / name / "state" / "log" for name in ("hub", *names)))


def test_the_old_coordinator_does_not_start_again(study: StudyFederation) -> None:
    begun(study)
    old = move(study)
    (study.folder / "hub").rename(study.folder / "hub-new")
    old.rename(study.folder / "hub")
    with pytest.raises(ConfigError, match="has moved"):
        study.start_hub()
    assert "move only" in hub(study, "state")
    for command in ("check", "status"):
        with pytest.raises(ConfigError, match="has moved"):
            hub(study, command)


def test_the_old_coordinator_starts_again_twin(study: StudyFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mark and erasure it would go on beside the new one, with an older database, and sites hold it off."""
    monkeypatch.setattr(archive, "refuse_moved", lambda state: None)
    monkeypatch.setattr(files, "erase", lambda path: None)
    begun(study)
    old = move(study)
    study.start_hub()
    study.run_rounds(1)
    study.stop_hub()
    (study.folder / "hub").rename(study.folder / "hub-new")
    old.rename(study.folder / "hub")
    study.start_hub()
    assert len([row for row in study.rounds if row.outcome == "published"]) == 1  # it has forgotten the second one


def test_a_backup_takes_the_run_up_under_another_name(study: StudyFederation) -> None:
    """The machine is lost. The backup has host names, configuration and the old log; the model comes from a site."""
    begun(study)
    target, root = study.folder / "hub.backup", study.folder / "consortium"
    hub(study, "backup", target)
    study.run_rounds(1)
    study.until(lambda: all(agent.state_dir.covered.exists() for agent in study.agents.values()))
    study.settle(4)
    study.kill_hub()
    shutil.rmtree(study.folder / "hub")
    typed(coordinator_command, "restore", target, study.folder / "hub-2", "--name", "hub-2", *known(study))
    common, config = ("--dir", root, "--no-passphrase"), study.folder / "hub-2" / "coordinator.toml"
    typed(consortium_command, "revoke", "hub", "--reason", "its disk is lost", "--dir", root)
    typed(consortium_command, "enroll", study.folder / "hub-2" / "identity" / "request.json", "--yes", *common)
    typed(consortium_command, "publish", *common)
    answer, manifest = root / "answers" / "hub-2.json", root / "manifest.json"
    typed(coordinator_command, "join", answer, "--manifest", manifest, "--config", config)  # the root is in the backup
    handover = study.folder / "handover"
    site(study, "graz", "handover", handover)
    typed(coordinator_command, "recover", handover, "--config", config)
    study.hub = "hub-2"
    study.start_hub()
    before = study.published
    study.run_rounds(2)
    assert study.published == before + 2 and study.survivors()[-1] == set(study.manifest.sites)


def test_a_backup_has_no_key_and_takes_another_name(study: StudyFederation) -> None:
    begun(study)
    target = study.folder / "hub.backup"
    hub(study, "backup", target)  # while it runs
    packed = target.read_bytes()
    assert not any(key in packed for key in keys_of(study.folder / "hub").values())
    assert not any(name.endswith(".sqlite") for name in archive.read_contents(target).digests)
    with pytest.raises(ConfigError, match="needs another name"):
        typed(coordinator_command, "restore", target, study.folder / "hub-2", *known(study))
    typed(coordinator_command, "restore", target, study.folder / "hub-2", "--name", "hub-2", *known(study))
    new = study.folder / "hub-2"
    assert (new / "identity" / "request.json").exists()
    assert (new / "state" / "earlier" / "hub" / "log" / "FORMAT").exists()
    assert not (new / "state" / "log").exists() and not (new / "state" / "coordinator.sqlite").exists()
