"""The auditor's report: one page, self-contained, without script, that prints on paper and says how to repeat it.

This module gathers the facts. The page and its words are `templates/report.html`, where everything that is put in is
text: it is escaped, and characters that do not print are replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lazaret import software
from security.audit import text
from security.audit.compare import Comparison
from security.audit.epsilon import EpsilonStatement
from security.audit.facts import RoundFacts, processing_json, round_json, rounds_of
from security.audit.findings import Concern, Finding, Severity, verdict_on
from security.audit.pages import DASHES, WIDTH, Box, Curve, Dot, Drawing, GridLine, Label, Scale, environment, ticks
from security.audit.text import (
    BROKEN,
    HOLDS,
    OPEN,
    Piece,
    Row,
    Span,
    digest,
    evidence_rows,
    patient_sentence,
    state_of,
    when,
)
from security.audit.verify import Verified
from security.log.roster import SITE


def report_json(result: Comparison) -> dict[str, Any]:
    """The same facts for machines."""
    return {
        "verdict": text.VERDICTS[result.exit_code],
        **text.verdicts_json(result.findings),
        "processing": [processing_json(history) for history in result.histories],
        "matched_messages": result.matched,
        "fitting_receipts": result.receipts,
        "logs": [text.log_json(log, log.findings, None) for log in result.logs],
        "privacy": [text.statement_json(statement) for statement in result.statements],
        "rounds": [round_json(result.histories, key) for key in rounds_of(result.histories)],
        "findings": [finding.to_json() for finding in result.findings],
    }


def render(result: Comparison, *, pinned: bool, root: str | None = None, checked_ms: int | None = None) -> str:
    """The page.

    :param root: fingerprint of the consortium's root certificate that pinned the keys.
    :param checked_ms: when the check was made.
    """
    facts = page_facts(result, pinned)
    facts["about"] += [("Root certificate (SHA-256)", root)] if root else []
    facts["about"] += [("Date of the check", text.when(checked_ms / 1000))] if checked_ms else []
    return environment().get_template("report.html").render(facts)


def page_facts(result: Comparison, pinned: bool) -> dict[str, Any]:
    """Everything that the template shows."""
    return {
        "pinned": pinned,
        "parties": [history.name for history in result.histories],
        "verdict": _verdict(result),
        "about": _about(result, pinned),
        "checked": {"done": _done(result), "open": _not_done(result, pinned)},
        "logs": _logs(result),
        "processing": _processing(result),
        "findings": _findings(result.findings),
        "notes": _notes(result.findings),
        "evidence": evidence_rows(result),
        "record_clean": text.clean(result.findings, text.RECORD),
        "rounds": _rounds(result),
        "egress": _egress(result),
        "privacy": _privacy(result),
        "timeline": {"cohorts": _cohorts(result), "witnesses": _witnesses(result)},
        "checkpoints": [
            (digest(log.origin), head.checkpoint.size, digest(head.checkpoint.root.hex()))
            for log in result.logs
            for head in ((log.checkpoints.newest,) if log.checkpoints.newest else ())
        ],
    }


# The sections.


def _verdict(result: Comparison) -> dict[str, Any]:
    counts = Counter(finding.severity for finding in result.findings)
    # Why the verdict is not clean, each reason once.
    reasons = {finding.code: finding.meaning for finding in result.findings if finding.severity is not Severity.NOTE}
    return {
        "exit_code": result.exit_code,
        "answers": [
            (concern.value, text.ANSWERS[code], {0: HOLDS, 1: BROKEN, 3: OPEN}[code])
            for concern in Concern
            for code in (verdict_on(result.findings, concern),)
        ],
        "reasons": list(reasons.items()),
        "failed": counts[Severity.FAIL],
        "undecided": counts[Severity.UNDECIDED],
        "notes": counts[Severity.NOTE],
    }


def _about(result: Comparison, pinned: bool) -> list[tuple[str, str]]:
    """What this page is about, for the head of a file that is kept for years."""
    federations = {history.origin.removesuffix("/audit").partition(".")[2] for history in result.histories}
    runs = {key[0] for key in rounds_of(result.histories) if key[0]}
    ends = [record.ts / 1000 for history in result.histories for record in history.of("agent.start", "agent.stop")]
    rows = [
        ("Federation", ", ".join(sorted(federations))),
        ("Run", ", ".join(sorted(runs)) or "none"),
        ("Keys", "pinned by the consortium's root certificate" if pinned else "taken from the logs themselves"),
        ("Manifests in force", _versions(result)),
        ("Checked with", f"privacy-audit of lazaret {software.version()}"),
    ]
    return [*rows, ("Time covered", f"{text.when(min(ends))} to {text.when(max(ends))}")] if ends else rows


def _versions(result: Comparison) -> str:
    versions = {one.version: one.issued_at_ms for log in result.logs for one in log.agreements.versions}
    versions_text = [f"{version} of {text.when(issued / 1000)}" for version, issued in sorted(versions.items())]
    return ", ".join(versions_text) or "none"


def _processing(result: Comparison) -> list[dict[str, Any]]:
    """What each party states, and what its log says of exports, erasures and witnesses; for who signs the report."""
    shown = []
    for log, history in result.pairs:
        stated = processing_json(history)
        rows: list[tuple[str, Piece]] = [("Software", _listed(stated["versions"]))]
        rows.append(("Digest of its code", tuple(digest(one) for one in stated["packages"]) or "not stated"))
        if log.role == SITE:
            rows += [
                ("Controller", _listed(stated["controllers"])),
                ("Purpose", _listed(stated["purposes"])),
                ("Legal basis", _listed(stated["legal_bases"])),
                ("Data subjects", _listed(stated["subjects"])),
                ("Categories of data", _listed(stated["categories"])),
                ("Number of subjects", f"as a range, at the site; annexes: {log.annexes:,}, erased: {log.erased:,}"),
                ("Retention", _listed(stated["retention"])),
                ("Recipients", _recipients(log, stated["recipients"])),
            ]
        exports = [f"entry {one['entry']}: {one['auditor']} ({one['purpose']})" for one in stated["exports"]]
        erasures = [f"annexes of entries {one['first']} to {one['last']}" for one in stated["erasures"]]
        outside = log.size - log.covered
        rows += [
            ("Exports of the log", _listed(exports, "none")),
            ("Erasures", _listed(erasures, "none")),
            ("Entries without witnesses", f"{outside:,} of {log.size:,} ({100 * outside / max(log.size, 1):.0f} %)"),
        ]
        shown.append({"party": history.name, "role": log.role, "rows": rows})
    return shown


def _listed(values: Sequence[str], none: str = "not stated") -> str:
    return "; ".join(values) or none


def _recipients(log: Verified, keys: Sequence[str]) -> Piece:
    """Messages name the key they went to; the manifests say whose it is."""
    judged = [one for one in log.agreements.versions if one.rules]
    known = {key: one.roster.coordinator for one in judged for key in (one.rules.destinations if one.rules else ())}
    names = {found.name if (found := known.get(key)) else "unknown" for key in keys}
    of_data = "masked vectors and messages of the protocol"
    return (f"{', '.join(sorted(names))}: {of_data}; keys ", *(digest(key, 16) for key in keys)) if keys else "none"


def _done(result: Comparison) -> list[tuple[str, str]]:
    """What was checked, and how it came out."""
    entries, heads = sum(log.size for log in result.logs), sum(len(log.checkpoints.signed) for log in result.logs)
    cosigned = sum(len(head.cosigners) for log in result.logs for head in log.checkpoints.signed)
    messages = sum(log.ledger.count for log in result.logs)
    done = [
        (f"{entries:,} entries read and hashed again, {heads:,} signed checkpoints", text.RECORD),
        (f"{cosigned:,} cosignatures, and the checkpoints that each party holds of the other logs", text.RECORD),
        (f"{messages:,} outgoing messages: type, exact length, mask", text.EGRESS),
        (
            f"{result.matched:,} of them in the coordinator's log too: identity, digest, length; {result.receipts:,} "
            "receipts point to the right entry",
            text.MATCHING,
        ),
        ("one model, one cohort and one survivor set in each round", text.AGREEMENT),
        (f"{entries:,} entries under the rules of the manifest in force then, and every step of a round", text.RULES),
    ]
    if result.statements:
        names = ", ".join(statement.site for statement in result.statements)
        done.append((f"epsilon of {names}, recomputed from the recorded mechanisms", text.PRIVACY))
    states = [(words, state_of(result.findings, codes), codes) for words, codes in done]
    if verdict_on(result.findings, Concern.RECORD) == 0:
        return [(words, state) for words, state, _ in states]
    # Nothing is decided about rules by a record that is not intact.
    judged = (text.EGRESS, text.RULES, text.PRIVACY)
    return [(words, OPEN if state == HOLDS and codes in judged else state) for words, state, codes in states]


def _not_done(result: Comparison, pinned: bool) -> list[str]:
    """What these logs leave open, besides what no log shows."""
    undecided = [finding for finding in result.findings if finding.severity is Severity.UNDECIDED]
    points = [f"{finding.log}: {finding.detail}" for finding in undecided]
    if not pinned:
        points.append("keys were taken from the logs themselves; pin them with --root-key")
    if not any(log.ledger.readings for log in result.logs):
        points.append("no network counters were logged, so nothing outside the agent confirms the byte totals")
    sites = [history for history in result.histories if history.role == SITE]
    for source in sorted({record.body["source"] for site in sites for record in site.of("net.counter")}):
        points.append(f"bytes that are not in the kernel's count, which covers: {source}")
    return points


def _logs(result: Comparison) -> list[Row]:
    rows: list[Row] = []
    for log, history in result.pairs:
        newest, witnessed = log.checkpoints.newest, log.checkpoints.witnessed
        rows.append(
            (
                Span(history.name),
                log.role,
                log.size,
                newest.checkpoint.size if newest else "none",
                f"{witnessed.checkpoint.size:,} by {text.cosigner_names(log, witnessed)}"
                if witnessed
                else "not witnessed",
                log.epochs,
                digest(newest.checkpoint.root.hex(), 12) if newest else "",
            )
        )
    return rows


def _findings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Failed checks first, then undecided ones."""
    order = (Severity.FAIL, Severity.UNDECIDED)
    weighty = sorted((item for item in findings if item.severity in order), key=lambda f: order.index(f.severity))
    return [
        finding.to_json()
        | {
            "kind": "bad" if finding.severity is Severity.FAIL else "open",
            "meaning": f"{finding.meaning[0].upper()}{finding.meaning[1:]}",
            "entries": ", ".join(f"{entry:,}" for entry in finding.entries),
        }
        for finding in weighty
    ]


def _notes(findings: Sequence[Finding]) -> list[Row]:
    """Equal notes of several logs become one row."""
    logs: dict[tuple[str, str, str], list[str]] = {}
    for note in findings:
        if note.severity is Severity.NOTE:
            logs.setdefault((note.code, note.detail, note.ask), []).append(note.log)
    return [(Span(name), ", ".join(where), what, ask) for (name, what, ask), where in logs.items()]


def _rounds(result: Comparison) -> list[Row]:
    spent = {
        (item.run, item.round): f"{item.recomputed:.2f}" for statement in result.statements for item in statement.series
    }
    rows: list[Row] = []
    for key in rounds_of(result.histories):
        facts = RoundFacts(result.histories, key)
        control = sum(facts.bytes.values()) - facts.bytes["masked-vector"]
        rows.append(
            (
                key[1],
                _one_of(facts.models),
                Span((f"{facts.cohort_size}, ", _one_of(facts.cohorts)), "whole"),
                f"{len(facts.summed)}" + (f" (without {', '.join(sorted(facts.dropouts))})" if facts.dropouts else ""),
                text.quantity(facts.bytes["masked-vector"]),
                text.quantity(control),
                "0 B" if facts.surplus == 0 else Span(f"{facts.surplus:+,} B", "alarm"),
                "yes" if not facts.unmasked else Span("NO", "alarm"),
                spent.get(key, "-"),
            )
        )
    return rows


def _one_of(values: set[str]) -> Piece:
    """One digest, or an alarm where parties saw several."""
    if len(values) <= 1:
        return digest(next(iter(values), "-"), 10)
    return Span(f"{len(values)} different", "alarm")


def _egress(result: Comparison) -> dict[str, Any]:
    classes = sorted({name for log in result.logs for name in log.ledger.messages})
    rows: list[Row] = []
    for log, history in result.pairs:
        if log.role != SITE:
            continue
        row: list[Piece] = [Span(history.name)]
        row += [f"{text.quantity(log.ledger.bytes[name])} in {log.ledger.messages[name]:,}" for name in classes]
        row += [
            text.quantity(log.ledger.total),
            text.quantity(log.ledger.counted) if log.ledger.readings else "-",
        ]
        row.append(log.types.get("egress.blocked", 0))
        rows.append(row)
    return {"titles": ["site", *classes, "all", "kernel count", "blocked"], "rows": rows}


def _privacy(result: Comparison) -> dict[str, Any]:
    rows = [
        (
            Span(statement.site),
            f"{statement.epsilon:.3f}" + (f" ({statement.alone:.3f} alone)" if statement.alone else ""),
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
    return {
        "rows": rows,
        "sentences": [
            (statement.site, patient_sentence(statement.epsilon, statement.delta)) for statement in result.statements
        ],
        "unclaimed": others,
        "chart": epsilon_chart(result.statements) if result.statements else None,
    }


def _cohorts(result: Comparison) -> Drawing | None:
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
    return cohort_chart([str(key[1]) for key in keys], sites, cells) if keys and sites else None


def _witnesses(result: Comparison) -> Drawing | None:
    rows = [
        (
            history.name,
            sorted({(time, key.name) for head in log.checkpoints.signed for key, time in head.cosigners.items()}),
        )
        for log, history in result.pairs
    ]
    return witness_chart(rows) if any(seen for _, seen in rows) else None


# The charts. Only positions and words go in; the templates draw them.


def epsilon_chart(statements: Sequence[EpsilonStatement]) -> Drawing:
    """Epsilon after each round for every site with a budget, under its cap."""
    left, right, bottom = 48, WIDTH - 92, 222
    cap = max(float(statement.cap) for statement in statements)
    top = max([cap, *(item.recomputed for statement in statements for item in statement.series)]) * 1.08
    longest = max(len(statement.series) for statement in statements)
    x, y = Scale(0, longest, left, right), Scale(0, top, bottom, 16)
    drawing = Drawing(title="epsilon after each round, and the cap", height=260)
    for value in ticks(top):
        drawing.lines.append(GridLine(left, right, y(value)))
        drawing.labels.append(Label(left - 8, y(value) + 4, f"{value:g}", "end"))
    drawing.lines.append(GridLine(left, right, y(cap), "cap"))
    drawing.labels.append(Label(right + 6, y(cap) + 4, f"cap {cap:g}", strong=True))
    for number, statement in enumerate(statements):
        drawing.curves.append(Curve(_staircase(statement, x, y), DASHES[number % 4]))
    drawing.labels.extend([*_end_labels(statements, y, right + 6), *_round_labels(statements, x, bottom)])
    return drawing


def _staircase(statement: EpsilonStatement, x: Scale, y: Scale) -> str:
    """A round is paid at once, so the curve goes up in steps."""
    points = [(x(0), y(0))]
    for index, item in enumerate(statement.series):
        points += [(x(index), y(item.recomputed)), (x(index + 1), y(item.recomputed))]
    return " ".join(f"{px},{py}" for px, py in points)


def _end_labels(statements: Sequence[EpsilonStatement], y: Scale, left: float) -> list[Label]:
    """Names at the ends of the curves, pushed down where they would cover each other."""
    labels, lowest = [], 0.0
    for statement in sorted(statements, key=lambda item: -item.epsilon):
        at = max(y(statement.epsilon) + 4, lowest + 14)
        labels.append(Label(left, at, f"{statement.site} {statement.epsilon:.2f}", strong=True))
        lowest = at
    return labels


def _round_labels(statements: Sequence[EpsilonStatement], x: Scale, bottom: int) -> list[Label]:
    longest = max(statements, key=lambda statement: len(statement.series)).series
    every = max(1, len(longest) // 10)
    marks = [
        Label(x(index + 0.5), bottom + 16, str(item.round), "middle")
        for index, item in enumerate(longest)
        if index % every == 0
    ]
    return [*marks, Label((x.start + x.end) / 2, bottom + 33, "round", "middle")]


def cohort_chart(rounds: Sequence[str], sites: Sequence[str], took_part: Mapping[tuple[str, str], str]) -> Drawing:
    """Which site was in which sum: filled for in, ring for invited and dropped, nothing for absent."""
    left, step_y = 110, 26
    height = 40 + step_y * len(sites)
    x = Scale(0, len(rounds), left, WIDTH - 12)
    width = min(18.0, max(2.0, (x.end - x.start) / max(1, len(rounds)) * 0.7))
    drawing = Drawing(title="which site took part in which round", height=height)
    for row, site in enumerate(sites):
        y = 14 + row * step_y
        drawing.labels.append(Label(left - 12, y + 12, site, "end"))
        drawing.lines.append(GridLine(left, WIDTH - 12, y + 8))
        for column, name in enumerate(rounds):
            state = took_part.get((site, name))
            if state is not None:
                drawing.boxes.append(Box(round(x(column + 0.5) - width / 2, 1), y, round(width, 1), state))
    every = max(1, len(rounds) // 12)
    drawing.labels.extend(
        Label(x(column + 0.5), height - 6, name, "middle") for column, name in enumerate(rounds) if column % every == 0
    )
    return drawing


def witness_chart(rows: Sequence[tuple[str, Sequence[tuple[int, str]]]]) -> Drawing:
    """For each log, when a checkpoint of it was cosigned."""
    times = [time for _, seen in rows for time, _ in seen]
    left, step_y = 110, 26
    height = 44 + step_y * len(rows)
    x = Scale(min(times), max(times), left + 6, WIDTH - 18)
    drawing = Drawing(title="when checkpoints were cosigned", height=height)
    for row, (name, seen) in enumerate(rows):
        y = 22 + row * step_y
        drawing.labels.append(Label(left - 12, y + 4, name, "end"))
        drawing.lines.append(GridLine(left, WIDTH - 12, y))
        drawing.dots.extend(Dot(x(time), y, f"{who} {when(time)}") for time, who in seen)
    drawing.labels.append(Label(left, height - 6, when(min(times))))
    drawing.labels.append(Label(WIDTH - 12, height - 6, when(max(times)), "end"))
    return drawing
