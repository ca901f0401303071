"""Puts a real learner together: data, model and method. Imports torch, so it is imported late."""

from __future__ import annotations

from security.consortium.enrolment import Identity
from security.consortium.initial_model import InitialModel
from security.consortium.manifest import Manifest
from site_agent.config import SiteConfig
from site_agent.data import fingerprint, open_data
from site_agent.trainer import Trainer, recipe_of
from site_agent.vault import Vault


def make_trainer(
    config: SiteConfig, manifest: Manifest, initial: InitialModel, vault: Vault, identity: Identity, site: str
) -> tuple[Trainer, str]:
    """The trainer, and the fingerprint of the data it was given."""
    recipe = recipe_of(manifest)
    dataset, data = open_data(config.data, site=site, image_size=recipe.image_size, classes=manifest.model.classes)
    key = identity.data_key()
    trainer = Trainer(manifest, initial, data, vault, data_key=key, threads=config.site.threads)
    return trainer, fingerprint(dataset, data, key)
