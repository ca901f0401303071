"""The same hospital without a federation: same data, model, loss and number of steps, nothing exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.local_federation.sums import manifest_at
from security.identity.pinned_files import pinned_model
from site_agent.config import SiteConfig
from site_agent.trainer.data import open_data


def figures_alone(path: Path, name: str, rounds: int) -> dict[str, Any]:
    """Balanced accuracy and AUC on the test images of the site whose site.toml this is.

    Torch is imported here: who only names this function, to have it called in another process, needs none.
    """
    from npr.metrics import balanced_accuracy, balanced_auc
    from npr.recipe import recipe_of
    from site_agent.trainer.evaluation import train_alone

    config = SiteConfig.read(path)
    manifest = manifest_at(config.identity)
    initial, _ = pinned_model(config.model_file(manifest.model.initial_file), manifest)
    recipe = recipe_of(manifest)
    size, classes, labels = recipe.image_size, manifest.model.classes, recipe.config.labels
    _, data = open_data(config.data, site=name, image_size=size, classes=classes, labels=labels)
    scores = train_alone(manifest, initial, recipe, data, rounds=rounds)
    return {
        "bacc": float(balanced_accuracy(data.test.labels, scores)),
        "bauc": float(balanced_auc(data.test.labels, scores)),
        "images": len(data.train),
        "test_images": len(data.test),
    }
