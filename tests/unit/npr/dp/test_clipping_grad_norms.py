"""Every layer's norm and weighted sum against one-by-one autograd, in double precision."""

from __future__ import annotations

import pytest
import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn

from lazaret.errors import ConfigError
from npr.dp.clipping import ClippedGradient, shares_of

torch.set_default_dtype(torch.float32)

LAYERS = {
    "linear": (nn.Linear(7, 5), (7,)),
    "linear without bias": (nn.Linear(7, 5, bias=False), (7,)),
    "linear over few positions": (nn.Linear(40, 30), (3, 40)),
    "linear over many positions": (nn.Linear(4, 3), (11, 4)),
    "1x1 few positions (ghost)": (nn.Conv2d(24, 20, 1), (24, 2, 3)),
    "1x1 many positions": (nn.Conv2d(3, 4, 1), (3, 6, 5)),
    "1x1 stride 2": (nn.Conv2d(3, 4, 1, stride=2), (3, 7, 6)),
    "1x1 one position": (nn.Conv2d(6, 8, 1), (6, 1, 1)),
    "1x1 padded": (nn.Conv2d(3, 4, 1, padding=1), (3, 4, 4)),
    "dense 3x3": (nn.Conv2d(3, 5, 3, padding=1), (3, 8, 9)),
    "dense 3x3 stride 2, ghost": (nn.Conv2d(16, 18, 3, stride=2, padding=1), (16, 4, 5)),
    "dense 3x2 dilated": (nn.Conv2d(3, 5, (3, 2), dilation=(2, 1), padding=(1, 0)), (3, 9, 7)),
    "dense same by torch": (nn.Conv2d(3, 5, 4, padding="same"), (3, 6, 7)),
    "dense valid by torch": (nn.Conv2d(3, 5, 2, padding="valid"), (3, 6, 7)),
    "depthwise 3x3": (nn.Conv2d(6, 6, 3, padding=1, groups=6), (6, 7, 8)),
    "depthwise 5x5 stride 2": (nn.Conv2d(6, 6, 5, stride=2, padding=2, groups=6, bias=False), (6, 9, 8)),
    "depthwise dilated": (nn.Conv2d(4, 4, 3, dilation=2, padding=2, groups=4), (4, 7, 7)),
    "depthwise same, stride 2, even": (Conv2dSame(6, 6, 3, stride=2, groups=6), (6, 8, 10)),
    "depthwise same, stride 2, odd": (Conv2dSame(6, 6, 5, stride=2, groups=6), (6, 9, 7)),
    "depthwise same, 2x2 image": (Conv2dSame(6, 6, 5, stride=1, groups=6), (6, 2, 2)),
    "dense same, stride 2": (Conv2dSame(3, 5, 3, stride=2), (3, 8, 7)),
    "grouped": (nn.Conv2d(6, 8, 3, groups=2, padding=1), (6, 5, 6)),
    "depthwise with multiplier": (nn.Conv2d(4, 8, 3, groups=4, stride=2), (4, 7, 7)),
    "group norm": (nn.GroupNorm(2, 6), (6, 4, 5)),
    "group norm on vectors": (nn.GroupNorm(2, 6), (6,)),
    "layer norm": (nn.LayerNorm(6), (5, 6)),
    "layer norm on vectors": (nn.LayerNorm(6), (6,)),
}
RECORDS = 5


def per_record_gradients(layer: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    rows = []
    for n in range(len(x)):
        loss = ((layer(x[n : n + 1]) - target[n : n + 1]) ** 3).sum()
        grads = torch.autograd.grad(loss, list(layer.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", LAYERS)
def test_norms_and_sums_equal_one_by_one_autograd(name: str, layout: torch.memory_format) -> None:
    layer, shape = LAYERS[name]
    layer = layer.double()
    torch.manual_seed(1)
    x = torch.randn(RECORDS, *shape, dtype=torch.float64)
    x = x.contiguous(memory_format=layout) if x.dim() == 4 else x
    target = torch.randn_like(layer(x))
    truth = per_record_gradients(layer, x.contiguous(), target)
    clip = float(truth.norm(dim=1).median())

    clipped = ClippedGradient(layer, clip=clip)
    norms = clipped.add(lambda: ((layer(x) - target) ** 3).flatten(1).sum(1))
    torch.testing.assert_close(norms, truth.norm(dim=1), rtol=1e-10, atol=0)
    weights = (clip / (1.001 * truth.norm(dim=1))).clamp(max=1)
    torch.testing.assert_close(clipped.sum, weights @ truth, rtol=1e-10, atol=1e-10 * float(truth.norm()))


def test_positions_that_cancel_do_not_hide_a_norm() -> None:
    """In single precision the difference of large Gram terms is lost; the allowance keeps the norm from above."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    a = torch.randn(1, 4, 64)
    a[:, 1] = a[:, 0]
    b = torch.randn(1, 4, 64) * 1e-4
    b[:, 0] += 100.0
    b[:, 1] -= 100.0
    truth = torch.einsum("nto,nti->noi", b.double(), a.double()).norm()
    (share,) = shares_of(layer, a, b, frozenset([layer.weight]))
    assert share.pieces[0].dim() == 3, "this case is meant for the ghost norm"
    assert share.squared.double().sqrt() >= truth


def test_a_layer_without_a_formula_is_refused() -> None:
    class Scaled(nn.Linear):
        """Its weight is changed before use, so the formula for Linear would be wrong."""

    for model in (
        nn.Sequential(Scaled(3, 2)),
        nn.Sequential(nn.Bilinear(2, 2, 2)),
        nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")),
        nn.Sequential(nn.LayerNorm((3, 4))),
        nn.Sequential(nn.BatchNorm2d(3)),
    ):
        with pytest.raises(ConfigError, match="no exact per-record gradient norm"):
            ClippedGradient(model, clip=1.0)
    with pytest.raises(ConfigError):
        shares_of(nn.Bilinear(2, 2, 2), torch.zeros(1, 2), torch.zeros(1, 2), frozenset())
