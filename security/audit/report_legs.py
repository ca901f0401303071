"""The six things that "prototypes never left" rests on, each with what these logs show for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from security.audit import report_text, wording
from security.audit.cross import Crossed
from security.audit.findings import Finding, Severity
from security.audit.html import Child, Markup, code, table, tag
from security.audit.roster import SITE

HOLDS, BROKEN, OPEN = "pass", "fault", "unsure"
WORDS: Final = {HOLDS: "holds", BROKEN: "BROKEN", OPEN: "not shown"}


def state_of(findings: Iterable[Finding], codes: frozenset[str]) -> str:
    """How a group of checks came out."""
    found = {finding.severity for finding in findings if finding.code in codes}
    if Severity.FAIL in found:
        return BROKEN
    return OPEN if Severity.UNDECIDED in found else HOLDS


def legs(result: Crossed) -> Markup:
    """A table: what the leg says, what is in the logs for it, and whether it holds."""
    evidence = (_schema, _door, _sizes, _uniformity, _second_ledger, _matching)
    rows = []
    for (name, words), show in zip(report_text.LEGS, evidence, strict=True):
        state, shown = show(result)
        rows.append((tag("strong", name), words, shown, tag("span", WORDS[state], cls=f"mark {state}")))
    return table(("leg", "what it says", "in these logs", ""), rows)


def _digests(result: Crossed, field: str) -> tuple[str, Child]:
    """One digest that all agents ran with, or how many."""
    found = {record.body[field] for history in result.histories for record in history.of("agent.start")}
    if len(found) == 1:
        return HOLDS, ("one for all: ", code(next(iter(found)), 16))
    return OPEN, f"{len(found)} different ones: compare them with the releases" if found else "no agent.start here"


def _schema(result: Crossed) -> tuple[str, Child]:
    return _digests(result, "proto")


def _door(result: Crossed) -> tuple[str, Child]:
    state, shown = _digests(result, "package")
    return state, ("package, ", shown)


def _sizes(result: Crossed) -> tuple[str, Child]:
    count = sum(log.ledger.count for log in result.logs)
    state = state_of(result.findings, frozenset({"SurplusBytes", "LayoutMismatch", "ForbiddenMessage"}))
    return (state if count else OPEN), f"{count:,} messages recomputed"


def _uniformity(result: Crossed) -> tuple[str, Child]:
    seen = [
        float(record.body["uniformity"] or 0)
        for history in result.histories
        for record in history.of("egress")
        if record.body["data_class"] == "masked-vector"
    ]
    blocked = sum(log.types.get("egress.blocked", 0) for log in result.logs)
    state = state_of(result.findings, frozenset({"UnmaskedVector"}))
    shown = f"{len(seen):,} vectors, least p-value {min(seen):.2g}; {blocked} blocked" if seen else "no vector left"
    return (state if seen else OPEN), shown


def _second_ledger(result: Crossed) -> tuple[str, Child]:
    sites = [log.ledger for log in result.logs if log.role == SITE and log.ledger.count]
    counted, logged = sum(ledger.counted for ledger in sites), sum(ledger.covered for ledger in sites)
    total = sum(ledger.total for ledger in sites)
    if not counted:
        return OPEN, "no readings"
    rest = f"; {wording.quantity(total - logged)} without a reading" if total > logged else ""
    shown = f"{wording.quantity(counted)} counted for {wording.quantity(logged)} logged{rest}"
    return state_of(result.findings, frozenset({"UnloggedTraffic"})), shown


def _matching(result: Crossed) -> tuple[str, Child]:
    shown = f"{result.matched:,} messages, {result.receipts:,} receipts"
    return (state_of(result.findings, wording.MATCHING) if result.matched else OPEN), shown
