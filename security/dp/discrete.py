"""Exact discrete Gaussian noise on whole numbers (Canonne, Kamath and Steinke, arXiv 2004.00010, algorithms 1 to 3).

Only whole numbers are drawn and compared, so there is no rounding to reason about. The noise satisfies the same
concentrated-DP bound as the continuous Gaussian of the same sigma (their theorem 4), for vectors too. Everything is
vectorised: a loop runs over the values that are still undecided.

Sizes: sigma is at most 2^26 lattice units (events.py), so 2 sigma^2 k stays below 2^63 for k up to 2^9, and squares fit
64 bits up to 64 sigma. A proposal beyond that has a chance of e^-64 (2^-92), a run of 512 an even smaller one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from security.dp.noise import NoiseSource

Whole = NDArray[np.uint64]
_ONE = np.uint64(1)


def discrete_gaussian(noise: NoiseSource, sigma: int, count: int) -> NDArray[np.int64]:
    """`count` independent draws with chance proportional to exp(-x^2 / (2 sigma^2)) over all whole x."""
    out = np.empty(count, dtype=np.int64)
    todo = np.arange(count)
    scale = np.uint64(2 * sigma * sigma)
    while todo.size:
        proposal = _discrete_laplace(noise, sigma, todo.size)
        # With a proposal of scale sigma the acceptance chance is exp(-(|x| - sigma)^2 / (2 sigma^2)).
        distance = np.abs(np.abs(proposal) - sigma).astype(np.uint64)
        accepted = _exp_minus(noise, distance * distance, np.full(todo.size, scale))
        out[todo[accepted]] = proposal[accepted]
        todo = todo[~accepted]
    return out


def _discrete_laplace(noise: NoiseSource, scale: int, count: int) -> NDArray[np.int64]:
    """Chance proportional to exp(-|x| / scale)."""
    out = np.empty(count, dtype=np.int64)
    todo = np.arange(count)
    while todo.size:
        bound = np.full(todo.size, np.uint64(scale))
        low = noise.below(bound)
        kept = _exp_minus(noise, low, bound)
        value = (low + np.uint64(scale) * _successes_of_exp_minus_one(noise, todo.size)).astype(np.int64)
        negative = noise.words(todo.size) >> np.uint64(63) == _ONE
        # Minus zero would give zero twice its chance.
        kept &= ~(negative & (value == 0))
        out[todo[kept]] = np.where(negative, -value, value)[kept]
        todo = todo[~kept]
    return out


def _exp_minus(noise: NoiseSource, numerator: Whole, denominator: Whole) -> NDArray[np.bool_]:
    """True with chance exp(-numerator/denominator), exactly."""
    whole, rest = numerator // denominator, numerator % denominator
    result = _exp_minus_small(noise, rest, denominator)
    # exp(-whole) is a run of `whole` successes of exp(-1); nothing needs to be drawn once a run is broken.
    left = np.where(result, whole, np.uint64(0))
    while (active := np.flatnonzero(left)).size:
        ones = np.ones(active.size, dtype=np.uint64)
        success = _exp_minus_small(noise, ones, ones)
        left[active] = np.where(success, left[active] - _ONE, np.uint64(0))
        result[active[~success]] = False
    return result


def _exp_minus_small(noise: NoiseSource, numerator: Whole, denominator: Whole) -> NDArray[np.bool_]:
    """As above for ratios up to one: a run of chances ratio/1, ratio/2, ... that first fails at an odd place."""
    stop = np.zeros(numerator.size, dtype=np.uint64)
    active = np.arange(numerator.size)
    k = _ONE
    while active.size:
        held = noise.below(denominator[active] * k) < numerator[active]
        stop[active[~held]] = k
        active = active[held]
        k += _ONE
    odd: NDArray[np.bool_] = stop % np.uint64(2) == _ONE
    return odd


def _successes_of_exp_minus_one(noise: NoiseSource, count: int) -> Whole:
    """How many draws of chance exp(-1) succeed before the first failure."""
    out = np.zeros(count, dtype=np.uint64)
    active = np.arange(count)
    while active.size:
        ones = np.ones(active.size, dtype=np.uint64)
        active = active[_exp_minus_small(noise, ones, ones)]
        out[active] += _ONE
    return out
