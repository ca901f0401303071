"""Local rounds with torch: the same method and site as in the laboratory, on the newest accepted state.

`Trainer` trains, `make_trainer` builds it from the configuration, `PrivateTrainer` is its form under differential
privacy. They run in the trainer's process (`__main__`), which has no network and no keys.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from lazaret.errors import BudgetExhausted, ConfigError
from npr.data.dataset import SiteData
from npr.device import PROCESSOR, Device, open_device, to_host
from npr.dp.private_site import Bookings, PrivateTraining
from npr.methods import registry
from npr.methods.base import Kind, Method
from npr.methods.site import Site
from npr.metrics import answered, balanced_accuracy, balanced_auc, confusion_matrix, cross_entropy
from npr.model import SplitModel
from npr.params import ParameterManifest
from npr.recipe import check_code, recipe_of
from npr.seeds import secret_seed
from npr.training import LocalReport
from npr.wire_layout import WireModel, build_initial, ever_shared, groups_to_load, spec_of
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel
from security.secagg.layout import Vector
from site_agent.config import SiteConfig
from site_agent.contribution import LocalResult
from site_agent.privacy import PrivatePlan
from site_agent.trainer.channel import DataReady
from site_agent.trainer.data import open_data, side_rule, summary
from site_agent.trainer.personal_state import PersonalState
from site_agent.trainer.plugin import load_plugin
from site_agent.trainer.ranks import local_rank
from site_agent.trainer.workers import WorkerGroup

log = logging.getLogger("site-agent")

# Of these the log names none: they are many, and local only where a site's statistics are.
_BODY: Final = frozenset({"extractor", "norm", "statistics", "constant"})

TRAINED_ON: Final = "trained_on"
"""What device and precision gave a file's tensors, in its header."""

LocalRound = Callable[[Method, Site, int], LocalReport]


class Trainer:
    """One hospital's learning. `train` and `evaluate` are called from one thread, one after the other.

    :param best: balanced accuracy of the best model so far, by local validation.
    :param work: how a round is worked on: by this process, or with others (`workers`).
    """

    def __init__(
        self,
        manifest: Manifest,
        initial: InitialModel,
        data: SiteData,
        state: PersonalState,
        *,
        data_key: bytes,
        best: float | None = None,
        threads: int | None = None,
        device: Device = PROCESSOR,
        work: LocalRound = Method.local_round,
    ) -> None:
        check_code(manifest.model.code_digest)
        if threads is not None:
            torch.set_num_threads(threads)
        recipe = recipe_of(manifest)
        spec = spec_of(manifest.model.architecture, len(manifest.model.classes), recipe)
        self.method = registry.build(recipe.config)
        ever_shared(self.method, manifest.training.rounds)  # refuses a method that has no place on a wire
        model = build_initial(self.method, spec, initial.tensors)
        self.wire = WireModel(manifest.aggregation.layout, model)
        seed = secret_seed(recipe.seed, data_key)
        self.site = Site.of(data.name, data.train, model, spec, recipe.config, seed=seed, device=device)
        self._promised = manifest.privacy is not None
        self._rounds = manifest.training.rounds
        self.data = data
        self._work = work
        self._state = state
        self._data_key = data_key
        self._round: int | None = None
        self._best = -1.0 if best is None else best

    @property
    def samples(self) -> int:
        return len(self.site.train)

    @property
    def _trained_on(self) -> str:
        return f"{self.site.device.name}, {self.site.device.precision}"

    def _recall(self, round_number: int) -> int:
        """Stand where the newest round before this one ended; returns that round's number, 0 for the initial model."""
        if self._round is not None and self._round < round_number:
            return self._round
        found = self._state.memory_before(round_number)
        if found is None:
            if self._round is not None:
                raise ConfigError("the personal state of earlier rounds is missing", where=str(self._state.memory))
            return 0
        self.site.remember(load_tensors(found[1]))
        return found[0]

    def train(self, round_number: int, state: Vector) -> LocalResult:
        """One local round on the chain's state; bit for bit what the lab computes from the same numbers and seed.

        The personal memory is on disk when this returns. A site that is bound to an update by its journal has it then;
        memory of a round that was lost is written over when the round is trained again.
        """
        started = time.monotonic_ns()
        last = self._recall(round_number)
        self.wire.load(self.site.model, state, groups_to_load(self.method, last, round_number))
        report = self._local_round(round_number)
        self._state.remember(round_number, save_tensors(_stored(self.site.memory()), {TRAINED_ON: self._trained_on}))
        self._round = round_number
        epochs = max(1, self.site.config.local_epochs)
        return LocalResult(
            update=self._update(round_number, state),
            samples=self.samples,
            loss_sum=report.loss_sum / epochs,
            hits=report.hits // epochs,
            steps=report.steps,
            wall_ms=(time.monotonic_ns() - started) // 1_000_000,
            artefacts=self._artefacts(round_number),
        )

    def _update(self, round_number: int, state: Vector) -> Vector:
        return self.wire.update(self.site.model, state, self.method.shares(round_number))

    def _local_round(self, round_number: int) -> LocalReport:
        if self._promised:
            raise ConfigError("private rounds need a ledger", where="manifest [privacy]", hint="`site-agent` opens it")
        return self._work(self.method, self.site, round_number)

    def _artefacts(self, round_number: int) -> tuple[tuple[str, int, bytes], ...]:
        """What stays here: a keyed digest of each kind, so that the log can show later which it was."""
        found: list[tuple[str, Tensor]] = []
        if self.site.prototypes is not None:
            found.append(("prototypes", self.site.prototypes.vectors))
        tensors, shared = self.site.model.state_dict(), self.method.shares(round_number)
        heads = (entry for entry in ParameterManifest.of(self.site.model).entries if entry.group not in _BODY)
        found += [(f"personal.{entry.name}", tensors[entry.name]) for entry in heads if entry.group not in shared]
        return tuple(
            (kind, tensor.numel(), hmac.digest(self._data_key, tensor.contiguous().numpy().tobytes(), hashlib.sha256))
            for kind, tensor in ((kind, to_host(tensor)) for kind, tensor in found)
        )

    def evaluate(self, round_number: int, state: Vector) -> dict[str, Any]:
        """The site's own predictor on its own images; keeps the best by validation. Nothing of it leaves."""
        model = self.model_after(round_number, state)
        figures = self._judge(round_number, model)
        chosen = figures.get("validation", figures.get("test"))
        if chosen is not None and chosen["bacc"] is not None and chosen["bacc"] > self._best:
            self._best, figures["best"] = chosen["bacc"], True
            figures.setdefault("validation", chosen)
            about = {"round": str(round_number), TRAINED_ON: self._trained_on}
            self._state.keep_model("best", save_tensors(_stored(model.state_dict()), about))
        return figures

    def model_after(self, round_number: int, state: Vector) -> SplitModel:
        """The predictor after a round, also in a process that has not trained: the aggregate with this site's own parts
        in it, and after the run's last round with what the method does once more at the end.
        """
        if self._round is None:
            self._round = self._recall(round_number + 1)
        model = copy.deepcopy(self.site.model)
        last = min(self._round or 0, round_number)
        self.wire.load(model, state, groups_to_load(self.method, last, round_number + 1))
        if round_number >= self._rounds:
            self.method.finish(self.site.standing_in(model), round_number)
        return model

    def _judge(self, round_number: int, model: SplitModel) -> dict[str, Any]:
        """Figures of the predictor after a round."""
        kind: Kind = self.method.reports[0]
        figures: dict[str, Any] = {"round": round_number, "kind": kind}
        predict = self.method.predictor(self.site, model, kind)
        for side, samples in (("validation", self.data.validation), ("test", self.data.test)):
            if samples is not None and len(samples):
                scores = predict(samples)
                figures[side] = {
                    "bacc": _finite(balanced_accuracy(samples.labels, scores)),
                    "bauc": _finite(balanced_auc(samples.labels, scores)),
                    "loss": _finite(cross_entropy(samples.labels, scores)),
                    "images": len(samples),
                }
                if not samples.many:  # labels that do not exclude each other are not confused
                    figures[side]["confusion"] = confusion_matrix(*answered(samples.labels, scores)).tolist()
        return figures


def _finite(value: float) -> float | None:
    """None where a figure does not exist, as an AUC over a single class."""
    return float(value) if math.isfinite(value) else None


def _stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: to_host(tensor).contiguous().clone() for name, tensor in tensors.items()}


# From a configuration to a trainer: data, model and method.


def make_trainer(
    config: SiteConfig,
    manifest: Manifest,
    initial: InitialModel,
    state: PersonalState,
    *,
    site: str,
    data_key: bytes,
    best: float | None = None,
    books: Bookings | None = None,
) -> tuple[Trainer, DataReady]:
    """The trainer, and what the agent is told of the data it was given.

    :param books: the ledger, under differential privacy; without it such a trainer can evaluate, not train.
    """
    plugin = load_plugin(config, manifest.training.method, manifest.training.plugin)
    recipe = recipe_of(manifest)
    dataset, data = open_data(
        config.data,
        site=site,
        image_size=recipe.image_size,
        channels=recipe.in_channels,
        classes=manifest.model.classes,
        rule=side_rule(config, manifest, data_key),
        private=manifest.privacy is not None,
        labels=recipe.config.labels,
    )
    group = WorkerGroup.of(config, manifest, dataset, data)
    named = config.data.version if manifest.privacy is not None else None
    ready, threads = replace(summary(dataset, data, data_key, version=named), plugin=plugin), config.site.threads
    device = open_device(config.site.computing, private=manifest.privacy is not None, rank=local_rank())
    log.info("computes on %s", device)
    plan = PrivatePlan.of(config, manifest)
    if plan is not None and books is not None:
        config.policy.check_private()
        private = PrivateTrainer(
            manifest,
            initial,
            data,
            state,
            plan=plan,
            books=books,
            version=ready.version,
            data_key=data_key,
            best=best,
            micro_batch=config.privacy.micro_batch,
            threads=threads,
            device=device,
        )
        return private, ready
    config.policy.check_classes(dataset.class_names, data.train.class_counts().tolist())
    work = group.local_round if group else Method.local_round
    trainer = Trainer(
        manifest, initial, data, state, data_key=data_key, best=best, threads=threads, device=device, work=work
    )
    return trainer, ready


# Under differential privacy: the same agent and messages, with the mechanisms of npr.dp.

_KEPT = "dp/"
_VERSION = "dp/version"


class PrivateTrainer(Trainer):
    """A trainer whose rounds are paid for before the data are read, and whose weight is a noisy number.

    What was released (counts, prototypes) is in the personal state of a round, so that a restart does not pay for it
    again; with other data it is released again.

    :param plan: the run as it will be trained here.
    :param version: names the data.
    """

    def __init__(
        self,
        manifest: Manifest,
        initial: InitialModel,
        data: SiteData,
        state: PersonalState,
        *,
        plan: PrivatePlan,
        books: Bookings,
        version: str,
        data_key: bytes,
        micro_batch: int,
        best: float | None = None,
        threads: int | None = None,
        device: Device = PROCESSOR,
    ) -> None:
        super().__init__(manifest, initial, data, state, data_key=data_key, best=best, threads=threads, device=device)
        self._shared = plan.schedule.shared is not None
        self._units: NDArray[np.int64] | None = None
        self._metrics_sigma = plan.schedule.metrics_sigma or 0.0
        self._version = torch.frombuffer(bytearray(version.encode()), dtype=torch.uint8)
        self._private = PrivateTraining(
            self.method,
            self.site,
            schedule=plan.schedule,
            books=books,
            run=plan.run,
            dimensions=plan.settings.dimensions,
            engine=plan.settings.engine,
            views=plan.settings.views,
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
        if self._shared:
            started = time.perf_counter()
            self._units = self._private.shared_round(round_number)
            seconds = time.perf_counter() - started
            report = LocalReport(steps=1, samples=0, loss_sum=0.0, hits=0, seconds=seconds, seconds_waiting=0.0)
        else:
            report = self._private.local_round(round_number)
        released = self._private.rounds.memory()
        self.site.kept |= {_KEPT + name: tensor for name, tensor in released.items()} | {_VERSION: self._version}
        return report

    def _update(self, round_number: int, state: Vector) -> Vector:
        """With shared noise the noisy whole numbers themselves, against the gradient; the model is left as it was."""
        if self._units is None:
            return super()._update(round_number, state)
        units, self._units = self._units, None
        return cast(Vector, self.wire.units(self.site.model, -units))

    def _artefacts(self, round_number: int) -> tuple[tuple[str, int, bytes], ...]:
        released = self._private.rounds.memory()
        return super()._artefacts(round_number) + tuple(
            (f"private.{name}", tensor.numel(), hmac.digest(self._data_key, tensor.numpy().tobytes(), hashlib.sha256))
            for name, tensor in ((name, to_host(tensor)) for name, tensor in released.items())
            if name in ("counts", "vectors")
        )

    def _judge(self, round_number: int, model: SplitModel) -> dict[str, Any]:
        """Noisy, and only where a local validation was booked with the round: what it steers would be a release.

        An empty side has its noise too: no figures would tell that nobody is on it.
        """
        samples = self.data.train.subset([]) if self.data.validation is None else self.data.validation
        kind = self.method.reports[0]
        answers = np.zeros(0, dtype=np.int64)
        if len(samples):
            answers = self.method.predictor(self.site, model, kind)(samples).argmax(axis=1).astype(np.int64)
        try:
            seen, right = self._private.recall_by_class(samples, answers)
        except BudgetExhausted:
            return {}
        # Classes whose number is smaller than its noise are left out; decided on the noisy numbers alone.
        clear = seen > 2 * self._metrics_sigma
        recall = np.clip(right[clear] / seen[clear], 0.0, 1.0)
        bacc = float(recall.mean()) if clear.any() else None
        figures = {"bacc": bacc, "bauc": None, "images": max(0, round(float(seen.sum())))}
        return {"round": round_number, "kind": kind, "private": True, "validation": figures}
