"""What an operator asks a state folder: read-only, also while the coordinator runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from coordinator.assembly import read_manifest
from coordinator.config import CoordinatorConfig
from coordinator.database import FILE
from coordinator.round_history import ReadOnlyHistory, UncheckedSum
from security.clock import Clock, SystemClock
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest

PATIENCE_MS: Final = 120_000


def _unchecked(found: UncheckedSum | None, manifest: Manifest) -> dict[str, Any] | None:
    """The newest sum, while sites have not vouched for it: without that no further one is made."""
    if found is None:
        return None
    return {
        "round": found.round,
        "since_ms": found.since_ms,
        "vouched": sorted(found.acknowledged),
        "missing": [site for site in manifest.sites if site not in found.acknowledged],
    }


def standstill(told: dict[str, Any], now_ms: int) -> str | None:
    """One line for the operator, if a sum has waited for its check for longer than a check takes."""
    unchecked = told["unchecked"]
    if unchecked is None or unchecked["since_ms"] is None or now_ms - unchecked["since_ms"] < PATIENCE_MS:
        return None
    minutes = (now_ms - unchecked["since_ms"]) // 60_000
    missing = ", ".join(unchecked["missing"])
    return (
        f"stalled: the sum of round {unchecked['round']} has had no certificate for {minutes} min; not "
        f"verified by {missing}. See docs/operators.md, \"A sum without a certificate\""
    )


def overview(config_path: Path, clock: Clock | None = None) -> dict[str, Any]:
    """Rounds with their outcomes, sites with their last contact."""
    config, base = CoordinatorConfig.read(config_path)
    manifest = read_manifest(Identity(folder=base / config.identity), clock or SystemClock())
    with ReadOnlyHistory(base / config.state / FILE) as history:
        rounds, sessions = history.rounds(), history.sessions()
        unchecked, completed = history.unchecked_sum(), history.completed()
    return {
        "run": manifest.run,
        "unchecked": _unchecked(unchecked, manifest),
        "rounds_planned": manifest.training.rounds,
        "completed": completed,
        "rounds": [row._asdict() for row in rounds],
        "sites": [{"site": site, "last_connected_ms": seen} for site, (_, seen) in sorted(sessions.items())],
    }
