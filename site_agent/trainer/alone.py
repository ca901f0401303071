"""The same hospital without a federation: same images, model, loss and number of rounds, nothing exchanged.

What it gives is what a federation must be compared with: `site-agent evaluate --alone` shows it and keeps it for the
model card, and the demo prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npr.data.dataset import SiteData
from npr.device import PROCESSOR, Device
from npr.methods import registry
from npr.methods.local import Local
from npr.methods.site import Site
from npr.metrics import Scores
from npr.model import normalisation
from npr.recipe import Recipe
from npr.wire_layout import build_initial, spec_of
from security.identity.initial_model import InitialModel
from security.identity.manifest import Manifest


def train_alone(
    manifest: Manifest,
    initial: InitialModel,
    recipe: Recipe,
    data: SiteData,
    *,
    rounds: int,
    device: Device = PROCESSOR,
    tell: Callable[[int, int], Any] | None = None,
) -> Scores:
    """Probabilities for the test images, of a model that has seen this hospital's training images only."""
    spec = spec_of(manifest.model.architecture, len(manifest.model.classes), recipe)
    method = Local(recipe.config, name="local", npr=registry.get(manifest.training.method).npr)
    mean, std = normalisation(spec)
    model = build_initial(method, spec, initial.tensors)
    site = Site(
        name=data.name,
        train=data.train,
        model=model,
        config=recipe.config,
        seed=recipe.seed,
        mean=mean,
        std=std,
        device=device,
    )
    for number in range(1, rounds + 1):
        method.local_round(site, number)
        if tell is not None:
            tell(number, rounds)
    return method.predictor(site, site.model, "local")(data.test)
