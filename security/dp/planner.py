"""What planned rounds will cost, and which noise fits a wanted epsilon. Reads no data and no ledger file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from security.dp.accountant import Spent, rdp_epsilon, spent
from security.dp.events import MechanismEvent, counts_event, dp_sgd_event, metrics_event, prototypes_event
from security.dp.filter import RenyiFilter, choose_order
from security.dp.ledger_entries import LedgerState
from security.errors import BudgetExhausted, ConfigError

_LARGEST_MULTIPLIER = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A whole run, fixed before the data are touched.

    :param multiplier: DP-SGD noise over the clip.
    :param counts_sigma: noise of the class counts, released before round 1; None without them.
    :param prototypes_sigma: noise of each prototype release; None without prototypes.
    :param prototypes_every: rounds between two prototype releases.
    :param metrics_sigma: noise of one local validation in each round; None without it.
    """

    rounds: int
    steps: int
    rate: int
    multiplier: float
    clip: float
    counts_sigma: float | None = 5.0
    prototypes_sigma: float | None = 10.0
    prototypes_every: int = 5
    metrics_sigma: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.prototypes_every < 1:
            raise ConfigError("a schedule has at least one round, and a refresh at least one round long")

    def refreshes(self, round_number: int) -> bool:
        """Are prototypes released in this round (counted from 1)?"""
        return self.prototypes_sigma is not None and (round_number - 1) % self.prototypes_every == 0

    def round_events(self, round_number: int, *, first: bool | None = None) -> tuple[MechanismEvent, ...]:
        """What to reserve for one round, in the order of use.

        :param first: whether the site has nothing released yet, as in its first round or after its memory was lost;
            by default it is so in round 1.
        """
        first = round_number == 1 if first is None else first
        events: list[MechanismEvent] = []
        if first and self.counts_sigma is not None:
            events.append(counts_event(self.counts_sigma))
        if self.prototypes_sigma is not None and (first or self.refreshes(round_number)):
            # A first time needs one sum per class to split, before the first assignment.
            events += [prototypes_event(self.prototypes_sigma)] * (2 if first else 1)
        events.append(dp_sgd_event(multiplier=self.multiplier, clip=self.clip, rate=self.rate, steps=self.steps))
        if self.metrics_sigma is not None:
            events.append(metrics_event(self.metrics_sigma))
        return tuple(events)

    def events(self, first: int = 1) -> tuple[MechanismEvent, ...]:
        return tuple(event for number in range(first, self.rounds + 1) for event in self.round_events(number))


def cost(schedule: Schedule, *, delta: float, history: Sequence[MechanismEvent] = ()) -> Spent:
    """Epsilon after the whole schedule, on top of what was spent before."""
    return spent((*history, *schedule.events()), delta)


def order_for(schedule: Schedule, *, cap: float, delta: float) -> float:
    """The order to fix in a new ledger."""
    return choose_order(schedule.events(), cap=cap, delta=delta)


def rounds_affordable(state: LedgerState, schedule: Schedule, *, first: int = 1) -> int:
    """How many rounds, from `first` on, the ledger's filter lets through before it stops."""
    rule, divergence = state.terms.filter(), state.divergence
    for number in range(first, schedule.rounds + 1):
        try:
            divergence = rule.admit(divergence, schedule.round_events(number))
        except BudgetExhausted:
            return number - first
    return max(0, schedule.rounds - first + 1)


def propose_multiplier(schedule: Schedule, *, epsilon: float, delta: float, state: LedgerState | None = None) -> float:
    """The smallest DP-SGD noise multiplier, in hundredths, with which the schedule stays within epsilon.

    With a ledger the rule is that ledger's filter on top of what it holds; without one, the best order.
    """
    try:
        return least_multiplier(schedule, _within(epsilon, delta, state))
    except ConfigError as error:
        raise ConfigError(
            f"no amount of gradient noise brings this schedule to epsilon {epsilon:g} at delta {delta:g}",
            hint=error.hint,
        ) from error


def least_multiplier(schedule: Schedule, within: Callable[[Sequence[MechanismEvent]], bool]) -> float:
    """The smallest DP-SGD noise multiplier, in hundredths, with which all events of the schedule are within bounds."""

    def fits(hundredths: int) -> bool:
        return within(replace(schedule, multiplier=hundredths / 100).events())

    low, high = 0, 100
    while not fits(high):
        low, high = high, 2 * high
        if high > 100 * _LARGEST_MULTIPLIER:
            raise ConfigError(
                "no amount of gradient noise is enough",
                hint="fewer prototype releases, or more noise on prototypes, counts and metrics",
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high / 100


def _within(epsilon: float, delta: float, state: LedgerState | None) -> Callable[[Sequence[MechanismEvent]], bool]:
    if state is None:
        return lambda events: rdp_epsilon(events, delta)[0] <= epsilon
    rule: RenyiFilter = state.terms.filter()
    spent_before = state.divergence
    return lambda events: rule.epsilon(spent_before + rule.divergence(events)) <= min(epsilon, rule.cap)
