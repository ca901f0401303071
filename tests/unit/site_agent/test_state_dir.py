"""What lies in a state directory: who can read it, what opens, and what is refused."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_tensors

from lazaret.errors import ConfigError, DataError, LocalProtocolError
from security.rng import CountedRandomness
from security.secagg import state as states
from security.secagg.effects import Vector
from security.secagg.layout import Layout
from security.secagg.site.attempt import PendingUpdate
from site_agent.state_dir import Vault
from site_agent.state_writer import WriteAheadLog
from site_agent.trainer.personal_state import PersonalState
from tests.support.secagg_world import small_layout

KEY = bytes(range(32))


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path / "state", site="graz", sealing_key=KEY, randomness=CountedRandomness(b"vault"))


def update(layout: Layout, number: int = 3) -> PendingUpdate:
    words = np.arange(layout.words, dtype=layout.dtype) * 77
    return PendingUpdate(round=number, state_hash=bytes([1] * 32), config_hash=bytes([2] * 32), words=words)


def test_a_sealed_update_comes_back_and_is_ciphertext_on_disk(vault: Vault) -> None:
    layout = small_layout(3, words=400)
    vault.seal(layout, update(layout))
    content = (vault.pending / "3").read_bytes()
    assert update(layout).words.tobytes()[:64] not in content
    back = vault.unseal(layout)
    assert back is not None and np.array_equal(back.words, update(layout).words)
    assert (back.round, back.state_hash, back.config_hash) == (3, bytes([1] * 32), bytes([2] * 32))


def test_everything_is_for_this_user_only(vault: Vault) -> None:
    layout = small_layout(3)
    vault.seal(layout, update(layout))
    vault.count_round()
    vault.note_metrics({"round": 1})
    vault.next_connection()
    vault.claim("run-1")
    for path in vault.folder.rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.parametrize("at", [3, 11, 60, 100, 150, -1])
def test_a_changed_byte_does_not_open(vault: Vault, at: int) -> None:
    layout = small_layout(3)
    vault.seal(layout, update(layout))
    path = vault.pending / "3"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="does not open"):
        vault.unseal(layout)


def test_another_key_does_not_open(vault: Vault, tmp_path: Path) -> None:
    layout = small_layout(3)
    vault.seal(layout, update(layout))
    other = Vault(vault.folder, site="graz", sealing_key=bytes(32), randomness=CountedRandomness(b"x"))
    with pytest.raises(DataError, match="does not open"):
        other.unseal(layout)


def test_an_update_for_another_roster_is_of_no_use(vault: Vault) -> None:
    layout = small_layout(3)
    vault.seal(layout, update(layout))
    assert vault.unseal(replace(layout, roster_size=4)) is None


def test_done_rounds_are_forgotten(vault: Vault) -> None:
    layout = small_layout(3)
    for number in (1, 2, 3):
        vault.seal(layout, update(layout, number))
    vault.forget(2)
    assert [path.name for path in vault.pending.iterdir()] == ["3"]


def test_states_are_kept_by_hash_and_checked(vault: Vault) -> None:
    layout = small_layout(3)
    hashes = []
    for number in range(5):
        state = states.canonical(np.full(layout.state_words, number / 8))
        hashes.append(states.state_hash(state))
        vault.keep_state(layout, hashes[-1], state)
    assert np.array_equal(vault.state(layout, hashes[-1]), state)
    with pytest.raises(DataError, match="missing"):
        vault.state(layout, hashes[0])
    newest, older = (vault.states / f"{value.hex()}.safetensors" for value in (hashes[-1], hashes[-2]))
    newest.write_bytes(older.read_bytes())
    with pytest.raises(DataError, match="does not have its hash"):
        vault.state(layout, hashes[-1])
    newest.write_bytes(b"rubbish")
    with pytest.raises(DataError, match="cannot be read"):
        vault.state(layout, hashes[-1])


def some_state(layout: Layout, number: int = 1) -> Vector:
    return states.canonical(np.linspace(-number, number, layout.state_words))


def test_a_draft_becomes_the_model_and_is_the_file_that_would_have_been_written_at_once(vault: Vault) -> None:
    layout = small_layout(3, words=400_000)  # a few megabytes: the disk takes some of them early
    state = some_state(layout)
    name = states.state_hash(state)
    for start in range(0, layout.state_words, 65_536):
        vault.draft_state(layout, start, state[start : start + 65_536])
        assert [path.name for path in vault.states.iterdir()] == ["draft"], "nobody takes half a model for one"
    vault.keep_draft(name)
    path = vault.states / f"{name.hex()}.safetensors"
    assert [*vault.states.iterdir()] == [path] and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert np.array_equal(vault.state(layout, name), state)
    drafted = load_tensors(path.read_bytes())
    vault.keep_state(layout, name, state)
    at_once = load_tensors(path.read_bytes())
    assert drafted.keys() == at_once.keys()
    assert all(np.array_equal(drafted[tensor], at_once[tensor]) for tensor in drafted)


def test_a_draft_that_broke_off_is_written_over(vault: Vault) -> None:
    layout = small_layout(3, words=400)
    vault.draft_state(layout, 0, some_state(layout, 9)[:300])
    again = Vault(vault.folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"x"))  # as after a kill
    state = some_state(layout)
    for one in (again, vault):
        one.draft_state(layout, 0, state[:100])
        one.draft_state(layout, 100, state[100:])
        one.keep_draft(states.state_hash(state))
        assert np.array_equal(one.state(layout, states.state_hash(state)), state)


def test_a_draft_takes_its_values_in_order_and_is_kept_whole(vault: Vault) -> None:
    layout = small_layout(3, words=400)
    state = some_state(layout)
    with pytest.raises(LocalProtocolError, match="begins with its first value"):
        vault.draft_state(layout, 5, state[5:])
    with pytest.raises(LocalProtocolError, match="no draft"):
        vault.keep_draft(bytes(32))
    vault.draft_state(layout, 0, state[:100])
    for start, values in ((50, state[50:]), (200, state[200:]), (100, np.append(state[100:], state[:1]))):
        with pytest.raises(LocalProtocolError, match="not the next values"):
            vault.draft_state(layout, start, values)
    with pytest.raises(LocalProtocolError, match="not complete"):
        vault.keep_draft(bytes(32))
    assert not [*vault.states.glob("*.safetensors")]


def test_a_sync_that_failed_early_is_not_forgotten(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells a lost write once; the last sync may succeed over pages that are gone."""
    layout = small_layout(3, words=1_200_000)
    failed = threading.Event()

    def fdatasync(_: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("site_agent.state_writer.os.fdatasync", fdatasync)
    state = some_state(layout)

    def draft() -> None:
        for start in range(0, layout.state_words, 65_536):
            vault.draft_state(layout, start, state[start : start + 65_536])
            while start > 600_000 and not failed.is_set():
                time.sleep(0.01)
        vault.keep_draft(states.state_hash(state))

    with pytest.raises(OSError, match="Input/output"):
        draft()


def test_connections_count_up_over_restarts(vault: Vault) -> None:
    assert [vault.next_connection(), vault.next_connection()] == [1, 2]
    again = Vault(vault.folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"x"))
    assert again.next_connection() == 3
    (vault.folder / "connections").write_text("rubbish")
    with pytest.raises(DataError, match="damaged"):
        vault.next_connection()


@pytest.mark.parametrize("content", [b"", b"rubbish", b"-3", b"1_0", b"\xff\xfe", b"9" * 5000, str(2**53).encode()])
def test_a_counter_that_is_damaged_is_named(vault: Vault, content: bytes) -> None:
    for name, ask in (("rounds", lambda: vault.rounds_done), ("connections", vault.next_connection)):
        (vault.folder / name).write_bytes(content)
        with pytest.raises(DataError, match="damaged") as caught:
            ask()
        assert caught.value.where == str(vault.folder / name) and "write" in (caught.value.hint or "")
        assert (vault.folder / name).read_bytes() == content


@pytest.mark.parametrize("content", ["", "\n", "../elsewhere", "Run 1", "\0" * 6])
def test_a_folder_that_does_not_say_whose_it_is_keeps_its_promises(vault: Vault, content: str) -> None:
    vault.claim("run-1")
    WriteAheadLog(vault.wal).close()
    (vault.folder / "run").write_text(content)
    with pytest.raises(DataError, match="does not name a run"):
        vault.claim("run-1")
    assert vault.wal.exists() and not (vault.folder / "runs").exists()


def torn(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("tail", [b'{"round": 2, "te', b"{", b"\0" * 40, b"\xff\xfe{", b"7"])
def test_a_torn_line_of_metrics_costs_its_own_row_only(
    vault: Vault, caplog: pytest.LogCaptureFixture, tail: bytes
) -> None:
    vault.note_metrics({"round": 1})
    with open(vault.metrics, "ab") as file:
        file.write(tail)
    assert vault.read_metrics() == [{"round": 1}]
    (said,) = torn(caplog)
    assert str(vault.metrics) in said and "1 incomplete" in said
    vault.note_metrics({"round": 3})
    vault.note_metrics({"round": 4})
    assert vault.read_metrics() == [{"round": 1}, {"round": 3}, {"round": 4}]


def test_a_row_that_only_lacks_its_newline_is_a_row(vault: Vault, caplog: pytest.LogCaptureFixture) -> None:
    vault.metrics.write_bytes(b'{"round": 1}')
    vault.note_metrics({"round": 2})
    assert vault.read_metrics() == [{"round": 1}, {"round": 2}] and torn(caplog) == []


def test_metrics_are_on_disk_before_the_next_round(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(vault.metrics.read_bytes()))
    vault.note_metrics({"round": 1})
    assert synced == [b'{"round": 1}\n']


def test_a_state_that_is_no_folder_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "state"):
        with pytest.raises(ConfigError, match="is not a folder") as caught:
            Vault(folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"vault"))
        assert "[site] state" in (caught.value.hint or "") and caught.value.exit_code == 2


def test_a_new_run_begins_anew_and_the_old_one_is_set_aside(vault: Vault) -> None:
    assert vault.claim("run-1") is None and vault.claim("run-1") is None
    WriteAheadLog(vault.wal).close()
    vault.count_round()
    PersonalState(vault.folder).remember(4, b"personal")
    (vault.log / "segments").mkdir(parents=True)
    assert vault.next_connection() == 1
    assert vault.claim("run-2") == "run-1"
    assert (vault.folder / "runs" / "run-1" / "memory" / "4.safetensors").read_bytes() == b"personal"
    assert vault.rounds_done == 0 and not [*vault.memory.iterdir()] and not vault.wal.exists()
    assert (vault.log / "segments").exists() and vault.next_connection() == 2


def test_a_change_of_runs_that_a_kill_cut_short_is_finished(vault: Vault) -> None:
    vault.claim("run-1")
    vault.count_round()
    PersonalState(vault.folder).remember(4, b"personal")
    (vault.folder / "runs" / "run-1").mkdir(parents=True)
    vault.memory.rename(vault.folder / "runs" / "run-1" / "memory")
    again = Vault(vault.folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"x"))
    assert again.claim("run-2") == "run-1"
    assert (vault.folder / "runs" / "run-1" / "memory" / "4.safetensors").exists() and again.rounds_done == 0


def test_a_run_that_an_agent_still_works_on_is_not_set_aside(vault: Vault) -> None:
    vault.claim("run-1")
    wal = WriteAheadLog(vault.wal)
    with pytest.raises(ConfigError, match="another process"):
        vault.claim("run-2")
    wal.close()


def test_what_a_kill_left_half_written_is_swept_away(vault: Vault) -> None:
    left = vault.states / ".4.safetensors.123.new"
    left.write_bytes(b"half")
    other = Vault(vault.folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"x"))
    assert left.exists(), "who only looks must not take away a file that the agent is writing"
    other.tidy()
    assert not left.exists()
