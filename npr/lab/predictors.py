"""Prediction as an axis of its own: every method is judged by the same ways to predict, from the same trained models.

Three parts give probabilities from one pass over the features: the `head` of the model, the site's `prototypes`, and
`refit`, a regularised logistic head fitted to the site's own features. A predictor is one of them or a mixture. What a
method was registered to predict with plays no role here: a row that does not name model and predictor does not exist.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from npr.data.dataset import Samples
from npr.device import to_host
from npr.methods.base import Kind, Method
from npr.methods.regulariser import cluster
from npr.methods.site import Site
from npr.metrics import Predictions, Scores
from npr.model import SplitModel
from npr.prototypes import Prototypes
from npr.training import evaluating, extract

PARTS: Final = ("head", "prototypes", "refit")
_SHARES: Final = (0.25, 0.5, 0.75)
# Inverse strength of the penalty of `refit`, on features scaled to unit variance.
REFIT_C: Final = 0.01
_REFIT_STEPS: Final = 100


@dataclass(frozen=True, slots=True)
class Mixture:
    """Which parts give the probabilities, and the share of each."""

    shares: tuple[tuple[str, float], ...]

    @property
    def name(self) -> str:
        """`head`, or `0.75 head + 0.25 prototypes`."""
        if len(self.shares) == 1:
            return self.shares[0][0]
        return " + ".join(f"{share:.2f} {part}" for part, share in self.shares)

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(part for part, _ in self.shares)

    def combine(self, by_part: Mapping[str, Sequence[Predictions]]) -> list[Predictions]:
        """Predictions of the mixture, from those of its parts on the same images."""
        parts = [(by_part[part], share) for part, share in self.shares]
        if len(parts) == 1:
            return list(parts[0][0])
        mixed = []
        for number, first in enumerate(parts[0][0]):
            scores = sum(share * predictions[number].scores for predictions, share in parts)
            mixed.append(replace(first, scores=np.asarray(scores, dtype=np.float32)))
        return mixed


def _mixtures() -> Iterable[Mixture]:
    for number, first in enumerate(PARTS):
        for second in PARTS[number + 1 :]:
            for share in _SHARES:
                yield Mixture(((first, 1.0 - share), (second, share)))
    yield Mixture(tuple((part, 1.0 / 3.0) for part in PARTS))


# Single parts first: of two that are equally good on the validation side, the simpler one is chosen.
PREDICTORS: Final = {p.name: p for p in (*(Mixture(((part, 1.0),)) for part in PARTS), *_mixtures())}


def parts_of(method: Method, *, private: bool) -> tuple[str, ...]:
    """The parts that can predict for this method.

    A head that was never trained cannot. Under differential privacy only the head can: prototypes and a refitted head
    would read the patients once more, outside what the ledger has booked. With several labels of an image there is no
    refitted head: it is fitted to one class of each.
    """
    if private:
        return ("head",)
    parts = PARTS[:-1] if method.config.labels == "many" else PARTS
    return parts if method.trains_head else parts[1:]


def predictors_from(parts: Sequence[str]) -> list[Mixture]:
    return [predictor for predictor in PREDICTORS.values() if predictor.parts <= set(parts)]


@dataclass(frozen=True, slots=True)
class LogisticHead:
    """`weight` (C, d) and `bias` (C,); a class the site does not have has a bias of minus infinity."""

    weight: Tensor
    bias: Tensor

    def scores(self, features: Tensor) -> Tensor:
        return torch.softmax(features @ self.weight.T + self.bias, dim=1)

    @classmethod
    def fit(cls, features: Tensor, labels: Tensor, num_classes: int) -> LogisticHead:
        """Multinomial logistic regression in which every class counts the same, as in balanced softmax."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        weight = features.new_zeros(num_classes, features.shape[1])
        bias = features.new_full((num_classes,), -torch.inf)
        present = torch.unique(labels)
        bias[present] = 0.0
        if len(present) < 2:  # one class: there is nothing to tell apart
            return cls(weight, bias)
        centre, scale = features.mean(0), features.std(0).clamp(min=1e-6)
        model = LogisticRegression(C=REFIT_C, class_weight="balanced", max_iter=_REFIT_STEPS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # after so many steps it is near enough to predict by
            model.fit(to_host((features - centre) / scale).numpy(), to_host(labels).numpy())
        rows, offsets = (
            torch.from_numpy(np.asarray(part)).float().to(features.device) for part in (model.coef_, model.intercept_)
        )
        if len(present) == 2:  # scikit-learn gives one row for two classes
            rows, offsets = torch.cat([torch.zeros_like(rows), rows]), torch.cat([torch.zeros_like(offsets), offsets])
        weight[present] = rows / scale
        bias[present] = offsets - (rows / scale) @ centre
        return cls(weight, bias)


@dataclass(frozen=True, slots=True)
class SitePredictors:
    """What a site predicts by under one model: its head, and what it fits to its own training images."""

    prototypes: Prototypes | None
    refit: LogisticHead | None

    @classmethod
    def fit(cls, site: Site, model: SplitModel, parts: Sequence[str]) -> SitePredictors:
        """One pass over the site's training images, for both."""
        if not {"prototypes", "refit"} & set(parts):
            return cls(None, None)
        features, labels = site.training_features(model)
        return cls(
            cluster(site, features, labels, 0),
            LogisticHead.fit(features, labels, site.train.num_classes) if "refit" in parts else None,
        )

    def tensors(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        if self.prototypes is not None:
            named |= {"vectors": self.prototypes.vectors, "owners": self.prototypes.owners}
        if self.refit is not None:
            named |= {"weight": self.refit.weight, "bias": self.refit.bias}
        return {name: to_host(tensor) for name, tensor in named.items()}

    @classmethod
    def of(cls, stored: Mapping[str, Tensor], site: Site) -> SitePredictors:
        """The inverse of `tensors`, on the site's device."""
        tensors = {name: site.device.from_host(tensor) for name, tensor in stored.items()}
        prototypes = Prototypes(tensors["vectors"], tensors["owners"]) if "vectors" in tensors else None
        return cls(prototypes, LogisticHead(tensors["weight"], tensors["bias"]) if "weight" in tensors else None)

    def scores(
        self, method: Method, site: Site, model: SplitModel, kind: Kind, samples: Samples, parts: Sequence[str]
    ) -> dict[str, Scores]:
        """(N, C) probabilities by every part, from one pass over the images."""
        if len(samples) == 0:  # a site may have trained and hold nothing to be judged by
            return {part: np.empty((0, samples.num_classes), dtype=np.float32) for part in parts}
        features, _ = extract(model, site.reading(samples))
        found: dict[str, Tensor] = {}
        with torch.inference_mode(), evaluating(model):
            if "head" in parts:
                logits = method.class_logits(model, features, kind)
                found["head"] = _present(method.task.probabilities(logits), site, kind)
            if self.prototypes is not None and "prototypes" in parts:
                classes, temperature = samples.num_classes, site.config.temperature
                found["prototypes"] = method.task.scores(self.prototypes, features, classes, temperature)
            if self.refit is not None and "refit" in parts:
                found["refit"] = self.refit.scores(features)
        return {part: to_host(scores.float()).numpy() for part, scores in found.items()}


def _present(scores: Tensor, site: Site, kind: Kind) -> Tensor:
    if not site.config.predict_present_only or kind == "global":
        return scores
    return site.task.only(scores, site.prior.present)
