"""A site's own model, ready to be used: the trained network, its temperature, and prototypes to explain it by.

The agent keeps the network; what belongs to it is made here from the site's own images, once for each model, and kept
beside it. Nothing in this file or in what uses it opens a connection.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.nn import functional

from lazaret import files
from lazaret.errors import ConfigError
from npr.clinical import ClinicalFinding, OperatingPoint, choose_operating_point
from npr.data.dataset import Samples
from npr.deployed import Deployed
from npr.device import Device, open_device, to_host
from npr.methods import registry
from npr.methods.base import Method
from npr.methods.regulariser import Regulariser
from npr.metrics import LEAST_IMAGES, Scores, helpful_temperature, with_temperature
from npr.model import ModelSpec, SplitModel, normalisation
from npr.prototypes import Prototypes
from npr.recipe import Recipe, recipe_of
from npr.wire_layout import build_initial, spec_of
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel, pinned_model
from security.secagg.layout import Vector
from site_agent.config import SiteConfig
from site_agent.trainer.data import fingerprint, open_data, side_rule
from site_agent.trainer.personal_state import PersonalState, SiteRecord
from site_agent.trainer.plugin import load_plugin
from site_agent.trainer.training import TRAINED_ON, Trainer

UNRECORDED: Final = "not recorded"
Which = Literal["best", "newest"]


@dataclass(frozen=True, kw_only=True)
class ModelPlace:
    """What lies on this machine: configuration, manifest, initial model and what the trainer keeps.

    :ivar head_alone: whatever the federation predicts by, here the head does it without prototypes.
    """

    config: SiteConfig
    record: SiteRecord
    initial: InitialModel
    start: Vector
    head_alone: bool = False

    @classmethod
    def open(cls, config: SiteConfig, record: SiteRecord) -> ModelPlace:
        initial, start = pinned_model(config.model_file(record.manifest.model.initial_file), record.manifest)
        if config.site.threads is not None:
            torch.set_num_threads(config.site.threads)
        load_plugin(config, record.manifest.training.method, record.manifest.training.plugin)
        return cls(config=config, record=record, initial=initial, start=start)

    @property
    def site(self) -> str:
        return self.record.site

    @property
    def manifest(self) -> Manifest:
        return self.record.manifest

    @property
    def personal(self) -> PersonalState:
        return PersonalState(self.config.state)

    @cached_property
    def recipe(self) -> Recipe:
        return recipe_of(self.manifest)

    @cached_property
    def spec(self) -> ModelSpec:
        return spec_of(self.manifest.model.architecture, len(self.manifest.model.classes), self.recipe)

    @cached_property
    def method(self) -> Method:
        config = self.recipe.config
        return registry.build(config.changed(predict="head") if self.head_alone else config)

    @cached_property
    def device(self) -> Device:
        """As in training, but in float32: what is shown for a patient is not rounded more than need be."""
        return open_device(self.config.site.computing.model_copy(update={"precision": "float32"}))

    @cached_property
    def trainer(self) -> Trainer:
        """Reads all images of the site."""
        return self._opened[0]

    @property
    def class_names(self) -> tuple[str, ...]:
        return self._opened[1]

    @property
    def fingerprint(self) -> str:
        return self._opened[2]

    @cached_property
    def _opened(self) -> tuple[Trainer, tuple[str, ...], str]:
        model, table = self.manifest.model, self.config.data
        key = self.record.data_key
        rule = side_rule(self.config, self.manifest, key, keep=False)
        dataset, data = open_data(
            table,
            site=self.site,
            image_size=self.recipe.image_size,
            channels=self.recipe.in_channels,
            classes=model.classes,
            rule=rule,
            private=self.manifest.privacy is not None,
            labels=self.recipe.config.labels,
        )
        trainer = Trainer(
            self.manifest,
            self.initial,
            data,
            self.personal,
            data_key=key,
            threads=self.config.site.threads,
            device=self.device,
        )
        return trainer, dataset.class_names, fingerprint(dataset, data, key)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A network of this site after a round. `digest` is over all of its tensors, personal ones included.

    :ivar trained_on: device and precision of this site's last round in it.
    """

    model: SplitModel
    round: int
    which: Which
    digest: str
    trained_on: str = UNRECORDED

    @property
    def sentence(self) -> str:
        """Which one it is, for people."""
        return f"model: the {self.which} of this site, of round {self.round}, {self.digest[:16]}"


def load(place: ModelPlace, which: Which | None = None) -> Trained:
    """The best network by local validation, or the one that the last round gave.

    :param which: None for the best where rounds were validated, else the newest: what every command takes by itself.
    """
    if which is None:
        which = "best" if _best_file(place).exists() else "newest"
    return _best(place) if which == "best" else _newest(place)


def _best_file(place: ModelPlace) -> Path:
    return place.personal.models / "best.safetensors"


def _best(place: ModelPlace) -> Trained:
    path = _best_file(place)
    if not path.exists():
        raise ConfigError(
            "no round has been evaluated yet", where=str(path), hint="let a round pass, or use --model newest"
        )
    content = files.read_private(path)
    model = place.device.placed(build_initial(place.method, place.spec, place.initial.tensors))
    model.load_state_dict(load_tensors(content))
    about = _metadata(content)
    return Trained(
        model=model,
        round=int(about.get("round", 0)),
        which="best",
        digest=digest_of(model),
        trained_on=about.get(TRAINED_ON, UNRECORDED),
    )


def _newest(place: ModelPlace) -> Trained:
    record = place.record
    model = place.trainer.model_after(record.round, place.start if record.state is None else record.state)
    found = place.personal.memory_before(record.round + 1)
    on = UNRECORDED if found is None else _metadata(found[1]).get(TRAINED_ON, UNRECORDED)
    return Trained(model=model, round=record.round, which="newest", digest=digest_of(model), trained_on=on)


def digest_of(model: SplitModel) -> str:
    """SHA-256 over the names and values of all tensors, in order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(to_host(tensor).contiguous().numpy().tobytes())
    return digest.hexdigest()


def companion_name(which: Which) -> str:
    return f"{which}-companion"


@dataclass(frozen=True, kw_only=True)
class Companion:
    """What belongs to one network at this site. Prototypes are made of patients' images and stay here.

    :ivar temperature: None where it does not help on held-back images, or there are too few validation images to see
        that; then probabilities are the network's.
    :ivar points: for each class the operating point that `rule` chose on the validation images, by calibrated
        probabilities; None where there were too few of them.
    """

    digest: str
    class_names: tuple[str, ...]
    temperature: float | None
    validation_images: int
    rule: str
    points: tuple[OperatingPoint | None, ...]
    present: Tensor
    prototypes: Prototypes

    def to_bytes(self) -> bytes:
        about = {
            "digest": self.digest,
            "class_names": list(self.class_names),
            "temperature": self.temperature,
            "validation_images": self.validation_images,
            "rule": self.rule,
            "points": [point and point.to_json() for point in self.points],
        }
        tensors = {"present": self.present, "vectors": self.prototypes.vectors, "owners": self.prototypes.owners}
        stored = {name: to_host(tensor).contiguous().clone() for name, tensor in tensors.items()}
        return save_tensors(stored, {"lazaret": json.dumps(about)})

    @classmethod
    def read(cls, place: ModelPlace, trained: Trained) -> Companion | None:
        """The one on disk, if it belongs to this network and to the rule in `site.toml`."""
        path = place.personal.models / f"{companion_name(trained.which)}.safetensors"
        if not path.exists():
            return None
        content = files.read_private(path)
        about: dict[str, Any] = json.loads(_metadata(content).get("lazaret", "{}"))
        if (about.get("digest"), about.get("rule")) != (trained.digest, place.config.evaluation.operating_point):
            return None
        tensors = {name: place.device.from_host(tensor) for name, tensor in load_tensors(content).items()}
        return cls(
            digest=trained.digest,
            class_names=tuple(about["class_names"]),
            temperature=about["temperature"],
            validation_images=about["validation_images"],
            rule=about["rule"],
            points=tuple(point and OperatingPoint(**point) for point in about["points"]),
            present=tensors["present"],
            prototypes=Prototypes(tensors["vectors"], tensors["owners"]),
        )

    @classmethod
    def make(cls, place: ModelPlace, trained: Trained) -> Companion:
        """One pass over the training images for prototypes, one over the validation images for the rest."""
        site, data = place.trainer.site, place.trainer.data
        prototypes = Regulariser.predicting(site, trained.model)
        made = cls(
            digest=trained.digest,
            class_names=place.class_names,
            temperature=None,
            validation_images=len(data.validation) if data.validation is not None else 0,
            rule=place.config.evaluation.operating_point,
            points=(None,) * len(place.class_names),
            present=site.prior.present.float(),
            prototypes=prototypes,
        )
        if data.validation is None or len(data.validation) < LEAST_IMAGES:
            return made
        scores, held = scores_of(deploy(place, trained, made), data.validation), data.validation
        fitted = helpful_temperature(held.labels, scores, held.units)
        calibrated = scores if fitted is None else with_temperature(scores, fitted)
        points = tuple(
            choose_operating_point(ClinicalFinding.of(held.labels, calibrated, held.units, number), made.rule)
            for number in range(len(made.class_names))
        )
        return replace(made, temperature=fitted, points=points)


def _metadata(content: bytes) -> dict[str, str]:
    """The text in a safetensors header: eight bytes of length, then JSON."""
    size = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    return metadata


def deploy(place: ModelPlace, trained: Trained, companion: Companion, *, calibrated: bool = True) -> Deployed:
    """The module that predicts."""
    mean, std = normalisation(place.spec)
    config, kind = place.recipe.config, place.method.reports[0]
    present = companion.present if config.predict_present_only and kind != "global" else None
    return Deployed(
        method=place.method,
        model=trained.model,
        kind=kind,
        mean=mean,
        std=std,
        temperature=(companion.temperature or 1.0) if calibrated else 1.0,
        present=present,
        prototypes=companion.prototypes,
    )


def scores_of(deployed: Deployed, samples: Samples, *, batch: int = 64) -> Scores:
    """Probabilities of a whole side."""
    parts = [deployed.predict(samples.images[start : start + batch])[0] for start in range(0, len(samples), batch)]
    return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Network and companion together."""

    place: ModelPlace
    trained: Trained
    companion: Companion
    deployed: Deployed

    @classmethod
    def open(
        cls, config: SiteConfig, record: SiteRecord, which: Which | None = None, *, refit: bool = False
    ) -> Predictor:
        return cls.of(ModelPlace.open(config, record), which, refit=refit)

    @classmethod
    def of(cls, place: ModelPlace, which: Which | None = None, *, refit: bool = False) -> Predictor:
        """Load the network; take its companion from disk, or make it and keep it there.

        The head alone has another temperature, so its companion is made anew and not kept.
        """
        trained = load(place, which)
        companion = None if refit or place.head_alone else Companion.read(place, trained)
        if companion is None:
            companion = Companion.make(place, trained)
            if not place.head_alone:
                place.personal.keep_model(companion_name(trained.which), companion.to_bytes())
        return cls(
            place=place, trained=trained, companion=companion, deployed=deploy(place, trained, companion)
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.companion.class_names

    @property
    def many(self) -> bool:
        """Whether an image may have several labels."""
        return self.place.recipe.config.labels == "many"

    def predicted(self, probabilities: NDArray[np.float32]) -> tuple[str, ...]:
        """The class that an image most probably has; or each label with a probability of at least 0.5."""
        if self.many:
            return tuple(name for name, p in zip(self.class_names, probabilities, strict=True) if p >= 0.5)
        return (self.class_names[int(probabilities.argmax())],)

    def nearest(self, features: Tensor) -> list[tuple[str, int, float]]:
        """For each image the prototype it lies closest to: class, number of the sub-cluster from 1, cosine."""
        prototypes = self.companion.prototypes
        cosine, place = (functional.normalize(features, dim=1) @ to_host(prototypes.vectors).T).max(dim=1)
        owners, names = to_host(prototypes.owners).tolist(), self.class_names
        if self.many:
            names = tuple(f"{prefix}{name}" for name in names for prefix in ("no ", ""))
        return [
            (names[owners[at]], at - owners.index(owners[at]) + 1, near)
            for at, near in zip(to_host(place).tolist(), to_host(cosine).tolist(), strict=True)
        ]
