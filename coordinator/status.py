"""What an operator asks a state folder: read-only, also while the coordinator runs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from coordinator.assembly import read_manifest
from coordinator.config import CoordinatorConfig
from coordinator.storage import hint_of
from lazaret.errors import ConfigError
from security.clock import Clock, SystemClock
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.secagg import records

PATIENCE_MS: Final = 120_000


def read_rows(path: Path, query: str, *arguments: object) -> list[tuple[Any, ...]]:
    """One query on the database of a coordinator, running or not."""
    if not path.exists():
        raise ConfigError("there is no database yet", where=str(path), hint="has the coordinator run?")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2.0)) as db:
            return db.execute(query, arguments).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read the database: {error}", where=str(path), hint=hint_of(error)) from error


def _unchecked(path: Path, manifest: Manifest) -> dict[str, Any] | None:
    """The newest sum, while sites have not vouched for it: without that no further one is made."""
    newest = "SELECT round, certificate IS NULL FROM results ORDER BY round DESC LIMIT 1"
    (number, lacking) = next(iter(read_rows(path, newest)), (0, 0))
    if not lacking:
        return None
    ((since,),) = read_rows(path, "SELECT closed_ms FROM rounds WHERE number = ?", number)
    found = [records.decode(data) for (data,) in read_rows(path, "SELECT data FROM records WHERE round = ?", number)]
    vouched = {record.ack.site for record in found if isinstance(record, records.AckSeen)}
    return {
        "round": number,
        "since_ms": since,
        "vouched": sorted(vouched),
        "missing": [site for site in manifest.sites if site not in vouched],
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
    path = base / config.state / "coordinator.sqlite"
    rounds = read_rows(path, "SELECT number, opened_ms, closed_ms, outcome FROM rounds ORDER BY number")
    sites = read_rows(path, "SELECT site, seen_ms FROM sessions ORDER BY site")
    return {
        "run": manifest.run,
        "unchecked": _unchecked(path, manifest),
        "rounds_planned": manifest.training.rounds,
        "completed": sum(row[3] == "published" for row in rounds),
        "rounds": [dict(zip(("number", "opened_ms", "closed_ms", "outcome"), row, strict=True)) for row in rounds],
        "sites": [{"site": site, "last_connected_ms": seen} for site, seen in sites],
    }
