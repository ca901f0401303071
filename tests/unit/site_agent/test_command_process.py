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
    folders = Folders.make(target)
    assert folders.staged is not None and folders.staging is not None
    assert stat.S_IMODE(folders.staging.stat().st_mode) == stat.S_IMODE(folders.scratch.stat().st_mode) == 0o700
    folders.publish()
    assert not target.exists()  # nothing was written
    folders.staged.write_text("table")
    folders.publish()
    assert target.read_text() == "table"
    with pytest.raises(ConfigError, match="refusing to overwrite"):
        folders.publish()
    folders.remove()
    assert list(tmp_path.iterdir()) == [target] and not folders.scratch.exists()


def test_a_finished_folder_is_moved_and_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "new" / "model"
    first, second = Folders.make(target), Folders.make(target)
    for folders in (first, second):
        assert folders.staged is not None
        folders.staged.mkdir()
        (folders.staged / "model.json").write_text("{}")
    first.publish()
    with pytest.raises(ConfigError, match="refusing to overwrite"):
        second.publish()
    first.remove()
    second.remove()
    assert [path.name for path in target.iterdir()] == ["model.json"] and os.listdir(tmp_path) == ["new"]


def test_what_exists_already_is_not_staged(tmp_path: Path) -> None:
    folders = Folders.make(tmp_path)
    assert folders.staging is None and folders.staged == tmp_path
    folders.publish()
    folders.remove()


def test_a_program_that_calls_a_command_is_not_isolated() -> None:
    assert OWN_PROCESS.get() is False
    with own_process():
        assert OWN_PROCESS.get() is True
    assert OWN_PROCESS.get() is False
