"""Events, and epsilon from a list of events (docs/spec/differential-privacy.md, sections 2 and 6).

The first part of the file states what is booked: one `MechanismEvent` for each release that reads patients. The second
part computes epsilon. Epsilon is always recomputed from the events, never stored and added to, so that the same list
gives the same number at the site, at the auditor and after a restart.

There are two analyses, both by dp-accounting: Renyi (RDP), which is enforced, and the privacy loss distribution (PLD),
which is tighter and is printed beside it. Both hold for different and adaptively chosen *queries*; for adaptively
chosen *parameters* see `filter`. dp-accounting is imported only when something is computed, because the import takes
seconds.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent, NeighboringRelation
    from dp_accounting.pld import PLDAccountant

# Events (section 2). An event states its mechanism completely, so that epsilon follows from the list of events alone,
# and a release function can take its parameters from the event that paid for it. Adjacency: add or remove one unit of
# privacy.

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
    SHARED_SGD = "shared-sgd"


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
    :param rate: probability that a unit takes part in one step, in multiples of 2^-24; `RATE_ONE` is every unit.
    :param steps: how often the mechanism is applied; each application is charged, also one with an empty batch.
    :param honest: for `shared-sgd`, how many independent noises of this sigma are in every sum that may be opened.
    :param dimensions: for `shared-sgd`, how many numbers are released.
    """

    kind: Mechanism
    sigma: float
    sensitivity: float
    rate: int = RATE_ONE
    steps: int = 1
    honest: int = 1
    dimensions: int = 0

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
        if self.kind is Mechanism.SHARED_SGD:
            self._check_shared()
        elif self.honest != 1 or self.dimensions != 0:
            raise ConfigError(f"{self.kind}: its noise is that of one site")

    def _check_lattice(self) -> None:
        if self.rate != RATE_ONE:
            raise ConfigError(f"{self.kind}: reads every patient, so its rate is 1")
        if not float(self.sigma * LATTICE_ONE).is_integer() or self.sigma > _MAX_LATTICE_SIGMA:
            raise ConfigError(
                f"{self.kind}: noise {self.sigma} is not a multiple of 2^-16 up to {_MAX_LATTICE_SIGMA}",
                hint="the exact discrete Gaussian needs a whole number of lattice units",
            )

    def _check_shared(self) -> None:
        """Whole ring units, and enough of them that the sum of several is as good as one (section 4)."""
        if self.rate != RATE_ONE:
            raise ConfigError(f"{self.kind}: every patient takes part, so its rate is 1")
        if not float(self.sigma).is_integer() or not LEAST_SHARED_SIGMA <= self.sigma <= 1 << 26:
            raise ConfigError(f"{self.kind}: noise {self.sigma} is not a whole number of ring units from 3 to 2^26")
        if self.honest < 1 or self.dimensions < 1:
            raise ConfigError(f"{self.kind}: honest survivors and dimensions are at least 1")

    @property
    def multiplier(self) -> float:
        """Noise divided by sensitivity: the cost depends on nothing else of the two (section 2).

        Of shared noise it is that of the whole sum, *inside* which the patient is: see `shared_multiplier`.
        """
        if self.kind is Mechanism.SHARED_SGD:
            return shared_multiplier(self.sigma, self.sensitivity, self.honest, self.dimensions)
        return self.sigma / self.sensitivity

    @property
    def alone(self) -> MechanismEvent:
        """The same event if all other sites collude with the coordinator: only this site's own noise is left."""
        return self if self.kind is not Mechanism.SHARED_SGD else replace(self, honest=1)

    @property
    def q(self) -> float:
        return self.rate / RATE_ONE

    def to_json(self) -> dict[str, str | int]:
        """Reals as decimal strings that read back to the same number (section 5)."""
        shared = {"honest": self.honest, "dimensions": self.dimensions} if self.kind is Mechanism.SHARED_SGD else {}
        return shared | {
            "kind": self.kind.value,
            "sigma": repr(float(self.sigma)),
            "sensitivity": repr(float(self.sensitivity)),
            "rate": self.rate,
            "steps": self.steps,
        }

    @classmethod
    def from_json(cls, value: object) -> MechanismEvent:
        """Strict: exactly the fields above and the one spelling of each number, else ValueError."""
        if not isinstance(value, Mapping) or not {"kind", "sigma", "sensitivity", "rate", "steps"} <= set(value):
            raise ValueError("an event has missing or unknown fields")
        more = {name: value[name] for name in ("honest", "dimensions") if name in value}
        if any(type(number) is not int for number in (value["rate"], value["steps"], *more.values())):
            raise ValueError("rate, steps and numbers of sites are whole numbers")
        try:
            event = cls(
                kind=Mechanism(value["kind"]),
                sigma=float(value["sigma"]),
                sensitivity=float(value["sensitivity"]),
                rate=value["rate"],
                steps=value["steps"],
                **more,
            )
        except ConfigError as error:
            raise ValueError(error.message) from error
        if event.to_json() != dict(value):
            raise ValueError("a number is not in canonical form")
        return event


def dp_sgd_event(*, multiplier: float, clip: float, rate: int, steps: int) -> MechanismEvent:
    """Steps of DP-SGD: one gradient per sampled patient, clipped to `clip`, noise of `multiplier` times the clip.

    Clipping bounds what one patient adds, so the sensitivity is the clip whatever the data are (section 3).
    """
    return MechanismEvent(kind=Mechanism.DP_SGD, sigma=multiplier * clip, sensitivity=clip, rate=rate, steps=steps)


LEAST_SHARED_SIGMA = 3


def shared_multiplier(sigma: float, sensitivity: float, honest: int, dimensions: int) -> float:
    """One over the eps of a sum with `honest` discrete Gaussians: D_alpha <= alpha eps^2 / 2 at every order alpha.

    Kairouz, Liu and Steinke (arXiv 2102.06387), theorem 1 and corollary 1: the sum of discrete Gaussians is not one,
    but close to one; tau says how close, for one coordinate. At sigma = 3 it is 1e-38 already.
    """
    # Theorem 1: one term for each further noise that joins the sum.
    tau = 10 * sum(math.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)) for k in range(1, honest))
    ratio = sensitivity / (math.sqrt(honest) * sigma)
    eps = min(math.sqrt(ratio**2 + tau * dimensions / 2), ratio + tau * math.sqrt(dimensions))
    return 1.0 / eps


def shared_event(*, sigma: int, units: int, honest: int, dimensions: int, steps: int = 1) -> MechanismEvent:
    """Steps over all patients whose noise is shared: each gradient is at most `units` ring units long, and `sigma` ring
    units of noise are added by every site."""
    return MechanismEvent(
        kind=Mechanism.SHARED_SGD,
        sigma=float(sigma),
        sensitivity=float(units),
        steps=steps,
        honest=honest,
        dimensions=dimensions,
    )


def counts_event(sigma: float) -> MechanismEvent:
    """Class counts: the m images of a patient count 1/m each, so one patient changes the vector by at most 1."""
    return MechanismEvent(kind=Mechanism.CLASS_COUNTS, sigma=sigma, sensitivity=1.0)


def prototypes_event(sigma: float, *, releases: int = 1) -> MechanismEvent:
    """Prototype sums: a patient adds the mean of unit vectors, one for each image, so at most 1."""
    return MechanismEvent(kind=Mechanism.PROTOTYPES, sigma=sigma, sensitivity=1.0, steps=releases)


def metrics_event(sigma: float) -> MechanismEvent:
    """A pair of tables per class (seen, correct): a patient changes each by at most 1, both together by sqrt 2."""
    return MechanismEvent(kind=Mechanism.METRICS, sigma=sigma, sensitivity=math.sqrt(2.0))


# Epsilon (section 6).

ACCOUNTANT: Final = f"dp-accounting {version('dp-accounting')}"

ORDERS: Final[tuple[float, ...]] = (
    *(1 + step / 10 for step in range(2, 100)),
    *(float(order) for order in range(11, 64)),
    *(float(order) for order in range(64, 256, 8)),
    *(float(order) for order in range(256, 1025, 64)),
)


class _QuietOrders(logging.Filter):
    """dp-accounting warns for each low fractional order that it omits; to omit an order is always safe."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "_compute_log_a_frac" not in record.getMessage()


logging.getLogger("absl").addFilter(_QuietOrders())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Both analyses of one history. `rdp`, at its best `order`, and `pld`; the filter has its own fixed order."""

    delta: float
    rdp: float
    order: float
    pld: float


Parts = tuple[tuple[float, int, int], ...]
"""A history as (multiplier, rate, steps), equal mechanisms added: its cost depends on nothing else."""


def merged(history: Iterable[MechanismEvent]) -> Parts:
    return added((), history)


def added(parts: Parts, events: Iterable[MechanismEvent]) -> Parts:
    """The history with more events."""
    steps: Counter[tuple[float, int]] = Counter({(multiplier, rate): count for multiplier, rate, count in parts})
    for event in events:
        steps[event.multiplier, event.rate] += event.steps
    return tuple((multiplier, rate, count) for (multiplier, rate), count in sorted(steps.items()))


def covered(parts: Parts, plan: Parts) -> bool:
    """Is every mechanism of a history in the plan, as often as the plan has it, with the same or less noise there?

    More noise than planned is a function of the planned output, so it reveals nothing more.
    """
    left = list(plan)
    for multiplier, rate, steps in sorted(parts):
        # From little noise to much: what covers this one covers all that follow as well, so any choice is a good one.
        for index in reversed(range(len(left))):
            planned_multiplier, planned_rate, available = left[index]
            if planned_rate == rate and planned_multiplier <= multiplier:
                used = min(steps, available)
                steps -= used
                left[index] = (planned_multiplier, planned_rate, available - used)
        if steps:
            return False
    return True


class AccountedFigures:
    """What was computed of public settings: divergences of one step, and epsilons by PLD. The same on every machine.

    A command that only shows figures takes those of an earlier one (`recall`), because dp-accounting takes seconds to
    load and to compute. Whoever books or admits computes for itself.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[float, ...]] = {}

    @property
    def count(self) -> int:
        return len(self._found)

    def of(self, asked: tuple[Any, ...], compute: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        if asked not in self._found:
            self._found[asked] = compute()
        return self._found[asked]

    def to_json(self) -> dict[str, Any]:
        return {"accountant": ACCOUNTANT, "figures": [[asked, found] for asked, found in self._found.items()]}

    def recall(self, kept: Any) -> int:
        """Take what `to_json` gave, and return how much that was. That of another version is left alone.

        :raises ValueError: or TypeError or KeyError, if it is of another form.
        """
        if not isinstance(kept, dict) or kept.get("accountant") != ACCOUNTANT:
            return 0
        figures = {_tuples(asked): tuple(map(float, found)) for asked, found in kept["figures"]}
        self._found = figures | self._found
        return len(figures)


FIGURES: Final = AccountedFigures()


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _rdp_of_one_step(multiplier: float, rate: int, orders: tuple[float, ...]) -> tuple[float, ...]:
    return FIGURES.of(("rdp", multiplier, rate, orders), lambda: _computed_rdp(multiplier, rate, orders))


def _computed_rdp(multiplier: float, rate: int, orders: tuple[float, ...]) -> tuple[float, ...]:
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(orders=list(orders), neighboring_relation=_adjacency())
    accountant.compose(_dp_event(multiplier, rate))
    # dp-accounting returns the orders in the sequence given; infinite values are orders that it omits.
    return tuple(float(value) for value in accountant.rdp)


def rdp_curve(history: Iterable[MechanismEvent], orders: Sequence[float] = ORDERS) -> NDArray[np.float64]:
    """Sum of the Renyi divergences of all events, one value for each order: RDP composes by addition."""
    return curve_of(merged(history), orders)


def curve_of(parts: Parts, orders: Sequence[float]) -> NDArray[np.float64]:
    total = np.zeros(len(orders), dtype=np.float64)
    # Composition (Mironov 2017, proposition 1): divergences of one order add up, also for adaptively chosen queries.
    for multiplier, rate, steps in parts:
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
    # A divergence so small that the total variation distance is below delta needs no epsilon at all.
    bounds = np.where(delta**2 + np.expm1(-curve) > 0, 0.0, curve + [conversion(order, delta) for order in ORDERS])
    best = int(np.argmin(bounds))
    epsilon = float(bounds[best])
    return 0.0 if epsilon < 0 else epsilon, ORDERS[best]  # not max(): it would turn a NaN into zero


def pld_epsilon(history: Iterable[MechanismEvent], delta: float) -> float:
    """Numerical composition of privacy loss distributions, rounded towards a larger epsilon."""
    parts = merged(history)
    if not parts:
        return 0.0
    return FIGURES.of(("pld", parts, delta), lambda: (float(_composed(parts).get_epsilon(delta)),))[0]


@lru_cache(maxsize=8)
def _composed(parts: Parts) -> PLDAccountant:
    """Cached, because it takes seconds and the sites of an experiment all have the same history."""
    from dp_accounting import pld

    accountant = pld.PLDAccountant(_adjacency())
    for multiplier, rate, steps in parts:
        accountant.compose(_dp_event(multiplier, rate), steps)
    return accountant


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
