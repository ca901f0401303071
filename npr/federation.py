"""A federation in one process: the same methods and sums as in a real one, without a network."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lazaret.errors import ConfigError, DataError
from npr.config import TrainConfig
from npr.data.dataset import FederatedDataset, Samples, SiteData
from npr.device import PROCESSOR, Device, to_host
from npr.methods import registry
from npr.methods.base import Kind
from npr.methods.site import Site
from npr.metrics import Predictions
from npr.model import ModelSpec, SplitModel
from npr.params import Aggregator, Contribution, ParameterManifest, PlainAggregator, sum_extras
from npr.training import LocalReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One round: what each site did, how many values each sent, and the total weight."""

    round: int
    sites: Mapping[str, LocalReport]
    vector_size: int
    weight: int

    @property
    def loss(self) -> float:
        """Mean training loss over all images."""
        return sum(r.loss_sum for r in self.sites.values()) / max(1, sum(r.samples for r in self.sites.values()))

    @property
    def seconds(self) -> float:
        return sum(report.seconds for report in self.sites.values())


def check_sites(dataset: FederatedDataset) -> None:
    """:raises DataError: naming a site that cannot train."""
    for site in dataset.sites:
        if len(site.train) < 2:
            raise DataError(
                f"site {site.name} has {len(site.train)} training images in fold {dataset.fold}",
                where=dataset.name,
                hint="batch normalisation needs two: leave the site out, or divide the images differently",
            )


class Federation:
    """Sites, the global model, and rounds between them. `round` counts the rounds that are done."""

    def __init__(
        self,
        *,
        dataset: FederatedDataset,
        spec: ModelSpec,
        config: TrainConfig,
        seed: int = 0,
        aggregator: Aggregator | None = None,
        device: Device = PROCESSOR,
    ) -> None:
        if spec.num_classes != dataset.num_classes or spec.in_channels != dataset.channels:
            raise ConfigError(
                f"a model of {spec.num_classes} classes and {spec.in_channels} channels does not fit data of "
                f"{dataset.num_classes} classes and {dataset.channels} channels",
                where=dataset.name,
            )
        check_sites(dataset)
        self.dataset, self.spec, self.config, self.seed = dataset, spec, config, seed
        self.method = registry.build(config)
        self.aggregator = aggregator or PlainAggregator()
        self.device = device
        self.model = device.placed(self.method.build_model(spec))
        self.round = 0
        self.finished = False
        self.sites = tuple(
            Site.of(site.name, site.train, copy.deepcopy(self.model), spec, config, seed=seed, device=device)
            for site in dataset.sites
        )

    def run_round(self) -> RoundReport:
        """Download, local work at every site, sum, next global model."""
        if self.finished:
            raise ConfigError("this federation is finished: its sites have been fine-tuned")
        number = self.round + 1
        manifest = self.method.manifest(self.model, number)
        reports, contributions = {}, []
        for site in self.sites:
            self._download(site.model)
            reports[site.name] = self._local_round(site, number)
            if manifest.size:
                contributions.append(self._contribution(site, number))
        weight = 0
        if contributions:
            total, weight = self.aggregator.sum(contributions)
            extras = sum_extras(self.aggregator, contributions)
            self.method.server_step(self.model, manifest, (total / weight).astype(np.float32), extras)
        self.round = number
        return RoundReport(round=number, sites=reports, vector_size=manifest.size, weight=weight)

    def _local_round(self, site: Site, number: int) -> LocalReport:
        return self.method.local_round(site, number)

    def _contribution(self, site: Site, number: int) -> Contribution:
        return self.method.contribution(site, number)

    def finish(self) -> None:
        """Load the last aggregate at every site and let the method fine-tune there."""
        for site in self.sites:
            self._download(site.model)
            self.method.finish(site, self.round)
        self.finished = True

    def _download(self, model: SplitModel) -> None:
        """Take over what the round before made; before the first, every site holds the initial model already."""
        if self.round:
            manifest = ParameterManifest.of(self.model, self.method.broadcasts(self.round))
            manifest.load(model, manifest.flatten(self.model))

    def evaluate(self, kind: Kind, side: str = "test") -> list[Predictions]:
        """Predictions of every site on its own images of `side`, by the model that `kind` names."""
        if kind == "local" and self.finished:
            raise ConfigError("locally updated models no longer exist once the federation is finished")
        return [
            Predictions.of(
                site.name,
                samples := _side(data, side),
                self.method.predictor(site, self._model_of(site, kind), kind)(samples),
                fold=self.dataset.fold,
                seed=self.seed,
            )
            for site, data in zip(self.sites, self.dataset.sites, strict=True)
        ]

    def _model_of(self, site: Site, kind: Kind) -> SplitModel:
        if kind == "global":
            return self.model
        if kind == "local" or self.finished:
            return site.model
        personal = copy.deepcopy(site.model)
        self._download(personal)
        return personal

    # A killed run continues from here.

    def checkpoint(self, path: str | Path) -> None:
        """Write everything to one safetensors file, replaced in one step; its header holds the JSON part."""
        tensors = {f"global/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"server/{name}": tensor for name, tensor in self.method.server_memory.items()}
        for number, site in enumerate(self.sites):
            tensors |= {f"site{number}/{name}": tensor for name, tensor in site.memory().items()}
        path = Path(path)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        os.close(handle)
        try:
            stored = {name: to_host(tensor).contiguous().clone() for name, tensor in tensors.items()}
            save_file(stored, temporary, metadata={"lazaret": json.dumps(self._identity() | self._progress())})
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def restore(self, path: str | Path) -> None:
        """The inverse of `checkpoint`; a file of another federation is refused."""
        with safe_open(str(path), framework="pt") as file:
            header: dict[str, Any] = json.loads((file.metadata() or {}).get("lazaret", "{}"))
            mine = self._identity()
            differing = [key for key, value in mine.items() if header.get(key) != value]
            if differing:
                raise ConfigError(
                    f"the checkpoint belongs to another run (differs in {', '.join(differing)})", where=str(path)
                )
            parts: dict[str, dict[str, Tensor]] = {}
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                owner, _, rest = name.partition("/")
                parts.setdefault(owner, {})[rest] = file.get_tensor(name)
        self.model.load_state_dict(parts["global"])
        self.method.server_memory = parts.get("server", {})
        for number, site in enumerate(self.sites):
            site.remember(parts[f"site{number}"])
        self.round, self.finished = header["round"], header["finished"]

    def _identity(self) -> dict[str, Any]:
        return {
            "config": self.config.config_hash,
            "spec": asdict(self.spec),
            "seed": self.seed,
            "data": [self.dataset.name, self.dataset.fold, self.dataset.fingerprint],
            "sites": [[site.name, len(site.train)] for site in self.sites],
        }

    def _progress(self) -> dict[str, Any]:
        return {"round": self.round, "finished": self.finished, "torch": torch.__version__}


def _side(data: SiteData, side: str) -> Samples:
    samples = {"train": data.train, "test": data.test, "validation": data.validation}[side]
    if samples is None:
        raise DataError(f"site {data.name} has no {side} images")
    return samples
