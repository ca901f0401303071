"""FedAvg (McMahan et al. 2017): average everything, weighted by the number of images."""

from __future__ import annotations

from npr.methods.base import Method
from npr.methods.registry import register


@register("fedavg", "one model, averaged by the number of images")
class FedAvg(Method):
    """The base class as it is."""
