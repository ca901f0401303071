"""What an image is labelled with, and all that follows from it: targets, losses, prototypes, probabilities.

`labels = "one"`: an image has one class of several, and classes compete in a softmax. This is the paper's form.
`labels = "many"`: an image has any number of labels. Each label is a question of its own with two answers, no and yes,
and every formula is the paper's for two classes (docs/methods.md). What has no such form is refused (`check_many`).
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lazaret.errors import ConfigError
from npr.config import TrainConfig
from npr.data.dataset import Samples
from npr.device import Device
from npr.losses import ClassPrior, LabelPrior, balanced_sigmoid, balanced_softmax, label_npr_loss, npr_loss
from npr.prototypes import Prototypes, label_prototypes, make_prototypes, paired


class Task(Protocol):
    """Classes are labels too: C of them, and scores have a column for each."""

    def prior(self, samples: Samples, device: Device) -> ClassPrior: ...

    def supervised(self, logits: Tensor, labels: Tensor, log_prior: Tensor | None) -> Tensor:
        """Balanced by the site's prior; plain cross-entropy without one."""

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(N,) bool: which images are predicted right, with all of their labels."""

    def prototypes(
        self,
        features: Tensor,
        labels: Tensor,
        num_classes: int,
        config: TrainConfig,
        *,
        previous: Prototypes | None = None,
        generator: torch.Generator | None = None,
    ) -> Prototypes: ...

    def npr(
        self, features: Tensor, labels: Tensor, prototypes: Prototypes, config: TrainConfig, prior: ClassPrior
    ) -> Tensor: ...

    def probabilities(self, logits: Tensor) -> Tensor:
        """(N, C) from the head's logits."""

    def by_prototype(self, near: Tensor, spread: Tensor) -> Tensor:
        """(N, C) from cosine / temperature to the nearest prototypes, and where each of them belongs (`spread`)."""

    def spread(self, prototypes: Prototypes, num_classes: int) -> Tensor: ...

    def scores(self, prototypes: Prototypes, features: Tensor, num_classes: int, temperature: float) -> Tensor:
        """(N, C) by nearest prototype."""

    def only(self, scores: Tensor, present: Tensor) -> Tensor:
        """Scores without those of labels that are not present."""


class OneLabel:
    """One class of several: the paper's own form."""

    prototypes = staticmethod(make_prototypes)
    npr = staticmethod(npr_loss)

    def prior(self, samples: Samples, device: Device) -> ClassPrior:
        return ClassPrior(device.from_host(samples.class_counts()))

    def supervised(self, logits: Tensor, labels: Tensor, log_prior: Tensor | None) -> Tensor:
        if log_prior is None:
            return functional.cross_entropy(logits, labels)
        return balanced_softmax(logits, labels, log_prior)

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.argmax(1) == labels

    def probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=1)

    def by_prototype(self, near: Tensor, spread: Tensor) -> Tensor:
        return torch.softmax(near, dim=1) @ spread

    def spread(self, prototypes: Prototypes, num_classes: int) -> Tensor:
        return prototypes.spread(num_classes)

    def scores(self, prototypes: Prototypes, features: Tensor, num_classes: int, temperature: float) -> Tensor:
        return prototypes.scores(features, num_classes, temperature)

    def only(self, scores: Tensor, present: Tensor) -> Tensor:
        scores = scores * present
        return scores / scores.sum(1, keepdim=True).clamp(min=1e-30)


class ManyLabels:
    """Any number of labels: zeros and ones (N, L)."""

    def prior(self, samples: Samples, device: Device) -> LabelPrior:
        return LabelPrior(device.from_host(samples.class_counts()), len(samples))

    def supervised(self, logits: Tensor, labels: Tensor, log_prior: Tensor | None) -> Tensor:
        return balanced_sigmoid(logits, labels, torch.zeros_like(logits[0]) if log_prior is None else log_prior)

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ((logits >= 0) == (labels > 0)).all(1)

    def prototypes(
        self,
        features: Tensor,
        labels: Tensor,
        num_classes: int,
        config: TrainConfig,
        *,
        previous: Prototypes | None = None,
        generator: torch.Generator | None = None,
    ) -> Prototypes:
        del num_classes  # the labels have a column for each
        return label_prototypes(features, labels, config, previous=previous, generator=generator)

    def npr(
        self, features: Tensor, labels: Tensor, prototypes: Prototypes, config: TrainConfig, prior: ClassPrior
    ) -> Tensor:
        if not isinstance(prior, LabelPrior):
            raise TypeError("several labels need the prior of this task")
        return label_npr_loss(features, labels, prototypes, config, prior)

    def probabilities(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)

    def by_prototype(self, near: Tensor, spread: Tensor) -> Tensor:
        return torch.softmax(paired(near, spread), dim=2)[..., 1]

    def spread(self, prototypes: Prototypes, num_classes: int) -> Tensor:
        return prototypes.spread(2 * num_classes)

    def scores(self, prototypes: Prototypes, features: Tensor, num_classes: int, temperature: float) -> Tensor:
        return torch.softmax(prototypes.answers(features, num_classes, temperature), dim=2)[..., 1]

    def only(self, scores: Tensor, present: Tensor) -> Tensor:
        return scores * present


ONE: Final = OneLabel()
MANY: Final = ManyLabels()


def task_of(config: TrainConfig) -> Task:
    return MANY if config.labels == "many" else ONE


def task_for(labels: Tensor) -> Task:
    """The same by the shape of the labels."""
    return MANY if labels.ndim == 2 else ONE


def check_samples(config: TrainConfig, samples: Samples) -> None:
    """:raises ConfigError: if the data are labelled in another way than the settings say."""
    if samples.many != (config.labels == "many"):
        found, asked = ("several labels", "one") if samples.many else ("one label", "several")
        hint = "docs/data.md says how a table lists several labels"
        raise ConfigError(f"the images have {found}, and the settings say {asked}", where="labels", hint=hint)


# Key, the one value that is allowed, and why any other has no form for several labels.
_ALLOWED: Final = (
    ("logit_norm", "none", "of two answers that are standardised only their order is left"),
    ("personal_start", "shared", "prototypes make a head of one class for each image"),
)


def check_many(config: TrainConfig, method: str, why_not: str) -> None:
    """:raises ConfigError: where the method or a setting has no form for several labels of an image.

    :param why_not: of the method; empty if it has one.
    """
    reasons = [f"method = {method!r}: {why_not}"] if why_not else []
    reasons += [
        f"{key} = {getattr(config, key)!r}: {reason}; use {allowed!r}"
        for key, allowed, reason in _ALLOWED
        if getattr(config, key) != allowed
    ]
    if config.labels == "many" and reasons:
        raise ConfigError("; ".join(reasons), where='labels = "many"', hint="docs/methods.md, several labels")
