"""FedBABU (Oh et al. 2022): only the body is trained and averaged; every site fine-tunes at the end."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from npr.methods.base import EVERYTHING, FineTuning, Kind, Method
from npr.methods.registry import register
from npr.methods.site import Site
from npr.training import LocalReport, training_only


class BabuOptions(FineTuning):
    """Body and head are fine-tuned, or `finetune_head_only`."""

    finetune_epochs: int = Field(default=5, ge=0)
    finetune_head_only: bool = False


@register("fedbabu+npr", "FedBABU with non-parametric regularisation", npr=True)
@register("fedbabu", "shared body against one fixed random head; fine-tuned at the end")
class FedBABU(Method):
    """The head is the initial model's at every site, in no optimiser while the federation runs."""

    Options = BabuOptions
    options: BabuOptions
    one_label: ClassVar[str] = ""
    shared: ClassVar[frozenset[str]] = EVERYTHING - {"head"}
    personal: ClassVar[bool] = True
    # Before fine-tuning there is nothing personal yet: "personal" is then the same as "global".
    models: ClassVar[tuple[Kind, ...]] = ("personal", "global", "local")
    judged: ClassVar[Kind] = "personal"

    def work(self, site: Site, round_number: int) -> LocalReport:
        with training_only(site.model, ("extractor.",)) as named:
            return self.epochs(site, round_number, site.optimizer(round_number, named))

    def finish(self, site: Site, round_number: int) -> None:
        self.fine_tune(site, round_number, ("head.",) if self.options.finetune_head_only else ("extractor.", "head."))
