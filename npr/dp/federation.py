"""A federation in one process with DP at every site, to compare accuracy and epsilon in the laboratory.

The mechanisms, the ledger and the noise are those of a real site; only the ledger is in memory, since the patients of
an experiment need no protection from a restart. It is checkpointed with the federation all the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lazaret.errors import DataError
from npr.config import TrainConfig
from npr.data.dataset import FederatedDataset
from npr.device import PROCESSOR, Device, to_host
from npr.dp.private_site import PrivateTraining
from npr.federation import Federation, RoundReport
from npr.methods.site import Site
from npr.model import ModelSpec
from npr.params import Aggregator, Contribution, ParameterManifest
from npr.recipe import Recipe
from npr.training import LocalReport
from npr.wire_layout import WireModel, all_shares
from security.dp.accountant import Spent, rdp_epsilon
from security.dp.ledger import Ledger, Terms, Unit, digest_of
from security.dp.ledger import LedgerAnchor as LedgerHead
from security.dp.ledger_store import MemoryStore
from security.dp.noise import SharedNoise
from security.dp.planner import (
    Engine,
    Noise,
    PrivateSettings,
    Schedule,
    Trains,
    propose_multiplier,
    terms_for,
)
from security.identity.pinned_files import blocks_of
from security.secagg.clips import Clips
from security.secagg.context import SumVerdict
from security.secagg.fixed_point import place
from security.secagg.layout import Layout
from security.secagg.state import canonical, next_state
from security.secagg.thresholds import LEAST_SURVIVORS, default_colluders, least_honest

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
    noise: Noise = "site"
    colluders: int | None = None
    least_survivors: int = LEAST_SURVIVORS

    def shared_by(self, layout: Layout, config: TrainConfig) -> PrivateSchedule:
        """The same plan with noise that the sites share, as little of it as keeps epsilon inside the sum.

        :raises ConfigError: for what a manifest with shared noise may not have either, such as decay.
        """
        sites = layout.roster_size
        colluders = default_colluders(sites) if self.colluders is None else self.colluders
        honest = least_honest(roster=sites, c=colluders, m=self.least_survivors)
        settings = PrivateSettings(
            steps=1, rate=1.0, prototypes_sigma=None, trainable=self.trainable, views=self.views, noise="shared"
        )
        recipe_settings = Recipe(config=config, seed=0, image_size=1).settings()
        clip = self.schedule.clip
        shared = settings.shared_noise(layout, clip=clip, settings=recipe_settings, weights="samples", honest=honest)
        schedule = replace(self.schedule, shared=shared)
        multiplier = propose_multiplier(schedule, epsilon=self.cap, delta=self.delta)
        return replace(self, schedule=replace(schedule, multiplier=multiplier))

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
        device: Device = PROCESSOR,
    ) -> None:
        spec = replace(
            spec,
            norm="group" if spec.weights == "none" else "frozen",
            trainable=plan.trainable,
            projection=plan.projection,
        )
        super().__init__(dataset=dataset, spec=spec, config=config, seed=seed, aggregator=aggregator, device=device)
        self._layout: Layout | None = None
        if plan.noise == "shared":
            self._layout = self._ring(plan.schedule.rounds)
            plan = plan.shared_by(self._layout, config)
        self._plan = plan
        self._stores = {site.name: MemoryStore() for site in self.sites}
        self._ledgers = {
            site.name: Ledger.create(self._stores[site.name], self._terms(site), version="lab") for site in self.sites
        }
        self._proven: Engine | None = None
        self._trainings = {site.name: self._training(site) for site in self.sites}

    def _ring(self, rounds: int) -> Layout:
        """As `consortium publish` derives it from one step a round, in a ring of 32 bits."""
        tensors = self.model.state_dict()
        entries = ParameterManifest.of(self.model, all_shares(self.method, rounds)).entries
        largest = max(len(site.train) for site in self.sites)
        return Layout.of(
            blocks_of(
                {entry.name: to_host(tensors[entry.name]).numpy() for entry in entries},
                Clips(learning_rate=self.config.learning_rate, steps=1, momentum=self.config.momentum),
                "initial model",
            ),
            roster_size=len(self.sites),
            weight_cap=1 << largest.bit_length(),
            ring_bits=32,
        )

    def spent(self) -> Mapping[str, Spent]:
        """Both epsilons of every site. Report the list or the largest, never a mean."""
        return {name: ledger.spent() for name, ledger in self._ledgers.items()}

    def _terms(self, site: Site) -> Terms:
        plan = self._plan
        unit = Unit(site.train.unit_kind)
        return terms_for(plan.schedule, population=f"lab/{site.name}", unit=unit, cap=plan.cap, delta=plan.delta)

    def _training(self, site: Site) -> PrivateTraining:
        training = PrivateTraining(
            self.method,
            site,
            schedule=self._plan.schedule,
            books=self._ledgers[site.name],
            run="lab",
            dimensions=self._plan.dimensions,
            micro_batch=self._plan.micro_batch,
            views=self._plan.views,
            proven=self._proven,
        )
        # Sites begin with equal models, so what holds for the first holds for all.
        self._proven = training.engine
        return training

    @property
    def shared(self) -> SharedNoise | None:
        return self._plan.schedule.shared

    def alone(self) -> Mapping[str, float]:
        """Epsilon of each site if all others collude: the noise of the others is then known and protects nobody."""
        events = {name: [event.alone for event in ledger.state.history] for name, ledger in self._ledgers.items()}
        return {name: rdp_epsilon(history, self._plan.delta)[0] for name, history in events.items()}

    def run_round(self) -> RoundReport:
        return super().run_round() if self._layout is None else self._shared_round(self._layout)

    def _shared_round(self, layout: Layout) -> RoundReport:
        """One step on the exact sum of whole numbers, by the code that sites and coordinator have on the wire."""
        number, started = self.round + 1, time.perf_counter()
        wire = WireModel(layout, self.model)
        total = np.zeros(layout.words, dtype=layout.dtype)
        for site in self.sites:
            self._download(site.model)
            training = self._trainings[site.name]
            # Against the gradient. Additions wrap at the ring's end, as they do under masks.
            units = wire.units(site.model, -training.shared_round(number))
            total += place(layout, units, weight=training.weight).words
            self._keep(site)
        outcome = next_state(layout, canonical(wire.state(self.model)), total, survivors=len(self.sites))
        if outcome.verdict is not SumVerdict.GOOD:
            raise DataError(f"the round's sum is void: {outcome.reason}", hint="lower the learning rate")
        wire.load(self.model, outcome.state, all_shares(self.method, number))
        self.round = number
        seconds = (time.perf_counter() - started) / len(self.sites)
        report = LocalReport(steps=1, samples=0, loss_sum=0.0, hits=0, seconds=seconds, seconds_waiting=0.0)
        reports = {site.name: report for site in self.sites}
        weight = sum(training.weight for training in self._trainings.values())
        return RoundReport(round=number, sites=reports, vector_size=layout.state_words, weight=weight)

    def _keep(self, site: Site) -> None:
        site.kept |= {_KEPT + name: tensor for name, tensor in self._trainings[site.name].rounds.memory().items()}
        lines = b"\n".join(self._stores[site.name].lines)
        site.kept[_LEDGER] = torch.frombuffer(bytearray(lines), dtype=torch.uint8)

    def _local_round(self, site: Site, number: int) -> LocalReport:
        report = self._trainings[site.name].local_round(number)
        self._keep(site)
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
            store.lines = bytes(to_host(site.kept[_LEDGER]).numpy()).split(b"\n")
            store.head = LedgerHead(seq=len(store.lines) - 1, digest=digest_of(store.lines[-1]))
            self._ledgers[site.name] = Ledger.open(store, population=f"lab/{site.name}")
            self._trainings[site.name] = training = self._training(site)
            kept = {name.removeprefix(_KEPT): tensor for name, tensor in site.kept.items() if name.startswith(_KEPT)}
            training.rounds.remember(kept)

    def _identity(self) -> dict[str, Any]:
        plan = self._plan
        promised = [repr(plan.schedule), plan.cap, plan.delta, plan.dimensions]
        return super()._identity() | {"privacy": promised}
