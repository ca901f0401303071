"""Several processes that train one site's model as if they were one (torch.distributed).

Every process runs the same code on the same data, seed and memory. Of each batch it works on a slice only; what belongs
to the whole batch is combined again: the statistics of BatchNorm, the gradients, the features that prototypes
are made of. So the result is that of one process but for the order in which numbers are added.

DistributedDataParallel is not used: it gives every process the same weight, however many images its slice has, it wants
one `forward` where our methods call the two halves of a model, and torch's SyncBatchNorm does not run on processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # missing in its __all__
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lazaret.errors import WorkerLost


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """This process's place among `size`. The first, rank 0, is the one that anybody outside knows of."""

    rank: int = 0
    size: int = 1

    def share(self, count: int, rank: int | None = None) -> slice:
        """The rows of a batch that a process works on; all of them when there is not one for everybody."""
        if count < self.size:
            return slice(0, count)
        rank = self.rank if rank is None else rank
        return slice(rank * count // self.size, (rank + 1) * count // self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over all processes, in place; every process gets the same bits."""
        if self.size > 1:
            _exchange(lambda: dist.all_reduce(tensor))
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients over all processes, as one message."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = self.sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        parts = total.split_with_sizes([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))

    def join(self, rows: Tensor, count: int) -> Tensor:
        """All `count` rows of a batch, of which this process has its share, in the batch's order."""
        if len(rows) == count:
            return rows
        shares = [self.share(count, rank) for rank in range(self.size)]
        lengths = [share.stop - share.start for share in shares]
        mine = rows.new_zeros(max(lengths), *rows.shape[1:])
        mine[: len(rows)] = rows
        parts = [torch.empty_like(mine) for _ in shares]
        _exchange(lambda: dist.all_gather(parts, mine))
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def tell(self, content: bytes = b"") -> bytes:
        """What the first process says, at every process."""
        length = torch.tensor([len(content)])
        _exchange(lambda: dist.broadcast(length, 0))
        received = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == 0:
            received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        _exchange(lambda: dist.broadcast(received, 0))
        return received.numpy().tobytes()

    def as_one(self) -> AbstractContextManager[Any]:
        """Inside, BatchNorm in training mode normalises by the mean and variance of the whole batch."""
        return _WholeBatchNorm(self) if self.size > 1 else nullcontext()


ALONE = Group()

# By the device of a tensor: NCCL between NVIDIA cards where torch has it, gloo on processors.
_BACKENDS = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"


@contextmanager
def gathered(store: Store, name: str, *, rank: int, size: int, seconds: float) -> Iterator[Group]:
    """A group that meets under `name` at `store` and parts at the end.

    :param seconds: how long to wait for another process, here and in every exchange.
    :raises WorkerLost: if one does not come.
    """
    meeting, patience = PrefixStore(name, store), timedelta(seconds=seconds)
    _exchange(
        lambda: dist.init_process_group(_BACKENDS, store=meeting, rank=rank, world_size=size, timeout=patience),
        f"not all {size} processes connected within {seconds:g} seconds",
    )
    try:
        yield Group(rank=rank, size=size)
    finally:
        dist.destroy_process_group()


def _exchange(call: Callable[[], object], what: str = "another process of this training does not answer") -> None:
    try:
        call()
    except RuntimeError as error:
        raise WorkerLost(what, hint="read the output of the other processes; all of them must run") from error


class _WholeBatchNorm(TorchFunctionMode):
    """Takes the place of `functional.batch_norm`, whichever layer calls it: models stay as they are."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is functional.batch_norm:
            return _batch_norm(self._group, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    group: Group,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """The arguments of `functional.batch_norm` under its own names."""
    if not training:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    mean, variance, count = _moments(group, input.detach())
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_((variance * (count / (count - 1))).to(variance.dtype), momentum)
    normalised = _Normalise.apply(input, weight, bias, mean, variance, count, eps, group)  # type: ignore[no-untyped-call]
    return cast(Tensor, normalised)


def _moments(group: Group, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel over all processes, and the number of values they are taken over."""
    channels = [axis for axis in range(values.dim()) if axis != 1]
    variance, mean = (found.double() for found in torch.var_mean(values, channels, correction=0))
    count = torch.full((1,), values.numel() // values.shape[1], dtype=torch.float64, device=values.device)
    # In double, the square of the mean can be added here and taken off again without loss.
    total = group.sum(torch.cat([count, count * mean, count * (variance + mean**2)]))
    count, sums, squares = total.split_with_sizes([1, len(mean), len(mean)])
    mean = sums / count
    return mean.to(values.dtype), (squares / count - mean**2).clamp(min=0.0).to(values.dtype), count


class _Normalise(torch.autograd.Function):
    """BatchNorm by given moments, whose gradient knows that they depend on everybody's values."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        group: Group,
    ) -> Tensor:
        ctx.save_for_backward(values, weight, mean, variance, count)
        ctx.eps, ctx.group = eps, group
        return functional.batch_norm(values, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, variance, count = ctx.saved_tensors
        # The library's gradient for constant moments; to_weight = sum g x_hat and to_bias = sum g over our values.
        to_values, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, values, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        sums = ctx.group.sum(torch.cat([to_bias, to_weight]).double()) / count
        by_mean, by_variance = sums.to(values.dtype).chunk(2)
        inverse = torch.rsqrt(variance + ctx.eps)
        scale = inverse if weight is None else inverse * weight
        # dx = scale (g - mean(g) - x_hat mean(g x_hat)), as one multiple of x and one constant for each channel.
        slope, constant = scale * inverse * by_variance, scale * (by_mean - mean * inverse * by_variance)
        shape = (1, -1) + (1,) * (values.dim() - 2)
        to_values = to_values.addcmul_(values, slope.view(shape), value=-1).sub_(constant.view(shape))
        absent = weight is None
        return to_values, None if absent else to_weight, None if absent else to_bias, *(None,) * 5
