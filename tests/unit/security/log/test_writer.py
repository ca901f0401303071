"""A log that is open for writing."""

from __future__ import annotations

from pathlib import Path

from security.log.note import MAX_SIGNATURES, KeyType, NoteSigner
from security.log.roster import SITE, Party, Roster
from tests.support.audit_attacks import Lonely


def test_a_checkpoint_takes_as_many_signatures_as_a_note_holds(tmp_path: Path) -> None:
    """The coordinator offers its own to every site, and a federation may have 255."""
    lonely = Lonely(tmp_path)
    witnesses, parties = list[NoteSigner](), [lonely.member.party]
    for number in range(MAX_SIGNATURES + 3):
        root = NoteSigner.from_seed(f"site{number}.lesions/audit", bytes([number, 0]) * 16)
        witness = NoteSigner.from_seed(f"site{number}.lesions/witness", bytes([number, 1]) * 16, KeyType.COSIGNER)
        witnesses.append(witness)
        origin = root.key.name
        parties.append(Party(name=f"site{number}", role=SITE, origin=origin, root=root.key, cosigner=witness.key))
    lonely.log.adopt_manifest(b"{}\n", 1, Roster(parties=tuple(parties)))
    note, size = lonely.log.checkpoint(), lonely.log.size
    for witness in witnesses:
        lonely.log.add_cosignature(size, witness.cosign(note.text, lonely.clock.now_ms() // 1000))
    kept = lonely.log._writer.checkpoint_note(size)
    assert len(kept.signatures) == MAX_SIGNATURES and lonely.log.witnessed == size
