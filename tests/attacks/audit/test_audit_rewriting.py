"""Attacks on what a log has recorded: edit, delete, insert, reorder, rewrite, cut, fork. Each twin lacks one check."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lazaret.errors import CheckpointConflict, ForkDetected, RollbackDetected, VerificationFailed
from security.audit.compare import cross
from security.audit.verify import verify
from security.log import events as ev
from security.log.keys import EpochKeys
from security.log.note import Checkpoint, Note, checkpoint_of
from security.log.store import LogFolder
from security.log.witness import Fork, Submission, Witness
from security.log.writer import AuditLog
from tests.support.audit_attacks import Lonely, Tampering, copied, unchecked, weighty
from tests.support.audit_logs import Federation

# Edit an entry


def _edit(lonely: Lonely) -> None:
    Tampering(lonely.folder).edit(2, lambda entry: entry["body"].update(role="nobody"))


def test_edited_entry(lonely: Lonely) -> None:
    _edit(lonely)
    assert lonely.codes() == {"RootMismatch"}


def test_edited_entry_twin(lonely: Lonely) -> None:
    _edit(lonely)
    with unchecked("RootMismatch"):
        assert lonely.codes() == set()


def test_leaf_hashes_name_the_edited_entry(lonely: Lonely) -> None:
    tampering = Tampering(lonely.folder)
    lines = tampering.lines
    lines[4] = lines[4].replace(b"operator", b"operatoR")
    tampering.write(lines, leaves=False)
    findings = {finding.code: finding for finding in verify(lonely.folder, lonely.keys).findings}
    assert findings["LeavesMismatch"].entries == (4,)


# Delete, insert, reorder, with the live key in hand


def _shuffled(lines: list[bytes], how: str, at: int) -> list[bytes]:
    changed = list(lines)
    if how == "delete":
        del changed[at]
    elif how == "duplicate":
        changed.insert(at, lines[at])
    else:
        changed[at], changed[at + 1] = changed[at + 1], changed[at]
    return changed


@pytest.mark.parametrize("how", ["delete", "duplicate", "swap"])
def test_moved_entries(lonely: Lonely, how: str) -> None:
    tampering = Tampering(lonely.folder)
    original = tampering.lines
    for at in range(1, len(original) - 1):
        changed = _shuffled(original, how, at)
        tampering.write(changed)
        tampering.resign(lonely.signer(0), [len(changed)])
        assert "SequenceGap" in lonely.codes(), (how, at)


def test_moved_entries_twin(lonely: Lonely) -> None:
    tampering = Tampering(lonely.folder)
    tampering.write(_shuffled(tampering.lines, "delete", 4))
    tampering.resign(lonely.signer(0), [len(tampering.lines)])
    assert lonely.codes() == {"SequenceGap"}
    with unchecked("SequenceGap"):
        assert lonely.codes() == set()


# Rewrite everything and sign it again


def _rewrite(lonely: Lonely) -> None:
    tampering = Tampering(lonely.folder)
    lines = tampering.lines
    tampering.write(tampering.renumber([*lines[:3], *lines[4:]]))
    tampering.resign(lonely.signer(0), [len(lines) - 1])


def test_rewritten_log_meets_a_held_head(lonely: Lonely, tmp_path: Path) -> None:
    held = lonely.show(lonely.watcher(tmp_path))
    lonely.log.append(ev.AgentStop(reason="end"))
    lonely.log.close()
    _rewrite(lonely)
    assert lonely.codes([held]) == {"Fork"}


def test_rewritten_log_meets_a_held_head_twin(lonely: Lonely, tmp_path: Path) -> None:
    held = lonely.show(lonely.watcher(tmp_path))
    lonely.log.append(ev.AgentStop(reason="end"))
    lonely.log.close()
    _rewrite(lonely)
    with unchecked("Fork"):
        assert lonely.codes([held]) == set()


# Cut off the end


def test_cut_tail_at_every_head(lonely: Lonely, tmp_path: Path) -> None:
    held = lonely.show(lonely.watcher(tmp_path))
    tampering = Tampering(lonely.folder)
    for size in reversed(tampering.folder.checkpoint_sizes()[:-1]):
        tampering.cut(size)
        assert lonely.codes([held]) == {"TruncatedTail"}
        with unchecked("TruncatedTail"):
            assert lonely.codes([held]) == set(), "twin"


def test_cut_tail_without_witnesses_is_no_pass(federation: Federation, tmp_path: Path) -> None:
    """Nobody else's head, nobody's cosignature: then nothing beyond the end can be decided, at any size."""
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    tampering = Tampering(path)
    tampering.strip_cosignatures()
    for size in reversed(tampering.folder.checkpoint_sizes()):
        tampering.cut(size)
        result = verify(path, federation.pinned)
        assert result.exit_code == 3
        assert weighty(result.findings) - {"NoStop", "CosignatureMissing", "NoNetworkCounter"} == {"NotWitnessed"}


def test_cut_tail_without_witnesses_is_no_pass_twin(federation: Federation, tmp_path: Path) -> None:
    path = copied(federation.members["graz"].folder, tmp_path / "graz")
    Tampering(path).strip_cosignatures()
    with unchecked("NotWitnessed", "CosignatureMissing"):
        assert verify(path, federation.pinned).exit_code == 0


# Cut and go on


def test_cut_and_continued_log_is_refused_at_start(lonely: Lonely, tmp_path: Path) -> None:
    watcher = lonely.watcher(tmp_path / "outside")
    old = copied(lonely.folder, tmp_path / "old")
    lonely.log.append(ev.OperatorAction(command="export", role="operator"))
    lonely.log.checkpoint()
    held = lonely.show(watcher)
    lonely.log.close()
    restored = _restore(lonely, old)
    with pytest.raises(RollbackDetected):
        restored.refuse_rollback([held])
    with pytest.raises(Exception, match="restored from an old copy"):
        restored.append(ev.AgentStop(reason="end"))


def _restore(lonely: Lonely, old: Path) -> AuditLog:
    shutil.rmtree(lonely.folder)
    copied(old, lonely.folder)
    return lonely.reopen()


def test_cut_and_continued_log_is_refused_at_start_twin(
    lonely: Lonely, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the question at start-up the log goes on; only the witness and the auditor would notice."""
    watcher = lonely.watcher(tmp_path / "outside")
    old = copied(lonely.folder, tmp_path / "old")
    lonely.log.append(ev.OperatorAction(command="export", role="operator"))
    lonely.log.checkpoint()
    held = lonely.show(watcher)
    lonely.log.close()
    restored = _restore(lonely, old)
    monkeypatch.setattr(AuditLog, "refuse_rollback", lambda self, held: None)
    restored.refuse_rollback([held])
    for _ in range(3):
        restored.append(ev.OperatorAction(command="other", role="operator"))
    restored.checkpoint()
    assert lonely.codes() == set()
    assert lonely.codes([held]) == {"Fork"}
    with pytest.raises(VerificationFailed):
        lonely.show(watcher)


def _hollow_epoch(lonely: Lonely) -> None:
    """What CVE-2023-31438 was: an epoch is emptied, and the log goes on as if it had been short."""
    lonely.log.rotate("epoch over")
    for _ in range(3):
        lonely.log.append(ev.OperatorAction(command="delete study", role="operator"))
    lonely.log.rotate("epoch over")
    lonely.log.append(ev.OperatorAction(command="status", role="operator"))
    lonely.log.checkpoint()
    tampering = Tampering(lonely.folder)
    lines = tampering.lines
    first, second = (number for number, line in enumerate(lines) if b'"type":"key.rotated"' in line)
    kept = [*lines[: first + 1], lines[second - 1], *lines[second:]]
    tampering.write(tampering.renumber(kept))
    # The key of the emptied epoch is erased; only the live one can sign what follows.
    tampering.resign(lonely.signer(2), [len(kept)], least=first + 2)


def test_hollow_epoch(lonely: Lonely) -> None:
    _hollow_epoch(lonely)
    assert lonely.codes() == {"EpochUnsealed"}


def test_hollow_epoch_twin(lonely: Lonely) -> None:
    _hollow_epoch(lonely)
    with unchecked("EpochUnsealed"):
        assert lonely.codes() == set()


def test_epoch_without_heartbeat(lonely: Lonely) -> None:
    lonely.log.rotate("epoch over")
    tampering = Tampering(lonely.folder)
    lines = [line for line in tampering.lines if b'"type":"heartbeat"' not in line]
    tampering.write(tampering.renumber(lines))
    tampering.resign(lonely.signer(1), [len(lines)])
    assert "EpochWithoutHeartbeat" in lonely.codes()


# Seal an old epoch with a newer key


def _seal_with_newer_key(lonely: Lonely) -> None:
    """What CVE-2023-31439 was: entries of a finished epoch are changed and signed with the key that is at hand."""
    lonely.log.rotate("epoch over")
    tampering = Tampering(lonely.folder)
    tampering.edit(2, lambda entry: entry["body"].update(role="nobody"))
    tampering.resign(lonely.signer(1))


def test_old_epoch_sealed_with_newer_key(lonely: Lonely) -> None:
    _seal_with_newer_key(lonely)
    assert lonely.codes() == {"WrongEpochKey"}


def test_old_epoch_sealed_with_newer_key_twin(lonely: Lonely) -> None:
    _seal_with_newer_key(lonely)
    with unchecked("WrongEpochKey"):
        assert lonely.codes() == set()


def test_old_keys_are_gone(lonely: Lonely) -> None:
    lonely.log.rotate("epoch over")
    keys = EpochKeys(lonely.member.keys, lonely.log.origin, lonely.rng)
    assert keys.held() == (1,)


# No seal at all


def test_head_under_another_name(lonely: Lonely) -> None:
    """Its own key signs what is here, and says that it is the log of somebody else: nobody else could hold it to it."""
    lonely.log.close()
    folder = LogFolder(lonely.folder)
    size = folder.checkpoint_sizes()[0]
    root = checkpoint_of(folder.checkpoint_note(size)).root
    text = Checkpoint(origin="vienna.lesions/audit", size=size, root=root).text
    note = Note(text=text, signatures=(lonely.signer(0).sign(text),))
    folder.checkpoint_path(size).write_bytes(note.encode())
    assert lonely.codes() == {"BadHead"}
    honest = Checkpoint(origin=lonely.log.origin, size=size, root=root).text
    note = Note(text=honest, signatures=(lonely.signer(0).sign(honest),))
    folder.checkpoint_path(size).write_bytes(note.encode())
    assert lonely.codes() == set(), "only the name was wrong"


def test_unsealed_log(lonely: Lonely) -> None:
    for note in lonely.folder.glob("checkpoints/*.note"):
        note.unlink()
    assert lonely.codes() == {"Unsealed"}
    with unchecked("Unsealed"):
        assert lonely.codes() == set(), "twin"


def test_log_stripped_of_every_note_is_never_clean(federation: Federation, tmp_path: Path) -> None:
    path = copied(federation.members["linz"].folder, tmp_path / "linz")
    for note in path.rglob("*.note"):
        note.unlink()
    assert verify(path, federation.pinned).exit_code in (1, 3)


# Two histories


def _two_branches(lonely: Lonely, tmp_path: Path) -> tuple[Submission, Submission]:
    """The same log goes on twice, with one key: what it shows to one it does not show to the other."""
    held = checkpoint_of(lonely.log.newest_checkpoint).size
    other = Lonely.__new__(Lonely)
    other.__dict__.update(lonely.__dict__)
    copied(lonely.folder, tmp_path / "branch" / "graz")
    copied(lonely.member.keys, tmp_path / "branch" / "graz.keys")
    other.member = type(lonely.member)(
        party=lonely.member.party,
        root=lonely.member.root,
        cosigner=lonely.member.cosigner,
        folder=tmp_path / "branch" / "graz",
    )
    branch = other.reopen()
    lonely.log.append(ev.OperatorAction(command="shown to one", role="operator"))
    branch.append(ev.OperatorAction(command="shown to another", role="operator"))
    lonely.log.checkpoint()
    branch.checkpoint()
    return lonely.log.submission(held), branch.submission(held)


def test_one_witness_sees_a_fork(lonely: Lonely, tmp_path: Path) -> None:
    watcher = lonely.watcher(tmp_path / "outside")
    lonely.show(watcher)
    one, other = _two_branches(lonely, tmp_path)
    watcher.consider(one)
    with pytest.raises(ForkDetected):
        watcher.consider(other)
    evidence = list((tmp_path / "outside" / "outside" / "evidence").glob("fork-*.json"))
    assert len(evidence) == 1
    Fork.parse(evidence[0].read_bytes()).verify(lonely.member.party.root)


def test_two_witnesses_are_shown_two_branches(lonely: Lonely, tmp_path: Path) -> None:
    first, second = lonely.watcher(tmp_path / "first"), lonely.watcher(tmp_path / "second")
    lonely.show(first)
    lonely.show(second)
    one, other = _two_branches(lonely, tmp_path)
    first.consider(one)
    second.consider(other)
    held = [watcher.held(lonely.log.origin) for watcher in (first, second)]
    assert lonely.codes([item for item in held if item]) == {"Fork"}
    with unchecked("Fork"):
        assert lonely.codes([item for item in held if item]) == set(), "twin"


def test_fork_between_logs_gives_transferable_evidence(federation: Federation, tmp_path: Path) -> None:
    """A coordinator rewrites its log after sites have cosigned it; the sites' folders convict it."""
    folders = [copied(path, tmp_path / path.name) for path in federation.folders]
    tampering = Tampering(folders[0])
    hub = federation.hub
    tampering.edit(5, lambda entry: entry.update(actor="somebody else"))
    tampering.strip_cosignatures()
    tampering.resign(EpochKeys(hub.keys, hub.party.origin, federation.rng).load(0))
    result = cross(folders, dict.fromkeys(folders, federation.pinned))
    assert "Fork" in weighty(result.findings)
    fork = result.forks[0]
    again = Fork.parse(fork.encode())
    again.verify(hub.party.root)
    for honest in (
        dataclasses.replace(again, other_root=checkpoint_of(again.held).root),
        dataclasses.replace(again, shown=again.held),
    ):
        with pytest.raises(VerificationFailed):
            honest.verify(hub.party.root)


# The race that would roll a witness back


@contextmanager
def _unlocked(self: Witness) -> Iterator[None]:
    yield


def _race(lonely: Lonely, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[int]]:
    """Two heads, N and N + K, are offered at once; the smaller one's write is held up until the larger is through."""
    watcher = lonely.watcher(tmp_path / "outside")
    lonely.show(watcher)
    start = watcher.held_size(lonely.log.origin)
    offers = []
    for _ in range(2):
        lonely.log.append(ev.OperatorAction(command="status", role="operator"))
        lonely.log.checkpoint()
        offers.append(lonely.log.submission(start))
    small, large = offers
    through, publish = threading.Event(), watcher._disk.publish
    small_size = checkpoint_of(small.note).size

    def slow_publish(path: Path, data: bytes, mode: int = 0o644) -> None:
        if f"\\n{small_size}\\n".encode() in data:
            through.wait(0.5)
        publish(path, data, mode)

    monkeypatch.setattr(watcher._disk, "publish", slow_publish)
    signed: list[int] = []

    def offer(submission: Submission) -> None:
        try:
            watcher.consider(submission)
        except CheckpointConflict:
            return
        signed.append(checkpoint_of(submission.note).size)

    first = threading.Thread(target=offer, args=(small,))
    second = threading.Thread(target=lambda: (offer(large), through.set()))
    first.start()
    first.join(0.1)
    second.start()
    first.join(5)
    second.join(5)
    return watcher.held_size(lonely.log.origin), signed


def test_concurrent_heads_never_roll_a_witness_back(
    lonely: Lonely, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, signed = _race(lonely, tmp_path, monkeypatch)
    assert held == max(signed)


def test_concurrent_heads_never_roll_a_witness_back_twin(
    lonely: Lonely, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Witness, "_exclusive", _unlocked)
    held, signed = _race(lonely, tmp_path, monkeypatch)
    assert held < max(signed)
