"""FedRep (Collins et al. 2021): each round fits the personal head to the received body, then the body to the head."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from npr.methods.base import EVERYTHING, Method, MethodOptions
from npr.methods.registry import register
from npr.methods.site import Site
from npr.seeds import derive, generator
from npr.training import LocalReport, training_only


class RepOptions(MethodOptions):
    """Passes over the features that fit the head, in each round and once more after the last aggregation."""

    head_epochs: int = Field(default=1, ge=0)
    final_head_epochs: int = Field(default=10, ge=0)


@register("fedrep+npr", "FedRep with non-parametric regularisation of the body phase", npr=True)
@register("fedrep", "personal head fitted first, then the shared body under it")
class FedRep(Method):
    """Head first, body second; the reverse order is another algorithm. NPR has no say in the head phase."""

    Options = RepOptions
    options: RepOptions
    one_label: ClassVar[str] = ""
    shared: ClassVar[frozenset[str]] = EVERYTHING - {"head"}
    personal: ClassVar[bool] = True

    def work(self, site: Site, round_number: int) -> LocalReport:
        self.fit_head(site, round_number, self.options.head_epochs)
        with training_only(site.model, ("extractor.",)) as named:
            return self.epochs(site, round_number, site.optimizer(round_number, named, key="body"))

    def finish(self, site: Site, round_number: int) -> None:
        """The head was fitted to the body of the round before; fit it to the last one."""
        with site.device.forked_draws():
            torch.manual_seed(derive(site.seed, site.name, "finish"))
            self.fit_head(site, round_number, self.options.final_head_epochs, "finish")

    def fit_head(self, site: Site, round_number: int, epochs: int, *part: str) -> None:
        """Descend the head on features read once: the body is fixed, so they are the same in every pass."""
        features, labels = site.training_features(site.model)
        draws = generator(site.seed, site.name, round_number, "head", *part)
        with training_only(site.model, ("head.",)) as named:
            optimizer = site.optimizer(round_number, named, key="head")
            for _ in range(epochs):
                order = site.device.from_host(torch.randperm(len(labels), generator=draws))
                for start in range(0, len(order), site.config.batch_size):
                    rows = order[start : start + site.config.batch_size]
                    optimizer.zero_grad(set_to_none=True)
                    logits = site.model.logits(features[rows])
                    loss = self.supervised(site, features[rows], logits, labels[rows])
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
