"""The planner's promises are kept by the ledger."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from lazaret.errors import BudgetExhausted, ConfigError
from security.dp.accountant import Mechanism, rate_at_least
from security.dp.filter import planned_epsilon
from security.dp.ledger import Ledger, Unit
from security.dp.ledger_store import MemoryStore
from security.dp.noise import NoiseSource
from security.dp.planner import Schedule, cost, propose_multiplier, rounds_affordable, terms_for

DELTA = 1e-5
PLAN = Schedule(rounds=20, steps=42, rate=rate_at_least(64 / 2700), multiplier=1.0, clip=1.0)


def ledger_for(plan: Schedule, cap: float) -> Ledger:
    terms = terms_for(plan, population="p", unit=Unit.PATIENT, delta=DELTA, cap=cap)
    return Ledger.create(MemoryStore(), terms, version="v1")


def book(ledger: Ledger, plan: Schedule, rounds: int) -> None:
    for number in range(1, rounds + 1):
        events = plan.round_events(number)
        ledger.commit(ledger.reserve(run="r", round_number=number, events=events, noise=NoiseSource()))


def test_events_of_a_round() -> None:
    first, second, sixth = (PLAN.round_events(number) for number in (1, 2, 6))
    kinds = [event.kind for event in first]
    assert kinds == [Mechanism.CLASS_COUNTS, Mechanism.PROTOTYPES, Mechanism.PROTOTYPES, Mechanism.DP_SGD]
    assert [event.kind for event in second] == [Mechanism.DP_SGD]
    assert [event.kind for event in sixth] == [Mechanism.PROTOTYPES, Mechanism.DP_SGD]
    assert len(PLAN.events()) == 20 + 1 + 2 + 3


@pytest.mark.parametrize("epsilon", [3.0, 8.0])
def test_the_proposed_noise_just_fits(epsilon: float) -> None:
    multiplier = propose_multiplier(PLAN, epsilon=epsilon, delta=DELTA)
    plan = replace(PLAN, multiplier=multiplier)
    assert planned_epsilon(plan.events(), DELTA) <= epsilon
    less = replace(PLAN, multiplier=multiplier - 0.01)
    assert planned_epsilon(less.events(), DELTA) > epsilon
    ledger = ledger_for(plan, epsilon)
    book(ledger, plan, plan.rounds)
    assert ledger.state.epsilon <= epsilon


def test_a_proposal_on_a_used_ledger_takes_what_is_left() -> None:
    ledger = ledger_for(PLAN, 8.0)
    fresh = propose_multiplier(PLAN, epsilon=8.0, delta=DELTA, state=ledger.state)
    ledger.reserve(run="r", round_number=1, events=PLAN.round_events(1), noise=NoiseSource())
    assert propose_multiplier(PLAN, epsilon=8.0, delta=DELTA, state=ledger.state) > fresh


def test_rounds_affordable_is_where_the_ledger_stops() -> None:
    plan = replace(PLAN, rounds=80)
    ledger = ledger_for(plan, 4.0)
    state = ledger.state
    expected = rounds_affordable(plan, partial(state.terms.filter().admit, state.total))
    assert 0 < expected < plan.rounds
    book(ledger, plan, expected)
    with pytest.raises(BudgetExhausted):
        ledger.reserve(run="r", round_number=0, events=plan.round_events(expected + 1), noise=NoiseSource())
    admit = partial(state.terms.filter().admit, ledger.state.total)
    assert rounds_affordable(plan, admit, first=expected + 1) == 0
    assert rounds_affordable(replace(plan, rounds=1, multiplier=50.0, prototypes_sigma=None), admit, first=2) == 0


def test_what_no_gradient_noise_can_repair_is_said() -> None:
    with pytest.raises(ConfigError, match="no amount"):
        propose_multiplier(replace(PLAN, counts_sigma=0.5), epsilon=1.0, delta=DELTA)
    with pytest.raises(ConfigError):
        replace(PLAN, rounds=0)


def test_a_longer_history_costs_more() -> None:
    plan = replace(PLAN, rounds=2)
    once, twice = cost(plan, delta=DELTA), cost(plan, delta=DELTA, history=plan.events())
    assert twice.rdp > once.rdp > once.pld
