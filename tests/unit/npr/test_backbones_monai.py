"""Networks of MONAI are split, drawn, summed and trained like any other; without MONAI a line says what to install."""

from __future__ import annotations

import builtins
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lazaret.errors import ConfigError, VerificationFailed
from npr.backbones import MONAI_NAMES, create_backbone
from npr.config import TrainConfig
from npr.data.generated import ISIC_CLASSES
from npr.data.sources import open_dataset
from npr.federation import Federation
from npr.methods import registry
from npr.model import ModelSpec, build_model, normalisation
from npr.params import ParameterManifest
from npr.recipe import Recipe
from npr.wire_layout import build_initial, export, spec_of
from security.identity.pinned_files import pinned_model
from tests.support.consortium_world import World

pytest.importorskip("monai", reason="the extra [monai] is not installed")
SPEC = ModelSpec(num_classes=5, architecture="monai:resnet10", image_size=32)


@pytest.mark.parametrize("architecture", ["monai:densenet121", "monai:resnet10", "monai:seresnet50"])
def test_a_network_of_each_family_splits(architecture: str) -> None:
    model = build_model(replace(SPEC, architecture=architecture)).eval()
    images = torch.randn(2, 3, 64, 64)
    features = model.features(images)
    assert features.shape == (2, model.head.in_features)
    assert torch.equal(model.logits(features), model(images)) and model(images).shape == (2, 5)


def test_the_features_are_what_monais_own_classifier_sees() -> None:
    """The whole network of MONAI with our weights in it, and its classifier on our features: the same numbers."""
    from monai.networks.nets import DenseNet121

    whole = DenseNet121(spatial_dims=2, in_channels=3, out_channels=4).eval()
    ours = create_backbone("monai:densenet121", "none", in_channels=3, image_size=64).eval()
    ours.load_state_dict({k: tensor for k, tensor in whole.state_dict().items() if "class_layers.out" not in k})
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(whole.class_layers.out(ours(images)), whole(images))


def test_one_initial_model_for_everybody_and_weights_from_a_file_in_grey(tmp_path: Path) -> None:
    one, same, other = (build_model(replace(SPEC, seed=seed)) for seed in (0, 0, 1))
    manifest = ParameterManifest.of(one)
    assert np.array_equal(manifest.flatten(one), manifest.flatten(same))
    assert not np.array_equal(manifest.flatten(one), manifest.flatten(other))
    path = tmp_path / "weights.safetensors"
    save_file({name: tensor.contiguous().clone() for name, tensor in other.extractor.state_dict().items()}, path)
    weights = f"file:{path}#{hashlib.sha256(path.read_bytes()).hexdigest()}"
    grey = build_model(replace(SPEC, weights=weights, in_channels=1)).eval()
    images = torch.randn(2, 1, 32, 32)
    expected = other.eval().features(images.expand(2, 3, 32, 32))
    torch.testing.assert_close(grey.features(images), expected, atol=1e-4, rtol=1e-4)
    assert len(normalisation(replace(SPEC, in_channels=1))[0]) == 1


def test_a_round_is_trained() -> None:
    dataset = open_dataset("generated:scale=0.001,sites=3", fold="fold", image_size=32)
    spec = replace(SPEC, num_classes=dataset.num_classes)
    federation = Federation(dataset=dataset, spec=spec, config=TrainConfig(method="fednpr-per", batch_size=8), seed=0)
    before = ParameterManifest.of(federation.model, {"extractor"}).flatten(federation.model)
    assert np.isfinite(federation.run_round().loss)
    assert not np.array_equal(before, ParameterManifest.of(federation.model, {"extractor"}).flatten(federation.model))


def test_a_manifest_pins_it_by_its_initial_model(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    path = world.authority.folder / "initial.safetensors"
    spec = replace(SPEC, num_classes=8, seed=4)
    recipe = Recipe(config=TrainConfig(method="fedavg", learning_rate=0.001), seed=4, image_size=32)
    export(path, spec, recipe, rounds=2, classes=ISIC_CLASSES)
    world.write_plan(
        f'run = "run-1"\n[model]\ninitial = "{path.name}"\n[training]\nrounds = 2\nsteps = 60\n'
    )
    manifest = world.publish()
    assert manifest.model.architecture == "monai:resnet10"
    initial, _ = pinned_model(path, manifest)
    at_site = spec_of(manifest.model.architecture, 8, recipe)
    built = build_initial(registry.build(recipe.config), at_site, initial.tensors)
    entries = ParameterManifest.of(built)
    assert np.array_equal(entries.flatten(built), entries.flatten(build_model(spec)))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(VerificationFailed, match="is not the initial model"):
        pinned_model(path, manifest)


def test_what_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown architecture 'monai:unet'") as caught:
        replace(SPEC, architecture="monai:unet")
    assert all(name in str(caught.value.hint) for name in MONAI_NAMES)
    with pytest.raises(ConfigError, match="are not for monai:resnet10"):
        replace(SPEC, weights="timm")
    honest = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("monai"):
            raise ModuleNotFoundError(name=name)
        return honest(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="need the package monai") as missing:
        replace(SPEC, seed=3)
    assert missing.value.hint == "pip install 'lazaret[monai]'"
