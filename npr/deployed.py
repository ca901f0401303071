"""A trained model as it is used: bytes of images in, calibrated probabilities out, all in one module.

Prediction at a site runs this module, and an exported file holds it, so that both give the same numbers. Normalisation
and temperature are inside: who uses it resizes an image and hands over its bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from npr.calibration import FLOOR
from npr.methods.base import Kind, Method
from npr.model import SplitModel
from npr.prototypes import Prototypes
from security.errors import LocalProtocolError

Pixels = NDArray[np.uint8]


class Features(nn.Module):
    """The extractor alone, from uint8 (N, H, W, C) to features (N, d): what hospitals with personal heads share."""

    scale: Tensor
    shift: Tensor

    def __init__(self, *, model: SplitModel, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model
        # As in npr/data/loader.py: (x / 255 - mean) / std as one multiplication and one addition.
        scale = (1.0 / (255.0 * torch.tensor(std, dtype=torch.float64))).float().view(1, -1, 1, 1)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).float().view(1, -1, 1, 1)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        self.eval()

    def features(self, images: Tensor) -> Tensor:
        return self.model.features(images.permute(0, 3, 1, 2).float() * self.scale + self.shift)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.features(images)


class Deployed(Features):
    """`forward` takes uint8 (N, H, W, C) and gives probabilities (N, classes) and features (N, d).

    :param present: classes of the site as ones and zeros; others get no probability. None for all classes.
    :param prototypes: needed where the configuration predicts by them.
    """

    present: Tensor | None
    spread: Tensor | None

    def __init__(
        self,
        *,
        method: Method,
        model: SplitModel,
        kind: Kind,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        temperature: float = 1.0,
        present: Tensor | None = None,
        prototypes: Prototypes | None = None,
    ) -> None:
        super().__init__(model=model, mean=mean, std=std)
        self.temperature = temperature
        self._method, self._kind, self._prototypes = method, kind, prototypes
        self._mix = method.prototype_share
        if self._mix > 0.0 and prototypes is None:
            raise LocalProtocolError("this model predicts by prototypes, and there are none")
        # From the classes that have prototypes to all classes, as a product: an exporter cannot follow assignments.
        # `columns` is worked out here for the same reason, and remembered.
        spread = None
        if prototypes is not None and self._mix > 0.0 and prototypes.columns.numel():
            spread = functional.one_hot(prototypes.classes, model.head.out_features).float()
        self.register_buffer("present", present.float() if present is not None else None)
        self.register_buffer("spread", spread)

    @property
    def holds_prototypes(self) -> bool:
        """Whether an exported file would carry the site's prototypes."""
        return self._mix > 0.0

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        scores = self._scores(features)
        if self.present is not None:
            scores = scores * self.present
            scores = scores / scores.sum(1, keepdim=True).clamp(min=FLOOR)
        if self.temperature != 1.0:
            sharp = torch.softmax(torch.log(scores.clamp(min=FLOOR)) / self.temperature, dim=1) * (scores > 0)
            scores = sharp / sharp.sum(1, keepdim=True)
        return scores, features

    def _scores(self, features: Tensor) -> Tensor:
        """As `Method.predictor`, with prototypes that are there already."""
        scores = torch.zeros(())
        if self._mix < 1.0:
            head = self._method.class_logits(self.model, features, self._kind)
            scores = (1.0 - self._mix) * torch.softmax(head, dim=1)
        if self._mix > 0.0 and self._prototypes is not None and self.spread is not None:
            near = self._prototypes.similarity(features) / self._method.config.temperature
            scores = scores + self._mix * (torch.softmax(near, dim=1) @ self.spread)
        return scores

    @torch.inference_mode()
    def predict(self, images: Pixels) -> tuple[NDArray[np.float32], Tensor]:
        """Probabilities and features of one batch."""
        batch = torch.from_numpy(np.ascontiguousarray(images))
        probabilities, features = self(batch.contiguous())
        return probabilities.float().numpy(), features
