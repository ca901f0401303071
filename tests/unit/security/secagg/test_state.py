"""The next state, the range tests, and what an attacker gains where one is switched off."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from lazaret.errors import DataError, LocalProtocolError
from security import labels
from security.crypto.ring import BITS
from security.secagg import state as states
from security.secagg.context import SumVerdict
from security.secagg.fixed_point import encode
from security.secagg.layout import Block, Layout
from security.secagg.state import MovementRule, Successor, canonical, flatten, next_state, state_hash, unflatten
from security.secrets import Secret

SIZE = 70_000


def layout(movement: int = 3) -> Layout:
    blocks = [
        Block(name="w", shape=(SIZE // 2, 2), kind="mean", clip_exponent=0, movement_exponent=movement),
        Block(
            name="var",
            shape=(4,),
            kind="statistic",
            clip_exponent=6,
            movement_exponent=8,
            units=(-9, 0, 3, 7),
            nonnegative=True,
        ),
    ]
    return Layout.of(blocks, roster_size=5, weight_cap=64, loss_exponent=4, hits_maximum=99)


def honest(seed: int = 0, *, scale: float = 0.001, sites: int = 3) -> np.ndarray:
    told = layout()
    rng = np.random.default_rng(seed)
    total = np.zeros(told.words, dtype="<u4")
    for _ in range(sites):
        update = (rng.standard_normal(told.state_words) * scale).astype(np.float32)
        total += encode(told, update, weight=int(rng.integers(1, 65)), loss=1.0, hits=3).words
    return total


def start() -> np.ndarray:
    return canonical(np.linspace(-2, 2, SIZE + 4))


def test_hash_is_over_the_little_endian_floats() -> None:
    state = start()
    assert state_hash(state) == hashlib.sha256(labels.STATE + state.tobytes()).digest()
    for wrong in (state.astype(">f4"), state.astype("<f8"), state.reshape(2, -1), state[::2]):
        with pytest.raises(LocalProtocolError):
            state_hash(wrong)


def test_canonical_form() -> None:
    tiny = np.float32(2.0**-126)
    given = np.array([-0.0, tiny, -tiny, tiny / 2, -tiny / 4, 1.0], dtype=np.float32)
    assert canonical(given).tobytes() == np.array([0, tiny, -tiny, 0, 0, 1], dtype="<f4").tobytes()
    for bad in (np.nan, np.inf, -np.inf, 1e300):
        with pytest.raises(DataError):
            canonical([1.0, bad])


def test_named_tensors_there_and_back() -> None:
    told = layout()
    state = start()
    named = unflatten(told, state)
    assert named["w"].shape == (SIZE // 2, 2)
    assert flatten(told, named).tobytes() == state.tobytes()
    with pytest.raises(LocalProtocolError, match="extra"):
        flatten(told, named | {"extra": state})
    with pytest.raises(LocalProtocolError, match="shape"):
        flatten(told, named | {"w": named["w"].T})


def test_a_good_sum_moves_the_model_by_the_average() -> None:
    told = layout()
    total = honest()
    outcome = next_state(told, start(), total, survivors=3)
    assert outcome.verdict is SumVerdict.GOOD and not outcome.reason
    weight = int(total[told.slot("weight")][0])
    step = total.view("<i4")[:SIZE].astype(np.float64) * (64 / (told.quantum * weight))
    assert np.abs(outcome.state[:SIZE] - (start()[:SIZE] + step)).max() < 2e-7
    assert outcome.state.tobytes() == canonical(outcome.state).tobytes()


@pytest.mark.parametrize("steps", [(), (1,), (65_536,), (0, 7, 65_537, 65_537, SIZE + 1, SIZE + 4)])
def test_a_sum_that_comes_in_pieces_gives_the_same_model(steps: tuple[int, ...]) -> None:
    told, total = layout(), honest()
    coming = np.full_like(total, 0x55)
    coming[told.slot("weight")] = total[told.slot("weight")]
    successor = Successor(told, start(), coming)
    told_values, place = np.full(told.state_words, np.nan, dtype="<f4"), 0
    for ready in (*steps, told.words):
        coming[:ready] = total[:ready]
        begun, values = successor.extend(ready)
        assert begun == place, "values come in order, each once"
        place = begun + len(values)
        told_values[begun:place] = values
    outcome, whole = successor.outcome(survivors=3), next_state(told, start(), total, survivors=3)
    assert outcome.verdict is whole.verdict is SumVerdict.GOOD
    assert outcome.state.tobytes() == whole.state.tobytes() == told_values.tobytes()
    assert outcome.state_hash == whole.state_hash == state_hash(whole.state)


def test_a_sum_is_judged_when_all_of_it_is_there() -> None:
    told, total = layout(), honest()
    successor = Successor(told, start(), total)
    successor.extend(SIZE)
    with pytest.raises(LocalProtocolError, match="not complete"):
        successor.outcome(survivors=3)


@pytest.mark.parametrize("weight", [0, 2**31, 2**32 - 1])
def test_an_impossible_weight_is_no_trap_while_the_sum_comes(weight: int) -> None:
    """It is the first that is known of a sum, long before anybody judges it."""
    told, total = layout(), honest()
    total[told.slot("weight")] = np.uint32(weight)
    outcome = next_state(told, start(), total, survivors=3)
    assert outcome.verdict is SumVerdict.VOID and outcome.state.tobytes() == start().tobytes()
    assert outcome.state_hash == state_hash(start())


def test_variances_do_not_fall_below_zero() -> None:
    told = layout()
    update = np.zeros(told.state_words, dtype=np.float32)
    update[-4:] = [-0.01, -3.0, 1.0, -5.0]
    total = encode(told, update, weight=10, loss=0.0, hits=0).words * np.uint32(3)
    state = start()
    state[-4:] = [0.005, 1.0, 1.0, 8.0]
    outcome = next_state(told, state, total, survivors=3)
    assert outcome.verdict is SumVerdict.GOOD
    assert list(outcome.state[-4:]) == pytest.approx([0.0, 0.0, 2.0, 3.0], abs=1e-5)


def test_arguments_must_fit() -> None:
    total = honest()
    for state, words in ((start()[:-1], total), (start(), total[:-4]), (start(), total.view("<i4"))):
        with pytest.raises(LocalProtocolError):
            next_state(layout(), state, words, survivors=3)


def test_a_model_that_would_not_be_finite_stays() -> None:
    state = start()
    state[0] = np.finfo(np.float32).max
    blocks = [Block(name="w", shape=(SIZE + 4,), kind="mean", clip_exponent=100, movement_exponent=100)]
    told = Layout.of(blocks, roster_size=2, weight_cap=1)
    update = np.zeros(SIZE + 4, dtype=np.float32)
    update[0] = 2.0**99.9
    state[0] = np.float32(3.4028235e38)
    total = encode(told, update, weight=1).words * np.uint32(2)
    assert next_state(told, state, total, survivors=2).verdict is SumVerdict.GOOD  # far below an ulp
    state[0] = np.inf
    outcome = next_state(told, state, total, survivors=2)
    assert outcome.verdict is SumVerdict.VOID and outcome.state is state


def judged(**slots: int) -> str:
    """A sum of three sites that is zero but for its weight, and for what is told."""
    told = layout()
    signed = np.zeros(told.words, dtype=told.signed_dtype)
    for name, value in ({"weight": 64} | slots).items():
        signed[0 if name == "first" else -1 if name == "padding" else told.slot(name)] = value
    return states.judge(told, signed, survivors=3)


QUANTUM = layout().quantum


@pytest.mark.parametrize(
    ("slot", "good", "wrong"),
    [
        ("weight", (3, 3 * 64), (2, 3 * 64 + 1, -1)),
        ("first", (QUANTUM + 3, -QUANTUM - 3), (QUANTUM + 4, -QUANTUM - 4)),
        ("padding", (0,), (1, -1)),
        ("loss", (3 * QUANTUM, -3 * QUANTUM), (3 * QUANTUM + 1, -3 * QUANTUM - 1)),
        ("hits", (0, 3 * 99), (-1, 3 * 99 + 1)),
    ],
)
def test_each_range_is_where_it_says(slot: str, good: tuple[int, ...], wrong: tuple[int, ...]) -> None:
    assert layout().used_words < layout().words, "there is padding to look at"
    assert not any(judged(**{slot: value}) for value in good)
    assert all(judged(**{slot: value}) for value in wrong)


def weights_add_up_to_one() -> float:
    """A site sends 1 - (the others' weights): the average is then the plain sum, however large."""
    told = layout(movement=20)
    total = honest(scale=0.05)
    total[told.slot("weight")] = 1
    outcome = next_state(told, start(), total, survivors=3)
    return float(np.abs(outcome.state[:SIZE] - start()[:SIZE]).max())


def test_weight_range() -> None:
    assert weights_add_up_to_one() == 0.0


def test_weight_range_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "judge", lambda *args, **kwargs: "")
    assert weights_add_up_to_one() > 10.0


def push_one_tensor() -> float:
    """One colluding site among three uses its whole clip in every coordinate of a tensor."""
    told = layout()
    total = honest(sites=2)
    pushed = np.zeros(told.state_words, dtype=np.float32)
    pushed[:SIZE] = 0.9
    total += encode(told, pushed, weight=64, loss=0.0, hits=0).words
    outcome = next_state(told, start(), total, survivors=3)
    return float(np.linalg.norm(outcome.state[:SIZE] - start()[:SIZE]))


def test_movement_cap() -> None:
    assert push_one_tensor() == pytest.approx(2**3, rel=1e-3)


def test_movement_cap_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.MovementRule, "caps", lambda self, told, movements: [2**62] * len(told.state_blocks))
    assert push_one_tensor() > 2**3 * 1.1


def steady(told: Layout, part: float) -> Any:
    words = encode(told, np.full(100, part, dtype=np.float32), weight=8).words
    return words * words.dtype.type(3)


def test_caps_follow_the_median_of_the_newest_steps() -> None:
    block = Block(name="w", shape=(100,), kind="mean", clip_exponent=0, movement_exponent=4)
    told = Layout.of([block], roster_size=3, weight_cap=8)
    rule, state, known = MovementRule(3, Fraction(2)), np.zeros(100, dtype="<f4"), b""
    lengths = []
    for part in (0.01, 0.012, 0.4, 0.4, 0.4, 0.4, 0.01):
        outcome = next_state(told, state, steady(told, part), survivors=3, rule=rule, movements=known)
        assert outcome.verdict is SumVerdict.GOOD and bool(outcome.capped) == (part == 0.4)
        lengths.append(float(np.linalg.norm(outcome.state - state)))
        state, known = outcome.state, outcome.movements
        assert len(known) == 24
    # Twice the lower median of: (.1, .12), (.1, .12, .2), (.12, .2, .24), (.2, .24, .4); what was cut off is forgotten.
    assert lengths == pytest.approx([0.1, 0.12, 0.2, 0.24, 0.4, 0.48, 0.1], rel=1e-2)


def test_no_history_lifts_a_cap_above_the_ceiling() -> None:
    """Long steps, as an attacker feeds them, double the cap up to the manifest's ceiling and no further."""
    block = Block(name="w", shape=(100,), kind="mean", clip_exponent=0, movement_exponent=1)
    told = Layout.of([block], roster_size=3, weight_cap=8)
    rule = MovementRule(3, Fraction(2))
    ceiling = 2 << states.STEP_BITS
    for length, cap in ((ceiling // 4, ceiling // 2), (ceiling // 2 + 1, ceiling), (ceiling, ceiling)):
        assert rule.caps(told, rule.after(told, b"", [length])) == [cap]


def test_a_tensor_that_rested_is_not_frozen() -> None:
    """A head that is trained in later rounds only has no history: its ceiling counts, not a median of nothing."""
    block = Block(name="w", shape=(100,), kind="mean", clip_exponent=0, movement_exponent=4)
    told = Layout.of([block], roster_size=3, weight_cap=8)
    rule, state = MovementRule(3, Fraction(2)), np.zeros(100, dtype="<f4")
    rested = next_state(told, state, steady(told, 0.0), survivors=3, rule=rule)
    assert rested.movements == bytes(24)
    moved = next_state(told, state, steady(told, 0.4), survivors=3, rule=rule, movements=rested.movements)
    assert not moved.capped and np.linalg.norm(moved.state) == pytest.approx(4, rel=1e-3)


def test_a_void_sum_leaves_the_history_alone_and_a_wrong_table_is_refused() -> None:
    told = layout()
    total = np.zeros(told.words, dtype=told.dtype)
    total[told.slot("weight")] = 0
    rule = MovementRule(2, Fraction(2))
    table = bytes(range(16)) * len(told.state_blocks)
    assert next_state(told, start(), total, survivors=3, rule=rule, movements=table).movements == table
    with pytest.raises(LocalProtocolError, match="table of movements"):
        rule.caps(told, bytes(8))


@pytest.mark.parametrize("ring_bits", BITS)
def test_movement_cap_is_where_it_says(ring_bits: int) -> None:
    """A step of L2 norm just below 2 passes a cap of 2**1, one just above is shortened to it."""
    block = Block(name="w", shape=(100,), kind="mean", clip_exponent=0, movement_exponent=1)
    told = Layout.of([block], roster_size=3, weight_cap=8, ring_bits=ring_bits)
    for part, capped in ((0.1999, ()), (0.2001, ("w",))):
        rounding = Secret(bytes(32)) if told.rounds_at_random else None
        words = encode(told, np.full(100, part, dtype=np.float32), weight=8, rounding=rounding).words
        total = words * words.dtype.type(3)
        outcome = next_state(told, np.zeros(100, dtype="<f4"), total, survivors=3)
        assert outcome.verdict is SumVerdict.GOOD and outcome.capped == capped
        assert np.linalg.norm(outcome.state) == pytest.approx(min(10 * part, 2), rel=1e-3)


def test_full_clips_that_every_site_has_rounded_up_are_not_void() -> None:
    """In 16 bits each may be off by almost a whole step, not by half of one."""
    block = Block(name="w", shape=(20_000,), kind="mean", clip_exponent=0, movement_exponent=9)
    told = Layout.of([block], roster_size=4, weight_cap=100, ring_bits=16)
    full = np.ones(20_000, dtype=np.float32)
    words = [encode(told, full, weight=9, rounding=Secret(bytes([site] * 32))).words for site in range(4)]
    total = np.sum(words, axis=0, dtype=told.dtype)
    most = int(total[:20_000].max())
    assert 100 * most > 4 * 9 * told.quantum + 4 * 50, "half a step for each site would not do"
    assert next_state(told, np.zeros(20_000, dtype="<f4"), total, survivors=4).verdict is SumVerdict.GOOD


def test_flush_to_zero_does_not_change_the_model() -> None:
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        flushed = self_contained_hashes()
    finally:
        torch.set_flush_denormal(False)
    assert flushed == self_contained_hashes()


def self_contained_hashes() -> list[bytes]:
    """Results that land on subnormals, from a state at the edge of the normal numbers."""
    block = Block(name="w", shape=(64,), kind="mean", clip_exponent=-100, movement_exponent=-90)
    told = Layout.of([block], roster_size=2, weight_cap=1)
    edge = np.ldexp(np.float32(1), -126) * np.arange(1, 65, dtype=np.float32)
    update = (-edge * np.float32(1.5)).astype(np.float32)
    total = encode(told, update, weight=1).words * np.uint32(2)
    outcome = next_state(told, canonical(edge), total, survivors=2)
    return [state_hash(canonical(edge)), state_hash(outcome.state), state_hash(canonical(edge * np.float32(0.3)))]
