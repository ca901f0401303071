"""Everything one hospital holds. Nothing on it can send: what leaves is made by `Method.contribution` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from npr.config import TrainConfig
from npr.data.dataset import Samples
from npr.data.loader import Augmentation, Batches, Sampler
from npr.device import PROCESSOR, Device, to_host
from npr.distributed import ALONE, Group
from npr.model import ModelSpec, SplitModel, normalisation
from npr.prototypes import Prototypes
from npr.seeds import derive
from npr.task import check_samples, task_of
from npr.training import Descent, extract, load_optimizer_tensors, make_optimizer, optimizer_tensors, set_rate

AUGMENTATIONS = {"none": None, "standard": Augmentation(), "paper": Augmentation.paper()}
# Reading keeps no activations, but larger batches fall out of the processor's cache: 256 took 1.5 times as long as 64.
READING_BATCH = 64


class Site:
    """A site's images, its model, and what its method remembers between rounds.

    A local round is a function of the received vector, this memory, the data, the configuration, the seed and the
    round's number, so that the lab and a real federation compute the same numbers.

    :ivar mean: and `std` of the channels, by which images are normalised.
    :ivar kept: tensors a method keeps over rounds (a previous model, for instance), by name; on the host.
    :ivar group: the processes that do this site's local work together.
    :ivar within_round: what a method needs until the round's end and no longer (a frozen copy, for instance).
    """

    def __init__(
        self,
        *,
        name: str,
        train: Samples,
        model: SplitModel,
        config: TrainConfig,
        seed: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: Device = PROCESSOR,
    ) -> None:
        check_samples(config, train)
        self.name = name
        self.train = train
        self.task = task_of(config)
        self.device = device
        self.model = device.placed(model)
        self.descent = Descent(device, model)
        self.config = config
        self.seed = seed
        self.prior = self.task.prior(train, device)
        self.log_prior = self.prior.log(config.prior_floor)
        self.prototypes: Prototypes | None = None
        self.group: Group = ALONE
        self.kept: dict[str, Tensor] = {}
        self.within_round: dict[str, Any] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._saved: dict[str, dict[str, Tensor]] = {}
        self.mean, self.std = mean, std
        self._read: tuple[Tensor, Tensor, Tensor, torch.dtype | None] | None = None

    @classmethod
    def of(
        cls,
        name: str,
        train: Samples,
        model: SplitModel,
        spec: ModelSpec,
        config: TrainConfig,
        *,
        seed: int,
        device: Device = PROCESSOR,
    ) -> Site:
        """A site whose images are normalised as the network of `spec` wants them."""
        mean, std = normalisation(spec)
        return cls(name=name, train=train, model=model, config=config, seed=seed, mean=mean, std=std, device=device)

    def __repr__(self) -> str:
        return f"<Site {self.name}, {len(self.train)} images>"

    def reading(self, samples: Samples) -> Batches:
        """`samples` in order, as in evaluation."""
        return Batches(
            samples,
            batch_size=min(READING_BATCH, self.device.micro_batch or READING_BATCH),
            mean=self.mean,
            std=self.std,
            group=self.group,
            device=self.device,
        )

    def epoch(self, round_number: int, *part: str | int, sampler: Sampler | None = None) -> Batches:
        """One shuffled, augmented pass over the training images; `part` distinguishes several passes of a round."""
        return Batches(
            self.train,
            batch_size=self.config.batch_size,
            mean=self.mean,
            std=self.std,
            augment=AUGMENTATIONS[self.config.augmentation],
            seed=(derive(self.seed, self.name, round_number, "epoch", *part),),
            shuffle=True,
            sampler=sampler,
            group=self.group,
            device=self.device,
        )

    def training_features(self, model: SplitModel) -> tuple[Tensor, Tensor]:
        """Features and labels of all training images under a model, in eval mode and without augmentation.

        Kept until another model is asked for: a model that was evaluated after a round is the one that the next round
        starts from, and both need its features.
        """
        if self.group.size > 1:  # all processes read, or none
            return extract(model, self.reading(self.train))
        tensors = model.extractor.state_dict().items()
        # Counters of batches have no influence, and are the site's own.
        used = [tensor.reshape(-1) for name, tensor in tensors if not name.endswith("num_batches_tracked")]
        weights = torch.cat(used) if used else torch.empty(0)
        if self._read is None or not self._read_by(model, weights):
            self.forget_features()  # two of them at a time would be memory for nothing
            self._read = (*extract(model, self.reading(self.train)), weights, model.extractor_dtype)
        return self._read[0], self._read[1]

    def _read_by(self, model: SplitModel, weights: Tensor) -> bool:
        """Whether the features that are kept are those of a model with these weights."""
        if self._read is None or self._read[3] != model.extractor_dtype or self._read[2].shape != weights.shape:
            return False
        return bool(to_host((self._read[2] == weights).all()))

    def forget_features(self) -> None:
        self._read = None

    def optimizer(
        self, round_number: int, named: Iterable[tuple[str, nn.Parameter]] | None = None, *, key: str = "all"
    ) -> Optimizer:
        """The optimiser of this round over `named` (default: the whole model), with its memory if that persists."""
        if key not in self._optimizers or self.config.optimizer_state == "reset":
            everything = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
            self._optimizers[key] = make_optimizer(self.config, named or everything)
            if key in self._saved:
                load_optimizer_tensors(self._optimizers[key], self._saved.pop(key))
        optimizer = self._optimizers[key]
        set_rate(optimizer, self.config.rate(round_number))
        return optimizer

    def fresh_optimizer(self, round_number: int, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """An optimiser without memory, for work outside the rounds."""
        optimizer = make_optimizer(self.config, named)
        set_rate(optimizer, self.config.rate(round_number))
        return optimizer

    def standing_in(self, model: SplitModel) -> Site:
        """This site around another model, with the same memory: for work that must not touch the rounds to come."""
        other = Site(
            name=self.name,
            train=self.train,
            model=model,
            config=self.config,
            seed=self.seed,
            mean=self.mean,
            std=self.std,
            device=self.device,
        )
        other.remember(self.memory() | {f"model/{name}": tensor for name, tensor in model.state_dict().items()})
        other.group = self.group
        return other

    def memory(self) -> dict[str, Tensor]:
        """All that must survive a restart, as named tensors on the host."""
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"kept/{name}": tensor for name, tensor in self.kept.items()}
        if self.prototypes is not None:
            tensors |= {"prototypes/vectors": self.prototypes.vectors, "prototypes/owners": self.prototypes.owners}
        if self.config.optimizer_state == "persist":
            saved = self._saved | {key: optimizer_tensors(optimizer) for key, optimizer in self._optimizers.items()}
            tensors |= {f"optimizer/{key}/{name}": t for key, part in saved.items() for name, t in part.items()}
        if self.descent.scaler is not None:
            tensors["scale/float16"] = self.descent.scale()
        return {name: to_host(tensor) for name, tensor in tensors.items()}

    def remember(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `memory`."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            parts.setdefault(kind, {})[rest] = tensor
        self.model.load_state_dict(parts["model"])
        self.kept = dict(parts.get("kept", {}))
        held = parts.get("prototypes")
        self.prototypes = Prototypes(*map(self.device.from_host, (held["vectors"], held["owners"]))) if held else None
        if self.descent.scaler is not None and "scale" in parts:
            self.descent.rescale(parts["scale"]["float16"])
        self._optimizers, self._saved = {}, {}
        for name, tensor in parts.get("optimizer", {}).items():
            key, _, rest = name.partition("/")
            self._saved.setdefault(key, {})[rest] = tensor
