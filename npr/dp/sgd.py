"""DP-SGD from a reservation: sample patients, clip, add noise, divide by a public number, step.

docs/spec/differential-privacy.md, sections 2 to 4. Everything that decides the cost is read from the booked event: rate
and steps for the sampler, clip and sigma for the noise. So sampler and ledger cannot disagree, and there is no second
place to set them. Opacus' per-record gradients may stand behind the clip (`engine`); its `PrivacyEngine` is not used,
because it derives rate and divisor from the exact number of records, which is neither public nor booked. The second
part of the file is the step of a round whose noise the sites share.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lazaret.errors import BudgetExhausted, ConfigError, LocalProtocolError
from npr.device import number, to_host
from npr.dp.clipping import NORM_MARGIN
from npr.dp.engine import OpacusGradient, clipped_sum
from security.dp.accountant import Mechanism
from security.dp.ledger import Reservation
from security.dp.noise import PoissonSampler, SharedNoise, Units, discrete_gaussian, grid_step
from security.dp.planner import Engine

Indices = NDArray[np.int64]
MOST_NOISE_THREADS: Final = 8
_PIECE: Final = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """For this site only. Both numbers depend on the data without noise: neither may leave or influence anything."""

    drawn: int
    dropped: int


class DpSgd:
    """The steps of one reservation. Works with any torch optimizer: noisy gradients are put into `parameter.grad`.

    :param divisor: public number that turns the noisy sum into a mean, such as the rate times the *noisy* size; never
        the length of a batch, which would reveal who was sampled.
    :param engine: how the clipped sum is computed; it has no influence on the cost.
    :param views: how many images of a patient the mean gradient is taken over; the closure then gets a table of
        indices, one row for each patient.
    :param micro_batch: how many records go through the network at once. Batches are split, never truncated.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        reservation: Reservation,
        units: Units,
        divisor: float,
        micro_batch: int = 64,
        engine: Engine = "auto",
        views: int = 1,
    ) -> None:
        if not divisor > 0 or micro_batch < 1:
            raise ConfigError("the divisor and the micro-batch of DP-SGD are positive")
        event = reservation.claim(Mechanism.DP_SGD)
        self._optimizer = optimizer
        self._clipped = clipped_sum(model, clip=event.sensitivity, engine=engine)
        _check_optimizer(optimizer, self._clipped.parameters)
        self._sampler = PoissonSampler(units, rate=event.rate, noise=reservation.noise.fork())
        self._sigma = event.sigma
        self._divisor = divisor
        self._micro_batch = micro_batch
        self._views = views
        self.steps_left = event.steps
        free = len(os.sched_getaffinity(0)) - torch.get_num_threads()
        self._beside = free > 0
        threads = min(free if self._beside else torch.get_num_threads(), MOST_NOISE_THREADS)
        # Each thread has its own source and its own part of the vector.
        self._drawn = np.empty(self._clipped.sum.numel(), dtype=np.float64)
        self._parts = [(reservation.noise.fork(), part) for part in np.array_split(self._drawn, threads)]
        self._noisy = torch.empty_like(self._clipped.sum)
        parts = zip(self._clipped.parameters, self._clipped.split(self._noisy), strict=True)
        self._gradients = [_laid_out(parameter, part) for parameter, part in parts]
        self._noise_threads = ThreadPoolExecutor(threads, thread_name_prefix="dp-noise")

    def run(self, per_record_loss: Callable[[Indices], Tensor]) -> list[StepReport]:
        """All steps that are left."""
        return [self.step(per_record_loss) for _ in range(self.steps_left)]

    def step(self, per_record_loss: Callable[[Indices], Tensor]) -> StepReport:
        """One step. The closure maps image indices to one loss per image; it is called once for each micro-batch."""
        if self.steps_left <= 0:
            raise BudgetExhausted("all booked steps are used", hint="a further step needs its own reservation")
        self.steps_left -= 1
        # The noise needs no data, so it is made while the network computes if a processor is free. If none is, threads
        # that wait for each other at every layer would lose more time than the noise takes.
        noise = self._draw_noise() if self._beside else None
        drawn = self._sampler.draw() if self._views == 1 else self._sampler.draw_views(self._views)
        self._clipped.zero()
        dropped = 0
        for start in range(0, len(drawn), self._micro_batch):
            part = drawn[start : start + self._micro_batch]
            norms = self._clipped.add(partial(per_record_loss, part))
            dropped += int(number((~norms.isfinite()).sum()))
        self._release(noise or self._draw_noise())
        self._optimizer.step()
        return StepReport(drawn=len(drawn), dropped=dropped)

    def _draw_noise(self) -> list[Future[NDArray[np.float64]]]:
        return [self._noise_threads.submit(source.gaussian, part) for source, part in self._parts]

    @torch.no_grad()
    def _release(self, noise: list[Future[NDArray[np.float64]]]) -> None:
        """round((sum + noise) / grid) * grid / divisor, in double precision up to the rounding.

        The noisy sum is rounded, not the sum: the possible outputs are then the same for every data set (section 4).
        """
        grid = grid_step(self._sigma)
        for drawn in noise:
            drawn.result()
        doubles = torch.from_numpy(self._drawn).to(self._clipped.sum.device)
        total = torch.zeros((), dtype=torch.float64, device=doubles.device)
        # In pieces that stay in the caches of the processors; a card takes all at once.
        size = _PIECE * torch.get_num_threads() if doubles.device.type == "cpu" else doubles.numel()
        for start in range(0, doubles.numel(), size):
            piece = slice(start, start + size)
            part = doubles[piece].mul_(self._sigma / grid).add_(self._clipped.sum[piece], alpha=1.0 / grid).round_()
            total += part.sum()
            self._noisy[piece].copy_(part).mul_(grid / self._divisor)
        # A sum is finite only if all its terms are, and it is cheaper to test.
        if not math.isfinite(number(total)):
            raise LocalProtocolError("a noisy gradient is not finite: this run ends here, and its cost stays booked")
        for parameter, (gradient, source) in zip(self._clipped.parameters, self._gradients, strict=True):
            parameter.grad = gradient if source is None else gradient.copy_(source)


def _laid_out(parameter: nn.Parameter, part: Tensor) -> tuple[Tensor, Tensor | None]:
    """A gradient laid out in memory like its parameter, and what is copied into it; None where it is the part itself.

    Torch's fused optimizers walk both with one index and would silently move the wrong weights of a channels-last model
    if the layouts differed.
    """
    strides = zip(parameter.shape, parameter.stride(), part.stride(), strict=True)
    if all(ours == theirs for size, ours, theirs in strides if size > 1):
        return part.as_strided(parameter.shape, parameter.stride()), None
    return torch.empty_like(parameter, requires_grad=False), part


def _check_optimizer(optimizer: torch.optim.Optimizer, clipped: list[nn.Parameter]) -> None:
    """The optimizer must hold exactly the parameters that are clipped: others would be changed without noise."""
    covered = {id(parameter) for parameter in clipped}
    moved = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if moved != covered:
        raise ConfigError(
            f"the optimizer holds {len(moved)} trainable parameters, {len(covered)} are clipped",
            hint="build it from the model's own parameters, personal head included",
        )


# One step of a round with noise that the sites share: whole numbers, exact noise, an exact sum (section 4).
#
# Every patient's gradient is clipped, scaled to ring units and truncated toward zero, so that it is at most `units`
# long as a vector of whole numbers. A site adds these vectors, cuts each coordinate to its range, and adds discrete
# Gaussian noise of its own. Nobody sees this vector: it is masked and summed in a ring of integers. The sum has the
# noise of every survivor, and at least `honest` of these noises are unknown to whoever reads it.
#
# Momentum is a part of the last step of the whole model, which everybody knows. A site adds its part of it to its noisy
# numbers, so that it costs no epsilon, and the sum of all parts is the momentum of the consortium.

WholeNumbers = NDArray[np.int64]


def patient_units(rows: Tensor, *, clip: float, units: int) -> WholeNumbers:
    """(patients, numbers): each row clipped to `clip`, in ring units, truncated; never longer than `units`.

    Truncation toward zero shortens every coordinate, so the bound needs no allowance for rounding. It is checked in
    whole numbers all the same; a row that is not finite, or too long, contributes zero.
    """
    values = rows.double()
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    scaled = values * (units / clip) * (clip / norms.clamp_min(1e-300)).clamp_max(1.0)
    whole = np.trunc(np.nan_to_num(to_host(scaled).numpy(), nan=np.inf, posinf=np.inf, neginf=np.inf))
    finite = np.isfinite(whole).all(axis=1)
    found: WholeNumbers = np.where(finite[:, None], whole, 0.0).astype(np.int64)
    too_long = (found * found).sum(axis=1) > units * units
    # One unit less in every coordinate is enough for the last bit of a product.
    found[too_long] -= np.sign(found[too_long])
    found[(found * found).sum(axis=1) > units * units] = 0
    return found


class SharedStep:
    """The noisy whole numbers of one site for one round, from a reservation."""

    def __init__(self, model: nn.Module, *, noise: SharedNoise, clip: float, micro_batch: int) -> None:
        self._gradient = OpacusGradient(model, clip=clip)
        self._noise, self._clip, self._micro_batch = noise, clip, micro_batch
        size = int(self._gradient.sum.numel())
        if size != noise.dimensions:
            raise LocalProtocolError(f"{size} numbers are trained, {noise.dimensions} are booked")

    def upload(
        self, patients: NDArray[np.int64], losses: Callable[[NDArray[np.int64]], Tensor], reservation: Reservation
    ) -> WholeNumbers:
        """What may be masked and sent. Every patient takes part, so no coins are drawn.

        :param patients: one row of image indices for each patient.
        """
        event = reservation.claim(Mechanism.SHARED_SGD)
        total = np.zeros(self._noise.dimensions, dtype=np.int64)
        # The last bits of a patient's gradient depend on who is in the same batch. The margin is for what all of them
        # together may move when one patient more shifts the others.
        longest = int(event.sensitivity / (1 + NORM_MARGIN))
        for start in range(0, len(patients), self._micro_batch):
            part = patients[start : start + self._micro_batch]
            rows, _ = self._gradient.rows(lambda part=part: losses(part))  # type: ignore[misc]
            total += patient_units(torch.cat(rows, dim=1), clip=self._clip, units=longest).sum(axis=0)
        return noised(total, self._noise, sigma=int(event.sigma), reservation=reservation)


def noised(total: WholeNumbers, noise: SharedNoise, *, sigma: int, reservation: Reservation) -> WholeNumbers:
    """Saturated, then with this site's part of the noise. Saturation comes first, so that no noise is cut away."""
    bound = noise.saturation(sigma)
    return np.clip(total, -bound, bound) + discrete_gaussian(reservation.noise, sigma, total.size)


def momentum_units(moved: NDArray[np.float32], noise: SharedNoise, *, weight: int) -> WholeNumbers:
    """A site's part of the momentum after a step, which is public: in ring units, by its weight in the sum.

    Cut to its own part of the ring, so that it never takes the room of sum and noise.
    """
    share = noise.momentum * min(max(1, weight), noise.weight_cap) / noise.unit
    room = float(noise.momentum_room)
    return np.rint(np.clip(moved.astype(np.float64) * share, -room, room)).astype(np.int64)
