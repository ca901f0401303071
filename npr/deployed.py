"""A trained model as it is used: bytes of images in, calibrated probabilities out; its ONNX file, and a MONAI bundle.

Prediction at a site runs this module, and an exported file contains it, so that both give the same numbers.
Normalisation and temperature are inside: the user resizes an image and passes its bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lazaret import software
from lazaret.errors import ConfigError, LocalProtocolError, VerificationFailed
from npr.device import to_host
from npr.methods.base import Kind, Method
from npr.metrics import FLOOR
from npr.model import SplitModel
from npr.prototypes import Prototypes

Pixels = NDArray[np.uint8]


class Features(nn.Module):
    """The extractor alone, from uint8 (N, H, W, C) to features (N, d): what hospitals with personal heads share."""

    scale: Tensor
    shift: Tensor

    def __init__(self, *, model: SplitModel, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model
        # As in npr/data/loader.py: (x / 255 - mean) / std as one multiplication and one addition.
        scale = (1.0 / (255.0 * torch.tensor(std, dtype=torch.float64))).float().view(1, -1, 1, 1)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).float().view(1, -1, 1, 1)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        self.eval()

    def features(self, images: Tensor) -> Tensor:
        return self.model.features(images.permute(0, 3, 1, 2).float() * self.scale + self.shift)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.features(images)


class Deployed(Features):
    """`forward` takes uint8 (N, H, W, C) and gives probabilities (N, classes) and features (N, d).

    :param present: classes of the site as ones and zeros; others get no probability. None for all classes.
    :param prototypes: needed where the configuration predicts by them.
    """

    present: Tensor | None
    spread: Tensor | None

    def __init__(
        self,
        *,
        method: Method,
        model: SplitModel,
        kind: Kind,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        temperature: float = 1.0,
        present: Tensor | None = None,
        prototypes: Prototypes | None = None,
    ) -> None:
        super().__init__(model=model, mean=mean, std=std)
        self.temperature = temperature
        self._method, self._kind, self._prototypes = method, kind, prototypes
        self._mix = method.prototype_share
        if self._mix > 0.0 and prototypes is None:
            raise LocalProtocolError("this model predicts by prototypes, and there are none")
        # From the classes that have prototypes to all classes, as a product: an exporter cannot follow assignments.
        # `columns` is worked out here for the same reason, and remembered.
        spread = None
        if prototypes is not None and self._mix > 0.0 and prototypes.columns.numel():
            spread = method.task.spread(prototypes, model.head.out_features)
        self.register_buffer("present", present.float() if present is not None else None)
        self.register_buffer("spread", spread)
        self.to(model.head.weight.device)

    @property
    def holds_prototypes(self) -> bool:
        """Whether an exported file would carry the site's prototypes."""
        return self._mix > 0.0

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        scores = self._scores(features)
        if self.present is not None:
            scores = self._method.task.only(scores, self.present)
        if self.temperature != 1.0:
            sharp = torch.softmax(torch.log(scores.clamp(min=FLOOR)) / self.temperature, dim=1) * (scores > 0)
            scores = sharp / sharp.sum(1, keepdim=True)
        return scores, features

    def _scores(self, features: Tensor) -> Tensor:
        """As `Method.predictor`, with prototypes that are there already."""
        scores = features.new_zeros(())
        if self._mix < 1.0:
            head = self._method.class_logits(self.model, features, self._kind)
            scores = (1.0 - self._mix) * self._method.task.probabilities(head)
        if self._mix > 0.0 and self._prototypes is not None and self.spread is not None:
            near = self._prototypes.similarity(features) / self._method.config.temperature
            scores = scores + self._mix * self._method.task.by_prototype(near, self.spread)
        return scores

    @torch.inference_mode()
    def predict(self, images: Pixels) -> tuple[NDArray[np.float32], Tensor]:
        """Probabilities and features of one batch."""
        batch = torch.from_numpy(np.ascontiguousarray(images)).to(self.scale.device)
        probabilities, features = self(batch.contiguous())
        return to_host(probabilities.float()).numpy(), to_host(features)


# ONNX files: written from a module that takes bytes of images, and compared with it before anybody uses them. `onnx`,
# `onnxruntime` and `onnxscript` are the extra `[export]`.

INPUT: Final = "images"
OPSET: Final = 20
# Single precision errs in proportion to the terms of a sum (relative) and, near zero, by its own step (absolute).
RELATIVE: Final = 1e-4
ABSOLUTE: Final = 1e-6
_KEY: Final = "lazaret"


def require_onnx() -> Any:
    """:raises ConfigError: if the extra is not installed. Returns the module `onnx`."""
    for name in ("onnxscript", "onnxruntime", "onnx"):
        found = _need(name)
    return found


def write_onnx(module: nn.Module, outputs: Sequence[str], sample: Pixels, about: Mapping[str, Any]) -> bytes:
    """The module as one ONNX file for any number of images, with `about` as JSON in its metadata."""
    onnx = require_onnx()
    module = module.eval()
    model = _traced(module, outputs, sample).model_proto
    # The exporter notes source files and lines of this machine at every node.
    for node in (*model.graph.node, *(inner for function in model.functions for inner in function.node)):
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    onnx.helper.set_model_props(model, {_KEY: json.dumps(about, sort_keys=True, ensure_ascii=False)})
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _traced(module: nn.Module, outputs: Sequence[str], sample: Pixels) -> Any:
    two = torch.from_numpy(np.ascontiguousarray(sample[:2]))
    try:
        with _quiet(), torch.no_grad():
            return torch.onnx.export(
                module,
                (two,),
                dynamo=True,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=list(outputs),
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ConfigError(
            f"torch cannot write this architecture as ONNX ({type(error).__name__})", hint="leave ONNX out"
        ) from error


def check_onnx(content: bytes, module: nn.Module, images: Pixels, *, where: str, batch: int = 16) -> dict[str, Any]:
    """Run file and module on the same images; returns how far apart they were at most.

    :raises VerificationFailed: when a number is further off than `ABSOLUTE` plus `RELATIVE` times its image's largest.
    """
    session = _session(content, where)
    worst = OnnxDifference()
    for start in range(0, len(images), batch):
        part = np.ascontiguousarray(images[start : start + batch])
        with torch.inference_mode():
            outputs = module.eval()(torch.from_numpy(part))
        expected = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        for ours, theirs in zip(expected, session.run(None, {INPUT: part}), strict=True):
            worst = worst.widest(difference(theirs, ours.numpy()))
    # NaN is within no limit.
    if not worst.share <= 1:
        raise VerificationFailed(
            f"ONNX Runtime differs from torch by {worst.absolute:.2g} ({worst.relative:.2g} relative), more than "
            f"{ABSOLUTE:.0e} and {RELATIVE:.0e} relative",
            where=where,
            hint="do not use this file; please report the architecture",
        )
    return {
        "opset": OPSET,
        "images": len(images),
        "absolute_difference": worst.absolute,
        "relative_difference": worst.relative,
        "limit": {"absolute": ABSOLUTE, "relative": RELATIVE},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxDifference:
    """The largest differences.

    :ivar relative: to the largest number of the same image. A feature that happens to be near zero has terms that are
        not: measured by itself, it would say nothing about the file.
    :ivar share: of what is allowed; above one, the file is not the model.
    """

    absolute: float = 0.0
    relative: float = 0.0
    share: float = 0.0

    def widest(self, other: OnnxDifference) -> OnnxDifference:
        pairs = zip(astuple(self), astuple(other), strict=True)
        absolute, relative, share = (float(np.maximum(one, two)) for one, two in pairs)  # NaN stays
        return OnnxDifference(absolute=absolute, relative=relative, share=share)


def difference(found: NDArray[Any], expected: NDArray[Any]) -> OnnxDifference:
    """Between two arrays with a row for each image."""
    if found.shape != expected.shape:
        return OnnxDifference(absolute=math.inf, relative=math.inf, share=math.inf)
    gaps = np.abs(found.astype(np.float64) - expected)
    scale = np.abs(expected).max(axis=1, keepdims=True).astype(np.float64)
    return OnnxDifference(
        absolute=float(gaps.max()),
        relative=float((gaps / np.maximum(scale, np.finfo(np.float32).tiny)).max()),
        share=float((gaps / (ABSOLUTE + RELATIVE * scale)).max()),
    )


def _session(content: bytes, where: str) -> Any:
    runtime = _need("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime raises types of its own that have no common base but Exception
        raise VerificationFailed(f"ONNX Runtime cannot open the file ({type(error).__name__})", where=where) from None


def _need(name: str) -> Any:
    # ONNX Runtime reports its use to its makers: read when it is first imported, and only this stops it altogether.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs the package {name}", hint="pip install 'lazaret[export]', or leave ONNX out"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter talks to people who develop exporters."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


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
