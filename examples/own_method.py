"""A federated method of one's own in one file: FedAvg with the focal loss (Lin et al. 2017).

    npr-lab --plugin examples/own_method.py run --methods fedavg,focal,focal+npr --out runs/focal

The focal loss takes weight off images that are recognised already, (1 - p)^gamma, so that the hard ones decide. What
crosses hospitals is what FedAvg sends, so that nothing else has to be written: sums, masks and clips do not change.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from npr.methods.base import Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site


class FocalOptions(MethodOptions):
    """`gamma` is how fast weight falls with certainty; 0 is plain cross-entropy."""

    gamma: float = Field(default=2.0, ge=0.0)


@register("focal+npr", "FedAvg with the focal loss and non-parametric regularisation", npr=True)
@register("focal", "FedAvg with the focal loss")
class Focal(Method):
    Options = FocalOptions
    options: FocalOptions

    def supervised(self, site: Site, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        del site, features
        loss = functional.cross_entropy(logits, labels, reduction="none")
        certainty = (-loss).exp()
        return ((1.0 - certainty) ** self.options.gamma * loss).mean()
