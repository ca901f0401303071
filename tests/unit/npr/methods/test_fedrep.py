"""FedRep fits the head to the body it received, and then the body to that head."""

from __future__ import annotations

from collections.abc import Callable

import torch

from npr.federation import Federation
from npr.methods.site import Site

Toy = Callable[..., Federation]
EPOCHS = {"head_epochs": 3}


def parameters(site: Site, prefix: str) -> list[torch.Tensor]:
    return [tensor for name, tensor in site.model.state_dict().items() if name.startswith(prefix)]


def equal(first: Site, second: Site, prefix: str) -> bool:
    pairs = zip(parameters(first, prefix), parameters(second, prefix), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_the_head_is_the_one_that_fits_the_received_body(toy: Toy) -> None:
    whole, phase = toy("fedrep", options=EPOCHS), toy("fedrep", options=EPOCHS)
    whole.method.local_round(whole.sites[0], 1)
    phase.method.fit_head(phase.sites[0], 1, 3)
    assert equal(whole.sites[0], phase.sites[0], "head.")
    assert not equal(whole.sites[0], phase.sites[0], "extractor.")


def test_the_body_is_the_one_that_descends_under_the_fitted_head(toy: Toy) -> None:
    whole, body_only = toy("fedrep", options=EPOCHS), toy("fedrep", options={"head_epochs": 0})
    unfitted = toy("fedrep", options={"head_epochs": 0})
    whole.method.local_round(whole.sites[0], 1)
    body_only.sites[0].model.head.load_state_dict(whole.sites[0].model.head.state_dict())
    for federation in (body_only, unfitted):
        federation.method.local_round(federation.sites[0], 1)
    assert equal(whole.sites[0], body_only.sites[0], "extractor.")
    assert not equal(whole.sites[0], unfitted.sites[0], "extractor.")
