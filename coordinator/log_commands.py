"""`coordinator log-export`, `log-note`, `log-erase`: what people do with the privacy log, recorded in it."""

from __future__ import annotations

from pathlib import Path

from coordinator.config import CoordinatorConfig
from coordinator.options import config_option
from security.audit.keeper import keeper_commands
from security.audit.log import AuditLog
from security.clock import SystemClock
from security.consortium.enrolment import Identity
from security.consortium.views import audit_roster
from security.rng import SystemRandomness


def open_for_people(config_path: Path) -> AuditLog:
    """This coordinator's log, if no coordinator holds it."""
    from coordinator.assembly import read_manifest

    config, base = CoordinatorConfig.read(config_path)
    clock, identity = SystemClock(), Identity(folder=base / config.identity)
    manifest = read_manifest(identity, clock)
    roster = audit_roster(manifest)
    keys = identity.folder / "keys" / "epochs"
    party = roster.by_name[manifest.coordinator.id]
    return AuditLog.open(
        base / config.state / "log", keys, party=party, roster=roster, clock=clock, rng=SystemRandomness()
    )


log_commands = keeper_commands(open_for_people, config_option)
