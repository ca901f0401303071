"""The same hospital without a federation: same data, model, loss and number of steps, nothing exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.local_federation.sums import manifest_at
from security.identity.initial_model import pinned_model
from site_agent.config import SiteConfig
from site_agent.trainer.data import open_data


def train_alone(path: Path, name: str, rounds: int) -> dict[str, Any]:
    """Balanced accuracy and AUC on the test images of the site whose site.toml this is.

    Torch is imported here: who only names this function, to have it called in another process, needs none.
    """
    from npr.methods import registry
    from npr.methods.local import Local
    from npr.methods.site import Site
    from npr.metrics import balanced_accuracy, balanced_auc
    from npr.model import normalisation
    from npr.wire_layout import build_initial, spec_of
    from site_agent.trainer.training import recipe_of

    config = SiteConfig.read(path)
    manifest = manifest_at(config.identity)
    initial, _ = pinned_model(config.initial_model, manifest)
    recipe = recipe_of(manifest)
    _, data = open_data(config.data, site=name, image_size=recipe.image_size, classes=manifest.model.classes)
    spec = spec_of(manifest.model.architecture, len(manifest.model.classes), recipe)
    method = Local(recipe.config, name="local", npr=registry.get(manifest.training.method).npr)
    mean, std = normalisation(spec)
    model = build_initial(method, spec, initial.tensors)
    site = Site(
        name=data.name, train=data.train, model=model, config=recipe.config, seed=recipe.seed, mean=mean, std=std
    )
    for number in range(1, rounds + 1):
        method.local_round(site, number)
    scores = method.predictor(site, site.model, "local")(data.test)
    return {
        "bacc": float(balanced_accuracy(data.test.labels, scores)),
        "bauc": float(balanced_auc(data.test.labels, scores)),
        "images": len(data.train),
        "test_images": len(data.test),
    }
