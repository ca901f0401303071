"""The stopping rule: a Renyi filter at one order that is fixed before anything is spent.

Parameters may then depend on earlier noisy results (a rate from noisy counts, a later change of sigma) and the cap
still holds (Feldman and Zrnic, arXiv 2008.11193). Taking the best order as one goes along, or stopping where a PLD
curve meets the cap, has no such proof; those numbers are printed, never enforced.
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
    """Lets events through while RDP at `order` stays under the cap minus the conversion term."""

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
        if conversion(self.order, self.delta) >= self.cap:
            raise ConfigError(
                f"at order {self.order:g} the conversion to delta {self.delta:g} alone exceeds the cap {self.cap:g}",
                hint="choose a larger order, or let the planner choose it",
            )

    def divergence(self, events: Iterable[MechanismEvent]) -> float:
        return float(rdp_curve(events, (self.order,))[0])

    def epsilon(self, divergence: float) -> float:
        """Epsilon that a total divergence stands for; nothing spent is zero."""
        if divergence == 0:
            return 0.0
        epsilon = divergence + conversion(self.order, self.delta)
        # Not max(): that would turn a NaN into zero.
        return 0.0 if epsilon < 0 else epsilon

    def admit(self, divergence: float, events: Sequence[MechanismEvent]) -> float:
        """The total divergence after `events`, or BudgetExhausted."""
        after = divergence + self.divergence(events)
        epsilon = self.epsilon(after)
        # Written so that a NaN is refused as well.
        if not epsilon <= self.cap:
            raise BudgetExhausted(
                f"this would bring epsilon from {self.epsilon(divergence):.3f} to {epsilon:.3f}, "
                f"past the cap of {self.cap:g} at delta {self.delta:g}",
                hint="the site stops contributing here; nothing was trained and nothing is sent",
            )
        return after


def choose_order(schedule: Sequence[MechanismEvent], *, cap: float, delta: float) -> float:
    """The order at which most repetitions of the planned schedule fit under the cap."""
    if not schedule:
        raise ConfigError("an order is chosen for a planned schedule, and the schedule is empty")
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.array([cap - conversion(order, delta) for order in ORDERS]) / rdp_curve(schedule)
    best = int(np.argmax(np.where(np.isfinite(room), room, -np.inf)))
    if not room[best] > 0:
        raise ConfigError(f"no order allows anything under a cap of {cap:g} at delta {delta:g}")
    return ORDERS[best]
