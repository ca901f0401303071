"""The discrete Gaussian against its own definition, summed exactly."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from security.dp.noise import NoiseSource, _discrete_laplace, _exp_minus, discrete_gaussian


@pytest.mark.parametrize("sigma", [1, 2, 5])
def test_chances_are_those_of_the_definition(sigma: int) -> None:
    count = 60_000
    drawn = discrete_gaussian(NoiseSource(), sigma, count)
    support = np.arange(-4 * sigma, 4 * sigma + 1)
    weights = np.exp(-(np.arange(-40 * sigma, 40 * sigma + 1) ** 2) / (2 * sigma**2))
    expected = np.exp(-(support**2) / (2 * sigma**2)) / weights.sum() * count
    observed = np.array([(drawn == value).sum() for value in support])
    enough = expected > 5
    chi_square = ((observed - expected)[enough] ** 2 / expected[enough]).sum()
    assert stats.chi2.sf(chi_square, enough.sum()) > 1e-6


def test_large_sigma_is_gaussian_to_the_eye_of_a_test() -> None:
    sigma = 30 * 2**16
    drawn = discrete_gaussian(NoiseSource(), sigma, 20_000) / sigma
    assert stats.kstest(drawn, "norm").pvalue > 1e-6


def test_laplace_has_its_zero_once() -> None:
    drawn = _discrete_laplace(NoiseSource(), 2, 50_000)
    ratio = np.exp(-0.5)
    assert abs((drawn == 0).mean() - (1 - ratio) / (1 + ratio)) < 0.012
    assert abs((drawn > 0).mean() - (drawn < 0).mean()) < 0.02


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 1), (1, 3), (1, 1), (5, 2), (700, 1)])
def test_exponential_chances(numerator: int, denominator: int) -> None:
    count = 40_000
    top, bottom = (np.full(count, value, dtype=np.uint64) for value in (numerator, denominator))
    chance = np.exp(-numerator / denominator)
    margin = 6 * np.sqrt(chance * (1 - chance) / count) + 1e-12
    assert abs(_exp_minus(NoiseSource(), top, bottom).mean() - chance) <= margin


def test_the_largest_sigma_stays_within_64_bits() -> None:
    drawn = discrete_gaussian(NoiseSource(), 1 << 26, 5_000)
    assert abs(drawn.std() / (1 << 26) - 1) < 0.06
