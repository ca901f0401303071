"""What a witness cosigns and keeps, and whose cosignatures a log takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lazaret.errors import (
    CheckpointConflict,
    CodecError,
    VerificationFailed,
)
from security.log import events as ev
from security.log.machine import Heartbeat
from security.log.note import KeyType, Note, NoteSigner, Signature, checkpoint_of
from security.log.store import LogFolder
from security.log.witness import Submission
from tests.support.audit_attacks import Lonely
from tests.support.audit_logs import Federation


def test_witness_tells_what_it_holds(lonely: Lonely, tmp_path: Path) -> None:
    watcher = lonely.watcher(tmp_path / "outside")
    lonely.show(watcher)
    lonely.log.append(Heartbeat(size=1))
    lonely.log.checkpoint()
    with pytest.raises(CheckpointConflict) as conflict:
        watcher.consider(lonely.log.submission(0))
    assert conflict.value.held_size == 1
    watcher.consider(lonely.log.submission(1))
    assert watcher.held_size(lonely.log.origin) == 2


def test_witness_refuses_strangers_and_itself(lonely: Lonely, tmp_path: Path) -> None:
    watcher = lonely.watcher(tmp_path / "outside")
    offer = lonely.log.submission(0)
    unknown = Note(text="x/audit\n0\n" + "A" * 43 + "=\n", signatures=offer.note.signatures)
    with pytest.raises(VerificationFailed):
        watcher.consider(dataclasses.replace(offer, note=unknown))
    forged = Signature(name=lonely.log.origin, key_id=offer.note.signatures[0].key_id, value=bytes(64))
    with pytest.raises(VerificationFailed):
        watcher.consider(dataclasses.replace(offer, note=Note(text=offer.note.text, signatures=(forged,))))
    assert watcher.held(lonely.log.origin) is None


def test_witness_answers_the_same_head_again(lonely: Lonely, tmp_path: Path) -> None:
    watcher = lonely.watcher(tmp_path / "outside")
    lonely.show(watcher)
    again = lonely.log.submission(1)
    assert watcher.consider(again).name == "outside.lesions/witness"


def test_submissions_travel(lonely: Lonely) -> None:
    offer = lonely.log.submission(0)
    assert Submission.parse(offer.encode()) == offer
    for bad in (b"{}", offer.encode().replace(b'"old_size":0', b'"old_size":"0"'), b"[]"):
        with pytest.raises(CodecError):
            Submission.parse(bad)


def test_foreign_cosignature_is_refused(lonely: Lonely) -> None:
    stranger = NoteSigner.from_seed("x/witness", bytes(32), KeyType.COSIGNER)
    with pytest.raises(VerificationFailed):
        lonely.log.add_cosignature(1, stranger.cosign(lonely.log.newest_checkpoint.text, 5))


@pytest.mark.parametrize("size", [7, 2**53 - 1])
def test_a_cosignature_of_a_head_that_never_was_does_not_close_the_log(lonely: Lonely, size: int) -> None:
    stranger = NoteSigner.from_seed("x/witness", bytes(32), KeyType.COSIGNER)
    with pytest.raises(VerificationFailed):
        lonely.log.add_cosignature(size, stranger.cosign(lonely.log.newest_checkpoint.text, 5))
    lonely.log.append(ev.OperatorAction(command="still open", role="operator"))


def test_cosignatures_are_kept_and_logged(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, dp_sites=())
    federation.exchange()
    site = federation.members["graz"]
    kept = LogFolder(site.folder)
    note = Note.parse(kept.cosigned.read_bytes())
    assert {line.name for line in note.signatures} >= {f"{name}.lesions/witness" for name in ("hub", "linz", "vienna")}
    assert checkpoint_of(note).size in kept.checkpoint_sizes()
    federation.stop()
