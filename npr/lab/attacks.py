"""`npr-lab audit`: the attacks of npr/dp/audit.py, run against the production code, with a verdict."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from npr.dp.audit import CanaryAudit, MembershipCheck, run_canary_audit, run_membership_check

# A loss threshold is chosen after the fact, so even useless losses reach some advantage. With n records on each side
# it stays below this many standard deviations of a difference of two rates in all but about one of 10,000 runs.
DEVIATIONS = 4.0
# A larger epsilon allows an advantage of nearly 1 and could not be contradicted by any attack.
MEMBERSHIP_EPSILON = 1.0


def audit_report(*, canaries: int, epsilon: float, delta: float, records: int = 400) -> dict[str, Any]:
    """Both attacks once. `found` above `allowed` means that the implementation or its ledger is wrong."""
    canary = run_canary_audit(canaries=canaries, epsilon=epsilon, delta=delta)
    membership = run_membership_check(records=records, epsilon=min(epsilon, MEMBERSHIP_EPSILON), delta=delta)
    attacks = {"canaries": _canaries(canary), "membership": _membership(membership, records)}
    return {
        "epsilon": epsilon,
        "delta": delta,
        "attacks": attacks,
        "consistent": all(part["consistent"] for part in attacks.values()),
    }


def _canaries(audit: CanaryAudit) -> dict[str, Any]:
    return {
        "found": audit.lower_bound,
        "allowed": audit.claimed.rdp,
        "consistent": audit.consistent,
        **{name: value for name, value in asdict(audit).items() if name != "claimed"},
    }


def _membership(check: MembershipCheck, records: int) -> dict[str, Any]:
    slack = DEVIATIONS * math.sqrt(0.5 / (records // 2))
    allowed = min(1.0, check.allowed_advantage + slack)
    return {
        "found": check.advantage,
        "allowed": allowed,
        "consistent": check.advantage <= allowed,
        "auc": check.auc,
        "allowed_in_expectation": check.allowed_advantage,
    }
