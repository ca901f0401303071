"""Real site agents that train a small model under differential privacy, on disk and on the bytes of the wire."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npr.config import TrainConfig
from npr.data.generated import ISIC_CLASSES, ISIC_SITES
from npr.model import ModelSpec
from npr.recipe import Recipe
from npr.wire_layout import export
from security.dp.ledger import LedgerState
from security.dp.planner import PrivateSettings
from security.identity.enrolment import Identity
from security.rng import SystemRandomness
from security.secagg import messages
from site_agent.assembly import LearnerFactory
from site_agent.budget import Budget
from site_agent.config import SiteConfig
from site_agent.privacy import PrivatePlan, create_ledger, ledger_files
from site_agent.trainer.training import PrivateTrainer
from tests.support.in_process import in_process
from tests.support.site_world import Dies, SiteWorld

ROUNDS, STEPS, SIZE = 3, 2, 32
SETTINGS = PrivateSettings(steps=STEPS, rate=0.3, prototypes_sigma=8.0, prototypes_every=2, dimensions=8)
RECIPE = Recipe(
    config=TrainConfig(method="fednpr-per", assign="nearest", predict="head", optimizer="sgd", learning_rate=0.05),
    seed=3,
    image_size=SIZE,
    privacy=SETTINGS,
)
SPEC = ModelSpec(architecture="test_efficientnet", num_classes=8, image_size=SIZE, seed=3, norm=RECIPE.norm)
PLAN = f"""
run = "run-1"
[model]
initial = "initial.safetensors"
[training]
rounds = {ROUNDS}
steps = {STEPS}
[timing]
train = 100
[privacy]
epsilon = 20
delta = 0.00001
clip = 1
noise_floor = 1
unit = "patient"
"""
HOSPITALS = ("graz", "linz", "salzburg", "vienna")


@dataclass
class DiesBeforeTraining:
    """The books of a site that is killed when its round is paid for and nothing has been read."""

    budget: Budget

    def __getattr__(self, name: str) -> Any:
        return getattr(self.budget, name)

    def reserve(self, **what: Any) -> Any:
        self.budget.reserve(**what)
        raise Dies


class PrivateWorld(SiteWorld):
    """Hospitals with a ledger each."""

    def __init__(self, folder: Path, *, sites: tuple[str, ...] = HOSPITALS, plan: str = PLAN) -> None:
        super().__init__(folder, sites=sites, plan=plan)
        self.trainers: dict[str, PrivateTrainer] = {}
        for number, site in enumerate(sites):
            path = self.configs[site]
            text = path.read_text().replace("[data]\n", f'[data]\nsite = "{ISIC_SITES[number]}"\nfold = "fold"\n')
            text = text.replace('source = "generated"', 'source = "generated:scale=0.004,sites=4"')
            path.write_text(text.replace("[privacy] ", "[privacy]\n#"))

    def write_model(self) -> None:
        export(self.model_path, SPEC, RECIPE, rounds=ROUNDS, classes=ISIC_CLASSES)

    def make_learner(self, site: str) -> LearnerFactory:
        def make(*given: Any) -> Any:
            learner, fingerprint = in_process(*given)
            assert isinstance(learner.trainer, PrivateTrainer)
            self.trainers[site] = learner.trainer
            return learner, fingerprint

        return make

    def config(self, site: str) -> SiteConfig:
        return SiteConfig.read(self.configs[site])

    def set_privacy(self, site: str, line: str) -> None:
        path = self.configs[site]
        path.write_text(path.read_text().replace("[privacy]\n", f"[privacy]\n{line}\n"))

    def create_ledgers(self) -> None:
        for site in self.configs:
            config = self.config(site)
            plan = PrivatePlan.of(config, self.manifest)
            assert plan is not None
            create_ledger(config, plan, rng=SystemRandomness(), clock=self.clock)


    def book(self, site: str) -> LedgerState:
        """What the ledger on disk says."""
        state = ledger_files(self.config(site)).peek()
        assert state is not None
        return state

    def doom(self, site: str) -> None:
        """The next round of this site ends between the reservation and the data."""
        training = self.trainers[site]._private
        training._books = DiesBeforeTraining(training._books)  # type: ignore[arg-type]

    def work(self, site: str) -> None:
        try:
            super().work(site)
        except Dies:
            self.kill(site)

    def identity(self, site: str) -> Identity:
        return self.base.identity(site)

    def vectors_of(self, site: str) -> int:
        """How many masked vectors this site has begun to send."""
        return len(self.hub.sent_by(site, messages.UploadHeader))
