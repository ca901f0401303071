"""A proof of an entry stands on the signature of the log, and on nothing that whoever made the file could write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import VerificationFailed
from security.audit.proof import Proof, prove
from security.log.note import Note, NoteSigner
from tests.support.audit_logs import Federation, small_federation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return small_federation(tmp_path_factory.mktemp("federation"))


def test_the_head_is_signed_by_the_log(federation: Federation) -> None:
    """Whoever writes entries and computes a tree of their own has everything but the key."""
    graz = federation.members["graz"]
    proof = prove(graz.folder, 3)
    assert proof.check(graz.party.root)["seq"] == 3
    stranger = NoteSigner.from_seed(graz.party.origin, bytes(range(32)))
    forged = Note(text=proof.note.text, signatures=(stranger.sign(proof.note.text),))
    with pytest.raises(VerificationFailed):
        replace(proof, note=forged).check(graz.party.root)


def test_the_proof_names_its_entry_and_its_log(federation: Federation) -> None:
    graz, linz = federation.members["graz"], federation.members["linz"]
    proof: Proof = prove(graz.folder, 3)
    with pytest.raises(VerificationFailed, match="another log"):
        proof.check(linz.party.root)
    with pytest.raises(VerificationFailed):
        replace(proof, index=4).check(graz.party.root)
