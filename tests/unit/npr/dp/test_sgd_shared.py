"""Noise that sites share: exact whole numbers, a bound that holds to the unit, and the variance that was booked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from lazaret.errors import ConfigError
from npr.dp import sgd
from npr.dp.sgd import SharedStep, momentum_units, noised, patient_units
from npr.model import ModelSpec, build_model
from security.dp.accountant import MechanismEvent, rdp_curve, shared_event, shared_multiplier
from security.dp.ledger import Reservation
from security.dp.noise import NoiseSource, SharedNoise
from security.dp.planner import Schedule
from security.secagg.thresholds import least_honest, quorum


def reservation(*events: MechanismEvent) -> Reservation:
    return Reservation(seq=1, events=list(events), noise=NoiseSource())


def test_one_patient_moves_the_sum_by_the_clip_at_most_in_whole_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 40, generator=generator) * torch.logspace(-3, 3, 300)[:, None]
    rows[7], rows[8] = torch.nan, torch.inf
    for units in (5, 64, 4096):
        found = patient_units(rows, clip=0.7, units=units)
        assert ((found**2).sum(1) <= units**2).all() and not found[7:9].any()
        assert (found[200:] != 0).any()


def test_rounding_at_random_has_no_such_bound_twin() -> None:
    """A vector of 5 units becomes longer when its coordinates may be rounded up: the reason for truncation."""
    longest = max(
        math.hypot(math.ceil(5 * math.cos(angle)), math.ceil(5 * math.sin(angle)))
        for angle in np.linspace(0.01, 1.56, 500)
    )
    assert longest > 5.8
    truncated = patient_units(
        torch.tensor([[math.cos(a), math.sin(a)] for a in np.linspace(0, 6.28, 500)]), clip=1, units=5
    )
    assert (truncated**2).sum(1).max() <= 25


UNITS, RECORDS = 1 << 26, 16


def moved_by_one(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far the sum of a step moves, over its sensitivity, when one patient is there as well: for each of several,
    who come first, so that all others change their place and their batch."""
    monkeypatch.setattr(sgd, "noised", lambda total, *_, **__: total)
    generator = torch.Generator().manual_seed(3)
    spec = ModelSpec(architecture="test_efficientnet", num_classes=8, image_size=16, norm="group", trainable="head")
    model, images = build_model(spec).train(), torch.randn(RECORDS, 3, 16, 16, generator=generator)
    labels = torch.arange(RECORDS) % 8
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    noise = SharedNoise(sites=10, honest=4, dimensions=size, units=UNITS)
    step = SharedStep(model, noise=noise, clip=1e-3, micro_batch=8)

    def losses(rows: np.ndarray) -> torch.Tensor:
        logits = model.logits(model.features(images[rows[:, 0]]))
        return functional.cross_entropy(logits, labels[rows[:, 0]], reduction="none")

    def total(patients: list[int]) -> np.ndarray:
        booked = reservation(shared_event(units=UNITS, sigma=100, honest=4, dimensions=size))
        return step.upload(np.array(patients)[:, None], losses, booked)

    everybody = list(range(RECORDS))
    others = {first: [one for one in everybody if one != first] for first in everybody}
    moves = [total([first, *rest]) - total(rest) for first, rest in others.items()]
    return [float(np.linalg.norm(move)) / UNITS for move in moves]


def test_one_patient_more_shifts_others_to_other_batches_and_the_bound_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.998 < max(moved_by_one(monkeypatch)) <= 1.0


def test_without_a_margin_the_others_last_bits_break_the_bound_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgd, "NORM_MARGIN", 0.0)
    assert max(moved_by_one(monkeypatch)) > 1.0


def in_ring(uploads: Sequence[np.ndarray]) -> np.ndarray:
    """The sum as a ring of 32 bits has it, read as signed numbers."""
    return sum((upload.astype(np.uint32) for upload in uploads), np.zeros(1, np.uint32)).view(np.int32)


@pytest.mark.parametrize("survivors", [10, 8, 7])
def test_the_sum_is_exact_and_has_the_booked_variance_with_dropouts_too(survivors: int) -> None:
    shared = SharedNoise(sites=10, honest=4, dimensions=60_000, units=256)
    sigma = shared.sigma(2.0)
    generator = np.random.default_rng(0)
    totals = [generator.integers(-900, 900, shared.dimensions) for _ in range(10)]
    uploads = [noised(total, shared, sigma=sigma, reservation=reservation()) for total in totals]
    kept = range(survivors)
    opened = in_ring([uploads[site] for site in kept])
    assert (opened == sum(uploads[site] for site in kept)).all(), "within range, so nothing wraps"
    noise = opened - sum(totals[site] for site in kept)
    assert float(noise.var()) == pytest.approx(survivors * sigma**2, rel=0.02)
    assert float(noise.var()) >= shared.honest * sigma**2, "never below what was booked"


def test_a_coordinate_beyond_its_range_is_cut_before_the_noise() -> None:
    shared = SharedNoise(sites=10, honest=4, dimensions=3, units=256)
    bound = shared.saturation(64)
    sent = noised(np.array([2**40, -(2**40), 5]), shared, sigma=64, reservation=reservation())
    assert abs(sent[0] - bound) < 700 and abs(sent[1] + bound) < 700
    total = in_ring([np.array([bound, -bound, 0])] * 10)
    assert total.tolist() == [10 * bound, -10 * bound, 0]
    with pytest.raises(ConfigError, match="too small"):
        SharedNoise(sites=10, honest=4, dimensions=3, units=256, bits=12).saturation(64)


def test_the_parts_of_the_momentum_add_up_and_leave_room_for_sum_and_noise() -> None:
    shared = SharedNoise(sites=10, honest=4, dimensions=4, units=256, unit=1e-3, weight_cap=500, momentum=0.9)
    moved = np.array([0.25, -0.031, 0.0, 1e9], dtype=np.float32)
    weights = [1, 17, 300, 499, 500, 5000]
    parts = sum(momentum_units(moved, shared, weight=weight) for weight in weights)
    step = parts * shared.unit / sum(min(weight, 500) for weight in weights)
    assert step[:3] == pytest.approx([0.9 * 0.25, -0.9 * 0.031, 0.0], rel=1e-3)
    part, sigma = momentum_units(moved, shared, weight=500)[3], 64
    assert 10 * (part + shared.saturation(sigma) + 9 * sigma) < 1 << 31, "it is cut, so that no sum wraps"
    plain = replace(shared, momentum=0.0)
    assert 10 * (part + plain.saturation(sigma) + 9 * sigma) >= 1 << 31, "with no room of its own it would"


# Accounting: brute force in two dimensions, with the very distribution of a sum of discrete Gaussians.


def discrete(sigma: float, reach: int) -> np.ndarray:
    x = np.arange(-reach, reach + 1)
    p = np.exp(-(x**2) / (2 * sigma**2))
    return p / p.sum()


@pytest.mark.parametrize(("sigma", "honest"), [(3, 1), (3, 2), (4, 3)])
def test_the_booked_divergence_is_that_of_the_sum_by_brute_force(sigma: int, honest: int) -> None:
    """The Renyi divergence between a sum and the same sum with one patient more, over every shift of length 5."""
    one = discrete(sigma, 20 * sigma)
    total = one
    for _ in range(honest - 1):
        total = np.convolve(total, one)
    event = shared_event(sigma=sigma, units=5, honest=honest, dimensions=2)
    shifts = [(a, b) for a, b in itertools.product(range(6), repeat=2) if 0 < a * a + b * b <= 25]
    for order in (2.0, 3.5, 8.0):
        worst = max(sum(_divergence(total, shift, order) for shift in pair) for pair in shifts)
        booked = rdp_curve([event], (order,))[0]
        assert worst <= booked * (1 + 1e-6)
        assert worst == pytest.approx(booked, rel=0.01), "and no looser than one per cent"


def _divergence(p: np.ndarray, shift: int, order: float) -> float:
    """Of one coordinate; coordinates are independent, so those of two dimensions add up."""
    if shift == 0:
        return 0.0
    moved, still = p[:-shift], p[shift:]
    keep = (moved > 1e-280) & (still > 1e-280)
    terms = order * np.log(moved[keep]) + (1 - order) * np.log(still[keep])
    return float(np.log(np.exp(terms - terms.max()).sum()) + terms.max()) / (order - 1)


def test_both_figures_agree_with_an_independent_computation() -> None:
    """Inside the sum: a Gaussian of sqrt(h) sigma. Alone: of sigma. By the closed form alpha / (2 m^2)."""
    event = shared_event(sigma=300, units=256, honest=4, dimensions=1000, steps=20)
    for each, honest in ((event, 4), (event.alone, 1)):
        multiplier = math.sqrt(honest) * 300 / 256
        assert each.multiplier == pytest.approx(multiplier, rel=1e-9)
        assert rdp_curve([each], (6.0,))[0] == pytest.approx(20 * 6 / (2 * multiplier**2), rel=0.01)
    assert MechanismEvent.from_json(event.to_json()) == event
    assert shared_multiplier(3, 1, 4, 10**7) < shared_multiplier(3, 1, 4, 10) * (1 + 1e-12)


@pytest.mark.parametrize("change", [{"sigma": 2}, {"sigma": 2.5}, {"honest": 0}, {"dimensions": 0}])
def test_noise_that_has_no_proof_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        shared_event(**{"sigma": 10, "units": 5, "honest": 2, "dimensions": 4, **change})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one step a round"):
        Schedule(
            rounds=2,
            steps=3,
            rate=1 << 24,
            multiplier=1.0,
            clip=1.0,
            shared=SharedNoise(sites=4, honest=1, dimensions=2),
        )


def test_honest_survivors_are_counted_over_every_cohort_that_is_allowed() -> None:
    assert least_honest(roster=10, c=3, m=7) == 4
    for roster, c, m in ((10, 3, 3), (7, 2, 3), (4, 1, 3), (10, 0, 3)):
        least = least_honest(roster=roster, c=c, m=m)
        assert least <= quorum(n=roster, c=c, m=m) - max(c, 1)
        assert least >= 1
