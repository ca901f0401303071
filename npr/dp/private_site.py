"""A site's round under differential privacy: losses, the mechanisms in their order, and the form that methods have.

The laboratory and the agent call `local_round`, then `contribution`, as for any method
(docs/spec/differential-privacy.md, section 2).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from lazaret.errors import BudgetExhausted, LocalProtocolError, PolicyViolation
from npr.data.dataset import Samples
from npr.data.loader import Augmentation, Batches
from npr.device import PROCESSOR, Device, to_host
from npr.dp.engine import check_exact, check_upstream
from npr.dp.releases import (
    PrivateCounts,
    PrivatePrototypes,
    cells_for,
    first_prototypes,
    public_projection,
    refreshed,
    release_counts,
    release_hits,
    similarity,
    unit_features,
)
from npr.dp.sgd import DpSgd, Indices, SharedStep, StepReport, momentum_units
from npr.methods.base import Method
from npr.methods.site import AUGMENTATIONS, READING_BATCH, Site
from npr.params import Contribution
from npr.training import LocalReport
from security.dp.accountant import RATE_ONE, Mechanism, MechanismEvent
from security.dp.ledger import LedgerState, Reservation
from security.dp.noise import NoiseSource, PoissonSampler, Units
from security.dp.planner import Engine, Schedule

# Losses with one value per record. Each reads its own record and public or booked state, nothing else.


def balanced_softmax_per_record(logits: Tensor, labels: Tensor, prior: NDArray[np.float64]) -> Tensor:
    """Balanced softmax with the private prior, whose floor keeps every class in."""
    shift = torch.as_tensor(np.log(prior), dtype=logits.dtype, device=logits.device)
    return functional.cross_entropy(logits + shift, labels, reduction="none")


def npr_per_record(
    features: Tensor,
    labels: Tensor,
    prototypes: PrivatePrototypes,
    active: NDArray[np.bool_],
    *,
    temperature: float,
) -> Tensor:
    """Softmax over the similarity to the nearest prototype of each active class.

    A class whose noisy count is too small for a prototype is left out; its records get zero, each for itself.
    """
    on = torch.as_tensor(active, device=labels.device)
    # The label's own column is never masked, so that an inactive record's value is finite before it is dropped.
    masked = (~on)[None, :] & ~functional.one_hot(labels, len(on)).bool()
    logits = (similarity(features, prototypes) / temperature).masked_fill(masked, -torch.inf)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    return torch.where(on[labels], losses, torch.zeros_like(losses))


# One round: counts once, prototypes when due, then DP-SGD. It needs a model with `features` and `logits`, a way to read
# images, and a reservation. The experiment's seed has no influence on any random draw here.


class FeatureModel(Protocol):
    def features(self, images: Tensor) -> Tensor: ...

    def logits(self, features: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateData:
    """A site's training records. `units` says who is protected.

    :param training: images at these indices, augmented as one likes: any view of one image is that image.
    :param reading: the same images without augmentation.
    :param device: where both give their images, and where the network is.
    """

    labels: NDArray[np.int64]
    units: Units
    classes: int
    training: Callable[[Indices], Tensor]
    reading: Callable[[Indices], Tensor]
    device: Device = PROCESSOR


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
        self,
        data: PrivateData,
        schedule: Schedule,
        regularisation: Regularisation | None,
        *,
        micro_batch: int = 64,
        engine: Engine = "auto",
        views: int = 1,
    ) -> None:
        self._engine: Engine = engine
        self._views = views
        self._table: Tensor | None = None
        self._public_features = False
        self._data = data
        self._schedule = schedule
        self._regularisation = regularisation
        self.micro_batch = micro_batch
        self.counts: PrivateCounts | None = None
        self.prototypes: PrivatePrototypes | None = None
        self._began: tuple[int, Tensor] | None = None

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, reservation: Reservation) -> list[StepReport]:
        """Everything booked for this round, and nothing that is not: the reservation says what is due."""
        data = self._data
        # Asked here: during a step no parameter requires a gradient.
        self._public_features = _frozen(model)
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
            divisor=max(1.0, self._schedule.rate / RATE_ONE * self.counts.size()),
            micro_batch=self.micro_batch,
            engine=self._engine,
            views=self._views,
        )
        return steps.run(lambda indices: self._losses(model, indices))

    def shared_step(self, model: nn.Module, reservation: Reservation, round_number: int) -> NDArray[np.int64]:
        """Counts if they are due, then the whole numbers of one step over all patients, with this site's noise and its
        part of the momentum."""
        data, noise = self._data, self._schedule.shared
        if noise is None:
            raise LocalProtocolError("this schedule shares no noise")
        self._public_features = _frozen(model)
        if reservation.holds(Mechanism.CLASS_COUNTS) or self.counts is None:
            self.counts = release_counts(data.labels, data.units, data.classes, reservation)
        model.train()
        everybody = PoissonSampler(data.units, rate=RATE_ONE, noise=reservation.noise).draw_views(self._views)
        step = SharedStep(model, noise=noise, clip=self._schedule.clip, micro_batch=self.micro_batch)
        upload = step.upload(everybody, lambda rows: self._losses(model, rows), reservation)
        moved = self._moved(model, round_number) if noise.momentum else None
        # Against the step: what is uploaded has the sign of a gradient.
        return upload if moved is None else upload - momentum_units(moved, noise, weight=self.counts.weight())

    def _moved(self, model: nn.Module, round_number: int) -> NDArray[np.float32] | None:
        """What the round before moved the public model by; None for a site that did not train in it."""
        now = to_host(torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]))
        before, self._began = self._began, (round_number, now)
        if before is None or before[0] != round_number - 1:
            return None
        return cast(NDArray[np.float32], (now - before[1]).numpy())

    def memory(self) -> dict[str, Tensor]:
        """What was released, as named tensors; losing it means paying for it again. And the public model that the last
        round began with, for momentum."""
        tensors: dict[str, Tensor] = {}
        if self.counts is not None:
            tensors["counts"] = torch.tensor([*self.counts.noisy, self.counts.sigma], dtype=torch.float64)
        if self.prototypes is not None:
            tensors["cells"] = torch.tensor(self.prototypes.cells)
            for name in ("vectors", "potentials", "projection"):
                tensors[name] = torch.from_numpy(getattr(self.prototypes, name).copy())
        if self._began is not None:
            tensors["began_round"], tensors["began"] = torch.tensor(self._began[0]), self._began[1]
        return tensors

    def remember(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `memory`."""
        if "began" in tensors:
            self._began = int(to_host(tensors["began_round"])), to_host(tensors["began"])
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
        labels = self._data.device.from_host(self._data.labels[indices])
        if indices.ndim == 2:
            return self._over_views(model, indices, labels, self.counts.prior())
        features = self._features(model, indices)
        losses = balanced_softmax_per_record(network.logits(features), labels, self.counts.prior())
        if self._regularisation is None or self.prototypes is None:
            return losses
        npr = npr_per_record(
            features, labels, self.prototypes, self._active(), temperature=self._regularisation.temperature
        )
        return losses + self._regularisation.weight * npr

    def _over_views(self, model: nn.Module, indices: Indices, labels: Tensor, prior: NDArray[np.float64]) -> Tensor:
        """The mean over each patient's views. The head sees them as positions of one record, whose norm is exact."""
        features = self._features(model, indices.reshape(-1)).view(*indices.shape, -1)
        logits = cast(FeatureModel, model).logits(features)
        losses = balanced_softmax_per_record(logits.flatten(0, 1), labels.flatten(), prior)
        return losses.view(indices.shape).mean(1)

    def _features(self, model: nn.Module, indices: Indices) -> Tensor:
        """Of a frozen extractor they are read once, without augmentation, and looked up afterwards."""
        network = cast(FeatureModel, model)
        if not self._public_features:
            return network.features(self._data.training(indices))
        # Of this object's images alone: other data mean another object, and its features are read again.
        if self._table is None:
            with torch.no_grad():
                self._table = torch.cat([network.features(self._data.reading(part)) for part in self._parts()])
        return self._table[self._data.device.from_host(indices)]

    def _parts(self) -> Iterable[Indices]:
        """Rows that are read at once: no more than the setting `micro_batch` allows."""
        most = min(READING_BATCH, self.micro_batch)
        return np.array_split(np.arange(len(self._data.labels)), max(1, -(-len(self._data.labels) // most)))

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
        for part in self._parts():
            features = cast(FeatureModel, model).features(self._data.reading(part))
            yield to_host(features).double().numpy()


def _frozen(model: nn.Module) -> bool:
    extractor = getattr(model, "extractor", None)
    return isinstance(extractor, nn.Module) and not any(p.requires_grad for p in extractor.parameters())


class Bookings(Protocol):
    """A ledger, or what stands before one: an agent adds its limits and its log."""

    @property
    def state(self) -> LedgerState: ...

    def reserve(
        self, *, run: str, round_number: int, events: Sequence[MechanismEvent], noise: NoiseSource
    ) -> Reservation: ...

    def commit(self, reservation: Reservation) -> None: ...


class PrivateTraining:
    """Takes the place of `Method.local_round` and `Method.contribution` at a site that has DP on.

    The site's own exact prior and prototypes are not read. Its model must be free of BatchNorm (`npr.dp.engine`).

    :param dimensions: width that features are projected to before prototypes are released.
    :param proven: the engine that `check_exact` has found for an equal model, in a laboratory with many sites; a real
        site asks for itself.
    """

    def __init__(
        self,
        method: Method,
        site: Site,
        *,
        schedule: Schedule,
        books: Bookings,
        run: str,
        dimensions: int = 64,
        micro_batch: int = 64,
        engine: Engine = "auto",
        views: int = 1,
        proven: Engine | None = None,
    ) -> None:
        config = site.config
        check_upstream(config)
        # Before anything is booked: a model whose gradients cannot be clipped exactly is never trained.
        size = site.train.images.shape[1]
        wanted: Engine = "opacus" if schedule.shared is not None else engine
        self.engine = proven or check_exact(site.model, wanted, channels=len(site.mean), image_size=size)
        unit = books.state.terms.unit
        if unit.value != site.train.unit_kind:
            raise PolicyViolation(
                f"the ledger protects each {unit}, the data are grouped by {site.train.unit_kind}",
                where="differential privacy",
            )
        self._method, self._site, self._schedule, self._books, self._run = method, site, schedule, books, run
        self._reservation: Reservation | None = None
        self._noise = NoiseSource()
        regularisation = Regularisation(
            weight=config.lambda_npr,
            temperature=config.temperature,
            clusters=config.clusters,
            dimensions=dimensions,
            public_seed=config.config_hash,
        )
        data = PrivateData(
            labels=site.train.labels,
            units=Units(site.train.units),
            classes=site.train.num_classes,
            training=lambda indices: self._images(indices, AUGMENTATIONS[config.augmentation]),
            reading=lambda indices: self._images(indices, None),
            device=site.device,
        )
        # Without a regulariser no prototype is booked, so none may be released either.
        if (method.regulariser is None) != (schedule.prototypes_sigma is None):
            raise PolicyViolation(
                f"{method.name} and the schedule do not agree on whether prototypes are released",
                where="differential privacy",
                hint="set prototypes_sigma for a method with NPR, and None for one without",
            )
        self.rounds = PrivateRounds(
            data,
            schedule,
            regularisation if method.regulariser is not None else None,
            micro_batch=micro_batch,
            engine=self.engine,
            views=views,
        )

    def local_round(self, round_number: int) -> LocalReport:
        """Reserve, train, commit. Raises BudgetExhausted before anything is read.

        The report holds steps and time only: losses and hits of the drawn records are not released.
        """
        started = time.perf_counter()
        reservation = self._reserve(round_number)
        with self._site.device.memory_for(self.rounds.micro_batch, private=True):
            done = self.rounds.train(self._site.model, self._site.optimizer(round_number), reservation)
        self._books.commit(reservation)
        self._reservation = reservation
        seconds = time.perf_counter() - started
        return LocalReport(steps=len(done), samples=0, loss_sum=0.0, hits=0, seconds=seconds, seconds_waiting=0.0)

    def shared_round(self, round_number: int) -> NDArray[np.int64]:
        """Reserve, compute, commit: the whole numbers that are masked and summed, and used for nothing else."""
        reservation = self._reserve(round_number)
        with self._site.device.memory_for(self.rounds.micro_batch, private=True):
            upload = self.rounds.shared_step(self._site.model, reservation, round_number)
        self._books.commit(reservation)
        return upload

    def _reserve(self, round_number: int) -> Reservation:
        # A site's first round is not the run's if it came late, and is its first again if it lost what it had released.
        events = self._schedule.round_events(round_number, first=self.rounds.counts is None)
        return self._books.reserve(run=self._run, round_number=round_number, events=events, noise=NoiseSource())

    def contribution(self, round_number: int) -> Contribution:
        """The site's vector, weighted with its *noisy* size."""
        vector = self._method.manifest(self._site.model, round_number).flatten(self._site.model)
        return Contribution(vector=vector, weight=self.weight)

    @property
    def weight(self) -> int:
        """The noisy size; known from the first round on."""
        if self.rounds.counts is None:
            raise LocalProtocolError("a site contributes after its first round")
        return self.rounds.counts.weight()

    def recall_by_class(self, samples: Samples, predicted: NDArray[np.int64]) -> NDArray[np.float64]:
        """(2, classes) noisy: how much was seen and how much was right. Paid for by the last round, and only once.

        :raises BudgetExhausted: if no local validation was booked with it.
        """
        if self._reservation is None:
            raise BudgetExhausted("no local validation is booked", hint="it is booked with a round, before training")
        return release_hits(samples.labels, predicted, Units(samples.units), samples.num_classes, self._reservation)

    def _images(self, indices: Indices, augmentation: Augmentation | None) -> Tensor:
        chosen: Samples = self._site.train.subset(indices)
        # A fresh seed each time: repeating an augmentation would harm nothing but the learning.
        seed = int(self._noise.words(1)[0] >> np.uint64(1))
        batches = Batches(
            chosen,
            batch_size=max(1, len(indices)),
            mean=self._site.mean,
            std=self._site.std,
            augment=augmentation,
            seed=(seed,),
            device=self._site.device,
            prefetch=False,
        )
        return next(iter(batches)).images
