"""An exported model as a MONAI bundle: configs, models and docs, in the folders that MONAI documents.

The network is the ONNX file, which was compared with torch before: it needs neither this package nor a pickle.
`inference.json` decodes and resizes images as this package does, so that a bundle predicts what a site predicts.
MONAI itself is not needed to write one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from lazaret import software
from lazaret.errors import ConfigError

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
