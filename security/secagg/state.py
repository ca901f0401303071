"""The model that follows from a sum, bit for bit the same at every site.

A state is a flat vector of little-endian f32 in layout order, in one canonical form: no NaN, no infinity, no negative
zero, no subnormal. Sites compute the next one themselves from the published integer sum, so that the coordinator never
chooses a model (docs/spec/secure-aggregation.md, "The next model").
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lazaret.errors import DataError, LocalProtocolError
from security import labels
from security.crypto.prg import Words
from security.secagg.context import SumVerdict
from security.secagg.fixed_point import CHUNK_WORDS, step_size
from security.secagg.layout import HITS, LOSS, SCORE, SCORED, SQUARES, WEIGHT, Layout
from security.secagg.scores import fault_in

State = npt.NDArray[np.float32]
_EXPONENT_BITS: Final = np.uint32(0x7F80_0000)


@dataclass(frozen=True, slots=True)
class SumOutcome:
    """The verdict on a sum and the state that follows: the old one if the sum is void, with the reason for the log.

    :ivar movements: how far tensors moved in the newest rounds, this one included; see `MovementRule`.
    :ivar capped: tensors whose step was shortened to their cap.
    """

    verdict: SumVerdict
    state: State
    state_hash: bytes
    reason: str = ""
    movements: bytes = b""
    capped: tuple[str, ...] = ()


def _flush(state: State) -> bool:
    """Write zeros over subnormals and negative zeros in place; return whether everything is finite.

    On the bits, because float comparisons depend on whether the process flushes subnormals.
    """
    finite = True
    for part in _chunks(slice(0, len(state))):
        bits = state[part].view(np.uint32)
        exponents = bits & _EXPONENT_BITS
        if not exponents.min():
            np.multiply(bits, exponents != 0, out=bits)
        finite = finite and exponents.max() != _EXPONENT_BITS
    return finite


def canonical(values: npt.ArrayLike) -> State:
    """Return a canonical copy of a float vector; refuses NaN and infinity."""
    with np.errstate(over="ignore"):
        state = np.array(values, dtype="<f4").reshape(-1)
    if not _flush(state):
        raise DataError("the model holds NaN or infinity", hint="it cannot be the start of a round")
    return state


def state_hash(state: State) -> bytes:
    if state.dtype.str != "<f4" or state.ndim != 1 or not state.flags.c_contiguous:
        raise LocalProtocolError("a state is one contiguous vector of little-endian f32")
    digest = hashlib.sha256(labels.STATE)
    digest.update(state.view(np.uint8).data)
    return digest.digest()


def flatten(layout: Layout, tensors: Mapping[str, npt.ArrayLike]) -> State:
    """Lay named tensors out as a state (or as an update: the form is not made canonical here)."""
    flat = np.empty(layout.state_words, dtype="<f4")
    expected = {block.name for block in layout.state_blocks}
    if set(tensors) != expected:
        odd = sorted(expected.symmetric_difference(tensors))
        raise LocalProtocolError(f"tensors do not match the layout: {', '.join(odd[:5])}", where="layout")
    for block, place in layout.placed():
        tensor = np.asarray(tensors[block.name])
        if tensor.shape != block.shape:
            raise LocalProtocolError(f"shape {tensor.shape}, the layout says {block.shape}", where=block.name)
        flat[place] = tensor.reshape(-1)
    return flat


def unflatten(layout: Layout, state: State) -> dict[str, State]:
    """Return views of a state by tensor name."""
    return {block.name: state[place].reshape(block.shape) for block, place in layout.placed()}


# How far a tensor may move in one round. A cap bounds the length of a step, not its direction, and whoever steers the
# sum feeds the history that the cap is made from: docs/threat-model.md says what that leaves possible.

STEP_BITS: Final = 20  # lengths are counted in units of 2^-20 of the tensor's clip
SCALE_BITS: Final = 31  # a step is multiplied with a whole number below 2^31 and divided by 2^31


# How far tensors moved in the newest rounds: eight bytes for each round and tensor.
MAX_MOVEMENTS: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class MovementRule:
    """The manifest's movement caps: the smaller of a tensor's ceiling and `factor` times the median length of its steps
    in the newest `window` rounds in which it moved. Window 0: the ceilings alone.

    The lengths are whole numbers that follow from published sums, so that every site has the same ones. They are a
    table of `window` numbers for each tensor, newest first, zero where there is none yet. R covers it.
    """

    window: int = 0
    factor: Fraction = Fraction(2)

    def _table(self, layout: Layout, movements: bytes) -> npt.NDArray[np.uint64]:
        rows = len(layout.state_blocks)
        if not movements:
            return np.zeros((rows, self.window), dtype=">u8")
        if len(movements) != rows * self.window * 8:
            raise LocalProtocolError("the table of movements is not the layout's", where="result")
        return np.frombuffer(movements, dtype=">u8").reshape(rows, self.window).copy()

    def caps(self, layout: Layout, movements: bytes) -> list[int]:
        """The cap of each tensor for the next step."""
        caps = []
        for block, row in zip(layout.state_blocks, self._table(layout, movements).tolist(), strict=True):
            seen = sorted(length for length in row if length)
            ceiling = 1 << max(0, block.movement_exponent - block.clip_exponent + STEP_BITS)
            # The lower of two middle ones: a median that is itself a step that was taken.
            usual = seen[(len(seen) - 1) // 2] if seen else 0
            caps.append(min(ceiling, max(1, math.floor(self.factor * usual))) if usual else ceiling)
        return caps

    def after(self, layout: Layout, movements: bytes, lengths: Sequence[int]) -> bytes:
        """The table with a round more. What was cut off does not count: it would raise the next cap."""
        table = self._table(layout, movements)
        for row, length in zip(table, lengths, strict=True):
            if length and self.window:
                row[1:] = row[:-1].copy()
                row[0] = length
        return table.tobytes()


CEILINGS_ALONE: Final = MovementRule()


def next_state(
    layout: Layout,
    state: State,
    total: Words,
    *,
    survivors: int,
    rule: MovementRule = CEILINGS_ALONE,
    movements: bytes = b"",
) -> SumOutcome:
    """Judge a sum over `survivors` sites and apply it to `state`.

    :param movements: those of the result before.
    """
    successor = Successor(layout, state, total)
    successor.extend(layout.words)
    return successor.outcome(survivors=survivors, rule=rule, movements=movements)


class Successor:
    """The next state, made from its beginning on while a sum comes in.

    The word that holds the weight must be there already. Nothing here counts before `outcome` has tested the whole sum.

    :param total: is filled by the caller, which states with `extend` how much of it is complete.
    """

    def __init__(self, layout: Layout, state: State, total: Words) -> None:
        if state.shape != (layout.state_words,) or total.shape != (layout.words,) or total.dtype != layout.dtype:
            raise LocalProtocolError("state and sum must have the layout's length and type")
        self._layout = layout
        self._state = state
        self._signed = total.view(layout.signed_dtype)
        # A weight that cannot be, of a sum that will be void: any number will do for what nobody will use.
        weight = max(1, int(self._signed[layout.slot(WEIGHT)][0]))
        self._steps = [(run.place, step_size(layout, run, weight)) for run in layout.runs]
        self._nonnegative = [place for block, place in layout.placed() if block.nonnegative]
        self._moved: State = np.empty(layout.state_words, dtype="<f4")
        self._scratch = np.empty(CHUNK_WORDS, dtype=np.float64)
        self._digest = hashlib.sha256(labels.STATE)
        self._done = 0
        self._finite = True

    def extend(self, ready: int) -> tuple[int, State]:
        """Continue up to the first `ready` words of the sum; returns the position of the new values, and the values."""
        start, stop = self._done, min(ready, self._layout.state_words)
        for part in _chunks(slice(start, stop)):
            self._move(part)
            self._finite = _flush(self._moved[part]) and self._finite
            self._digest.update(self._moved[part].view(np.uint8).data)
        self._done = max(start, stop)
        return start, self._moved[start : self._done]

    def _move(self, part: slice) -> None:
        for place, step in self._steps:
            here = _overlap(place, part)
            if here.start >= here.stop:
                continue
            value = self._scratch[: here.stop - here.start]
            own = step if step.ndim == 0 else step[here.start - place.start : here.stop - place.start]
            _add_step(self._state[here], self._signed[here], own, value)
            with np.errstate(over="ignore"):  # what does not fit becomes infinite, and the sum void
                np.copyto(self._moved[here], value, casting="same_kind")
        for place in self._nonnegative:
            here = _overlap(place, part)
            if here.start < here.stop:
                np.maximum(self._moved[here], np.float32(0), out=self._moved[here])

    def outcome(
        self, *, survivors: int, rule: MovementRule = CEILINGS_ALONE, movements: bytes = b""
    ) -> SumOutcome:
        """Judge the sum, all of which is there now, and shorten the steps that are longer than their caps."""
        if self._done < self._layout.state_words:
            raise LocalProtocolError("the sum is not complete")
        layout = self._layout
        reason = judge(layout, self._signed, survivors=survivors)
        if reason:
            return SumOutcome(SumVerdict.VOID, self._state, state_hash(self._state), reason, movements)
        steps = step_lengths(layout, self._signed)
        caps = rule.caps(layout, movements)
        measured = zip(layout.state_blocks, steps, caps, strict=True)
        capped = tuple(block.name for block, step, cap in measured if step > cap)
        if capped:
            self._shorten(steps, caps)
        if not self._finite:
            reason = "the next model would not be finite"
            return SumOutcome(SumVerdict.VOID, self._state, state_hash(self._state), reason, movements)
        after = rule.after(layout, movements, [min(step, cap) for step, cap in zip(steps, caps, strict=True)])
        return SumOutcome(SumVerdict.GOOD, self._moved, self._digest.digest(), "", after, capped)

    def _shorten(self, steps: Sequence[int], caps: Sequence[int]) -> None:
        """Make the model once more, from a sum in which long steps are shortened. The published sum stays as it is."""
        signed = self._signed.copy()
        for (_, place), step, cap in zip(self._layout.placed(), steps, caps, strict=True):
            if step > cap:
                signed[place] = shortened(signed[place], cap, step)
        self._signed, self._done, self._finite = signed, 0, True
        self._digest = hashlib.sha256(labels.STATE)
        self.extend(self._layout.words)


def _add_step(state: State, signed: Words, step: npt.NDArray[np.float64], value: npt.NDArray[np.float64]) -> None:
    """Two calls with a double in between, never one.

    A fused multiply-add rounds once instead of twice: machines with and without it would come to different models.
    """
    np.multiply(signed, step, out=value, dtype=np.float64)
    np.add(state, value, out=value, dtype=np.float64)


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _chunks(place: slice) -> Iterator[slice]:
    """Yield a range in chunks that stay in the cache."""
    for start in range(place.start, place.stop, CHUNK_WORDS):
        yield slice(start, min(start + CHUNK_WORDS, place.stop))


def judge(layout: Layout, signed: Words, *, survivors: int) -> str:
    """Return why a sum is void, or an empty string if it is good. Exact integers, the same at every site.

    Every test follows from what honest sites encode, so that only a site that sends other numbers makes a sum void:
    without them, weights that add up to 1 would multiply the model at will.
    """
    cap, quantum = layout.weight_cap, layout.quantum
    weight = int(signed[layout.slot(WEIGHT)][0])
    if not survivors <= weight <= survivors * cap:
        return "the sum of weights is out of range"
    body = signed[: layout.state_words]
    largest = max(int(body.max()), -int(body.min()))
    if cap * largest > quantum * weight + survivors * cap:
        return "a coordinate of the sum is larger than the weights allow"
    if signed[layout.used_words :].any():
        return "the padding of the sum is not zero"
    if layout.has(LOSS) and abs(int(signed[layout.slot(LOSS)][0])) > survivors * quantum:
        return "the loss sum is out of range"
    if layout.has(HITS) and not 0 <= int(signed[layout.slot(HITS)][0]) <= survivors * layout.block(HITS).maximum:
        return "the hit count is out of range"
    return _score_fault(layout, signed, survivors)


def _score_fault(layout: Layout, signed: Words, survivors: int) -> str:
    if not layout.has(SCORED):
        return ""
    count, total = (int(signed[layout.slot(name)][0]) for name in (SCORED, SCORE))
    squares = int(signed[layout.slot(SQUARES)][0]) if layout.has(SQUARES) else None
    return fault_in(count, total, squares, survivors=survivors)


def step_lengths(layout: Layout, signed: Words) -> list[int]:
    """The L2 norm of each tensor's averaged step, in whole units."""
    weight = int(signed[layout.slot(WEIGHT)][0])
    return [_step_length(layout, signed[place], weight) for _, place in layout.placed()]


def shortened(signed: Words, cap: int, length: int) -> Words:
    """A tensor of a sum, scaled to `cap / length` and rounded down, in whole numbers."""
    scale = (cap << SCALE_BITS) // length
    wide = signed.astype(np.int64)
    # In two halves, so that no product leaves 63 bits: floor(S k / 2^31) = high k + floor(low k / 2^31).
    high, low = wide >> SCALE_BITS, wide & ((1 << SCALE_BITS) - 1)
    scaled: Words = (high * scale + ((low * scale) >> SCALE_BITS)).astype(signed.dtype)
    return scaled


def _step_length(layout: Layout, signed: Words, weight: int) -> int:
    coarse = max(0, (layout.roster_size * layout.quantum).bit_length() - 31)
    # So much that 2^22 squares fit 64 bits, and no more, so that small steps count.
    shift = max(0, 2 * min(layout.ring_bits, 32) - 40)
    moved = sum(_movement(signed[part], coarse, shift) for part in _chunks(slice(0, len(signed))))
    # The step is S*C*W / (Q*weight) with S = s * 2^coarse, and `moved` is the sum of s^2 / 2^shift.
    step = (moved << (shift + 2 * coarse + 2 * STEP_BITS)) * layout.weight_cap**2
    return math.isqrt(step // (layout.quantum * weight) ** 2)


def _movement(part: Words, coarse: int, shift: int) -> int:
    steps = part >> coarse if coarse else part
    if not shift:
        # In 16 bits. Whole numbers below 2^53 are exact as doubles, in any order: a chunk's squares reach 2^46.
        doubles = steps.astype(np.float64)
        return int(np.einsum("i,i->", doubles, doubles))
    squares: Any = np.multiply(steps, steps, dtype=np.int64)
    squares >>= shift
    return int(squares.sum())
