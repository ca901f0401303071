"""A site's round under DP, in the shape that the lab and the agent use: `local_round`, then `contribution`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from npr.backend import Contribution
from npr.data.augment import Augmentation
from npr.data.dataset import Samples
from npr.data.loader import Batches
from npr.dp.counts import release_hits
from npr.dp.local_round import PrivateData, PrivateRounds, Regularisation
from npr.dp.sgd import Indices
from npr.dp.upstream import check_upstream
from npr.methods.base import Method
from npr.methods.site import AUGMENTATIONS, Site
from npr.training import LocalReport
from security.dp.events import MechanismEvent
from security.dp.ledger import Reservation
from security.dp.ledger_entries import LedgerState
from security.dp.noise import NoiseSource
from security.dp.planner import Schedule
from security.dp.sampling import Units
from security.errors import BudgetExhausted, LocalProtocolError, PolicyViolation


class Books(Protocol):
    """A ledger, or what stands before one: an agent adds its limits and its log."""

    @property
    def state(self) -> LedgerState: ...

    def reserve(
        self, *, run: str, round_number: int, events: Sequence[MechanismEvent], noise: NoiseSource
    ) -> Reservation: ...

    def commit(self, reservation: Reservation) -> None: ...


class PrivateTraining:
    """Takes the place of `Method.local_round` and `Method.contribution` at a site that has DP on.

    The site's own exact prior and prototypes are not read. Its model must be free of BatchNorm (npr.dp.freeze_norm).

    :param dimensions: width that features are projected to before prototypes are released.
    """

    def __init__(
        self,
        method: Method,
        site: Site,
        *,
        schedule: Schedule,
        books: Books,
        run: str,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dimensions: int = 64,
        micro_batch: int = 64,
    ) -> None:
        config = site.config
        check_upstream(config)
        unit = books.state.terms.unit
        if unit.value != site.train.unit_kind:
            raise PolicyViolation(
                f"the ledger protects each {unit}, the data are grouped by {site.train.unit_kind}",
                where="differential privacy",
            )
        self._method, self._site, self._schedule, self._books, self._run = method, site, schedule, books, run
        self._reservation: Reservation | None = None
        self._noise = NoiseSource()
        self._mean, self._std = mean, std
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
        )
        # Without a regulariser no prototype is booked, so none may be released either.
        if (method.regulariser is None) != (schedule.prototypes_sigma is None):
            raise PolicyViolation(
                f"{method.name} and the schedule do not agree on whether prototypes are released",
                where="differential privacy",
                hint="set prototypes_sigma for a method with NPR, and None for one without",
            )
        self.rounds = PrivateRounds(
            data, schedule, regularisation if method.regulariser is not None else None, micro_batch=micro_batch
        )

    def local_round(self, round_number: int) -> LocalReport:
        """Reserve, train, commit. Raises BudgetExhausted before anything is read.

        The report holds steps and time only: losses and hits of the drawn records are not released.
        """
        started = time.perf_counter()
        # A site's first round is not the run's if it came late, and is its first again if it lost what it had released.
        first = self.rounds.counts is None
        events = self._schedule.round_events(round_number, first=first)
        reservation = self._books.reserve(run=self._run, round_number=round_number, events=events, noise=self._noise)
        done = self.rounds.train(self._site.model, self._site.optimizer(round_number), reservation)
        self._books.commit(reservation)
        self._reservation = reservation
        seconds = time.perf_counter() - started
        return LocalReport(steps=len(done), samples=0, loss_sum=0.0, hits=0, seconds=seconds, seconds_waiting=0.0)

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
            mean=self._mean,
            std=self._std,
            augment=augmentation,
            seed=(seed,),
            prefetch=False,
        )
        return next(iter(batches)).images
