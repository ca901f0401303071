"""FedRS (Li and Zhan 2021): logits of classes the site lacks are scaled down while it trains."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from npr.methods.base import Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site


class RestrictedOptions(MethodOptions):
    """`alpha` multiplies the logits of absent classes.

    `floor` is the prior that balanced softmax gives them: "smallest" is the site's rarest present class, "epsilon" the
    1e-9 of the FedNPR release, under which absent classes vanish from the softmax and the method is FedAvg.
    """

    alpha: float = Field(default=0.5, ge=0.0, le=1.0)
    floor: Literal["smallest", "epsilon"] = "smallest"


@register("fedrs", "logits of absent classes are scaled down in training")
class FedRS(Method):
    Options = RestrictedOptions
    options: RestrictedOptions
    one_label: ClassVar[str] = "it scales the logits of absent classes, which sigmoids do not compare"

    def supervised(self, site: Site, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        del features
        present = site.prior.present
        scaled = torch.where(present, logits, self.options.alpha * logits)
        if site.config.supervision == "bsm":
            log_prior = site.prior.log()
            smallest = log_prior[present].min()
            absent = smallest if self.options.floor == "smallest" else torch.full_like(smallest, 1e-9).log()
            scaled = scaled + torch.where(present, log_prior, absent)
        return functional.cross_entropy(scaled, labels)
