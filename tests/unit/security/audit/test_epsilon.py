"""What a privacy log says of its budget, computed again."""

from __future__ import annotations

import pytest

from security.audit.epsilon import replay
from security.audit.facts import LogHistory, read_history
from security.audit.findings import Findings
from security.log.roster import SITE
from tests.support.audit_logs import Federation, small_federation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return small_federation(tmp_path_factory.mktemp("federation"))


@pytest.fixture
def history(federation: Federation) -> LogHistory:
    """Of graz, which has a budget; a test may change the records."""
    graz = federation.members["graz"]
    return read_history(graz.folder, origin=graz.party.origin, name="graz", role=SITE)


def codes(history: LogHistory) -> set[str]:
    findings = Findings("graz")
    assert replay(history, findings) is not None
    return {finding.code for finding in findings.listed()}


def test_an_honest_log_has_no_finding(history: LogHistory) -> None:
    assert codes(history) == set()


def test_epsilon_above_the_cap_is_found(history: LogHistory) -> None:
    """The cap is the same in every entry, so that no term has changed; the ledger was not asked."""
    for record in history.of("dp.reserved", "dp.committed"):
        record.body["cap"] = "2.1"
    assert codes(history) == {"BudgetExceeded"}


def test_what_is_committed_was_reserved(history: LogHistory) -> None:
    """Another mechanism than the one that was paid for."""
    record = next(history.of("dp.committed"))
    (first, *rest) = record.body["mechanisms"]
    record.body["mechanisms"] = [{**first, "steps": first["steps"] + 1}, *rest]
    assert codes(history) == {"EpsilonMismatch"}


def test_what_is_committed_names_its_reservation(history: LogHistory) -> None:
    next(history.of("dp.committed")).body["reservation"] = "00" * 16
    assert "EpsilonMismatch" in codes(history)
