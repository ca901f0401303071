"""Noise that the sites of a secure sum share, in ring units: how long a clip is, how much noise, how much room.

docs/spec/differential-privacy.md, section 4. It follows from a manifest alone, so that sites, auditors and the
laboratory have the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Self

from lazaret.errors import ConfigError
from security.dp.accountant import LEAST_SHARED_SIGMA, MechanismEvent, shared_event
from security.secagg.layout import Layout

LEAST_UNITS: Final = 4
"""Units of the clip over the square root of the dimensions: below, truncation takes away too much of a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNoise:
    """Noise that the sites of a secure sum share (section 4).

    :param sites: how many take part at most.
    :param honest: the least number of honest survivors over all cohorts that the manifest allows.
    :param dimensions: how many numbers are summed.
    :param units: the clip in ring units: a patient's gradient is truncated to whole units.
    :param bits: of the ring.
    :param unit: what one ring unit moves the model by, times the sum of weights.
    :param weight_cap: what a larger weight counts as.
    :param momentum: how much of the last step of the whole model is in the next one. The step is public, and each site
        adds its part after its noise, so that it costs nothing.

    On the wire the step of a round is `2^e W / (Q sum of weights)` for each ring unit (docs/spec/secure-aggregation.md,
    "Numbers"), and it is to be `learning rate * clip / units / patients`. The weights are noisy numbers of patients, so
    `units = learning rate * clip * Q / (2^e W)`, rounded down.
    """

    sites: int
    honest: int
    dimensions: int
    units: int = 1 << 12
    bits: int = 32
    unit: float = 1.0
    weight_cap: int = 1
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.honest < 1:
            raise ConfigError(
                "no sum of this federation has noise of an honest site",
                where="dp.noise",
                hint="more sites, a larger least_survivors or fewer colluders; or dp.noise = site",
            )
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"momentum {self.momentum:g} is not from 0 to below 1", where="[training.settings]")

    @classmethod
    def of(
        cls, layout: Layout, *, clip: float, learning_rate: float, honest: int, momentum: float = 0.0
    ) -> Self:
        """From what a manifest says.

        :raises ConfigError: where ring, cohort or tensors are not fit for it.
        """
        exponents = {block.clip_exponent for block in layout.state_blocks}
        kinds = {block.kind for block in layout.state_blocks}
        if layout.ring_bits not in (24, 32) or len(exponents) != 1 or kinds != {"mean"}:
            raise ConfigError(
                "shared noise is for weights with one clip, in a ring of 24 or 32 bits",
                where="dp.noise",
                hint="dp.trainable = head sends weights alone; [aggregation] ring_bits = 32",
            )
        unit = Fraction(2) ** exponents.pop() * layout.weight_cap / layout.quantum
        units, words = math.floor(Fraction(learning_rate) * Fraction(clip) / unit), layout.state_words
        if units < LEAST_UNITS * math.sqrt(words):
            raise ConfigError(
                f"a gradient of {words} numbers would be {units} ring units long: most of it is truncated to zero",
                where="dp.noise",
                hint="[aggregation] ring_bits = 32 and a smaller weight_cap, fewer numbers, or dp.noise = site",
            )
        return cls(
            sites=layout.roster_size,
            honest=honest,
            dimensions=words,
            units=units,
            bits=layout.ring_bits,
            unit=float(unit),
            weight_cap=layout.weight_cap,
            momentum=momentum,
        )

    def sigma(self, multiplier: float) -> int:
        """Each site's noise in ring units, rounded up, for this much noise over the clip inside the sum."""
        return max(LEAST_SHARED_SIGMA, math.ceil(multiplier * self.units / math.sqrt(self.honest)))

    def event(self, multiplier: float, *, steps: int = 1) -> MechanismEvent:
        sigma = self.sigma(multiplier)
        return shared_event(
            sigma=sigma, units=self.units, honest=self.honest, dimensions=self.dimensions, steps=steps
        )

    @property
    def _quantum(self) -> int:
        """The part of the ring that one site has."""
        return ((1 << (self.bits - 1)) - 1) // self.sites

    @property
    def momentum_room(self) -> int:
        """The largest size of one site's part of the momentum; the other half of its ring is for sum and noise."""
        return self._quantum // 2 if self.momentum else 0

    def saturation(self, sigma: int) -> int:
        """The largest size of one site's coordinate before its noise: with it, any sum of sites fits the ring."""
        room = self._quantum - self.momentum_room - 9 * sigma
        if room < self.units:
            raise ConfigError(
                f"a ring of {self.bits} bits is too small for {sigma} units of noise",
                where="dp.noise",
                hint="[aggregation] ring_bits = 32, less noise, or fewer sites",
            )
        return room
