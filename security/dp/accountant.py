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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from security.dp.events import RATE_ONE, MechanismEvent

if TYPE_CHECKING:
    from dp_accounting import DpEvent, NeighboringRelation

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
