"""A graphics card that is not there: tensors that say `cuda:0`, compute on the processor, and refuse what a card would.

Like PyTorch's fake tensors, a `CardTensor` has no memory of its own and raises where devices mix. Unlike them it
carries values, so that code which decides by a number (Sinkhorn's error, the number of sub-clusters) runs through, and
the outcome can be compared bit for bit with that of the processor. `test_device_card.py` holds its rule about mixed
devices against FakeTensorMode's.

Values reach the host only beneath `npr.device.to_host`; everything else that would read one raises `HostRead`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from npr import depthwise
from npr import device as device_module
from npr.data.loader import Batch, Batches
from npr.device import Device

CARD = torch.device("cuda", 0)
# Reads one number: `float(t)`, `int(t)`, `bool(t)`, `t.item()`.
READS = (torch.ops.aten._local_scalar_dense.default,)
# Writes into a tensor from the other device, which is a copy and allowed: `parameter.copy_(vector)`.
COPIES = (torch.ops.aten.copy_.default,)


class MixedDevices(RuntimeError):
    """An operation was given tensors of the processor and of the card."""


class HostRead(RuntimeError):
    """A value was read on the host without `to_host`."""


class CardTensor(torch.Tensor):
    """Says that it is on the card. On the meta device underneath, because torch here was built without CUDA."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> CardTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device="meta", requires_grad=False
        )
        made.values = values
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CardTensor({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _beneath_to_host() -> bool:
    frame = sys._getframe()
    wanted = device_module.to_host.__code__
    while frame is not None:
        if frame.f_code is wanted:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, _ = tree_flatten((args, kwargs))
    on_card = [tensor for tensor in flat if isinstance(tensor, CardTensor)]
    on_host = [tensor for tensor in flat if isinstance(tensor, torch.Tensor) and not isinstance(tensor, CardTensor)]
    wanted = kwargs.get("device")
    # Code of torch in C++ asks for the device underneath, which is meta.
    target = None if wanted is None else {"meta": "cuda"}.get(torch.device(wanted).type, torch.device(wanted).type)
    if on_card:
        if (func in READS or target == "cpu") and not _beneath_to_host():
            raise HostRead(f"{func} reads a value of the card without npr.device.to_host")
        # As on a card: a number of the processor may take part, anything larger may not.
        if func not in COPIES and any(tensor.dim() for tensor in on_host):
            raise MixedDevices(f"{func} was given tensors of the processor and of the card")
        if func in COPIES and not isinstance(args[0], CardTensor):
            raise HostRead(f"{func} copies values of the card to the host without npr.device.to_host")
    args, kwargs = tree_map_only(CardTensor, lambda tensor: tensor.values, (args, kwargs))
    if target == "cuda":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = func(*args, **kwargs)
    if target == "cpu" or not (on_card or target == "cuda"):
        return found
    known = {id(tensor.values): tensor for tensor in on_card}
    # What was changed in place is the same tensor as before.
    return tree_map_only(
        torch.Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else CardTensor(tensor), found
    )


class _Card(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


@contextmanager
def pretended_card(**settings: Any) -> Iterator[Device]:
    """A `Device` on the card, while it is there."""
    prepared = Batches._prepared

    def in_any_thread(batches: Batches, number: int) -> Batch:
        with _Card():  # a mode of torch holds for one thread
            return prepared(batches, number)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), _Card():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(Batches, "_prepared", in_any_thread)
        # The same gradient of depthwise kernels as on the processor, so that outcomes can be compared.
        patch.setitem(depthwise._BY_OFFSET, "cuda", True)
        patch.setattr(depthwise, "_BY_COLUMNS", frozenset({"cpu", "cuda"}))
        yield Device(place=CARD, reason="pretended", **settings)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """For assertions: what the card would hold."""
    return tensor.values if isinstance(tensor, CardTensor) else tensor
