"""Epsilon again, from the recorded mechanisms alone. What was reserved counts as spent, committed or not.

Imports the accountant, and with it dp-accounting, only when asked to compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from lazaret.errors import ConfigError
from security.audit.agreement import AgreedPrivacy, AgreedRules
from security.audit.facts import LogHistory
from security.audit.findings import Findings
from security.log.reader import Record
from security.log.roster import COORDINATOR, SITE

if TYPE_CHECKING:
    from security.dp.accountant import MechanismEvent, Parts
    from security.dp.filter import BudgetFilter

TOLERANCE: Final = 1e-3
_TERMS: Final = ("delta", "unit", "relation", "order", "plan", "cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Epsilon after one reservation: as written and as recomputed."""

    seq: int
    ts: int
    run: str | None
    round: int | None
    written: float
    recomputed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsilonStatement:
    """A site's differential-privacy claim with everything it depends on."""

    site: str
    unit: str
    relation: str
    delta: str
    order: str
    cap: str
    accountant: str
    series: tuple[Spending, ...]
    best_rdp: float
    pld: float | None
    alone: float | None

    @property
    def epsilon(self) -> float:
        """What counts: the enforced bound after the last reservation."""
        return self.series[-1].recomputed


def replay(
    history: LogHistory,
    findings: Findings,
    rules_at: Callable[[int], AgreedRules | None] = lambda _: None,
    *,
    second_opinion: bool = False,
) -> EpsilonStatement | None:
    """Recompute a site's epsilon and compare; None where the log claims no differential privacy.

    :param rules_at: the rules in force when an entry was written, for what each run spent.
    """
    reserved = list(history.of("dp.reserved"))
    committed = list(history.of("dp.committed"))
    if not reserved and not committed:
        return None
    _check_commits(reserved, committed, findings)
    _check_paid(history, {record.key for record in committed}, findings)
    if not reserved:
        return None
    _check_terms((*reserved, *committed), findings)
    terms: dict[str, Any] = {}
    series: list[Spending] = []
    spent: list[MechanismEvent] = []
    for ledger in _ledgers(reserved):
        # Each ledger has its own terms, and counts for itself; the statement is on the one that was used last.
        terms = {name: ledger[0].body[name] for name in _TERMS}
        try:
            series, spent = _recompute(ledger, committed, terms, findings)
            best, pld = _opinions(spent, float(terms["delta"]), second_opinion)
        except (ConfigError, OverflowError, ValueError) as error:
            what = error.message if isinstance(error, ConfigError) else "its numbers are out of range"
            findings.add("EpsilonMismatch", f"entry {ledger[0].seq}: {what}", ledger[0].seq)
            return None
    check_run_epsilon(history, rules_at, findings)
    return EpsilonStatement(
        site=history.name,
        unit=terms["unit"],
        relation=terms["relation"],
        delta=terms["delta"],
        order=terms["order"],
        cap=terms["cap"],
        accountant=reserved[-1].body["accountant"],
        series=tuple(series),
        best_rdp=best,
        pld=pld,
        alone=_alone(spent, float(terms["delta"])),
    )


def _check_terms(records: Sequence[Record], findings: Findings) -> None:
    """Within a run the terms stay what they were; another run may have another ledger."""
    first: dict[str | None, dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: record.seq):
        terms = first.setdefault(record.run, record.body)
        changed = [name for name in _TERMS if record.body[name] != terms[name]]
        if changed:
            findings.add("DpTermsChanged", f"entry {record.seq} has another {', '.join(changed)}", record.seq)


def _ledgers(reserved: Sequence[Record]) -> list[list[Record]]:
    """Reservations by the terms of the ledger that they are in, the ledger that was used last at the end."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in reserved:
        key = tuple(str(record.body[name]) for name in _TERMS)
        ledger = found[key] = found.pop(key, [])
        ledger.append(record)
    return list(found.values())


def check_run_epsilon(history: LogHistory, rules_at: Callable[[int], AgreedRules | None], findings: Findings) -> None:
    """What each run spent, against what the manifest in force permits a run to spend.

    By the tightest of the analyses: a site's own rule is stricter, so that what it admitted is never above this.
    """
    from security.dp.accountant import MechanismEvent, pld_epsilon, rdp_epsilon
    from security.dp.filter import shares_noise

    spent: dict[str | None, list[MechanismEvent]] = {}
    last: dict[str | None, tuple[Record, AgreedPrivacy]] = {}
    for record in history.of("dp.reserved"):
        rules = rules_at(record.seq)
        if rules is None or rules.privacy is None or record.run != rules.run:
            continue
        try:
            spent.setdefault(record.run, []).extend(map(MechanismEvent.from_json, record.body["mechanisms"]))
        except (ConfigError, OverflowError, ValueError):
            continue  # `replay` has a finding for it
        last[record.run] = record, rules.privacy
    for run, (record, privacy) in last.items():
        # Renyi at the best order and PLD are both valid for what was really run; the manifest's limit holds by the
        # lower one.
        epsilon = rdp_epsilon(spent[run], privacy.delta)[0]
        # PLD has no proof for sums of discrete noise.
        if epsilon > privacy.epsilon and not shares_noise(spent[run]):
            epsilon = min(epsilon, pld_epsilon(spent[run], privacy.delta))
        if epsilon > privacy.epsilon * (1 + TOLERANCE):
            detail = f"epsilon {epsilon:.3f} of run {run}, at most {privacy.epsilon:g}"
            findings.add("RunEpsilonExceeded", detail, record.seq)


def _recompute(
    reserved: Sequence[Record], committed: Sequence[Record], terms: dict[str, Any], findings: Findings
) -> tuple[list[Spending], list[MechanismEvent]]:
    from security.dp.accountant import MechanismEvent, added
    from security.dp.filter import BudgetFilter, PinnedSchedule

    rule = BudgetFilter(
        order=float(terms["order"]),
        delta=float(terms["delta"]),
        cap=float(terms["cap"]),
        planned=None if terms["plan"] is None else PinnedSchedule.from_json(terms["plan"]),
    )
    _check_plan(rule, reserved[0], findings)
    used = {record.body["reservation"]: record for record in committed}
    series, events, parts = [], list[MechanismEvent](), cast("Parts", ())
    for record in reserved:
        new = [MechanismEvent.from_json(item) for item in record.body["mechanisms"]]
        events += new
        before, parts = rule.epsilon(parts), added(parts, new)
        epsilon = rule.epsilon(parts)
        for entry in filter(None, (record, used.get(record.body["reservation"]))):
            if not _close(entry.body["epsilon_total"], epsilon) or not _close(
                entry.body["epsilon_round"], epsilon - before
            ):
                findings.add(
                    "EpsilonMismatch",
                    f"entry {entry.seq} says {entry.body['epsilon_total']}, its inputs give {epsilon:.4f}",
                    entry.seq,
                )
        # Section 6 of differential-privacy.md: the filter admits nothing beyond the cap, so a log beyond it is no
        # ledger's.
        if epsilon > rule.cap * (1 + TOLERANCE):
            findings.add("BudgetExceeded", f"epsilon {epsilon:.3f} is above the cap of {rule.cap:g}", record.seq)
        series.append(
            Spending(
                seq=record.seq,
                ts=record.ts,
                run=record.run,
                round=record.round,
                written=float(record.body["epsilon_total"]),
                recomputed=epsilon,
            )
        )
    return series, events


def _check_plan(rule: BudgetFilter, record: Record, findings: Findings) -> None:
    """The cost of the plan is written once by the site and enforced by its ledger: compute it again."""
    from security.dp.filter import planned_epsilon

    if rule.planned is None:
        return
    epsilon = planned_epsilon(rule.planned.events, rule.delta)
    if not math.isclose(rule.planned.epsilon, epsilon, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        detail = f"entry {record.seq} says that the plan costs {rule.planned.epsilon:g}, its events give {epsilon:.4f}"
        findings.add("EpsilonMismatch", detail, record.seq)


def _close(written: str, computed: float) -> bool:
    return math.isclose(float(written), computed, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _check_commits(reserved: Sequence[Record], committed: Sequence[Record], findings: Findings) -> None:
    paid = {record.body["reservation"]: record for record in reserved}
    for record in committed:
        source = paid.get(record.body["reservation"])
        if source is None or source.body["mechanisms"] != record.body["mechanisms"]:
            findings.add("EpsilonMismatch", f"entry {record.seq} commits what was not reserved", record.seq)
        elif source.key != record.key:
            # One reservation pays for one round, however often it is said that the round was trained.
            findings.add("EpsilonMismatch", f"entry {record.seq} commits what another round reserved", record.seq)


def _check_paid(history: LogHistory, paid: set[tuple[str | None, int | None]], findings: Findings) -> None:
    """In a run under a budget, no masked vector leaves in a round that was not paid for."""
    budgeted = {record.run for record in history.of("dp.reserved", "dp.committed")}
    for record in history.of("egress"):
        if record.body["data_class"] == "masked-vector" and record.run in budgeted and record.key not in paid:
            findings.add(
                "UnaccountedRound",
                f"round {record.round}: a vector left at entry {record.seq} without dp.committed",
                record.seq,
            )
            paid.add(record.key)


def join_payments(histories: Sequence[LogHistory], joint: Findings) -> None:
    """The coordinator's list of who uploaded, against the payments of sites that have a budget.

    Only of messages that the site's log has, too: a coordinator could make up others.
    """
    by_name = {history.name: history for history in histories if history.role == SITE}
    paid = {name: {entry.key for entry in site.of("dp.committed")} for name, site in by_name.items()}
    budgeted = {name: {one.run for one in site.of("dp.committed", "dp.reserved")} for name, site in by_name.items()}
    sent = {name: {record.body["msg_id"] for record in site.of("egress")} for name, site in by_name.items()}
    for hub in (history for history in histories if history.role == COORDINATOR):
        seen = set[tuple[object, ...]]()
        for record in hub.of("ingress"):
            site = by_name.get(record.body["sender"])
            key = (record.body["sender"], *record.key)
            if record.body["message"] != "UploadFrame" or site is None or key in seen:
                continue
            if record.body["msg_id"] not in sent[site.name]:
                continue
            seen.add(key)
            if record.run in budgeted[site.name] and record.key not in paid[site.name]:
                joint.add("UnaccountedRound", f"{site.name} took part in round {record.round} unpaid", record.seq)


def _alone(events: list[MechanismEvent], delta: float) -> float | None:
    """With shared noise the bound if all other sites collude; the others count on honest survivors."""
    from security.dp.accountant import rdp_epsilon
    from security.dp.filter import shares_noise

    return rdp_epsilon([event.alone for event in events], delta)[0] if shares_noise(events) else None


def _opinions(events: list[MechanismEvent], delta: float, second: bool) -> tuple[float, float | None]:
    from security.dp.accountant import pld_epsilon, rdp_epsilon

    return rdp_epsilon(events, delta)[0], pld_epsilon(events, delta) if second else None
