"""Weight gradients of depthwise convolutions where the library is slow.

On processors oneDNN has a fast form for kernels of at most three columns on maps that are not smaller than the kernel.
All others go a way that computes sixteen channels for each one: an EfficientNet, which has 5x5 kernels, spends a fifth
of a step on it. Two forms of the same gradient avoid that:

- by columns: the kernel is cut into parts of three columns (and, where there is a stride, into the parts that meet the
  same pixels), and the library is asked for each of them;
- by offset: on tiny maps each entry of the kernel meets few pixels, which are multiplied and summed here.

Differential privacy needs the gradient of each record by itself. Records then lie beside each other as channels of one
image, or the kernel that each output saw is added up output by output.

Convolutions with TensorFlow's padding ("same", more zeros below than above) copy their map into a larger one. Here the
kernel gets a first row and column of zeros instead, and the padding is the same on all sides. Forward and input
gradients are the library's own, so predictions do not change by a bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from npr import backbones  # noqa: F401  (must run before timm is imported)

from timm.layers import Conv2dSame  # isort: skip
from timm.layers.padding import pad_same_arg  # isort: skip

Pair = tuple[int, int]

# Where the sum by offset below is used. On the processor always, so that its results depend on no measurement.
_BY_OFFSET = {"cpu": True}
# Where a kernel is cut into columns: a remedy for one library of processors.
_BY_COLUMNS = frozenset({"cpu"})
_COLUMNS = 3


def measure_depthwise(place: torch.device, wait: Callable[[Tensor], object], *, deterministic: bool = False) -> bool:
    """Decide for a device, by measurement, whether the gradient below is faster than the library's own.

    Where results must repeat, nothing is measured and the library's gradient is used.

    :param wait: for a tensor to be computed.
    """
    if place.type not in _BY_OFFSET:
        _BY_OFFSET[place.type] = not deterministic and _is_faster(place, wait)
    return _BY_OFFSET[place.type]


def _is_faster(place: torch.device, wait: Callable[[Tensor], object]) -> bool:
    """On the shape that the reference loop was slow for: a 5x5 kernel over maps of 2x2."""
    images = torch.ones(64, 672, 2, 2, device=place).to(memory_format=torch.channels_last)
    weight = torch.ones(672, 1, 5, 5, device=place, requires_grad=True)

    def seconds(apply: Callable[[], Tensor]) -> float:
        started = time.perf_counter()
        (gradient,) = torch.autograd.grad(apply().sum(), weight)
        wait(gradient.sum())
        return time.perf_counter() - started

    def ours() -> Tensor:
        return cast(Tensor, _Depthwise.apply(images, weight, None, (1, 1), (2, 2), (0, 0)))  # type: ignore[no-untyped-call]

    def theirs() -> Tensor:
        return functional.conv2d(images, weight, None, 1, 2, groups=672)

    # The first of each is not counted: it loads the kernels.
    times = [(seconds(ours), seconds(theirs)) for _ in range(4)][1:]
    return min(mine for mine, _ in times) < min(other for _, other in times)


def speed_up_depthwise(model: nn.Module) -> None:
    """Give depthwise convolutions the gradients below, in place. Their type, names and parameters stay."""
    for layer in model.modules():
        # Exactly these types: a subclass may pad in its own way before it convolves.
        if type(layer) is nn.Conv2d and _fits(layer):
            layer._conv_forward = partial(  # type: ignore[method-assign]
                depthwise_conv2d, stride=_pair(layer.stride), padding=_pair(layer.padding)
            )
        elif isinstance(layer, Conv2dSame) and type(layer) is Conv2dSame and _fits(layer):
            layer.forward = partial(_same, layer)


def _fits(layer: nn.Conv2d) -> bool:
    depthwise = layer.groups == layer.in_channels == layer.out_channels and layer.groups > 1
    ordinary = layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and layer.dilation == (1, 1)
    return depthwise and ordinary


def _pair(value: Any) -> Pair:
    first, second = value
    return int(first), int(second)


def depthwise_conv2d(images: Tensor, weight: Tensor, bias: Tensor | None, *, stride: Pair, padding: Pair) -> Tensor:
    """`conv2d` with one group per channel."""
    small = weight.shape[2] > images.shape[2] or weight.shape[3] > images.shape[3]
    by_columns = images.device.type in _BY_COLUMNS and weight.shape[3] > _COLUMNS
    by_offset = small and _BY_OFFSET.get(images.device.type, False)
    if (by_columns or by_offset) and _learns(images, weight):
        return cast(Tensor, _Depthwise.apply(images, weight, bias, stride, padding, (0, 0)))  # type: ignore[no-untyped-call]
    return functional.conv2d(images, weight, bias, stride, padding, groups=weight.shape[0])


def _same(layer: Conv2dSame, images: Tensor) -> Tensor:
    """As many outputs as pixels, divided by the stride; an odd zero is below and on the right."""
    if images.device.type not in _BY_COLUMNS or not _differentiated(images, layer.weight):
        return cast(Tensor, type(layer).forward(layer, images))
    stride = _pair(layer.stride)
    sides = pad_same_arg(list(images.shape[2:]), list(layer.weight.shape[2:]), list(stride))
    left, right, above, below = map(int, sides)
    zeros = (below - above, right - left)
    return cast(
        Tensor,
        _Depthwise.apply(images, layer.weight, layer.bias, stride, (below, right), zeros),  # type: ignore[no-untyped-call]
    )


def _learns(images: Tensor, weight: Tensor) -> bool:
    return weight.requires_grad and _differentiated(images, weight)


def _differentiated(images: Tensor, weight: Tensor) -> bool:
    # Under autocast the library casts images and weight inside, and its own gradient knows about it. Transforms of
    # functions (Opacus has vmap compute the gradient of each record) take the library's own operations alone.
    other = torch.is_autocast_enabled(images.device.type) or torch._C._are_functorch_transforms_active()
    return torch.is_grad_enabled() and (weight.requires_grad or images.requires_grad) and not other


class _Depthwise(torch.autograd.Function):
    """:param zeros: rows and columns of zeros that are put before the kernel's own."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, zeros: Pair
    ) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.stride, ctx.padding, ctx.zeros = stride, padding, zeros
        return functional.conv2d(images, _after(weight, zeros), bias, stride, padding, groups=weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        to_images = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_images = _library(images, gradient, _after(weight, ctx.zeros), ctx.stride, ctx.padding, wanted=0)
        if ctx.needs_input_grad[1]:
            before = ctx.padding[0] - ctx.zeros[0], ctx.padding[1] - ctx.zeros[1]
            to_weight = kernel_gradient(images, gradient, weight.shape, ctx.stride, before)
        if ctx.needs_input_grad[2]:
            to_bias = gradient.sum((0, 2, 3))
        return to_images, to_weight, to_bias, None, None, None


def _after(weight: Tensor, zeros: Pair) -> Tensor:
    return functional.pad(weight, (zeros[1], 0, zeros[0], 0)) if any(zeros) else weight


def _library(images: Tensor, gradient: Tensor, weight: Tensor, stride: Pair, padding: Pair, *, wanted: int) -> Tensor:
    """The library's gradient of images (`wanted` = 0) or weight (1)."""
    mask = (wanted == 0, wanted == 1, False)
    found = torch.ops.aten.convolution_backward(
        gradient, images, weight, None, stride, padding, (1, 1), False, (0, 0), len(weight), mask
    )
    return cast(Tensor, found[wanted])


def kernel_gradient(images: Tensor, gradient: Tensor, shape: torch.Size, stride: Pair, before: Pair) -> Tensor:
    """(C, 1, h, w): offset (i, j) of the kernel meets pixel (s y + i - p, s x + j - p) for every output (y, x).

    :param before: zeros above and on the left.
    """
    tiny = 2 * images.shape[2] < shape[2] or 2 * images.shape[3] < shape[3]
    if images.device.type in _BY_COLUMNS and not tiny:
        return _by_columns(images, gradient, shape, stride, before)
    found = kernel_gradients(images, gradient, shape, stride, before, together=True)
    return found[0].permute(2, 0, 1).unsqueeze(1)


def _by_columns(images: Tensor, gradient: Tensor, shape: torch.Size, stride: Pair, before: Pair) -> Tensor:
    result = images.new_empty(shape)
    # Row i of a kernel meets pixels s y + i - p: rows that differ by s meet the same ones, as if the stride were one.
    apart = stride if shape[3] > _COLUMNS else (1, 1)
    rest = stride[0] // apart[0], stride[1] // apart[1]
    for i, j in product(range(min(apart[0], shape[2])), range(min(apart[1], shape[3]))):
        (above, top), (left, start) = divmod(i - before[0], apart[0]), divmod(j - before[1], apart[1])
        pixels, part = images[:, :, top :: apart[0], start :: apart[1]], result[:, :, i :: apart[0], j :: apart[1]]
        rows = _edges(-above, pixels.shape[2], part.shape[2], gradient.shape[2], rest[0])
        # The library can put the zeros above and below itself, if there are as many and the map is not too small.
        inside = rows[0] if rows[0] == rows[1] >= 0 and pixels.shape[2] >= part.shape[2] else 0
        for column in range(0, part.shape[3], _COLUMNS):
            some = part[..., column : column + _COLUMNS]
            columns = _edges(-left - column, pixels.shape[3], some.shape[3], gradient.shape[3], rest[1])
            seen = functional.pad(pixels, (*columns, rows[0] - inside, rows[1] - inside))
            some.copy_(_library(seen, gradient, some, rest, (inside, 0), wanted=1))
    return result


def _edges(before: int, size: int, kernel: int, outputs: int, stride: int) -> Pair:
    """Zeros before and after a row of pixels, so that a kernel has so many outputs; fewer than none are cut off."""
    return before, (outputs - 1) * stride + kernel - size - before


_IN_CACHE = 1 << 19
"""Products that are summed before they leave the processor's cache."""

_LARGE = 256
"""Pixels of a map from which on the library's own weight gradient is faster for 3x3 kernels."""

_FEW = 64
"""Outputs of a map up to which they are taken one after the other."""


def kernel_gradients(
    images: Tensor,
    gradient: Tensor,
    shape: torch.Size,
    stride: Pair,
    padding: Pair,
    *,
    dilation: Pair = (1, 1),
    together: bool = False,
) -> Tensor:
    """(N, h, w, C): the same for each record, or with `together` (1, h, w, C) for their sum.

    :param padding: above and on the left; beyond the other two edges there are zeros as well.
    """
    channels, _, height, width = shape
    if images.device.type == "cpu" and not together:
        if images.shape[2] * images.shape[3] >= _LARGE and height * width <= 9 and dilation == (1, 1):
            return _side_by_side(images, gradient, shape, stride, padding)
        if gradient.shape[2] * gradient.shape[3] <= _FEW:
            return _by_output(images, gradient, shape, stride, padding, dilation)
    pixels, outputs = images.permute(0, 2, 3, 1), gradient.permute(0, 2, 3, 1)
    result = images.new_zeros(1 if together else len(images), height, width, channels)
    rows = [_reach(i * dilation[0], images.shape[2], gradient.shape[2], stride[0], padding[0]) for i in range(height)]
    columns = [_reach(j * dilation[1], images.shape[3], gradient.shape[3], stride[1], padding[1]) for j in range(width)]
    records = max(1, _IN_CACHE // max(1, gradient[0].numel())) if len(gradient) else 1
    offsets = [
        (i, j, (slice(None), row[0], column[0]), (slice(None), row[1], column[1]))
        for (i, row), (j, column) in product(enumerate(rows), enumerate(columns))
        if row[0].stop and column[0].stop
    ]
    # One piece of memory for all products: a new one each time takes longer than the products.
    memory = images.new_empty(min(records, len(images)) * outputs[:1].numel())
    for start in range(0, len(images), records):
        some = slice(start, start + records)
        some_pixels, some_outputs, found = pixels[some], outputs[some], result[:1] if together else result[some]
        for i, j, seen, out in offsets:
            left, right = some_pixels[seen], some_outputs[out]
            met = memory[: left.numel()].view(left.shape)
            torch.mul(left, right, out=met)
            if together:
                found[0, i, j] += met.sum((0, 1, 2))
            else:
                torch.sum(met, (1, 2), out=found[:, i, j])
    return result


def _side_by_side(images: Tensor, gradient: Tensor, shape: torch.Size, stride: Pair, padding: Pair) -> Tensor:
    """Records lie beside each other as channels of one image, so that one call of the library serves many of them."""
    channels, _, height, width = shape
    outputs = _pair(gradient.shape[2:])
    size = (outputs[0] - 1) * stride[0] + height, (outputs[1] - 1) * stride[1] + width
    # Zeros around, and no pixels that the kernel never reaches.
    rows, columns = (min(side - pad, have) for side, pad, have in zip(size, padding, images.shape[2:], strict=True))
    pixels, ahead = images.permute(2, 3, 0, 1)[:rows, :columns], gradient.permute(2, 3, 0, 1)
    records = max(1, min(len(images), _IN_CACHE // (size[0] * size[1] * channels)))
    frame, met = images.new_zeros(*size, records, channels), images.new_empty(*outputs, records, channels)
    inner = frame[padding[0] : padding[0] + rows, padding[1] : padding[1] + columns]
    weight = images.new_empty(records * channels, 1, height, width)
    result = images.new_empty(len(images), height, width, channels)
    for start in range(0, len(images), records):
        # The last ones are taken together with some of those before them.
        some = slice(min(start, len(images) - records), min(start + records, len(images)))
        inner.copy_(pixels[:, :, some])
        met.copy_(ahead[:, :, some])
        seen, given = (x.flatten(2).unsqueeze(0).permute(0, 3, 1, 2) for x in (frame, met))
        found = _library(seen, given, weight, stride, (0, 0), wanted=1)
        result[some] = found.view(records, channels, height, width).permute(0, 2, 3, 1)
    return result


def _by_output(
    images: Tensor, gradient: Tensor, shape: torch.Size, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Each output's gradient times the pixels that its kernel sees: one multiplication and addition in one go."""
    channels, _, height, width = shape
    pixels, outputs = images.permute(0, 2, 3, 1), gradient.permute(0, 2, 3, 1)
    result = images.new_zeros(len(images), height, width, channels)
    sides = zip(gradient.shape[2:], shape[2:], images.shape[2:], stride, padding, dilation, strict=True)
    rows, columns = ([_window(place, *rest) for place in range(places)] for places, *rest in sides)
    records = max(1, _IN_CACHE // (height * width * channels))
    for start in range(0, len(images), records):
        found, seen, given = (part[start : start + records] for part in (result, pixels, outputs))
        for (y, row), (x, column) in product(enumerate(rows), enumerate(columns)):
            found[:, row[0], column[0]].addcmul_(seen[:, row[1], column[1]], given[:, y : y + 1, x : x + 1])
    return result


def _window(place: int, kernel: int, size: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice]:
    """The part of a kernel that meets pixels for an output at this place along one axis, and these pixels."""
    before = padding - stride * place
    first, last = max(0, -(-before // dilation)), min(kernel, (size - 1 + before) // dilation + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    start = first * dilation - before
    return slice(first, last), slice(start, start + (last - first - 1) * dilation + 1, dilation)


def _reach(offset: int, size: int, outputs: int, stride: int, padding: int) -> tuple[slice, slice]:
    """The pixels that a kernel offset sees along one axis, and the outputs that it sees them for; both may be empty."""
    first = max(0, -((offset - padding) // stride))
    last = min(outputs, (size - 1 - offset + padding) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    start = first * stride + offset - padding
    return slice(start, start + (last - first - 1) * stride + 1, stride), slice(first, last)
