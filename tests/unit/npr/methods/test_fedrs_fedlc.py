"""FedRS and FedLC change logits before the softmax. Here the exponentials of what they make of them are fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import log

import pytest
import torch

from npr.federation import Federation

Toy = Callable[..., Federation]

# FedRS at a site with 6 images of class 0, 2 of class 1: frequencies 3/4 and 1/4, and 1/4 is the floor for the others.
RESTRICTED = [log(2), 0.0, 2 * log(3), -2 * log(2)]
# FedLC at a site with 16, 81, 0 and 1 images: n to the power -1/4 is 1/2, 1/3, and 1. Class 2 must not count at all.
COUNTS = (16, 81, 0, 1)
MARGIN = (1 / 2, 1 / 3, 0.0, 1.0)


def loss(federation: Federation, logits: list[float] | torch.Tensor, label: int) -> torch.Tensor:
    given = torch.as_tensor(logits).reshape(1, -1)
    return federation.method.supervised(federation.sites[0], given, given, torch.tensor([label]))


def restricted(toy: Toy, **options: float | str) -> Federation:
    return toy("fedrs", counts=((6, 2, 0, 0),), options=options)


def calibrated(toy: Toy, **options: float | bool) -> Federation:
    return toy("fedlc", counts=(COUNTS,), options=options)


def with_margin(tau: float) -> list[float]:
    """Logits that leave 2, 3 and 5 as exponentials once the margin is taken off; the absent class shouts."""
    return [tau * margin + value for margin, value in zip(MARGIN, (log(2), log(3), 50.0, log(5)), strict=True)]


@pytest.mark.parametrize(
    ("alpha", "absent"),
    [(1.0, 9 / 4 + 1 / 16), (0.5, 3 / 4 + 1 / 8), (0.0, 1 / 4 + 1 / 4)],
)
def test_fedrs_scales_absent_logits_under_balanced_softmax(toy: Toy, alpha: float, absent: float) -> None:
    """Present classes weigh 3/4 * 2 and 1/4 * 1; absent ones 1/4 * 9^alpha and 1/4 * (1/4)^alpha."""
    federation = restricted(toy, alpha=alpha)
    total = 3 / 2 + 1 / 4 + absent
    assert float(loss(federation, RESTRICTED, 0)) == pytest.approx(log(total / (3 / 2)), rel=1e-5)
    assert float(loss(federation, RESTRICTED, 1)) == pytest.approx(log(total / (1 / 4)), rel=1e-5)


def test_fedrs_halves_absent_logits_and_their_gradients_by_default(toy: Toy) -> None:
    """Exponentials 12, 2, 6 and 1 eighths: an absent class with probability 6/21 gets half of that as gradient."""
    logits = torch.tensor([RESTRICTED], requires_grad=True)
    value = loss(restricted(toy), logits, 0)
    (gradient,) = torch.autograd.grad(value, logits)
    assert float(value.detach()) == pytest.approx(log(21 / 12), rel=1e-5)
    assert gradient[0].tolist() == pytest.approx([12 / 21 - 1, 2 / 21, 3 / 21, 0.5 / 21], rel=1e-4)


def test_fedrs_with_an_epsilon_floor_leaves_the_present_classes_alone(toy: Toy) -> None:
    federation = restricted(toy, floor="epsilon")
    assert float(loss(federation, RESTRICTED, 0)) == pytest.approx(log(7 / 6), rel=1e-5)
    logits = torch.tensor([RESTRICTED], requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(federation, logits, 0), logits)
    # 1e-9 * 3 of 7/4, times alpha: not a mask.
    assert float(gradient[0, 2]) == pytest.approx(0.5 * 3e-9 / 1.75, rel=1e-3)


def test_fedrs_scales_without_balanced_softmax_too(toy: Toy) -> None:
    federation = toy("fedrs", counts=((6, 2, 0, 0),), supervision="ce")
    assert float(loss(federation, RESTRICTED, 0)) == pytest.approx(log((2 + 1 + 3 + 1 / 2) / 2), rel=1e-5)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_fedlc_takes_off_counts_to_the_power_minus_a_quarter(toy: Toy, tau: float) -> None:
    federation = calibrated(toy, tau=tau)
    for label, share in ((0, 2 / 10), (1, 3 / 10), (3, 5 / 10)):
        assert float(loss(federation, with_margin(tau), label)) == pytest.approx(-log(share), rel=1e-5)


def test_fedlc_masks_absent_classes(toy: Toy) -> None:
    federation = calibrated(toy)
    values = []
    for shout in (-50.0, 0.0, 50.0):
        logits = torch.tensor([[0.0, 0.0, shout, 0.0]], requires_grad=True)
        value = loss(federation, logits, 3)
        (gradient,) = torch.autograd.grad(value, logits)
        values.append(float(value.detach()))
        assert float(gradient[0, 2]) == 0.0
    expected = log(sum(math.exp(-margin) for margin in (1 / 2, 1 / 3, 1.0))) + 1.0
    assert values == pytest.approx([expected] * 3, rel=1e-5)


def test_fedlc_adds_the_log_prior_only_when_asked(toy: Toy) -> None:
    """The exponentials 2, 3, 5 are multiplied by 16, 81, 1."""
    federation = calibrated(toy, with_prior=True)
    for label, share in ((0, 32 / 280), (1, 243 / 280), (3, 5 / 280)):
        assert float(loss(federation, with_margin(1.0), label)) == pytest.approx(-log(share), rel=1e-5)
