"""One step of a round with noise that the sites share: whole numbers, exact noise, an exact sum (section 4).

Every patient's gradient is clipped, scaled to ring units and truncated toward zero, so that it is at most `units` long
as a vector of whole numbers. A site adds these vectors, cuts each coordinate to its range, and adds discrete Gaussian
noise of its own. Nobody sees this vector: it is masked and summed in a ring of integers. The sum has the noise of every
survivor, and at least `honest` of these noises are unknown to whoever reads it.

Momentum is a part of the last step of the whole model, which everybody knows. A site adds its part of it to its noisy
numbers, so that it costs no epsilon, and the sum of all parts is the momentum of the consortium.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lazaret.errors import LocalProtocolError
from npr.device import to_host
from npr.dp.engine import OpacusGradient
from security.dp.accountant import Mechanism
from security.dp.ledger import Reservation
from security.dp.noise import discrete_gaussian
from security.dp.shared_noise import SharedNoise

Units = NDArray[np.int64]


def patient_units(rows: Tensor, *, clip: float, units: int) -> Units:
    """(patients, numbers): each row clipped to `clip`, in ring units, truncated; never longer than `units`.

    Truncation toward zero shortens every coordinate, so the bound needs no allowance for rounding. It is checked in
    whole numbers all the same; a row that is not finite, or too long, contributes zero.
    """
    values = rows.double()
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    scaled = values * (units / clip) * (clip / norms.clamp_min(1e-300)).clamp_max(1.0)
    whole = np.trunc(np.nan_to_num(to_host(scaled).numpy(), nan=np.inf, posinf=np.inf, neginf=np.inf))
    finite = np.isfinite(whole).all(axis=1)
    found: Units = np.where(finite[:, None], whole, 0.0).astype(np.int64)
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
    ) -> Units:
        """What may be masked and sent. Every patient takes part, so no coins are drawn.

        :param patients: one row of image indices for each patient.
        """
        event = reservation.claim(Mechanism.SHARED_SGD)
        total = np.zeros(self._noise.dimensions, dtype=np.int64)
        for start in range(0, len(patients), self._micro_batch):
            part = patients[start : start + self._micro_batch]
            rows, _ = self._gradient.rows(lambda part=part: losses(part))  # type: ignore[misc]
            total += patient_units(torch.cat(rows, dim=1), clip=self._clip, units=int(event.sensitivity)).sum(axis=0)
        return noised(total, self._noise, sigma=int(event.sigma), reservation=reservation)


def noised(total: Units, noise: SharedNoise, *, sigma: int, reservation: Reservation) -> Units:
    """Saturated, then with this site's part of the noise. Saturation comes first, so that no noise is cut away."""
    bound = noise.saturation(sigma)
    return np.clip(total, -bound, bound) + discrete_gaussian(reservation.noise, sigma, total.size)


def momentum_units(moved: NDArray[np.float32], noise: SharedNoise, *, weight: int) -> Units:
    """A site's part of the momentum after a step, which is public: in ring units, by its weight in the sum.

    Cut to its own part of the ring, so that it never takes the room of sum and noise.
    """
    share = noise.momentum * min(max(1, weight), noise.weight_cap) / noise.unit
    room = float(noise.momentum_room)
    return np.rint(np.clip(moved.astype(np.float64) * share, -room, room)).astype(np.int64)
