"""The auditor's report: one page, self-contained, without script, that prints on paper and says how to repeat it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from lazaret import software
from security.audit import charts, report_text, text
from security.audit.charts import Child, Markup, code, table, tag
from security.audit.compare import Crossed
from security.audit.facts import RoundFacts, round_json, rounds_of
from security.audit.findings import Finding, Severity
from security.audit.report_text import STYLE
from security.log.roster import SITE

# ----------------------------------------
# The six things that "prototypes never left" rests on, each with what these logs show for it.

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
    rest = f"; {text.quantity(total - logged)} without a reading" if total > logged else ""
    shown = f"{text.quantity(counted)} counted for {text.quantity(logged)} logged{rest}"
    return state_of(result.findings, frozenset({"UnloggedTraffic"})), shown


def _matching(result: Crossed) -> tuple[str, Child]:
    shown = f"{result.matched:,} messages, {result.receipts:,} receipts"
    return (state_of(result.findings, text.MATCHING) if result.matched else OPEN), shown


def report_json(result: Crossed) -> dict[str, Any]:
    """The same facts for machines."""
    return {
        "verdict": text.VERDICTS[result.exit_code],
        "matched_messages": result.matched,
        "fitting_receipts": result.receipts,
        "logs": [text.log_json(log, log.findings, None) for log in result.logs],
        "privacy": [text.statement_json(statement) for statement in result.statements],
        "rounds": [round_json(result.histories, key) for key in rounds_of(result.histories)],
        "findings": [finding.to_json() for finding in result.findings],
    }


def render(result: Crossed, *, pinned: bool) -> str:
    """The page."""
    sections = [
        _verdict(result, pinned),
        _checked(result, pinned),
        _parties(result),
        _findings(result),
        _meaning(result),
        _rounds(result),
        _ledger(result),
        _privacy(result),
        _timeline(result),
        _regulations(),
        _appendix(result, pinned),
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Even if something slipped through the escaping, a browser would neither run nor fetch it.
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("title", "Privacy audit report"),
        tag("style", Markup(STYLE)),
    )
    body = tag("body", tag("main", sections))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _section(title: str, *children: Child) -> Markup:
    return tag("section", tag("h2", title), *children)


def _verdict(result: Crossed, pinned: bool) -> Markup:
    kind = {0: "good", 1: "bad", 3: "open"}[result.exit_code]
    title, sentence = report_text.VERDICTS[result.exit_code]
    counts = Counter(finding.severity for finding in result.findings)
    names = ", ".join(history.name for history in result.histories)
    summary = (
        f"Failed checks: {counts[Severity.FAIL]}. Undecided: {counts[Severity.UNDECIDED]}. "
        f"Notes: {counts[Severity.NOTE]}. Logs of {names}."
    )
    return tag(
        "header",
        tag("p", "Lazaret privacy audit", cls="kicker"),
        tag("h1", "What left each hospital, and what it cost"),
        tag(
            "div",
            tag("p", title, cls="word"),
            tag("p", sentence),
            _reasons(result.findings),
            tag("p", summary, cls="small"),
            cls=f"verdict {kind}",
        ),
        tag("dl", [(tag("dt", term), tag("dd", words)) for term, words in _about(result, pinned)], cls="about"),
    )


def _reasons(findings: Sequence[Finding]) -> Child:
    """Why the verdict is not clean, each reason once."""
    reasons = {finding.code: finding.meaning for finding in findings if finding.severity is not Severity.NOTE}
    return (
        tag("ul", [tag("li", tag("strong", name), ": ", words) for name, words in reasons.items()]) if reasons else None
    )


def _about(result: Crossed, pinned: bool) -> list[tuple[str, str]]:
    """What this page is about, for the head of a file that is kept for years."""
    federations = {history.origin.removesuffix("/audit").partition(".")[2] for history in result.histories}
    runs = {key[0] for key in rounds_of(result.histories) if key[0]}
    ends = [record.ts / 1000 for history in result.histories for record in history.of("agent.start", "agent.stop")]
    told = [
        ("Federation", ", ".join(sorted(federations))),
        ("Run", ", ".join(sorted(runs)) or "none"),
        ("Keys", "pinned by the consortium's root certificate" if pinned else "taken from the logs themselves"),
        ("Checked with", f"privacy-audit of lazaret {software.version()}"),
    ]
    return [*told, ("Time covered", f"{text.when(min(ends))} to {text.when(max(ends))}")] if ends else told


def _checked(result: Crossed, pinned: bool) -> Markup:
    entries, heads = sum(log.size for log in result.logs), sum(len(log.heads.heads) for log in result.logs)
    cosigned = sum(len(head.cosigners) for log in result.logs for head in log.heads.heads)
    messages = sum(log.ledger.count for log in result.logs)
    done = [
        (f"{entries:,} entries read strictly and hashed again, {heads:,} signed heads", text.RECORD),
        (f"{cosigned:,} cosignatures, and the heads that each party holds of the others", text.RECORD),
        (f"{messages:,} outgoing messages: type, exact length, mask", text.EGRESS),
        (
            f"{result.matched:,} of them in the coordinator's log too: identity, digest, length; {result.receipts:,} "
            "receipts lead there",
            text.MATCHING,
        ),
        ("one model, one cohort and one survivor set in each round", text.AGREEMENT),
    ]
    if result.statements:
        names = ", ".join(statement.site for statement in result.statements)
        done.append((f"epsilon of {names}, recomputed from the mechanisms", text.PRIVACY))
    items = [tag("li", words, cls=state_of(result.findings, codes)) for words, codes in done]
    open_points = [finding for finding in result.findings if finding.severity is Severity.UNDECIDED]
    not_done = [f"{finding.log}: {finding.detail}" for finding in open_points]
    if not pinned:
        not_done.append("keys were taken from the logs themselves; pin them with --root-key")
    if not any(log.ledger.readings for log in result.logs):
        not_done.append("no network counters were logged, so nothing outside the agent confirms the byte totals")
    not_done += list(report_text.NEVER_SHOWN)
    return _section(
        "What was checked, and what could not be",
        tag(
            "div",
            tag("div", tag("h3", "Checked"), tag("ul", items, cls="ticks")),
            tag("div", tag("h3", "Not shown by these logs"), tag("ul", [tag("li", item) for item in not_done])),
            cls="two",
        ),
    )


def _parties(result: Crossed) -> Markup:
    rows = []
    for log, history in zip(result.logs, result.histories, strict=True):
        newest, witnessed = log.heads.newest, log.heads.witnessed
        parties = {party.cosigner: party.name for party in log.roster.parties} if log.roster else {}
        names = sorted(parties.get(key, key.name) for key in witnessed.cosigners) if witnessed else []
        rows.append(
            (
                tag("strong", history.name),
                log.role,
                log.size,
                newest.checkpoint.size if newest else "none",
                f"{witnessed.checkpoint.size:,} by {', '.join(names)}" if witnessed else "not witnessed",
                log.epochs,
                code(newest.checkpoint.root.hex(), 12) if newest else "",
            )
        )
    head = ("party", "role", "entries", "newest head", "witnessed up to", "key epochs", "root hash")
    return _section("The logs", table(head, rows, numeric=(2, 3, 5)))


def _findings(result: Crossed) -> Markup:
    order = (Severity.FAIL, Severity.UNDECIDED)
    weighty = sorted(
        (item for item in result.findings if item.severity in order), key=lambda f: order.index(f.severity)
    )
    notes = [finding for finding in result.findings if finding.severity is Severity.NOTE]
    logs: dict[tuple[str, str, str], list[str]] = {}
    for note in notes:
        logs.setdefault((note.code, note.detail, note.ask), []).append(note.log)
    rows = [(tag("strong", name), ", ".join(where), what, ask) for (name, what, ask), where in logs.items()]
    return _section(
        "Findings",
        [_finding(finding) for finding in weighty] if weighty else tag("p", "None."),
        [tag("h3", "Notes, which change nothing"), table(("note", "log", "what", "to learn more"), rows)]
        if notes
        else None,
    )


def _finding(finding: Finding) -> Markup:
    kind = "bad" if finding.severity is Severity.FAIL else "open"
    where = f" Entries: {', '.join(f'{entry:,}' for entry in finding.entries)}." if finding.entries else ""
    return tag(
        "article",
        tag("h3", tag("span", finding.severity.value, cls="badge"), " ", finding.code),
        tag("p", finding.detail),
        tag(
            "p",
            f"{finding.meaning[0].upper()}{finding.meaning[1:]}. Log: {finding.log}.{where} Next: {finding.ask}.",
            cls="small",
        ),
        cls=f"finding {kind}",
    )


def _rounds(result: Crossed) -> Markup:
    spent = {
        (item.run, item.round): f"{item.recomputed:.2f}" for statement in result.statements for item in statement.series
    }
    rows = []
    for key in rounds_of(result.histories):
        facts = RoundFacts(result.histories, key)
        control = sum(facts.bytes.values()) - facts.bytes["masked-vector"]
        rows.append(
            (
                key[1],
                _one_of(facts.models),
                tag("span", f"{facts.cohort_size}, ", _one_of(facts.cohorts), cls="whole"),
                f"{len(facts.summed)}" + (f" (without {', '.join(sorted(facts.dropouts))})" if facts.dropouts else ""),
                text.quantity(facts.bytes["masked-vector"]),
                text.quantity(control),
                _equation(facts.surplus),
                "yes" if not facts.unmasked else tag("strong", "NO", cls="alarm"),
                spent.get(key, "-"),
            )
        )
    head = (
        "round",
        "model in",
        "cohort",
        "in the sum",
        "masked",
        "other",
        "surplus",
        "all masked",
        "epsilon",
    )
    note = "Every length must equal what its type, cohort and dimension give; one surplus byte would be a finding."
    return _section("Round by round", tag("p", note), table(head, rows, numeric=(0, 4, 5, 6, 8), many=True))


def _one_of(values: set[str]) -> Child:
    """One digest, or an alarm where parties saw several."""
    if len(values) <= 1:
        return code(next(iter(values), "-"), 10)
    return tag("strong", f"{len(values)} different", cls="alarm")


def _equation(surplus: int) -> Child:
    return "0 B" if surplus == 0 else tag("strong", f"{surplus:+,} B", cls="alarm")


def _ledger(result: Crossed) -> Markup:
    classes = sorted({name for log in result.logs for name in log.ledger.messages})
    rows: list[list[Child]] = []
    for log, history in zip(result.logs, result.histories, strict=True):
        if log.role != SITE:
            continue
        row: list[Child] = [tag("strong", history.name)]
        row += [f"{text.quantity(log.ledger.bytes[name])} in {log.ledger.messages[name]:,}" for name in classes]
        row += [
            text.quantity(log.ledger.total),
            text.quantity(log.ledger.counted) if log.ledger.readings else "-",
        ]
        row.append(log.types.get("egress.blocked", 0))
        rows.append(row)
    head = ["site", *classes, "all", "network counted", "blocked"]
    return _section(
        "Everything that left, by class of data",
        tag("p", report_text.CLASSES),
        table(head, rows, numeric=range(1, len(head))),
    )


def _privacy(result: Crossed) -> Markup:
    if not result.statements:
        return _section("Differential privacy", tag("p", report_text.NO_PRIVACY))
    rows = [
        (
            tag("strong", statement.site),
            f"{statement.epsilon:.3f}",
            statement.cap,
            statement.delta,
            statement.unit,
            statement.relation,
            f"{statement.best_rdp:.3f}",
            f"{statement.pld:.3f}" if statement.pld is not None else "-",
            statement.accountant,
        )
        for statement in result.statements
    ]
    claimed = {statement.site for statement in result.statements}
    others = [history.name for history in result.histories if history.role == SITE and history.name not in claimed]
    head = ("site", "epsilon", "cap", "delta", "unit", "neighbours", "best RDP order", "PLD", "accountant")
    return _section(
        "Differential privacy",
        tag("figure", charts.epsilon_chart(result.statements), tag("figcaption", report_text.EPSILON_CAPTION)),
        table(head, rows, numeric=(1, 2, 3, 6, 7)),
        tag("dl", [(tag("dt", term), tag("dd", words)) for term, words in report_text.SP_800_226]),
        tag("p", f"Not claimed for: {', '.join(others)}.") if others else None,
    )


def _timeline(result: Crossed) -> Markup:
    keys = rounds_of(result.histories)
    sites = [history.name for history in result.histories if history.role == SITE]
    cells: dict[tuple[str, str], str] = {}
    for key in keys:
        facts = RoundFacts(result.histories, key)
        for site in sites:
            if site in facts.summed:
                cells[site, str(key[1])] = "in"
            elif site in facts.dropouts:
                cells[site, str(key[1])] = "out"
    rows = [
        (
            history.name,
            sorted({(time, key.name) for head in log.heads.heads for key, time in head.cosigners.items()}),
        )
        for log, history in zip(result.logs, result.histories, strict=True)
    ]
    figures: list[Child] = []
    if keys and sites:
        chart = charts.cohort_chart([str(key[1]) for key in keys], sites, cells)
        figures.append(tag("figure", chart, tag("figcaption", report_text.COHORT_CAPTION)))
    if any(seen for _, seen in rows):
        figures.append(tag("figure", charts.witness_chart(rows), tag("figcaption", report_text.WITNESS_CAPTION)))
    return _section("Cohorts and witnesses over time", figures or tag("p", "Nothing to draw."))


def _meaning(result: Crossed) -> Markup:
    return _section(
        "That prototypes never left",
        [tag("p", paragraph) for paragraph in report_text.MEANING],
        legs(result),
        None if text.clean(result.findings, text.RECORD) else tag("p", report_text.BROKEN_RECORD, cls="alarm"),
    )


def _regulations() -> Markup:
    return _section(
        "Regulation map",
        tag("p", report_text.REGULATION_NOTE, cls="small"),
        table(("rule", "asks for", "evidence in this report"), report_text.REGULATIONS),
    )


def _appendix(result: Crossed, pinned: bool) -> Markup:
    names = " ".join(history.name for history in result.histories)
    pin = " --root-key root.pem"
    commands = "\n".join(
        (
            f"privacy-audit verify {names}{pin}",
            f"privacy-audit cross {names}{pin}",
            f"privacy-audit report {names}{pin} -o report.html",
        )
    )
    rows = [
        (code(log.origin), head.checkpoint.size, code(head.checkpoint.root.hex()))
        for log in result.logs
        for head in ((log.heads.newest,) if log.heads.newest else ())
    ]
    return _section(
        "How to repeat this",
        tag("p", report_text.REPEAT if pinned else report_text.REPEAT_UNPINNED),
        tag("pre", commands),
        tag("h3", "Newest heads"),
        table(("log", "size", "root hash"), rows, numeric=(1,)),
        tag("div", tag("p", "Auditor"), tag("p", "Date"), tag("p", "Signature"), cls="sign"),
    )
