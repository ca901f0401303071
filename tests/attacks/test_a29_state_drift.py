"""A29: machines that round differently come to different models, and a federation falls apart without an attacker.

The step is a multiplication and an addition in double precision, each rounded. A processor that fuses them rounds once.
Flushing subnormals to zero is in tests/unit/security/secagg/test_state.py.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from lazaret.errors import VerificationFailed
from security.clock import ManualClock
from security.crypto.prg import Words
from security.rng import CountedRandomness
from security.secagg import fixed_point
from security.secagg import state as states
from security.secagg.context import SumVerdict
from security.secagg.fixed_point import step_size
from security.secagg.layout import WEIGHT, Block, Layout
from security.secagg.site import result_checks
from tests.support.evil import VICTIM, EvilCoordinator, assert_refused, evil
from tests.support.secagg_world import CONFIG, names


def one_tensor(words: int = 64) -> Layout:
    return Layout.of(
        [Block(name="stem", shape=(words,), kind="mean", clip_exponent=0, movement_exponent=20)],
        roster_size=4,
        weight_cap=1,
        ring_bits=32,  # numbers with so many digits that one rounding less is seen
    )


def fused(state: Any, signed: Words, step: Any, value: Any) -> None:
    """The same step with one rounding to double, as a fused multiply-add does it."""
    for at, (old, summed, size) in enumerate(np.broadcast(state, signed, step)):
        value[at] = float(Fraction(float(old)) + int(summed) * Fraction(float(size)))


@cache
def midpoint() -> tuple[float, int]:
    """A weight and a sum for which the one rounding more decides between two floats.

    Where the step almost cancels the weight, the rounding error of the product is no longer small beside the result:
    about one case in a hundred comes so close to the middle of two floats.
    """
    layout = one_tensor()
    step = float(step_size(layout, layout.runs[0], 4))
    generator = np.random.default_rng(29)
    while True:
        summed = int(generator.integers(2**30, 2**31 - 8))
        old = np.float32(-summed * step)
        exact = Fraction(float(old)) + summed * Fraction(step)
        if np.float32(float(exact)) != np.float32(float(old) + summed * step):
            return float(old), summed


def crafted() -> tuple[Layout, Any, dict[str, Words]]:
    """A model and four honest updates that meet in the crafted sum."""
    layout = one_tensor()
    old, summed = midpoint()
    state = states.canonical(np.full(layout.state_words, old))
    updates = {}
    for at, name in enumerate(names(4)):
        words = np.zeros(layout.words, dtype=layout.dtype)
        words[: layout.state_words] = summed // 4 + (at < summed % 4)
        words[layout.slot(WEIGHT)] = 1
        updates[name] = words
    return layout, state, updates


def test_a_fused_step_gives_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, state, updates = crafted()
    total = np.sum(list(updates.values()), axis=0, dtype=layout.dtype)
    ours = states.next_state(layout, state, total, survivors=4)
    monkeypatch.setattr(states, "_add_step", fused)
    theirs = states.next_state(layout, state, total, survivors=4)
    assert ours.verdict is theirs.verdict is SumVerdict.GOOD and ours.state_hash != theirs.state_hash


def a_round_with_one_odd_machine(monkeypatch: pytest.MonkeyPatch) -> EvilCoordinator:
    """The victim's processor, compiler or library fuses; everybody else's does not."""
    layout, state, updates = crafted()
    run = EvilCoordinator(
        layout, names(4), state, config_hash=CONFIG, randomness=CountedRandomness(b"drift"), clock=ManualClock()
    )
    intake, step = run.machine().intake, states._add_step
    frame = intake.frame

    def on_the_odd_machine(message: Any) -> Any:
        with monkeypatch.context() as odd:
            odd.setattr(states, "_add_step", fused)
            return frame(message)

    monkeypatch.setattr(intake, "frame", on_the_odd_machine)
    run.begin_round(updates)
    run.launch(run.plan())
    assert states._add_step is step
    return run


def test_an_odd_machine_notices_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_round_with_one_odd_machine(monkeypatch)
    assert_refused(run, VICTIM, VerificationFailed, "check_next_state")
    assert run.machine().core.head.round == 0
    assert {run.machine(name).core.head.round for name in run.honest[1:]} == {1}
    run.check_promises()


def test_an_odd_machine_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchecked, it goes on with a model of its own, under the same result as everybody else."""
    monkeypatch.setattr(result_checks, "check_next_state", lambda *_: None)
    run = a_round_with_one_odd_machine(monkeypatch)
    heads = [run.machine(name).core.head for name in run.sites]
    assert len({head.result for head in heads}) == 1 and len({head.state_hash for head in heads}) == 2


@pytest.mark.parametrize("weight", [1, 64])
def test_the_least_and_the_largest_sum_of_weights(weight: int) -> None:
    run = evil(wide=False)
    layout = run.policy.layout
    update = np.linspace(-0.5, 0.5, layout.state_words, dtype=np.float32)
    words = fixed_point.encode(layout, update, weight=weight).words
    assert run.run_round(dict.fromkeys(run.sites, words)).verdict is SumVerdict.GOOD
    assert len({run.machine(name).core.head.state_hash for name in run.sites}) == 1
