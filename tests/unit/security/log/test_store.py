"""The folder of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazaret.errors import OTHER_VERSION, AuditLogError
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
