"""A log that is open for writing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lazaret.errors import VerificationFailed
from security.log.note import MAX_SIGNATURES, KeyType, Note, NoteSigner, VerifierKey, checkpoint_of
from security.log.roster import SITE, Party, Roster
from tests.support.audit_attacks import Lonely


def _watched(tmp_path: Path, count: int) -> tuple[Lonely, list[NoteSigner]]:
    """A log with so many witnesses."""
    lonely = Lonely(tmp_path)
    witnesses, parties = list[NoteSigner](), [lonely.member.party]
    for number in range(count):
        root = NoteSigner.from_seed(f"site{number}.lesions/audit", bytes([number, 0]) * 16)
        witness = NoteSigner.from_seed(f"site{number}.lesions/witness", bytes([number, 1]) * 16, KeyType.COSIGNER)
        witnesses.append(witness)
        origin = root.key.name
        parties.append(Party(name=f"site{number}", role=SITE, origin=origin, root=root.key, cosigner=witness.key))
    lonely.log.adopt_manifest(b"{}\n", 1, Roster(parties=tuple(parties)))
    return lonely, witnesses


def test_a_checkpoint_takes_as_many_signatures_as_a_note_holds(tmp_path: Path) -> None:
    """The coordinator offers its own to every site, and a federation may have 255."""
    lonely, witnesses = _watched(tmp_path, MAX_SIGNATURES + 3)
    note, size = lonely.log.checkpoint(), lonely.log.size
    for witness in witnesses:
        lonely.log.add_cosignature(size, witness.cosign(note.text, lonely.clock.now_ms() // 1000))
    kept = lonely.log._writer.checkpoint_note(size)
    assert len(kept.signatures) == MAX_SIGNATURES and lonely.log.witnessed == size


def test_a_signature_of_a_witness_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not again with each that comes after it: the work would grow with the square of the sites."""
    lonely, witnesses = _watched(tmp_path, 30)
    verified: Counter[str] = Counter()
    verify = VerifierKey.verify

    def counting(key: VerifierKey, text: str, signature: bytes) -> int | None:
        verified[key.name] += 1
        return verify(key, text, signature)

    monkeypatch.setattr(VerifierKey, "verify", counting)
    for _ in range(2):  # checkpoints
        note, size = lonely.log.checkpoint(), lonely.log.size
        for witness in witnesses:
            lonely.log.add_cosignature(size, witness.cosign(note.text, lonely.clock.now_ms() // 1000))
        kept = Note.parse(lonely.log._writer.cosigned.read_bytes())
        assert checkpoint_of(kept).size == size and len(kept.signatures) == 1 + len(witnesses)
        # One that spoils a signature is refused after as before.
        false = replace(witnesses[0].cosign(note.text, 0), value=bytes(72))
        with pytest.raises(VerificationFailed):
            lonely.log.add_cosignature(size, false)
    assert verified.total() <= 2 * (len(witnesses) + 3) + 2


def test_a_quorum_is_not_of_another_checkpoint(tmp_path: Path) -> None:
    """Who signed one checkpoint has not signed the next one, nor the one before."""
    lonely, witnesses = _watched(tmp_path, 4)

    def sign(note: Note, witness: NoteSigner) -> None:
        lonely.log.add_cosignature(checkpoint_of(note).size, witness.cosign(note.text, lonely.clock.now_ms() // 1000))

    first = lonely.log.checkpoint()
    sign(first, witnesses[0])  # logs it: there is another checkpoint to sign
    second = lonely.log.checkpoint()
    sign(second, witnesses[1])
    assert lonely.log.witnessed == 0
    sign(first, witnesses[2])
    assert lonely.log.witnessed == checkpoint_of(first).size
