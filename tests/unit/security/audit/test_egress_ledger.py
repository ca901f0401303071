"""Receipts belong to messages of the same connection."""

from __future__ import annotations

import re

from security.audit.egress_ledger import UNSEEN_PER_CONNECTION, EgressLedger
from security.audit.findings import Findings


def receipt(name: str) -> re.Match[str]:
    found = re.match("(?P<body_msg_id>.*)", name)
    assert found is not None
    return found


def test_what_was_under_way_is_not_acknowledged_after_a_new_connection() -> None:
    ledger = EgressLedger(Findings("graz"))
    ledger.add("control", 70, "first")
    ledger.add("control", 30, "second")
    ledger.receipt(receipt("first"), 3)
    assert "ReceiptInvalid" not in ledger.findings
    ledger.reconnected()
    assert ledger._unsettled == 0 and ledger._lost == 30, "once: else it would be room to hide bytes in"
    ledger.reconnected()
    assert ledger._lost == 30
    ledger.receipt(receipt("second"), 5)
    assert "ReceiptInvalid" in ledger.findings


def test_a_connection_hides_no_more_than_one_look_misses() -> None:
    ledger = EgressLedger(Findings("graz"))
    ledger.add("vector", 10 * UNSEEN_PER_CONNECTION, "upload")
    assert ledger._unsettled == UNSEEN_PER_CONNECTION
    ledger.started(0)
    assert ledger._unsettled == 0
