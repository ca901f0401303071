"""Losses on features and logits. A site's class counts enter here and go no further."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from npr.config import TrainConfig
from npr.device import wide_on
from npr.prototypes import Prototypes


@dataclass(frozen=True, eq=False)
class ClassPrior:
    """A site's class counts as the losses need them."""

    counts: Tensor

    @property
    def present(self) -> Tensor:
        """(C,) bool: the classes of which the site has an image."""
        return self.counts > 0

    def log(self, floor: float | None = None) -> Tensor:
        """(C,) log of the class frequencies: minus infinity for an absent class, or log(frequency + floor).

        The exact mask gives absent rows of the head a gradient of exactly zero. With a floor it is tiny instead, and
        Adam, which divides by the gradient's own size, would turn that into full-sized steps.
        """
        counts = self.counts.to(wide_on(self.counts.device))
        return torch.log(counts / self.counts.sum() + (floor or 0.0)).float()


def balanced_softmax(logits: Tensor, labels: Tensor, log_prior: Tensor) -> Tensor:
    """Cross-entropy of logits shifted by the log prior; prediction uses the logits as they are (Ren et al. 2020)."""
    return functional.cross_entropy(logits + log_prior, labels)


def npr_loss(
    features: Tensor, labels: Tensor, prototypes: Prototypes, config: TrainConfig, prior: ClassPrior
) -> Tensor:
    """Softmax over the similarity to the nearest prototype of each class the site has (paper eq. 3)."""
    logits = prototypes.similarity(features)
    targets = torch.searchsorted(prototypes.classes, labels)
    if config.logit_norm == "layernorm":
        logits = functional.layer_norm(logits, logits.shape[1:])
    logits = logits / config.temperature
    if config.npr_balance == "prior":
        logits = logits + prior.log()[prototypes.classes]
    if config.npr_balance == "class_mean":
        # Each class weighs the same whatever its size; the weights average to 1 over the site's images.
        inverse = prior.counts.sum() / (prior.present.sum() * prior.counts[prototypes.classes].float())
        return (functional.cross_entropy(logits, targets, reduction="none") * inverse[targets]).mean()
    return functional.cross_entropy(logits, targets)


def regularised(supervised: Tensor, npr: Tensor, config: TrainConfig) -> Tensor:
    """L_sup + lambda L_npr (paper eq. 5). The released code adds lambda instead, so that NPR always weighs 1."""
    if config.lambda_added:
        return supervised + config.lambda_npr + npr
    return supervised + config.lambda_npr * npr
