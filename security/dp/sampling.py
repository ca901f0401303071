"""Poisson sampling by unit of privacy: for each patient separately, whether they take part in a step.

docs/spec/differential-privacy.md, section 4. The accountant may count sampling as protection only if the draws are
independent, have exactly the booked rate, and are unknown to whoever sees the result. So they come from the secret
generator, and a batch is never truncated, padded or discarded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import DataError
from security.dp.accountant import RATE_ONE
from security.dp.noise import NoiseSource


class Units:
    """Which images belong to which unit of privacy (patient, lesion or image)."""

    def __init__(self, unit_of_image: Sequence[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self.of_image: NDArray[np.int64] = np.array(
            [numbers.setdefault(unit, len(numbers)) for unit in unit_of_image], dtype=np.int64
        )
        self.sizes: NDArray[np.int64] = np.bincount(self.of_image, minlength=len(numbers))
        # Images sorted by unit, so that a unit's images are one slice.
        self._images = np.argsort(self.of_image, kind="stable")
        self._starts = np.concatenate(([0], np.cumsum(self.sizes)[:-1])).astype(np.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    def image_of(self, unit: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.int64]:
        images: NDArray[np.int64] = self._images[self._starts[unit] + position]
        return images


class PoissonSampler:
    """Draws the images of one step: every unit with probability rate / 2^24, then one of its images, uniformly.

    One image per sampled unit keeps the sensitivity at one clipped gradient, however many images a patient has.
    """

    def __init__(self, units: Units, *, rate: int, noise: NoiseSource) -> None:
        if not 1 <= rate <= RATE_ONE:
            raise DataError(f"sampling rate {rate} is not in 1..2^24")
        self._units = units
        self._rate = rate
        self._noise = noise

    def draw_views(self, views: int) -> NDArray[np.int64]:
        """(sampled units, views): each unit's images in random order, over and over, until there are so many.

        The mean of a patient's gradients over several images is one gradient of that patient: it is clipped once.
        """
        drawn = np.flatnonzero(self._coins() < self._rate)
        sizes = self._units.sizes[drawn]
        start = self._noise.below(sizes.astype(np.uint64)).astype(np.int64)
        positions = (start[:, None] + np.arange(views)[None, :]) % sizes[:, None]
        return self._units.image_of(np.repeat(drawn[:, None], views, axis=1), positions)

    def _coins(self) -> NDArray[np.uint32]:
        """24 fresh bits for each unit, to compare with the booked rate: both are whole, so the rate is exact."""
        return np.frombuffer(self._noise.bytes(4 * len(self._units)), dtype=np.uint32) >> np.uint32(8)

    def draw(self) -> NDArray[np.int64]:
        """Indices of the sampled images. An empty batch is possible; it still gets its noise and is charged, because to
        skip it would reveal that nobody was sampled (section 2)."""
        drawn = np.flatnonzero(self._coins() < self._rate)
        sizes = self._units.sizes[drawn].astype(np.uint64)
        return self._units.image_of(drawn, self._noise.below(sizes).astype(np.int64))
