"""For any sites, weights, updates and dropouts: the decoded sum equals the one of big integers, bit for bit."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from security.crypto import key_agreement, masking, prg, shamir
from security.crypto.key_agreement import KeyPair
from security.crypto.masking import Accumulator, OpenedMasks, SiteMasks
from security.crypto.ring import BITS, Ring
from security.rng import CountedRandomness
from security.secagg.context import SumVerdict
from security.secagg.fixed_point import encode
from security.secagg.layout import Block, Layout, most_weight
from security.secagg.state import canonical, judge, next_state
from security.secrets import Secret

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = st.text(alphabet="abAB019-", min_size=1, max_size=4)


@st.composite
def layouts(draw: Any) -> Layout:
    blocks = []
    for number in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 9))
        if draw(st.booleans()):
            blocks.append(
                Block(
                    name=f"w{number}",
                    shape=(size,),
                    kind="mean",
                    clip_exponent=draw(st.integers(-20, 20)),
                    movement_exponent=100,
                )
            )
        else:
            blocks.append(
                Block(
                    name=f"s{number}",
                    shape=(size,),
                    kind="statistic",
                    clip_exponent=6,
                    movement_exponent=100,
                    units=tuple(draw(st.lists(st.integers(-30, 30), min_size=size, max_size=size))),
                    nonnegative=draw(st.booleans()),
                )
            )
    bits, roster = draw(st.sampled_from(BITS)), draw(st.integers(2, 100))
    most = min(2**20, (2 ** (bits - 1) - 1) // roster)
    heaviest = most_weight(roster) if bits == 16 else most
    return Layout.of(
        blocks,
        roster_size=roster,
        weight_cap=draw(st.integers(1, heaviest)),
        ring_bits=bits,
        loss_exponent=draw(st.one_of(st.none(), st.integers(-5, 20))),
        hits_maximum=draw(st.one_of(st.none(), st.integers(1, most))),
    )


@dataclass
class Input:
    update: np.ndarray
    weight: int
    loss: float | None
    hits: int | None


def clips(layout: Layout) -> list[Fraction]:
    out = []
    for block in layout.state_blocks:
        units = block.units or (0,) * block.size
        out += [Fraction(2) ** (block.clip_exponent + unit) for unit in units]
    return out


@st.composite
def inputs(draw: Any, layout: Layout) -> Input:
    """Parts of the clip, with the extremes, zero and the smallest steps drawn often."""
    parts = st.one_of(
        st.sampled_from([1.0, -1.0, 0.0, 1 - 2**-24, 2**-30, -(2**-40)]),
        st.floats(-1, 1, width=32),
    )
    drawn = draw(st.lists(parts, min_size=layout.state_words, max_size=layout.state_words))
    update = np.array([float(clip) * part for clip, part in zip(clips(layout), drawn, strict=True)], dtype=np.float32)
    cap = layout.weight_cap
    loss = hits = None
    if layout.has("loss"):
        loss = draw(st.floats(-1, 1)) * 2.0 ** layout.block("loss").clip_exponent
    if layout.has("hits"):
        hits = draw(st.integers(0, layout.block("hits").maximum))
    return Input(update, draw(st.sampled_from([1, cap, cap + 1, max(1, cap // 3)])), loss, hits)


ROUNDING = Secret(bytes(range(32)))


def encoded(layout: Layout, one: Input) -> np.ndarray:
    rounding = ROUNDING if layout.rounds_at_random else None
    return encode(layout, one.update, weight=one.weight, loss=one.loss, hits=one.hits, rounding=rounding).words


def reference(layout: Layout, given: Input) -> list[int]:
    """Python's integers and fractions; a float of a fraction is rounded once."""
    weight = min(given.weight, layout.weight_cap)
    top = Fraction(float(Fraction(weight * layout.quantum, layout.weight_cap)))
    pairs = zip(given.update, clips(layout), strict=True)
    exact = [float(Fraction(float(value)) / clip * top) for value, clip in pairs]
    if layout.rounds_at_random:
        draws = struct.unpack(f"<{len(exact)}I", prg.keystream(ROUNDING, 4 * len(exact)))
        out = [math.floor(Fraction(value) + Fraction(u, 2**32)) for value, u in zip(exact, draws, strict=True)]
    else:
        out = [round(value) for value in exact]
    out.append(weight)
    if given.loss is not None:
        out.append(round(given.loss / 2.0 ** layout.block("loss").clip_exponent * float(layout.quantum)))
    if given.hits is not None:
        out.append(given.hits)
    return out + [0] * (layout.words - len(out))


@SETTINGS
@given(st.data())
def test_encoding_is_exact_and_its_sum_never_wraps(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    count = data.draw(st.integers(1, min(layout.roster_size, 6)))
    given_inputs = [data.draw(inputs(layout)) for _ in range(count)]
    total = np.zeros(layout.words, dtype=layout.dtype)
    plain = [0] * layout.words
    for one in given_inputs:
        words = encoded(layout, one)
        expected = reference(layout, one)
        assert words.view(layout.signed_dtype).tolist() == expected
        assert max(map(abs, expected)) * layout.roster_size <= layout.half_ring
        total += words
        plain = [a + b for a, b in zip(plain, expected, strict=True)]
    assert total.view(layout.signed_dtype).tolist() == plain
    # Honest inputs, extremes included, are never void.
    assert judge(layout, total.view(layout.signed_dtype), survivors=count) == ""


@SETTINGS
@given(st.data())
def test_the_next_state_is_rounded_as_the_specification_says(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    given_inputs = [data.draw(inputs(layout)) for _ in range(2)]
    total = np.zeros(layout.words, dtype=layout.dtype)
    for one in given_inputs:
        total += encoded(layout, one)
    state = canonical(
        data.draw(
            st.lists(st.floats(-1e6, 1e6, width=32), min_size=layout.state_words, max_size=layout.state_words)
        )
    )
    outcome = next_state(layout, state, total, survivors=2)
    assert outcome.verdict is SumVerdict.GOOD
    signed = total.view(layout.signed_dtype).tolist()
    weight = signed[layout.state_words]
    floors = np.concatenate([np.full(block.size, block.nonnegative) for block in layout.state_blocks])
    for old, summed, clip, floor, new in zip(state, signed, clips(layout), floors, outcome.state, strict=False):
        step = float(clip * layout.weight_cap / (layout.quantum * weight))
        expected = np.float32(float(old) + float(summed) * step)
        expected = np.float32(0) if abs(expected) < 2.0**-126 or (floor and expected < 0) else expected
        assert new.tobytes() == expected.tobytes()


@SETTINGS
@given(
    names=st.lists(NAMES, min_size=2, max_size=7, unique=True),
    words=st.integers(1, 40).map(lambda blocks: blocks * 4),
    bits=st.sampled_from(BITS),
    data=st.data(),
)
def test_masks_come_off_exactly_the_sum_of_the_survivors(
    names: list[str], words: int, bits: int, data: st.DataObject
) -> None:
    dropped = set(data.draw(st.lists(st.sampled_from(names), max_size=len(names) - 1, unique=True)))
    randomness = CountedRandomness(repr((names, words)).encode())
    kx = randomness.bytes(32)
    pairs = {name: KeyPair.generate(randomness) for name in names}
    own = {name: Secret(randomness.bytes(32)) for name in names}
    added = Secret(randomness.bytes(32))

    def key(one: str, other: str) -> Secret:
        return key_agreement.mask_key(pairs[one], pairs[other].public, added, kx=kx, own_id=one, peer_id=other)

    ring = Ring(bits)
    total = Accumulator(words, ring)
    plain = np.zeros(words, dtype=ring.dtype)
    for name in names:
        vector = ring.unpack(randomness.bytes(words * ring.word_bytes)).copy()
        masked = vector.copy()
        masking.mask(masked, SiteMasks.of(name, own[name], {peer: key(name, peer) for peer in names if peer != name}))
        assert (masked != vector).any()
        if name not in dropped:
            total.add(0, ring.pack(masked).tobytes())
            plain += vector
    alive = [name for name in names if name not in dropped]
    opened = OpenedMasks.of([own[name] for name in alive], {(a, d): key(d, a) for a in alive for d in dropped})
    total.unmask(opened)
    ring.wrap(plain)
    assert (total.total == plain).all()


@SETTINGS
@given(st.data())
def test_any_quorum_joins_a_secret(data: st.DataObject) -> None:
    holders = data.draw(st.integers(1, 30))
    threshold = data.draw(st.integers(1, holders))
    secret = Secret(data.draw(st.binary(min_size=32, max_size=32)))
    randomness = CountedRandomness(secret.reveal())
    shares = shamir.split(secret, threshold=threshold, holders=holders, randomness=randomness)
    chosen = data.draw(st.permutations(range(1, holders + 1)))[:threshold]
    assert shamir.join({x: shares[x - 1] for x in chosen}, threshold=threshold) == secret


@SETTINGS
@given(
    start=st.integers(0, 200).map(lambda block: 16 * block),
    length=st.integers(0, 500),
    key=st.binary(min_size=32, max_size=32),
)
def test_a_stream_is_the_same_from_anywhere(start: int, length: int, key: bytes) -> None:
    whole = prg.keystream(Secret(key), 16 * 200 + 500)
    assert prg.keystream(Secret(key), length, offset=start) == whole[start : start + length]


@SETTINGS
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1))
def test_canonical_states_stay_as_they_are(values: list[float]) -> None:
    state = canonical(values)
    assert canonical(state).tobytes() == state.tobytes()
    for given_value, kept in zip(values, state.tolist(), strict=True):
        assert kept == given_value or (kept == 0 and abs(given_value) < 2.0**-126)
        assert math.copysign(1, kept) == 1 or kept < 0


@SETTINGS
@given(layout=layouts())
def test_layouts_survive_json(layout: Layout) -> None:
    assert Layout.from_dict(layout.to_dict()) == layout
