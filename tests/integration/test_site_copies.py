"""Copies of a hospital: a backup has nothing to act with, and a move leaves one site and not two."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.cli import cli as coordinator_command
from lazaret import archive, control, files
from lazaret.errors import ConfigError, RollbackDetected, ToolkitError
from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.clock import SystemClock
from security.consortium.cli import cli as consortium_command
from security.identity.pki import fingerprint
from security.secagg.relay import CloseReason
from site_agent.cli import cli as site_command
from tests.support.study import StudyFederation, small_study

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StudyFederation]:
    with small_study(tmp_path) as made:
        monkeypatch.setattr(SystemClock, "now_ms", lambda self: made.clock.now_ms())
        yield made


def typed(command: object, *words: object) -> str:
    done = CliRunner().invoke(command, [str(word) for word in words])  # type: ignore[arg-type]
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def site(study: StudyFederation, name: str, *words: object) -> str:
    return typed(site_command, "--config", study.folder / name / "site.toml", *words)


def known(study: StudyFederation) -> tuple[str, str]:
    """What the consortium reads out."""
    return "--root-fingerprint", fingerprint(study.world.authority.root)


def begun(study: StudyFederation, rounds: int = 1) -> None:
    study.start_hub()
    for name in study.manifest.sites:
        study.start(name)
    study.run_rounds(rounds)


def keys_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "identity" / "keys").rglob("*") if path.is_file()}


def audit_is_clean(study: StudyFederation, *logs: Path) -> None:
    root = study.folder / "consortium" / "root.pem"
    crossed = cross(list(logs), {path: keys_for(path, root) for path in logs})
    assert crossed.exit_code == 0, [finding for finding in crossed.findings if finding.severity.value != "note"]


# A backup.


def test_a_backup_has_nothing_that_could_act(study: StudyFederation) -> None:
    begun(study)
    home, target = study.folder / "graz", study.folder / "graz.backup"
    site(study, "graz", "backup", target)  # while the agent runs
    packed = target.read_bytes()
    keys = keys_of(home)
    assert len(keys) >= 7 and not any(key in packed for key in keys.values())
    assert not set(archive.read_contents(target).digests) & {"state/wal", "state/connections", "identity/tls.pem"}
    # The twin: a move has all of it, and so ends this folder.
    study.kill("graz")
    site(study, "graz", "backup", "--move", study.folder / "graz.move")
    moved = (study.folder / "graz.move").read_bytes()
    assert all(key in moved for key in keys.values())


def test_a_lost_hospital_comes_back_under_another_name(study: StudyFederation) -> None:
    begun(study)
    home = study.folder / "graz"
    (home / "state" / "models" / "best.safetensors").write_bytes(b"what was learnt")
    target = study.folder / "graz.backup"
    site(study, "graz", "backup", target)
    study.run_rounds(1)  # which the backup does not know
    study.kill("graz")
    shutil.rmtree(home)
    with pytest.raises(ConfigError, match="needs another name"):
        typed(site_command, "restore", target, home, *known(study))
    assert not home.exists()
    typed(site_command, "restore", target, study.folder / "graz-2", "--name", "graz-2", *known(study))
    root, new = study.folder / "consortium", study.folder / "graz-2"
    common = ("--dir", root, "--no-passphrase")
    typed(consortium_command, "revoke", "graz", "--reason", "its disk is lost", "--dir", root)
    typed(consortium_command, "enroll", new / "identity" / "request.json", "--yes", *common)
    typed(consortium_command, "publish", *common)
    study.stop_hub()
    hub = study.folder / "hub" / "coordinator.toml"
    typed(coordinator_command, "join", "--manifest", root / "manifest.json", "--config", hub)
    site(study, "graz-2", "join", root / "answers" / "graz-2.json", *known(study), "--manifest", root / "manifest.json")
    study.start_hub()
    study.start("graz-2")
    study.until(lambda: "graz-2" in study.survivors()[-1])  # it has to catch up first
    study.run_rounds(1)
    assert "graz" not in study.survivors()[-1]
    assert (new / "state" / "models" / "best.safetensors").read_bytes() == b"what was learnt"
    earlier = new / "state" / "earlier" / "graz" / "log"
    study.settle()
    names = [name for name in study.agents if name != "graz"]
    study.stop_all()
    logs = [study.folder / name / "state" / "log" for name in ("hub", *names)]
    root_key = keys_for(earlier, root / "root.pem")
    assert root_key is not None
    crossed = cross(logs, {path: keys_for(path, root / "root.pem") for path in logs}, lost=("graz",))
    assert crossed.exit_code == 0, [finding for finding in crossed.findings if finding.severity.value != "note"]


# A move.


def test_a_hospital_moves_in_mid_run(study: StudyFederation) -> None:
    begun(study)
    old, new, target = study.folder / "graz", study.folder / "elsewhere" / "graz", study.folder / "graz.move"
    study.stop("graz")
    site(study, "graz", "backup", "--move", target)
    with pytest.raises(ConfigError, match="has moved"):
        study.start("graz")
    for command in ("check", "status"):  # neither says that keys are missing, or to run `init`
        done = CliRunner().invoke(site_command, ["--config", str(old / "site.toml"), command])
        assert "has moved" in str(done.exception)
    old.rename(study.folder / "graz-old")
    typed(site_command, "restore", target, new, *known(study))
    new.rename(old)
    study.start("graz")
    study.run_rounds(2)
    assert "graz" in study.survivors()[-1]
    study.settle()
    names = list(study.agents)
    study.stop_all()
    audit_is_clean(study, *(study.folder / name / "state" / "log" for name in ("hub", *names)))


def test_an_agent_that_runs_does_not_move(study: StudyFederation) -> None:
    begun(study)
    with pytest.raises(ConfigError, match="another process uses"):
        site(study, "graz", "backup", "--move", study.folder / "graz.move")
    assert keys_of(study.folder / "graz") and not (study.folder / "graz" / "state" / archive.MOVED).exists()


def test_without_its_mark_the_old_folder_still_cannot_act(study: StudyFederation) -> None:
    begun(study)
    study.stop("graz")
    site(study, "graz", "backup", "--move", study.folder / "graz.move")
    (study.folder / "graz" / "state" / archive.MOVED).unlink()
    with pytest.raises(ToolkitError):
        study.start("graz")


def two_sites(study: StudyFederation) -> None:
    """The hospital has moved and taken part, and then somebody starts the folder on the old machine."""
    begun(study)
    study.stop("graz")
    old = study.folder / "graz"
    site(study, "graz", "backup", "--move", study.folder / "graz.move")
    old.rename(study.folder / "graz-old")
    typed(site_command, "restore", study.folder / "graz.move", old, *known(study))
    study.start("graz")
    study.run_rounds(1)
    study.stop("graz")
    old.rename(study.folder / "graz-new")
    (study.folder / "graz-old").rename(old)
    study.start("graz")


def test_the_old_folder_does_not_start_again(study: StudyFederation) -> None:
    with pytest.raises(ConfigError, match="has moved"):
        two_sites(study)


def test_the_old_folder_starts_again_twin(study: StudyFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mark and erasure there are two of one site. Only others keep it out: it counts connections too low."""
    monkeypatch.setattr(archive, "refuse_moved", lambda state: None)
    monkeypatch.setattr(files, "erase", lambda path: None)
    two_sites(study)
    assert "graz" in study.agents
    study.connect("graz")
    assert "graz" not in study.streams and isinstance(study.left["graz"], RollbackDetected)


def test_a_second_copy_of_a_moved_site_is_refused_by_others(study: StudyFederation) -> None:
    """An archive can be copied before it is restored. Then the count of connections shows the second one."""
    begun(study)
    study.stop("graz")
    site(study, "graz", "backup", "--move", study.folder / "graz.move")
    for place in ("first", "second"):
        typed(site_command, "restore", study.folder / "graz.move", study.folder / place, *known(study))
    (study.folder / "graz").rename(study.folder / "graz-old")
    (study.folder / "first").rename(study.folder / "graz")
    study.start("graz")
    study.run_rounds(1)
    study.stop("graz")
    (study.folder / "graz").rename(study.folder / "first")
    (study.folder / "second").rename(study.folder / "graz")
    study.start("graz")
    goodbyes: list[CloseReason] = []
    deliver = study._deliver
    study._deliver = lambda *words: (goodbyes.append(words[2].code), deliver(*words))[1]  # type: ignore[method-assign]
    study.connect("graz")
    assert goodbyes == [CloseReason.OUT_OF_ORDER] and "graz" not in study.streams


def second_copy(study: StudyFederation) -> int:
    """Two copies of a moved site, of which the first one is in use; how many connections the second one is behind."""
    begun(study)
    study.stop("graz")
    site(study, "graz", "backup", "--move", study.folder / "graz.move")
    for place in ("first", "second"):
        typed(site_command, "restore", study.folder / "graz.move", study.folder / place, *known(study))
    (study.folder / "graz").rename(study.folder / "graz-old")
    for _ in range(2):
        (study.folder / "first").rename(study.folder / "graz")
        study.start("graz")
        study.run_rounds(1)
        study.stop("graz")
        (study.folder / "graz").rename(study.folder / "first")
    (study.folder / "second").rename(study.folder / "graz")
    counts = [int((study.folder / name / "state" / "connections").read_text()) for name in ("first", "graz")]
    return counts[0] - counts[1]


def started_again(study: StudyFederation, times: int) -> bool:
    """As a service manager does; whether it was let in."""
    for _ in range(times):
        with suppress(RollbackDetected), control.final_message(study.folder / "graz" / "state"):
            study.start("graz")
            study.connect("graz")
            if "graz" in study.streams:
                return True
            raise study.left["graz"]
    return False


def test_an_old_copy_does_not_start_until_its_count_fits(study: StudyFederation) -> None:
    behind = second_copy(study)
    before = (study.folder / "graz" / "state" / "connections").read_text()
    assert not started_again(study, 1)
    with pytest.raises(ConfigError, match="it is an old copy, and does not start again") as caught:
        started_again(study, behind + 1)
    assert caught.value.exit_code == 2, "what systemd does not answer with a new start"
    assert int((study.folder / "graz" / "state" / "connections").read_text()) == int(before) + 1


def test_an_old_copy_is_let_in_after_enough_starts_twin(
    study: StudyFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "refuse_set_back", lambda _: None)
    assert started_again(study, second_copy(study) + 1)


def test_nobody_writes_to_the_log_while_it_is_packed(study: StudyFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note between packing and the mark would be in the old folder alone."""
    begun(study)
    study.stop("graz")
    begin, refusals = archive.begin, list[str]()

    def packing(*words: Any, **more: Any) -> Any:
        with pytest.raises(ToolkitError) as caught:
            site(study, "graz", "log-note", "meanwhile")
        refusals.append(str(caught.value))
        return begin(*words, **more)

    monkeypatch.setattr(archive, "begin", packing)
    site(study, "graz", "backup", "--move", study.folder / "graz.move")
    (refusal,) = refusals
    assert "another process" in refusal
