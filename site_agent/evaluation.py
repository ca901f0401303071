"""`site-agent evaluate`: this site's model on its own images, from what lies in the state directory."""

from __future__ import annotations

from typing import Any

from security.clock import SystemClock
from security.consortium.enrolment import Identity
from security.consortium.initial_model import pinned_model
from security.consortium.views import aggregation_policy
from security.rng import SystemRandomness
from security.secagg.journal import Journal
from security.secagg.wal import read_records
from site_agent.assembly import read_membership
from site_agent.config import SiteConfig
from site_agent.learning import make_trainer
from site_agent.vault import Vault


def evaluate_site(config: SiteConfig, *, model: str = "newest") -> dict[str, Any]:
    """Figures of the newest personal model, or of the one that was best on the validation images."""
    clock = SystemClock()
    identity = Identity(folder=config.identity)
    site, manifest = read_membership(identity, clock)
    initial, start = pinned_model(config.initial_model, manifest)
    vault = Vault(config.state, site=site, sealing_key=identity.sealing_key(), randomness=SystemRandomness())
    trainer, _ = make_trainer(config, manifest, initial, vault, identity, site)
    journal = Journal.replay(read_records(vault.wal))
    policy = aggregation_policy(manifest, now_ms=clock.now_ms())
    head = journal.head(policy)
    if model == "best":
        return trainer.judge_best() | {"site": site, "model": model}
    state = start if journal.last is None else vault.state(policy.layout, head.state_hash)
    return trainer.judge(head.round, state) | {"site": site, "model": model}
