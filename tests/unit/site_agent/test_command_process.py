"""What the parent does with what the isolated process wrote."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lazaret.errors import ConfigError
from site_agent.command_process import Folders
from site_agent.options import OWN_PROCESS, own_process


def test_a_finished_file_is_moved_and_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    folders = Folders.make([target])
    staged = folders.staged[target]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders.writable] == [0o700, 0o700]
    assert folders.writable == [folders.scratch, staged.parent]
    folders.publish()
    assert not target.exists()  # nothing was written
    staged.write_text("table")
    folders.publish()
    assert target.read_text() == "table"
    with pytest.raises(ConfigError, match="refusing to overwrite"):
        folders.publish()
    folders.remove()
    assert list(tmp_path.iterdir()) == [target] and not folders.scratch.exists()


def test_a_finished_folder_is_moved_and_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "new" / "model"
    first, second = Folders.make([target]), Folders.make([target])
    for folders in (first, second):
        folders.staged[target].mkdir()
        (folders.staged[target] / "model.json").write_text("{}")
    first.publish()
    with pytest.raises(ConfigError, match="refusing to overwrite"):
        second.publish()
    first.remove()
    second.remove()
    assert [path.name for path in target.iterdir()] == ["model.json"] and os.listdir(tmp_path) == ["new"]


def test_what_exists_already_is_not_staged(tmp_path: Path) -> None:
    folders = Folders.make([tmp_path])
    assert folders.writable == [folders.scratch] and folders.staged == {tmp_path: tmp_path}
    folders.publish()
    folders.remove()
    assert tmp_path.exists()


def test_a_table_and_a_folder_of_reports_are_moved_together(tmp_path: Path) -> None:
    table, reports = tmp_path / "out.csv", tmp_path / "reports"
    folders = Folders.make([table, reports])
    folders.staged[table].write_text("table")
    folders.staged[reports].mkdir(mode=0o700)
    folders.publish()
    folders.remove()
    assert sorted(os.listdir(tmp_path)) == ["out.csv", "reports"]


def test_a_program_that_calls_a_command_is_not_isolated() -> None:
    assert OWN_PROCESS.get() is False
    with own_process():
        assert OWN_PROCESS.get() is True
    assert OWN_PROCESS.get() is False
