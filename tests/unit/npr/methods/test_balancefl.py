"""BalanceFL's terms with a head set by hand, at a site with 12 images of class 0, 3 of class 1 and no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import log
from typing import Any

import numpy as np
import pytest
import torch

from npr.federation import Federation
from npr.methods.balancefl import distillation

Toy = Callable[..., Federation]
WIDTH = 256


def begun(
    toy: Toy, *, weight: torch.Tensor | None = None, bias: tuple[float, ...] = (0.0,) * 4, **options: Any
) -> Federation:
    """A federation of that one site, its round begun under the given head, which is zero unless said otherwise."""
    federation = toy("balancefl", counts=((12, 3, 0, 0),), options=options)
    site = federation.sites[0]
    with torch.no_grad():
        site.model.head.weight.copy_(torch.zeros(4, WIDTH) if weight is None else weight)
        site.model.head.bias.copy_(torch.tensor(bias))
    federation.method.begin_round(site, 1)
    return federation


def supervised(federation: Federation, features: torch.Tensor, labels: torch.Tensor) -> float:
    site = federation.sites[0]
    return float(federation.method.supervised(site, features, site.model.logits(features), labels).detach())


def test_a_head_that_knows_nothing_pays_for_the_present_classes_only(toy: Toy) -> None:
    """Two classes of four are present: log 2 an image, and six entropies of log 2 taken off."""
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    assert supervised(begun(toy, entropy=0.0), torch.zeros(6, WIDTH), labels) == pytest.approx(log(2), rel=1e-5)
    found = supervised(begun(toy, entropy=0.1), torch.zeros(6, WIDTH), labels)
    assert found == pytest.approx(log(2) - 0.1 * 6 * log(2), rel=1e-5)


def test_absent_classes_enter_neither_cross_entropy_nor_entropy(toy: Toy) -> None:
    """Whatever the head says of absent classes, the present ones stand at odds of 3 to 1."""
    labels = torch.tensor([0, 0, 1])
    cross_entropy = (2 * log(4 / 3) + log(4)) / 3
    entropy = 3 * (0.75 * log(4 / 3) + 0.25 * log(4))
    for shout in (-30.0, 0.0, 30.0):
        federation = begun(toy, bias=(log(3), 0.0, shout, shout), entropy=0.5)
        found = supervised(federation, torch.zeros(3, WIDTH), labels)
        assert found == pytest.approx(cross_entropy - 0.5 * entropy, rel=1e-5)


def test_supervised_loss_of_any_head(toy: Toy) -> None:
    draws = torch.Generator().manual_seed(0)
    weight, features = torch.randn(4, WIDTH, generator=draws) / 8, torch.randn(7, WIDTH, generator=draws)
    labels = torch.tensor([1, 0, 0, 1, 1, 0, 1])
    logits = features.double().numpy() @ weight.double().numpy().T[:, :2]
    log_shares = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    entropy = -(np.exp(log_shares) * log_shares).sum()
    expected = -log_shares[np.arange(7), labels.numpy()].mean() - 0.002 * entropy
    assert supervised(begun(toy, weight=weight, noise=0.0), features, labels) == pytest.approx(expected, rel=1e-5)


def test_the_prior_corrects_on_top_only_when_asked(toy: Toy) -> None:
    labels = torch.tensor([0, 1, 1, 1])
    found = supervised(begun(toy, entropy=0.0, with_prior=True), torch.zeros(4, WIDTH), labels)
    assert found == pytest.approx((log(15 / 12) + 3 * log(15 / 3)) / 4, rel=1e-5)


def test_rare_classes_are_shaken_in_proportion_and_the_commonest_never(toy: Toy) -> None:
    """The head answers 1 for class 0 along the one noise vector: a shaken image of class 1 costs log(1 + e)."""
    federation = begun(toy, noise_vectors=1, entropy=0.0)
    site = federation.sites[0]
    (noise,) = site.within_round["noise"]
    with torch.no_grad():
        site.model.head.weight[0] = noise / noise.square().sum()
    still, many = torch.zeros(4000, WIDTH), torch.ones(4000, dtype=torch.int64)
    assert supervised(federation, still, 0 * many) == pytest.approx(log(2), rel=1e-5)
    shaken = (supervised(federation, still, many) - log(2)) / (log(1 + math.e) - log(2))
    assert shaken == pytest.approx(1 - 3 / 12, abs=0.03)  # four standard deviations


def test_entropy_is_of_the_features_as_they_are(toy: Toy) -> None:
    """Noise that would settle every answer shows in the cross-entropy, and not in the entropy."""
    federation = begun(toy, noise_vectors=1, entropy=0.5)
    site = federation.sites[0]
    (noise,) = site.within_round["noise"]
    with torch.no_grad():
        site.model.head.weight[1] = 40.0 * noise / noise.square().sum()
    labels = torch.ones(8, dtype=torch.int64)
    found = supervised(federation, torch.zeros(8, WIDTH), labels)
    assert -0.5 * 8 * log(2) <= found + 1e-5 <= log(2) - 0.5 * 8 * log(2)


# Teacher's shares 1/2, 1/2 and student's 3/4, 1/4 at temperature 2, for the two absent classes.
TEACHER = (9.0, -9.0, 0.0, 0.0)
STUDENT = (-5.0, 5.0, 2 * log(3), 0.0)
FROM_TEACHER = 0.5 * log(4 / 3) + 0.5 * log(4)


def test_distillation_is_the_teachers_cross_entropy_to_the_student() -> None:
    absent = torch.tensor([False, False, True, True])
    student, teacher = torch.tensor([STUDENT]), torch.tensor([TEACHER])
    assert float(distillation(student, teacher, absent, 2.0)) == pytest.approx(FROM_TEACHER, rel=1e-5)
    assert float(distillation(teacher, student, absent, 2.0)) == pytest.approx(log(2), rel=1e-5)


def test_the_received_model_teaches_the_one_in_training(toy: Toy) -> None:
    """The received head gives every image TEACHER's logits. What it becomes in training does not matter any more."""
    federation = begun(toy, bias=TEACHER, distillation=3.0)
    site = federation.sites[0]
    batch = next(iter(site.epoch(1)))
    with torch.no_grad():
        site.model.head.bias.copy_(torch.tensor((0.0, 0.0, 8.0, -8.0)))
    logits = torch.tensor([STUDENT]).repeat(len(batch.labels), 1).requires_grad_()
    term = federation.method.penalty(site, batch, torch.zeros(len(batch.labels), WIDTH), logits)
    assert float(term.detach()) == pytest.approx(3.0 * FROM_TEACHER, rel=1e-5)
    (gradient,) = torch.autograd.grad(term, logits)
    # (p - q) / temperature, times the weight, over the batch.
    expected = [0.0, 0.0, 3.0 * 0.25 / 2, -3.0 * 0.25 / 2]
    assert gradient.sum(0).tolist() == pytest.approx(expected, abs=1e-6)
