"""The rule that stops a site: a Renyi filter at one order that is fixed before anything is spent.

docs/spec/differential-privacy.md, section 6. With a fixed order, parameters may depend on earlier noisy results (a rate
from noisy counts, a later change of sigma) and the cap still holds (Feldman and Zrnic, arXiv 2008.11193). There is no
such proof for the best order in hindsight, or for stopping where a PLD curve meets the cap; those numbers are printed,
never enforced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lazaret.errors import BudgetExhausted, ConfigError
from security.dp.accountant import ORDERS, MechanismEvent, conversion, rdp_curve


@dataclass(frozen=True, slots=True, kw_only=True)
class RenyiFilter:
    """Admits events while RDP at `order`, plus the conversion to epsilon at `delta`, does not exceed `cap`.

    :param order: Renyi order; chosen once for the planned schedule, and recorded in the ledger's first line.
    :param cap: the largest epsilon; an event that would exceed it is refused before any data are read.
    """

    order: float
    delta: float
    cap: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta {self.delta} is not in (0, 1)")
        if not (math.isfinite(self.cap) and self.cap > 0):
            raise ConfigError(f"epsilon cap {self.cap} is not a positive number")
        if self.order not in ORDERS:
            raise ConfigError(f"order {self.order} is not one the accountant computes")
        # Otherwise the first event, however small, would already exceed the cap.
        if conversion(self.order, self.delta) >= self.cap:
            raise ConfigError(
                f"at order {self.order:g} the conversion to delta {self.delta:g} alone exceeds the cap {self.cap:g}",
                hint="choose a larger order, or let the planner choose it",
            )

    def divergence(self, events: Iterable[MechanismEvent]) -> float:
        return float(rdp_curve(events, (self.order,))[0])

    def epsilon(self, divergence: float) -> float:
        """Epsilon of a total divergence; zero if nothing is spent."""
        if divergence == 0:
            return 0.0
        epsilon = divergence + conversion(self.order, self.delta)
        # Not max(): it would turn a NaN into zero, and the cap would never be reached.
        return 0.0 if epsilon < 0 else epsilon

    def admit(self, divergence: float, events: Sequence[MechanismEvent]) -> float:
        """The total divergence after `events`, or BudgetExhausted."""
        after = divergence + self.divergence(events)
        epsilon = self.epsilon(after)
        # Written so that a NaN is refused as well.
        if not epsilon <= self.cap:
            raise BudgetExhausted(
                f"this would raise epsilon from {self.epsilon(divergence):.3f} to {epsilon:.3f}, "
                f"above the cap of {self.cap:g} at delta {self.delta:g}",
                hint="the site stops contributing here; nothing was trained and nothing is sent",
            )
        return after


def choose_order(schedule: Sequence[MechanismEvent], *, cap: float, delta: float) -> float:
    """The order at which the planned schedule fits under the cap most often.

    :param schedule: all events that are planned; they are not booked by this, and the real ones may differ.
    """
    if not schedule:
        raise ConfigError("an order is chosen for a planned schedule, and the schedule is empty")
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.array([cap - conversion(order, delta) for order in ORDERS]) / rdp_curve(schedule)
    best = int(np.argmax(np.where(np.isfinite(room), room, -np.inf)))
    if not room[best] > 0:
        raise ConfigError(f"no order allows anything under a cap of {cap:g} at delta {delta:g}")
    return ORDERS[best]
