"""Exact per-record gradient norms, and the sum of clipped gradients, from one forward and one backward pass.

docs/spec/differential-privacy.md, section 3. The first part has a formula for each kind of layer: from the layer's
input and output gradient to the norm of every record's gradient. The second part, `ClippedGradient`, runs the pass.

Parameters do not require a gradient during the pass; only output gradients flow. A hook at each layer computes norms as
soon as input and output gradient are there, and keeps only what the weighted sum needs ("book-keeping"). When the norms
of all layers are known, each record gets the weight min(1, C/norm) and the sum is formed. Whatever has no exact norm is
refused: an estimate could let one patient change the sum by more than the clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lazaret.errors import ConfigError, LocalProtocolError
from npr import backbones  # noqa: F401  (must run before timm is imported)
from npr.depthwise import kernel_gradients
from npr.device import to_host

from timm.layers import Conv2dSame, Linear as TimmLinear  # isort: skip

# Norms of one layer. For a layer with input `a` and output gradient `b` (of the *summed* loss) each function returns
# the squared norm of every record's gradient, and what is needed to form the weighted sum of the gradients afterwards.
#
# A linear map over T positions has the gradient G = B A^T. Its norm is either taken from G itself, at the cost of O*I
# numbers per record, or from the two Gram matrices, |G|^2 = <A^T A, B^T B>, at the cost of 2*T^2 numbers ("ghost",
# Goodfellow 2015; Li et al. 2022). Work is equal at T = O*I/(O+I), so the smaller one is taken.


@dataclass(slots=True)
class Share:
    """One parameter's part: squared norms (N,), and the pieces, records first, from which `combine` sums gradients.

    Not a share of Shamir's scheme: the part that one parameter has in the norm of a record.
    """

    parameter: Tensor
    squared: Tensor
    pieces: tuple[Tensor, ...]
    combine: Callable[..., object]

    def add_weighted(self, total: Tensor, weights: Tensor, kept: Tensor | None) -> None:
        """Add the records' gradients times their weights to `total`, which has the parameter's numbers in a row.
        Records outside `kept` are taken out by index: a NaN times zero would still be a NaN."""
        if kept is None:
            self.combine(total, weights, *self.pieces)
        else:
            self.combine(total, weights[kept], *(piece[kept] for piece in self.pieces))


def shares_of(layer: nn.Module, a: Tensor, b: Tensor, wanted: frozenset[Tensor]) -> list[Share]:
    """The shares of a layer's wanted parameters. Raises ConfigError for a layer without a formula."""
    if isinstance(layer, nn.Linear):
        return _linear(layer, a, b, wanted)
    if isinstance(layer, nn.Conv2d):
        return _conv(layer, a, b, wanted)
    if isinstance(layer, nn.GroupNorm):
        return _normalised(layer, functional.group_norm(a, layer.num_groups, eps=layer.eps), b, wanted)
    if isinstance(layer, nn.LayerNorm):
        xhat = functional.layer_norm(a, layer.normalized_shape, eps=layer.eps)
        return _normalised(layer, xhat.movedim(-1, 1), b.movedim(-1, 1), wanted)
    raise ConfigError(unsupported(layer))


def supports(layer: nn.Module) -> bool:
    """Exact types only: a subclass may transform its weight first, and its gradient then has another form."""
    if type(layer) not in (nn.Linear, TimmLinear, nn.Conv2d, Conv2dSame, nn.GroupNorm, nn.LayerNorm):
        return False
    if isinstance(layer, nn.LayerNorm):
        return len(layer.normalized_shape) == 1
    return not isinstance(layer, nn.Conv2d) or layer.padding_mode == "zeros"


def unsupported(layer: nn.Module) -> str:
    return f"no exact per-record gradient norm for a trainable {type(layer).__name__}"


def _share(parameter: Tensor, gradient: Tensor) -> Share:
    """The gradients themselves, one row per record."""
    rows = gradient.flatten(1)
    return Share(parameter, _squares(rows), (rows,), _add_rows)


def _add_rows(total: Tensor, weights: Tensor, rows: Tensor) -> None:
    total.addmv_(rows.T, weights)


def _squares(rows: Tensor) -> Tensor:
    squared: Tensor = torch.linalg.vector_norm(rows, dim=1).square()
    return squared


def _bias(layer: nn.Module, wanted: frozenset[Tensor], rows: Callable[[], Tensor]) -> list[Share]:
    bias = layer.bias
    return [_share(bias, rows())] if isinstance(bias, Tensor) and bias in wanted else []


def _linear(layer: nn.Linear, a: Tensor, b: Tensor, wanted: frozenset[Tensor]) -> list[Share]:
    a, b = (x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1) for x in (a, b))
    shares = _bias(layer, wanted, lambda: b.sum(1))
    return [_matrix(layer.weight, a, b), *shares] if layer.weight in wanted else shares


def _matrix(weight: Tensor, a: Tensor, b: Tensor) -> Share:
    """Gradient sum_t b_t a_t^T of a matrix; a is (N, T, I) and b is (N, T, O)."""
    positions, inputs, outputs = a.shape[1], a.shape[2], b.shape[2]
    if positions * (inputs + outputs) >= inputs * outputs:
        return _share(weight, torch.bmm(b.transpose(1, 2), a))
    return Share(weight, _ghost(a, b), (a, b), _add_matrix)


def _ghost(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[1] == 1:
        return _squares(a.flatten(1)) * _squares(b.flatten(1))
    gram_a, gram_b = torch.bmm(a, a.transpose(1, 2)), torch.bmm(b, b.transpose(1, 2))
    squared = (gram_a * gram_b).flatten(1).sum(1)
    # Positions that cancel each other leave a small difference of large terms. Their rounding error is added on top, so
    # that a norm is never taken too small: that would let one record move the sum by more than the clip.
    lengths = (gram_a.diagonal(dim1=1, dim2=2) * gram_b.diagonal(dim1=1, dim2=2)).sqrt().sum(1)
    return squared.clamp_min(0) + 16 * torch.finfo(a.dtype).eps * lengths.square()


def _add_matrix(total: Tensor, weights: Tensor, a: Tensor, b: Tensor) -> None:
    inputs, outputs, column = a.shape[2], b.shape[2], weights.view(-1, 1, 1)
    a, b = (a * column, b) if inputs < outputs else (a, b * column)
    total.view(outputs, inputs).addmm_(b.flatten(0, 1).T, a.flatten(0, 1))


def _conv(layer: nn.Conv2d, a: Tensor, b: Tensor, wanted: frozenset[Tensor]) -> list[Share]:
    shares = _bias(layer, wanted, lambda: b.sum((2, 3)))
    if layer.weight not in wanted:
        return shares
    if layer.groups == layer.in_channels == layer.out_channels:
        return [_depthwise(layer, a, b), *shares]
    a = _padded(a, _padding(layer, a))
    if layer.groups == 1 and layer.kernel_size == (1, 1):
        a = a[:, :, :: layer.stride[0], :: layer.stride[1]]
        return [_matrix(layer.weight, _positions(a), _positions(b)), *shares]
    unfolded = functional.unfold(a, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)
    if layer.groups == 1:
        return [_matrix(layer.weight, unfolded.transpose(1, 2), _positions(b)), *shares]
    # Block diagonal: each group is a dense convolution of its own.
    outputs, inputs = (torch.unflatten(x, 1, (layer.groups, -1)) for x in (b.flatten(2), unfolded))
    return [_share(layer.weight, outputs @ inputs.transpose(2, 3)), *shares]


def _positions(x: Tensor) -> Tensor:
    """(N, C, H, W) as (N, H*W, C); a view when the memory is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def _padded(a: Tensor, padding: tuple[int, int, int, int]) -> Tensor:
    """Zeros around, in row-major memory: what follows needs that layout, so padding and re-ordering are one copy."""
    if not any(padding):
        return a
    left, right, top, bottom = padding
    records, channels, height, width = a.shape
    out = a.new_zeros((records, channels, height + top + bottom, width + left + right))
    out[:, :, top : top + height, left : left + width] = a
    return out


def _padding(layer: nn.Conv2d, a: Tensor) -> tuple[int, int, int, int]:
    """Left, right, top, bottom."""
    (kernel_h, kernel_w), (stride_h, stride_w), (step_h, step_w) = layer.kernel_size, layer.stride, layer.dilation
    if isinstance(layer, Conv2dSame):
        # TensorFlow's rule: pad to ceil(size / stride) outputs, the odd pixel on the far side.
        wide = max((-(-a.shape[3] // stride_w) - 1) * stride_w + (kernel_w - 1) * step_w + 1 - a.shape[3], 0)
        high = max((-(-a.shape[2] // stride_h) - 1) * stride_h + (kernel_h - 1) * step_h + 1 - a.shape[2], 0)
        return wide // 2, wide - wide // 2, high // 2, high - high // 2
    if isinstance(layer.padding, str):
        wide, high = (step_w * (kernel_w - 1), step_h * (kernel_h - 1)) if layer.padding == "same" else (0, 0)
        return wide // 2, wide - wide // 2, high // 2, high - high // 2
    high, wide = layer.padding
    return wide, wide, high, high


def _depthwise(layer: nn.Conv2d, a: Tensor, b: Tensor) -> Share:
    """Each channel's input times its output gradient, summed for every offset of the kernel."""
    left, _, top, _ = _padding(layer, a)
    stride, dilation = (layer.stride[0], layer.stride[1]), (layer.dilation[0], layer.dilation[1])
    kernels = kernel_gradients(a, b, layer.weight.shape, stride, (top, left), dilation=dilation)
    rows = kernels.flatten(1)

    def combine(total: Tensor, weights: Tensor, rows: Tensor) -> None:
        found = (weights @ rows).view(kernels.shape[1:]).permute(2, 0, 1)
        total.view(found.shape).add_(found)

    return Share(layer.weight, _squares(rows), (rows,), combine)


def _normalised(layer: nn.GroupNorm | nn.LayerNorm, xhat: Tensor, b: Tensor, wanted: frozenset[Tensor]) -> list[Share]:
    """Scale and shift after a normalisation; channels are in dimension 1."""
    shares = _bias(layer, wanted, lambda: _over_positions(b))
    if layer.weight in wanted:
        shares.append(_share(layer.weight, _over_positions(xhat * b)))
    return shares


def _over_positions(x: Tensor) -> Tensor:
    return x.flatten(2).sum(2) if x.dim() > 2 else x


# The clipped sum.

NORM_MARGIN = 1e-3
"""Norms are computed in single precision; a record is clipped as if its norm were larger by this (section 3)."""


class ClippedGradient:
    """Accumulates sum_n min(1, C/|g_n|) g_n over micro-batches into one flat vector.

    The vector holds every trainable parameter, personal head included: one clip and one noise cover all of them, so
    nothing that later gradients pass through was fitted without noise.
    """

    def __init__(self, model: nn.Module, *, clip: float) -> None:
        if not (math.isfinite(clip) and clip > 0):
            raise ConfigError(f"clip {clip} is not a positive number")
        self.clip = clip
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._layers = _trainable_layers(model)
        size = sum(parameter.numel() for parameter in self.parameters)
        if not size:
            raise ConfigError("the model has no trainable parameter")
        self.sum = torch.zeros(size, dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        slices = torch.split(self.sum, [parameter.numel() for parameter in self.parameters])
        self._slices: dict[Tensor, Tensor] = dict(zip(self.parameters, slices, strict=True))

    def zero(self) -> None:
        self.sum.zero_()

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views of a flat vector, shaped like the parameters."""
        return split_like(vector, self.parameters)

    def add(self, per_record_loss: Callable[[], Tensor]) -> Tensor:
        """Run the closure, which gives one loss per record, and add the clipped gradients. Returns the norms.

        A record whose gradient is not finite contributes zero (section 2). This is decided for each record by itself,
        so that it does not change what other records contribute.

        :param per_record_loss: must not average over the batch: then one record would change the gradients of others.
        """
        shares: list[Share] = []
        with _recording(self._layers, shares):
            losses = check_losses(per_record_loss())
            if not len(losses):
                return losses.detach()
            if losses.requires_grad:
                torch.autograd.backward(losses.sum())
        self._check_covered(shares)
        return self._accumulate(shares)

    @torch.no_grad()
    def _accumulate(self, shares: list[Share]) -> Tensor:
        norms = torch.stack([share.squared for share in shares]).sum(0).sqrt()
        # min(1, C / (1.001 |g|)): the one line on which the sensitivity rests.
        weights = (self.clip / (norms * (1 + NORM_MARGIN))).clamp_max(1.0)
        finite = norms.isfinite()
        kept = None if bool(to_host(finite.all())) else finite.nonzero().squeeze(1)
        for share in shares:
            share.add_weighted(self._slices[share.parameter], weights, kept)
        return norms

    def _check_covered(self, shares: list[Share]) -> None:
        """A parameter without a norm would be released unclipped; one with two would miss their cross term."""
        covered = [id(share.parameter) for share in shares]
        if len(set(covered)) != len(covered):
            raise LocalProtocolError("a layer was used twice in one pass, so its norm would miss the cross term")
        if missing := len(self.parameters) - len(covered):
            raise LocalProtocolError(
                f"{missing} trainable parameters took no part in the loss",
                hint="freeze parameters that are not trained: requires_grad_(False)",
            )


def _trainable_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that own the trainable parameters; refuses what has no formula, and shared parameters."""
    layers = []
    owners: dict[int, str] = {}
    for name, layer in model.named_modules():
        own = [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad]
        if not own:
            continue
        if not supports(layer):
            raise ConfigError(unsupported(layer), where=name, hint="freeze it, or replace it (`npr.dp.engine`)")
        for parameter in own:
            if id(parameter) in owners:
                raise ConfigError(f"{name} shares a parameter with {owners[id(parameter)]}: norms miss the cross term")
            owners[id(parameter)] = name
        layers.append(layer)
    return layers


def check_losses(losses: Tensor) -> Tensor:
    if losses.dim() != 1:
        raise LocalProtocolError(
            f"the loss has shape {tuple(losses.shape)}, not one value per record",
            hint='use reduction="none": a mean over the batch couples its records',
        )
    return losses


def split_like(vector: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    sizes = [parameter.numel() for parameter in parameters]
    return [part.view(parameter.shape) for part, parameter in zip(torch.split(vector, sizes), parameters, strict=True)]


class _Start(torch.autograd.Function):
    """The same tensor, not a copy, as the beginning of a graph. An activation may work on it in place, which a leaf
    does not allow."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _beginning: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> tuple[None, None]:
        return None, None


def _started(output: Tensor) -> Tensor:
    return cast(Tensor, _Start.apply(output.detach(), output.new_zeros((), requires_grad=True)))  # type: ignore[no-untyped-call]


@contextmanager
def _recording(layers: list[nn.Module], shares: list[Share]) -> Iterator[None]:
    """Hooks on and parameters without gradients; both are restored afterwards, also after an error."""
    own = (parameter for layer in layers for parameter in layer.parameters(recurse=False))
    wanted = frozenset(parameter for parameter in own if parameter.requires_grad)

    def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            raise LocalProtocolError("the loss is computed without gradients")
        a = inputs[0].detach()
        version = a._version
        # The first layer sees raw images, so nothing before it needs a gradient: the graph starts at its output.
        started = None if output.requires_grad else _started(output)
        tapped = output if started is None else started

        def on_gradient(b: Tensor) -> None:
            if a._version != version:
                raise LocalProtocolError(
                    f"the input of a {type(layer).__name__} was overwritten in place before its norm was taken",
                    hint="set inplace=False on the operation after it",
                )
            with torch.no_grad():
                shares.extend(shares_of(layer, a, b, wanted))

        tapped.register_hook(on_gradient)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return started

    handles = [layer.register_forward_hook(hook) for layer in layers]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter in wanted:
            parameter.requires_grad_(True)
