"""MOON (Li et al. 2021): representations are pulled to the received model's, pushed from the site's previous ones."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from npr.data.loader import Batch
from npr.device import to_host
from npr.methods.base import EVERYTHING, Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site
from npr.model import ModelSpec, SplitModel, build_model, feature_width, linear
from npr.seeds import derive
from npr.training import LocalReport

_PREVIOUS = "previous/"


class MoonOptions(MethodOptions):
    """`mu` weighs the contrast, `tau` is its temperature, `width` the width of the projection."""

    mu: float = Field(default=1.0, ge=0.0)
    tau: float = Field(default=0.5, gt=0.0)
    width: int = Field(default=256, ge=1)


def contrast(current: Tensor, received: Tensor, previous: Tensor, tau: float) -> Tensor:
    """Mean of -log of the share that the received model's representation takes against the previous model's."""
    positive = functional.cosine_similarity(current, received)
    negative = functional.cosine_similarity(current, previous)
    pairs = torch.stack([positive, negative], dim=1) / tau
    return functional.cross_entropy(pairs, torch.zeros(len(pairs), dtype=torch.int64, device=pairs.device))


@register("moon+npr", "MOON with non-parametric regularisation", npr=True)
@register("moon", "contrast between the received and the site's previous representations")
class Moon(Method):
    """The head sits on a projection, which is part of the model and shared. NPR acts on the features before it."""

    Options = MoonOptions
    options: MoonOptions
    one_label: ClassVar[str] = ""
    shared: ClassVar[frozenset[str]] = EVERYTHING | {"projection"}

    def build_model(self, spec: ModelSpec) -> SplitModel:
        model = build_model(spec)
        inputs, width = feature_width(model.extractor), self.options.width
        model.projection = nn.Sequential(
            linear(inputs, width, derive(spec.seed, "projection", 0)),
            nn.ReLU(inplace=True),
            linear(width, width, derive(spec.seed, "projection", 1)),
        )
        model.head = linear(width, spec.num_classes, derive(spec.seed, "head"))
        return model

    def begin_round(self, site: Site, round_number: int) -> None:
        super().begin_round(site, round_number)
        site.within_round["received"] = _frozen(site.model)
        # A site without a previous model, as in the first round, has nothing to be pushed from.
        if any(name.startswith(_PREVIOUS) for name in site.kept):
            previous = _frozen(site.model)
            previous.load_state_dict(
                {name.removeprefix(_PREVIOUS): t for name, t in site.kept.items() if name.startswith(_PREVIOUS)}
            )
            site.within_round["previous"] = previous

    def work(self, site: Site, round_number: int) -> LocalReport:
        report = super().work(site, round_number)
        site.kept |= {_PREVIOUS + name: to_host(tensor.clone()) for name, tensor in site.model.state_dict().items()}
        return report

    def penalty(self, site: Site, batch: Batch, features: Tensor, logits: Tensor) -> Tensor | float:
        del logits
        if "previous" not in site.within_round:
            return 0.0
        with torch.no_grad():
            received, previous = (
                model.represent(model.features(batch.images))
                for model in (site.within_round["received"], site.within_round["previous"])
            )
        return self.options.mu * contrast(site.model.represent(features), received, previous, self.options.tau)


def _frozen(model: SplitModel) -> SplitModel:
    """A copy in eval mode: its running statistics do not change, and no gradient is asked of it."""
    return copy.deepcopy(model).eval().requires_grad_(False)
