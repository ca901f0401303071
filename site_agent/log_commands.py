"""`site-agent log-export`, `log-note`, `log-erase`: what people do with the privacy log, recorded in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from security.audit.keeper import keeper_commands
from security.audit.log import AuditLog
from security.clock import SystemClock
from security.consortium.enrolment import Identity
from security.consortium.views import audit_roster
from security.rng import SystemRandomness
from site_agent.config import SiteConfig
from site_agent.options import also_config


def open_for_people(config_path: Path) -> AuditLog:
    """This site's log, if no agent holds it. The keys in it are those of the manifest it was last used with."""
    from site_agent.assembly import read_membership

    config, clock = SiteConfig.read(config_path), SystemClock()
    identity = Identity(folder=config.identity)
    site, manifest = read_membership(identity, clock)
    roster = audit_roster(manifest)
    keys = identity.folder / "keys" / "epochs"
    party = roster.by_name[site]
    return AuditLog.open(config.state / "log", keys, party=party, roster=roster, clock=clock, rng=SystemRandomness())


def _with_config(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def run(config_path: Path, own_config: Path | None, **told: Any) -> None:
        command(config_path=own_config or config_path, **told)

    return click.pass_obj(also_config(run))


log_commands = keeper_commands(open_for_people, _with_config)
