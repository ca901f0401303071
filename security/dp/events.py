"""What is booked: one frozen event for each release that reads patients (docs/spec/differential-privacy.md, section 2).

An event states the mechanism completely, so that epsilon follows from the list of events alone and a release function
can take its parameters from the event that paid for it. Adjacency is add-or-remove one unit (patient, lesion or image).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from security.errors import ConfigError

RATE_ONE = 1 << 24
"""Sampling rates are whole multiples of 2^-24, so that the sampler and the ledger hold the same number bit for bit."""

LATTICE_ONE = 1 << 16
"""Counts and prototype sums live on the lattice of multiples of 2^-16."""

_MAX_STEPS = 1 << 32
_MAX_LATTICE_SIGMA = 1 << 10


class Mechanism(StrEnum):
    DP_SGD = "dp-sgd"
    CLASS_COUNTS = "class-counts"
    PROTOTYPES = "prototypes"
    METRICS = "metrics"


LATTICE_MECHANISMS = frozenset({Mechanism.CLASS_COUNTS, Mechanism.PROTOTYPES, Mechanism.METRICS})


def rate_at_least(q: float) -> int:
    """The smallest multiple of 2^-24 that is no less than `q`: rounding up never understates the cost."""
    if not 0 < q <= 1:
        raise ConfigError(f"sampling rate {q} is not in (0, 1]", hint="give the share of patients drawn in one step")
    return min(RATE_ONE, math.ceil(q * RATE_ONE))


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismEvent:
    """`steps` applications of one (Poisson-subsampled) Gaussian mechanism.

    :param sigma: standard deviation of the noise, in the units of what is released.
    :param sensitivity: L2 distance by which one unit of privacy can move what is released.
    :param rate: chance that a unit takes part in one step, in multiples of 2^-24; `RATE_ONE` is everybody.
    """

    kind: Mechanism
    sigma: float
    sensitivity: float
    rate: int = RATE_ONE
    steps: int = 1

    def __post_init__(self) -> None:
        for name, value in (("sigma", self.sigma), ("sensitivity", self.sensitivity)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{self.kind}: {name} {value} is not a positive number")
        if not 1 <= self.rate <= RATE_ONE:
            raise ConfigError(f"{self.kind}: rate {self.rate} is not in 1..2^24")
        if not 1 <= self.steps <= _MAX_STEPS:
            raise ConfigError(f"{self.kind}: {self.steps} steps cannot be booked")
        if self.kind in LATTICE_MECHANISMS:
            self._check_lattice()

    def _check_lattice(self) -> None:
        if self.rate != RATE_ONE:
            raise ConfigError(f"{self.kind}: reads every patient, so its rate is 1")
        if not float(self.sigma * LATTICE_ONE).is_integer() or self.sigma > _MAX_LATTICE_SIGMA:
            raise ConfigError(
                f"{self.kind}: noise {self.sigma} is not a multiple of 2^-16 up to {_MAX_LATTICE_SIGMA}",
                hint="the exact discrete Gaussian needs a whole number of lattice units",
            )

    @property
    def multiplier(self) -> float:
        """Noise over sensitivity: the only form in which the two enter the accounting."""
        return self.sigma / self.sensitivity

    @property
    def q(self) -> float:
        return self.rate / RATE_ONE

    def to_json(self) -> dict[str, str | int]:
        """Reals as decimal strings that read back to the same number."""
        return {
            "kind": self.kind.value,
            "sigma": repr(float(self.sigma)),
            "sensitivity": repr(float(self.sensitivity)),
            "rate": self.rate,
            "steps": self.steps,
        }

    @classmethod
    def from_json(cls, value: object) -> MechanismEvent:
        """Strict: exactly the fields above and the one spelling of each number, else ValueError."""
        if not isinstance(value, Mapping) or set(value) != {"kind", "sigma", "sensitivity", "rate", "steps"}:
            raise ValueError("an event has other fields than it should")
        if type(value["rate"]) is not int or type(value["steps"]) is not int:
            raise ValueError("rate and steps are whole numbers")
        try:
            event = cls(
                kind=Mechanism(value["kind"]),
                sigma=float(value["sigma"]),
                sensitivity=float(value["sensitivity"]),
                rate=value["rate"],
                steps=value["steps"],
            )
        except ConfigError as error:
            raise ValueError(error.message) from error
        if event.to_json() != dict(value):
            raise ValueError("a number is not in its one spelling")
        return event


def dp_sgd_event(*, multiplier: float, clip: float, rate: int, steps: int) -> MechanismEvent:
    """Steps of DP-SGD: one gradient per drawn patient, clipped to `clip`, noise of `multiplier` times the clip."""
    return MechanismEvent(kind=Mechanism.DP_SGD, sigma=multiplier * clip, sensitivity=clip, rate=rate, steps=steps)


def counts_event(sigma: float) -> MechanismEvent:
    """Class counts: a patient's images share a mass of one, so one patient moves the vector by at most 1."""
    return MechanismEvent(kind=Mechanism.CLASS_COUNTS, sigma=sigma, sensitivity=1.0)


def prototypes_event(sigma: float, *, releases: int = 1) -> MechanismEvent:
    """Prototype sums: a patient adds the mean of unit vectors, one per image and cell, so at most 1."""
    return MechanismEvent(kind=Mechanism.PROTOTYPES, sigma=sigma, sensitivity=1.0, steps=releases)


def metrics_event(sigma: float) -> MechanismEvent:
    """A pair of per-class tables (seen, hit): a patient moves each by at most 1, both together by sqrt 2."""
    return MechanismEvent(kind=Mechanism.METRICS, sigma=sigma, sensitivity=math.sqrt(2.0))
