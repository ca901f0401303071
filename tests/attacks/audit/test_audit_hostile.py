"""Folders that want the audit to hang, to read elsewhere or to run out of memory; and evidence that frames somebody."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import rfc8785
from click.testing import CliRunner, Result

from security.audit import safe_files
from security.audit.agreement import keys_for
from security.audit.cli import main
from security.audit.compare import cross, held_checkpoints
from security.audit.completeness import RoundBook
from security.audit.findings import Findings
from security.audit.safe_files import read_capped
from security.audit.verify import verify
from security.clock import ManualClock
from security.log.events import AgentStop
from security.log.machine import SEGMENT
from security.log.note import Checkpoint, Note, NoteSigner, checkpoint_of
from security.log.reader import LogReader, Record
from security.log.roster import SITE
from security.log.schema import MAX_COUNT
from security.log.store import LogFolder
from security.log.witness import Fork, HeldCheckpoint
from tests.support.audit_attacks import Lonely, copied, weighty, with_signatures
from tests.support.audit_logs import Federation
from tests.support.audit_parties import NOW

pytestmark = pytest.mark.timeout(60)


def _sparse(path: Path, size: int) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    there = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(there)


def _moved(path: Path, elsewhere: Path) -> None:
    """All that is in it is as it should be. But it is not in the folder."""
    path.rename(elsewhere)
    _link(path, str(elsewhere))


def _flat(path: Path) -> None:
    path.rename(path.parent.parent / path.name)
    path.write_bytes(b"")


HOSTILE: dict[str, Callable[[Path], None]] = {
    "FIFO as segment": lambda path: _fifo(path / "segments" / "00000000.jsonl"),
    "FIFO as checkpoint": lambda path: _fifo(path / "checkpoints" / "9999.note"),
    "FIFO as manifest": lambda path: _fifo(path / "manifest.json"),
    "FIFO among manifests": lambda path: _fifo(path / "manifests" / f"{'0' * 64}.json"),
    "FIFO as FORMAT": lambda path: _fifo(path / "FORMAT"),
    "FIFO as evidence": lambda path: _fifo(path / "evidence" / "fork-1.json"),
    "link to a device": lambda path: _link(path / "segments" / "00000000.jsonl", "/dev/zero"),
    "link out of the folder": lambda path: _link(path / "cosigned.note", "/etc/hostname"),
    "link as folder": lambda path: ((path / "witness").rename(path / "elsewhere"), _link(path / "witness", "/etc"))[0],
    "link as folder, to a clean one": lambda path: _moved(path / "witness", path.parent / "witness of another"),
    "file as folder": lambda path: _flat(path / "epochs"),
    "socket": lambda path: _socket(path / "annex" / "7.json"),
    "sparse segment": lambda path: _sparse(path / "segments" / "00000001.jsonl", 400_000_000),
    "giant segment": lambda path: _sparse(path / "segments" / "00000001.jsonl", 1 << 41),
    "giant leaves": lambda path: _sparse(path / "leaves.bin", 1 << 37),
    "giant note": lambda path: _sparse(path / "checkpoints" / "77.note", 1 << 40),
    "giant witness": lambda path: _sparse(path / "witness" / "x.json", 1 << 40),
    "giant evidence": lambda path: _sparse(path / "evidence" / "fork-1.json", 60_000_000),
    "giant manifest": lambda path: _sparse(path / "manifests" / f"{'0' * 64}.json", 1 << 40),
    "folder as checkpoint": lambda path: _folder(path / "checkpoints" / "3.note"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folder_is_one_finding(name: str, federation: Federation, tmp_path: Path) -> None:
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    HOSTILE[name](path)
    folders = [path if one.name == "graz" else one for one in federation.folders]
    result = cross(folders, {one: keys_for(one, federation.root_key) for one in folders})
    assert result.exit_code == 1
    assert [finding.code for finding in result.logs[folders.index(path)].findings] == ["HostileFolder"]


def test_a_flood_of_lines_is_not_read(federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a gigabyte of empty lines is small in an archive, and would keep an audit busy for hours."""
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    with (path / "segments" / "00000000.jsonl").open("ab") as segment:
        segment.write(b"\n" * 2_000_000)
    folders = [path if one.name == "graz" else one for one in federation.folders]
    result = cross(folders, {one: keys_for(one, federation.root_key) for one in folders})
    found = result.logs[folders.index(path)]
    assert found.size == SEGMENT + 1 and {"SegmentMissing", "MalformedEntry"} <= weighty(found.findings)
    monkeypatch.setattr("security.log.reader.SEGMENT", 1 << 40)
    assert sum(len(block.lines) for block in LogReader(path).blocks()) > 2_000_000, "twin"


def test_a_fifo_holds_whoever_does_not_look_first(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: nobody looks, and the audit waits for a writer until an alarm ends it."""
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    HOSTILE["FIFO as FORMAT"](path)
    keys = keys_for(path, federation.root_key)
    monkeypatch.setattr("security.audit.verify.hostile", lambda _: iter(()))

    def waited(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, waited)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(TimeoutError):
            verify(path, keys)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_link_is_followed_by_whoever_does_not_look_first(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: what the link leads to is read as if the party had written it."""
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    elsewhere = tmp_path / "of the auditor"
    (path / "cosigned.note").rename(elsewhere)
    _link(path / "cosigned.note", str(elsewhere))
    assert weighty(verify(path, keys_for(path, federation.root_key)).findings) == {"HostileFolder"}
    monkeypatch.setattr("security.audit.verify.hostile", lambda _: iter(()))
    assert weighty(verify(path, keys_for(path, federation.root_key)).findings) == set()


def test_reading_without_a_look_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cap off, a giant is read into memory: here one of a size that a test can bear."""
    file = tmp_path / "note"
    _sparse(file, 3_000_000)
    with pytest.raises(Exception, match="larger"):
        read_capped(file, safe_files.NOTE_BYTES)
    assert len(read_capped(file, 1 << 40)) == 3_000_000


@pytest.mark.parametrize("command", ["egress", "epsilon", "heads", "verify", "report"])
def test_every_command_looks_first(command: str, federation: Federation, tmp_path: Path) -> None:
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    _fifo(path / "segments" / "00000000.jsonl")
    words = [command, str(path), *(["-o", str(tmp_path / "r.html")] if command == "report" else [])]
    assert CliRunner().invoke(main, words).exit_code in (1, 3)


@pytest.mark.parametrize("command", ["verify", "heads", "report", "egress"])
def test_times_that_no_calendar_has_stop_no_command(command: str, tmp_path: Path) -> None:
    lonely = Lonely(tmp_path)
    lonely.clock.wall = MAX_COUNT - 1000
    lonely.log.append(AgentStop(reason="end"))
    lonely.log.close()
    words = [command, str(lonely.folder), *(["-o", str(tmp_path / "r.html")] if command == "report" else [])]
    done = CliRunner().invoke(main, words)
    assert isinstance(done.exception, SystemExit | None), done.exception


@pytest.mark.parametrize("kind", ["empty", "no segments", "no witness folder"])
def test_missing_parts_cannot_be_decided(kind: str, federation: Federation, tmp_path: Path) -> None:
    path = tmp_path / "graz"
    if kind == "empty":
        path.mkdir()
    else:
        copied(federation.members["graz"].folder, path)
        folder = path / ("segments" if kind == "no segments" else "witness")
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    found = verify(path, keys_for(path, federation.root_key))
    assert weighty(found.findings) == {"WitnessFolderMissing" if kind == "no witness folder" else "EmptyLog"}
    assert found.exit_code == 3


# Nobody is framed


def _stranger(origin: str) -> NoteSigner:
    return NoteSigner.from_seed(origin, bytes(range(32)))


def _forged_fork(federation: Federation, origin: str) -> Fork:
    """Two histories of an honest log, signed by somebody else's key under its name."""
    signer, notes = _stranger(origin), []
    for root in (bytes(32), bytes([1]) * 32):
        text = Checkpoint(origin=origin, size=5, root=root).text
        notes.append(Note(text=text, signatures=(signer.sign(text),)))
    real = tuple(LogFolder(federation.members["linz"].folder).endorsements())
    return Fork(origin=origin, held=notes[0], shown=notes[1], endorsements=real, other_root=bytes([1]) * 32)


def test_forged_evidence_of_a_fork_frames_nobody(federation: Federation, tmp_path: Path) -> None:
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    fork = _forged_fork(federation, federation.members["linz"].party.origin)
    (path / "evidence" / "fork-aaaa.json").write_bytes(fork.encode())
    (path / "evidence" / "fork-bbbb.json").write_bytes(b"{}\n")
    nameless = json.loads(fork.encode()) | {"origin": []}
    (path / "evidence" / "fork-cccc.json").write_bytes(rfc8785.dumps(nameless) + b"\n")
    found = verify(path, keys_for(path, federation.root_key))
    assert weighty(found.findings) == set()
    assert "EvidenceInvalid" in {finding.code for finding in found.findings}


def test_genuine_evidence_of_a_fork_counts_twin(federation: Federation, tmp_path: Path) -> None:
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    linz = federation.members["linz"]
    note = linz.log.newest_checkpoint
    text = Checkpoint(origin=linz.party.origin, size=checkpoint_of(note).size, root=bytes(32)).text
    other = Note(text=text, signatures=(linz.log._signer.sign(text),))
    fork = Fork(
        origin=linz.party.origin,
        held=note,
        shown=other,
        endorsements=tuple(LogFolder(linz.folder).endorsements()),
        other_root=bytes(32),
    )
    (path / "evidence" / "fork-aaaa.json").write_bytes(fork.encode())
    assert weighty(verify(path, keys_for(path, federation.root_key)).findings) == {"Fork"}


@pytest.mark.parametrize("cosigned", [False, True])
def test_forged_held_checkpoint_frames_nobody(federation: Federation, tmp_path: Path, cosigned: bool) -> None:
    """A larger checkpoint of linz under a stranger's key: it would say that linz cut its tail. Also with the genuine
    cosignature of whoever holds it."""
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    origin = federation.members["linz"].party.origin
    text = Checkpoint(origin=origin, size=100_000, root=bytes(32)).text
    note = Note(text=text, signatures=(_stranger(origin).sign(text),))
    if cosigned:
        note = with_signatures(note, federation.members["graz"].cosigner.cosign(text, NOW // 1000))
    forged = HeldCheckpoint(note=note, endorsements=tuple(LogFolder(federation.members["linz"].folder).endorsements()))
    LogFolder(path).witness_path(origin).write_bytes(forged.encode())
    folders = [path if one.name == "graz" else one for one in federation.folders]
    keys = {one: keys_for(one, federation.root_key) for one in folders}
    result = cross(folders, keys)
    by_log = {log.origin: weighty(log.findings) for log in result.logs}
    assert by_log[origin] == set(), "the honest party"
    assert by_log["graz.lesions/audit"] == {"WitnessRecordInvalid"}, "whoever holds the forgery"
    assert not held_checkpoints([path], keys[path].agreements).get(origin)
    # Twin: believed, it convicts linz.
    assert "TruncatedTail" in weighty(verify(federation.members["linz"].folder, federation.pinned, [forged]).findings)


@pytest.mark.parametrize("shift", [-86_400, 86_400])
def test_a_witness_with_a_false_clock_frames_nobody(shift: int, tmp_path: Path) -> None:
    """Its cosignature is refused by the log's owner, and does not count in the audit if it was kept."""
    federation = Federation.make(tmp_path, dp_sites=())
    liar = federation.members["linz"]
    liar.witness._clock = ManualClock(wall=NOW + shift * 1000)
    with pytest.raises(Exception, match="clock of a witness"):
        federation.play(1)
    import security.log.writer as writer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SKEW_MS", 1 << 50)
        federation.exchange()
    federation.stop()
    found = cross(federation.folders, federation.keys)
    assert not {"Backdated", "ClockRollback"} & weighty(found.findings)
    assert "WitnessClock" in {finding.code for finding in found.findings}


def _check(*words: object) -> Result:
    return CliRunner().invoke(main, ["check-proof", *map(str, words)])


def test_check_proof_tells_proven_false_and_unreadable_apart(federation: Federation, tmp_path: Path) -> None:
    hub = federation.hub.folder
    keys = ("--manifest", hub / "manifest.json", "--root-key", federation.root_key)
    proof = tmp_path / "entry.tlog-proof"
    assert CliRunner().invoke(main, ["prove", str(hub), "--seq", "3", "-o", str(proof)]).exit_code == 0
    assert _check(proof, *keys).exit_code == 0
    assert _check(proof).exit_code == 3
    data = proof.read_bytes()
    proof.write_bytes(data.replace(b"index 3", b"index 4"))
    assert _check(proof, *keys).exit_code == 1
    for junk in (b"", b"{", b"\x00" * 100, data[: len(data) // 2], b"{}"):
        proof.write_bytes(junk)
        assert _check(proof, *keys).exit_code == 2, junk[:10]
    fork = tmp_path / "fork.json"
    fork.write_bytes(_forged_fork(federation, federation.members["linz"].party.origin).encode())
    assert _check(fork, *keys).exit_code == 1


@pytest.mark.timeout(30)
def test_many_entries_of_one_round_take_no_longer_than_of_many() -> None:
    """Whoever writes a log chooses what is in it: comparing each entry of a round with each other would take hours."""
    findings = Findings("graz.lesions/audit")
    book, count = RoundBook(findings), 30_000
    sets = {"attempt": 0, "survivors": "0" * 64, "count": 3, "threshold": 3, "dropouts": []}
    bodies: list[tuple[str, dict[str, object]]] = []
    for number in range(count):
        context = f"{number:064x}"
        bodies += [("secagg.survivors", sets | {"context": context})]
        bodies += [("secagg.unmasked", {"attempt": 0, "context": context, "self_mask": ["a", "b"], "mask_key": []})]
        bodies += [("aggregate.published", {"inputs": 3}), ("egress.blocked", {"message": "UploadFrame", "rule": "x"})]
        bodies += [("operator.action", {"command": "entry 1 and a great deal more"})]
    for seq, (kind, body) in enumerate(bodies):
        book.take(Record(seq=seq, ts=0, boot="b", type=kind, run="r", round=1, body=body), None)
    book.close(SITE)
    assert {"SecondSum", "SumMismatch", "VectorBlocked"} <= {finding.code for finding in findings.listed()}
