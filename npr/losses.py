"""Losses on features and logits: L_sup and L_npr of the paper, and their sum; `npr/methods/fednpr.py` has the method.

A site's class counts enter here and go no further.
"""

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


@dataclass(frozen=True, eq=False)
class LabelPrior(ClassPrior):
    """The same where an image may have several labels: `counts` are the images that have each of them.

    :ivar images: of the site in all.
    """

    images: int

    @property
    def answers(self) -> Tensor:
        """(L, 2): images without each label, and with it."""
        return torch.stack([self.images - self.counts, self.counts], dim=1)

    def log(self, floor: float | None = None) -> Tensor:
        """(L,) log odds of each label: infinite where the site has no image without it, or none with it.

        It is the difference of the two log frequencies that balanced softmax would add to the answers no and yes.
        """
        answers = self.answers.to(wide_on(self.counts.device))
        without, having = torch.log(answers / self.images + (floor or 0.0)).unbind(1)
        return (having - without).float()


def balanced_softmax(logits: Tensor, labels: Tensor, log_prior: Tensor) -> Tensor:
    """Cross-entropy of logits shifted by the log prior; prediction uses the logits as they are (Ren et al. 2020)."""
    # With p(y) as it is at the site, softmax(z + log p) is the site's own posterior (Bayes); so z alone is that of a
    # hospital in which all classes are equally frequent.
    return functional.cross_entropy(logits + log_prior, labels)


def balanced_sigmoid(logits: Tensor, labels: Tensor, log_odds: Tensor) -> Tensor:
    """Mean over images and labels of the binary cross-entropy of logits shifted by the log odds of each label.

    For one label it is the balanced softmax of two classes whose logits are 0 and z. Written with the sign of the
    truth: infinite odds, of a label that all images of a site have or none, give a loss and a gradient of exactly zero.
    """
    return functional.softplus((1 - 2 * labels) * (logits + log_odds)).mean()


def npr_loss(
    features: Tensor, labels: Tensor, prototypes: Prototypes, config: TrainConfig, prior: ClassPrior
) -> Tensor:
    """Softmax over the similarity to the nearest prototype of each class the site has (paper eq. 3).

    :param features: (N, d), before the head; gradients go into the extractor alone.
    :param labels: (N,), each of a class that has prototypes: prototypes are made of the same training images.
    """
    logits = prototypes.similarity(features)
    # Columns are the classes that are here, in ascending order: an absent class has no prototype to be drawn away from.
    targets = torch.searchsorted(prototypes.classes, labels)
    if config.logit_norm == "layernorm":
        # The released code: of the cosines only their order and relative distances are left.
        logits = functional.layer_norm(logits, logits.shape[1:])
    # Cosines lie in [-1, 1], where a softmax is nearly flat; a temperature of 0.1 spreads them to [-10, 10].
    logits = logits / config.temperature
    if config.npr_balance == "prior":
        logits = logits + prior.log()[prototypes.classes]
    if config.npr_balance == "class_mean":
        # Each class weighs the same whatever its size; the weights average to 1 over the site's images.
        inverse = prior.counts.sum() / (prior.present.sum() * prior.counts[prototypes.classes].float())
        return (functional.cross_entropy(logits, targets, reduction="none") * inverse[targets]).mean()
    return functional.cross_entropy(logits, targets)


def label_npr_loss(
    features: Tensor, labels: Tensor, prototypes: Prototypes, config: TrainConfig, prior: LabelPrior
) -> Tensor:
    """The same for each label by itself: softmax over the nearest prototype of the images without it, and with it.

    The mean over labels. A label of which the site has one answer only has a loss of zero, as a softmax over one class.
    """
    logits = prototypes.answers(features, labels.shape[1], config.temperature)
    if config.npr_balance == "prior":
        logits = logits + torch.log(prior.answers / prior.images)
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    if config.npr_balance == "class_mean":
        inverse = prior.images / ((prior.answers > 0).sum(1, keepdim=True) * prior.answers.float())
        losses = losses * inverse.expand(len(labels), -1, -1).gather(2, labels[..., None]).flatten()
    return losses.mean()


def regularised(supervised: Tensor, npr: Tensor, config: TrainConfig) -> Tensor:
    """L_sup + lambda L_npr (paper eq. 5). The released code adds lambda instead, so that NPR always weighs 1."""
    if config.lambda_added:
        return supervised + config.lambda_npr + npr
    return supervised + config.lambda_npr * npr
