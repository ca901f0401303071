"""A10: "one step on one image, with a huge learning rate", for the victim alone or for all.

The attacker's configuration makes the others' updates zero and the victim's a picture. Sites train, and join an
aggregation, only under a configuration that the consortium listed. And whoever knows configuration and model cannot
repeat a site's training on images that it guesses, to compare: the draws come from a key of the site.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lazaret.errors import PolicyViolation
from npr.config import TrainConfig
from npr.data.generated import ISIC_CLASSES
from npr.data.sources import open_dataset
from npr.model import ModelSpec
from npr.recipe import Recipe
from npr.wire_layout import export
from security.identity.pinned_files import pinned_model
from security.secagg import fixed_point, messages, statements
from security.secagg.site import checks
from site_agent.trainer import training
from site_agent.trainer.isolation import made
from site_agent.trainer.personal_state import PersonalState
from tests.support.consortium_world import World
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil

CHOSEN = b"one image, one step, rate one...".ljust(32, b".")[:32]


def one_image_for_all() -> EvilCoordinator:
    run = evil()
    run.config_hash = CHOSEN
    layout = run.policy.layout
    zero = fixed_point.encode(layout, np.zeros(layout.state_words, dtype=np.float32), weight=1).words
    updates = {name: words if name == VICTIM else zero for name, words in run.updates(1).items()}
    run.begin_round(updates)
    run.spoils.inputs |= {(1, name): words for name, words in updates.items() if name != VICTIM}
    run.launch(run.plan())
    return run


def test_a_configuration_that_is_not_listed() -> None:
    run = one_image_for_all()
    for name in run.honest:
        assert_refused(run, name, PolicyViolation, "check_plan_config")
    assert_safe(run)


def test_a_configuration_that_is_not_listed_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_config", lambda *_: None)
    assert_recovered(one_image_for_all())


def test_another_configuration_for_one_site() -> None:
    run = evil()

    def change(plan: messages.Plan, site: str) -> messages.Plan:
        context = replace(plan.context, config_hash=CHOSEN)
        return replace(plan, context=context, signature=run.core.signer.sign(statements.plan(context)))

    run.change(messages.Plan, change, to=VICTIM)
    run.open_round()
    run.launch(run.plan())
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_config")
    assert_safe(run)


def test_a_listed_configuration_that_the_update_was_not_trained_under() -> None:
    run = evil(wide=False)
    run.machine().core.mandate.policy = replace(run.policy, config_hashes=run.policy.config_hashes | {CHOSEN})
    run.open_round()
    run.launch(run.plan(config_hash=CHOSEN))
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_config")
    run.check_promises()


# Training repeated on guessed images. The guess is right: the attacker has the victim's own images, the configuration,
# the model and the public seed, and lacks the site's key alone.

SIZE, SEED = 16, 4
PLAN = """
run = "run-1"
[model]
initial = "initial.safetensors"
[training]
rounds = 3
steps = 60
"""


def update_and_guess(folder: Path) -> tuple[bytes, bytes]:
    world = World.make(folder)
    path = world.authority.folder / "initial.safetensors"
    recipe = Recipe(config=TrainConfig(method="fedavg", batch_size=16), seed=SEED, image_size=SIZE)
    spec = ModelSpec(architecture="test_efficientnet", num_classes=8, image_size=SIZE, seed=SEED)
    export(path, spec, recipe, rounds=3, classes=ISIC_CLASSES)
    world.write_plan(PLAN)
    manifest = world.publish()
    images = open_dataset("generated:scale=0.005,sites=3", fold="fold", image_size=SIZE).sites[1]
    initial, model = pinned_model(path, manifest)
    found = []
    for name, key in (("victim", b"k" * 32), ("attacker", bytes(32))):
        state = PersonalState(folder / name)
        made(state.memory, state.models)
        found.append(training.Trainer(manifest, initial, images, state, data_key=key).train(1, model).update.tobytes())
    return found[0], found[1]


def test_training_cannot_be_repeated_on_guessed_images(tmp_path: Path) -> None:
    update, guess = update_and_guess(tmp_path)
    assert update != guess


def test_training_on_guessed_images_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the public seed for everybody's draws, a right guess gives the update bit for bit."""
    monkeypatch.setattr(training, "secret_seed", lambda seed, key: seed)
    update, guess = update_and_guess(tmp_path)
    assert update == guess
