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
from security.secagg import messages, records
from security.secagg import state as states
from security.secagg.layout import Layout, Vector
from security.secagg.site.attempt import PendingUpdate
from security.secagg.site.journal import Journal
from site_agent import state_dir as state_module
from site_agent.state_dir import StateDir
from site_agent.state_writer import WriteAheadLog
from site_agent.trainer.personal_state import PersonalState
from tests.support.evil import VICTIM, evil
from tests.support.secagg_world import small_layout

KEY = bytes(range(32))


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state", site="graz", sealing_key=KEY, randomness=CountedRandomness(b"state_dir"))


def update(layout: Layout, number: int = 3) -> PendingUpdate:
    words = np.arange(layout.words, dtype=layout.dtype) * 77
    return PendingUpdate(round=number, state_hash=bytes([1] * 32), config_hash=bytes([2] * 32), words=words)


def test_a_sealed_update_comes_back_and_is_ciphertext_on_disk(state_dir: StateDir) -> None:
    layout = small_layout(3, words=400)
    state_dir.seal(layout, update(layout))
    content = (state_dir.pending / "3").read_bytes()
    assert update(layout).words.tobytes()[:64] not in content
    back = state_dir.unseal(layout)
    assert back is not None and np.array_equal(back.words, update(layout).words)
    assert (back.round, back.state_hash, back.config_hash) == (3, bytes([1] * 32), bytes([2] * 32))


def test_everything_is_for_this_user_only(state_dir: StateDir) -> None:
    layout = small_layout(3)
    state_dir.seal(layout, update(layout))
    state_dir.count_round()
    state_dir.note_metrics({"round": 1})
    state_dir.next_connection()
    state_dir.claim("run-1")
    for path in state_dir.folder.rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.parametrize("at", [3, 11, 60, 100, 150, -1])
def test_a_changed_byte_does_not_open(state_dir: StateDir, at: int) -> None:
    layout = small_layout(3)
    state_dir.seal(layout, update(layout))
    path = state_dir.pending / "3"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="does not open"):
        state_dir.unseal(layout)


def test_another_key_does_not_open(state_dir: StateDir, tmp_path: Path) -> None:
    layout = small_layout(3)
    state_dir.seal(layout, update(layout))
    other = StateDir(state_dir.folder, site="graz", sealing_key=bytes(32), randomness=CountedRandomness(b"x"))
    with pytest.raises(DataError, match="does not open"):
        other.unseal(layout)


def test_an_update_for_another_roster_is_of_no_use(state_dir: StateDir) -> None:
    layout = small_layout(3)
    state_dir.seal(layout, update(layout))
    assert state_dir.unseal(replace(layout, roster_size=4)) is None


def test_done_rounds_are_forgotten(state_dir: StateDir) -> None:
    layout = small_layout(3)
    for number in (1, 2, 3):
        state_dir.seal(layout, update(layout, number))
    state_dir.forget(2)
    assert [path.name for path in state_dir.pending.iterdir()] == ["3"]


def test_states_are_kept_by_hash_and_checked(state_dir: StateDir) -> None:
    layout = small_layout(3)
    hashes = []
    for number in range(5):
        state = states.canonical(np.full(layout.state_words, number / 8))
        hashes.append(states.state_hash(state))
        state_dir.keep_state(layout, hashes[-1], state)
    assert np.array_equal(state_dir.state(layout, hashes[-1]), state)
    with pytest.raises(DataError, match="missing"):
        state_dir.state(layout, hashes[0])
    newest, older = (state_dir.states / f"{value.hex()}.safetensors" for value in (hashes[-1], hashes[-2]))
    newest.write_bytes(older.read_bytes())
    with pytest.raises(DataError, match="does not have its hash"):
        state_dir.state(layout, hashes[-1])
    newest.write_bytes(b"rubbish")
    with pytest.raises(DataError, match="cannot be read"):
        state_dir.state(layout, hashes[-1])


def some_state(layout: Layout, number: int = 1) -> Vector:
    return states.canonical(np.linspace(-number, number, layout.state_words))


def test_a_draft_becomes_the_model_and_is_the_file_that_would_have_been_written_at_once(state_dir: StateDir) -> None:
    layout = small_layout(3, words=400_000)  # a few megabytes: the disk takes some of them early
    state = some_state(layout)
    name = states.state_hash(state)
    for start in range(0, layout.state_words, 65_536):
        state_dir.draft_state(layout, start, state[start : start + 65_536])
        assert [path.name for path in state_dir.states.iterdir()] == ["draft"], "nobody takes half a model for one"
    state_dir.keep_draft(name)
    path = state_dir.states / f"{name.hex()}.safetensors"
    assert [*state_dir.states.iterdir()] == [path] and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert np.array_equal(state_dir.state(layout, name), state)
    drafted = load_tensors(path.read_bytes())
    state_dir.keep_state(layout, name, state)
    at_once = load_tensors(path.read_bytes())
    assert drafted.keys() == at_once.keys()
    assert all(np.array_equal(drafted[tensor], at_once[tensor]) for tensor in drafted)


def test_a_draft_that_broke_off_is_written_over(state_dir: StateDir) -> None:
    layout = small_layout(3, words=400)
    state_dir.draft_state(layout, 0, some_state(layout, 9)[:300])
    again = StateDir(state_dir.folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"x"))
    state = some_state(layout)
    for one in (again, state_dir):
        one.draft_state(layout, 0, state[:100])
        one.draft_state(layout, 100, state[100:])
        one.keep_draft(states.state_hash(state))
        assert np.array_equal(one.state(layout, states.state_hash(state)), state)


def test_a_draft_takes_its_values_in_order_and_is_kept_whole(state_dir: StateDir) -> None:
    layout = small_layout(3, words=400)
    state = some_state(layout)
    with pytest.raises(LocalProtocolError, match="begins with its first value"):
        state_dir.draft_state(layout, 5, state[5:])
    with pytest.raises(LocalProtocolError, match="no partial model"):
        state_dir.keep_draft(bytes(32))
    state_dir.draft_state(layout, 0, state[:100])
    for start, values in ((50, state[50:]), (200, state[200:]), (100, np.append(state[100:], state[:1]))):
        with pytest.raises(LocalProtocolError, match="not the next values"):
            state_dir.draft_state(layout, start, values)
    with pytest.raises(LocalProtocolError, match="not complete"):
        state_dir.keep_draft(bytes(32))
    assert not [*state_dir.states.glob("*.safetensors")]


def test_a_sync_that_failed_early_is_not_forgotten(state_dir: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
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
            state_dir.draft_state(layout, start, state[start : start + 65_536])
            while start > 600_000 and not failed.is_set():
                time.sleep(0.01)
        state_dir.keep_draft(states.state_hash(state))

    with pytest.raises(OSError, match="Input/output"):
        draft()


def test_connections_count_up_over_restarts(state_dir: StateDir) -> None:
    assert [state_dir.next_connection(), state_dir.next_connection()] == [1, 2]
    again = StateDir(state_dir.folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"x"))
    assert again.next_connection() == 3
    (state_dir.folder / "connections").write_text("rubbish")
    with pytest.raises(DataError, match="damaged"):
        state_dir.next_connection()


@pytest.mark.parametrize("content", [b"", b"rubbish", b"-3", b"1_0", b"\xff\xfe", b"9" * 5000, str(2**53).encode()])
def test_a_counter_that_is_damaged_is_named(state_dir: StateDir, content: bytes) -> None:
    for name, ask in (("rounds", lambda: state_dir.rounds_done), ("connections", state_dir.next_connection)):
        (state_dir.folder / name).write_bytes(content)
        with pytest.raises(DataError, match="damaged") as caught:
            ask()
        assert caught.value.where == str(state_dir.folder / name) and "write" in (caught.value.hint or "")
        assert (state_dir.folder / name).read_bytes() == content


@pytest.mark.parametrize("content", ["", "\n", "../elsewhere", "Run 1", "\0" * 6])
def test_a_folder_that_does_not_say_whose_it_is_keeps_its_promises(state_dir: StateDir, content: str) -> None:
    state_dir.claim("run-1")
    WriteAheadLog(state_dir.wal).close()
    (state_dir.folder / "run").write_text(content)
    with pytest.raises(DataError, match="does not name a run"):
        state_dir.claim("run-1")
    assert state_dir.wal.exists() and not (state_dir.folder / "runs").exists()


def torn(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("tail", [b'{"round": 2, "te', b"{", b"\0" * 40, b"\xff\xfe{", b"7"])
def test_a_torn_line_of_metrics_costs_its_own_row_only(
    state_dir: StateDir, caplog: pytest.LogCaptureFixture, tail: bytes
) -> None:
    state_dir.note_metrics({"round": 1})
    with open(state_dir.metrics, "ab") as file:
        file.write(tail)
    assert state_dir.read_metrics() == [{"round": 1}]
    (said,) = torn(caplog)
    assert str(state_dir.metrics) in said and "1 incomplete" in said
    state_dir.note_metrics({"round": 3})
    state_dir.note_metrics({"round": 4})
    assert state_dir.read_metrics() == [{"round": 1}, {"round": 3}, {"round": 4}]


def test_a_row_that_only_lacks_its_newline_is_a_row(state_dir: StateDir, caplog: pytest.LogCaptureFixture) -> None:
    state_dir.metrics.write_bytes(b'{"round": 1}')
    state_dir.note_metrics({"round": 2})
    assert state_dir.read_metrics() == [{"round": 1}, {"round": 2}] and torn(caplog) == []


def test_metrics_are_on_disk_before_the_next_round(state_dir: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(state_dir.metrics.read_bytes()))
    state_dir.note_metrics({"round": 1})
    assert synced == [b'{"round": 1}\n']


def test_a_state_that_is_no_folder_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "state"):
        with pytest.raises(ConfigError, match="is not a folder") as caught:
            StateDir(folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"state_dir"))
        assert "[site] state" in (caught.value.hint or "") and caught.value.exit_code == 2


def test_a_new_run_begins_anew_and_the_old_one_is_set_aside(state_dir: StateDir) -> None:
    assert state_dir.claim("run-1") is None and state_dir.claim("run-1") is None
    WriteAheadLog(state_dir.wal).close()
    state_dir.count_round()
    PersonalState(state_dir.folder).remember(4, b"personal")
    (state_dir.log / "segments").mkdir(parents=True)
    assert state_dir.next_connection() == 1
    assert state_dir.claim("run-2") == "run-1"
    assert (state_dir.folder / "runs" / "run-1" / "memory" / "4.safetensors").read_bytes() == b"personal"
    assert state_dir.rounds_done == 0 and not [*state_dir.memory.iterdir()] and not state_dir.wal.exists()
    assert (state_dir.log / "segments").exists() and state_dir.next_connection() == 2


def test_what_could_open_an_upload_does_not_outlive_its_run(state_dir: StateDir) -> None:
    """An attempt was agreed to and never released: nobody would erase its sealed answer when `secret_ttl` is over."""
    run = evil(wide=False)
    run.open_round()
    run.lose(messages.Quorum)
    run.launch(run.plan())
    kept = run.sites[VICTIM].wal
    (agreed,) = (record for record in kept if isinstance(record, records.Agreed))
    state_dir.claim("run-1")
    wal = WriteAheadLog(state_dir.wal)
    wal.compact(kept)
    wal.close()
    state_dir.seal(run.policy.layout, update(run.policy.layout))
    state_dir.claim("run-2")
    old = state_dir.folder / "runs" / "run-1"
    assert agreed.sealed not in (old / "wal").read_bytes() and not [*(old / "pending").iterdir()]
    left = Journal.replay(WriteAheadLog(old / "wal").records)
    assert left.sequence == run.machine().core.journal.sequence, "what it has promised is still there to be read"


def test_a_change_of_runs_that_a_kill_cut_short_is_finished(state_dir: StateDir) -> None:
    state_dir.claim("run-1")
    state_dir.count_round()
    PersonalState(state_dir.folder).remember(4, b"personal")
    (state_dir.folder / "runs" / "run-1").mkdir(parents=True)
    state_dir.memory.rename(state_dir.folder / "runs" / "run-1" / "memory")
    again = StateDir(state_dir.folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"x"))
    assert again.claim("run-2") == "run-1"
    assert (state_dir.folder / "runs" / "run-1" / "memory" / "4.safetensors").exists() and again.rounds_done == 0


def test_a_new_run_goes_on_in_the_folders_that_a_container_of_the_trainer_has_mounted(state_dir: StateDir) -> None:
    """A mount follows the folder, not its name: moved, it would give the trainer the old run's personal state."""
    state_dir.claim("run-1")
    PersonalState(state_dir.folder).keep_model("best", b"model")
    mounted = [os.open(path, os.O_RDONLY) for path in (state_dir.memory, state_dir.models)]
    state_dir.claim("run-2")
    for descriptor, path in zip(mounted, (state_dir.memory, state_dir.models), strict=True):
        assert os.path.samestat(os.fstat(descriptor), path.stat()) and not [*path.iterdir()]
        os.close(descriptor)
    assert (state_dir.folder / "runs" / "run-1" / "models" / "best.safetensors").read_bytes() == b"model"


def test_a_new_run_waits_for_the_end_of_the_trainer_before(
    state_dir: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its last words would be the new run's first memory."""
    state_dir.claim("run-1")
    trainer = PersonalState(state_dir.folder)
    held = trainer.hold()
    monkeypatch.setattr(state_module, "LAST_WORDS_SECONDS", 0)
    with pytest.raises(ConfigError, match="the trainer of the last run still uses this folder"):
        state_dir.claim("run-2")
    assert state_module.run_of(state_dir.folder) == "run-1"
    monkeypatch.undo()

    def end() -> None:
        trainer.remember(4, b"late")
        os.close(held)

    threading.Timer(0.3, end).start()
    assert state_dir.claim("run-2") == "run-1"
    assert (state_dir.folder / "runs" / "run-1" / "memory" / "4.safetensors").read_bytes() == b"late"
    assert not [*state_dir.memory.iterdir()]


def test_a_run_that_an_agent_still_works_on_is_not_set_aside(state_dir: StateDir) -> None:
    state_dir.claim("run-1")
    wal = WriteAheadLog(state_dir.wal)
    with pytest.raises(ConfigError, match="another process"):
        state_dir.claim("run-2")
    wal.close()


def test_what_a_kill_left_half_written_is_swept_away(state_dir: StateDir) -> None:
    left = state_dir.states / ".4.safetensors.123.new"
    left.write_bytes(b"half")
    other = StateDir(state_dir.folder, site="graz", sealing_key=KEY, randomness=CountedRandomness(b"x"))
    assert left.exists(), "who only looks must not take away a file that the agent is writing"
    other.tidy()
    assert not left.exists()
