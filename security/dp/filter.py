"""The rule that stops a site before its limit, for all bookings of a ledger and for those of one run.

docs/spec/differential-privacy.md, section 6. A history is admitted if it passes at least one of several tests. Each
test has a fixed share of delta, and each is valid by itself at its share:

    plan      the bookings are part of a schedule that was fixed before anything was read, and the whole schedule costs
              no more than the cap by PLD (share 1/2)
    order     Renyi divergence at one order, fixed for the planned schedule (share 3/8)
    orders    Renyi divergence at one of `PUBLIC_ORDERS`, the same for everybody (share 1/8 for all of them together)

Why one passed test is enough. Whatever an adversary saw and chose, the history that results has passed some test. The
histories that end with a given test passed are among those that this test alone would admit, so they add at most its
share to delta; the shares add up to delta. So no order has to be lucky, and nothing has to be changed later: a ledger
whose order is unlucky continues at a public order. Each test only grows with the history, so the smallest of them does
too, and nothing is refunded.

Why the plan may be judged by PLD. PLD has no proof for parameters that depend on earlier results. A plan has none: its
mechanisms are fixed. The output of each is a function of a sample from its dominating pair, so what is seen is a
function of independent samples, in whatever order they are used and wherever the run stops.

Why one fixed order is valid for everything else: Feldman and Zrnic, arXiv 2008.11193. There is no such proof for the
best order in hindsight; that number is printed, never enforced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import BudgetExhausted, ConfigError
from security.dp.accountant import (
    ORDERS,
    Mechanism,
    MechanismEvent,
    Parts,
    added,
    conversion,
    covered,
    curve_of,
    merged,
    pld_epsilon,
    rdp_curve,
)

MOST_DELTA: Final = 1e-3
"""Delta is the chance that a patient is not protected at all. One in a thousand is the most that is ever accepted."""

PLAN_SHARE: Final = 1 / 2
ORDER_SHARE: Final = 3 / 8
PUBLIC_ORDERS: Final = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 32.0, 48.0, 64.0, 256.0)
PUBLIC_SHARE: Final = (1 - PLAN_SHARE - ORDER_SHARE) / len(PUBLIC_ORDERS)


def check_delta(delta: float, *, least_patients: int | None = None, where: str | None = None) -> None:
    """:raises ConfigError: unless delta is at most `MOST_DELTA`, and at most one over the public number of patients."""
    if not 0 < delta <= MOST_DELTA:
        raise ConfigError(
            f"delta {delta:g} is not in (0, {MOST_DELTA:g}]",
            where=where,
            hint="delta is the chance of no protection at all; 1e-5 is usual",
        )
    if least_patients is not None and delta > 1 / least_patients:
        raise ConfigError(
            f"delta {delta:g} is above one in {least_patients}, the number of patients that a site has at least",
            where=where,
            hint="with such a delta a site could publish the record of one of its patients, chosen at random",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSchedule:
    """A schedule that was fixed before anything was read, and what all of it costs.

    :param events: equal events are one event with more steps.
    :param epsilon: of all events, by PLD, at `PLAN_SHARE` of the ledger's delta.
    """

    events: tuple[MechanismEvent, ...]
    epsilon: float

    @classmethod
    def of(cls, events: Sequence[MechanismEvent], *, delta: float) -> Self:
        """Takes a second: PLD is computed once here, and never again by whoever only reads the ledger."""
        if shares_noise(events):
            raise ConfigError("PLD has no proof for sums of discrete noise, so a plan with shared noise has none")
        return cls(events=_condensed(events), epsilon=planned_epsilon(events, delta))

    @property
    def parts(self) -> Parts:
        return merged(self.events)

    def to_json(self) -> dict[str, Any]:
        return {"events": [event.to_json() for event in self.events], "epsilon": repr(self.epsilon)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Strict, else ValueError."""
        if not isinstance(value, dict) or set(value) != {"events", "epsilon"}:
            raise ValueError("a plan has missing or unknown fields")
        epsilon = float(value["epsilon"])
        if repr(epsilon) != value["epsilon"] or not epsilon > 0:
            raise ValueError("the cost of a plan is not in canonical form")
        return cls(events=tuple(MechanismEvent.from_json(event) for event in value["events"]), epsilon=epsilon)


def shares_noise(events: Sequence[MechanismEvent]) -> bool:
    return any(event.kind is Mechanism.SHARED_SGD for event in events)


def pinned(events: Sequence[MechanismEvent], *, delta: float) -> PinnedSchedule | None:
    """The plan for a ledger's or a run's first line; None where PLD has no proof, so that Renyi divergence decides."""
    return None if shares_noise(events) else PinnedSchedule.of(events, delta=delta)


def planned_epsilon(events: Sequence[MechanismEvent], delta: float) -> float:
    """What a schedule costs that is fixed in advance and kept, rounded up in the sixth digit."""
    return math.ceil(pld_epsilon(events, PLAN_SHARE * delta) * 1e6) / 1e6


def _condensed(events: Sequence[MechanismEvent]) -> tuple[MechanismEvent, ...]:
    steps: dict[MechanismEvent, int] = {}
    for event in events:
        kind = replace(event, steps=1)
        steps[kind] = steps.get(kind, 0) + event.steps
    return tuple(replace(kind, steps=count) for kind, count in steps.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFilter:
    """Admits events while at least one test stays within `cap`.

    :param order: Renyi order, chosen once for the planned schedule.
    :param cap: the largest epsilon; an event that would exceed it is refused before any data are read.
    """

    order: float
    delta: float
    cap: float
    planned: PinnedSchedule | None = None

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if not (math.isfinite(self.cap) and self.cap > 0):
            raise ConfigError(f"epsilon cap {self.cap} is not a positive number")
        if self.order not in ORDERS:
            raise ConfigError(f"order {self.order} is not one the accountant computes")
        # Otherwise the first event, however small, would already exceed the cap.
        if min(_conversions(self.order, self.delta)) >= self.cap:
            raise ConfigError(
                f"a cap of {self.cap:g} is too small: the conversion to delta {self.delta:g} alone exceeds it",
                hint="a larger cap or a larger delta",
            )

    def epsilon(self, parts: Parts) -> float:
        """Epsilon of a history, by the test that shows least; zero if nothing is spent."""
        if not parts:
            return 0.0
        # One value for each Renyi test, the pinned order first: the smallest counts, as any one passed test admits.
        curve = curve_of(parts, (self.order, *PUBLIC_ORDERS))
        epsilon = float(np.min(curve + _conversions(self.order, self.delta)))
        # Not max(): it would turn a NaN into zero, and the cap would never be reached.
        epsilon = 0.0 if epsilon < 0 else epsilon
        # The plan's cost is that of the whole plan, so that it can only help while Renyi shows more; `covered` asks
        # whether what was booked is still a part of it.
        if self.planned is not None and not epsilon <= self.planned.epsilon and covered(parts, self.planned.parts):
            return self.planned.epsilon
        return epsilon

    def admit(self, parts: Parts, events: Sequence[MechanismEvent]) -> Parts:
        """The history after `events`, or BudgetExhausted."""
        after = added(parts, events)
        epsilon = self.epsilon(after)
        # Written so that a NaN is refused as well.
        if not epsilon <= self.cap:
            raise BudgetExhausted(
                f"this would raise epsilon from {self.epsilon(parts):.3f} to {epsilon:.3f}, "
                f"above the cap of {self.cap:g} at delta {self.delta:g}",
                hint="the site stops contributing here; nothing was trained and nothing is sent",
            )
        return after


def _conversions(order: float, delta: float) -> NDArray[np.float64]:
    """What each Renyi test adds to its divergence: the conversion to epsilon at the test's share of delta."""
    shares = [(order, ORDER_SHARE), *((public, PUBLIC_SHARE) for public in PUBLIC_ORDERS)]
    return np.array([conversion(alpha, share * delta) for alpha, share in shares])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """What one run may cost, and the schedule that it was begun with; fixed before its first booking.

    :param order: the run's own best order, which is not that of the ledger.
    """

    run: str
    epsilon: float
    order: float
    planned: PinnedSchedule | None

    @classmethod
    def of(cls, run: str, events: Sequence[MechanismEvent], *, epsilon: float, delta: float) -> Self:
        order = choose_order(events, cap=epsilon, delta=delta)
        return cls(run=run, epsilon=epsilon, order=order, planned=pinned(events, delta=delta))

    def filter(self, delta: float) -> BudgetFilter:
        return BudgetFilter(order=self.order, delta=delta, cap=self.epsilon, planned=self.planned)

    def to_json(self) -> dict[str, Any]:
        order, epsilon = repr(float(self.order)), repr(float(self.epsilon))
        plan = None if self.planned is None else self.planned.to_json()
        return {"run": self.run, "epsilon": epsilon, "order": order, "plan": plan}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Strict, else ValueError."""
        run, epsilon, order = value["run"], float(value["epsilon"]), float(value["order"])
        planned = None if value["plan"] is None else PinnedSchedule.from_json(value["plan"])
        terms = cls(run=run, epsilon=epsilon, order=order, planned=planned)
        if not isinstance(run, str) or not 0 < len(run) <= 200 or terms.to_json() != value:
            raise ValueError("the terms of a run are not in canonical form")
        return terms


def choose_order(schedule: Sequence[MechanismEvent], *, cap: float, delta: float) -> float:
    """The order at which the planned schedule fits under the cap most often.

    :param schedule: all events that are planned; they are not booked by this, and the real ones may differ.
    """
    if not schedule:
        raise ConfigError("an order is chosen for a planned schedule, and the schedule is empty")
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.array([cap - conversion(order, ORDER_SHARE * delta) for order in ORDERS]) / rdp_curve(schedule)
    best = int(np.argmax(np.where(np.isfinite(room), room, -np.inf)))
    if not room[best] > 0:
        raise ConfigError(f"no order allows anything under a cap of {cap:g} at delta {delta:g}")
    return ORDERS[best]
