"""Whole models: exact clipping, and the guards that keep it exact."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.nn import functional

from lazaret.errors import ConfigError, LocalProtocolError
from npr.depthwise import speed_up_depthwise
from npr.dp.clipping import ClippedGradient
from npr.dp.engine import without_batch_norm


def per_record(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    return lambda: functional.cross_entropy(model(x), y, reduction="none")


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = []
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for n in range(len(x)):
        loss = functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        rows.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, trainable)]))
    return torch.stack(rows)


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


def batch(count: int = 6, size: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(count, 3, size, size), torch.randint(0, classes, (count,))


@pytest.mark.parametrize(
    ("name", "pretrained"),
    [
        ("tf_efficientnet_lite0", True),
        ("efficientnet_b0", True),
        ("efficientnet_b0", False),
        ("resnet18", True),
        ("mobilenetv3_small_050", True),
    ],
)
def test_timm_backbones_agree_with_one_by_one_autograd_in_single_precision(name: str, pretrained: bool) -> None:
    torch.manual_seed(0)
    model = without_batch_norm(timm.create_model(name, num_classes=4), pretrained=pretrained).eval()
    model = model.to(memory_format=torch.channels_last)
    x, y = batch(3, 64)
    truth = one_by_one(copy.deepcopy(model).double(), x.double(), y)
    speed_up_depthwise(model)  # as in every model that is trained
    clip = float(truth.norm(dim=1).median())
    clipped = ClippedGradient(model, clip=clip)
    norms = clipped.add(per_record(model, x.contiguous(memory_format=torch.channels_last), y))
    torch.testing.assert_close(norms.double(), truth.norm(dim=1), rtol=1e-4, atol=0)
    expected = (clip / (1.001 * truth.norm(dim=1))).clamp(max=1) @ truth
    assert (clipped.sum - expected).norm() < 1e-4 * expected.norm()


def test_opacus_finds_the_same_gradients() -> None:
    model = small_model()
    x, y = batch()
    oracle = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    for module in oracle.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # Opacus' hooks do not allow it; ours do
    functional.cross_entropy(oracle(x), y, reduction="sum").backward()
    rows = torch.cat([parameter.grad_sample.flatten(1) for parameter in oracle.parameters()], dim=1)
    clipped = ClippedGradient(model, clip=0.5)
    norms = clipped.add(per_record(model, x, y))
    torch.testing.assert_close(norms, rows.norm(dim=1), rtol=1e-4, atol=0)
    expected = (0.5 / (1.001 * rows.norm(dim=1))).clamp(max=1) @ rows
    torch.testing.assert_close(clipped.sum, expected, rtol=1e-4, atol=1e-6)


def test_a_single_record_never_exceeds_the_clip() -> None:
    model = small_model()
    x, y = batch(12)
    for scale in (1e-3, 1.0, 1e3):
        clipped = ClippedGradient(model, clip=0.25)
        for n in range(len(x)):
            clipped.zero()
            clipped.add(per_record(model, scale * x[n : n + 1], y[n : n + 1]))
            assert float(clipped.sum.double().norm()) <= 0.25 * (1 + 1e-5)


def test_micro_batches_add_up_and_an_empty_one_adds_nothing() -> None:
    model = small_model()
    x, y = batch(7)
    whole, parts = (ClippedGradient(model, clip=0.3) for _ in range(2))
    whole.add(per_record(model, x, y))
    for part in (slice(0, 3), slice(3, 3), slice(3, 4), slice(4, 7)):
        parts.add(per_record(model, x[part], y[part]))
    torch.testing.assert_close(parts.sum, whole.sum, rtol=1e-5, atol=1e-7)
    assert whole.add(per_record(model, x[:0], y[:0])).numel() == 0
    whole.zero()
    assert not whole.sum.any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_record_that_is_not_finite_contributes_nothing_and_harms_nobody(poison: float) -> None:
    model = small_model()
    x, y = batch(4)
    alone = ClippedGradient(model, clip=0.3)
    alone.add(per_record(model, x[[0, 1, 3]], y[[0, 1, 3]]))
    x = x.clone()
    x[2] = poison
    clipped = ClippedGradient(model, clip=0.3)
    norms = clipped.add(per_record(model, x, y))
    assert norms.isfinite().tolist() == [True, True, False, True]
    torch.testing.assert_close(clipped.sum, alone.sum, rtol=1e-5, atol=1e-7)


def test_frozen_layers_are_left_out_and_the_graph_starts_behind_them() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    model[8].bias.requires_grad_(False)
    x, y = batch()
    clipped = ClippedGradient(model, clip=10.0)
    truth = one_by_one(model, x, y)
    torch.testing.assert_close(clipped.add(per_record(model, x, y)), truth.norm(dim=1), rtol=1e-4, atol=0)
    assert clipped.sum.numel() == truth.shape[1]
    assert not model[0].weight.requires_grad


def test_weights_train_again_afterwards_also_after_a_failure() -> None:
    model = small_model()
    x, y = batch()
    clipped = ClippedGradient(model, clip=1.0)
    with pytest.raises(ZeroDivisionError):
        clipped.add(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    clipped.add(per_record(model, x, y))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(x)))


def test_a_layer_used_twice_is_refused() -> None:
    model = Twice()
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(LocalProtocolError, match="twice"):
        ClippedGradient(model, clip=1.0).add(per_record(model, x, y))


def test_a_layer_used_twice_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard the norm misses the cross term and a record passes the clip."""
    monkeypatch.setattr(ClippedGradient, "_check_covered", lambda self, shares: None)
    torch.manual_seed(0)
    model = Twice()
    with torch.no_grad():
        model.layer.weight.copy_(torch.eye(4))
        model.layer.bias.zero_()
    x, y = torch.ones(1, 4), torch.tensor([0])
    clipped = ClippedGradient(model, clip=0.1)
    clipped.add(per_record(model, x, y))
    assert float(clipped.sum.norm()) > 0.1 * 1.2


def test_tied_weights_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match="shares a parameter"):
        ClippedGradient(model, clip=1.0)


def test_a_trainable_layer_that_takes_no_part_is_refused() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})
    with pytest.raises(LocalProtocolError, match="2 trainable parameters took no part"):
        ClippedGradient(model, clip=1.0).add(per_record(model["used"], torch.randn(2, 4), torch.tensor([0, 1])))


def test_an_input_overwritten_in_place_is_noticed() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            out = self.second(hidden)
            hidden.mul_(0.0)
            return out + hidden

    model = Overwrites()
    with pytest.raises(LocalProtocolError, match="overwritten in place"):
        ClippedGradient(model, clip=1.0).add(per_record(model, torch.randn(2, 4), torch.tensor([0, 1])))


def test_a_mean_over_the_batch_is_refused() -> None:
    model = small_model()
    x, y = batch()
    with pytest.raises(LocalProtocolError, match="one value per record"):
        ClippedGradient(model, clip=1.0).add(lambda: functional.cross_entropy(model(x), y))
    with torch.no_grad(), pytest.raises(LocalProtocolError, match="without gradients"):
        ClippedGradient(model, clip=1.0).add(per_record(model, x, y))


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_clips_are_refused(clip: float) -> None:
    with pytest.raises(ConfigError):
        ClippedGradient(small_model(), clip=clip)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable"):
        ClippedGradient(small_model().requires_grad_(False), clip=1.0)
