"""MOON's contrast: between which three models, at which temperature, and whom its gradient reaches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from npr.federation import Federation
from npr.methods.moon import contrast
from npr.model import SplitModel

Toy = Callable[..., Federation]


def cosine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))


def representation(model: SplitModel, images: torch.Tensor) -> np.ndarray:
    model.eval()
    with torch.no_grad():
        return model.represent(model.features(images)).double().numpy()


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_contrast_by_hand(tau: float) -> None:
    """Cosines 0.6 to the received and 0 to the previous for the first row, 0.8 and 1 for the second."""
    current = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    received = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    previous = torch.tensor([[0.0, 2.0], [0.0, 5.0]])
    expected = (math.log(1 + math.exp(-0.6 / tau)) + math.log(1 + math.exp(0.2 / tau))) / 2
    assert float(contrast(current, received, previous, tau)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (3.0, 0.1)])
def test_the_term_is_between_the_received_and_the_sites_own_last_model(toy: Toy, mu: float, tau: float) -> None:
    counts = ((8, 4, 0, 0), (0, 0, 4, 8))
    federation = toy("moon", counts=counts, learning_rate=0.02, options={"mu": mu, "tau": tau})
    federation.run_round()
    site, method = federation.sites[0], federation.method
    own_last = copy.deepcopy(site.model)
    manifest = method.manifest(federation.model, 1)
    manifest.load(site.model, manifest.flatten(federation.model))
    method.begin_round(site, 2)

    batch = next(iter(site.epoch(2)))
    site.model.train()
    features = site.model.features(batch.images)
    term = method.penalty(site, batch, features, site.model.logits(features))
    current = site.model.represent(features).detach().double().numpy()
    towards = cosine(current, representation(federation.model, batch.images))
    away = cosine(current, representation(own_last, batch.images))
    expected = mu * np.log(1 + np.exp((away - towards) / tau)).mean()
    assert float(term.detach()) == pytest.approx(expected, rel=1e-4)
    assert abs(expected - mu * math.log(2)) > 0.01 * mu  # which it is when there are not two models to tell apart

    site.model.zero_grad()
    term.backward()
    for part in (site.model.extractor, site.model.projection):
        assert max(float(parameter.grad.abs().max()) for parameter in part.parameters()) > 1e-4
    assert all(parameter.grad is None for parameter in site.model.head.parameters())
