"""Adapters: small bottlenecks that learn inside a public network, with exact norms; nothing else is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from lazaret.errors import ConfigError
from npr.dp import engine as engines
from npr.dp.engine import TOLERANCE, OpacusGradient, largest_error, resolved
from npr.model import Adapted, ModelSpec, build_model
from npr.params import ParameterManifest

KINDS = [
    ("tf_efficientnet_lite0", 48),  # convolutions, channels first
    ("convnext_atto", 64),  # refused as a whole: only its adapters have formulas
    ("vit_tiny_patch16_224", 224),  # tokens
]


def spec(architecture: str, size: int) -> ModelSpec:
    return ModelSpec(architecture=architecture, num_classes=3, image_size=size, norm="group", trainable="adapters")


@pytest.mark.parametrize(("architecture", "size"), KINDS)
def test_adapters_learn_with_exact_norms_and_only_they_are_sent(architecture: str, size: int) -> None:
    model = build_model(spec(architecture, size))
    adapters = [part for part in model.extractor.modules() if isinstance(part, Adapted)]
    sent = [entry for entry in ParameterManifest.of(model).entries if entry.group != "constant"]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {entry.name for entry in sent} == trained
    assert len(trained) == 4 * len(adapters) + 2, "two maps with their shifts for each, and the head"
    assert sum(entry.size for entry in sent) < 0.05 * sum(p.numel() for p in model.parameters())
    assert resolved(model, "auto") == "fast"
    for engine in ("fast", "opacus"):
        assert largest_error(model, engine, channels=3, image_size=size) <= TOLERANCE


class Wrong(OpacusGradient):
    """Norms that are right as long as an adapter gives nothing."""

    def add(self, per_record_loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        norms = super().add(per_record_loss)
        down = self._model.get_submodule("extractor.blocks.6.down")
        start = sum(p.numel() for p in self.parameters[: [id(p) for p in self.parameters].index(id(down.weight))])
        self.sum[start : start + down.weight.numel()] *= 2
        return norms


def test_an_error_behind_a_map_that_starts_at_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(spec("tf_efficientnet_lite0", 48))
    monkeypatch.setattr(engines, "clipped_sum", lambda model, *, clip, engine: Wrong(model, clip=clip))
    assert largest_error(model, "opacus", channels=3, image_size=48) > TOLERANCE
    assert not any(part.up.weight.any() for part in model.modules() if isinstance(part, Adapted)), "on a copy only"
    # The twin: maps that stay at zero hide it.
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, *given, **more: self)
    assert largest_error(model, "opacus", channels=3, image_size=48) <= TOLERANCE


def test_the_first_model_is_the_public_network_and_the_same_for_everybody() -> None:
    asked = spec("tf_efficientnet_lite0", 48)
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    plain = build_model(ModelSpec(architecture=asked.architecture, num_classes=3, image_size=48, norm="group")).eval()
    adapted, again = build_model(asked).eval(), build_model(asked).eval()
    with torch.no_grad():
        assert torch.equal(plain.features(images), adapted.features(images))
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in adapted.state_dict().items())
    # A copy has bottlenecks of its own, as every site's model must.
    twin = copy.deepcopy(adapted)
    with torch.no_grad():
        next(part for part in twin.modules() if isinstance(part, Adapted)).up.weight.fill_(1.0)
        assert torch.equal(plain.features(images), adapted.features(images))
        assert not torch.equal(plain.features(images), twin.features(images))


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapters"):
        build_model(spec("xcit_nano_12_p16_224", 224))
