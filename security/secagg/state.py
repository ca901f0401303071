"""The model that follows from a sum, bit for bit the same at every site.

A state is a flat vector of little-endian f32 in layout order, in one canonical form: no NaN, no infinity, no negative
zero, no subnormal. Sites compute the next one themselves from the published integer sum, so that the coordinator never
chooses a model (docs/spec/secure-aggregation.md, "The next model").
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from security import labels
from security.errors import DataError, LocalProtocolError
from security.prg import Words
from security.secagg.context import Verdict
from security.secagg.fixed_point import CHUNK_WORDS, step_size
from security.secagg.layout import HITS, LOSS, WEIGHT, Block, Layout

State = npt.NDArray[np.float32]
_EXPONENT_BITS: Final = np.uint32(0x7F80_0000)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on a sum and the state that follows: the old one if the sum is void, with the reason for the log."""

    verdict: Verdict
    state: State
    reason: str = ""


def _flush(state: State) -> bool:
    """Write zeros over subnormals and negative zeros in place; return whether everything is finite.

    On the bits, because float comparisons depend on whether the process flushes subnormals.
    """
    finite = True
    for part, _ in _chunks(slice(0, len(state))):
        bits = state[part].view(np.uint32)
        exponents = bits & _EXPONENT_BITS
        if not exponents.all():
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


def next_state(layout: Layout, state: State, total: Words, *, survivors: int) -> Outcome:
    """Judge a sum over `survivors` sites and apply it to `state`."""
    if state.shape != (layout.state_words,) or total.shape != (layout.words,) or total.dtype != layout.dtype:
        raise LocalProtocolError("state and sum must have the layout's length and type")
    signed = total.view(layout.signed_dtype)
    reason = judge(layout, signed, survivors=survivors)
    if reason:
        return Outcome(Verdict.VOID, state, reason)
    moved = _step(layout, state, signed)
    if not _flush(moved):
        return Outcome(Verdict.VOID, state, "the next model would not be finite")
    return Outcome(Verdict.GOOD, moved)


def _step(layout: Layout, state: State, signed: Words) -> State:
    weight = int(signed[layout.slot(WEIGHT)][0])
    moved = np.empty(layout.state_words, dtype="<f4")
    scratch = np.empty(CHUNK_WORDS, dtype=np.float64)
    for run in layout.runs:
        step = step_size(layout, run, weight)
        for part, within in _chunks(run.place):
            value = scratch[: part.stop - part.start]
            # Two calls with a double in between, never one: a fused multiply-add rounds once instead of twice, so that
            # machines with and without it would come to different models.
            np.multiply(signed[part], step if step.ndim == 0 else step[within], out=value, dtype=np.float64)
            np.add(state[part], value, out=value, dtype=np.float64)
            with np.errstate(over="ignore"):  # what does not fit becomes infinite, and the sum void
                np.copyto(moved[part], value, casting="same_kind")
    for block, place in layout.placed():
        if block.nonnegative:
            np.maximum(moved[place], np.float32(0), out=moved[place])
    return moved


def _chunks(place: slice) -> Iterator[tuple[slice, slice]]:
    """Yield a range in chunks that stay in the cache: as places in the vector and within the range."""
    for start in range(place.start, place.stop, CHUNK_WORDS):
        stop = min(start + CHUNK_WORDS, place.stop)
        yield slice(start, stop), slice(start - place.start, stop - place.start)


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
    for block, place in layout.placed():
        if _moves_too_far(layout, block, signed[place], weight):
            return f"tensor {block.name} moves further than its movement cap"
    return ""


def _moves_too_far(layout: Layout, block: Block, signed: Words, weight: int) -> bool:
    """Compare the L2 norm of a tensor's step with its cap, as whole numbers."""
    coarse = max(0, (layout.roster_size * layout.quantum).bit_length() - 31)
    # So much that 2^22 squares fit 64 bits, and no more, so that small steps count.
    shift = 2 * min(layout.ring_bits, 32) - 40
    moved = sum(_movement(signed[part], coarse, shift) for part, _ in _chunks(slice(0, len(signed))))
    # The step is S*C*W / (Q*weight) with S = s * 2^coarse, and `moved` is the sum of s^2 / 2^shift.
    step = (moved << (shift + 2 * coarse)) * layout.weight_cap**2
    bound = (layout.quantum * weight) ** 2
    return step * Fraction(4) ** (block.clip_exponent - block.movement_exponent) > bound


def _movement(part: Words, coarse: int, shift: int) -> int:
    steps = part >> coarse if coarse else part
    squares: Any = np.multiply(steps, steps, dtype=np.int64)
    squares >>= shift
    return int(squares.sum())
