"""Prototypes worked out on paper: unit vectors in the plane, where an angle says everything."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from npr.config import TrainConfig
from npr.losses import ClassPrior, npr_loss
from npr.prototypes import Prototypes, make_prototypes

# One class in two modes of unequal size, and where the two prototypes stand before the assignment. The similarity to
# the first less that to the second is cos(a - 50) - cos(a - 110) = sin(80 - a): all but the last are nearer the first.
ANGLES = (0.0, 10.0, 20.0, 40.0, 65.0, 90.0)
BEFORE = (50.0, 110.0)
EPSILON = 0.1


def directions(*degrees: float) -> torch.Tensor:
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


def degrees(vectors: torch.Tensor) -> list[float]:
    return [math.degrees(math.atan2(y, x)) for x, y in vectors.tolist()]


def weighted_direction(weights: np.ndarray) -> float:
    angles = np.deg2rad(np.array(ANGLES))
    return math.degrees(math.atan2(weights @ np.sin(angles), weights @ np.cos(angles)))


def after_one_assignment(assign: str) -> list[float]:
    config = TrainConfig(clusters=2, min_per_cluster=1, alternations=1, sinkhorn_smoothing=EPSILON, assign=assign)
    previous = Prototypes(directions(*BEFORE), torch.zeros(2, dtype=torch.int64))
    labels = torch.zeros(len(ANGLES), dtype=torch.int64)
    return degrees(make_prototypes(directions(*ANGLES), labels, 1, config, previous=previous).vectors)


def balanced_shares() -> np.ndarray:
    """With two prototypes the plan is logistic in the similarities' difference; bisection shifts it to the balance."""
    difference = np.sin(np.deg2rad(80.0 - np.array(ANGLES)))
    low, high = -2.0, 2.0
    for _ in range(100):
        shift = (low + high) / 2
        shares = 1 / (1 + np.exp(-(difference - shift) / EPSILON))
        low, high = (shift, high) if shares.sum() > len(ANGLES) / 2 else (low, shift)
    return shares


def test_nearest_leaves_the_modes_as_unequal_as_they_are() -> None:
    five = weighted_direction(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]))
    assert after_one_assignment("nearest") == pytest.approx([five, 90.0], abs=1e-3)


def test_sinkhorn_argmax_splits_into_equal_halves() -> None:
    """Three features each: 0, 10, 20 around 10 degrees, and 40, 65, 90 around 65."""
    assert after_one_assignment("sinkhorn_argmax") == pytest.approx([10.0, 65.0], abs=1e-3)


def test_sinkhorn_soft_weighs_by_the_balanced_plan() -> None:
    shares = balanced_shares()
    assert shares.sum() == pytest.approx(3.0) and 0.1 < shares[3] < 0.5 < shares[2] < 0.9
    expected = [weighted_direction(shares), weighted_direction(1.0 - shares)]
    found = after_one_assignment("sinkhorn_soft")
    assert found == pytest.approx(expected, abs=0.05)
    # Features on the border pull both ways, so the soft centres lie closer together than the hard ones.
    assert found[0] > 11.0 and found[1] < 64.0


def test_similarity_is_to_the_nearest_prototype_of_each_class() -> None:
    """The feature (3, 4) has direction (0.6, 0.8). Class 2 has a single prototype, the others two."""
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6], [-1.0, 0.0], [0.6, -0.8]])
    prototypes = Prototypes(vectors, torch.tensor([0, 0, 2, 3, 3]))
    found = prototypes.similarity(torch.tensor([[3.0, 4.0]]))
    assert prototypes.classes.tolist() == [0, 2, 3]
    assert found[0].tolist() == pytest.approx([0.8, 0.96, -0.28], abs=1e-6)


def test_npr_loss_asks_only_for_the_nearest_prototype() -> None:
    """A feature on its class's second prototype, at right angles to all others: the first does not count against it."""
    prototypes = Prototypes(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    feature, label = torch.tensor([[0.0, 7.0, 0.0, 0.0]]), torch.tensor([0])
    loss = npr_loss(feature, label, prototypes, TrainConfig(temperature=0.5), ClassPrior(torch.ones(2)))
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-2.0)), rel=1e-6)
