"""Pause and present state: two files between people and a running process."""

from __future__ import annotations

import errno
import tarfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from lazaret.control import (
    BEAT_MS,
    SET_BACK,
    STALE_MS,
    NowFile,
    Pause,
    PauseFile,
    final_message,
    finished_runs,
    refuse_set_back,
    runs_command,
    say_running,
)
from lazaret.errors import ConfigError, RollbackDetected, ToolkitError


def test_a_pause_is_seen_by_the_other_side_and_ends(tmp_path: Path) -> None:
    seen, written = PauseFile(tmp_path), PauseFile(tmp_path)
    assert seen.read() is None and not written.clear()
    written.set("new disk", now_ms=7)
    assert seen.read() == Pause(reason="new disk", since_ms=7) and seen.reason() == "new disk"
    assert written.clear() and seen.reason() is None


def test_a_pause_that_cannot_be_read_is_one(tmp_path: Path) -> None:
    pause = PauseFile(tmp_path)
    pause.path.write_text("{")
    assert "cannot be read" in (pause.reason() or "")


def test_a_process_that_says_nothing_any_more_does_not_run(tmp_path: Path) -> None:
    file = NowFile(tmp_path)
    assert file.read(now_ms=0) == {"running": False}
    file.beat({"phase": "live"}, now_ms=1000, mono_ms=0)
    assert file.read(now_ms=1000)["running"] and file.read(now_ms=1000)["phase"] == "live"
    assert not file.read(now_ms=1000 + STALE_MS)["running"]
    assert not file.read(now_ms=1000 - STALE_MS)["running"], "written by a clock that was ahead"
    file.beat({"phase": "live"}, now_ms=2000, mono_ms=BEAT_MS - 1)
    assert file.read(now_ms=2000)["at_ms"] == 1000, "nothing new, and too soon"
    file.beat({"phase": "closed"}, now_ms=2000, mono_ms=BEAT_MS - 1)
    assert file.read(now_ms=2000)["at_ms"] == 2000
    file.stop("stopped by a signal", now_ms=3000)
    told = file.read(now_ms=3000)
    assert (told["running"], told["stopped"], told["phase"]) == (False, "stopped by a signal", "closed")


def test_a_disk_that_refuses_the_file_stops_nobody(tmp_path: Path) -> None:
    NowFile(tmp_path / "no" / "such" / "folder").beat({}, now_ms=0, mono_ms=0)


def test_an_error_that_ends_a_process_is_its_last_word(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "no" / "such" / "folder"):
        with pytest.raises(ConfigError), final_message(folder):
            raise ConfigError("the disk is full", where="state", hint="make room")
    told = NowFile(tmp_path).read(now_ms=0)
    assert not told["running"] and told["stopped"] == "state: the disk is full (make room)"


def test_an_old_copy_is_marked_and_other_errors_mark_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), final_message(tmp_path):
        raise ConfigError("the disk is full")
    refuse_set_back(tmp_path)
    with pytest.raises(RollbackDetected), final_message(tmp_path):
        raise RollbackDetected("restored from an old copy")
    with pytest.raises(ConfigError, match="does not start again") as caught:
        refuse_set_back(tmp_path)
    assert caught.value.exit_code == 2 and (tmp_path / SET_BACK).stat().st_mode & 0o777 == 0o600
    assert caught.value.hint is not None and caught.value.hint.endswith("delete this file"), "whoever said so may lie"
    (tmp_path / SET_BACK).unlink()
    refuse_set_back(tmp_path)


class TestFinishedRuns:
    @pytest.fixture
    def state(self, tmp_path: Path) -> Path:
        for name in ("run-1", "run-2"):
            models = tmp_path / "state" / "runs" / name / "models"
            models.mkdir(parents=True)
            (models / "best.safetensors").write_bytes(name.encode() * 1000)
        (tmp_path / "state" / "log").mkdir()
        (tmp_path / "state" / "log" / "FORMAT").write_text("1")
        return tmp_path / "state"

    def run(self, state: Path, *words: str) -> Result:
        command = runs_command(lambda _: state, click.option("--config", "config_path", default="x"))
        return CliRunner().invoke(command, list(words))

    def test_they_are_listed_with_their_sizes(self, state: Path) -> None:
        assert set(finished_runs(state)) == {"run-1", "run-2"}
        (state / "runs" / "run-2" / "models" / "large.bin").write_bytes(bytes(1_200_000))
        lines = [line.split() for line in self.run(state).output.splitlines()]
        assert lines == [["run-1", "0.0", "MB"], ["run-2", "1.2", "MB"]]
        assert "no finished runs" in self.run(state / "elsewhere").output

    def test_an_archive_holds_everything_before_the_folder_goes(self, state: Path, tmp_path: Path) -> None:
        target = tmp_path / "run-1.tar.gz"
        assert self.run(state, "run-1", "--archive", str(target)).exit_code == 0
        assert set(finished_runs(state)) == {"run-2"} and target.stat().st_mode & 0o777 == 0o600
        with tarfile.open(target) as packed:
            packed.extractall(tmp_path / "again", filter="data")
        assert (tmp_path / "again" / "run-1" / "models" / "best.safetensors").read_bytes() == b"run-1" * 1000
        again = self.run(state, "run-2", "--archive", str(target))
        assert isinstance(again.exception, ConfigError) and set(finished_runs(state)) == {"run-2"}

    @pytest.mark.parametrize("fault", ["a file is left out", "no room"])
    def test_a_run_stays_whose_archive_is_not_complete(
        self, state: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            if fault == "no room":
                raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(tarfile.TarFile, "add", refuse)
        target = tmp_path / "run-1.tar.gz"
        done = self.run(state, "run-1", "--archive", str(target))
        assert isinstance(done.exception, ToolkitError | OSError)
        assert set(finished_runs(state)) == {"run-1", "run-2"} and not target.exists()

    def test_one_is_removed_and_nothing_else(self, state: Path) -> None:
        assert self.run(state, "run-1", "--remove").exit_code == 0
        assert set(finished_runs(state)) == {"run-2"} and (state / "log" / "FORMAT").exists()
        for name in ("run-1", "..", "../log", "run-2/models", ""):
            assert isinstance(self.run(state, name, "--remove").exception, ConfigError), name
        assert self.run(state, "--remove").exit_code == 2
        assert set(finished_runs(state)) == {"run-2"} and (state / "log" / "FORMAT").exists()


def test_a_health_check_fails_where_nobody_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def code(now_ms: int) -> object:
        with pytest.raises(SystemExit) as left:
            say_running(tmp_path, now_ms=now_ms)
        return left.value.code

    assert code(0) == 1, "nobody ever ran"
    file = NowFile(tmp_path)
    file.beat({}, now_ms=1_000, mono_ms=0)
    assert code(1_000 + BEAT_MS) == 0 and code(1_000 + STALE_MS) == 1, "killed: the file says running for ever"
    file.stop("asked to", now_ms=2_000)
    assert code(2_001) == 1
    assert capsys.readouterr().out.splitlines() == ["not running", "running", "not running", "not running"]
