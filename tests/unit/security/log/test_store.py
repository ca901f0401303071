"""The folder of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazaret.errors import (
    OTHER_VERSION,
    AuditLogError,
    CodecError,
    VerificationFailed,
)
from security.log.store import Annex, LogFolder
from tests.support.audit_attacks import Lonely


def test_a_log_of_an_older_version_is_refused_in_one_line_and_left_as_it_is(tmp_path: Path) -> None:
    lonely = Lonely(tmp_path)
    lonely.log.close()
    (lonely.folder / "FORMAT").write_text("lazaret audit log 1\n")
    before = {path: path.read_bytes() for path in lonely.folder.rglob("*") if path.is_file()}
    with pytest.raises(AuditLogError, match=r"FORMAT: a log of another format$") as raised:
        lonely.reopen()
    assert raised.value.hint == OTHER_VERSION
    assert {path: path.read_bytes() for path in lonely.folder.rglob("*") if path.is_file()} == before
    assert "FormatUnknown" in lonely.codes()


def test_annex_opens_only_its_own_commitment() -> None:
    annex = Annex(salt=bytes(32), details={"images": 3})
    assert Annex.open(annex.encode(), annex.commitment()) == annex
    with pytest.raises(VerificationFailed):
        Annex.open(annex.encode(), "0" * 64)
    for bad in (b"{}", b'{"details":1,"salt":"00"}', b'{"details":{},"salt":"zz"}'):
        with pytest.raises(CodecError):
            Annex.open(bad, annex.commitment())


def test_folder_names_cannot_climb(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path)
    assert folder.witness_path("../../etc/passwd").parent == folder.witness
    with pytest.raises(AuditLogError):
        folder.check_format()
