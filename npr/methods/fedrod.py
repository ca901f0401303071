"""FedRoD (Chen and Chao 2022): a generic head trained with balanced loss and shared, a personal one added on top."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional

from npr.data.loader import Batch
from npr.losses import balanced_softmax
from npr.methods.base import Kind, Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site
from npr.model import ModelSpec, SplitModel, build_model, feature_width


class RodOptions(MethodOptions):
    """Loss of the personal branch: "ce" follows the local prior (the original), "bsm" corrects for it."""

    personal_loss: Literal["ce", "bsm"] = "ce"


@register("fedrod+npr", "FedRoD with non-parametric regularisation", npr=True)
@register("fedrod", "shared generic head and a personal head that corrects it")
class FedRoD(Method):
    """Only the personal head gets the second gradient; it is not among the shared groups and starts at zero."""

    Options = RodOptions
    options: RodOptions
    one_label: ClassVar[str] = "the loss of its personal head is over classes that exclude each other"
    personal: ClassVar[bool] = True
    models: ClassVar[tuple[Kind, ...]] = ("personal", "global", "local")

    def build_model(self, spec: ModelSpec) -> SplitModel:
        model = build_model(spec)
        personal = nn.Linear(feature_width(model.extractor), spec.num_classes)
        nn.init.zeros_(personal.weight)
        nn.init.zeros_(personal.bias)
        model.personal_head = personal
        return model

    def penalty(self, site: Site, batch: Batch, features: Tensor, logits: Tensor) -> Tensor | float:
        """Loss of the personal branch, to which body and generic head are constants."""
        together = logits.detach() + _personal(site.model)(features.detach())
        if self.options.personal_loss == "bsm":
            return balanced_softmax(together, batch.labels, site.log_prior)
        return functional.cross_entropy(together, batch.labels)

    def class_logits(self, model: SplitModel, features: Tensor, kind: Kind) -> Tensor:
        generic = model.logits(features)
        return generic if kind == "global" else generic + _personal(model)(features)


def _personal(model: SplitModel) -> nn.Linear:
    head = model.personal_head
    if not isinstance(head, nn.Linear):
        raise TypeError("FedRoD needs a model made by its own build_model")
    return head
