"""What the kernel counted, receipts, and what a site says of the process that saw images.

The owner of a log writes each lie itself and signs it with its own key.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import security.audit.verify as verify_module
from lazaret.kernel_bytes import NAMESPACE
from security.audit.completeness import IsolationBook
from security.audit.egress_ledger import EgressLedger
from tests.attacks.audit.test_audit_conformance import Entry, _rewritten, _verified, _without_types
from tests.attacks.audit.test_audit_conformance import private as private  # a fixture
from tests.support.audit_attacks import weighty
from tests.support.audit_logs import Federation


def _last_reading(**fields: object) -> Callable[[list[Entry]], list[Entry]]:
    def change(entries: list[Entry]) -> list[Entry]:
        [entry for entry in entries if entry["type"] == "net.counter"][-1]["body"].update(fields)
        return entries

    return change


def _no_reading(entries: list[Entry]) -> list[Entry]:
    for entry in entries:
        if entry["type"] == "net.counter":
            entry.update(type="heartbeat", body={"size": entry["seq"]})
    return entries


def _receipts_for(msg_id: str) -> Callable[[list[Entry]], list[Entry]]:
    def change(entries: list[Entry]) -> list[Entry]:
        next(entry for entry in entries if entry["type"] == "receipt")["body"].update(msg_id=msg_id)
        return entries

    return change


def _second_receipt(entries: list[Entry]) -> list[Entry]:
    at = next(n for n, entry in enumerate(entries) if entry["type"] == "receipt")
    return [*entries[: at + 1], entries[at], *entries[at + 1 :]]


def _isolated(**fields: object) -> Callable[[list[Entry]], list[Entry]]:
    def change(entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            if entry["type"] == "trainer.isolated":
                entry["body"].update(fields)
        return entries

    return change


def _counts_nothing(ledger: EgressLedger, *_: object) -> None:
    ledger.readings += 1
    ledger.covered[NAMESPACE] = ledger.total


# How the owner changes its log, what is found, the verdict, and the check that finds it.
BESIDE: dict[str, tuple[Callable[[list[Entry]], list[Entry]], str, int, tuple[object, str, object]]] = {
    "more than was logged": (
        _last_reading(bytes_out=3_000_000),
        "UnloggedTraffic",
        1,
        (EgressLedger, "counter", _counts_nothing),
    ),
    "less than was acknowledged": (
        _last_reading(bytes_out=0),
        "UnloggedTraffic",
        1,
        (EgressLedger, "counter", _counts_nothing),
    ),
    "bytes beside the connections": (
        _last_reading(beside_out=200_000),
        "UnloggedTraffic",
        1,
        (EgressLedger, "_check_beside", lambda *_: None),
    ),
    "a count that becomes narrower": (
        _last_reading(beside_out=None, coverage="process"),
        "CounterCoverage",
        3,
        (EgressLedger, "counter", _counts_nothing),
    ),
    "a name that is wider than the count": (
        _last_reading(beside_out=None),
        "CounterCoverage",
        3,
        (EgressLedger, "counter", _counts_nothing),
    ),
    "no reading": (
        _no_reading,
        "NoNetworkCounter",
        3,
        (verify_module, "_check_counted", lambda *_: None),
    ),
    "a receipt for nothing": (
        _receipts_for("ab" * 16),
        "ReceiptInvalid",
        1,
        (EgressLedger, "receipt", lambda _, match, __: match["body_msg_id"]),
    ),
    "a receipt twice": (
        _second_receipt,
        "ReceiptInvalid",
        1,
        (EgressLedger, "receipt", lambda _, match, __: match["body_msg_id"]),
    ),
    "a connection against its own rule": (
        _isolated(asked="required", connection=True),
        "IsolationWeak",
        1,
        (IsolationBook, "said", lambda book, *_: setattr(book, "_open", "")),
    ),
    "keys against its own rule": (
        _isolated(asked="required", keys=True, ranks=True),
        "IsolationWeak",
        1,
        (IsolationBook, "said", lambda book, *_: setattr(book, "_open", "")),
    ),
    "nothing said of isolation": (
        _without_types("trainer.isolated"),
        "IsolationMissing",
        1,
        (IsolationBook, "trained", lambda *_: None),
    ),
}
# What a log has that was made anew: nobody witnessed it, and annexes have the numbers of before.
ALONE = {"NotWitnessed", "CosignatureMissing", "HeadMissing", "SurplusBytes", "AnnexMismatch", "AnnexLost"}


@pytest.mark.parametrize("name", BESIDE)
def test_count_receipt_or_isolation_is_found(
    name: str, private: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, expected, _, check = BESIDE[name]
    path = _rewritten(private, tmp_path, "graz", change)
    codes = weighty(_verified(path, private).findings)
    assert expected in codes and codes - {expected} <= ALONE
    monkeypatch.setattr(*check)
    assert weighty(_verified(path, private).findings) <= ALONE, "twin"


def test_a_coordinator_may_count_in_two_ways(private: Federation, tmp_path: Path) -> None:
    """Its readings are informative: anybody may connect to its port."""

    def change(entries: list[Entry]) -> list[Entry]:
        source = {**entries[-2], "type": "net.counter", "run": None, "round": None, "annex_commit": None}
        counted = {"bytes_in": 1, "bytes_out": 1, "connections": 1, "source": "kernel"}
        body = {**counted, "beside_out": None, "coverage": "process"}
        wide = {**counted, "beside_out": 0, "coverage": "network namespace"}
        return [*entries[:-1], {**source, "body": body}, {**source, "body": wide}, entries[-1]]

    path = _rewritten(private, tmp_path, "hub", change)
    assert weighty(_verified(path, private).findings) <= ALONE
