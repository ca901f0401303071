"""`coordinator export`: the shared part of the model as files, with a description; ONNX on request.

A service that never exports does not load torch: what needs it is imported inside the functions that do.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as save_tensors

from coordinator.assembly import read_manifest
from coordinator.config import CoordinatorConfig
from coordinator.database import FILE
from coordinator.round_history import ReadOnlyHistory
from lazaret import files, software
from lazaret.errors import ConfigError, DataError
from security.clock import SystemClock
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.pinned_files import pinned_model
from security.secagg.layout import Vector
from security.secagg.state import state_hash, unflatten

FORMAT: Final = "lazaret-model/1"
CHECKED_IMAGES: Final = 32


def export_model(
    config_path: Path, target: Path, number: int | None, *, best: bool = False, onnx: bool = False, bundle: bool = False
) -> dict[str, Any]:
    """Write TARGET, the description beside it (`.json`), and with `onnx` the same network as `.onnx`.

    :param best: the model of the best round by the sites' scores.
    :param bundle: TARGET is a new folder, a MONAI bundle with the network as ONNX.
    """
    onnx = onnx or bundle
    paths = {"safetensors": target, "json": target.with_suffix(".json")} | (
        {"onnx": target.with_suffix(".onnx")} if onnx else {}
    )
    if bundle:
        paths = {kind: target / f"model.{kind}" for kind in paths}
    _refuse({"folder": target} if bundle else paths, target)
    if onnx:
        from npr.deployed import require_onnx

        require_onnx()
    config, base = CoordinatorConfig.read(config_path)
    manifest = read_manifest(Identity(folder=base / config.identity), SystemClock())
    number = _best_round(base / config.state, manifest) if best else number
    place, digest, vector = _model(base / config.state, number)
    about = _describe(manifest, place, digest)
    tensors = {name: part.copy() for name, part in unflatten(manifest.aggregation.layout, vector).items()}
    contents = {"safetensors": save_tensors(tensors, {"lazaret": json.dumps(about, sort_keys=True)})}
    checked: dict[str, Any] = {}
    if onnx:
        contents["onnx"], checked = _onnx(manifest, config.model_file(base, manifest.model.initial_file), vector, about)
    digests = {paths[kind].name: hashlib.sha256(content).hexdigest() for kind, content in contents.items()}
    sidecar = about | {"files": digests, "checked": checked}
    contents["json"] = (json.dumps(sidecar, indent=2, sort_keys=True) + "\n").encode()
    if bundle:
        _write_bundle(target, {paths[kind].name: content for kind, content in contents.items()}, sidecar)
    else:
        for kind, content in contents.items():
            files.write_atomically(paths[kind], content, replace=False)
    return {"round": place, "state_hash": digest, "files": digests, "checked": checked}


def _write_bundle(target: Path, contents: dict[str, bytes], sidecar: dict[str, Any]) -> None:
    """Under another name until it is complete."""
    from npr.deployed import bundle_files

    beside = target.with_name(f".{target.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for name, content in bundle_files(contents, sidecar, output=sidecar["checked"]["outputs"][0]).items():
            files.write_atomically(beside / name, content)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _best_round(state: Path, manifest: Manifest) -> int:
    with ReadOnlyHistory(state / FILE) as history:
        found = history.best(manifest)
    if found is None:
        raise DataError(
            "no model has been scored",
            where=str(state),
            hint="the manifest needs [scores], enough hospitals that consent, and a round after the scored one",
        )
    return found.round


def _refuse(paths: dict[str, Path], target: Path) -> None:
    if len(set(paths.values())) != len(paths):
        raise ConfigError("the description would overwrite the model", where=str(target), hint="name it .safetensors")
    for path in paths.values():
        if path.exists():
            raise ConfigError("refusing to overwrite an existing file", where=str(path), hint="choose another name")


def _model(state: Path, number: int | None) -> tuple[int, str, Vector]:
    """The model after a round, if it has the hash that the result names."""
    with ReadOnlyHistory(state / FILE) as history:
        found = history.model_after(number)
    if found is None:
        raise DataError("there is no result of this round" if number else "there is no result yet", where=str(state))
    place, digest = found
    path = state / "models" / f"{digest.hex()}.safetensors"
    try:
        vector: Vector = load_file(path)["state"]
    except FileNotFoundError as error:
        raise DataError("this model is no longer on disk", where=str(path), hint="choose a newer --round") from error
    except (SafetensorError, KeyError) as error:
        raise DataError("model cannot be read", where=str(path)) from error
    if state_hash(vector) != digest:
        raise DataError("model does not have the hash in its name", where=str(path))
    return place, digest.hex(), vector


def _describe(manifest: Manifest, place: int, digest: str) -> dict[str, Any]:
    settings = manifest.training.settings
    size, channels = settings["model.image_size"], settings["model.in_channels"]
    shared = [block.name for block in manifest.aggregation.layout.state_blocks]
    return {
        "format": FORMAT,
        "federation": manifest.federation,
        "run": manifest.run,
        "round": place,
        "manifest": {"version": manifest.version, "sha256": manifest.digest.hex()},
        "state_hash": digest,
        "architecture": manifest.model.architecture,
        "method": manifest.training.method,
        "classes": list(manifest.model.classes),
        "holds": "shared tensors; personal layers stay at the hospitals",
        "tensors": len(shared),
        "input": {
            "name": "images",
            "type": "uint8",
            "shape": ["batch", size, size, channels],
            "resize": "bilinear to the square, aspect not kept",
        },
        "software": {"lazaret": software.version()},
    }


def _onnx(
    manifest: Manifest, initial_path: Path, vector: Vector, about: dict[str, Any]
) -> tuple[bytes, dict[str, Any]]:
    """The network with the shared state in it: probabilities where the head is shared, features in any case."""
    from npr.data.generated import GeneratedSpec, generate
    from npr.deployed import Deployed, Features, check_onnx, write_onnx
    from npr.methods import registry
    from npr.model import normalisation
    from npr.params import ParameterManifest
    from npr.recipe import Recipe, check_code
    from npr.wire_layout import WireModel, build_initial, personal_tensors, spec_of

    if manifest.training.plugin is not None:
        raise ConfigError(
            f"the network of {manifest.training.method} is made by a plugin, and only hospitals run those",
            where="manifest [training] plugin",
            hint="export without --onnx; `site-agent export` writes ONNX",
        )
    check_code(manifest.model.code_digest)
    recipe = Recipe.of(manifest.training.method, manifest.training.settings)
    spec = spec_of(manifest.model.architecture, len(manifest.model.classes), recipe)
    method = registry.build(recipe.config)
    initial, _ = pinned_model(initial_path, manifest)
    model = build_initial(method, spec, initial.tensors)
    groups = frozenset(entry.group for entry in ParameterManifest.of(model).entries)
    WireModel(manifest.aggregation.layout, model).load(model, vector, groups)
    mean, std = normalisation(spec)
    # A personal head and prototypes are at the hospitals: what is left to export then are features.
    whole = not personal_tensors(method, model, manifest.training.rounds) and method.prototype_share == 0.0
    outputs = ("probabilities", "features") if whole else ("features",)
    module = (
        Deployed(method=method, model=model, kind="global", mean=mean, std=std)
        if whole
        else Features(model=model, mean=mean, std=std)
    )
    # The coordinator holds no patient's image: drawn ones take their place.
    drawn = generate(GeneratedSpec(scale=0.002, sites=1), image_size=recipe.image_size).images[:CHECKED_IMAGES]
    images = drawn[..., : recipe.in_channels]
    description = about | {"outputs": list(outputs), "normalisation": {"inside_onnx": True, "mean": mean, "std": std}}
    content = write_onnx(module, outputs, images, description)
    return content, {"onnx": check_onnx(content, module, images, where="onnx"), "outputs": list(outputs)}
