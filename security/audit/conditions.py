"""The conditions under which "prototypes never left" holds, each with what the logs show for it; pieces of a page.

A new condition is one function and one row of `EVIDENCE`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from security.audit import text
from security.audit.compare import Crossed
from security.audit.findings import Finding, Severity
from security.log.roster import SITE


@dataclass(frozen=True, slots=True)
class Span:
    """Text with a style: strong, alarm, code, or a class of the style sheet."""

    words: Piece
    style: str = "strong"
    title: str | None = None


Piece = str | int | Span | tuple["Piece", ...]
Row = Sequence[Piece]


def digest(value: str, length: int | None = None) -> Span:
    """A digest or name in fixed width, shortened for reading, whole on hover."""
    shown = value if length is None or len(value) <= length else value[:length] + "\N{HORIZONTAL ELLIPSIS}"
    return Span(shown, "code", title=value if shown != value else None)


def patient_sentence(epsilon: float, delta: str) -> str:
    """What epsilon means for one patient, without a formula."""
    sure = 100 * (1 - 1 / (1 + math.exp(min(epsilon, 50))))
    once_in = f"{round(1 / float(delta)):,}" if 0 < float(delta) < 1 else "no"
    return (
        "Suppose somebody who sees everything that was published thinks that it is as likely as not that a patient's "
        f"data were used (50%). What they see can make them at most {sure:.1f}% sure that they were. This holds but "
        f"for one case in {once_in} (delta {delta})."
    )


# The seven conditions for "prototypes never left", each with what these logs show for it.

HOLDS, BROKEN, OPEN = "pass", "fault", "unsure"
WORDS: Final = {HOLDS: "holds", BROKEN: "VIOLATED", OPEN: "not shown"}


def state_of(findings: Iterable[Finding], codes: frozenset[str]) -> str:
    """How a group of checks came out."""
    found = {finding.severity for finding in findings if finding.code in codes}
    if Severity.FAIL in found:
        return BROKEN
    return OPEN if Severity.UNDECIDED in found else HOLDS


def evidence_rows(result: Crossed) -> list[Row]:
    """For each of them: what it says, what is in the logs for it, and whether it holds."""
    rows: list[Row] = []
    for name, words, show in EVIDENCE:
        state, shown = show(result)
        rows.append((Span(name), words, shown, Span(WORDS[state], f"mark {state}")))
    return rows


def _digests(result: Crossed, field: str) -> tuple[str, Piece]:
    """One digest that all agents ran with, or how many."""
    found = {record.body[field] for history in result.histories for record in history.of("agent.start")}
    if len(found) == 1:
        return HOLDS, ("one for all: ", digest(next(iter(found)), 16))
    return OPEN, f"{len(found)} different ones: compare them with the releases" if found else "no agent.start here"


def _schema(result: Crossed) -> tuple[str, Piece]:
    return _digests(result, "proto")


def _filter(result: Crossed) -> tuple[str, Piece]:
    state, shown = _digests(result, "package")
    return state, ("package digest, ", shown)


def _sizes(result: Crossed) -> tuple[str, Piece]:
    count = sum(log.ledger.count for log in result.logs)
    state = state_of(result.findings, frozenset({"SurplusBytes", "LayoutMismatch", "ForbiddenMessage"}))
    return (state if count else OPEN), f"{count:,} messages recomputed"


def _uniformity(result: Crossed) -> tuple[str, Piece]:
    seen = [
        float(record.body["uniformity"] or 0)
        for history in result.histories
        for record in history.of("egress")
        if record.body["data_class"] == "masked-vector"
    ]
    blocked = sum(log.types.get("egress.blocked", 0) for log in result.logs)
    state = state_of(result.findings, frozenset({"UnmaskedVector"}))
    shown = f"{len(seen):,} vectors, smallest p-value {min(seen):.2g}; {blocked} blocked" if seen else "no vector left"
    return (state if seen else OPEN), shown


def _network_counters(result: Crossed) -> tuple[str, Piece]:
    sites = [log.ledger for log in result.logs if log.role == SITE and log.ledger.count]
    counted, logged = sum(ledger.counted for ledger in sites), sum(ledger.covered.total() for ledger in sites)
    total = sum(ledger.total for ledger in sites)
    if not counted:
        return OPEN, "no readings"
    rest = f"; {text.quantity(total - logged)} without a reading" if total > logged else ""
    shown = f"{text.quantity(counted)} counted, {text.quantity(logged)} logged{rest}"
    return state_of(result.findings, frozenset({"UnloggedTraffic"})), shown


def _matching(result: Crossed) -> tuple[str, Piece]:
    shown = f"{result.matched:,} messages, {result.receipts:,} receipts"
    return (state_of(result.findings, text.MATCHING) if result.matched else OPEN), shown


def _isolation(result: Crossed) -> tuple[str, Piece]:
    """Of every process that saw images; one with a way out does not show it, and a rule that was broken denies it."""
    started = [record.body for history in result.histories for record in history.of("trainer.isolated")]
    state = state_of(result.findings, frozenset({"IsolationMissing", "IsolationWeak"}))
    if not started:
        return (BROKEN if state == BROKEN else OPEN), "no trainer.isolated here"
    walls = {"network_namespace": "network namespace", "seccomp": "seccomp", "landlock": "Landlock"}
    common = [words for wall, words in walls.items() if all(body[wall] for body in started)]
    connected = sum(body["connection"] for body in started)
    if connected:
        return (state if state == BROKEN else OPEN), f"{connected} of {len(started)} processes could open a connection"
    shown = f"{len(started)} processes that saw images could not open a connection: enforced by {', '.join(common)}"
    return state, shown


EVIDENCE: Final = (
    ("Schema", "no message has a field that could carry them; the schema's digest is in every agent.start", _schema),
    ("Egress filter", "one module holds the network channel, and it logs a message before it sends it", _filter),
    ("Size equation", "the length of each message follows exactly from its type, cohort and dimension", _sizes),
    ("Uniformity", "a vector that does not look random is blocked before it leaves", _uniformity),
    (
        "Network counters",
        "the kernel counted no more bytes, over all connections, than the log and TLS explain",
        _network_counters,
    ),
    ("Isolation", "the process that saw images had no network, as it tried from inside before it began", _isolation),
    ("Matching", "each message that left is the one that arrived, and no other message arrived", _matching),
)
