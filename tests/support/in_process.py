"""A trainer in the process of the test itself: the same learning, and nothing between it and the agent."""

from __future__ import annotations

from typing import Any

from scripts.local_federation.known_updates import sees_no_image
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel
from security.log.writer import AuditLog
from security.secagg.layout import Vector
from site_agent.budget import Budget
from site_agent.config import SiteConfig
from site_agent.contribution import LocalResult
from site_agent.state_dir import StateDir
from site_agent.trainer.personal_state import PersonalState
from site_agent.trainer.training import Trainer, make_trainer
from site_agent.trainer_start import note_data


class InProcess:
    """A learner of an agent."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def train(self, round_number: int, state: Vector) -> LocalResult:
        return self.trainer.train(round_number, state)

    def evaluate(self, round_number: int, state: Vector) -> dict[str, Any]:
        return self.trainer.evaluate(round_number, state)

    def adopted(self, manifest: Manifest) -> None:
        pass

    def close(self) -> None:
        pass


def in_process(
    config: SiteConfig,
    manifest: Manifest,
    initial: InitialModel,
    state_dir: StateDir,
    identity: Identity,
    site: str,
    budget: Budget | None,
    log: AuditLog | None = None,
) -> tuple[InProcess, str]:
    """In the place of `site_agent.trainer_start.start_trainer`."""
    sees_no_image(log)
    trainer, ready = make_trainer(
        config,
        manifest,
        initial,
        PersonalState(config.state),
        site=site,
        data_key=identity.data_key(),
        best=state_dir.best_score,
        books=budget,
    )
    if budget is not None:
        budget.take_version(ready.version)
    note_data(state_dir, ready, private=manifest.privacy is not None)
    return InProcess(trainer), ready.version
