"""Clips and movement caps of the blocks of a layout, as they follow from the training schedule.

`consortium publish` makes them; the manifest pins what came of it. All are powers of two, stored as exponents
(docs/spec/secure-aggregation.md, "Numbers").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from lazaret.errors import ConfigError
from security.secagg.layout import Block

# On skin images statistics moved by up to 6 units in a round of Adam and 24 in one of plain SGD from scratch; clips
# should be at least three powers of two above what occurs, since one value beyond its clip refuses the whole update.
DEFAULT_STATISTIC_EXPONENT: Final = 8
LEAST_UNIT: Final = 16  # a channel's unit is at least this part of its tensor's median unit


def power_of_two_above(value: float) -> int:
    """Return the exponent of the smallest power of two that is at least `value`."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{value} is not a positive number",
            where="layout [clips]",
            hint="the layout comes from the consortium's signed manifest",
        )
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else exponent


@dataclass(frozen=True, slots=True, kw_only=True)
class Clips:
    """How clips and movement caps follow from the training schedule, for `consortium publish`.

    With an optimiser that moves a coordinate by about the learning rate in a step, ``learning_rate * steps`` is as far
    as a weight goes in a round; plain SGD with momentum m adds up to 1 / (1 - m) times that. The clip is `margin` times
    this reach, the cap on the L2 norm of a tensor's averaged step a quarter of that in every coordinate; both rounded
    up to a power of two.
    """

    learning_rate: float
    steps: int
    momentum: float = 0.0
    margin: float = 8.0
    statistic_exponent: int = DEFAULT_STATISTIC_EXPONENT

    def weights(self, name: str, shape: tuple[int, ...]) -> Block:
        reach = self.learning_rate * self.steps / (1.0 - self.momentum)
        return Block(
            name=name,
            shape=shape,
            kind="mean",
            clip_exponent=power_of_two_above(reach * self.margin),
            movement_exponent=power_of_two_above(reach * self.margin / 4 * math.sqrt(math.prod(shape))),
        )

    def _statistic(self, name: str, units: npt.NDArray[np.float64], *, nonnegative: bool) -> Block:
        # A channel with almost no signal may get one later: its unit is not left far below the tensor's others.
        units = np.maximum(units, np.median(units) / LEAST_UNIT)
        return Block(
            name=name,
            shape=(len(units),),
            kind="statistic",
            clip_exponent=self.statistic_exponent,
            movement_exponent=power_of_two_above(2.0 ** (self.statistic_exponent - 2) * math.sqrt(len(units))),
            units=tuple(power_of_two_above(float(unit)) for unit in units),
            nonnegative=nonnegative,
        )

    def running_mean(self, name: str, initial_variance: npt.ArrayLike, *, epsilon: float = 1e-5) -> Block:
        """Channels differ by decades, so each counts in units of its initial standard deviation."""
        return self._statistic(name, np.sqrt(np.asarray(initial_variance, np.float64) + epsilon), nonnegative=False)

    def running_variance(self, name: str, initial_variance: npt.ArrayLike, *, epsilon: float = 1e-5) -> Block:
        return self._statistic(name, np.asarray(initial_variance, np.float64) + epsilon, nonnegative=True)
