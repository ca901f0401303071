"""The initial model of a federation: exported once for the consortium, loaded and checked at every site."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors.torch import save

from npr.methods import registry
from npr.methods.base import Method
from npr.model import ModelSpec, SplitModel
from npr.params import ParameterManifest
from npr.wire_layout import Recipe, personal_tensors
from security import keystore
from security.errors import ConfigError

# What decides the numbers of a round; commands, tables and plots do not.
_CODE = (
    "config.py",
    "depthwise.py",
    "distributed.py",
    "losses.py",
    "model.py",
    "params.py",
    "prototypes.py",
    "seeds.py",
    "sinkhorn.py",
    "training.py",
    "wire_layout.py",
    "data/augment.py",
    "data/loader.py",
    "dp/clipping.py",
    "dp/counts.py",
    "dp/freeze_norm.py",
    "dp/grad_norms.py",
    "dp/local_round.py",
    "dp/losses.py",
    "dp/private_site.py",
    "dp/prototypes.py",
    "dp/sgd.py",
    "methods/*.py",
)


def code_digest() -> str:
    """SHA-256 over the files of this package that decide what a round computes."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _CODE for path in folder.glob(pattern)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def check_code(expected: str) -> None:
    """:raises ConfigError: if this package would compute something else than the consortium has signed for."""
    if code_digest() != expected:
        raise ConfigError(
            "this package's learning code is not the one that the manifest names",
            where="manifest [model] code_digest",
            hint="install the version of the package that the consortium used; `pip show lazaret` tells this one's",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, for people."""

    path: Path
    sha256: str
    tensors: int
    shared_values: int
    personal: tuple[str, ...]
    config_hash: str


def export(path: Path, spec: ModelSpec, recipe: Recipe, *, rounds: int) -> Exported:
    """Write the one model that everybody starts from, with all that `consortium publish` asks about it."""
    method = registry.build(recipe.config)
    model = method.build_model(spec)
    personal = personal_tensors(method, model, rounds)
    entries = ParameterManifest.of(model).entries
    metadata = {
        "architecture": spec.architecture,
        "code_digest": code_digest(),
        "classes": str(spec.num_classes),
        "method": recipe.config.method,
        "config_hashes": recipe.config.config_hash,
        "settings": json.dumps(recipe.settings(), sort_keys=True),
        "personal": " ".join(personal),
        # Weights first, then statistics: neighbours with one clip are encoded in one go.
        "order": " ".join(entry.name for entry in sorted(entries, key=lambda entry: entry.kind != "weight")),
        "weights": spec.weights.split("#")[0].split(":")[0],
    }
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
    content = save(tensors, metadata)
    keystore.write_atomically(path, content)
    return Exported(
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        tensors=len(entries),
        shared_values=sum(entry.size for entry in entries if entry.name not in personal),
        personal=personal,
        config_hash=recipe.config.config_hash,
    )


def spec_of(architecture: str, classes: int, recipe: Recipe) -> ModelSpec:
    """The model to build at a site; its weights come from the pinned file."""
    return ModelSpec(
        architecture=architecture,
        num_classes=classes,
        in_channels=recipe.in_channels,
        image_size=recipe.image_size,
        drop_rate=recipe.drop_rate,
        weights="none",
        seed=recipe.seed,
        norm=recipe.norm,
    )


def build_initial(method: Method, spec: ModelSpec, tensors: Mapping[str, NDArray[Any]]) -> SplitModel:
    """The method's model with the tensors of the pinned file in it. Batch counters start at zero everywhere."""
    model = method.build_model(spec)
    state = model.state_dict()
    for entry in ParameterManifest.of(model).entries:
        values = tensors.get(entry.name)
        if values is None or tuple(values.shape) != entry.shape:
            raise ConfigError(
                f"the initial model has no tensor {entry.name} of shape {entry.shape}",
                hint="it was made for another architecture, method or number of classes",
            )
        state[entry.name].copy_(torch.from_numpy(values))
    return model
