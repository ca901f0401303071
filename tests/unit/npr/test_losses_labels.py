"""Losses of several labels: worked out by hand, and equal to the losses of two classes for one label."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from npr.config import TrainConfig
from npr.losses import ClassPrior, LabelPrior, balanced_sigmoid, balanced_softmax, label_npr_loss, npr_loss
from npr.prototypes import Prototypes

FLAT = TrainConfig(labels="many", temperature=1.0)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def prior_of(labels: Tensor) -> LabelPrior:
    return LabelPrior(labels.sum(0), len(labels))


def test_log_odds_by_hand() -> None:
    prior = LabelPrior(torch.tensor([1, 3, 0, 4]), 4)
    assert prior.answers.tolist() == [[3, 1], [1, 3], [4, 0], [0, 4]]
    assert prior.present.tolist() == [True, True, False, True]
    assert prior.log().tolist() == pytest.approx([math.log(1 / 3), math.log(3), -math.inf, math.inf])
    assert prior.log(0.5)[2].item() == pytest.approx(math.log(0.5 / 1.5))


def test_the_balanced_sigmoid_by_hand() -> None:
    """One image with the first of two labels, whose odds are 1 to 3 and 3 to 1."""
    logits, labels = torch.tensor([[0.4, -1.0]]), torch.tensor([[1, 0]])
    odds = torch.tensor([math.log(1 / 3), math.log(3)])
    first, second = sigmoid(0.4 + math.log(1 / 3)), sigmoid(-1.0 + math.log(3))
    expected = -(math.log(first) + math.log(1 - second)) / 2
    assert balanced_sigmoid(logits, labels, odds).item() == pytest.approx(expected, abs=1e-6)


def test_for_one_label_it_is_the_balanced_softmax_of_two_classes() -> None:
    """Logits a (no) and b (yes) give the loss and the gradient of the one logit b - a, at any counts."""
    draws = torch.Generator().manual_seed(0)
    pairs = torch.randn(50, 2, generator=draws, dtype=torch.float64, requires_grad=True)
    labels = (torch.rand(50, generator=draws) < 0.2).long()
    counts = torch.bincount(labels, minlength=2)
    two = balanced_softmax(pairs, labels, ClassPrior(counts).log())
    one = balanced_sigmoid(pairs[:, 1:] - pairs[:, :1], labels[:, None], LabelPrior(counts[1:], 50).log())
    assert one.item() == pytest.approx(two.item(), abs=1e-7)
    gradients = [torch.autograd.grad(loss, pairs, retain_graph=True)[0] for loss in (one, two)]
    assert torch.allclose(*gradients, atol=1e-8)
    # The twin: without the odds it is another loss.
    assert abs(balanced_sigmoid(pairs[:, 1:] - pairs[:, :1], labels[:, None], torch.zeros(1)).item() - two.item()) > 0.1


def test_the_prediction_that_minimises_it_is_the_balanced_one() -> None:
    """Nine images in ten have the label, whatever is in them: its logit goes to zero, a probability of one half."""
    labels = torch.tensor([[1]] * 9 + [[0]])
    z = torch.zeros(1, requires_grad=True)
    loss = balanced_sigmoid(z.expand(10, 1), labels, prior_of(labels).log())
    assert torch.autograd.grad(loss, z)[0].item() == pytest.approx(0.0, abs=1e-7)


def test_without_odds_it_is_binary_cross_entropy() -> None:
    draws = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(7, 3, generator=draws), torch.randint(0, 2, (7, 3), generator=draws)
    plain = balanced_sigmoid(logits, labels, torch.zeros(3))
    assert plain.item() == pytest.approx(binary_cross_entropy_with_logits(logits, labels.float()).item(), abs=1e-6)


@pytest.mark.parametrize("value", [0, 1])
def test_a_label_that_all_have_or_none_has_no_loss_and_no_gradient(value: int) -> None:
    labels = torch.tensor([[value, 0], [value, 1]])
    logits = torch.tensor([[5.0, 0.3], [-5.0, 0.3]], requires_grad=True)
    loss = balanced_sigmoid(logits, labels, prior_of(labels).log())
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.equal(gradient[:, 0], torch.zeros(2)) and (gradient[:, 1] != 0).all()
    assert loss.item() == pytest.approx(-(math.log(1 - sigmoid(0.3)) + math.log(sigmoid(0.3))) / 4, abs=1e-6)


# Non-parametric regularisation.

# In the plane: of the first label, images without it point right and those with it up; of the second, images with it
# point left, and there is none without it.
CROSS = Prototypes(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), torch.tensor([0, 1, 3]))


def test_the_loss_towards_prototypes_by_hand() -> None:
    features = torch.tensor([[0.6, 0.8]]) * 7.0
    answers = CROSS.answers(features, 2, 1.0)
    assert answers[0, 0].tolist() == pytest.approx([0.6, 0.8])
    assert answers[0, 1, 1].item() == pytest.approx(-0.6) and answers[0, 1, 0].item() < -1e8
    labels = torch.tensor([[1, 1]])
    expected = (-math.log(sigmoid(0.8 - 0.6)) + 0.0) / 2
    assert label_npr_loss(features, labels, CROSS, FLAT, prior_of(labels)).item() == pytest.approx(expected, abs=1e-6)
    warmer = FLAT.changed(temperature=0.1)
    expected = -math.log(sigmoid((0.8 - 0.6) / 0.1)) / 2
    assert label_npr_loss(features, labels, CROSS, warmer, prior_of(labels)).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("balance", ["none", "prior", "class_mean"])
def test_for_one_label_it_is_the_loss_of_two_classes(balance: str) -> None:
    draws = torch.Generator().manual_seed(2)
    vectors = normalize(torch.randn(5, 4, generator=draws), dim=1)
    prototypes = Prototypes(vectors, torch.tensor([0, 0, 0, 1, 1]))
    features = torch.randn(12, 4, generator=draws)
    labels = torch.tensor([1, 0, 0, 0] * 3)
    config = TrainConfig(npr_balance=balance)
    two = npr_loss(features, labels, prototypes, config, ClassPrior(torch.bincount(labels)))
    one = label_npr_loss(features, labels[:, None], prototypes, config, prior_of(labels[:, None]))
    assert one.item() == pytest.approx(two.item(), abs=1e-6)


@pytest.mark.parametrize("balance", ["none", "prior", "class_mean"])
def test_an_answer_that_a_site_has_not_leaves_gradients_finite(balance: str) -> None:
    features = torch.tensor([[0.6, 0.8], [1.0, 0.2]], requires_grad=True)
    labels = torch.tensor([[1, 1], [0, 1]])
    config = FLAT.changed(npr_balance=balance)
    loss = label_npr_loss(features, labels, CROSS, config, prior_of(labels))
    (gradient,) = torch.autograd.grad(loss, features)
    assert torch.isfinite(gradient).all() and gradient.abs().max() > 0
    only = torch.tensor([[1, 1], [1, 1]])
    alone = Prototypes(CROSS.vectors[1:], CROSS.owners[1:])
    assert label_npr_loss(features, only, alone, FLAT, prior_of(only)).item() == 0.0
