"""Prototypes of several labels: those of two classes, label by label."""

from __future__ import annotations

import pytest
import torch

from npr.config import TrainConfig
from npr.prototypes import Prototypes, label_prototypes, make_prototypes
from npr.task import MANY

CONFIG = TrainConfig(labels="many", clusters=2, min_per_cluster=2)


def drawn(images: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(3)
    features = torch.randn(images, 5, generator=draws)
    labels = torch.stack([features[:, 0] > 0.3, features[:, 1] > 0.0, torch.zeros(images, dtype=torch.bool)], 1).long()
    return features, labels


def test_each_label_has_those_of_images_without_it_and_with_it() -> None:
    features, labels = drawn()
    made = label_prototypes(features, labels, CONFIG)
    assert made.owners.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], "no image has the third label"
    for label in range(3):
        alone = make_prototypes(features, labels[:, label], 2, CONFIG)
        assert torch.equal(made.vectors[made.owners // 2 == label], alone.vectors)


def test_the_next_round_begins_at_the_last_ones() -> None:
    features, labels = drawn()
    kept = CONFIG.changed(prototype_momentum=1.0)
    before = label_prototypes(features, labels, kept)
    after = label_prototypes(features + 1, labels, kept, previous=before)
    assert torch.allclose(after.vectors, before.vectors, atol=1e-6)
    fresh = label_prototypes(features + 1, labels, kept)
    for label in range(3):
        own = before.owners // 2 == label
        assert not torch.allclose(fresh.vectors[own], before.vectors[own], atol=1e-2)


def test_centres_by_hand() -> None:
    """Four unit vectors in the plane, one sub-cluster each: the centre of an answer is the direction of its sum."""
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    labels = torch.tensor([[1, 0], [1, 1], [0, 1], [0, 0]])
    made = label_prototypes(features, labels, CONFIG.changed(clusters=1))
    half = 0.5**0.5
    expected = [[-half, -half], [half, half], [half, -half], [-half, half]]
    assert made.owners.tolist() == [0, 1, 2, 3]
    assert made.vectors.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


def test_probabilities_by_the_nearest() -> None:
    """The sigmoid of the difference of two cosines; certain where a site has one answer only."""
    prototypes = Prototypes(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.6, 0.8]]), torch.tensor([0, 1, 2, 5]))
    scores = MANY.scores(prototypes, torch.tensor([[0.6, 0.8]]), 3, 0.1)
    assert scores[0, 0].item() == pytest.approx(torch.sigmoid(torch.tensor((0.8 - 0.6) / 0.1)).item(), abs=1e-6)
    assert scores[0, 1:].tolist() == [0.0, 1.0]
    spread = MANY.spread(prototypes, 3)
    near = prototypes.similarity(torch.tensor([[0.6, 0.8]])) / 0.1
    assert torch.equal(MANY.by_prototype(near, spread), scores), "as it is exported"
