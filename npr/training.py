"""The inner loop: optimisers, one pass over a site's batches, and the pass that only reads features."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

from lazaret.errors import ConfigError
from npr.config import TrainConfig
from npr.data.loader import Batch, Batches
from npr.device import PROCESSOR, Device, number
from npr.distributed import Group
from npr.model import SplitModel
from npr.task import task_for

_HEADS = ("head.", "personal_head.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReport:
    """What one round of local work amounted to. Of these only the sums may be added up over sites, under masks."""

    steps: int
    samples: int
    loss_sum: float
    hits: int
    seconds: float
    seconds_waiting: float

    def __add__(self, other: LocalReport) -> LocalReport:
        return LocalReport(
            steps=self.steps + other.steps,
            samples=self.samples + other.samples,
            loss_sum=self.loss_sum + other.loss_sum,
            hits=self.hits + other.hits,
            seconds=self.seconds + other.seconds,
            seconds_waiting=self.seconds_waiting + other.seconds_waiting,
        )


NOTHING = LocalReport(steps=0, samples=0, loss_sum=0.0, hits=0, seconds=0.0, seconds_waiting=0.0)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What one batch gave: the loss to descend, the logits as they are, and the features they came from."""

    loss: Tensor
    logits: Tensor
    features: Tensor


def make_optimizer(config: TrainConfig, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """The configured optimiser with two groups, because heads have their own weight decay.

    Decay on a head is off by default: at a site that lacks a class the row of that class has no gradient but the decay
    itself, which Adam scales up to full steps, and after one epoch the row is gone from the average.
    """
    named = list(named)
    heads = [parameter for name, parameter in named if name.startswith(_HEADS)]
    others = [parameter for name, parameter in named if not name.startswith(_HEADS)]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((others, config.weight_decay), (heads, config.head_decay))
        if parameters
    ]
    if config.optimizer == "sgd":
        return SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)
    adam = AdamW if config.optimizer == "adamw" else Adam
    return adam(groups, lr=config.learning_rate, fused=True)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimiser's memory as named tensors, parameters numbered in the order they were given."""
    return {
        f"{number}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if value is not None
    }


def load_optimizer_tensors(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`, for an optimiser over the same parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition("/")
        # Fused steps walk parameter and moments in memory order, so a moment must have its parameter's layout.
        like = parameters[int(number)]
        laid_out = torch.empty_like(like).copy_(tensor) if tensor.shape == like.shape else tensor.clone()
        state.setdefault(int(number), {})[key] = laid_out.detach()
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


@contextmanager
def training_only(model: nn.Module, prefixes: tuple[str, ...]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Let gradients reach only parameters whose names start with one of `prefixes`, and yield those.

    The others belong in no optimiser either: decay and momentum would move them without any gradient.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name.startswith(prefixes))
        yield [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


class Descent:
    """How a loss becomes a step on a device: in parts where memory is short, and scaled where float16 needs it.

    :ivar scaler: keeps gradients in the range of float16 (it adapts from step to step); None in other precisions.
    """

    def __init__(self, device: Device = PROCESSOR, model: nn.Module | None = None) -> None:
        self.device = device
        self._model = model
        self.scaler = GradScaler(device.place.type, init_scale=_FIRST_SCALE) if device.precision == "float16" else None

    def scale(self) -> Tensor:
        """What the scaler has learned, to be kept over a restart."""
        state = self.scaler.state_dict() if self.scaler is not None else {}
        return torch.tensor([state.get("scale", 1.0), state.get("_growth_tracker", 0)], dtype=torch.float64)

    def rescale(self, kept: Tensor) -> None:
        """The inverse of `scale`."""
        if self.scaler is not None:
            scale, tracker = kept.tolist()
            self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": scale, "_growth_tracker": int(tracker)})

    def backward(self, loss: Tensor) -> None:
        """Computing activations a second time would move running statistics a second time: they are put back."""
        moving = [] if self._model is None or not self.device.checkpointing else list(self._model.buffers())
        kept = [buffer.clone() for buffer in moving]
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for buffer, before in zip(moving, kept, strict=True):
                buffer.copy_(before)

    def step(self, optimizer: Optimizer) -> None:
        """A step whose gradients overflowed is left out, and the scale is lowered."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()


# A power of two far below the default of 65,536, from which the first steps of a round would often be left out.
_FIRST_SCALE = 1024.0


def descend(
    batches: Batches,
    optimizer: Optimizer,
    step: Callable[[Batch], TrainingStep],
    watch: Callable[[Tensor, Tensor], None] | None = None,
    *,
    descent: Descent | None = None,
) -> LocalReport:
    """One pass over `batches`. Sums stay tensors until the end, so nothing waits on a number inside the loop.

    :param watch: is given features and labels of every whole batch.
    :param descent: of the site's device; the processor's if there is none.
    """
    started, group, descent = time.perf_counter(), batches.group, descent or Descent()
    place = descent.device.place
    loss_sum = torch.zeros((), dtype=descent.device.wide, device=place)
    hits, steps = torch.zeros((), dtype=torch.int64, device=place), 0
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        with descent.device.memory_for(len(batch)):
            result = _gradients(batch, step, descent, group)
            if batch.shared:
                group.sum_gradients(parameter for part in optimizer.param_groups for parameter in part["params"])
            descent.step(optimizer)
        # A batch too small to be shared is worked on by every process alike, and counted by the first.
        if batch.shared or group.rank == 0:
            loss_sum += result.loss.detach() * len(batch.labels)
            hits += task_for(batch.labels).right(result.logits.detach(), batch.labels).sum()
        steps += 1
        if watch is not None:
            watch(group.join(result.features.detach(), batch.whole), group.join(batch.labels, batch.whole))
    group.sum(loss_sum), group.sum(hits)
    total = number(loss_sum)
    if not math.isfinite(total):
        raise ConfigError("training diverged: the loss is not a finite number", hint="lower learning_rate")
    return LocalReport(
        steps=steps,
        samples=len(batches.indices),
        loss_sum=total,
        hits=int(number(hits)),
        seconds=time.perf_counter() - started,
        seconds_waiting=batches.seconds_waiting,
    )


def _gradients(
    batch: Batch, step: Callable[[Batch], TrainingStep], descent: Descent, group: Group
) -> TrainingStep:
    """Leave this process's gradients of a batch. The mean of a part counts as much as it has images in the batch."""
    results = []
    for part in batch.parts(descent.device.micro_batch):
        with group.as_one() if batch.shared else nullcontext():
            result = step(part)
        whole = len(part) == batch.whole
        descent.backward(result.loss if whole else result.loss * (len(part) / batch.whole))
        results.append(TrainingStep(result.loss.detach(), result.logits.detach(), result.features.detach()))
    if len(results) == 1:
        return results[0]
    weights = [len(result.logits) / len(batch) for result in results]
    loss = torch.stack([weight * result.loss for weight, result in zip(weights, results, strict=True)]).sum()
    return TrainingStep(
        loss, torch.cat([result.logits for result in results]), torch.cat([result.features for result in results])
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, and every layer in the mode it was in again outside.

    Written past `nn.Module.__setattr__`, which looks through all parameters at each of some hundred layers: it would
    take a tenth of the time of a small site's evaluation.
    """
    learning = [layer.__dict__ for layer in model.modules() if layer.training]
    for attributes in learning:
        attributes["training"] = False
    try:
        yield
    finally:
        for attributes in learning:
            attributes["training"] = True


def extract(model: SplitModel, batches: Batches) -> tuple[Tensor, Tensor]:
    """Features and labels of a whole pass, in eval mode and without gradients: no buffer of the model moves."""
    features, labels = [], []
    with evaluating(model), torch.inference_mode():
        for batch in batches:
            with batches.device.memory_for(len(batch)):
                read = model.features(batch.images)
            features.append(batches.group.join(read, batch.whole))
            labels.append(batches.group.join(batch.labels, batch.whole))
    # Joined outside inference mode, they are ordinary tensors again, which a head may be trained on.
    return torch.cat(features), torch.cat(labels)
