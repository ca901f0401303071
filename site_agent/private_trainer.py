"""Local rounds under differential privacy: the same agent, site and wire, with the mechanisms of npr.dp inside."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import numpy as np
import torch

from npr.data.dataset import SiteData
from npr.dp.private_site import PrivateTraining
from npr.model import SplitModel
from npr.training import LocalReport
from security.consortium.initial_model import InitialModel
from security.consortium.manifest import Manifest
from security.errors import BudgetExhausted
from site_agent.budget import Budget
from site_agent.trainer import Trainer
from site_agent.vault import Vault

_KEPT = "dp/"
_VERSION = "dp/version"


class PrivateTrainer(Trainer):
    """A trainer whose rounds are paid for before the data are read, and whose weight is a noisy number.

    What was released (counts, prototypes) lies in the memory of a round, so that a restart does not pay for it again;
    with other data it is released anew.

    :param version: names the data; the ledger records when it changes.
    """

    def __init__(
        self,
        manifest: Manifest,
        initial: InitialModel,
        data: SiteData,
        vault: Vault,
        *,
        budget: Budget,
        version: str,
        data_key: bytes,
        micro_batch: int,
        threads: int | None = None,
    ) -> None:
        super().__init__(manifest, initial, data, vault, data_key=data_key, threads=threads)
        plan = budget.plan
        budget.take_version(version)
        self._metrics_sigma = plan.schedule.metrics_sigma or 0.0
        self._version = torch.frombuffer(bytearray(version.encode()), dtype=torch.uint8)
        self._private = PrivateTraining(
            self.method,
            self.site,
            schedule=plan.schedule,
            books=budget,
            run=plan.run,
            mean=self.mean,
            std=self.std,
            dimensions=plan.settings.dimensions,
            micro_batch=micro_batch,
        )

    @property
    def samples(self) -> int:
        """The noisy number of patients: the exact one would be a release of its own."""
        return self._private.weight

    def _recall(self, round_number: int) -> int:
        standing = self._round is not None and self._round < round_number
        last = super()._recall(round_number)
        if not standing:
            kept = self.site.kept
            if _VERSION in kept and torch.equal(kept[_VERSION], self._version):
                self._private.rounds.remember(
                    {name.removeprefix(_KEPT): tensor for name, tensor in kept.items() if name.startswith(_KEPT)}
                )
        return last

    def _local_round(self, round_number: int) -> LocalReport:
        report = self._private.local_round(round_number)
        released = self._private.rounds.memory()
        self.site.kept |= {_KEPT + name: tensor for name, tensor in released.items()} | {_VERSION: self._version}
        return report

    def _artefacts(self, round_number: int) -> tuple[tuple[str, int, bytes], ...]:
        released = self._private.rounds.memory()
        return super()._artefacts(round_number) + tuple(
            (f"private.{name}", tensor.numel(), hmac.digest(self._data_key, tensor.numpy().tobytes(), hashlib.sha256))
            for name, tensor in released.items()
            if name in ("counts", "vectors")
        )

    def _judge(self, round_number: int, model: SplitModel) -> dict[str, Any]:
        """Noisy, and only where a local validation was booked with the round: what it steers would be a release."""
        samples = self.data.validation
        if samples is None or not len(samples):
            return {}
        kind = self.method.reports[0]
        scores = self.method.predictor(self.site, model, kind)(samples)
        try:
            seen, right = self._private.recall_by_class(samples, scores.argmax(axis=1).astype(np.int64))
        except BudgetExhausted:
            return {}
        # Classes whose number drowns in its noise are left out; decided on the noisy numbers alone.
        clear = seen > 2 * self._metrics_sigma
        recall = np.clip(right[clear] / seen[clear], 0.0, 1.0)
        bacc = float(recall.mean()) if clear.any() else None
        figures = {"bacc": bacc, "bauc": None, "images": max(0, round(float(seen.sum())))}
        return {"round": round_number, "kind": kind, "private": True, "validation": figures}
