"""What a federated method is: which groups it shares, what it descends at a site, and how it predicts.

Everything that crosses sites is a weighted sum of vectors over the shared groups. On the wire every site recomputes the
next state from that sum, so a method's server step is the mean itself unless the method says `wire = False`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from lazaret.errors import ConfigError
from npr.config import TrainConfig
from npr.data.dataset import Samples
from npr.data.loader import Batch, Sampler
from npr.device import to_host
from npr.methods.regulariser import Regulariser, Seen
from npr.methods.site import Site
from npr.model import ModelSpec, SplitModel, build_model
from npr.params import Contribution, ParameterManifest, Sum, Vector
from npr.prototypes import Prototypes
from npr.seeds import derive
from npr.task import check_many, task_of
from npr.training import NOTHING, LocalReport, TrainingStep, descend, evaluating, extract, training_only

Kind = Literal["global", "local", "personal"]
Prediction = Literal["head", "prototype", "both"]
EVERYTHING = frozenset({"extractor", "norm", "statistics", "head"})


class MethodOptions(BaseModel):
    """Options of a method that has none; those of others derive from it, so that a key nobody knows is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FineTuning(MethodOptions):
    """`finetune_epochs` of body and head at the site after the last round, at the last rate."""

    finetune_epochs: int = Field(default=0, ge=0)


class Method:
    """FedAvg's skeleton. A method overrides the one or two things in which it differs.

    :cvar shared: the groups that are summed. What a round shares is `shares(round)`.
    :cvar personal: a site's predictor holds parts of its own.
    :cvar models: the models worth evaluating, its own first, where they are not the usual two.
    :cvar judged: which of its models the paper's tables are about, mostly the one that local training leaves.
    :cvar wire: False for a method whose server does more than take the mean; it runs in the lab only.
    :cvar central: trained on the images of all sites in one place; the laboratory's upper bound, never on the wire.
    :cvar divisible: False for a method whose loss is not a mean over images: processes cannot share a batch of it.
    :cvar one_label: why it has no form for several labels of an image; empty if it has one.
    """

    Options: ClassVar[type[BaseModel]] = MethodOptions
    shared: ClassVar[frozenset[str]] = EVERYTHING
    personal: ClassVar[bool] = False
    models: ClassVar[tuple[Kind, ...]] = ()
    judged: ClassVar[Kind] = "local"
    wire: ClassVar[bool] = True
    central: ClassVar[bool] = False
    divisible: ClassVar[bool] = True
    one_label: ClassVar[str] = "it was made for one label of an image"

    def __init__(self, config: TrainConfig, *, name: str, npr: bool = False, predict: Prediction = "head") -> None:
        check_many(config, name, self.one_label)
        self.config = config
        self.task = task_of(config)
        chosen = predict if config.predict == "auto" else config.predict
        # The prototypes' share of the probabilities; the rest is the head's.
        self.prototype_share = {"head": 0.0, "prototype": 1.0, "both": config.predict_mix}[chosen]
        self.name = name
        self.regulariser = Regulariser() if npr else None
        # What a lab-only server step keeps between rounds.
        self.server_memory: dict[str, Tensor] = {}
        if config.supervision == "none" and (not npr or chosen != "prototype"):
            raise ConfigError(
                'supervision = "none" leaves the head untrained',
                hint='use a method with NPR and predict = "prototype"',
            )
        try:
            self.options = self.Options(**config.method_options)
        except ValidationError as error:
            known = ", ".join(self.Options.model_fields) or "none"
            first = error.errors()[0]
            raise ConfigError(
                f"method_options.{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}",
                where=name,
                hint=f"options of {name}: {known}",
            ) from error

    # What is exchanged.

    def shares(self, round_number: int) -> frozenset[str]:
        """The groups summed in this round. It may depend on the round's number, never on a site."""
        del round_number
        return self.shared - {"norm", "statistics"} if self.config.local_bn else self.shared

    def broadcasts(self, round_number: int) -> frozenset[str]:
        """The groups a site takes over after this round: what was summed, and what a lab-only server step makes."""
        return self.shares(round_number)

    def manifest(self, model: SplitModel, round_number: int) -> ParameterManifest:
        return ParameterManifest.of(model, self.shares(round_number))

    def contribution(self, site: Site, round_number: int) -> Contribution:
        """The site's vector, weighted with its number of images."""
        vector = self.manifest(site.model, round_number).flatten(site.model)
        return Contribution(vector=vector, weight=len(site.train))

    def server_step(self, model: SplitModel, manifest: ParameterManifest, mean: Vector, extras: dict[str, Sum]) -> None:
        """Make the next global model of the weighted mean, in place."""
        del extras
        manifest.load(model, mean)

    # What a site does.

    def build_model(self, spec: ModelSpec) -> SplitModel:
        return build_model(spec)

    def begin_round(self, site: Site, round_number: int) -> None:
        """Called when the global parts are loaded and before the first step."""
        if self.regulariser is not None:
            self.regulariser.begin_round(site, round_number)

    def check_group(self, site: Site) -> None:
        """:raises ConfigError: if the site's group, or its parts of batches, cannot do what one whole batch would."""
        if not self.divisible and (site.group.size > 1 or site.device.micro_batch is not None):
            raise ConfigError(
                f"{self.name} draws random numbers and sums over whole batches, which cannot be shared or split",
                hint="train in one process and without micro_batch, or choose another method",
            )
        if site.group.size == 1:
            return
        if any(getattr(part, name, 0.0) for part in site.model.modules() for name in ("drop_rate", "drop_prob")):
            raise ConfigError(
                "a dropout layer draws other random numbers in several processes than in one",
                where="model.drop_rate",
                hint="train in one process, or without a dropout layer",
            )

    def local_round(self, site: Site, round_number: int) -> LocalReport:
        """One round of local work. All randomness inside is the round's own (dropout, stochastic depth)."""
        self.check_group(site)
        with site.device.forked_draws():
            torch.manual_seed(derive(site.seed, site.name, round_number, "steps"))
            self.begin_round(site, round_number)
            try:
                return self.work(site, round_number)
            finally:
                site.within_round.clear()

    def work(self, site: Site, round_number: int) -> LocalReport:
        return self.epochs(site, round_number, site.optimizer(round_number))

    def epochs(self, site: Site, round_number: int, optimizer: torch.optim.Optimizer) -> LocalReport:
        """`local_epochs` passes of `step`, then prototypes for the next round if they come from here."""
        report, seen = NOTHING, Seen()
        keep = self.regulariser is not None and site.config.prototype_source == "epoch"

        def watch(features: Tensor, labels: Tensor) -> None:
            seen.append((features, labels))

        site.model.train()
        for epoch in range(site.config.local_epochs):
            seen.clear()
            batches = site.epoch(round_number, epoch, sampler=self.sampler(site))
            report += descend(
                batches, optimizer, lambda batch: self.step(site, batch), watch if keep else None, descent=site.descent
            )
        if self.regulariser is not None:
            self.regulariser.end_round(site, round_number, seen)
        return report

    def sampler(self, site: Site) -> Sampler | None:
        """How the rows of an epoch are drawn; None is one shuffled pass."""
        del site
        return None

    def step(self, site: Site, batch: Batch) -> TrainingStep:
        """Loss of one batch, with a single pass through the extractor for every term."""
        features = site.model.features(batch.images)
        logits = site.model.logits(features)
        loss = self.supervised(site, features, logits, batch.labels) + self.penalty(site, batch, features, logits)
        if self.regulariser is not None:
            loss = self.regulariser.add(site, loss, features, batch.labels)
        return TrainingStep(loss, logits, features)

    def supervised(self, site: Site, features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Balanced softmax over the site's classes, or what the configuration puts in its place."""
        if site.config.supervision == "none":
            return features.new_zeros(())
        return self.task.supervised(logits, labels, site.log_prior if site.config.supervision == "bsm" else None)

    def penalty(self, site: Site, batch: Batch, features: Tensor, logits: Tensor) -> Tensor | float:
        """What the method adds to the supervised loss."""
        del site, batch, features, logits
        return 0.0

    @property
    def finetune_epochs(self) -> int:
        """Passes of a site's own after the last round; only methods with that option have any."""
        return self.options.finetune_epochs if isinstance(self.options, FineTuning) else 0

    def finish(self, site: Site, round_number: int) -> None:
        """Called once, after the last aggregate is loaded: the place for a site's own fine-tuning."""
        if self.finetune_epochs:
            self.fine_tune(site, round_number, ("",))

    def fine_tune(self, site: Site, round_number: int, prefixes: tuple[str, ...]) -> None:
        """Descend the loss of the rounds at the site alone. A head by itself keeps the statistics of the body."""
        with site.device.forked_draws(), training_only(site.model, prefixes) as named:
            torch.manual_seed(derive(site.seed, site.name, "finish"))
            if self.regulariser is not None:
                self.regulariser.begin_round(site, round_number)  # prototypes of the aggregate, not of the round before
            optimizer = site.fresh_optimizer(round_number, named)
            site.model.train(prefixes != ("head.",))
            for epoch in range(self.finetune_epochs):
                batches = site.epoch(round_number, "finish", epoch)
                descend(batches, optimizer, lambda batch: self.step(site, batch), descent=site.descent)

    # What comes out.

    @property
    def trains_head(self) -> bool:
        """False where the head learns nothing, so that only prototypes or a refitted head can predict."""
        return self.config.supervision != "none"

    @property
    def reports(self) -> tuple[Kind, ...]:
        """The models worth evaluating, the method's own first.

        "global" is the aggregate; "local" a site's model after its epoch and before aggregation (the paper's protocol);
        "personal" the aggregate with a site's own parts put in.
        """
        models = self.models or (("personal", "local") if self.personal else ("global", "local"))
        if self.finetune_epochs and "personal" not in models:
            models = ("personal", *models)
        if not self.config.local_bn:
            return models
        # With statistics of its own at every site there is no model that fits all of them.
        return tuple(dict.fromkeys("personal" if kind == "global" else kind for kind in models))

    def predictor(self, site: Site, model: SplitModel, kind: Kind) -> Callable[[Samples], NDArray[np.float32]]:
        """From images to (N, C) probabilities, softmax (or a sigmoid for each label) applied once; no prior enters.

        Where prototypes have a part in it, making this takes a pass over the site's training images: the prototypes of
        the last round belong to the model it started from, and prediction needs this model's own.
        """
        prototypes = Regulariser.predicting(site, model) if self.prototype_share > 0.0 else None

        def predict(samples: Samples) -> NDArray[np.float32]:
            if len(samples) == 0:  # a site may have trained and hold nothing to be judged by
                return np.empty((0, site.train.num_classes), dtype=np.float32)
            features, _ = extract(model, site.reading(samples))
            with torch.inference_mode():
                scores = self._scores(site, model, features, kind, prototypes)
                if site.config.predict_present_only and kind != "global":
                    scores = self.task.only(scores, site.prior.present)
            return to_host(scores.float()).numpy()

        return predict

    def class_logits(self, model: SplitModel, features: Tensor, kind: Kind) -> Tensor:
        """Raw logits of the predictor that `kind` names; the model is in eval mode."""
        del kind
        return model.logits(features)

    def _scores(
        self, site: Site, model: SplitModel, features: Tensor, kind: Kind, prototypes: Prototypes | None
    ) -> Tensor:
        share = self.prototype_share
        by_head, by_prototype = features.new_zeros(()), features.new_zeros(())
        if share < 1.0:
            with evaluating(model):
                by_head = self.task.probabilities(self.class_logits(model, features, kind))
        if prototypes is not None:
            classes = site.train.num_classes
            by_prototype = self.task.scores(prototypes, features, classes, site.config.temperature)
        return (1.0 - share) * by_head + share * by_prototype
