"""Crashes, full disks, erased annexes, and single flipped bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import security.audit.verify as verify_module
from lazaret.errors import AuditLogError, ToolkitError
from security.audit.verify import verify
from security.log import events as ev
from security.log.machine import LogMachine, State
from security.log.note import VerifierKey
from security.log.opening import create_log
from security.log.store import Disk, DurableFolder
from security.log.witness import HeldCheckpoint
from security.log.writer import AuditLog
from tests.support.audit_attacks import Lonely, Tampering, copied, unchecked, weighty
from tests.support.audit_logs import Federation
from tests.support.audit_parties import QuickDisk


class _Stop(BaseException):
    """Stands for kill -9: nothing in the program may catch it and tidy up."""


class FaultyDisk(QuickDisk):
    """Stops at one chosen operation, half-way through a write or just before or after a sync or a rename."""

    def __init__(self, at: int, *, error: BaseException | None = None) -> None:
        self.left = at
        self.error = error or _Stop()

    def _step(self) -> bool:
        self.left -= 1
        return self.left == 0

    def write(self, descriptor: int, data: bytes) -> None:
        if self._step():
            os.write(descriptor, data[: len(data) // 2])
            raise self.error
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        if self._step():
            raise self.error

    def publish(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        if self._step():
            raise self.error
        super().publish(path, data, mode)
        if self._step():
            raise self.error


def _work(log: AuditLog) -> None:
    log.append(ev.OperatorAction(command="one", role="operator"), annex={"secret": 1})
    log.checkpoint()
    log.rotate("epoch over")
    log.append(ev.OperatorAction(command="two", role="operator"))
    log.append(ev.AgentStop(reason="end"))
    log.checkpoint()


def _operations(tmp_path: Path) -> int:
    counter = FaultyDisk(10**9)
    alone = Lonely(tmp_path / "count")
    alone.log._writer.disk = counter
    _work(alone.log)
    alone.log.close()
    return 10**9 - counter.left


def test_kill_at_every_write_sync_and_rename(tmp_path: Path) -> None:
    """Whatever was under way, the log opens again, says what was torn, and verifies."""
    for at in range(1, _operations(tmp_path) + 1):
        alone = Lonely(tmp_path / str(at))
        alone.log._writer.disk = FaultyDisk(at)
        with pytest.raises(_Stop):
            _work(alone.log)
        alone.log._writer.close()
        log = alone.reopen()
        log.append(ev.AgentStop(reason="after the crash"))
        log.close()
        assert alone.codes() == set(), at


def test_kill_while_a_log_is_made(tmp_path: Path) -> None:
    """A half-made log is no log; making it again works."""
    for at in range(1, 40):
        folder = tmp_path / str(at)
        alone = Lonely(folder)
        alone.log.close()
        made = folder / "again"
        arguments = {
            "party": alone.member.party,
            "roster": alone.roster,
            "manifest": b"{}\n",
            "policy": "0" * 64,
            "root": alone.member.root,
            "clock": alone.clock,
            "rng": alone.rng,
        }
        disk = FaultyDisk(at)
        try:
            create_log(made, folder / "again.keys", disk=disk, **arguments).close()
        except _Stop:
            if not (made / "FORMAT").exists():
                create_log(made, folder / "again.keys", disk=QuickDisk(), **arguments).close()
            assert weighty(verify(made, alone.keys).findings) == set(), at
        if disk.left > 0:
            return
    pytest.fail("more operations than were tried")


@pytest.mark.parametrize("operation", [1, 2])
def test_full_disk_stops_the_agent(tmp_path: Path, operation: int) -> None:
    alone = Lonely(tmp_path)
    alone.log._writer.disk = FaultyDisk(operation, error=OSError(28, "No space left on device"))
    with pytest.raises(AuditLogError, match="no space left"):
        alone.log.append(ev.OperatorAction(command="one", role="operator"))
    alone.log._writer.disk = QuickDisk()
    with pytest.raises(AuditLogError, match="no space left"):  # the reason stays, whoever asks
        alone.log.append(ev.OperatorAction(command="two", role="operator"))


def test_full_disk_stops_the_agent_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a failed log took entries again, one would follow that was never written."""
    monkeypatch.setattr(LogMachine, "fail", lambda self, reason: AuditLogError(reason))
    alone = Lonely(tmp_path)
    alone.log._writer.disk = FaultyDisk(1, error=OSError(28, "No space left on device"))
    with pytest.raises(AuditLogError):
        alone.log.append(ev.OperatorAction(command="one", role="operator"))
    alone.log._writer.disk = QuickDisk()
    alone.log.append(ev.OperatorAction(command="two", role="operator"))
    alone.log.checkpoint()
    assert alone.log._machine.state is State.OPEN
    assert alone.codes() != set()


def test_damage_below_a_head_is_no_torn_write(lonely: Lonely) -> None:
    lonely.log.close()
    segment = Tampering(lonely.folder).folder.segment(0)
    segment.write_bytes(segment.read_bytes()[:-40])
    with pytest.raises(AuditLogError):
        lonely.reopen()


def test_what_a_kill_leaves_of_a_head_is_removed_at_the_next_start(lonely: Lonely) -> None:
    lonely.log.append(ev.AgentStop(reason="end"))
    lonely.log.checkpoint()
    lonely.log.close()
    left = Tampering(lonely.folder).folder.checkpoints / ".7.note.4557.new"
    left.write_bytes(b"half of a he")
    assert lonely.codes() == set(), "a kill is no fault of whoever was killed"
    lonely.reopen()
    assert not left.exists()


@pytest.mark.parametrize("change", ["gone", "changed"])
def test_what_a_crash_left_is_kept(change: str, lonely: Lonely, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says what was set aside, by its digest: that it can be looked at is part of the record."""
    lonely.log.checkpoint()
    lonely.log._writer.close()
    with Tampering(lonely.folder).folder.segment(0).open("ab") as segment:
        segment.write(b'{"actor":"agent","annex_com')
    lonely.reopen().checkpoint()
    assert lonely.codes() == set()
    (torn,) = Tampering(lonely.folder).folder.evidence.glob("torn-*")
    if change == "gone":
        torn.unlink()
    else:
        torn.write_bytes(torn.read_bytes() + b"x")
    assert lonely.codes() == {"TornWriteMissing"}
    monkeypatch.setattr(verify_module, "_check_torn", lambda *_: None)
    assert lonely.codes() == set(), "twin"


def test_second_writer_is_refused(lonely: Lonely) -> None:
    with pytest.raises(AuditLogError, match="another process"):
        lonely.reopen()


def test_real_disk_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log, sync, then send: an entry is synced before `append` returns."""
    synced: list[int] = []
    sync = os.fsync
    alone = Lonely(tmp_path)
    alone.log._writer.disk = Disk()
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), sync(descriptor))[1])
    alone.log.append(ev.OperatorAction(command="one", role="operator"))
    assert len(synced) == 1


# Annexes


def test_annex_may_be_erased(lonely: Lonely) -> None:
    seq = lonely.log.append(ev.OperatorAction(command="one", role="operator"), annex={"patients": 7})
    lonely.log.checkpoint()
    assert lonely.codes() == set()
    lonely.log.erase_annex(seq, seq, "data protection officer")
    lonely.log.checkpoint()
    assert not Tampering(lonely.folder).folder.annex_path(seq).exists()
    result = verify(lonely.folder, lonely.keys)
    assert weighty(result.findings) == set()
    note = next(finding for finding in result.findings if finding.code == "AnnexUnavailable")
    assert "no longer available" in note.meaning


def test_annex_that_is_gone_without_an_entry(lonely: Lonely) -> None:
    seq = lonely.log.append(ev.OperatorAction(command="one", role="operator"), annex={"patients": 7})
    lonely.log.checkpoint()
    Tampering(lonely.folder).folder.annex_path(seq).unlink()
    assert lonely.codes() == {"AnnexLost"}
    with unchecked("AnnexLost"):
        assert lonely.codes() == set(), "twin"
    shutil.rmtree(lonely.folder / "annex")
    assert lonely.codes() == set(), "a copy for an auditor has no annexes at all"


def test_erasure_that_a_crash_cut_short_is_finished(lonely: Lonely, monkeypatch: pytest.MonkeyPatch) -> None:
    seq = lonely.log.append(ev.OperatorAction(command="one", role="operator"), annex={"patients": 7})
    with monkeypatch.context() as patch:
        patch.setattr(DurableFolder, "erase_annexes", lambda *_: None)
        lonely.log.erase_annex(seq, 10**12, "data protection officer")
    lonely.log.checkpoint()
    assert lonely.codes() == {"AnnexKept"}
    with unchecked("AnnexKept"):
        assert lonely.codes() == set(), "twin"
    lonely.log.close()
    lonely.reopen()
    assert not Tampering(lonely.folder).folder.annex_path(seq).exists()
    assert lonely.codes() == set()


@pytest.mark.parametrize("change", [(b'"patients":7', b'"patients":8'), (b'"salt":"', b'"salt":"0')])
def test_annex_may_not_be_exchanged(lonely: Lonely, change: tuple[bytes, bytes]) -> None:
    seq = lonely.log.append(ev.OperatorAction(command="one", role="operator"), annex={"patients": 7})
    lonely.log.checkpoint()
    path = Tampering(lonely.folder).folder.annex_path(seq)
    path.write_bytes(path.read_bytes().replace(*change))
    assert lonely.codes() == {"AnnexMismatch"}
    with unchecked("AnnexMismatch"):
        assert lonely.codes() == set(), "twin"


def test_annex_is_private(lonely: Lonely) -> None:
    seq = lonely.log.append(ev.OperatorAction(command="one", role="operator"), annex={"patients": 7})
    folder = Tampering(lonely.folder).folder
    assert folder.annex_path(seq).stat().st_mode & 0o077 == 0
    assert b"patients" not in folder.segment(0).read_bytes()


# Every bit counts

REQUIRED = ("FORMAT", "manifest.json", "leaves.bin", "cosigned.note")
FOLDERS = ("segments", "checkpoints", "epochs", "witness")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """The smallest federation with a witness: a few entries and two heads in each log."""
    federation = Federation.make(tmp_path_factory.mktemp("tiny"), sites=("a",), dp_sites=())
    federation.exchange()
    for member in federation.members.values():
        member.log.close()
    return federation


def _required(path: Path) -> list[Path]:
    inside = (file for folder in FOLDERS for file in sorted((path / folder).iterdir()) if file.name != ".lock")
    return [*(path / name for name in REQUIRED), *inside]


def _is_found(path: Path, federation: Federation) -> bool:
    try:
        return verify(path, federation.pinned).exit_code == 1
    except ToolkitError:
        return True


def _bits(position: int) -> Iterator[int]:
    """A bit of every byte, the next one each time; all of them when asked for, which takes a minute or two."""
    yield from range(8) if os.environ.get("LAZARET_EVERY_BIT") else (position % 8,)


def test_every_flipped_bit_is_a_finding(tiny: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole verifier each time, but no signature over the same bytes twice."""
    monkeypatch.setattr(VerifierKey, "verify", lru_cache(maxsize=None)(VerifierKey.verify))
    path = copied(tiny.members["a"].folder, tmp_path / "a")
    assert weighty(verify(path, tiny.pinned).findings) == set()
    for file in _required(path):
        original = bytearray(file.read_bytes())
        for position in range(len(original)):
            for bit in _bits(position):
                original[position] ^= 1 << bit
                file.write_bytes(original)
                assert _is_found(path, tiny), (file.name, position, bit)
                original[position] ^= 1 << bit
        file.write_bytes(original)


@pytest.mark.parametrize("name", ["FORMAT", "manifest.json", "leaves.bin", "segments", "checkpoints", "epochs"])
def test_missing_part_is_never_clean(tiny: Federation, tmp_path: Path, name: str) -> None:
    path = copied(tiny.members["a"].folder, tmp_path / "a")
    shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
    assert verify(path, tiny.pinned).exit_code in (1, 3)


def test_held_heads_read_back(tiny: Federation) -> None:
    for file in (tiny.members["a"].folder / "witness").glob("*.json"):
        held = HeldCheckpoint.parse(file.read_bytes())
        assert held.encode() == file.read_bytes()
