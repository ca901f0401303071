"""What an operator asks a state folder: read-only, also while the coordinator runs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from coordinator.assembly import read_manifest
from coordinator.config import CoordinatorConfig
from security.clock import SystemClock
from security.consortium.enrolment import Identity
from security.errors import ConfigError, DataError
from security.secagg.state import state_hash, unflatten


def _read(path: Path, query: str, *arguments: object) -> list[tuple[Any, ...]]:
    if not path.exists():
        raise ConfigError("there is no database yet", where=str(path), hint="has the coordinator run?")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2.0)) as db:
            return db.execute(query, arguments).fetchall()
    except sqlite3.OperationalError as error:
        raise ConfigError(f"cannot read the database: {error}", where=str(path)) from error


def overview(config_path: Path) -> dict[str, Any]:
    """Rounds with their outcomes, sites with their last contact."""
    config, base = CoordinatorConfig.read(config_path)
    manifest = read_manifest(Identity(folder=base / config.identity), SystemClock())
    path = base / config.state / "coordinator.sqlite"
    rounds = _read(path, "SELECT number, opened_ms, closed_ms, outcome FROM rounds ORDER BY number")
    sites = _read(path, "SELECT site, seen_ms FROM sessions ORDER BY site")
    return {
        "run": manifest.run,
        "rounds_planned": manifest.training.rounds,
        "completed": sum(row[3] == "published" for row in rounds),
        "rounds": [dict(zip(("number", "opened_ms", "closed_ms", "outcome"), row, strict=True)) for row in rounds],
        "sites": [{"site": site, "last_connected_ms": seen} for site, seen in sites],
    }


def export_model(config_path: Path, target: Path, number: int | None) -> dict[str, Any]:
    """The shared part of the model after a round, by tensor name."""
    config, base = CoordinatorConfig.read(config_path)
    manifest = read_manifest(Identity(folder=base / config.identity), SystemClock())
    state = base / config.state
    query = "SELECT round, state_hash FROM results WHERE ? IS NULL OR round = ? ORDER BY round DESC LIMIT 1"
    found = _read(state / "coordinator.sqlite", query, number, number)
    if not found:
        raise DataError("there is no result of this round" if number else "there is no result yet", where=str(state))
    place, digest = found[0]
    path = state / "models" / f"{digest.hex()}.safetensors"
    vector = load_file(path)["state"]
    if state_hash(vector) != digest:
        raise DataError("model does not have the hash in its name", where=str(path))
    about = {"federation": manifest.federation, "run": manifest.run, "round": str(place), "state_hash": digest.hex()}
    tensors = {name: part.copy() for name, part in unflatten(manifest.aggregation.layout, vector).items()}
    save_file(tensors, target, metadata=about)
    return {"round": place, "state_hash": digest.hex()}
