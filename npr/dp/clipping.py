"""Sum of clipped per-record gradients, exactly, with one forward and one backward pass ("book-keeping").

Weights do not require a gradient during the pass: only output gradients flow. Each layer's hook turns its input and
output gradient into norms as soon as both are there and keeps only what the weighted sum needs (grad_norms.py). When
the norms of all layers are known, each record gets the weight min(1, C/norm) and the sum is formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from npr.dp.grad_norms import Share, shares_of, supports, unsupported
from security.errors import ConfigError, LocalProtocolError

NORM_MARGIN = 1e-3
"""Norms are computed in single precision; a record is clipped as if its norm were larger by this."""


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
        self._slices: dict[Tensor, Tensor] = dict(zip(self.parameters, _split(self.sum, self.parameters), strict=True))

    def zero(self) -> None:
        self.sum.zero_()

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views of a flat vector, shaped like the parameters."""
        return _split(vector, self.parameters)

    def add(self, per_record_loss: Callable[[], Tensor]) -> Tensor:
        """Run the closure, which gives one loss per record, and add the clipped gradients. Returns the norms.

        A record whose gradient is not finite contributes nothing: this is decided for each record by itself, so it
        is no release.
        """
        shares: list[Share] = []
        with _recording(self._layers, shares):
            losses = per_record_loss()
            if losses.dim() != 1:
                raise LocalProtocolError(
                    f"the loss has shape {tuple(losses.shape)}, not one value per record",
                    hint='use reduction="none": a mean over the batch couples its records',
                )
            if not len(losses):
                return losses.detach()
            if losses.requires_grad:
                torch.autograd.backward(losses.sum())
        self._check_covered(shares)
        return self._accumulate(shares)

    @torch.no_grad()
    def _accumulate(self, shares: list[Share]) -> Tensor:
        norms = torch.stack([share.squared for share in shares]).sum(0).sqrt()
        weights = (self.clip / (norms * (1 + NORM_MARGIN))).clamp_max(1.0)
        finite = norms.isfinite()
        kept = None if bool(finite.all()) else finite.nonzero().squeeze(1)
        for share in shares:
            self._slices[share.parameter] += share.weighted_sum(weights, kept)
        return norms

    def _check_covered(self, shares: list[Share]) -> None:
        """A parameter without a norm would be released unclipped; one with two would miss their cross term."""
        covered = [id(share.parameter) for share in shares]
        if len(set(covered)) != len(covered):
            raise LocalProtocolError("a layer was used twice in one pass, so its norm would miss the cross term")
        if missing := len(self.parameters) - len(covered):
            raise LocalProtocolError(
                f"{missing} trainable parameters took no part in the loss",
                hint="freeze what does not train: requires_grad_(False)",
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
            raise ConfigError(unsupported(layer), where=name, hint="freeze it, or replace it (npr.dp.freeze_norm)")
        for parameter in own:
            if id(parameter) in owners:
                raise ConfigError(f"{name} shares a parameter with {owners[id(parameter)]}: norms miss the cross term")
            owners[id(parameter)] = name
        layers.append(layer)
    return layers


def _split(vector: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    sizes = [parameter.numel() for parameter in parameters]
    return [part.view(parameter.shape) for part, parameter in zip(torch.split(vector, sizes), parameters, strict=True)]


@contextmanager
def _recording(layers: list[nn.Module], shares: list[Share]) -> Iterator[None]:
    """Hooks on, weights off; both as before afterwards, whatever happens."""
    own = (parameter for layer in layers for parameter in layer.parameters(recurse=False))
    wanted = frozenset(parameter for parameter in own if parameter.requires_grad)

    def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            raise LocalProtocolError("the loss is computed without gradients")
        a = inputs[0].detach()
        version = a._version
        # The first layer sees raw images, so nothing before it needs a gradient: the graph starts at its output. The
        # copy is there because an activation may work in place, which a leaf does not allow.
        started = None if output.requires_grad else output.detach().requires_grad_().clone()
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
