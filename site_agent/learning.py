"""Puts a real learner together: data, model and method. Imports torch, so it is imported late."""

from __future__ import annotations

from npr.methods.base import Method
from security.consortium.enrolment import Identity
from security.consortium.initial_model import InitialModel
from security.consortium.manifest import Manifest
from site_agent.budget import Budget
from site_agent.config import SiteConfig
from site_agent.crew import Crew
from site_agent.data import balance, fingerprint, open_data
from site_agent.trainer import Trainer, recipe_of
from site_agent.vault import Vault


def make_trainer(
    config: SiteConfig,
    manifest: Manifest,
    initial: InitialModel,
    vault: Vault,
    identity: Identity,
    site: str,
    budget: Budget | None = None,
) -> tuple[Trainer, str]:
    """The trainer, and the fingerprint of the data it was given.

    :param budget: under differential privacy; without it such a trainer can evaluate, not train.
    """
    recipe = recipe_of(manifest)
    dataset, data = open_data(config.data, site=site, image_size=recipe.image_size, classes=manifest.model.classes)
    crew = Crew.of(config, manifest, dataset, data)
    key = identity.data_key()
    version = fingerprint(dataset, data, key)
    threads = config.site.threads
    vault.note_data(balance(dataset, data))
    if budget is not None:
        from site_agent.private_trainer import PrivateTrainer

        config.policy.check_private()
        private = PrivateTrainer(
            manifest,
            initial,
            data,
            vault,
            budget=budget,
            version=version,
            data_key=key,
            micro_batch=config.privacy.micro_batch,
            threads=threads,
        )
        return private, version
    config.policy.check_classes(dataset.class_names, data.train.class_counts().tolist())
    work = crew.local_round if crew else Method.local_round
    return Trainer(manifest, initial, data, vault, data_key=key, threads=threads, work=work), version
