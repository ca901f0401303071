"""The filter stops before the cap by the test that shows least, and no choice of an order traps a site."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lazaret.errors import BudgetExhausted, ConfigError
from security.dp import filter as filter_module
from security.dp.accountant import (
    Parts,
    added,
    conversion,
    counts_event,
    covered,
    dp_sgd_event,
    merged,
    pld_epsilon,
    prototypes_event,
    rate_at_least,
    rdp_curve,
    rdp_epsilon,
)
from security.dp.filter import (
    ORDER_SHARE,
    PLAN_SHARE,
    PUBLIC_ORDERS,
    PUBLIC_SHARE,
    BudgetFilter,
    PinnedSchedule,
    RunTerms,
    check_delta,
    choose_order,
)

DELTA = 1e-5
ROUND = (dp_sgd_event(multiplier=1.2, clip=1.0, rate=rate_at_least(0.02), steps=50),)


def test_the_shares_of_delta_add_up_to_delta() -> None:
    assert pytest.approx(1.0) == PLAN_SHARE + ORDER_SHARE + len(PUBLIC_ORDERS) * PUBLIC_SHARE


def test_it_lets_through_what_fits_and_stops_before_the_cap() -> None:
    rule = BudgetFilter(order=choose_order(ROUND * 40, cap=3.0, delta=DELTA), delta=DELTA, cap=3.0)
    total: Parts = ()
    rounds = 0
    while rule.epsilon(added(total, ROUND)) <= 3.0:
        total = rule.admit(total, ROUND)
        rounds += 1
    assert rounds > 1
    with pytest.raises(BudgetExhausted, match="above the cap of 3"):
        rule.admit(total, ROUND)


def test_a_figure_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_module, "curve_of", lambda parts, orders: np.full(len(orders), np.nan))
    with pytest.raises(BudgetExhausted):
        BudgetFilter(order=8.0, delta=DELTA, cap=3.0).admit((), ROUND)


def test_every_test_is_valid_at_its_share_and_the_least_of_them_counts() -> None:
    planned = ROUND * 60
    rule = BudgetFilter(order=8.0, delta=DELTA, cap=20.0)
    shown = [rdp_curve(planned, (8.0,))[0] + conversion(8.0, ORDER_SHARE * DELTA)]
    shown += [rdp_curve(planned, (order,))[0] + conversion(order, PUBLIC_SHARE * DELTA) for order in PUBLIC_ORDERS]
    assert rule.epsilon(merged(planned)) == pytest.approx(min(shown))
    with_plan = replace(rule, planned=PinnedSchedule.of(planned, delta=DELTA))
    assert with_plan.epsilon(merged(planned)) == pytest.approx(pld_epsilon(planned, PLAN_SHARE * DELTA), abs=1e-5)
    assert pld_epsilon(planned, DELTA) < with_plan.epsilon(merged(planned)) < rdp_epsilon(planned, DELTA)[0]


def test_what_is_not_in_the_plan_is_judged_without_it() -> None:
    planned = ROUND * 40
    rule = BudgetFilter(order=8.0, delta=DELTA, cap=20.0, planned=PinnedSchedule.of(planned, delta=DELTA))
    without = replace(rule, planned=None)
    once_more = merged(ROUND * 41)
    assert rule.epsilon(merged(planned)) < without.epsilon(merged(planned))
    assert rule.epsilon(once_more) == without.epsilon(once_more) > rule.epsilon(merged(planned))


def test_epsilon_never_falls_when_something_is_booked() -> None:
    rule = BudgetFilter(order=3.0, delta=DELTA, cap=50.0, planned=PinnedSchedule.of(ROUND * 20, delta=DELTA))
    total: Parts = ()
    seen = [0.0]
    for number in range(30):
        total = added(total, ROUND if number % 7 else (counts_event(9.0),))
        seen.append(rule.epsilon(total))
    assert seen == sorted(seen)


def test_a_history_is_covered_by_the_same_mechanisms_or_by_less_noise() -> None:
    rate = rate_at_least(0.1)
    plan = ((1.0, rate, 5), (2.0, rate, 5), (4.0, 1 << 24, 1))
    assert covered((), plan) and covered(plan, plan) and covered(((3.0, rate, 10),), plan)
    assert covered(((1.5, rate, 5), (2.5, rate, 5)), plan)
    for more in (((0.9, rate, 1),), ((1.5, rate, 6),), ((3.0, rate, 11),), ((5.0, 1 << 24, 2),), ((2.0, rate - 1, 1),)):
        assert not covered(more, plan)


# A run limit of 6.6 and a plan that costs 6.52 by Renyi at its best order. Judged at the order that the ledger fixed
# for its own cap, the run got 3 of 3 rounds without a cap, 2 at cap 8, and none at cap 12, 20 or 40, for ever.

RUN_LIMIT = 6.6
TRAPPED = (dp_sgd_event(multiplier=0.7975, clip=1.0, rate=rate_at_least(0.06), steps=20),)


def rounds_of(rule: BudgetFilter, most: int = 3) -> int:
    total: Parts = ()
    for number in range(most):
        try:
            total = rule.admit(total, TRAPPED)
        except BudgetExhausted:
            return number
    return most


@pytest.mark.parametrize("cap", [RUN_LIMIT, 8.0, 12.0, 20.0, 40.0])
def test_a_run_that_fits_its_limit_is_not_stopped_by_a_larger_cap(cap: float) -> None:
    plan = TRAPPED * 3
    assert rdp_epsilon(plan, DELTA)[0] == pytest.approx(6.52, abs=0.05)
    run = RunTerms.of("run", plan, epsilon=RUN_LIMIT, delta=DELTA)
    life = BudgetFilter(order=choose_order(plan, cap=cap, delta=DELTA), delta=DELTA, cap=cap, planned=run.planned)
    assert rounds_of(run.filter(DELTA)) == 3
    assert rounds_of(life) == 3


def test_a_run_that_fits_its_limit_twin() -> None:
    """The rule of before: the run is judged at the one order of the ledger."""

    def before(cap: float) -> int:
        room = [(cap - conversion(order, DELTA)) / rdp_curve(TRAPPED, (order,))[0] for order in PUBLIC_ORDERS]
        order = PUBLIC_ORDERS[max(range(len(room)), key=room.__getitem__)]
        costs = [rdp_curve(TRAPPED * n, (order,))[0] + conversion(order, DELTA) for n in (1, 2, 3)]
        return sum(cost <= RUN_LIMIT for cost in costs)

    assert before(40.0) == before(20.0) == 0


def test_a_ledger_with_an_unlucky_order_continues_at_a_public_one() -> None:
    """Order 1.5 was chosen for a cap of 40; the hospital lowers it to 8, and the next run is small."""
    unlucky = BudgetFilter(order=1.5, delta=DELTA, cap=8.0)
    assert conversion(1.5, DELTA) > 8, "at this order nothing at all would be admitted"
    assert rounds_of(unlucky) > 0
    other = BudgetFilter(order=4.0, delta=DELTA, cap=8.0)
    assert unlucky.epsilon(merged(TRAPPED)) >= other.epsilon(merged(TRAPPED)), "and it gets nothing back"


def test_nothing_spent_is_zero() -> None:
    assert BudgetFilter(order=8.0, delta=DELTA, cap=3.0).epsilon(()) == 0.0


@pytest.mark.parametrize(
    "change",
    [{"order": 8.05}, {"delta": 0.0}, {"delta": 0.9}, {"delta": 1.1e-3}, {"cap": 0.0}, {"cap": 1e999}, {"cap": 0.01}],
)
def test_impossible_rules_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        BudgetFilter(**{"order": 8.0, "delta": DELTA, "cap": 3.0, **change})  # type: ignore[arg-type]


def test_delta_is_at_most_one_in_the_patients_and_never_above_a_thousandth() -> None:
    check_delta(1e-3)
    check_delta(1e-4, least_patients=10_000)
    with pytest.raises(ConfigError, match="one in 10000"):
        check_delta(1.1e-4, least_patients=10_000)
    with pytest.raises(ConfigError, match=r"delta 0\.5"):
        check_delta(0.5, least_patients=1)


def test_no_order_fits_a_cap_below_every_conversion() -> None:
    assert min(conversion(order, DELTA) for order in (64.0, 1024.0)) > 0.001
    with pytest.raises(ConfigError):
        choose_order(ROUND, cap=0.001, delta=DELTA)
    with pytest.raises(ConfigError, match="empty"):
        choose_order([], cap=1.0, delta=DELTA)


def test_another_schedule_than_planned_is_never_shown_as_less_than_it_costs() -> None:
    rule = BudgetFilter(order=choose_order(ROUND * 60, cap=8.0, delta=DELTA), delta=DELTA, cap=8.0)
    other = (counts_event(20.0), prototypes_event(30.0))
    assert rule.epsilon(merged(other)) >= rdp_epsilon(other, DELTA)[0]
