"""The vectors of layout, fixed point and next state."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from . import numbers, symmetric
from .drawn import Drawn

Case = dict[str, Any]


def pack(values: list[float]) -> str:
    return struct.pack(f"<{len(values)}f", *values).hex()


def layout(*, ring_bits: int = 32, roster: int = 5, cap: int = 1000) -> dict[str, Any]:
    """A mean with two clips, a pair of statistics with units far apart, and every slot."""
    return {
        "ring_bits": ring_bits,
        "roster_size": roster,
        "weight_cap": cap,
        "blocks": [
            {"name": "body.weight", "shape": [2, 3], "kind": "mean", "clip_exponent": -3, "movement_exponent": -2},
            {"name": "body.bias", "shape": [1], "kind": "mean", "clip_exponent": 1, "movement_exponent": 1},
            {"name": "norm.mean", "shape": [2], "kind": "statistic", "clip_exponent": 6, "movement_exponent": 7}
            | {"units": bytes([256 - 9, 3]).hex(), "nonnegative": False},
            {"name": "norm.var", "shape": [2], "kind": "statistic", "clip_exponent": 6, "movement_exponent": 7}
            | {"units": bytes([256 - 18, 6]).hex(), "nonnegative": True},
            {"name": "weight", "shape": [1], "kind": "count", "maximum": cap},
            {"name": "loss", "shape": [1], "kind": "sum", "clip_exponent": 12},
            {"name": "hits", "shape": [1], "kind": "count", "maximum": 5000},
        ],
    }


def update(drawn: Drawn, told: dict[str, Any], *, at: float | None = None) -> list[float]:
    """Floats inside their clips; `at` puts every one at that part of its clip."""
    out = []
    for clip in numbers.clips(told):
        part = at if at is not None else drawn.number(2**24) / 2**22 - 2
        out.append(numbers.to_f32(float(clip) * part / (1 if at is not None else 16)))
    return out


def encodings() -> Iterator[tuple[str, Case]]:
    drawn = Drawn("encodings")
    yield from _encodings(drawn, (32, 64))
    yield from _refused(drawn)
    yield from _encodings(Drawn("encodings of 24 bits"), (24,))
    yield from _rounded_at_random(Drawn("encodings of 16 bits"))


def _encodings(drawn: Drawn, rings: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    for bits in rings:
        told = layout(ring_bits=bits)
        faces = {"inside": None, "at_the_clip": 1.0, "at_minus_the_clip": -1.0, "zero": 0.0}
        for name, at in faces.items():
            for weight in (1, 333, 1000, 4000):
                values = update(drawn, told, at=at)
                words = numbers.encode(told, values, weight, 17.25, 42)
                assert max(abs(word) for word in words) * told["roster_size"] < 2 ** (bits - 1)
                yield f"u{bits}_{name}_weight_{weight}", {
                    "comment": "the weight is cut to its cap of 1000; nothing exceeds the quantum",
                    "expect": "ok",
                    "layout": told,
                    "layout_hash": numbers.layout_hash(told).hex(),
                    "quantum": numbers.quantum(told),
                    "update": pack(values),
                    "weight": weight,
                    "loss": 17.25,
                    "hits": 42,
                    "words": numbers.to_words(told, words).hex(),
                }


def _rounded_at_random(drawn: Drawn) -> Iterator[tuple[str, Case]]:
    told = layout(ring_bits=16, cap=100)
    for name, at in {"inside": None, "at_the_clip": 1.0, "at_minus_the_clip": -1.0, "zero": 0.0}.items():
        for weight in (1, 33, 100, 400):
            values, key = update(drawn, told, at=at), drawn.take(32)
            draws = symmetric.ctr(key, 0, 4 * len(values))
            words = numbers.encode(told, values, weight, 17.25, 42, draws)
            assert max(abs(word) for word in words) * told["roster_size"] < 2**15
            yield f"u16_{name}_weight_{weight}", {
                "comment": "floor(product + u) with u from the key stream of the site's key",
                "expect": "ok",
                "layout": told,
                "layout_hash": numbers.layout_hash(told).hex(),
                "quantum": numbers.quantum(told),
                "update": pack(values),
                "weight": weight,
                "loss": 17.25,
                "hits": 42,
                "rounding": key.hex(),
                "words": numbers.to_words(told, words).hex(),
            }


def _refused(drawn: Drawn) -> Iterator[tuple[str, Case]]:
    values = update(drawn, layout())
    base: Case = {"layout": layout(), "weight": 10, "loss": 1.0, "hits": 0, "update": pack(values), "expect": "data"}
    above = numbers.to_f32(0.125 + 2**-26)
    yield "beyond_the_clip", base | {
        "comment": "one ulp above 2**-3 in body.weight",
        "update": pack([*values[:5], above, *values[6:]]),
        "names": "body.weight",
    }
    yield "beyond_a_channel_clip", base | {
        "comment": "the clip of norm.mean is 2**(6-9) in its first channel",
        "update": pack([*values[:7], -0.126, *values[8:]]),
        "names": "norm.mean",
    }
    for name, value in (("not_a_number", float("nan")), ("infinite", float("-inf"))):
        yield name, base | {"comment": "refused by name", "update": pack([*values[:6], value, *values[7:]])} | {
            "names": "body.bias"
        }
    yield "loss_beyond_its_clip", base | {"comment": "4096.5 above 2**12", "loss": 4096.5, "names": "loss"}
    yield "too_many_hits", base | {"comment": "5001 of 5000", "hits": 5001, "names": "hits"}


def layouts() -> Iterator[tuple[str, Case]]:
    def case(comment: str, told: dict[str, Any]) -> Case:
        return {"comment": comment, "expect": "config", "layout": told}

    def with_slot(slot: dict[str, Any]) -> dict[str, Any]:
        told = layout()
        return told | {"blocks": [*told["blocks"], slot]}

    count = {"name": "class_counts", "shape": [1], "kind": "count", "maximum": 10}
    yield "class_counts", case("class counts have no slot", with_slot(count))
    yield "prototypes", case("nor have prototypes", with_slot(count | {"name": "prototypes", "kind": "sum"}))
    told = layout()
    hits = told["blocks"][-1]
    yield "hits_per_class", case("one hit count, not one for each class", told | {
        "blocks": [*told["blocks"][:-1], hits | {"shape": [7]}]
    })
    yield "counts_overflow", case("5 * 5e8 exceeds 2**31 - 1", told | {
        "blocks": [*told["blocks"][:-1], hits | {"maximum": 500_000_000}]
    })
    yield "no_weight", case("a mean needs its weight", told | {
        "blocks": [block for block in told["blocks"] if block["name"] != "weight"]
    })
    yield "slot_before_tensor", case("slots come last", told | {"blocks": [*told["blocks"][6:], *told["blocks"][:6]]})
    yield "twice_the_same_name", case("names are distinct", told | {"blocks": [told["blocks"][0], *told["blocks"]]})
    yield "quantum_received", case("the quantum is derived, never received", told | {"quantum": 1})
    yield "ring_of_48_bits", case("16, 24, 32 or 64", told | {"ring_bits": 48})
    yield "weights_too_large_for_16_bits", case("205 of at most 204 for five sites", layout(ring_bits=16, cap=205))


def _sum(told: dict[str, Any], drawn: Drawn, weights: list[int]) -> list[int]:
    parts = [numbers.encode(told, update(drawn, told), weight, 3.5, 7) for weight in weights]
    return [sum(column) for column in zip(*parts, strict=True)]


def states() -> Iterator[tuple[str, Case]]:
    drawn = Drawn("states")
    for bits in (32, 64):
        yield from _good_states(drawn, bits)
    yield from _void_states(drawn, layout(), "void")
    drawn = Drawn("states of 24 bits")
    yield from _good_states(drawn, 24)
    yield from _void_states(drawn, layout(ring_bits=24), "u24_void")
    drawn = Drawn("capped states")
    for bits in (24, 32, 64):
        yield from _capped_states(drawn, bits)
    drawn, told = Drawn("states of 16 bits"), layout(ring_bits=16, cap=100)
    yield from _good_states(drawn, 16, told, most=100)
    yield from _void_states(drawn, told, "u16_void", [10, 90, 77])
    yield from _capped_states(drawn, 16, told, [10, 90, 77])
    yield "subnormal_and_minus_zero", _vanishing()
    yield "fused_multiply_add_differs", _midpoints()


def _good_states(
    drawn: Drawn, bits: int, told: dict[str, Any] | None = None, *, most: int = 1000
) -> Iterator[tuple[str, Case]]:
    told = told or layout(ring_bits=bits)
    words = len(numbers.clips(told))
    for name, weights in (("three_sites", [10, most * 9 // 10, 77]), ("least", [1, 1, 1]), ("most", [most] * 5)):
        state = [numbers.to_f32(drawn.number(2**24) / 2**22 - 2) for _ in range(words - 2)] + [0.5, 1e-6]
        total = _sum(told, drawn, weights)
        yield f"u{bits}_{name}", _state_case("good", told, state, total, len(weights))


def _void_states(
    drawn: Drawn, told: dict[str, Any], prefix: str, weights: list[int] | None = None
) -> Iterator[tuple[str, Case]]:
    at = len(numbers.clips(told))
    state = [0.25] * at
    weights, cap = weights or [10, 900, 77], told["weight_cap"]
    total = _sum(told, drawn, weights)
    faults: dict[str, dict[int, int]] = {
        "weights_add_up_to_one": {at: 1},
        "weights_above_the_cap": {at: 3 * cap + 1},
        "coordinate_too_large": {0: numbers.quantum(told) * sum(weights) // cap + 4},
        "padding_in_use": {len(total) - 1: 1},
        "loss_too_large": {at + 1: 3 * numbers.quantum(told) + 1},
        "negative_hits": {at + 2: -1},
        "too_many_hits": {at + 2: 15_001},
    }
    for name, changes in faults.items():
        wrong = [changes.get(i, value) for i, value in enumerate(total)]
        case = _state_case("an input out of range: the model stays", told, state, wrong, 3)
        assert case["verdict"] == 1, name
        yield f"{prefix}_{name}", case


def _capped_states(
    drawn: Drawn, bits: int, told: dict[str, Any] | None = None, weights: list[int] | None = None
) -> Iterator[tuple[str, Case]]:
    """One long step against the ceiling, and steps against the history that they make themselves."""
    told = told or layout(ring_bits=bits)
    state = [0.25] * len(numbers.clips(told))
    total = _sum(told, drawn, weights or [10, 900, 77])
    far = {i: (-1) ** i * (numbers.quantum(told) * 900 // 1000) for i in range(6)}
    long = [far.get(i, value) for i, value in enumerate(total)]
    yield f"u{bits}_beyond_the_ceiling", _state_case("shortened to the ceiling", told, state, long, 3)
    usual = [value // 64 if i < len(state) else value for i, value in enumerate(total)]
    movement: dict[str, Any] = {"window": 3, "factor": "1.5", "before": [[0, 0, 0]] * 4}
    for number, sent in enumerate([usual, usual, long, long, long, long]):
        case = _state_case("capped by the steps before", told, state, sent, 3, movement)
        yield f"u{bits}_history_{number}", case
        state, movement = numbers.floats(case["next"]), {**movement, "before": case["movement"]["after"]}


def _state_case(
    comment: str,
    told: dict[str, Any],
    state: list[float],
    total: list[int],
    survivors: int,
    movement: dict[str, Any] | None = None,
) -> Case:
    rule = (movement["window"], Fraction(movement["factor"]), movement["before"]) if movement else ()
    verdict, moved, after = numbers.next_state(told, state, total, survivors, *rule)
    return {
        **({"movement": {**movement, "after": after}} if movement else {}),
        "comment": comment,
        "expect": "ok",
        "layout": told,
        "state": pack(state),
        "state_hash": numbers.state_hash(state).hex(),
        "sum": numbers.to_words(told, total).hex(),
        "survivors": survivors,
        "verdict": verdict,
        "next": pack(moved),
        "next_hash": numbers.state_hash(moved).hex(),
    }


def _vanishing() -> Case:
    """Steps that lead to zero from below, to a subnormal, and a variance below zero."""
    told = layout()
    weights = [10, 900, 77]
    total = [0] * len(numbers.encode(told, [0.0] * 11, 1, 0.0, 0))
    total[11] = sum(weights)
    step = float(Fraction(2) ** -3 * told["weight_cap"] / (numbers.quantum(told) * sum(weights)))
    state = [numbers.to_f32(value) for value in (step, -step, step * 3, 2.0**-126, -(2.0**-126), 0.0, 1, 2, 3, 0.0, 1)]
    total[:6] = [-1, 1, -3, 0, 0, 0]
    total[9] = -1000
    case = _state_case("results near zero take one form; a variance stays at or above zero", told, state, total, 3)
    assert case["verdict"] == 0
    return case


def _midpoints() -> Case:
    """Coordinates where rounding the product and the sum apart, or once together, gives different floats."""
    words = 16
    told = {
        "ring_bits": 32,
        "roster_size": 3,
        "weight_cap": 1000,
        "blocks": [
            {"name": "w", "shape": [words], "kind": "mean", "clip_exponent": 1, "movement_exponent": 4},
            {"name": "weight", "shape": [1], "kind": "count", "maximum": 1000},
        ],
    }
    weight = 2357
    step = float(Fraction(2) * told["weight_cap"] / (numbers.quantum(told) * weight))
    state, sums, fused = [], [], []
    summed = numbers.quantum(told) // 3
    while len(state) < words:
        summed += 1
        old = -numbers.to_f32(float(summed) * step)
        apart = numbers.to_f32(old + float(summed) * step)
        together = numbers.to_f32(float(Fraction(old) + summed * Fraction(step)))
        if numbers.canonical(apart) != numbers.canonical(together):
            state.append(old)
            sums.append(summed)
            fused.append(numbers.canonical(together))
    total = [*sums, weight]
    case = _state_case("an FMA would give `fused_hash`", told, state, total + [0] * (-len(total) % 4), 3)
    assert case["verdict"] == 0
    return case | {"fused_hash": numbers.state_hash(fused).hex()}


TOPICS = {"encodings": encodings, "layouts": layouts, "states": states}
