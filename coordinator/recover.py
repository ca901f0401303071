"""`coordinator recover`: an empty state folder takes a run up from what a site holds and the sites have signed.

For a coordinator whose disk is lost. The newest covered result becomes the only link of the chain: sites that have it
continue from there, and sites that are behind get it as a whole state. What is gone is said: strikes and exclusions,
and the sums of older rounds. docs/operators.md, "Losing the coordinator".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.assembly import read_manifest
from coordinator.config import CoordinatorConfig
from coordinator.storage import Storage
from lazaret.errors import ConfigError
from security.clock import Clock, SystemClock
from security.identity.enrolment import Identity
from security.identity.membership import aggregation_policy
from security.secagg.handover import Handover


def recover(
    config_path: Path, file: Path, *, completed: int | None = None, clock: Clock | None = None
) -> dict[str, Any]:
    """Put a handover into the state folder, which must not have a result yet.

    :param completed: how many models the run has published, if the file's count is wrong.
    """
    clock = clock or SystemClock()
    config, base = CoordinatorConfig.read(config_path)
    manifest = read_manifest(Identity(folder=base / config.identity), clock)
    found = Handover.read(file, aggregation_policy(manifest, now_ms=clock.now_ms()))
    done = found.completed if completed is None else completed
    if not 0 < done <= found.round:
        raise ConfigError(f"round {found.round} cannot be the model number {done}", where="--completed")
    storage = Storage(base / config.state, keep_models=config.storage.keep_models)
    try:
        if storage.history.links():
            raise ConfigError(
                "this coordinator has results of its own", where=str(storage.folder), hint="recover is for a lost state"
            )
        storage.belongs_to(manifest.federation, manifest.run)
        storage.recover(found, completed=done, now_ms=clock.now_ms())
    finally:
        storage.close()
    state_hash = found.covered.result.state_hash.hex()
    return {"run": manifest.run, "round": found.round, "completed": done, "state_hash": state_hash}
