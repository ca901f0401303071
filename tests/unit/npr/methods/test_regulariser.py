"""A site's sub-clusters keep their identity from round to round."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import normalize

from npr.federation import Federation
from npr.methods.regulariser import Regulariser
from npr.prototypes import Prototypes, make_prototypes
from npr.training import extract

Toy = Callable[..., Federation]

# Two modes of one class in the plane, and the directions of their means.
FEATURES = torch.tensor([[4.0, 1.0], [4.0, 0.0], [4.0, -1.0], [1.0, 4.0], [0.0, 4.0], [-1.0, 4.0]])
MEANS = torch.eye(2)


def after_an_epoch(toy: Toy, held: torch.Tensor, assign: str = "sinkhorn_argmax") -> torch.Tensor:
    """The prototypes of a site that held two and saw FEATURES in the round's last epoch."""
    federation = toy("fednpr", clusters=2, min_per_cluster=1, prototype_source="epoch", alternations=1, assign=assign)
    site = federation.sites[0]
    site.prototypes = Prototypes(normalize(held, dim=1), torch.zeros(2, dtype=torch.int64))
    Regulariser().end_round(site, 1, [(FEATURES, torch.zeros(6, dtype=torch.int64))])
    return site.prototypes.vectors


def test_sub_clusters_keep_the_places_they_had(toy: Toy) -> None:
    for order in ([0, 1], [1, 0]):
        assert torch.allclose(after_an_epoch(toy, MEANS[order]), MEANS[order], atol=1e-6)


def test_a_later_round_goes_on_from_where_the_last_one_stopped(toy: Toy) -> None:
    """One assignment gives the first prototype two features and the other all four that are nearer to it.

    Starting anew, from seeds far apart, would find the two modes.
    """
    found = after_an_epoch(toy, torch.tensor([[4.0, 0.0], [4.0, 1.0]]), "nearest")
    unit = normalize(FEATURES, dim=1)
    expected = normalize(torch.stack([unit[[1, 2]].sum(0), unit[[0, 3, 4, 5]].sum(0)]), dim=1)
    assert torch.allclose(found, expected, atol=1e-6)
    assert (expected - MEANS).norm(dim=1).max() > 0.1


def test_a_second_round_starts_from_the_prototypes_of_the_first(toy: Toy) -> None:
    federation = toy("fednpr", clusters=2, min_per_cluster=1)
    federation.run_round()
    site = federation.sites[0]
    held = site.prototypes
    assert held is not None and torch.bincount(held.owners).tolist() == [2, 2, 2, 2]
    # Each class's two sub-clusters in the other order: a warm start keeps that order, a cold one cannot know of it.
    turned = Prototypes(held.vectors.view(4, 2, -1).flip(1).reshape(8, -1), held.owners)
    site.prototypes = turned
    features, labels = extract(site.model, site.reading(site.train))
    warm = make_prototypes(features, labels, 4, site.config, previous=turned)
    cold = make_prototypes(features, labels, 4, site.config)
    federation.method.begin_round(site, 2)
    assert torch.allclose(site.prototypes.vectors, warm.vectors, atol=1e-6)
    assert (warm.vectors - cold.vectors).norm(dim=1).max() > 1e-3
