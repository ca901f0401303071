"""What a private step costs beside a plain one: time in one process, interleaved; memory in a process of its own each.

The plain step has the same model and the same frozen norms, in whichever of torch's two memory layouts is faster here.
"""

from __future__ import annotations

import copy
import json
import resource
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.nn import functional

from npr import backbones  # noqa: F401  (must run before timm is imported)
from npr.depthwise import speed_up_depthwise
from npr.dp.clipping import ClippedGradient
from npr.dp.engine import without_batch_norm
from npr.dp.sgd import DpSgd, Indices
from npr.lab.bench import Seconds, alternate
from security.dp.accountant import RATE_ONE, dp_sgd_event
from security.dp.ledger import Reservation
from security.dp.noise import NoiseSource, Units

import timm  # isort: skip

BACKBONE = "tf_efficientnet_lite0"
CLASSES = 8
Step = Callable[[], None]


def bench(
    *, batch: int = 64, size: int = 64, repeats: int = 15, opacus_batch: int | None = 8
) -> dict[str, float | int | str]:
    """Ratios of medians. `opacus_batch` is smaller than `batch`: its default needs some 150 MB for each record."""
    setup = _Setup(batch, size)
    steps = {"plain_nchw": setup.plain(False), "plain_channels_last": setup.plain(True), "dp": setup.dp(repeats + 2)}
    timed = alternate(steps, repeats=repeats, warm_up=1)
    seconds, cpu = _medians(timed, "wall"), _medians(timed, "cpu")
    plain = min(seconds["plain_nchw"], seconds["plain_channels_last"])
    memory = {variant: _growth_in_own_process(variant, batch, size) for variant in ("plain", "dp")}
    result: dict[str, float | int | str] = {
        "backbone": BACKBONE,
        "batch": batch,
        "pixels": size,
        "threads": torch.get_num_threads(),
        "plain_step_seconds": plain,
        "dp_step_seconds": seconds["dp"],
        "dp_step_over_plain_step": seconds["dp"] / plain,
        "dp_cpu_over_plain_cpu": cpu["dp"] / min(cpu["plain_nchw"], cpu["plain_channels_last"]),
        "plain_peak_bytes": memory["plain"],
        "dp_peak_bytes": memory["dp"],
        "dp_peak_over_plain_peak": memory["dp"] / memory["plain"],
        "norm_relative_error": setup.norm_error(4),
    }
    if opacus_batch:
        small = _Setup(opacus_batch, size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tasks = {"plain": small.plain(True), "opacus": small.opacus()}
            pair = _medians(alternate(tasks, repeats=min(3, repeats), warm_up=1), "wall")
        result["opacus_batch"] = opacus_batch
        result["opacus_default_step_over_plain_step"] = pair["opacus"] / pair["plain"]
    return result


class _Setup:
    """One model and one batch; every step works on a copy of its own."""

    def __init__(self, batch: int, size: int) -> None:
        torch.manual_seed(0)
        model = timm.create_model(BACKBONE, num_classes=CLASSES)
        speed_up_depthwise(model)  # as in every model of this project: the plain step is not to look slow
        self._model = without_batch_norm(model, pretrained=True).train()
        self._images = torch.randn(batch, 3, size, size)
        self._labels = torch.randint(0, CLASSES, (batch,))

    def _copies(self, channels_last: bool) -> tuple[nn.Module, Tensor]:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        model = copy.deepcopy(self._model).to(memory_format=layout)  # type: ignore[call-overload]
        return model, self._images.contiguous(memory_format=layout)

    def plain(self, channels_last: bool) -> Step:
        model, images = self._copies(channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images), self._labels))
            optimizer.step()

        return step

    def dp(self, steps: int) -> Step:
        """The production step, sampler and secure noise included; every record is drawn, so the batch is the same."""
        model, images = self._copies(True)
        rows = images.permute(0, 2, 3, 1)  # as they lie in memory, so that a batch is one copy
        event = dp_sgd_event(multiplier=1.0, clip=1.0, rate=RATE_ONE, steps=steps)
        trainer = DpSgd(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            reservation=Reservation(seq=0, events=[event], noise=NoiseSource()),
            units=Units(range(len(images))),
            divisor=float(len(images)),
            micro_batch=len(images),
        )

        def losses(indices: Indices) -> Tensor:
            chosen = torch.from_numpy(indices)
            drawn = rows[chosen].permute(0, 3, 1, 2)
            return functional.cross_entropy(model(drawn), self._labels[chosen], reduction="none")

        def step() -> None:
            trainer.step(losses)

        return step

    def opacus(self) -> Step:
        """Opacus as it comes: per-record gradients by hooks, its own optimizer for clip and noise."""
        model, images = self._copies(True)
        for module in model.modules():
            if isinstance(module, nn.ReLU6):
                module.inplace = False  # its hooks do not allow it
        hooked = GradSampleModule(model, loss_reduction="sum")
        optimizer = DPOptimizer(
            torch.optim.SGD(hooked.parameters(), lr=1e-3),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=len(images),
            loss_reduction="sum",
        )

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(hooked(images), self._labels, reduction="sum"))
            optimizer.step()

        return step

    def norm_error(self, records: int) -> float:
        """Largest relative difference between our norms and those of one-by-one autograd, both in single precision."""
        model, images = self._copies(True)
        parameters = list(model.parameters())
        clipped = ClippedGradient(model, clip=1.0)
        norms = clipped.add(
            lambda: functional.cross_entropy(model(images[:records]), self._labels[:records], reduction="none")
        )
        worst = 0.0
        for n in range(records):
            loss = functional.cross_entropy(model(images[n : n + 1]), self._labels[n : n + 1])
            grads = torch.autograd.grad(loss, parameters)
            truth = float(torch.cat([grad.flatten().double() for grad in grads]).norm())
            worst = max(worst, abs(float(norms[n]) / truth - 1.0))
        return worst


def _medians(timed: Mapping[str, Sequence[Seconds]], of: str) -> dict[str, float]:
    """Of time by the clock, or of the processor's (all threads)."""
    return {name: statistics.median(getattr(each, of) for each in values) for name, values in timed.items()}


def _growth_in_own_process(variant: str, batch: int, size: int) -> int:
    command = [sys.executable, "-m", "npr.lab.dp_bench", variant, str(batch), str(size)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return int(json.loads(finished.stdout)["growth"])


def _measure_growth(variant: str, batch: int, size: int) -> int:
    """Bytes by which the peak of resident memory exceeds what lay there before the first step."""
    setup = _Setup(batch, size)
    step = setup.plain(True) if variant == "plain" else setup.dp(5)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    for _ in range(4):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


if __name__ == "__main__":
    print(json.dumps({"growth": _measure_growth(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))}))
