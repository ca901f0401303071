"""BalanceFL (Shuai et al. 2022): local work as if the site's data were balanced and complete."""

from __future__ import annotations

import copy
import math
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from npr.data.loader import Batch, Sampler
from npr.device import number
from npr.methods.base import Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site
from npr.seeds import generator


class BalanceOptions(MethodOptions):
    """Weights of distillation and entropy, the distillation temperature, and the number of noise vectors per round.

    `with_prior` adds the log prior on top of balanced sampling, which corrects twice.
    """

    distillation: float = Field(default=1.0, ge=0.0)
    distillation_temperature: float = Field(default=2.0, gt=0.0)
    entropy: float = Field(default=0.002, ge=0.0)
    noise: float = Field(default=1.0, ge=0.0)
    noise_vectors: int = Field(default=500, ge=1)
    balanced_sampling: bool = True
    with_prior: bool = False


def balanced_sampler(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """As many draws as images, with replacement, every class the site has equally likely."""
    weights = 1.0 / np.bincount(labels)[labels]
    return rng.choice(len(labels), size=len(labels), p=weights / weights.sum())


def distillation(student: Tensor, teacher: Tensor, absent: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy from teacher to student over absent classes; one class or none has nothing to tell apart."""
    if number(absent.sum()) < 2:
        return student.new_zeros(())
    target = torch.softmax(teacher[:, absent] / temperature, dim=1)
    return -(target * torch.log_softmax(student[:, absent] / temperature, dim=1)).sum(1).mean()


def feature_noise(features: Tensor, labels: Tensor, count: int, draws: torch.Generator) -> Tensor:
    """(count, d) vectors of N(0, Sigma), Sigma the count-weighted mean of the classes' covariances.

    Random combinations of the residuals have exactly that law, and Sigma (d x d) is never built.
    """
    indicator = functional.one_hot(labels, 1 + int(number(labels.max()))).to(features.dtype)
    means = (indicator.T @ features) / indicator.sum(0).clamp(min=1.0)[:, None]
    residuals = (features - means[labels]) / math.sqrt(len(features))
    return torch.randn(count, len(features), generator=draws).to(features.device) @ residuals


@register("balancefl", "class-balanced sampling, feature noise, distillation for absent classes")
class BalanceFL(Method):
    Options = BalanceOptions
    options: BalanceOptions
    one_label: ClassVar[str] = "it samples images evenly by their one class"
    divisible: ClassVar[bool] = False

    def sampler(self, site: Site) -> Sampler | None:
        del site
        return balanced_sampler if self.options.balanced_sampling else None

    def begin_round(self, site: Site, round_number: int) -> None:
        super().begin_round(site, round_number)
        draws = generator(site.seed, site.name, round_number, "noise")
        features, labels = site.training_features(site.model)
        site.within_round["teacher"] = copy.deepcopy(site.model).eval().requires_grad_(False)
        site.within_round["noise"] = feature_noise(features, labels, self.options.noise_vectors, draws)
        site.within_round["draws"] = draws

    def supervised(self, site: Site, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over present classes, on features that are shaken the more the rarer their class is."""
        counts, noise, draws = site.prior.counts, site.within_round["noise"], site.within_round["draws"]
        shaken = site.device.from_host(torch.rand(len(labels), generator=draws)) < 1.0 - counts[labels] / counts.max()
        chosen = noise[site.device.from_host(torch.randint(len(noise), (len(labels),), generator=draws))]
        augmented = site.model.logits(features + self.options.noise * shaken[:, None] * chosen)
        augmented = augmented.masked_fill(~site.prior.present, -torch.inf)
        if self.options.with_prior:
            augmented = augmented + site.log_prior
        loss = functional.cross_entropy(augmented, labels)
        log_present = torch.log_softmax(logits[:, site.prior.present], dim=1)
        entropy = -(log_present.exp() * log_present).sum()
        return loss - self.options.entropy * entropy

    def penalty(self, site: Site, batch: Batch, features: Tensor, logits: Tensor) -> Tensor | float:
        """What the received model says about classes the site cannot learn from its own images."""
        del features
        absent = ~site.prior.present
        if self.options.distillation == 0.0 or number(absent.sum()) < 2:
            return 0.0
        with torch.no_grad():
            teacher = site.within_round["teacher"](batch.images)
        temperature = self.options.distillation_temperature
        return self.options.distillation * distillation(logits, teacher, absent, temperature)
