"""A federation in one process with DP at every site, to compare accuracy and epsilon in the laboratory.

The mechanisms, the ledger and the noise are those of a real site; only the ledger is in memory, since the patients of
an experiment need no protection from a restart. It is checkpointed with the federation all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from npr.config import TrainConfig
from npr.data.dataset import FederatedDataset
from npr.dp.private_site import PrivateTraining
from npr.federation import Federation
from npr.methods.site import Site
from npr.model import ModelSpec, normalisation
from npr.params import Aggregator, Contribution
from npr.training import LocalReport
from security.dp.accountant import Spent
from security.dp.ledger import Ledger, Terms, Unit, digest_of
from security.dp.ledger import LedgerAnchor as LedgerHead
from security.dp.ledger_store import MemoryStore
from security.dp.planner import Schedule, Trains, propose_multiplier, terms_for

_KEPT = "dp/"
_LEDGER = "dp/ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateSchedule:
    """What every site of an experiment is promised, and how. Equal at all sites: rate and steps are public."""

    schedule: Schedule
    cap: float
    delta: float
    dimensions: int = 64
    micro_batch: int = 64
    trainable: Trains = "all"
    projection: int = 0
    views: int = 1

    @classmethod
    def for_epsilon(cls, epsilon: float, *, delta: float, schedule: Schedule, **more: Any) -> PrivateSchedule:
        """The schedule with the least gradient noise that keeps the whole run within epsilon."""
        multiplier = propose_multiplier(schedule, epsilon=epsilon, delta=delta)
        return cls(schedule=replace(schedule, multiplier=multiplier), cap=epsilon, delta=delta, **more)


class PrivateFederation(Federation):
    """Federation whose sites train by `PrivateTraining`. BatchNorm is replaced in every model."""

    def __init__(
        self,
        *,
        dataset: FederatedDataset,
        spec: ModelSpec,
        config: TrainConfig,
        plan: PrivateSchedule,
        seed: int = 0,
        aggregator: Aggregator | None = None,
    ) -> None:
        spec = replace(
            spec,
            norm="group" if spec.weights == "none" else "frozen",
            trainable=plan.trainable,
            projection=plan.projection,
        )
        super().__init__(dataset=dataset, spec=spec, config=config, seed=seed, aggregator=aggregator)
        self._plan = plan
        self._stores = {site.name: MemoryStore() for site in self.sites}
        self._ledgers = {
            site.name: Ledger.create(self._stores[site.name], self._terms(site), version="lab") for site in self.sites
        }
        self._trainings = {site.name: self._training(site) for site in self.sites}

    def spent(self) -> Mapping[str, Spent]:
        """Both epsilons of every site. Report the list or the largest, never a mean."""
        return {name: ledger.spent() for name, ledger in self._ledgers.items()}

    def _terms(self, site: Site) -> Terms:
        plan = self._plan
        unit = Unit(site.train.unit_kind)
        return terms_for(plan.schedule, population=f"lab/{site.name}", unit=unit, cap=plan.cap, delta=plan.delta)

    def _training(self, site: Site) -> PrivateTraining:
        mean, std = normalisation(self.spec)
        return PrivateTraining(
            self.method,
            site,
            schedule=self._plan.schedule,
            books=self._ledgers[site.name],
            run="lab",
            mean=mean,
            std=std,
            dimensions=self._plan.dimensions,
            micro_batch=self._plan.micro_batch,
            views=self._plan.views,
        )

    def _local_round(self, site: Site, number: int) -> LocalReport:
        training = self._trainings[site.name]
        report = training.local_round(number)
        site.kept |= {_KEPT + name: tensor for name, tensor in training.rounds.memory().items()}
        lines = b"\n".join(self._stores[site.name].lines)
        site.kept[_LEDGER] = torch.frombuffer(bytearray(lines), dtype=torch.uint8)
        return report

    def _contribution(self, site: Site, number: int) -> Contribution:
        return self._trainings[site.name].contribution(number)

    def restore(self, path: str | Path) -> None:
        """As for any federation; the ledgers continue where they were."""
        super().restore(path)
        for site in self.sites:
            if _LEDGER not in site.kept:
                continue
            store = self._stores[site.name] = MemoryStore()
            store.lines = bytes(site.kept[_LEDGER].numpy()).split(b"\n")
            store.head = LedgerHead(seq=len(store.lines) - 1, digest=digest_of(store.lines[-1]))
            self._ledgers[site.name] = Ledger.open(store, population=f"lab/{site.name}")
            self._trainings[site.name] = training = self._training(site)
            kept = {name.removeprefix(_KEPT): tensor for name, tensor in site.kept.items() if name.startswith(_KEPT)}
            training.rounds.remember(kept)

    def _identity(self) -> dict[str, Any]:
        plan = self._plan
        promised = [repr(plan.schedule), plan.cap, plan.delta, plan.dimensions]
        return super()._identity() | {"privacy": promised}
