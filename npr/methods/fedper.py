"""FedPer (Arivazhagan et al. 2019): the extractor is shared, the head is a site's own."""

from __future__ import annotations

from typing import ClassVar

import torch

from npr.device import number, to_host
from npr.methods.base import EVERYTHING, FineTuning, Method
from npr.methods.registry import register
from npr.methods.regulariser import cluster
from npr.methods.site import Site


@register("fedper", "shared extractor, personal head, no regularisation")
class FedPer(Method):
    """The extractor is averaged; the head is trained and kept at the site.

    Up to round `personal_after` the head is shared, as in FedAvg: small sites then start their own head from one that
    has seen every class. From the round after, `shares` no longer names it. With `personal_start = "prototypes"` the
    first personal head is made of the site's prototypes instead of taken over.
    """

    Options = FineTuning
    shared: ClassVar[frozenset[str]] = EVERYTHING
    personal: ClassVar[bool] = True
    one_label: ClassVar[str] = ""

    def shares(self, round_number: int) -> frozenset[str]:
        shared = super().shares(round_number)
        return shared if round_number <= self.config.personal_after else shared - {"head"}

    def begin_round(self, site: Site, round_number: int) -> None:
        super().begin_round(site, round_number)
        if site.config.personal_start == "prototypes" and round_number == site.config.personal_after + 1:
            head_from_prototypes(site, round_number)


@torch.no_grad()
def head_from_prototypes(site: Site, round_number: int) -> None:
    """Make the rows of the classes a site has of its prototypes, so that logits start as cosine / temperature.

    Cosine to the mean of a class's prototypes, with features of average length; other rows stay as they are.
    """
    features, labels = site.training_features(site.model)
    prototypes = cluster(site, features, labels, round_number, start=site.prototypes)
    scale = site.config.temperature * number(features.norm(dim=1).mean())
    for owner in to_host(prototypes.classes).tolist():
        site.model.head.weight[owner] = prototypes.vectors[prototypes.owners == owner].mean(0) / scale
        site.model.head.bias[owner] = 0.0
