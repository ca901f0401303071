"""Releases on the lattice: class counts, validation tables and prototypes, each with exact discrete noise.

docs/spec/differential-privacy.md, sections 2 and 4. Counts are released once per version of the data; prior, presence,
size and weight are computed from them and cost nothing. Each image counts 1/m of a patient with m images, so a patient
adds a vector of L1 norm one and changes the counts by at most 1. Every class of the public list gets a number, also one
without any image: which classes exist here must not be visible. Prototypes are in the second part of the file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from security.dp.accountant import LATTICE_ONE, Mechanism
from security.dp.ledger import Reservation
from security.dp.noise import Units, discrete_gaussian

Lattice = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateCounts:
    """Noisy patients per class. Stays at the site; it may be shown there."""

    noisy: tuple[float, ...]
    sigma: float

    @property
    def floor(self) -> float:
        """Below this a count is mostly noise; the same for every class."""
        return max(5.0, self.sigma)

    def prior(self) -> NDArray[np.float64]:
        """Class frequencies, each above zero: a rare class is raised to `floor`, none is left out (section 2)."""
        lifted = np.maximum(np.array(self.noisy), self.floor)
        return np.asarray(lifted / lifted.sum(), dtype=np.float64)

    def present(self, threshold: float) -> NDArray[np.bool_]:
        """Decided on the noisy numbers alone. There is no exact test for an absent class under DP."""
        return np.asarray(np.array(self.noisy) >= threshold, dtype=np.bool_)

    def size(self) -> float:
        """Noisy number of patients, at least 1; from the raw numbers, since raising each class would add up."""
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
    """Exact discrete Gaussian on the lattice, paid for by the reservation. Returns the release and its sigma.

    :param sums: whole lattice units; every entry gets noise, also an empty one, because a zero would be an answer too.
    """
    event = reservation.claim(kind)
    noise = discrete_gaussian(reservation.noise, int(event.sigma * LATTICE_ONE), sums.size)
    return (sums + noise.reshape(sums.shape)) / LATTICE_ONE, event.sigma


def release_counts(labels: NDArray[np.int64], units: Units, classes: int, reservation: Reservation) -> PrivateCounts:
    noisy, sigma = noisy_sums(count_sums(labels, units, classes), reservation, Mechanism.CLASS_COUNTS)
    return PrivateCounts(noisy=tuple(noisy.tolist()), sigma=sigma)


def hit_sums(labels: NDArray[np.int64], predicted: NDArray[np.int64], units: Units, classes: int) -> Lattice:
    """(2, classes): how much was seen and how much was correct. Sensitivity sqrt 2: one for each row."""
    right = np.where(labels == predicted, to_lattice(image_shares(units)), 0)
    hits = np.zeros(classes, dtype=np.int64)
    np.add.at(hits, labels, right)
    return np.stack([count_sums(labels, units, classes), hits])


def release_hits(
    labels: NDArray[np.int64], predicted: NDArray[np.int64], units: Units, classes: int, reservation: Reservation
) -> NDArray[np.float64]:
    """Validation under DP: per-class recall is the second row over the first, both noisy."""
    return noisy_sums(hit_sums(labels, predicted, units, classes), reservation, Mechanism.METRICS)[0]


# Prototypes: noisy sums of unit features over cells that were fixed before the data were read (section 2).
#
# A feature is assigned to the nearest *previous noisy* prototype of its class. One patient therefore adds the mean of
# unit vectors in cells that depend on no other patient: the sums change by at most 1. Balancing by Sinkhorn or seeding
# on features has no such bound, because one record there moves others to other cells. Balance comes from potentials,
# which are public state and computed from the noisy sums.

Real = NDArray[np.float64]

POTENTIAL_RATE = 0.02
POTENTIAL_BOUND = 0.2
SPLIT_WIDTH = 0.3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrivatePrototypes:
    """Public state of the regulariser: everything in it is fixed in advance or follows from booked releases.

    :param vectors: (C, K, E) unit vectors.
    :param potentials: (C, K), subtracted from similarities when features are assigned.
    :param cells: how many of the K cells each class uses.
    :param projection: (E, d), public.
    """

    vectors: Real
    potentials: Real
    cells: tuple[int, ...]
    projection: Real

    def open_cells(self) -> NDArray[np.bool_]:
        return np.asarray(np.arange(self.vectors.shape[1])[None, :] < np.array(self.cells)[:, None], dtype=np.bool_)


def public_projection(width: int, dimensions: int, public_seed: str) -> Real:
    """Orthonormal rows from a public seed. Noise grows with the root of the dimension, so fewer are more precise."""
    if dimensions >= width:
        return np.eye(width)
    matrix = _public_generator(public_seed, "projection").standard_normal((width, dimensions))
    return np.asarray(np.linalg.qr(matrix)[0].T, dtype=np.float64)


def unit_features(features: Real, projection: Real) -> Real:
    """Project, then normalise; zero where that is impossible, so that no record makes the sums infinite."""
    finite = np.isfinite(features).all(axis=1, keepdims=True)
    projected = np.where(finite, features, 0.0) @ projection.T
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        unit = projected / np.linalg.norm(projected, axis=1, keepdims=True)
    return np.where(np.isfinite(unit).all(axis=1, keepdims=True), unit, 0.0)


def class_sums(unit: Real, labels: NDArray[np.int64], units: Units, classes: int) -> Lattice:
    """(C, E): one cell per class, for the very first release. Sensitivity one."""
    return _cell_sums(unit, labels, units, classes)


def prototype_sums(unit: Real, labels: NDArray[np.int64], units: Units, state: PrivatePrototypes) -> Lattice:
    """(C, K, E): every feature in the nearest open cell of its class. Sensitivity one."""
    classes, width, dimensions = state.vectors.shape
    closeness = np.einsum("ne,nke->nk", unit, state.vectors[labels]) - state.potentials[labels]
    nearest = np.where(state.open_cells()[labels], closeness, -np.inf).argmax(axis=1)
    sums = _cell_sums(unit, labels * width + nearest, units, classes * width)
    return sums.reshape(classes, width, dimensions)


def _cell_sums(unit: Real, cell: NDArray[np.int64], units: Units, cells: int) -> Lattice:
    sums = np.zeros((cells, unit.shape[1]), dtype=np.int64)
    np.add.at(sums, cell, to_lattice(unit * image_shares(units)[:, None]))
    return sums


def first_prototypes(
    unit: Real,
    labels: NDArray[np.int64],
    units: Units,
    *,
    cells: tuple[int, ...],
    projection: Real,
    public_seed: str,
    reservation: Reservation,
) -> PrivatePrototypes:
    """Release one sum per class, then split each direction about its mean along public random directions."""
    noisy, _ = noisy_sums(class_sums(unit, labels, units, len(cells)), reservation, Mechanism.PROTOTYPES)
    centre = _normalised(noisy)[:, None, :]
    width = max(cells)
    directions = _public_generator(public_seed, "split").standard_normal((len(cells), width, unit.shape[1]))
    # Features of a class are close together; splitting across the mean, not around the origin, divides them evenly.
    directions -= (directions * centre).sum(axis=2, keepdims=True) * centre
    spread = SPLIT_WIDTH * _normalised(directions) if width > 1 else np.zeros_like(directions)
    return PrivatePrototypes(
        vectors=_normalised(centre + spread),
        potentials=np.zeros((len(cells), width)),
        cells=cells,
        projection=projection,
    )


def refreshed(
    unit: Real, labels: NDArray[np.int64], units: Units, state: PrivatePrototypes, reservation: Reservation
) -> PrivatePrototypes:
    """Release the sums over the present cells, and take them as the next prototypes."""
    noisy, sigma = noisy_sums(prototype_sums(unit, labels, units, state), reservation, Mechanism.PROTOTYPES)
    return PrivatePrototypes(
        vectors=np.where(state.open_cells()[:, :, None], _normalised(noisy), state.vectors),
        potentials=_next_potentials(noisy, sigma, state),
        cells=state.cells,
        projection=state.projection,
    )


def _next_potentials(noisy: Real, sigma: float, state: PrivatePrototypes) -> Real:
    """Raise the potential of cells above the mean of their class. The mass comes from the sums that are already paid
    for: their component along the old prototype is the count times a mean cosine."""
    open_cells = state.open_cells()
    mass = np.maximum((noisy * state.vectors).sum(axis=2), sigma)
    share = np.where(open_cells, mass, 0).sum(axis=1, keepdims=True) / open_cells.sum(axis=1, keepdims=True)
    moved = state.potentials + POTENTIAL_RATE * (np.log(mass) - np.log(share))
    return np.where(open_cells, np.clip(moved, -POTENTIAL_BOUND, POTENTIAL_BOUND), 0.0)


def cells_for(noisy_counts: tuple[float, ...], *, sigma: float, dimensions: int, most: int) -> tuple[int, ...]:
    """As many cells as can be distinguished from the noise, at least one; decided on noisy counts only."""
    noise = sigma * dimensions**0.5
    return tuple(int(min(most, max(1, count // noise))) for count in noisy_counts)


def similarity(features: Tensor, state: PrivatePrototypes) -> Tensor:
    """(N, C) cosine to the nearest open prototype of each class; each row depends on its own record only."""
    projection, vectors = (torch.as_tensor(x).to(features) for x in (state.projection, state.vectors))
    unit = functional.normalize(features @ projection.T, dim=1)
    cosine = torch.einsum("ne,cke->nck", unit, vectors)
    closed = torch.as_tensor(~state.open_cells(), device=features.device)
    return cosine.masked_fill(closed, -2.0).amax(dim=2)


def _normalised(vectors: Real) -> Real:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-300))


def _public_generator(public_seed: str, purpose: str) -> np.random.Generator:
    """Repeatable by anyone, on purpose: nothing drawn here protects a patient."""
    digest = hashlib.sha256(f"{purpose}:{public_seed}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "big")))
