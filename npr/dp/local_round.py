"""One site's round under DP, all mechanisms in their order: counts once, prototypes when due, then DP-SGD.

What the round needs of the outside world is a model with `features` and `logits`, a way to read images, and a
reservation. The experiment's seed has no say in any draw made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from npr.dp.counts import PrivateCounts, release_counts
from npr.dp.losses import balanced_softmax_per_record, npr_per_record
from npr.dp.prototypes import (
    PrivatePrototypes,
    cells_for,
    first_prototypes,
    public_projection,
    refreshed,
    unit_features,
)
from npr.dp.sgd import DpSgd, Indices, StepReport
from security.dp.events import Mechanism
from security.dp.ledger import Reservation
from security.dp.planner import Schedule
from security.dp.sampling import Units
from security.errors import LocalProtocolError


class FeatureModel(Protocol):
    def features(self, images: Tensor) -> Tensor: ...

    def logits(self, features: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateData:
    """A site's training records. `units` says who is protected.

    :param training: images at these indices, augmented as one likes: any view of one image is that image.
    :param reading: the same images without augmentation.
    """

    labels: NDArray[np.int64]
    units: Units
    classes: int
    training: Callable[[Indices], Tensor]
    reading: Callable[[Indices], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularisation:
    """Public settings of the private prototypes."""

    weight: float = 0.1
    temperature: float = 0.1
    clusters: int = 4
    dimensions: int = 64
    public_seed: str = "lazaret"


class PrivateRounds:
    """Keeps what was released (counts, prototypes) from round to round. It is private already, so it may be saved."""

    def __init__(
        self, data: PrivateData, schedule: Schedule, regularisation: Regularisation | None, *, micro_batch: int = 64
    ) -> None:
        self._data = data
        self._schedule = schedule
        self._regularisation = regularisation
        self._micro_batch = micro_batch
        self.counts: PrivateCounts | None = None
        self.prototypes: PrivatePrototypes | None = None

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, reservation: Reservation) -> list[StepReport]:
        """Everything booked for this round, and nothing that is not: the reservation says what is due."""
        data = self._data
        if reservation.holds(Mechanism.CLASS_COUNTS) or self.counts is None:
            self.counts = release_counts(data.labels, data.units, data.classes, reservation)
        if self._regularisation is not None and reservation.holds(Mechanism.PROTOTYPES):
            self._refresh_prototypes(model, reservation, self._regularisation, self.counts)
        model.train()
        steps = DpSgd(
            model,
            optimizer,
            reservation=reservation,
            units=data.units,
            # The rate times the noisy size: public, and off by a constant factor at worst.
            divisor=max(1.0, self._schedule.rate / 2**24 * self.counts.size()),
            micro_batch=self._micro_batch,
        )
        return steps.run(lambda indices: self._losses(model, indices))

    def memory(self) -> dict[str, Tensor]:
        """What was released, as named tensors. Losing it means paying for it again."""
        tensors: dict[str, Tensor] = {}
        if self.counts is not None:
            tensors["counts"] = torch.tensor([*self.counts.noisy, self.counts.sigma], dtype=torch.float64)
        if self.prototypes is not None:
            tensors["cells"] = torch.tensor(self.prototypes.cells)
            for name in ("vectors", "potentials", "projection"):
                tensors[name] = torch.from_numpy(getattr(self.prototypes, name).copy())
        return tensors

    def remember(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `memory`."""
        if "counts" in tensors:
            *noisy, sigma = tensors["counts"].tolist()
            self.counts = PrivateCounts(noisy=tuple(noisy), sigma=sigma)
        if "cells" in tensors:
            self.prototypes = PrivatePrototypes(
                vectors=tensors["vectors"].numpy(),
                potentials=tensors["potentials"].numpy(),
                cells=tuple(tensors["cells"].tolist()),
                projection=tensors["projection"].numpy(),
            )

    def _losses(self, model: nn.Module, indices: Indices) -> Tensor:
        if self.counts is None:
            raise LocalProtocolError("class counts are released before the first step")
        network = cast(FeatureModel, model)
        labels = torch.from_numpy(self._data.labels[indices])
        features = network.features(self._data.training(indices))
        losses = balanced_softmax_per_record(network.logits(features), labels, self.counts.prior())
        if self._regularisation is None or self.prototypes is None:
            return losses
        npr = npr_per_record(
            features, labels, self.prototypes, self._active(), temperature=self._regularisation.temperature
        )
        return losses + self._regularisation.weight * npr

    def _active(self) -> NDArray[np.bool_]:
        """Classes whose noisy count gives a prototype a chance against its own noise."""
        counts, sigma, settings = self.counts, self._schedule.prototypes_sigma, self._regularisation
        if counts is None or sigma is None or settings is None:
            raise LocalProtocolError("prototypes are used without counts or without their noise")
        return counts.present(sigma * settings.dimensions**0.5)

    def _refresh_prototypes(
        self, model: nn.Module, reservation: Reservation, settings: Regularisation, counts: PrivateCounts
    ) -> None:
        data, sigma = self._data, self._schedule.prototypes_sigma
        raw = np.concatenate(list(self._read_features(model)))
        # Two events mean a first time, also where older prototypes are at hand: one sum per class, then the cells.
        if self.prototypes is None or reservation.holds(Mechanism.PROTOTYPES) > 1:
            projection = public_projection(raw.shape[1], settings.dimensions, settings.public_seed)
            self.prototypes = first_prototypes(
                unit_features(raw, projection),
                data.labels,
                data.units,
                cells=cells_for(counts.noisy, sigma=sigma or 0.0, dimensions=len(projection), most=settings.clusters),
                projection=projection,
                public_seed=settings.public_seed,
                reservation=reservation,
            )
        unit = unit_features(raw, self.prototypes.projection)
        self.prototypes = refreshed(unit, data.labels, data.units, self.prototypes, reservation)

    @torch.no_grad()
    def _read_features(self, model: nn.Module) -> Iterator[NDArray[np.float64]]:
        model.eval()
        for part in np.array_split(np.arange(len(self._data.labels)), max(1, len(self._data.labels) // 256)):
            features = cast(FeatureModel, model).features(self._data.reading(part))
            yield features.double().cpu().numpy()
