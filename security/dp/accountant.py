"""History to epsilon, pure: the same list of events always gives the same number.

Epsilon is recomputed from the events and never carried along. Two analyses by dp-accounting: Renyi (RDP), which is
what gets enforced, and the privacy loss distribution (PLD), which is tighter and is printed as a second opinion.
Both hold for heterogeneous, adaptively chosen *queries*; for adaptively chosen *parameters* see `filter.py`.

dp-accounting is imported when something is computed: it takes seconds, and most who name an event compute nothing.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent, NeighboringRelation



# ----------------------------------------
# What is booked: one frozen event for each release that reads patients (docs/spec/differential-privacy.md, section 2).
#
# An event states the mechanism completely, so that epsilon follows from the list of events alone and a release
# function can take its parameters from the event that paid for it. Adjacency is add-or-remove one unit (patient,
# lesion or image).

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


ACCOUNTANT: Final = f"dp-accounting {version('dp-accounting')}"

ORDERS: Final[tuple[float, ...]] = (
    *(1 + step / 10 for step in range(2, 100)),
    *(float(order) for order in range(11, 64)),
    *(float(order) for order in range(64, 256, 8)),
    *(float(order) for order in range(256, 1025, 64)),
)


class _QuietOrders(logging.Filter):
    """dp-accounting warns for each low fractional order that it leaves out; leaving out an order is always safe."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "_compute_log_a_frac" not in record.getMessage()


logging.getLogger("absl").addFilter(_QuietOrders())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Both opinions on one history. `rdp` is the one that counts."""

    delta: float
    rdp: float
    order: float
    pld: float


def merged(history: Iterable[MechanismEvent]) -> tuple[tuple[float, int, int], ...]:
    """(multiplier, rate, steps) with equal mechanisms added up: cost depends on nothing else, nor on their order."""
    steps: Counter[tuple[float, int]] = Counter()
    for event in history:
        steps[event.multiplier, event.rate] += event.steps
    return tuple((multiplier, rate, count) for (multiplier, rate), count in sorted(steps.items()))


@lru_cache(maxsize=4096)
def _rdp_of_one_step(multiplier: float, rate: int, orders: tuple[float, ...]) -> tuple[float, ...]:
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(orders=list(orders), neighboring_relation=_adjacency())
    accountant.compose(_dp_event(multiplier, rate))
    # dp-accounting gives its orders back sorted the way they went in; infinite entries are orders left out.
    return tuple(float(value) for value in accountant.rdp)


def rdp_curve(history: Iterable[MechanismEvent], orders: Sequence[float] = ORDERS) -> NDArray[np.float64]:
    """Sum of the Renyi divergences of all events, one value for each order."""
    total = np.zeros(len(orders), dtype=np.float64)
    for multiplier, rate, steps in merged(history):
        total += steps * np.array(_rdp_of_one_step(multiplier, rate, tuple(orders)))
    return total


def conversion(order: float, delta: float) -> float:
    """What to add to RDP(order) to get epsilon at delta (Canonne, Kamath and Steinke 2020, proposition 12)."""
    return math.log1p(-1.0 / order) - math.log(delta * order) / (order - 1.0)


def rdp_epsilon(history: Iterable[MechanismEvent], delta: float) -> tuple[float, float]:
    """(epsilon, best order). Zero for an empty history."""
    curve = rdp_curve(history)
    if not curve.any():
        return 0.0, ORDERS[-1]
    from dp_accounting import rdp

    epsilon, order = rdp.compute_epsilon(list(ORDERS), list(curve), delta)
    return float(epsilon), float(order)


def pld_epsilon(history: Iterable[MechanismEvent], delta: float) -> float:
    """Numerical composition of privacy loss distributions, pessimistic rounding."""
    parts = merged(history)
    return _pld_epsilon(parts, delta) if parts else 0.0


@lru_cache(maxsize=64)
def _pld_epsilon(parts: tuple[tuple[float, int, int], ...], delta: float) -> float:
    """Kept, because it takes seconds and the sites of an experiment all have the same history."""
    from dp_accounting import pld

    accountant = pld.PLDAccountant(_adjacency())
    for multiplier, rate, steps in parts:
        accountant.compose(_dp_event(multiplier, rate), steps)
    return float(accountant.get_epsilon(delta))


def spent(history: Sequence[MechanismEvent], delta: float) -> Spent:
    epsilon, order = rdp_epsilon(history, delta)
    return Spent(delta=delta, rdp=epsilon, order=order, pld=pld_epsilon(history, delta))


def _adjacency() -> NeighboringRelation:
    from dp_accounting import NeighboringRelation

    return NeighboringRelation.ADD_OR_REMOVE_ONE


def _dp_event(multiplier: float, rate: int) -> DpEvent:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    gaussian = GaussianDpEvent(multiplier)
    return gaussian if rate == RATE_ONE else PoissonSampledDpEvent(rate / RATE_ONE, gaussian)
