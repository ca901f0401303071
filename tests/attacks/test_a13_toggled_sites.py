"""A13: one site is left out of every second sum while a colluder keeps the model where it is, by voiding each round.

Each pair of sums gives the victim's update under the noise of everybody's training; many pairs average that away.
On one model no site agrees to a set that, with the sets before, isolates anybody; and without differential privacy a
site sends three different updates on one model and then waits for its operator.
"""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import PolicyViolation
from security.crypto.prg import Words
from security.secagg import fixed_point
from security.secagg.context import SumVerdict
from security.secagg.site import checks, differences
from tests.support.evil import VICTIM, WON, EvilCoordinator, assert_refused, evil
from tests.support.secagg_world import small_layout
from tests.support.spoils import correlation

ROUNDS, SPREAD, NOISE = 30, 0.14, 0.03


def toggled() -> tuple[EvilCoordinator, float]:
    """Up to thirty rounds; returns how well the difference of the two means fits what the victim learned."""
    layout = small_layout(4, words=2000, weight_cap=1)
    run = evil(4, layout=layout)
    generator = np.random.default_rng(3)
    learned = {name: generator.normal(0, SPREAD, layout.state_words).clip(-0.5, 0.5) for name in run.sites}
    sums: dict[bool, list[Words]] = {True: [], False: []}
    for number in range(ROUNDS):
        present = number % 2 == 0
        updates = {}
        for name in run.sites if present else list(run.sites)[1:]:
            trained = learned[name] + generator.normal(0, NOISE, layout.state_words)
            updates[name] = fixed_point.encode(layout, trained.astype(np.float32), weight=1).words
        updates["site-03"][layout.slot("weight")] = 2**31
        outcome = run.run_round(updates)
        if outcome.total is None:
            break
        assert outcome.verdict is SumVerdict.VOID, "the model stands still"
        sums[present].append((outcome.total - updates["site-03"]).view(layout.signed_dtype).astype(float))
    if not sums[False]:
        return run, float("nan")
    guess = np.mean(sums[True], axis=0) - np.mean(sums[False], axis=0)
    truth = fixed_point.encode(layout, learned[VICTIM].astype(np.float32), weight=1).words
    return run, correlation(layout, guess, truth)


def test_the_second_set_on_one_model_must_not_isolate_anybody() -> None:
    run, fit = toggled()
    assert run.round == 2 and np.isnan(fit), "there is one sum, and no difference"
    for name in run.honest[1:]:
        assert_refused(run, name, PolicyViolation, "check_same_state_sums")
    run.check_promises()


def test_the_fourth_update_on_one_model_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second rule stops it too: three sums are what it leaks without the first."""
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)
    run, fit = toggled()
    assert fit < 0.97, "three sums are what this leaks without noise; see the threat model"
    assert run.round == 4
    for name in run.honest[1:]:
        assert_refused(run, name, PolicyViolation, "check_plan_updates_on_state")
    run.check_promises()


def test_thirty_rounds_on_one_model_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "check_same_state_sums", lambda *_: None)
    monkeypatch.setattr(checks, "check_plan_updates_on_state", lambda *_: None)
    run, fit = toggled()
    assert run.round == ROUNDS and fit > WON
