"""A database that is full, damaged or no database: one error of ours with the file and what to do, and no half step."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.effects import OpenRound
from coordinator.round_history import ReadOnlyHistory
from coordinator.storage import Storage
from lazaret import files
from lazaret.errors import OTHER_VERSION, ConfigError, DataError, ToolkitError
from security.secagg.coordinator.rounds import RoundStart
from security.secagg.coordinator.spool import FileSpool
from tests.support.engine_world import EngineWorld

START = RoundStart(round=1, state_hash=bytes(32), config_hash=bytes(32), prev_result=bytes(32))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    storage = Storage(tmp_path)
    yield storage
    storage.close()


class Sick:
    """A connection that fails at one statement; the rest is done by a real one."""

    def __init__(self, real: sqlite3.Connection, statement: str, error: sqlite3.Error, *, rolled_back: bool) -> None:
        self._real, self._statement, self._error = real, statement, error
        self._rolled_back = rolled_back

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement.startswith(self._statement):
            if self._rolled_back:
                self._real.execute("ROLLBACK")
            raise self._error
        return self._real.execute(statement, *values)

    def close(self) -> None:
        self._real.close()


@pytest.mark.parametrize("rolled_back", [False, True])
@pytest.mark.parametrize("statement", ["INSERT OR REPLACE INTO rounds", "COMMIT"])
def test_a_transaction_that_is_not_on_disk_did_not_happen(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, statement: str, rolled_back: bool
) -> None:
    """SQLite rolls back by itself after some errors, and then complains about a second time."""
    full = sqlite3.OperationalError("database or disk is full")
    with monkeypatch.context() as patched:
        patched.setattr(storage, "_db", Sick(storage._db, statement, full, rolled_back=rolled_back))
        with pytest.raises(ToolkitError, match="database or disk is full") as raised:
            storage.keep([OpenRound(START)], now_ms=0)
    assert raised.value.exit_code == 1
    assert raised.value.where == str(storage.folder / "coordinator.sqlite") and raised.value.hint
    assert storage.history.rounds() == []
    storage.keep([OpenRound(START)], now_ms=0)
    assert len(storage.history.rounds()) == 1


def test_a_database_that_is_really_full(storage: Storage) -> None:
    storage._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(ToolkitError, match="full") as raised:
        storage.note_session("x" * 100_000, 1, now_ms=0)
    assert raised.value.exit_code == 1 and "free space" in (raised.value.hint or "")
    assert "coordinator.sqlite" in (raised.value.where or "")


def test_what_is_no_database_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.sqlite"
    path.write_bytes(os.urandom(4096))
    for ask in (lambda: Storage(tmp_path), lambda: ReadOnlyHistory(path).rounds()):
        with pytest.raises(ConfigError, match="not a database") as raised:
            ask()
        assert raised.value.where == str(path) and "do not restore an old copy" in (raised.value.hint or "")


@pytest.mark.parametrize("old", [1, 2, 3])
def test_a_database_of_an_older_version_is_refused_in_one_line_and_left_as_it_is(tmp_path: Path, old: int) -> None:
    Storage(tmp_path).close()
    path = tmp_path / "coordinator.sqlite"
    with sqlite3.connect(path) as made:
        made.execute("UPDATE about SET value = ? WHERE key = 'format'", (str(old),))
        made.execute("DROP TABLE traffic")
    made.close()
    before = path.read_bytes()
    for ask in (lambda: Storage(tmp_path), lambda: ReadOnlyHistory(path).rounds()):
        with pytest.raises(ConfigError, match=f"^.*: database of format {old}, this version knows 4$") as raised:
            ask()
        assert raised.value.where == str(path) and raised.value.hint == OTHER_VERSION
    assert path.read_bytes() == before


def test_a_damaged_database_is_refused_in_one_line(tmp_path: Path) -> None:
    EngineWorld(tmp_path, rounds=1).kill_coordinator()
    path = tmp_path / "coordinator.sqlite"
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)  # the first page, with the list of tables, stays
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="malformed"):
        ReadOnlyHistory(path).rounds()
    with pytest.raises((ConfigError, DataError), match="malformed") as raised:
        Storage(tmp_path).history.rounds()
    assert raised.value.exit_code == 2 and "do not restore an old copy" in (raised.value.hint or "")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_says_where(storage: Storage, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuses(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", refuses)
    with pytest.raises(OSError, match=os.strerror(code)) as raised:
        FileSpool(storage.spool).write(bytes(32), 0, b"frame")
    assert raised.value.filename == str(storage.spool)
    monkeypatch.setattr(files.os, "fsync", refuses)
    with pytest.raises(OSError, match=os.strerror(code)) as raised:
        storage.save_state(np.zeros(3, dtype="<f4"))
    assert str(raised.value.filename).startswith(str(storage.models))


def test_other_errors_keep_the_name_they_have(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "already")

    monkeypatch.setattr(os, "pwrite", refuses)
    with pytest.raises(OSError, match="No space") as raised:
        FileSpool(storage.spool).write(bytes(32), 0, b"frame")
    assert raised.value.filename == "already"
