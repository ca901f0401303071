"""Networks of MONAI, 2-D, beside timm's: `monai:densenet121` and the like. MONAI is the extra `[monai]`.

Only the architecture comes from there. Weights are drawn from our seed or read from a file, and what a federation
starts from is pinned by the SHA-256 of its initial model, as for every other network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from lazaret.errors import ConfigError

PREFIX: Final = "monai:"
# What MONAI calls each, and its words for the number of channels and of classes.
_NETWORKS: Final = {
    **{f"densenet{depth}": (f"DenseNet{depth}", "in_channels", "out_channels") for depth in (121, 169, 201, 264)},
    **{f"resnet{depth}": (f"resnet{depth}", "n_input_channels", "num_classes") for depth in (10, 18, 34, 50, 101, 152)},
    **{f"seresnet{depth}": (f"SEResNet{depth}", "in_channels", "num_classes") for depth in (50, 101, 152)},
}
NAMES: Final = tuple(PREFIX + name for name in _NETWORKS)
# MONAI states none; of these two every image library has the same numbers, those of ImageNet.
MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)


def is_monai(architecture: str) -> bool:
    return architecture.startswith(PREFIX)


def check_name(architecture: str, weights: str) -> None:
    """:raises ConfigError: if there is no such network, MONAI is not installed, or such weights are not to be had."""
    if architecture not in NAMES:
        raise ConfigError(f"unknown architecture {architecture!r}", hint=f"of MONAI there are {', '.join(NAMES)}")
    if weights in ("timm", "package"):
        raise ConfigError(f"weights = {weights!r} are not for {architecture}", hint='use "none" or "file:PATH#SHA256"')
    _nets()


def create(architecture: str, *, in_channels: int) -> nn.Module:
    """The network without its classifier; `num_features` says how wide it is then."""
    called, channels, classes = _NETWORKS[architecture.removeprefix(PREFIX)]
    sizes = {channels: in_channels, classes: 2}
    network: nn.Module = getattr(_nets(), called)(spatial_dims=2, pretrained=False, **sizes)
    *_, (name, classifier) = ((n, part) for n, part in network.named_modules() if isinstance(part, nn.Linear))
    owner, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(owner), leaf, nn.Identity())
    network.num_features = classifier.in_features  # type: ignore[assignment]
    return network


def first_convolution(network: nn.Module) -> str:
    """The name of the layer that sees the image."""
    names: Iterator[str] = (name for name, part in network.named_modules() if isinstance(part, nn.Conv2d))
    return next(names)


def _nets() -> Any:
    try:
        from monai.networks import nets
    except ImportError as error:
        raise ConfigError("networks of MONAI need the package monai", hint="pip install 'lazaret[monai]'") from error
    return nets
