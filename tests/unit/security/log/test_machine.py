"""The log machine: its table, its time, its segments; epochs and their chain."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from lazaret.errors import AuditLogError, CodecError, LocalProtocolError, VerificationFailed
from security.audit.verify import verify
from security.log import events as ev
from security.log import machine as module
from security.log.keys import Endorsement, EpochChain, EpochKeys, endorse
from security.log.machine import (
    TRANSITIONS,
    Heartbeat,
    KeyRotated,
    LogGenesis,
    LogMachine,
    LogStep,
    Moment,
    Scope,
    State,
)
from security.log.note import KeyType, Note, NoteSigner, checkpoint_of
from security.log.reader import LogReader
from security.log.writer import AuditLog
from security.rng import CountedRandomness
from tests.support.audit_attacks import Lonely, weighty, with_signatures

VKEY = "a+00000000+" + "A" * 44
GENESIS = LogGenesis(
    format=1,
    role="site",
    root_vkey=VKEY,
    epoch_vkey=VKEY,
    cosigner_vkey=VKEY,
    manifest="0" * 64,
    policy="0" * 64,
)
STEPS = {
    LogStep.GENESIS: lambda machine: machine.append(GENESIS, _at(0)),
    LogStep.APPEND: lambda machine: machine.append(Heartbeat(size=0), _at(0)),
    LogStep.ROTATE: lambda machine: machine.append(
        KeyRotated(epoch=machine.epoch + 1, old_vkey=VKEY, new_vkey=VKEY, reason="test"), _at(0)
    ),
    LogStep.CHECKPOINT: lambda machine: machine.checkpoint(NoteSigner.from_seed("a", bytes(32))),
    LogStep.STOP: lambda machine: machine.append(ev.AgentStop(reason="end"), _at(0)),
    LogStep.FAIL: lambda machine: machine.fail("disk full"),
}


def _at(ms: int, *, boot: str = "ab" * 16, mono: int | None = None) -> Moment:
    return Moment(wall_ms=1_800_000_000_000 + ms, mono_ms=ms if mono is None else mono, boot=boot)


def _machine(state: State) -> LogMachine:
    machine = LogMachine("site.example/audit")
    if state is not State.NEW:
        machine.append(GENESIS, _at(0))
    if state is State.STOPPED:
        machine.append(ev.AgentStop(reason="end"), _at(0))
    if state is State.FAILED:
        machine.fail("disk full")
    assert machine.state is state
    return machine


def test_the_first_reason_for_a_failure_is_the_one_that_stays() -> None:
    machine = _machine(State.OPEN)
    assert machine.failure is None
    for reason in ("cannot write an entry: no space left on device", "something that followed from it"):
        assert "no space left on device" in str(machine.fail(reason))


@pytest.mark.parametrize(("state", "step"), list(itertools.product(State, LogStep)))
def test_transitions_are_those_of_the_table(state: State, step: LogStep) -> None:
    machine = _machine(state)
    if (state, step) in TRANSITIONS:
        STEPS[step](machine)
        assert machine.state is TRANSITIONS[state, step]
    else:
        size = machine.size
        with pytest.raises(LocalProtocolError):
            STEPS[step](machine)
        assert machine.size == size


def test_sequence_time_and_scope() -> None:
    machine = _machine(State.OPEN)
    entry = machine.append(Heartbeat(size=1), _at(7), Scope(run="r", round=2, actor="x"))[0]
    line = json.loads(entry.line)
    assert (line["seq"], line["ts"], line["mono_ms"], line["run"], line["round"]) == (1, 1_800_000_000_007, 7, "r", 2)


def test_clock_that_goes_back_gets_an_entry() -> None:
    machine = _machine(State.OPEN)
    entries = machine.append(Heartbeat(size=1), _at(-500, mono=3))
    assert [json.loads(entry.line)["type"] for entry in entries] == ["clock.adjusted", "heartbeat"]
    assert json.loads(entries[0].line)["body"]["offset_ms"] == -500


def test_an_entry_that_is_refused_after_another_was_made_closes_the_log() -> None:
    """The tree holds an entry that nobody writes: what follows would have a number too high."""
    names = tuple(f"{number:0>100}" for number in range(1000))
    long = ev.SecaggUnmasked(context="ab" * 32, attempt=0, self_mask=names, mask_key=())
    machine = _machine(State.OPEN)
    with pytest.raises(LocalProtocolError, match="longer than"):
        machine.append(long, _at(1))
    machine.append(Heartbeat(size=1), _at(2))
    with pytest.raises(AuditLogError, match="longer than"):
        machine.append(long, _at(-500, mono=3))
    assert machine.state is State.FAILED


def test_monotonic_clock_may_not_go_back() -> None:
    machine = _machine(State.OPEN)
    machine.append(Heartbeat(size=1), _at(10))
    with pytest.raises(LocalProtocolError):
        machine.append(Heartbeat(size=1), _at(11, mono=9))
    machine.append(Heartbeat(size=1), _at(11, mono=0, boot="cd" * 16))


def test_bad_scope_is_refused_and_leaves_nothing() -> None:
    machine = _machine(State.OPEN)
    with pytest.raises(LocalProtocolError):
        machine.append(Heartbeat(size=1), _at(1), Scope(run="not a token"))
    assert machine.size == 1


def test_epochs_count_one_by_one() -> None:
    machine = _machine(State.OPEN)
    with pytest.raises(LocalProtocolError):
        machine.append(KeyRotated(epoch=2, old_vkey=VKEY, new_vkey=VKEY, reason="x"), _at(1))
    machine.append(KeyRotated(epoch=1, old_vkey=VKEY, new_vkey=VKEY, reason="x"), _at(1))
    assert json.loads(machine.append(Heartbeat(size=1), _at(2))[0].line)["epoch"] == 1


def test_segments_seal_each_other(lonely: Lonely, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("log.machine", "log.store", "log.reader", "log.opening", "audit.scan"):
        monkeypatch.setattr(f"security.{name}.SEGMENT", 8)
    for _ in range(30):
        lonely.log.append(Heartbeat(size=lonely.log.size))
    lonely.log.close()
    files = LogReader(lonely.folder).segments()
    assert [len(file.read_bytes().splitlines()) for file in files] == [8, 8, 8, 8, 3]
    assert lonely.codes() == set()
    log = lonely.reopen()
    log.append(Heartbeat(size=log.size))
    log.close()
    assert lonely.codes() == set()
    assert module.SEGMENT == 8
    files[1].unlink()
    assert "SegmentMissing" in lonely.codes()


def test_heartbeat_and_rotation_by_the_clock(lonely: Lonely) -> None:
    size = lonely.log.size
    lonely.log.tick()
    assert lonely.log.size == size, "not due"
    lonely.clock.advance(module.HEARTBEAT_MS)
    lonely.log.tick()
    assert lonely.log.size == size + 1
    for _ in range(96):
        lonely.clock.advance(module.HEARTBEAT_MS)
        lonely.log.tick()
    assert lonely.log.epoch == 1
    lonely.log.close()
    assert lonely.codes() == set()


def busy_hours(lonely: Lonely) -> set[str]:
    """A site that dials every ten minutes for hours, and is turned away: never silent, and nothing comes of it."""
    for minute in range(180):
        lonely.clock.advance(60_000)
        if minute % 10 == 9:
            lonely.log.append(ev.OperatorAction(command="dials", role="operator"))
        lonely.log.tick()
    lonely.log.close()
    return lonely.codes()


def test_a_log_that_is_never_silent_is_signed_too(lonely: Lonely) -> None:
    assert "HeartbeatGap" not in busy_hours(lonely)


def test_a_log_that_is_never_silent_twin(lonely: Lonely, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: no heartbeat is due, so nothing is signed for hours."""
    monkeypatch.setattr(AuditLog, "_head_due", lambda _: False)
    assert "HeartbeatGap" in busy_hours(lonely)


def test_a_busy_log_changes_its_key_and_is_signed_all_the_same(lonely: Lonely) -> None:
    """Two days without silence: the next key comes when a checkpoint is due, and neither takes the other's place."""
    for minute in range(2 * 24 * 60 + 30):
        lonely.clock.advance(60_000)
        if minute % 10 == 9:
            lonely.log.append(ev.OperatorAction(command="dials", role="operator"))
        lonely.log.tick()
    assert lonely.log.epoch == 2
    lonely.log.close()
    assert lonely.codes() == set()


def test_head_is_given_again_where_nothing_is_new(lonely: Lonely) -> None:
    assert lonely.log.checkpoint() is lonely.log.checkpoint()


def test_manifest_may_be_replaced(lonely: Lonely) -> None:
    lonely.log.adopt_manifest(b'{"version":2}\n', 2, lonely.roster)
    lonely.log.close()
    assert lonely.codes() == set()
    (lonely.folder / "manifest.json").write_bytes(b"{}\n")
    assert lonely.codes() == {"ManifestMismatch"}


def test_keys_never_print(lonely: Lonely) -> None:
    assert "redacted" in repr(lonely.signer(0))
    assert not list(lonely.folder.rglob("*.key")), "private keys are not in the folder that gets copied"


# Epoch keys

ROOT = NoteSigner.from_seed("site.example/audit", bytes([1]) * 32)


def _chain(count: int) -> tuple[list[NoteSigner], list[Note]]:
    keys = [NoteSigner.from_seed("site.example/audit", bytes([2 + number]) * 32) for number in range(count)]
    signers = [ROOT, *keys]
    notes = [
        endorse(signers[number], Endorsement(origin="site.example/audit", epoch=number, key=key.key))
        for number, key in enumerate(keys)
    ]
    return keys, notes


def test_chain_leads_from_the_root() -> None:
    keys, notes = _chain(3)
    chain = EpochChain.verify("site.example/audit", ROOT.key, notes)
    assert chain.keys == tuple(key.key for key in keys)


@pytest.mark.parametrize("fault", ["missing", "swapped", "foreign", "repeated", "empty", "two signatures"])
def test_broken_chains(fault: str) -> None:
    keys, notes = _chain(3)
    origin = "site.example/audit"
    if fault == "missing":
        notes = [notes[0], notes[2]]
    elif fault == "swapped":
        notes = [notes[1], notes[0]]
    elif fault == "foreign":
        origin = "other.example/audit"
    elif fault == "repeated":
        notes[1] = endorse(keys[0], Endorsement(origin=origin, epoch=1, key=keys[0].key))
    elif fault == "two signatures":
        notes[1] = with_signatures(notes[1], ROOT.sign(notes[1].text))
    else:
        notes = []
    with pytest.raises(VerificationFailed):
        EpochChain.verify(origin, ROOT.key, notes)


@pytest.mark.parametrize("text", ["", "lazaret/epoch-key/v1\na\n0\n", "x\na\n0\nb\n"])
def test_endorsement_is_strict(text: str) -> None:
    with pytest.raises(CodecError):
        Endorsement.parse(text)


def test_endorsement_is_no_checkpoint() -> None:
    _, notes = _chain(1)
    with pytest.raises(CodecError):
        checkpoint_of(notes[0])


def test_epoch_key_of_another_kind() -> None:
    cosigner = NoteSigner.from_seed("site.example/audit", bytes(32), KeyType.COSIGNER)
    with pytest.raises(CodecError):
        Endorsement(origin="site.example/audit", epoch=0, key=cosigner.key)


def test_keys_on_disk(tmp_path: Path) -> None:
    keys = EpochKeys(tmp_path / "keys", "site.example/audit", CountedRandomness(b"k"))
    made = keys.create(0)
    assert keys.load(0).key == made.key
    assert (tmp_path / "keys" / "epoch-0.key").stat().st_mode & 0o077 == 0
    keys.create(1)
    keys.settle(1)
    assert keys.held() == (1,)
    with pytest.raises(LocalProtocolError):
        keys.settle(5)


def test_rotation_erases_and_goes_on(lonely: Lonely) -> None:
    for _ in range(3):
        lonely.log.rotate("test")
        lonely.log.append(Heartbeat(size=lonely.log.size))
    lonely.log.close()
    lonely.reopen()
    lonely.log.append(Heartbeat(size=lonely.log.size))
    lonely.log.close()
    result = verify(lonely.folder, lonely.keys)
    assert (weighty(result.findings), result.epochs) == (set(), 4)
