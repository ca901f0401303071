"""FedLC (Zhang et al. 2022): logits are shifted by a margin that grows as a class gets rarer at the site."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from npr.methods.base import Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site


class CalibrationOptions(MethodOptions):
    """`tau` scales the margin; `with_prior` adds the log prior of balanced softmax too, which corrects twice."""

    tau: float = Field(default=1.0, ge=0.0)
    with_prior: bool = False


@register("fedlc", "logits calibrated by local counts to the power -1/4")
class FedLC(Method):
    Options = CalibrationOptions
    options: CalibrationOptions
    one_label: ClassVar[str] = "its margins are between classes of one softmax"

    def supervised(self, site: Site, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the present classes, own class included.

        The published denominator leaves the own class out, which has no lower bound and makes training collapse.
        """
        del features
        counts = site.prior.counts.float()
        margin = self.options.tau * counts.clamp(min=1.0) ** -0.25
        shifted = torch.where(site.prior.present, logits - margin, -torch.inf)
        if self.options.with_prior:
            shifted = shifted + site.log_prior
        return functional.cross_entropy(shifted, labels)
