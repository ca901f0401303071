"""The number of prototypes of a class, by its images and by what one more explains."""

from __future__ import annotations

import torch
from torch.nn import functional

from npr.config import TrainConfig
from npr.prototypes import make_prototypes

CONFIG = TrainConfig(clusters=4, clusters_by="explained")


def modes(count: int, images: int, seed: int, spread: float = 0.05) -> torch.Tensor:
    """`count` clearly separated directions, in turn."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.eye(16)[seed : seed + count]
    return centres.repeat(-(-images // count), 1)[:images] + spread * torch.randn(images, 16, generator=generator)


def counts(features: torch.Tensor, labels: torch.Tensor, config: TrainConfig = CONFIG) -> list[int]:
    return torch.bincount(make_prototypes(features, labels, 3, config).owners, minlength=3).tolist()


def test_k_follows_the_class() -> None:
    features = torch.cat([modes(1, 60, 0), modes(3, 60, 4), modes(2, 6, 9)])
    labels = torch.tensor([0] * 60 + [1] * 60 + [2] * 6)
    assert counts(features, labels) == [1, 3, 1], "one mode, three modes, and too few images for more than one"
    assert counts(features, labels, CONFIG.changed(clusters_by="count")) == [4, 4, 1]


def test_it_is_bounded_and_repeats() -> None:
    features, labels = modes(8, 400, 0), torch.zeros(400, dtype=torch.int64)
    assert counts(features, labels) == [4, 0, 0]
    first, second = (make_prototypes(features, labels, 3, CONFIG).vectors for _ in range(2))
    assert torch.equal(first, second) and torch.allclose(first, functional.normalize(first, dim=1))
