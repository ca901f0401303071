"""Private class counts: released once per version of the data; prior, presence, size and weight follow from them.

Each image counts 1/m of a patient with m images, so a patient adds a vector of L1 norm one and moves the counts by at
most 1 however many images there are. Every public class gets a number, also one the site has no image of: which
classes exist must not show. All that is derived here is post-processing and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from security.dp.discrete import discrete_gaussian
from security.dp.events import LATTICE_ONE, Mechanism
from security.dp.ledger import Reservation
from security.dp.sampling import Units

Lattice = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateCounts:
    """Noisy patients per class. Stays at the site like everything else; it may be shown there."""

    noisy: tuple[float, ...]
    sigma: float

    @property
    def floor(self) -> float:
        """Below this a count is mostly noise; the same for every class."""
        return max(5.0, self.sigma)

    def prior(self) -> NDArray[np.float64]:
        """Class frequencies, each above zero: a rare class is lifted, none is masked."""
        lifted = np.maximum(np.array(self.noisy), self.floor)
        return np.asarray(lifted / lifted.sum(), dtype=np.float64)

    def present(self, threshold: float) -> NDArray[np.bool_]:
        """Decided on the noisy numbers alone. There is no exact test for an absent class under DP."""
        return np.asarray(np.array(self.noisy) >= threshold, dtype=np.bool_)

    def size(self) -> float:
        """Noisy number of patients, at least 1; from the raw numbers, since lifting each class would add up."""
        return max(1.0, float(sum(self.noisy)))

    def weight(self) -> int:
        """What the site may put into the weight slot of the secure sum instead of its exact size."""
        return max(1, round(self.size()))


def image_shares(units: Units) -> NDArray[np.float64]:
    """1/m for each image of a unit that has m of them."""
    return np.asarray(1.0 / units.sizes[units.of_image], dtype=np.float64)


def to_lattice(values: NDArray[np.float64]) -> Lattice:
    """Whole lattice units, rounded toward zero: a contribution can only get shorter, so its bound stays exact."""
    return np.trunc(values * LATTICE_ONE).astype(np.int64)


def count_sums(labels: NDArray[np.int64], units: Units, classes: int) -> Lattice:
    """The exact counts, in lattice units: the query whose sensitivity is one."""
    sums = np.zeros(classes, dtype=np.int64)
    np.add.at(sums, labels, to_lattice(image_shares(units)))
    return sums


def noisy_sums(sums: Lattice, reservation: Reservation, kind: Mechanism) -> tuple[NDArray[np.float64], float]:
    """Exact discrete Gaussian on the lattice, paid for by the reservation. Returns the release and its sigma."""
    event = reservation.claim(kind)
    noise = discrete_gaussian(reservation.noise, int(event.sigma * LATTICE_ONE), sums.size)
    return (sums + noise.reshape(sums.shape)) / LATTICE_ONE, event.sigma


def release_counts(labels: NDArray[np.int64], units: Units, classes: int, reservation: Reservation) -> PrivateCounts:
    noisy, sigma = noisy_sums(count_sums(labels, units, classes), reservation, Mechanism.CLASS_COUNTS)
    return PrivateCounts(noisy=tuple(noisy.tolist()), sigma=sigma)


def hit_sums(labels: NDArray[np.int64], predicted: NDArray[np.int64], units: Units, classes: int) -> Lattice:
    """(2, classes): how much was seen and how much was right. Sensitivity sqrt 2, one for each row."""
    right = np.where(labels == predicted, to_lattice(image_shares(units)), 0)
    hits = np.zeros(classes, dtype=np.int64)
    np.add.at(hits, labels, right)
    return np.stack([count_sums(labels, units, classes), hits])


def release_hits(
    labels: NDArray[np.int64], predicted: NDArray[np.int64], units: Units, classes: int, reservation: Reservation
) -> NDArray[np.float64]:
    """Validation under DP: per-class recall is the second row over the first, both noisy."""
    return noisy_sums(hit_sums(labels, predicted, units, classes), reservation, Mechanism.METRICS)[0]
