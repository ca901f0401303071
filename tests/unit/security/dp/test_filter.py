"""The filter stops before the cap at the order fixed in advance, whatever order would be best by then."""

from __future__ import annotations

import pytest

from lazaret.errors import BudgetExhausted, ConfigError
from security.dp.accountant import conversion, counts_event, dp_sgd_event, prototypes_event, rate_at_least, rdp_epsilon
from security.dp.filter import RenyiFilter, choose_order

DELTA = 1e-5
ROUND = (dp_sgd_event(multiplier=1.2, clip=1.0, rate=rate_at_least(0.02), steps=50),)


def test_it_lets_through_what_fits_and_stops_before_the_cap() -> None:
    rule = RenyiFilter(order=choose_order(ROUND * 40, cap=3.0, delta=DELTA), delta=DELTA, cap=3.0)
    total, rounds = 0.0, 0
    while rule.epsilon(total + rule.divergence(ROUND)) <= 3.0:
        total = rule.admit(total, ROUND)
        rounds += 1
    assert rounds > 1
    with pytest.raises(BudgetExhausted, match="above the cap of 3"):
        rule.admit(total, ROUND)
    with pytest.raises(BudgetExhausted):
        rule.admit(float("nan"), ROUND)


def test_the_chosen_order_loses_nothing_on_the_planned_schedule() -> None:
    planned = ROUND * 60
    best, _ = rdp_epsilon(planned, DELTA)
    rule = RenyiFilter(order=choose_order(planned, cap=best, delta=DELTA), delta=DELTA, cap=best * 1.0000001)
    assert rule.epsilon(rule.admit(0.0, planned)) == pytest.approx(best)


def test_another_schedule_than_planned_costs_more_at_the_fixed_order_and_never_less() -> None:
    rule = RenyiFilter(order=choose_order(ROUND * 60, cap=8.0, delta=DELTA), delta=DELTA, cap=8.0)
    other = (counts_event(20.0), prototypes_event(30.0))
    assert rule.epsilon(rule.divergence(other)) >= rdp_epsilon(other, DELTA)[0]


def test_nothing_spent_is_zero() -> None:
    assert RenyiFilter(order=8.0, delta=DELTA, cap=3.0).epsilon(0.0) == 0.0


@pytest.mark.parametrize(
    "change", [{"order": 8.05}, {"delta": 0.0}, {"delta": 1.0}, {"cap": 0.0}, {"cap": float("inf")}, {"order": 1.3}]
)
def test_impossible_rules_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RenyiFilter(**{"order": 8.0, "delta": DELTA, "cap": 3.0, **change})


def test_no_order_fits_a_cap_below_every_conversion() -> None:
    assert min(conversion(order, DELTA) for order in (64.0, 1024.0)) > 0.001
    with pytest.raises(ConfigError):
        choose_order(ROUND, cap=0.001, delta=DELTA)
    with pytest.raises(ConfigError, match="empty"):
        choose_order([], cap=1.0, delta=DELTA)
