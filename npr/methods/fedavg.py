"""FedAvg (McMahan et al. 2017): average everything, weighted by the number of images; and its bound, `central`."""

from __future__ import annotations

from typing import ClassVar

from npr.methods.base import FineTuning, Kind, Method, MethodOptions
from npr.methods.registry import register


@register("fedavg", "one model, averaged by the number of images")
class FedAvg(Method):
    """The base class as it is; a site may fine-tune the last model for itself."""

    Options: ClassVar[type[MethodOptions]] = FineTuning

    one_label: ClassVar[str] = ""


@register("central", "laboratory only: all images in one place, an upper bound")
class Central(FedAvg):
    """What no hospital may do: one model trained on the images of all sites together."""

    Options = MethodOptions
    wire: ClassVar[bool] = False
    central: ClassVar[bool] = True
    models: ClassVar[tuple[Kind, ...]] = ("global",)
    judged: ClassVar[Kind] = "global"
