"""`site-agent export`: this site's model as files that other programs read, with a card that says where it comes from.

model.safetensors   all tensors, personal layers included
model.onnx          from bytes of images to calibrated probabilities, checked against torch on this site's own images
model.json          architecture, classes, preprocessing, digests
MODEL_CARD.md       written from the signed manifest and this site's own log
configs/, models/, docs/    the same as a MONAI bundle, on request
hospital-only.md    under differential privacy: exact figures, which epsilon does not cover; not to be passed on
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save as save_tensors

from lazaret import files, software
from lazaret.errors import ConfigError, LocalProtocolError
from npr.deployed import Pixels, bundle_files, check_onnx, require_onnx, write_onnx
from npr.model import normalisation
from site_agent.config import SiteConfig
from site_agent.trainer.evaluation import figures_of
from site_agent.trainer.model_card import HOSPITAL_ONLY, history_of, hospital_only, model_card
from site_agent.trainer.personal_state import LoggedRun, SiteRecord
from site_agent.trainer.predict import decoding_for
from site_agent.trainer.predictor import ModelPlace, Predictor, Which, deploy

FORMAT: Final = "lazaret-model/1"
CHECKED_IMAGES: Final = 64


def check_target(target: Path, *, onnx: bool) -> None:
    """Said before the model is loaded, which takes a while."""
    if target.exists():
        raise ConfigError("refusing to write into what exists already", where=str(target), hint="choose another name")
    if onnx:
        require_onnx()


def open_for_export(config: SiteConfig, record: SiteRecord, which: Which | None, *, with_prototypes: bool) -> Predictor:
    """The predictor that the files will hold: without the site's prototypes, unless they are asked for."""
    # On the processor: an ONNX file is written from, and compared with, what everybody can run.
    processor = config.site.model_copy(update={"device": "cpu"})
    place = ModelPlace.open(config.model_copy(update={"site": processor}), record)
    if place.manifest.privacy is not None:
        return _covered(place, which, with_prototypes=with_prototypes)
    if with_prototypes or place.method.prototype_share == 0.0:
        return Predictor.of(place, which)
    if place.method.prototype_share == 1.0:
        raise ConfigError(
            "this model predicts by prototypes alone, which are made of patients' images and stay at the site",
            where="manifest [training.settings] predict",
            hint="--with-prototypes writes them to the files nevertheless",
        )
    return Predictor.of(replace(place, head_alone=True), which)


def _covered(place: ModelPlace, which: Which | None, *, with_prototypes: bool) -> Predictor:
    """Only what is booked or public. Temperature, classes that are there and prototypes come from images without noise.

    :raises ConfigError: where prototypes are wanted, or nothing can be predicted without them.
    """
    if with_prototypes or place.method.prototype_share == 1.0:
        raise ConfigError(
            "prototypes of a model are made of patients' images without noise, and epsilon does not cover them",
            where="manifest [privacy]",
            hint="export without --with-prototypes; a model that predicts by prototypes alone stays at the site",
        )
    predictor = Predictor.of(replace(place, head_alone=place.method.prototype_share > 0.0), which)
    bare = replace(
        predictor.companion,
        temperature=None,
        validation_images=0,
        points=(None,) * len(predictor.companion.points),
        present=torch.ones_like(predictor.companion.present),
    )
    return replace(predictor, companion=bare, deployed=deploy(predictor.place, predictor.trained, bare))


def export(predictor: Predictor, target: Path, *, onnx: bool, bundle: bool = False) -> dict[str, Any]:
    """Write a folder that must not exist yet. It appears when everything in it has been written and checked.

    :param bundle: in the folders of a MONAI bundle, which has its network as ONNX.
    """
    check_target(target, onnx=onnx)
    images = _some_images(predictor)
    about = describe(predictor)
    contents = {"model.safetensors": _safetensors(predictor, about)}
    checked: dict[str, Any] = {}
    if onnx:
        contents["model.onnx"] = write_onnx(predictor.deployed, ("probabilities", "features"), images, about)
        checked = {"onnx": check_onnx(contents["model.onnx"], predictor.deployed, images, where="model.onnx")}
    sidecar = about | {"files": digests(contents), "checked": checked}
    contents["model.json"] = (json.dumps(sidecar, indent=2, ensure_ascii=False, sort_keys=True) + "\n").encode()
    figures, history = figures_of(predictor), history_of(_logged(predictor), predictor.trained.round)
    card = model_card(predictor, sidecar, digests(contents), figures, history)
    contents["MODEL_CARD.md"] = card.encode()
    if predictor.place.manifest.privacy is not None:
        contents[HOSPITAL_ONLY] = hospital_only(figures).encode()
    if bundle:
        contents = bundle_files(contents, about, output="probabilities")
    _write_folder(target, contents)
    which = {"model": predictor.trained.which, "round": predictor.trained.round}
    written = {"folder": str(target), **which, "files": digests(contents), "checked": checked}
    return written | {"log_findings": list(history.findings)}


def _logged(predictor: Predictor) -> LoggedRun:
    if predictor.place.record.log is None:
        raise LocalProtocolError("the privacy log was not opened for an export", where="export")
    return predictor.place.record.log


def describe(predictor: Predictor) -> dict[str, Any]:
    """All that a program needs to feed the model, and a person to know which it is."""
    place, trained = predictor.place, predictor.trained
    manifest, recipe = place.manifest, place.recipe
    mean, std = normalisation(place.spec)
    decoding = decoding_for(place.config.data.source, recipe.image_size, recipe.in_channels)
    temperature = predictor.companion.temperature
    return {
        "format": FORMAT,
        "federation": manifest.federation,
        "run": manifest.run,
        "site": place.site,
        "round": trained.round,
        "manifest": {"version": manifest.version, "sha256": manifest.digest.hex()},
        "model_sha256": trained.digest,
        "architecture": manifest.model.architecture,
        "method": manifest.training.method,
        "predicts": place.method.reports[0],
        "predicts_by": _predicts_by(place),
        "classes": list(predictor.class_names),
        "labels": recipe.config.labels,
        "input": {
            "name": "images",
            "type": "uint8",
            "shape": ["batch", recipe.image_size, recipe.image_size, recipe.in_channels],
            "colour": "RGB" if recipe.in_channels == 3 else "grey",
            "decoding": decoding.settings,
            "resize": "bilinear to the square, aspect not kept",
            "normalisation": {"inside_onnx": True, "divide_by": 255, "mean": list(mean), "std": list(std)},
        },
        "outputs": {"probabilities": "calibrated, in the order of classes", "features": "before the last layer"},
        "temperature": temperature,
        "operating_points": {
            name: {"rule": point.rule, "threshold": point.threshold}
            for name, point in zip(predictor.class_names, predictor.companion.points, strict=True)
            if point is not None
        },
        "software": {"lazaret": software.version(), "torch": torch.__version__.split("+")[0]},
    }


def _predicts_by(place: ModelPlace) -> str:
    share = place.method.prototype_share
    if place.head_alone:
        return "the head alone; the site also uses its prototypes, which are not in these files"
    if share == 0.0:
        return "the head"
    return "prototypes" if share == 1.0 else f"{1 - share:.0%} the head, {share:.0%} the site's prototypes"


def _some_images(predictor: Predictor) -> Pixels:
    """Real ones of this site, held out where it has some; under differential privacy, images that are nobody's."""
    if predictor.place.manifest.privacy is not None:
        recipe = predictor.place.recipe
        shape = (CHECKED_IMAGES, recipe.image_size, recipe.image_size, recipe.in_channels)
        return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    data = predictor.place.trainer.data
    for samples in (data.validation, data.test, data.train):
        if samples is not None and len(samples):
            return samples.images[: min(CHECKED_IMAGES, len(samples))]
    raise ConfigError("this site has no image to check the export with", where="site.toml [data]")


def _safetensors(predictor: Predictor, about: Mapping[str, Any]) -> bytes:
    tensors = dict(predictor.trained.model.state_dict())
    if predictor.deployed.holds_prototypes:
        held = predictor.companion.prototypes
        tensors |= {"prototypes.vectors": held.vectors, "prototypes.owners": held.owners}
    stored = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    return save_tensors(stored, {"lazaret": json.dumps(about, sort_keys=True, ensure_ascii=False)})


def digests(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _write_folder(target: Path, contents: Mapping[str, bytes]) -> None:
    """Written next to the target until it is complete. Readable by this user only: a model reveals what it has seen."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    beside.mkdir(mode=0o700, parents=True)
    try:
        for name, content in contents.items():
            files.write_atomically(beside / name, content, mode=0o600)
        if target.exists():
            raise ConfigError("refusing to write into what exists already", where=str(target))
        os.rename(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
