"""How results are said: lines for a terminal, JSON, and the conditions under which "prototypes never left" holds.

Whatever comes from a log is made printable first. A new condition is one function and one row of `EVIDENCE`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from security.audit.epsilon import EpsilonStatement
from security.audit.findings import CODES, Concern, Finding, Severity, verdict_on
from security.audit.verify import Verified
from security.log.roster import SITE

if TYPE_CHECKING:
    from security.audit.checkpoints import VerifiedCheckpoint
    from security.audit.compare import Comparison

EGRESS: Final = frozenset(
    {"SurplusBytes", "LayoutMismatch", "ForbiddenMessage", "UnmaskedVector", "UnloggedTraffic", "DuplicateMessage"}
)
PRIVACY: Final = frozenset(
    {
        "EpsilonMismatch",
        "UnaccountedRound",
        "BudgetExceeded",
        "DpTermsChanged",
        "PrivacyMissing",
        "PrivacyTerms",
        "NoiseBelowFloor",
        "ClipExceeded",
        "ScheduleMismatch",
        "RunEpsilonExceeded",
    }
)
MATCHING: Final = frozenset(
    {
        "EgressUnacknowledged",
        "IngressUnexplained",
        "DigestMismatch",
        "DuplicateMessage",
        "ReceiptInvalid",
        "ClockSkew",
        "LogMissing",
        "LogLost",
    }
)
AGREEMENT: Final = frozenset({"ModelInconsistency", "SplitCohort", "MaskExposure", "Fork", "LogMissing"})
RULES: Final = frozenset(name for name, code in CODES.items() if code.concern is Concern.RULES)
RECORD: Final = frozenset(CODES) - EGRESS - PRIVACY - MATCHING - AGREEMENT - RULES | {"Fork"}

LAST_SECOND: Final = 253_402_300_800  # 10000-01-01

VERDICTS: Final = {0: "clean", 1: "findings", 3: "cannot decide"}
ANSWERS: Final = {0: "yes", 1: "no", 3: "cannot decide"}
MARKS: Final = {Severity.FAIL: "FAIL", Severity.UNDECIDED: "????", Severity.NOTE: "note"}


def plain(text: str) -> str:
    """Without anything a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def when(seconds: float) -> str:
    """A time in UTC, to the minute. What a log says may be beyond any calendar."""
    if not 0 <= seconds < LAST_SECOND:
        return "after the year 9999"
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%MZ")


def quantity(count: int) -> str:
    """Bytes for people."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def verdict_lines(findings: Iterable[Finding], logs: Iterable[Verified]) -> Iterator[str]:
    """The two verdicts, and up to which entry of each log they hold."""
    found = tuple(findings)
    for concern in Concern:
        yield f"{concern.value + ':':<15}{ANSWERS[verdict_on(found, concern)]}"
    for log in logs:
        if log.size:
            rest = log.size - log.covered
            outside = f"; the {rest} entries after it are outside of the verdict" if rest else ""
            covered = f"up to entry {log.covered - 1}" if log.covered else "for no entry: nothing is witnessed"
            yield plain(f"{'holds:':<15}{log.origin} {covered}{outside}")


def verdicts_json(findings: Iterable[Finding]) -> dict[str, str]:
    """The same for machines."""
    found = tuple(findings)
    return {concern.name.lower(): ANSWERS[verdict_on(found, concern)] for concern in Concern}


def clean(findings: Iterable[Finding], codes: frozenset[str]) -> bool:
    """Whether none of these codes was found, notes aside."""
    return not any(finding.code in codes and finding.severity is not Severity.NOTE for finding in findings)


def witness_names(log: Verified) -> str:
    """Who saw the newest witnessed checkpoint."""
    witnessed = log.checkpoints.witnessed
    if witnessed is None:
        return "not witnessed"
    names = cosigner_names(log, witnessed)
    return f"witnessed up to {witnessed.checkpoint.size} by {names} ({when(max(witnessed.cosigners.values()))})"


def cosigner_names(log: Verified, checkpoint: VerifiedCheckpoint) -> str:
    """Parties by their names, other witnesses by those of their keys."""
    parties = {party.cosigner: party.name for party in log.roster.parties} if log.roster else {}
    return ", ".join(sorted(parties.get(key, key.name) for key in checkpoint.cosigners))


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """One line for what was found and, unless it is a note, one for what to do."""
    for finding in findings:
        at = f" [entry {', '.join(map(str, finding.entries[:5]))}]" if finding.entries else ""
        yield plain(f"{MARKS[finding.severity]}  {finding.code}  {finding.detail}{at}")
        if finding.severity is not Severity.NOTE:
            yield plain(f"      {finding.meaning} -> {finding.ask}")


def log_lines(log: Verified, findings: Iterable[Finding], statement: EpsilonStatement | None) -> Iterator[str]:
    """What one log turned out to be."""
    found = tuple(findings)
    newest = log.checkpoints.newest
    yield plain(
        f"{log.origin}   {log.size:,} entries   head {newest.checkpoint.size if newest else '-'}   {witness_names(log)}"
    )
    if clean(found, RECORD):
        signed = len(log.checkpoints.signed)
        yield f"ok    tree re-derived from entries equals {signed} signed heads, {log.epochs} epoch(s)"
    if log.ledger.count and clean(found, EGRESS):
        yield (
            f"ok    {log.ledger.count:,} messages left, {quantity(log.ledger.total)}: "
            "0 surplus bytes, all types permitted, all vectors masked"
        )
    if log.ledger.readings and log.ledger.bounded and clean(found, frozenset({"UnloggedTraffic"})):
        unread = log.ledger.total - log.ledger.covered.total()
        rest = f"; {quantity(unread)} have no reading (a kill, or a copy in between)" if unread else ""
        of = f"of the {log.ledger.coverage}"
        yield f"ok    the kernel counted {quantity(log.ledger.counted)} out {of}, within the stated overhead{rest}"
    if log.size and clean(found, RULES):
        versions = ", ".join(str(one.version) for one in log.agreements.versions)
        yield f"ok    every entry keeps the rules of the manifest in force (versions {versions})"
    if statement is not None and clean(found, PRIVACY):
        yield "ok    " + epsilon_line(statement)
    yield from finding_lines(found)


def epsilon_line(statement: EpsilonStatement) -> str:
    """One site's epsilon in a line; with shared noise both figures."""
    alone = f", inside the sum; {statement.alone:.2f} alone, if all other sites collude" if statement.alone else ""
    return plain(
        f"{statement.site}: epsilon {statement.epsilon:.2f} of {float(statement.cap):.2f} "
        f"(delta {statement.delta}, unit: {statement.unit}), recomputed from {len(statement.series)} rounds{alone}"
    )


def log_json(log: Verified, findings: Iterable[Finding], statement: EpsilonStatement | None) -> dict[str, Any]:
    """The same for machines."""
    newest, witnessed = log.checkpoints.newest, log.checkpoints.witnessed
    return {
        "origin": log.origin,
        "role": log.role,
        "entries": log.size,
        "epochs": log.epochs,
        "heads": len(log.checkpoints.signed),
        "head": newest.checkpoint.size if newest else None,
        "witnessed": witnessed.checkpoint.size if witnessed else None,
        "covered": log.covered,
        "manifests": [one.version for one in log.agreements.versions],
        "witnesses": sorted(key.name for key in witnessed.cosigners) if witnessed else [],
        "egress": {
            name: {"messages": log.ledger.messages[name], "bytes": log.ledger.bytes[name]}
            for name in sorted(log.ledger.messages)
        },
        "network_bytes_out": log.ledger.counted if log.ledger.readings else None,
        "epsilon": statement_json(statement),
        "findings": [finding.to_json() for finding in findings],
    }


def statement_json(statement: EpsilonStatement | None) -> dict[str, Any] | None:
    """A site's privacy statement."""
    if statement is None:
        return None
    return {
        "site": statement.site,
        "epsilon": round(statement.epsilon, 6),
        "cap": float(statement.cap),
        "delta": float(statement.delta),
        "unit": statement.unit,
        "relation": statement.relation,
        "order": float(statement.order),
        "accountant": statement.accountant,
        "best_rdp": round(statement.best_rdp, 6),
        "pld": None if statement.pld is None else round(statement.pld, 6),
        "alone": None if statement.alone is None else round(statement.alone, 6),
        "rounds": [
            {"run": item.run, "round": item.round, "written": item.written, "recomputed": round(item.recomputed, 6)}
            for item in statement.series
        ],
    }


# Pieces of a page.


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


def evidence_rows(result: Comparison) -> list[Row]:
    """For each of them: what it says, what is in the logs for it, and whether it holds."""
    rows: list[Row] = []
    for name, words, show in EVIDENCE:
        state, shown = show(result)
        rows.append((Span(name), words, shown, Span(WORDS[state], f"mark {state}")))
    return rows


def _digests(result: Comparison, field: str) -> tuple[str, Piece]:
    """One digest that all agents ran with, or how many."""
    found = {record.body[field] for history in result.histories for record in history.of("agent.start")}
    if len(found) == 1:
        return HOLDS, ("one for all: ", digest(next(iter(found)), 16))
    return OPEN, f"{len(found)} different ones: compare them with the releases" if found else "no agent.start here"


def _schema(result: Comparison) -> tuple[str, Piece]:
    return _digests(result, "proto")


def _filter(result: Comparison) -> tuple[str, Piece]:
    state, shown = _digests(result, "package")
    return state, ("package digest, ", shown)


def _sizes(result: Comparison) -> tuple[str, Piece]:
    count = sum(log.ledger.count for log in result.logs)
    state = state_of(result.findings, frozenset({"SurplusBytes", "LayoutMismatch", "ForbiddenMessage"}))
    return (state if count else OPEN), f"{count:,} messages recomputed"


def _uniformity(result: Comparison) -> tuple[str, Piece]:
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


def _network_counters(result: Comparison) -> tuple[str, Piece]:
    sites = [log.ledger for log in result.logs if log.role == SITE and log.ledger.count]
    counted, logged = sum(ledger.counted for ledger in sites), sum(ledger.covered.total() for ledger in sites)
    total = sum(ledger.total for ledger in sites)
    if not counted:
        return OPEN, "no readings"
    rest = f"; {quantity(total - logged)} without a reading" if total > logged else ""
    shown = f"{quantity(counted)} counted, {quantity(logged)} logged{rest}"
    return state_of(result.findings, frozenset({"UnloggedTraffic"})), shown


def _matching(result: Comparison) -> tuple[str, Piece]:
    shown = f"{result.matched:,} messages, {result.receipts:,} receipts"
    return (state_of(result.findings, MATCHING) if result.matched else OPEN), shown


def _isolation(result: Comparison) -> tuple[str, Piece]:
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
