"""Encoding: refusals that name what to do, saturation under differential privacy, and no overflow."""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import DataError, LocalProtocolError
from security.secagg import fixed_point
from security.secagg.fixed_point import CHUNK_WORDS, decode, encode
from security.secagg.layout import Block, Layout
from security.secrets import Secret

SIZE = CHUNK_WORDS + 100


def layout(ring_bits: int = 32, **slots: int) -> Layout:
    blocks = [
        Block(name="big", shape=(SIZE,), kind="mean", clip_exponent=0, movement_exponent=20),
        Block(name="small", shape=(3,), kind="mean", clip_exponent=-4, movement_exponent=0),
        Block(name="mean", shape=(2,), kind="statistic", clip_exponent=6, movement_exponent=9, units=(-3, 5)),
    ]
    return Layout.of(blocks, roster_size=4, weight_cap=100, ring_bits=ring_bits, **slots)


def zeros() -> np.ndarray:
    return np.zeros(SIZE + 5, dtype=np.float32)


@pytest.mark.parametrize(
    ("place", "value", "tensor", "needed"),
    [
        (SIZE - 1, 1.0001, "big", 1),
        (0, -5.0, "big", 3),
        (SIZE + 1, 0.126, "small", -2),
        (SIZE + 3, 8.5, "mean", 7),
        (SIZE + 4, -8192.0, "mean", 8),
    ],
)
def test_a_value_beyond_its_clip_is_refused_by_name(place: int, value: float, tensor: str, needed: int) -> None:
    update = zeros()
    update[place] = value
    with pytest.raises(DataError) as caught:
        encode(layout(), update, weight=1)
    assert caught.value.where == f"tensor {tensor}"
    assert f"{np.float32(value):.6g}" in caught.value.message
    assert f"clip_exponent of {needed} " in (caught.value.hint or "")


def test_the_clip_that_the_hint_names_is_enough() -> None:
    block = Block(name="w", shape=(1,), kind="mean", clip_exponent=3, movement_exponent=9)
    update = np.array([5.0], dtype=np.float32)
    encode(Layout.of([block], roster_size=2, weight_cap=1), update, weight=1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("saturate", [False, True])
def test_nan_and_infinity_are_refused_in_every_mode(bad: float, saturate: bool) -> None:
    update = zeros()
    update[SIZE + 2] = bad
    with pytest.raises(DataError, match="NaN or infinity") as caught:
        encode(layout(), update, weight=1, saturate=saturate)
    assert caught.value.where == "tensor small"


def test_saturation_cuts_and_counts() -> None:
    update = zeros()
    update[[0, 5, SIZE + 1, SIZE + 3]] = [7.0, -7.0, 1.0, -9.0]
    update[1] = 0.5
    encoded = encode(layout(), update, weight=100, saturate=True)
    assert encoded.saturated == 4
    quantum = layout().quantum
    signed = encoded.words.view("<i4")
    assert list(signed[[0, 5, SIZE + 1, SIZE + 3]]) == [quantum, -quantum, quantum, -quantum]
    assert signed[1] == round(quantum / 2)


def test_doubles_are_taken_as_they_are() -> None:
    fine = np.full(SIZE + 5, 2.0**-5 + 2.0**-40, dtype=np.float64)
    wide = encode(layout(ring_bits=64), fine, weight=100).words.view("<i8")
    assert wide[0] == 100 * 2**30 + 3  # and an eighth, which is rounded off


@pytest.mark.parametrize("update", [np.zeros(3, np.float32), np.zeros(SIZE + 5, np.int32), np.zeros((1, SIZE + 5))])
def test_the_update_has_the_layouts_shape(update: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError):
        encode(layout(), update, weight=1)


def test_weights() -> None:
    with pytest.raises(LocalProtocolError):
        encode(layout(), zeros(), weight=0)
    assert int(encode(layout(), zeros(), weight=1_000_000).words[SIZE + 5]) == 100


def test_slots_are_filled_exactly() -> None:
    slots = layout(loss_exponent=3, hits_maximum=50)
    for given in ({}, {"loss": 1.0}, {"hits": 1}):
        with pytest.raises(LocalProtocolError):
            encode(slots, zeros(), weight=1, **given)
    with pytest.raises(LocalProtocolError):
        encode(layout(), zeros(), weight=1, loss=1.0)
    cut = encode(slots, zeros(), weight=1, loss=99.0, hits=51, saturate=True).words.view("<i4")
    assert (cut[slots.slot("loss")][0], cut[slots.slot("hits")][0]) == (slots.quantum, 50)
    for loss, hits in ((8.1, 0), (float("nan"), 0), (0.0, -1)):
        with pytest.raises(DataError):
            encode(slots, zeros(), weight=1, loss=loss, hits=hits)


def test_decoding_a_sum() -> None:
    slots = layout(loss_exponent=3, hits_maximum=50)
    rng = np.random.default_rng(2)
    updates = [(rng.standard_normal(SIZE + 5) * 0.01).astype(np.float32) for _ in range(3)]
    weights = [100, 50, 7]
    total = np.zeros(slots.words, dtype=slots.dtype)
    for update, weight in zip(updates, weights, strict=True):
        total += encode(slots, update, weight=weight, loss=1.5, hits=2).words
    told = decode(slots, total)
    expected = np.average(np.array(updates, dtype=np.float64), axis=0, weights=weights)
    assert told.weight == 157 and told.hits == 6
    assert told.loss == pytest.approx(4.5, abs=1e-7)
    # The units of the last two values are 2^3 and 2^11 times the clip of the first.
    assert np.abs(told.mean - expected)[:-2].max() < 2e-9
    assert np.abs(told.mean - expected)[-2:].max() < 4e-6


def test_decoding_needs_a_weight() -> None:
    with pytest.raises(DataError):
        decode(layout(), np.zeros(layout().words, dtype="<u4"))


def overflow() -> float:
    """Four sites send eight times their clip; the sum would wrap to a small number of the other sign."""
    update = zeros()
    update[0] = 8.0
    total = sum((encode(layout(), update, weight=100).words.astype("<u4") for _ in range(4)), np.uint32(0))
    return float(decode(layout(), np.asarray(total, dtype="<u4")).mean[0])


def test_overflow() -> None:
    with pytest.raises(DataError):
        overflow()


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_overflow_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_point, "_cut", lambda *args, **kwargs: 0)
    assert overflow() != pytest.approx(8.0, abs=1.0)


# The ring of 16 bits.


def rounded(update: np.ndarray, key: int, *, weight: int = 100) -> np.ndarray:
    told = layout(16)
    words = encode(told, update, weight=weight, rounding=Secret(key.to_bytes(32, "big"))).words
    return words.view(told.signed_dtype)[: told.state_words].astype(np.int64)


def test_rounding_at_random_is_right_on_average_and_off_by_less_than_one() -> None:
    told = layout(16)
    update = np.zeros(SIZE + 5, dtype=np.float32)
    update[:SIZE] = 0.3 / told.quantum  # of a step: the nearest whole number is zero
    update[SIZE:] = np.float32(0.01)
    found = rounded(update, 1)
    assert set(np.unique(found[:SIZE])) == {0, 1}
    assert abs(found[:SIZE].mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / SIZE)
    exact = encode(layout(32), update, weight=100).words.view(np.int32)[SIZE : SIZE + 5] / layout(32).quantum
    assert (np.abs(found[SIZE:] - exact * told.quantum) < 1).all()


def test_rounding_to_the_nearest_would_lose_it_twin() -> None:
    """What the other rings do: a step of three tenths is zero at every site, in every round."""
    told = layout(24)
    update = np.zeros(SIZE + 5, dtype=np.float32)
    update[:SIZE] = 0.3 / told.quantum
    assert not encode(told, update, weight=100).words[:SIZE].any()


def test_the_same_key_rounds_alike_and_another_does_not() -> None:
    update = np.random.default_rng(0).uniform(-0.05, 0.05, SIZE + 5).astype(np.float32)
    assert np.array_equal(rounded(update, 1), rounded(update, 1))
    assert not np.array_equal(rounded(update, 1), rounded(update, 2))


def test_each_coordinate_has_a_draw_of_its_own() -> None:
    """Also beyond the first chunk, where the stream of the key goes on and does not begin again."""
    update = zeros()
    update[:SIZE] = 0.5 / layout(16).quantum
    found = rounded(update, 1)
    assert not np.array_equal(found[:100], found[CHUNK_WORDS:SIZE])


@pytest.mark.parametrize("weight", [1, 37, 100])
def test_a_full_clip_stays_within_the_quantum(weight: int) -> None:
    told = layout(16)
    for sign in (-1, 1):
        update = np.full(SIZE + 5, sign, dtype=np.float32)
        update[SIZE:] = sign * 2.0**-4
        found = rounded(update, 3, weight=weight)
        assert np.abs(found).max() <= told.quantum and np.abs(found[:SIZE]).min() >= weight * told.quantum // 100


def test_draws_belong_to_sixteen_bits_and_to_no_other_ring() -> None:
    with pytest.raises(LocalProtocolError, match="draws for rounding"):
        encode(layout(16), zeros(), weight=1)
    with pytest.raises(LocalProtocolError, match="draws for rounding"):
        encode(layout(24), zeros(), weight=1, rounding=Secret(bytes(32)))
