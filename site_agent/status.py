"""What `site-agent status` shows: read from the state directory, whether or not the agent is running."""

from __future__ import annotations

from typing import Any

from security.clock import Clock, SystemClock
from security.identity.enrolment import Identity
from security.identity.membership import aggregation_policy
from security.log.store import LogFolder
from security.rng import SystemRandomness
from security.secagg.site.checks import updates_left
from security.secagg.site.journal import Journal, NewestResult
from site_agent.assembly import read_membership
from site_agent.config import SiteConfig
from site_agent.privacy import budget_status
from site_agent.state_dir import Vault
from site_agent.state_writer import read_records


def overview(config: SiteConfig, clock: Clock | None = None) -> dict[str, Any]:
    clock = clock or SystemClock()
    identity = Identity(folder=config.identity)
    site, manifest = read_membership(identity, clock, dated=False)
    vault = Vault(config.state, site=site, sealing_key=identity.sealing_key(), randomness=SystemRandomness())
    journal = Journal.replay(read_records(vault.wal))
    head = journal.head(aggregation_policy(manifest, now_ms=clock.now_ms()))
    heads = LogFolder(vault.log).checkpoint_sizes() if vault.log.exists() else []
    return {
        "site": site,
        "federation": manifest.federation,
        "manifest_version": manifest.version,
        "run": manifest.run,
        "round": head.round,
        "model": head.state_hash.hex(),
        "vouched": head.vouched,
        "update_of_round": journal.update.round if journal.update else None,
        "stopped": journal.stopped,
        "waits_for_operator": _waits_for_operator(journal, head, private=manifest.privacy is not None),
        "evidence": sorted(str(path) for path in vault.evidence.glob("*")),
        "log": str(vault.log),
        "log_size": heads[-1] if heads else 0,
        "metrics": vault.read_metrics(),
        "privacy": budget_status(config, manifest),
    }


def _waits_for_operator(journal: Journal, head: NewestResult, *, private: bool) -> bool:
    """Whether this site sends nothing more on its model before `site-agent permit`."""
    return not private and journal.uploaded_on == head.state_hash and updates_left(journal) == 0
