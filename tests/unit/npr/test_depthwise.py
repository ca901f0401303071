"""The hand-written gradient against the library's, and where it is used."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

from npr import depthwise
from npr.depthwise import depthwise_conv2d, speed_up_depthwise
from npr.model import ModelSpec, build_model

from timm.layers import Conv2dSame  # isort: skip  (after npr, which prepares timm's import)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (4, 4), (3, 2), (2, 9)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(5, 1, 2), (3, 1, 1), (5, 2, 2), (5, 3, 2), (7, 2, 3)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_the_librarys(size, kernel, stride, padding, layout) -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 6, *size, dtype=torch.float64).contiguous(memory_format=layout)
    weight, bias = torch.randn(6, 1, kernel, kernel, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    both = []
    for function in (
        lambda x, w, b: depthwise_conv2d(x, w, b, stride=(stride, stride), padding=(padding, padding)),
        lambda x, w, b: functional.conv2d(x, w, b, stride, padding, groups=6),
    ):
        inputs = [tensor.clone().requires_grad_() for tensor in (images, weight, bias)]
        output = function(*inputs)
        both.append((output.detach(), *torch.autograd.grad(output.sin().sum(), inputs)))
    for ours, theirs in zip(*both, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(16, 16), (17, 31), (8, 8)])
@pytest.mark.parametrize(
    ("kernel", "stride", "edges"), [(3, 1, (1, 1)), (3, 2, (0, 1)), (3, 2, (1, 1)), (3, 3, (0, 0)), (5, 2, (1, 2))]
)
@pytest.mark.parametrize("cache", [depthwise._IN_CACHE, 4000])
def test_gradients_of_each_record_are_the_librarys(size, kernel, stride, edges, cache, monkeypatch) -> None:
    """Large maps with small kernels, where the library is asked for some records at once, and others; zeros on one
    side too."""
    monkeypatch.setattr(depthwise, "_IN_CACHE", cache)
    torch.manual_seed(0)
    images = torch.randn(5, 6, *size, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(6, 1, kernel, kernel, dtype=torch.float64)
    padded = functional.pad(images, (edges[0], edges[1], edges[0], edges[1]))
    rows = []
    for record in padded:
        own = weight.clone().requires_grad_()
        output = functional.conv2d(record[None], own, stride=stride, groups=6)
        rows.append((output, *torch.autograd.grad(output.sin().sum(), own)))
    gradient = torch.cat([output.detach().cos() for output, _ in rows])
    ours = depthwise.kernel_gradients(images, gradient, weight.shape, (stride, stride), (edges[0], edges[0]))
    theirs = torch.stack([found[:, 0].permute(1, 2, 0) for _, found in rows])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    empty = depthwise.kernel_gradients(images[:0], gradient[:0], weight.shape, (stride, stride), (edges[0], edges[0]))
    assert empty.shape == (0, kernel, kernel, 6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_record_that_is_not_finite_leaves_those_beside_it_as_they_are(poison: float) -> None:
    torch.manual_seed(0)
    images, gradient = torch.randn(4, 6, 16, 16), torch.randn(4, 6, 16, 16)
    shape, around = torch.Size((6, 1, 3, 3)), (1, 1)
    before = depthwise.kernel_gradients(images, gradient, shape, (1, 1), around)
    images[1], gradient[2] = poison, poison
    after = depthwise.kernel_gradients(images, gradient, shape, (1, 1), around)
    assert not after[1:3].isfinite().any()
    assert (after[[0, 3]] == before[[0, 3]]).all()


@pytest.mark.parametrize("size", [(5, 5), (8, 8), (16, 16), (17, 31), (9, 6)])
@pytest.mark.parametrize(("kernel", "stride"), [(5, 1), (5, 2), (5, 3), (7, 1), (7, 2), (4, 2), (6, 4)])
def test_a_kernel_cut_into_columns_has_the_librarys_gradients(size, kernel, stride) -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 6, *size, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(6, 1, kernel, kernel, dtype=torch.float64)
    half = kernel // 2
    both = []
    for function in (
        lambda x, w: depthwise_conv2d(x, w, None, stride=(stride, stride), padding=(half, half)),
        lambda x, w: functional.conv2d(x, w, None, stride, half, groups=6),
    ):
        inputs = [tensor.clone().requires_grad_() for tensor in (images, weight)]
        output = function(*inputs)
        both.append((output.detach(), *torch.autograd.grad(output.sin().sum(), inputs)))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(2, 2), (4, 4), (15, 8), (16, 16), (33, 32)])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 2), (5, 1), (4, 1), (3, 4)])
def test_tensorflows_padding_has_the_librarys_outputs_and_gradients(size, kernel, stride) -> None:
    torch.manual_seed(0)
    layer = Conv2dSame(6, 6, kernel, stride, groups=6).to(torch.float64)
    plain = copy.deepcopy(layer)
    speed_up_depthwise(layer)
    assert "forward" in vars(layer)
    images = torch.randn(3, 6, *size, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    both = []
    for one in (layer, plain):
        seen = images.clone().requires_grad_()
        output = one(seen)
        both.append((output.detach(), *torch.autograd.grad(output.sin().sum(), (seen, one.weight, one.bias))))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_frozen_layer_with_tensorflows_padding_copies_no_map_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under differential privacy weights are frozen while gradients flow; its step has the plain step's forward."""
    layer = Conv2dSame(6, 6, 3, 2, groups=6).requires_grad_(False)
    speed_up_depthwise(layer)
    images = torch.randn(3, 6, 16, 16)
    seen = images.clone().requires_grad_()
    expected = torch.autograd.grad(type(layer).forward(layer, seen).sin().sum(), seen)[0]
    monkeypatch.setattr(Conv2dSame, "forward", lambda *_: pytest.fail("it was padded by a copy"))
    torch.testing.assert_close(torch.autograd.grad(layer(seen).sin().sum(), seen)[0], expected)
    with pytest.raises(pytest.fail.Exception):
        layer(images)


def test_it_is_used_where_the_library_is_slow_and_not_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = depthwise.kernel_gradient
    monkeypatch.setattr(depthwise, "kernel_gradient", lambda *a: calls.append((a[2][2], a[0].shape[2])) or right(*a))
    for kernel in (3, 5):
        layer = nn.Conv2d(4, 4, kernel, padding=kernel // 2, groups=4)
        speed_up_depthwise(layer)
        for size in (2, 4, 8):
            layer(torch.randn(2, 4, size, size)).sum().backward()
    assert calls == [(3, 2), (5, 2), (5, 4), (5, 8)]
    with torch.inference_mode():
        assert layer(torch.randn(2, 4, 2, 2)).shape == (2, 4, 2, 2)
    monkeypatch.setattr(depthwise, "_BY_COLUMNS", frozenset({"cuda"}))  # a library of processors is slow, no other
    layer(torch.randn(2, 4, 8, 8)).sum().backward()
    assert len(calls) == 4


def test_layers_that_are_something_else_are_left_alone() -> None:
    class Own(nn.Conv2d):
        pass

    others = [
        nn.Conv2d(4, 8, 3, groups=4),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, groups=4, dilation=2),
        nn.Conv2d(4, 4, 3, groups=4, padding="same"),
        nn.Conv2d(4, 4, 3, groups=4, padding=1, padding_mode="circular"),
        Own(4, 4, 3, groups=4),
    ]
    for layer in others:
        speed_up_depthwise(layer)
        assert "_conv_forward" not in vars(layer)


def test_a_model_keeps_its_names_and_predictions_and_a_copy_its_own_weights() -> None:
    model = build_model(ModelSpec(num_classes=3, architecture="tf_efficientnet_lite0", seed=1))
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    changed = [layer for layer in convolutions if {"_conv_forward", "forward"} & set(vars(layer))]
    assert Counter(map(type, changed)) == {nn.Conv2d: 12, Conv2dSame: 4}
    twin = copy.deepcopy(model).eval()
    plain = copy.deepcopy(model).eval()
    for layer in (layer for layer in plain.modules() if isinstance(layer, nn.Conv2d)):
        vars(layer).pop("_conv_forward", None)
        vars(layer).pop("forward", None)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(twin(images), plain(images)), "with gradients"
    with torch.no_grad():
        assert torch.equal(twin(images), plain(images))
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(images), plain(images)), "the copy does not look at the original"
    assert list(twin.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("make", [nn.Conv2d, Conv2dSame])
def test_transforms_of_functions_go_the_librarys_way(make: type[nn.Conv2d]) -> None:
    """Opacus has vmap compute the gradient of each record of a layer that it does not know."""
    torch.manual_seed(0)
    layer = make(4, 4, 5, 2, 2, groups=4, bias=False).to(torch.float64)
    speed_up_depthwise(layer)
    images = torch.randn(3, 4, 8, 8, dtype=torch.float64)

    def loss(weight: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (image[None],)).sin().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(layer.weight.detach(), images)
    layer(images).sin().sum().backward()
    torch.testing.assert_close(each.sum(0), layer.weight.grad, rtol=1e-12, atol=1e-12)
