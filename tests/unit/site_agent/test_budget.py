"""The commitment to a ledger that an advert carries; and what a trainer may ask to be booked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lazaret.errors import PolicyViolation
from security.dp.accountant import dp_sgd_event, rate_at_least
from security.dp.ledger import Ledger, Terms, Unit
from security.dp.ledger_store import MemoryStore
from security.dp.noise import NoiseSource
from site_agent.budget import Budget

TERMS = Terms(population="skin-2024", unit=Unit.PATIENT, delta=1e-5, cap=3.0, order=8.0)
ROUND = (dp_sgd_event(multiplier=2.0, clip=1.0, rate=rate_at_least(0.02), steps=50),)


def test_the_commitment_hides_the_head_and_binds_to_it() -> None:
    ledger, unused = Ledger.create(MemoryStore(), TERMS, version="v1"), Any
    mine, other = (Budget(unused, unused, ledger, unused, unused, bytes([key]) * 32) for key in (1, 2))  # type: ignore[arg-type]
    one = mine.commitment()
    assert one == mine.commitment() and one != other.commitment(), "the salt is under the site's own key"
    ledger.reserve(run="run", round_number=1, events=ROUND, noise=NoiseSource())
    assert one != mine.commitment()
    assert ledger.state.head.digest.encode() not in mine.commitment()


COUNTED = (*ROUND, dp_sgd_event(multiplier=9.0, clip=1.0, rate=rate_at_least(0.5), steps=1))
CHEAPER = {
    "fewer steps": (dp_sgd_event(multiplier=2.0, clip=1.0, rate=rate_at_least(0.02), steps=1),),
    "a lower rate": (dp_sgd_event(multiplier=2.0, clip=1.0, rate=rate_at_least(0.01), steps=50),),
    "more noise": (dp_sgd_event(multiplier=20.0, clip=1.0, rate=rate_at_least(0.02), steps=50),),
    "nothing": (),
    "too much": (*ROUND, *ROUND),
}


@pytest.mark.parametrize("what", [*CHEAPER])
def test_a_trainer_books_what_the_plan_has_and_nothing_else(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    booked: list[Any] = []
    monkeypatch.setattr(Budget, "reserve", lambda _, *, events, **__: booked.append(events))
    schedule = SimpleNamespace(round_events=lambda number, *, first: COUNTED if first else ROUND)
    plan: Any = SimpleNamespace(schedule=schedule, run="run")
    unused: Any = None
    budget = Budget(plan, unused, unused, unused, unused, bytes(32))
    with pytest.raises(PolicyViolation, match="other releases than the plan has"):
        budget.reserve_planned(1, CHEAPER[what])
    assert booked == []
    budget.reserve_planned(1, COUNTED)
    budget.reserve_planned(2, ROUND)
    assert booked == [COUNTED, ROUND]
