"""A16: a site sends numbers that no honest site could: a word of 2^31, a weight that makes all weights add up to one,
a whole clip in every coordinate. Nobody can see whose they were; everybody can see that the sum is impossible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.steering import CAPS, GROUPED, Steering
from security.crypto.prg import Words
from security.secagg import fixed_point, groups
from security.secagg import state as states
from security.secagg.context import SumVerdict
from security.secagg.layout import Block, Layout
from security.secagg.state import CEILINGS_ALONE, MovementRule, State
from tests.support.evil import VICTIM, EvilCoordinator, evil

Poison = Callable[[Layout, dict[str, Words]], Words]


def a_huge_word(layout: Layout, updates: dict[str, Words]) -> Words:
    poisoned = updates["site-03"].copy()
    poisoned[3] = layout.half_ring
    return poisoned


def weights_that_add_up_to_one(layout: Layout, updates: dict[str, Words]) -> Words:
    slot = layout.slot("weight")
    poisoned = updates["site-03"].copy()
    others = sum(int(words[slot][0]) for name, words in updates.items() if name != "site-03")
    poisoned[slot] = (1 - others) % 2**32
    return poisoned


def poisoned_round(poison: Poison, layout: Layout | None = None) -> tuple[EvilCoordinator, Any]:
    run = evil(wide=False, layout=layout)
    updates = run.updates(1)
    updates["site-03"] = poison(run.policy.layout, updates)
    return run, run.run_round(updates)


def start_of(run: EvilCoordinator) -> State:
    return evil(wide=False, layout=run.policy.layout).model


def largest_step(run: EvilCoordinator) -> float:
    return float(np.abs(run.machine().intake.model - start_of(run)).max())


@pytest.mark.parametrize("poison", [a_huge_word, weights_that_add_up_to_one])
def test_an_impossible_sum_is_void_everywhere(poison: Poison) -> None:
    run, outcome = poisoned_round(poison)
    assert outcome.verdict is SumVerdict.VOID
    assert len({run.machine(name).core.head for name in run.sites}) == 1, "the same result at all sites"
    assert largest_step(run) == 0
    assert not run.book.excluded, "nobody can be named without opening an update"
    run.check_promises()
    assert run.run_round(run.updates(2)).verdict is SumVerdict.GOOD


def test_weights_that_add_up_to_one_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Division by one instead of the true weight: the step is as large as all the weights together."""
    monkeypatch.setattr(states, "judge", lambda *_args, **_named: "")
    run, outcome = poisoned_round(weights_that_add_up_to_one)
    assert outcome.verdict is SumVerdict.GOOD and largest_step(run) > 10


def capped() -> Layout:
    """Honest steps here have an L2 norm of about 0.3; the cap is one."""
    block = Block(name="stem", shape=(400,), kind="mean", clip_exponent=0, movement_exponent=1)
    return Layout.of([block], roster_size=4, weight_cap=1)


def whole_clip(layout: Layout, updates: dict[str, Words]) -> Words:
    """Towards a model of the attacker's choice, as far as a single site can."""
    for name in updates:
        small = np.random.default_rng(len(name)).normal(0, 0.01, layout.state_words).astype(np.float32)
        updates[name] = fixed_point.encode(layout, small, weight=1).words
    return fixed_point.encode(layout, np.full(layout.state_words, 0.9, dtype=np.float32), weight=1).words


def test_a_step_beyond_the_movement_cap_is_shortened() -> None:
    """The round is not lost for it: every site shortens the step in whole numbers, to the same model."""
    run, outcome = poisoned_round(whole_clip, capped())
    assert outcome.verdict is SumVerdict.GOOD and 0 < largest_step(run) < 0.11
    assert len({run.machine(name).core.head for name in run.sites}) == 1
    assert np.linalg.norm(run.machine().intake.model - start_of(run)) == pytest.approx(2, rel=1e-3)


def test_a_step_beyond_the_movement_cap_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MovementRule, "caps", lambda self, layout, movements: [2**62] * len(layout.state_blocks))
    run, outcome = poisoned_round(whole_clip, capped())
    assert outcome.verdict is SumVerdict.GOOD and largest_step(run) > 0.2


# Steering over rounds. A cap bounds how far, not where to: the correlation stays high, and the tests say so.


def test_caps_bound_how_far_one_site_moves_the_model_and_not_where_to() -> None:
    steered = Steering(CAPS, before=5).run(attacked=True)
    honest = Steering(CAPS, before=5).run(attacked=False)
    assert steered["rounds_with_a_sum"] == honest["rounds_with_a_sum"] == 8
    assert max(honest["ratchet"]) < 1.2, "no honest step is near its cap"
    assert steered["length"] < 5 * honest["length"]
    # Twice as far every third round: with a window of five the median is the attacker's own step from the third on.
    assert steered["ratchet"] == pytest.approx([2, 2, 2, 4, 4, 4, 8, 8], rel=0.1)
    assert steered["correlation"] > 0.9, "this is what stays possible; see docs/threat-model.md"


def test_caps_that_follow_no_history_twin() -> None:
    """The ceilings alone, which leave room for the largest honest step of a whole run."""
    steered = Steering(CEILINGS_ALONE, before=5).run(attacked=True)
    honest = Steering(CEILINGS_ALONE, before=5).run(attacked=False)
    assert steered["length"] > 15 * honest["length"]
    assert min(steered["ratchet"]) > 12


def test_groups_with_a_median_bound_where_to() -> None:
    """Nine sites in three groups: the model goes where the honest sites go, whatever one of them sends."""
    steered = Steering(CAPS, sites=GROUPED, combine="median").run(attacked=True)
    honest = Steering(CAPS, sites=GROUPED, combine="median").run(attacked=False)
    assert steered["rounds_with_a_sum"] == honest["rounds_with_a_sum"] == 8
    assert steered["correlation"] < 0.3 and steered["length"] < 1.2 * honest["length"]


def test_groups_with_a_median_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same groups, whose sums are added up instead."""
    monkeypatch.setattr(groups, "combine", lambda layout, sums, *_, **__: groups.everything(layout, sums.reshape(-1)))
    assert Steering(CAPS, sites=GROUPED, combine="median").run(attacked=True)["correlation"] > 0.9


def test_all_sites_have_the_same_history_also_after_a_restart() -> None:
    run = evil(wide=False, movement=CAPS)
    for seed in range(1, 4):
        run.run_round(run.updates(seed))
    known = {run.machine(name).core.head.movements for name in run.sites}
    assert len(known) == 1 and any(known.pop())
    head = run.machine().core.head
    run.restart_site(VICTIM)
    assert run.machine().core.head == head, "a restart keeps it"
