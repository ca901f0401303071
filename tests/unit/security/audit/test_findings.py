"""Codes, weights, and equal findings that become one."""

from __future__ import annotations

import pytest

from lazaret.errors import (
    LocalProtocolError,
)
from security.audit.findings import CODES, Finding, Findings, exit_code


def test_every_code_says_what_and_what_next() -> None:
    for name, entry in CODES.items():
        assert name[0].isupper()
        assert len(entry.meaning) > 10
        assert len(entry.ask) > 5
    with pytest.raises(LocalProtocolError):
        Finding(code="Nonsense", log="x", detail="y")


def test_exit_codes() -> None:
    fail, undecided, note = (
        Finding(code=name, log="", detail="") for name in ("RootMismatch", "NotWitnessed", "BeyondWitnessed")
    )
    assert exit_code([]) == exit_code([note]) == 0
    assert exit_code([undecided, note]) == 3
    assert exit_code([undecided, fail]) == 1


def test_many_findings_become_one() -> None:
    findings = Findings("log")
    for number in range(100):
        findings.add("SequenceGap", f"entry {number}", number)
    (only,) = findings.listed()
    assert only.detail == "entry 0 (and 99 more like this)"
    assert len(only.entries) == 20
