"""FedBABU (Oh et al. 2022): only the body is trained and averaged; every site fine-tunes at the end."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from npr.methods.base import EVERYTHING, Kind, Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site
from npr.seeds import derive
from npr.training import LocalReport, descend, training_only


class BabuOptions(MethodOptions):
    """`finetune_epochs` of body and head (or `finetune_head_only`) after the last round, at the last rate."""

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
        prefixes = ("head.",) if self.options.finetune_head_only else ("extractor.", "head.")
        with site.device.forked_draws(), training_only(site.model, prefixes) as named:
            torch.manual_seed(derive(site.seed, site.name, "finish"))
            optimizer = site.fresh_optimizer(round_number, named)
            site.model.train(not self.options.finetune_head_only)
            for epoch in range(self.options.finetune_epochs):
                batches = site.epoch(round_number, "finish", epoch)
                descend(batches, optimizer, lambda batch: self.step(site, batch), descent=site.descent)
