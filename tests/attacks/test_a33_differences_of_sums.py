"""A33: cohorts chosen so that sums of several rounds, combined, show one site, and no two in a row differ by one site.

Nothing stops this without differential privacy: honest dropouts look the same. A site raises an alarm when a
combination of the sums that it knows of shows it alone, modulo any c others, above a stated leverage. On one and the
same model, where updates hardly differ, no site agrees to such a set (A13).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from security.crypto.prg import Words
from security.secagg import fixed_point, messages
from security.secagg import state as states
from security.secagg.effects import Isolated
from security.secagg.site import differences
from tests.support.cheating_site import lone_change
from tests.support.evil import VICTIM, EvilCoordinator, evil
from tests.support.secagg_world import small_layout
from tests.support.spoils import correlation

SPREAD, DRIFT = 0.14, 0.05
OTHER = "site-01"


def chosen_cohorts(times: int = 4) -> tuple[EvilCoordinator, float]:
    """The victim comes and goes together with another site, which also comes and goes alone; the model moves. Returns
    how well the victim is estimated."""
    layout = small_layout(6, words=2000, weight_cap=1)
    run = evil(6, c=1, layout=layout)
    generator = np.random.default_rng(5)
    learned = {name: generator.normal(0, SPREAD, layout.state_words).clip(-0.5, 0.5) for name in run.sites}
    found: list[tuple[set[str], Words]] = []
    for away in [set(), {VICTIM, OTHER}, {VICTIM}, {VICTIM, OTHER}] * times:
        updates = {}
        for name in run.sites:
            if name not in away:
                trained = learned[name] + generator.normal(0, DRIFT, layout.state_words)
                updates[name] = fixed_point.encode(layout, trained.astype(np.float32), weight=1).words
        outcome = run.run_round(updates)
        assert outcome.total is not None, "never a refusal: an honest dropout looks the same"
        found.append((away, outcome.total.view(layout.signed_dtype).astype(float)))
    everybody = np.mean([total for away, total in found if not away], axis=0)
    without = np.mean([total for away, total in found if away == {VICTIM}], axis=0)
    truth = fixed_point.encode(layout, learned[VICTIM].astype(np.float32), weight=1).words
    return run, correlation(layout, everybody - without, truth)


def alarms(run: EvilCoordinator, name: str) -> list[float]:
    return [effect.leverage for effect in run.noted.get(name, []) if isinstance(effect, Isolated)]


def test_the_victim_raises_an_alarm() -> None:
    run, fit = chosen_cohorts()
    assert fit > 0.75, "only differential privacy bounds this"
    raised = alarms(run, VICTIM)
    assert raised and raised[0] >= differences.ALARM_LEVERAGE and raised == sorted(raised)
    assert raised[-1] > 1.3, "it grows with every round that is added"
    assert not alarms(run, "site-03"), "sites that are in every sum are hidden by each other"


def test_the_victim_raises_an_alarm_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing the last two sums only, as an earlier version did, misses it."""
    monkeypatch.setattr(differences, "exposure", lone_change)
    run, fit = chosen_cohorts()
    assert fit > 0.75 and not alarms(run, VICTIM)


def test_an_alarm_survives_a_restart_of_the_site() -> None:
    run, _ = chosen_cohorts(1)
    before = differences.exposure(run.policy, run.machine().core.journal.sums, VICTIM)
    run.restart_site(VICTIM)
    assert differences.exposure(run.policy, run.machine().core.journal.sums, VICTIM) == before > 0.5


@pytest.mark.parametrize("shown", [True, False])
def test_a_sum_that_the_victim_is_not_shown_is_not_in_its_alarm(shown: bool) -> None:
    """A limit that the threat model states: in place of two sums without it, one of which isolates it, the victim gets
    the state that follows from both, and knows only of the set of the second."""
    run = evil(8, c=1, wide=False)
    run.run_round(run.updates(1))
    if not shown:
        run.lose(messages.Result, to=VICTIM)
    for number, away in ((2, {VICTIM}), (3, {VICTIM, "site-01", "site-02"})):
        assert run.run_round({k: v for k, v in run.updates(number).items() if k not in away}).total is not None
    run.rules.clear()
    publication = run.planned.attempts[-1].publication
    assert publication is not None and run.check is not None
    if not shown:
        run.tell(VICTIM, messages.Jump(result=publication.result, check=run.check))
        digest, data = states.state_hash(run.model), run.model.tobytes()
        run.tell(VICTIM, messages.StateFrame(state_hash=digest, index=0, data=data))
    assert run.machine().core.head.round == 3
    assert VICTIM in run.run_round(run.updates(4)).survivors
    assert bool(alarms(run, VICTIM)) is shown


# Cohorts chosen so that a site computes for days which colluders would show it.


def busy_cohorts() -> list[list[str]]:
    """Of a hundred sites, thirty pairs come and go, each pair together: 33 colluders are 16 of them."""
    chance = random.Random(1)
    pairs = [{f"site-{2 * k:03d}", f"site-{2 * k + 1:03d}"} for k in range(30)]
    everybody = {f"site-{k:03d}" for k in range(100)}
    away = [[pair for pair in pairs if chance.random() < 0.3] for _ in range(64)]
    return [sorted(everybody.difference(*pairs)) for pairs in away]


STEPS = 100_000


def count_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that has looked at so many choices without one to try has no end in sight."""
    counted = itertools.count(1)

    def counting(values: Sequence[int]) -> int:
        assert next(counted) < STEPS, "no end in sight"
        return sum(int(value) for value in values)

    monkeypatch.setattr(differences, "sum", counting, raising=False)


def test_chosen_cohorts_do_not_keep_a_site_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    count_steps(monkeypatch)
    assert differences.leverage(busy_cohorts(), "site-099", c=33) == 0


def test_chosen_cohorts_keep_a_site_busy_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice of so many places in turn, also where the cheapest of them cost too much."""

    def all_places(costs: Sequence[int], size: int, budget: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        for places in itertools.combinations(range(first, len(costs)), size):
            if differences.sum([costs[place] for place in places]) <= budget:  # type: ignore[attr-defined]
                yield places

    monkeypatch.setattr(differences, "_within", all_places)
    count_steps(monkeypatch)
    with pytest.raises(AssertionError, match="no end in sight"):
        differences.leverage(busy_cohorts(), "site-099", c=33)
