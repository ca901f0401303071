"""Poisson sampling: the booked rate, one image per patient, each image of a patient alike."""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import ConfigError, DataError
from security.dp.accountant import RATE_ONE, dp_sgd_event, rate_at_least
from security.dp.noise import NoiseSource, PoissonSampler, Units


def test_inclusion_matches_the_ledgers_rate() -> None:
    event = dp_sgd_event(multiplier=1.0, clip=1.0, rate=rate_at_least(64 / 350), steps=1)
    units = Units(range(1000))
    sampler = PoissonSampler(units, rate=event.rate, noise=NoiseSource())
    drawn = sum(len(sampler.draw()) for _ in range(100))
    deviation = np.sqrt(event.q * (1 - event.q) / 100_000)
    assert abs(drawn / 100_000 - event.q) < 5 * deviation


def test_one_uniformly_drawn_image_for_each_drawn_patient() -> None:
    owners = np.array(["a", "b", "a", "c", "a", "b"])
    units = Units(owners.tolist())
    sampler = PoissonSampler(units, rate=RATE_ONE, noise=NoiseSource())
    seen = np.zeros(6)
    for _ in range(3000):
        drawn = sampler.draw()
        assert sorted(owners[drawn]) == ["a", "b", "c"]
        seen[drawn] += 1
    expected = np.array([1000, 1500, 1000, 3000, 1000, 1500])
    assert (np.abs(seen - expected) <= 6 * np.sqrt(expected)).all()


def test_batches_vary_in_size_and_may_be_empty() -> None:
    sampler = PoissonSampler(Units(range(20)), rate=rate_at_least(0.05), noise=NoiseSource())
    sizes = {len(sampler.draw()) for _ in range(300)}
    assert 0 in sizes
    assert len(sizes) > 2


def test_draws_do_not_repeat_under_a_fixed_experiment_seed() -> None:
    def draw() -> list[int]:
        np.random.seed(7)  # the experiment's seed, which must have no say here
        return PoissonSampler(Units(range(200)), rate=RATE_ONE // 2, noise=NoiseSource()).draw().tolist()

    assert draw() != draw()


def test_no_patients_at_all_is_an_empty_batch() -> None:
    assert PoissonSampler(Units([]), rate=RATE_ONE, noise=NoiseSource()).draw().size == 0


@pytest.mark.parametrize("rate", [0, RATE_ONE + 1])
def test_impossible_rates_are_refused(rate: int) -> None:
    with pytest.raises(DataError):
        PoissonSampler(Units([1]), rate=rate, noise=NoiseSource())


@pytest.mark.parametrize("q", [0.0, -0.1, 1.01])
def test_impossible_shares_are_refused(q: float) -> None:
    with pytest.raises(ConfigError):
        rate_at_least(q)


@pytest.mark.parametrize("q", [1.0, 64 / 2700, 2.0**-24, 1e-9])
def test_a_rate_is_never_rounded_down(q: float) -> None:
    assert rate_at_least(q) / RATE_ONE >= q


def test_views_are_the_images_of_the_patient_each_as_often_as_another() -> None:
    owners = [0, 0, 0, 1, 2, 2]
    views = PoissonSampler(Units(owners), rate=RATE_ONE, noise=NoiseSource()).draw_views(6)
    assert views.shape == (3, 6)
    for row in views:
        (owner,) = {owners[image] for image in row}
        held = [image for image, other in enumerate(owners) if other == owner]
        assert sorted(row.tolist()) == sorted(held * (6 // len(held)))
