"""Networks of MONAI, 2-D, beside timm's: `monai:densenet121` and the like. MONAI is the extra `[monai]`.

Only the architecture comes from there. Weights are drawn from our seed or read from a file, and what a federation
starts from is pinned by the SHA-256 of its initial model, as for every other network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from torch import nn

from lazaret import software
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


# An exported model as a MONAI bundle: configs, models and docs, in the folders that MONAI documents.
#
# The network is the ONNX file, which was compared with torch before: it needs neither this package nor a pickle.
# `inference.json` decodes and resizes images as this package does, so that a bundle predicts what a site predicts.
# MONAI itself is not needed to write one.


MONAI: Final = "1.6.1"
"""What the tests read a bundle with."""
PILLOW: Final = "image squash bilinear"
"""What a bundle does to an image before the network (`npr.data.manifest.image_decoding`)."""
_PLACES: Final = {
    "model.onnx": "models/model.onnx",
    "model.safetensors": "models/model.safetensors",
    "MODEL_CARD.md": "docs/README.md",
}


def bundle_files(contents: Mapping[str, bytes], about: Mapping[str, Any], *, output: str) -> dict[str, bytes]:
    """The files of an export, by their places in a bundle, and its two configurations.

    :param contents: with `model.onnx`; what has no place of its own goes to docs.
    :param about: what model.json says of the model.
    :param output: the output of the ONNX file that is the prediction.
    :raises ConfigError: if a class has a name that MONAI would take for something else, or images are prepared here in
        a way that a bundle does not have.
    """
    _check_names(about["classes"])
    decoding = about["input"].get("decoding", PILLOW)
    if decoding != PILLOW and "dicom" not in decoding:
        raise ConfigError(
            f"a MONAI bundle would prepare images in another way than this site ({decoding})",
            where="[data] source",
            hint="export without --format",
        )
    placed = {_PLACES.get(name, f"docs/{name}"): content for name, content in contents.items()}
    placed["configs/metadata.json"] = _json(_metadata(about, output))
    placed["configs/inference.json"] = _json(_inference(about, output))
    return placed


def _check_names(classes: Sequence[str]) -> None:
    """What begins with one of these in a configuration, MONAI runs or looks up; and `#` it replaces anywhere."""
    for name in classes:
        if name.startswith(("$", "@", "%")) or "#" in name:
            raise ConfigError(f"MONAI would not take {name!r} for the name of a class", hint="export without --format")


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _metadata(about: Mapping[str, Any], output: str) -> dict[str, Any]:
    _, size, _, channels = about["input"]["shape"]
    grey = channels == 1
    image = {
        "type": "image",
        "format": "magnitude",
        "num_channels": channels,
        "spatial_shape": [size, size],
        "dtype": "float32",
        "value_range": [0, 255],
        "is_patch_data": False,
        "channel_def": {"0": "grey"} if grey else {"0": "red", "1": "green", "2": "blue"},
    }
    found: dict[str, Any] = {"type": output, "format": output, "dtype": "float32", "is_patch_data": False}
    if output == "probabilities":
        names = {str(number): name for number, name in enumerate(about["classes"])}
        found |= {"num_channels": len(names), "spatial_shape": [], "value_range": [0, 1], "channel_def": names}
    return {
        "version": f"0.0.{about['round']}",
        "changelog": {f"0.0.{about['round']}": f"round {about['round']} of run {about['run']}"},
        "monai_version": MONAI,
        "pytorch_version": version("torch").split("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {name: version(name) for name in ("onnxruntime", "pillow")},
        "name": f"{about['federation']} {about['run']}",
        "task": "image classification" if output == "probabilities" else "image features",
        "description": f"{about['architecture']} trained with {about['method']} by a federation of hospitals",
        "authors": f"lazaret {software.version()}",
        "copyright": "see docs",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": found}},
    }


def _inference(about: Mapping[str, Any], output: str) -> dict[str, Any]:
    """`network_def` takes (N, C, H, W) with values from 0 to 255, as MONAI orders them."""
    _, size, _, channels = about["input"]["shape"]
    mode = "L" if channels == 1 else "RGB"
    header = "['file', *@classes]" if output == "probabilities" else "['file', 'features']"
    return {
        "imports": [
            *("$import glob", "$import numpy", "$import os", "$import torch", "$from PIL import Image"),
            "$os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')",  # read when the next line imports it
            "$import onnxruntime",
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "datalist": "$sorted(glob.glob(@dataset_dir + '/*'))",
        "classes": list(about["classes"]),
        "session": "$onnxruntime.InferenceSession(@bundle_root + '/models/model.onnx', "
        "providers=['CPUExecutionProvider'])",
        "network_def": f"$lambda images: torch.from_numpy(@session.run(['{output}'], {{'images': "
        "images.permute(0, 2, 3, 1).round().to(torch.uint8).contiguous().numpy()})[0])",
        "preprocessing": f"$lambda path: torch.from_numpy(numpy.array(Image.open(path).convert('{mode}').resize("
        f"({size}, {size}), Image.Resampling.BILINEAR)).reshape({size}, {size}, {channels})).permute(2, 0, 1).float()",
        "inferer": {"_target_": "SimpleInferer"},
        "predict": "$lambda path: @inferer(@preprocessing(path)[None], @network_def)[0]",
        "run": [
            f"$print(','.join({header}))",
            "$[print(','.join([path, *(f'{value:.6f}' for value in @predict(path).tolist())])) for path in @datalist]",
        ],
    }
