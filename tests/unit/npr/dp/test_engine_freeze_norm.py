"""No BatchNorm is left, the pretrained function is kept, and Opacus agrees."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from opacus.validators import ModuleValidator
from torch import nn

from lazaret.errors import ConfigError
from npr.dp.engine import without_batch_norm
from npr.model import ModelSpec, build_model
from npr.params import ParameterManifest


def with_statistics(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2.0)
    return model


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet18"])
@pytest.mark.parametrize("pretrained", [True, False])
def test_opacus_accepts_what_we_make_and_no_batch_norm_is_left(name: str, pretrained: bool) -> None:
    model = without_batch_norm(with_statistics(name), pretrained=pretrained)
    assert not ModuleValidator.validate(model.train(), strict=False)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    trains = any(isinstance(module, nn.GroupNorm) for module in model.modules())
    assert trains is not pretrained


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet18"])
def test_a_frozen_model_computes_what_the_pretrained_one_did_in_either_mode(name: str) -> None:
    model = with_statistics(name).eval()
    x = torch.randn(2, 3, 64, 64)
    frozen = without_batch_norm(copy.deepcopy(model), pretrained=True)
    for mode in (True, False):
        torch.testing.assert_close(frozen.train(mode)(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pretrained", [True, False])
def test_records_no_longer_see_each_other_in_training_mode(pretrained: bool) -> None:
    x = torch.randn(4, 3, 64, 64)
    model = with_statistics("resnet18").train()
    with torch.no_grad():
        assert not torch.allclose(model(x)[:2], model(x[:2]), rtol=1e-3), "BatchNorm is expected to couple records"
        model = without_batch_norm(model, pretrained=pretrained).train()
        torch.testing.assert_close(model(x)[:2], model(x[:2]), rtol=1e-4, atol=1e-4)


class Disguised(nn.BatchNorm1d):
    """A subclass, as timm's norm layers are: Opacus' validator knows exact types only."""


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), Disguised(3)])
def test_what_cannot_be_made_private_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ConfigError, match="cannot be trained under DP"):
        without_batch_norm(nn.Sequential(layer), pretrained=True)


def test_a_disguised_batch_norm_twin() -> None:
    """The validator alone would let it train."""
    assert not ModuleValidator.validate(nn.Sequential(Disguised(3)).train(), strict=False)


def test_frozen_statistics_are_in_no_vector_that_leaves() -> None:
    spec = ModelSpec(num_classes=3, architecture="tf_efficientnet_lite0")
    model = without_batch_norm(build_model(spec), pretrained=True)
    everything = ParameterManifest.of(model, {"extractor", "norm", "statistics", "head"})
    assert everything.size == sum(parameter.numel() for parameter in model.parameters())
    assert everything.groups == {"extractor", "head"}
