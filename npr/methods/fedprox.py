"""FedProx (Li et al. 2020): FedAvg with a penalty on the distance from the round's starting point."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from npr.data.loader import Batch
from npr.methods.base import Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site


class ProxOptions(MethodOptions):
    """`mu` is the strength of the penalty; the authors name no universal value."""

    mu: float = Field(default=0.01, ge=0.0)


@register("fedprox+npr", "FedProx with non-parametric regularisation", npr=True)
@register("fedprox", "FedAvg with a quadratic penalty towards the received model")
class FedProx(Method):
    Options = ProxOptions
    options: ProxOptions
    one_label: ClassVar[str] = ""

    def begin_round(self, site: Site, round_number: int) -> None:
        super().begin_round(site, round_number)
        site.within_round["start"] = [parameter.detach().clone() for parameter in site.model.parameters()]

    def penalty(self, site: Site, batch: Batch, features: Tensor, logits: Tensor) -> Tensor | float:
        """(mu / 2) ||w - w0||^2 over every trainable parameter; running statistics are no parameters."""
        del batch, features, logits
        pairs = zip(site.model.parameters(), site.within_round["start"], strict=True)
        squares = [torch.sum((parameter - start) ** 2) for parameter, start in pairs]
        return 0.5 * self.options.mu * torch.stack(squares).sum()
