"""Pause and present state: two files between people and a running process."""

from __future__ import annotations

from pathlib import Path

from lazaret.control import BEAT_MS, STALE_MS, NowFile, Pause, PauseFile


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
    file.beat({"phase": "live"}, now_ms=2000, mono_ms=BEAT_MS - 1)
    assert file.read(now_ms=2000)["at_ms"] == 1000, "nothing new, and too soon"
    file.beat({"phase": "closed"}, now_ms=2000, mono_ms=BEAT_MS - 1)
    assert file.read(now_ms=2000)["at_ms"] == 2000
    file.stop("stopped by a signal", now_ms=3000)
    told = file.read(now_ms=3000)
    assert (told["running"], told["stopped"], told["phase"]) == (False, "stopped by a signal", "closed")


def test_a_disk_that_refuses_the_file_stops_nobody(tmp_path: Path) -> None:
    NowFile(tmp_path / "no" / "such" / "folder").beat({}, now_ms=0, mono_ms=0)
