"""Where a site computes: processor or graphics card, in which precision, and the one way of values to the host.

The same code runs on every device. A tensor is made on the device of what it meets; random numbers come from
generators of the processor and are copied, so that a device changes no draw. Values go back to the host through
`to_host` and nowhere else: each such call waits for the card, so that they must be few, and what may leave a site is
made on the host alone.

Mixed precision is that of the extractor (`SplitModel.features`); heads, losses, prototypes and everything under
differential privacy are float32 (or wider) on every device.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lazaret.errors import ConfigError
from npr.config import DeviceSettings
from npr.depthwise import measure_depthwise

M = TypeVar("M", bound=nn.Module)

WHERE: Final = "[site] device, --device"
# Relative error of a gradient in float32 on a card that sums in another order than the processor.
SELF_TEST_TOLERANCE: Final = 1e-3
# Operating systems' cards in the order in which `auto` tries them.
CARDS: Final = ("cuda", "xpu", "mps")
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_HALF: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def to_host(tensor: Tensor) -> Tensor:
    """The values of a tensor on the host, without its graph; waits until a card has computed them.

    The only function that may bring values of the learning code from a device to the host. On the processor it is the
    tensor itself.
    """
    return (tensor.detach() if tensor.requires_grad else tensor).to("cpu")


def on_host(model: M) -> M:
    """A copy of a model with all its tensors on the host."""
    return cast(M, copy.deepcopy(model)._apply(to_host))  # type: ignore[no-untyped-call]


def number(tensor: Tensor) -> float:
    """The value of a tensor with one entry."""
    return float(to_host(tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that was chosen, and how it is used.

    :ivar place: the device of every tensor of a step.
    :ivar precision: of the extractor.
    :ivar reason: why it was chosen, for people.
    :ivar micro_batch: most images that go through the network at once; None for whole batches.
    :ivar checkpointing: activations are computed a second time instead of kept.
    :ivar compiled: the extractor is compiled for this device by torch before its first step.
    """

    place: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "float32"
    reason: str = "not chosen"
    deterministic: bool = False
    micro_batch: int | None = None
    checkpointing: bool = False
    compiled: bool = False

    @property
    def is_card(self) -> bool:
        return self.place.type != "cpu"

    @property
    def half(self) -> torch.dtype | None:
        """The type that the extractor computes in where that is not float32."""
        return _HALF.get(self.precision)

    @property
    def wide(self) -> torch.dtype:
        """The widest type of the device, for long sums: Apple's cards have no double precision."""
        return wide_on(self.place)

    @property
    def name(self) -> str:
        return card_name(self.place)

    def __str__(self) -> str:
        return f"{self.name}, {self.precision} ({self.reason})"

    def placed(self, model: M) -> M:
        """The model itself, moved here and told its precision."""
        model.to(self.place)
        if hasattr(model, "extractor_dtype"):
            model.extractor_dtype = self.half  # type: ignore[assignment]  # an nn.Module may have any attribute
        if self.checkpointing:
            _checkpoint_activations(model)
        if self.compiled:
            getattr(model, "extractor", model).compile()  # in place: names stay, and copies are not compiled
        return model

    def from_host(self, values: Tensor | NDArray[Any]) -> Tensor:
        """A copy here; on the processor the values themselves. Bytes of a batch are pinned, so that they are copied
        while the card computes.
        """
        tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        if self._real_cuda and not tensor.is_cuda:
            return tensor.pin_memory().to(self.place, non_blocking=True)
        return tensor.to(self.place)

    @property
    def _real_cuda(self) -> bool:
        return self.place.type == "cuda" and torch.cuda.is_available()

    def side_stream(self) -> Any:
        """A queue of the card beside that of the training steps, for the next batch; None where there are none."""
        return torch.cuda.Stream(self.place) if self._real_cuda else None  # type: ignore[no-untyped-call]

    def forked_draws(self) -> AbstractContextManager[None]:
        """Inside, random draws of processor and card may be seeded; outside they go on as before."""
        if self._real_cuda:
            return torch.random.fork_rng(devices=[self.place.index], device_type="cuda")
        return torch.random.fork_rng(devices=[])

    def free_memory(self) -> tuple[int, int] | None:
        """Free and all bytes of the card's own memory; None where the system does not say."""
        if self._real_cuda:
            free, total = torch.cuda.mem_get_info(self.place)
            return int(free), int(total)
        return None

    def peak_memory(self) -> int | None:
        """Most bytes that tensors of this process have taken on the card."""
        return int(torch.cuda.max_memory_allocated(self.place)) if self._real_cuda else None

    @contextmanager
    def memory_for(self, images: int, *, private: bool = False) -> Iterator[None]:
        """An error about memory inside names the batch, what is free, and the key to change.

        :param private: under differential privacy, where another key counts.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            free = self.free_memory()
            left = f"; {free[0] / 2**30:.1f} of {free[1] / 2**30:.1f} GiB are free" if free else ""
            smaller = f"set micro_batch = {max(1, images // 2)}"
            raise ConfigError(
                f"a batch of {images} images does not fit the memory of {self.name}{left}",
                where="[privacy] micro_batch" if private else "[site] micro_batch, --micro-batch",
                hint=f"{smaller}; the result is the same"
                if private
                else f"{smaller} (the same result but for BatchNorm, docs/devices.md), or checkpointing = true; "
                "batch_size itself is the consortium's",
            ) from error


PROCESSOR: Final = Device(reason="the default")


def wide_on(place: torch.device) -> torch.dtype:
    return torch.float32 if place.type == "mps" else torch.float64


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "can't allocate memory" in str(error) or "not enough memory" in str(error)


def _checkpoint_activations(model: nn.Module) -> None:
    extractor = getattr(model, "extractor", model)
    switch = getattr(extractor, "set_grad_checkpointing", None)
    try:
        if switch is None:
            raise NotImplementedError
        switch(True)
    except (NotImplementedError, AssertionError) as error:
        raise ConfigError(
            f"{type(extractor).__name__} cannot compute its activations again",
            where="[site] checkpointing, --checkpointing",
            hint="remove it, and set micro_batch instead",
        ) from error


# From what was asked for to a device that was tried.


def open_device(settings: DeviceSettings, *, private: bool = False, rank: int | None = None) -> Device:
    """The device to compute on, tried by one convolution, with the settings of torch that belong to it.

    :param private: under differential privacy; norms must hold to a thousandth there, so that it is float32.
    :param rank: which of several processes on this machine; each takes a card of its own.
    :raises ConfigError: if a device that was named is not there or computes wrongly, or a precision is not possible.
    """
    if private and settings.checkpointing:
        raise ConfigError(
            "under differential privacy activations cannot be computed twice: each layer is clipped in one pass",
            where="[site] checkpointing, --checkpointing",
            hint="remove it; [privacy] micro_batch saves memory and changes nothing",
        )
    if settings.compiled:
        _require_compiler(settings, private=private)
    # `float32` means float32, not the 10 bits of TF32: for norms under differential privacy, and for the test below.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if settings.deterministic:
        # Read by cuBLAS when it is first used (torch.use_deterministic_algorithms).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    place, reason = _choose(settings.device, rank)
    if private and wide_on(place) != torch.float64:
        if settings.device != "auto":
            raise ConfigError(
                f"{place.type} has no double precision, which the noise of differential privacy needs",
                where=WHERE,
                hint='use device = "cpu"',
            )
        place, reason = torch.device("cpu"), f"{place.type} has no double precision, which differential privacy needs"
    device = Device(
        place=place,
        precision=_precision(settings.precision, place, private=private),
        reason=reason,
        deterministic=settings.deterministic,
        micro_batch=settings.micro_batch,
        checkpointing=settings.checkpointing,
        compiled=settings.compiled,
    )
    _prepare(device)
    return device


def _require_compiler(settings: DeviceSettings, *, private: bool) -> None:
    """Torch tries to compile in the first step only, and then ends in pages of its own."""
    where = "[site] compiled, --compiled"
    if private or settings.checkpointing:
        reason = "per-patient gradients need every layer as it is" if private else "checkpointing is on"
        raise ConfigError(f"the network cannot be compiled: {reason}", where=where, hint="remove it")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        hint = "install g++, or name another one in the environment variable CXX; or remove it"
        raise ConfigError(f"torch compiles with {compiler!r}, which is not here", where=where, hint=hint)


def _choose(wanted: str, rank: int | None) -> tuple[torch.device, str]:
    if wanted == "cpu":
        return torch.device("cpu"), "asked for"
    if wanted != "auto":
        place = _indexed(wanted, rank)
        if not _available(place):
            raise ConfigError(f"there is no device {wanted!r} here: {_absent(place)}", where=WHERE, hint=_CARD_HINT)
        if wrong := self_test(place):
            raise ConfigError(f"{place} does not pass its test: {wrong}", where=WHERE, hint=_CARD_HINT)
        return place, "asked for, and its test convolution agrees with the processor"
    failed = []
    for kind in CARDS:
        place = _indexed(kind, rank)
        if _available(place):
            wrong = self_test(place)
            if not wrong:
                return place, "its test convolution agrees with the processor"
            failed.append(f"{place} does not pass its test: {wrong}")
    return torch.device("cpu"), "; ".join(failed) or "no graphics card was found"


_CARD_HINT: Final = (
    'device = "cpu" trains on the processor; docs/devices.md has what a card needs (driver, a build of torch for it, '
    "and its device files open to the trainer)"
)


def _indexed(name: str, rank: int | None) -> torch.device:
    """With its number, because torch takes a tensor on `cuda` and one on `cuda:0` for two devices."""
    place = torch.device(name)
    return place if place.index is not None else torch.device(place.type, rank or 0)


def _module(place: torch.device) -> Any:
    return getattr(torch, place.type, None)


def _available(place: torch.device) -> bool:
    module = _module(place)
    return module is not None and bool(module.is_available()) and (place.index or 0) < module.device_count()


def _absent(place: torch.device) -> str:
    if place.type == "cuda" and torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"this build of torch ({torch.__version__}) has no code for it"
    module = _module(place)
    count = module.device_count() if module is not None and module.is_available() else 0
    return f"{count} found" if count else "no card or no driver was found"


def self_test(place: torch.device) -> str:
    """One convolution, forward and backward, against the processor; returns what is wrong, or nothing."""
    generator = torch.Generator().manual_seed(0)
    images, weight = torch.randn(4, 3, 16, 16, generator=generator), torch.randn(8, 3, 3, 3, generator=generator)
    try:
        ours, theirs = _convolved(images, weight), _convolved(images.to(place), weight.to(place))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).split("\n", 1)[0][:200]
    for mine, found in zip(ours, theirs, strict=True):
        gap = number((to_host(found) - mine).norm() / mine.norm())
        if not gap < SELF_TEST_TOLERANCE:  # also where it is not a number
            return f"a convolution differs from the processor's by {gap:.2g}"
    return ""


def _convolved(images: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    weight = weight.clone().requires_grad_()
    output = nn.functional.conv2d(images, weight, padding=1)
    output.square().sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return output.detach(), weight.grad


def _precision(wanted: str, place: torch.device, *, private: bool) -> str:
    if private:
        if wanted in _HALF:
            raise ConfigError(
                f"differential privacy needs float32: the norms by which patients are clipped must hold to a "
                f"thousandth, and {wanted} holds to a hundredth",
                where="[site] precision, --precision",
                hint='use precision = "auto" or "float32"',
            )
        return "float32"
    if wanted != "auto":
        return wanted
    if place.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16" if place.type == "xpu" else "float32"


def _prepare(device: Device) -> None:
    """Settings of torch for the whole process."""
    torch.backends.cudnn.benchmark = device.is_card and not device.deterministic
    if torch.are_deterministic_algorithms_enabled() != device.deterministic:  # setting it loads torch's compiler
        torch.use_deterministic_algorithms(device.deterministic)
    measure_depthwise(device.place, to_host, deterministic=device.deterministic)


# For people: `site-agent check`, the model card.


def card_name(place: torch.device) -> str:
    """`processor`, or the card's own name with its number."""
    if place.type == "cpu":
        return "processor"
    module = _module(place)
    known = place.type in ("cuda", "xpu") and module is not None and module.is_available()
    return f"{module.get_device_name(place)} ({place})" if known else str(place)


def driver_version() -> str:
    """Of the card's driver, as the system tells it; empty where it does not."""
    try:
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", _DRIVER_FILE.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""
