"""A site's round under DP, in the shape that the lab and the agent use: `local_round`, then `contribution`."""

from __future__ import annotations

import time

import numpy as np
from torch import Tensor

from npr.backend import Contribution
from npr.data.augment import Augmentation
from npr.data.dataset import Samples
from npr.data.loader import Batches
from npr.dp.local_round import PrivateData, PrivateRounds, Regularisation
from npr.dp.sgd import Indices
from npr.dp.upstream import check_upstream
from npr.methods.base import Method
from npr.methods.site import Site
from npr.training import LocalReport
from security.dp.ledger import Ledger
from security.dp.noise import NoiseSource
from security.dp.planner import Schedule
from security.dp.sampling import Units
from security.errors import LocalProtocolError, PolicyViolation

VALIDATION = "off: a metric that steers anything would be one more release; read it at the site, or book it"


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
        ledger: Ledger,
        run: str,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation | None = None,
        dimensions: int = 64,
        micro_batch: int = 64,
    ) -> None:
        config = site.config
        check_upstream(config)
        if ledger.state.terms.unit.value != site.train.unit_kind:
            raise PolicyViolation(
                f"the ledger protects each {ledger.state.terms.unit}, the data are grouped by {site.train.unit_kind}",
                where="differential privacy",
            )
        self._method, self._site, self._schedule, self.ledger, self._run = method, site, schedule, ledger, run
        self._noise = NoiseSource()
        self._mean, self._std, self._augmentation = mean, std, augmentation
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
            training=lambda indices: self._images(indices, self._augmentation),
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
        reservation = self.ledger.reserve(
            run=self._run,
            round_number=round_number,
            events=self._schedule.round_events(round_number),
            noise=self._noise,
        )
        optimizer = self._site.optimizer(round_number)
        done = self.rounds.train(self._site.model, optimizer, reservation, round_number)
        self.ledger.commit(reservation)
        seconds = time.perf_counter() - started
        return LocalReport(steps=len(done), samples=0, loss_sum=0.0, hits=0, seconds=seconds, seconds_waiting=0.0)

    def contribution(self, round_number: int) -> Contribution:
        """The site's vector, weighted with its *noisy* size."""
        if self.rounds.counts is None:
            raise LocalProtocolError("a site contributes after its first round")
        vector = self._method.manifest(self._site.model, round_number).flatten(self._site.model)
        return Contribution(vector=vector, weight=self.rounds.counts.weight())

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
