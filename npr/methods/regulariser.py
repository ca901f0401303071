"""Non-parametric regularisation as one part that any method can carry: prototypes, and the loss towards them."""

from __future__ import annotations

import torch
from torch import Tensor

from lazaret.errors import LocalProtocolError
from npr.losses import regularised
from npr.methods.site import Site
from npr.model import SplitModel
from npr.prototypes import Prototypes
from npr.seeds import generator

Seen = list[tuple[Tensor, Tensor]]
# The share of lambda in this round, among what a site keeps until the round's end.
_SHARE = "npr_share"


class Regulariser:
    """Keeps a site's prototypes up to date and adds lambda L_npr to a supervised loss.

    With `prototype_source = "exact"` the prototypes of a round come from one pass over the site's images with the model
    the round starts from, in eval mode and without augmentation; they do not change during the round. With "epoch" they
    come from the features that the last epoch of the round before computed anyway, so only a site that has no
    prototypes yet pays for a pass.
    """

    def begin_round(self, site: Site, round_number: int) -> None:
        # Early features are those of the initial model: distances between them mean little yet.
        site.within_round[_SHARE] = min(1.0, round_number / (site.config.lambda_rounds + 1))
        if site.config.prototype_source == "exact" or site.prototypes is None:
            site.prototypes = cluster(site, *site.training_features(site.model), round_number, start=site.prototypes)

    def add(self, site: Site, supervised: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        if site.prototypes is None:
            raise LocalProtocolError("a step with NPR before begin_round made the site's prototypes")
        npr = site.task.npr(features, labels, site.prototypes, site.config, site.prior)
        share = site.within_round.get(_SHARE, 1.0)
        return regularised(supervised, npr if share == 1.0 else share * npr, site.config)

    def end_round(self, site: Site, round_number: int, seen: Seen) -> None:
        """`seen` holds features and labels of the last epoch's steps, detached."""
        if site.config.prototype_source == "epoch" and seen:
            features, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
            site.prototypes = cluster(site, features, labels, round_number, start=site.prototypes)

    @staticmethod
    def predicting(site: Site, model: SplitModel) -> Prototypes:
        """Prototypes to predict by, which follow from the model and the site's training images alone.

        Not from the rounds that led here: a model that is kept predicts later as it did when it was chosen.
        """
        return cluster(site, *site.training_features(model), 0)


def cluster(
    site: Site, features: Tensor, labels: Tensor, round_number: int, *, start: Prototypes | None = None
) -> Prototypes:
    """Sub-cluster one site's features, from `start` on if it fits; draws, if any, belong to (seed, site, round)."""
    return site.task.prototypes(
        features,
        labels,
        site.train.num_classes,
        site.config,
        previous=start,
        generator=generator(site.seed, site.name, round_number, "prototypes"),
    )
