"""A federation in memory whose sites really learn: real agents, logs and models on disk, and no network."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from npr.config import TrainConfig
from npr.data.generated import ISIC_CLASSES
from npr.model import ModelSpec
from npr.recipe import Recipe
from npr.wire_layout import export
from security.clock import SystemClock
from site_agent.assembly import LearnerFactory
from tests.support import site_world
from tests.support.consortium_world import NOW
from tests.support.in_process import in_process
from tests.support.site_world import SiteWorld

SIZE = 32
ARCHITECTURE = "test_efficientnet"
SOURCE = "generated:balanced=16,sites=3"
ROUNDS = 3
PLAN = f"""
run = "run-1"
[model]
initial = "initial.safetensors"
[training]
rounds = {ROUNDS}
steps = 60
[timing]
train = 100
"""


class LearningWorld(SiteWorld):
    """`SiteWorld` with the learner that the command uses."""

    def make_learner(self, site: str) -> LearnerFactory:
        return in_process


@dataclass(frozen=True)
class Trained:
    """What is left on disk when the agents have stopped."""

    world: LearningWorld
    config: Path

    @property
    def state(self) -> Path:
        return self.config.parent / "state"


def train(
    folder: Path,
    *,
    rounds: int = 2,
    settings: dict[str, object] | None = None,
    plan: str = PLAN,
    prepare: Callable[[Path], None] = lambda config: None,
) -> Trained:
    """Let three sites train some rounds, and stop. `graz` has the images of the first drawn hospital.

    :param prepare: changes the configuration of `graz`.
    """
    config = TrainConfig.parse({"method": "fednpr-per", "batch_size": 32, "learning_rate": 0.003, **(settings or {})})
    recipe = Recipe(config=config, image_size=SIZE, seed=1)
    spec = ModelSpec(architecture=ARCHITECTURE, num_classes=8, image_size=SIZE, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        write = partial(export, spec=spec, recipe=recipe, rounds=ROUNDS, classes=ISIC_CLASSES)
        patch.setattr(site_world, "write_wide_model", write)
        patch.setattr(SystemClock, "now_ms", lambda self: NOW)
        world = LearningWorld(folder, plan=plan)
        for number, site in enumerate(world.configs, start=1):
            # A site's training is seeded by this key too; drawn anew, no figure of a test would be the same twice.
            path = world.base.identity(site).folder / "keys" / "data.key"
            path.write_bytes(base64.b64encode(bytes([number]) * 32))
        for name, path in zip(("bcn", "vidir_molemax", "vidir_modern"), world.configs.values(), strict=True):
            text = path.read_text().replace('source = "generated"', f'source = "{SOURCE}"\nsite = "{name}"')
            path.write_text(text.replace("# validation = 0.1", "validation = 0.25 #"))
        prepare(world.configs["graz"])
        world.start_all()
        for _ in range(rounds):
            world.run_round()
        for site in list(world.agents):
            world.counts[site].close()  # the last reading, and the log is signed
            world.kill(site)
    return Trained(world, world.configs["graz"])
