"""From floats to ring elements and back (docs/spec/secure-aggregation.md, "Numbers").

A coordinate of the update becomes ``rint(x * w * Q / (C * W))`` in double precision: one multiplication by a constant
that is rounded once, then one rounding to an integer, so that |x| <= C and w <= W give at most Q. Sums of integers
are exact; there are no float sums.

In the ring of 16 bits steps are coarse, and small updates would be rounded to zero round after round. There a
coordinate is rounded up with the chance of its fraction, ``floor(x * w * Q / (C * W) + u)`` with u uniform in [0, 1),
so that the error is zero on average. The draws come from a key of the site and are made once for an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from lazaret.errors import DataError, LocalProtocolError
from security.crypto.prg import BLOCK_BYTES, Words, keystream
from security.secagg.clips import power_of_two_above
from security.secagg.layout import HITS, LOSS, SCORE, SCORE_GRID, SCORED, SQUARES, WEIGHT, Block, Layout, Run
from security.secagg.scores import ScoreSum
from security.secrets import Secret

CHUNK_WORDS = 65_536
Floats = npt.NDArray[Any]  # float32 or float64


@dataclass(frozen=True, slots=True)
class Encoded:
    """A vector of the layout, ready to be masked, and how many of its values were cut to their clip (DP only)."""

    words: Words
    saturated: int


def encode(
    layout: Layout,
    update: Floats,
    *,
    weight: int,
    loss: float | None = None,
    hits: int | None = None,
    score: int | None = None,
    saturate: bool = False,
    rounding: Secret | None = None,
) -> Encoded:
    """Encode one site's update, a flat float vector in the order of the layout's tensors.

    :param weight: the site's sample count, at least 1; what exceeds the weight cap counts as the cap.
    :param score: in 64ths, of a site that consents; a site without one adds zeros and is not counted.
    :param saturate: for differential privacy: cut values to their clips and count them, instead of refusing. A refusal
        that depends on the data would be a release of its own. NaN and infinity are refused in either mode.
    :param rounding: the key of the draws in a ring that rounds at random; for this vector alone, and for no other.
    """
    if layout.rounds_at_random != (rounding is not None):
        raise LocalProtocolError("draws for rounding belong to a ring that rounds at random, and to no other")
    if update.shape != (layout.state_words,) or update.dtype not in (np.float32, np.float64):
        raise LocalProtocolError(f"update must be {layout.state_words} floats, got {update.shape} of {update.dtype}")
    if weight < 1:
        raise LocalProtocolError("weight must be at least 1", hint="a site without data does not join a round")
    weight = min(weight, layout.weight_cap)
    words = np.zeros(layout.words, dtype=layout.dtype)
    signed = words.view(layout.signed_dtype)
    top = float(Fraction(weight * layout.quantum, layout.weight_cap))
    scratch = np.empty(CHUNK_WORDS, dtype=np.float64)
    saturated = 0
    for part, factors in _pieces(layout, top):
        values = update[part]
        product = scratch[: len(values)]
        np.multiply(values, factors, out=product, dtype=np.float64)
        if not (product.max() <= top and product.min() >= -top):
            saturated += _cut(layout, part.start, values, product, top, saturate=saturate)
        if rounding is None:
            np.rint(product, out=product)
        else:
            np.add(product, _draws(rounding, part), out=product)
            np.floor(product, out=product)
        np.copyto(signed[part], product, casting="unsafe")
    signed[layout.slot(WEIGHT)] = weight
    _encode_auxiliary(layout, signed, loss, hits, saturate=saturate)
    _encode_score(layout, signed, score)
    return Encoded(words, saturated)


def place(
    layout: Layout,
    units: Words,
    *,
    weight: int,
    loss: float | None = None,
    hits: int | None = None,
    score: int | None = None,
    saturate: bool = True,
) -> Encoded:
    """Whole numbers at their places, for noise that sites share: they have their noise already, so nothing is cut here.

    The step that follows from their sum is a unit of the layout over the sum of weights, so the weight does not scale
    them (docs/spec/differential-privacy.md, section 4).
    """
    if units.shape != (layout.state_words,) or units.dtype.kind != "i":
        raise LocalProtocolError(f"units must be {layout.state_words} whole numbers, got {units.shape}")
    if not (-layout.quantum <= int(units.min()) and int(units.max()) <= layout.quantum):
        raise LocalProtocolError("units are beyond the part of the ring that one site has")
    words = np.zeros(layout.words, dtype=layout.dtype)
    signed = words.view(layout.signed_dtype)
    signed[: layout.state_words] = units
    signed[layout.slot(WEIGHT)] = min(max(1, weight), layout.weight_cap)
    _encode_auxiliary(layout, signed, loss, hits, saturate=saturate)
    _encode_score(layout, signed, score)
    return Encoded(words, 0)


def _draws(key: Secret, part: slice) -> Floats:
    """Uniform numbers in [0, 1) for these places, of 32 bits each."""
    start = part.start * 4 // BLOCK_BYTES * BLOCK_BYTES
    stream = np.frombuffer(keystream(key, 4 * part.stop - start, offset=start), dtype="<u4")
    return stream[part.start - start // 4 :] * 2.0**-32


def _pieces(layout: Layout, top: float) -> Iterator[tuple[slice, Any]]:
    """Yield the tensors in chunks that stay in the cache, with top / clip: a number, or one for each value.

    A clip is a power of two, so that this division is exact and |x| <= clip gives exactly |product| <= top.
    """
    for run in layout.runs:
        factors = np.divide(top, run.clips)
        for start in range(run.place.start, run.place.stop, CHUNK_WORDS):
            part = slice(start, min(start + CHUNK_WORDS, run.place.stop))
            yield part, factors if factors.ndim == 0 else factors[start - run.place.start :][: part.stop - start]


def _cut(layout: Layout, start: int, values: Floats, product: Floats, top: float, *, saturate: bool) -> int:
    """Handle a chunk with a value beyond its clip; leaves `product` within the bounds or raises."""
    finite = np.isfinite(values)
    if not finite.all():
        raise DataError(
            "the update holds NaN or infinity; nothing was sent",
            where=f"tensor {layout.block_at(start + int(np.argmin(finite))).name}",
            hint="training has diverged: lower the learning rate or check the data",
        )
    ratio = np.abs(product) / top
    if saturate:
        np.clip(product, -top, top, out=product)
        return int(np.count_nonzero(ratio > 1))
    worst = int(np.argmax(ratio))
    block = layout.block_at(start + worst)
    unit = " in units of its channel" if block.kind == "statistic" else ""
    needed = block.clip_exponent + max(1, power_of_two_above(float(ratio[worst])))
    raise DataError(
        f"value {float(values[worst]):.6g} is beyond its clip 2**{block.clip_exponent}{unit}; nothing was sent",
        where=f"tensor {block.name}",
        hint=f"a clip_exponent of {needed} would hold it: the consortium publishes a manifest with larger clips, "
        "or lower the learning rate",
    )


def _encode_auxiliary(layout: Layout, signed: Words, loss: float | None, hits: int | None, *, saturate: bool) -> None:
    if layout.has(LOSS) != (loss is not None) or layout.has(HITS) != (hits is not None):
        raise LocalProtocolError("the layout's auxiliary slots must be filled, and no others")
    if loss is not None:
        signed[layout.slot(LOSS)] = _loss_word(layout.block(LOSS), loss, layout.quantum, saturate=saturate)
    if hits is not None:
        maximum = layout.block(HITS).maximum
        if not 0 <= hits <= maximum and not saturate:
            raise DataError(f"hit count {hits} is not in 0..{maximum}", where="slot hits", hint="raise its maximum")
        signed[layout.slot(HITS)] = min(max(hits, 0), maximum)


def _encode_score(layout: Layout, signed: Words, score: int | None) -> None:
    if score is None:
        return
    if not layout.has(SCORED):
        raise LocalProtocolError("the layout has no slot for scores")
    if not 0 <= score <= SCORE_GRID:
        raise DataError(f"score {score} is not in 0..{SCORE_GRID}; nothing was sent", where="slot score")
    signed[layout.slot(SCORED)], signed[layout.slot(SCORE)] = 1, score
    if layout.has(SQUARES):
        signed[layout.slot(SQUARES)] = score * score


def _loss_word(block: Block, loss: float, quantum: int, *, saturate: bool) -> int:
    clip = math.ldexp(1.0, block.clip_exponent)
    if not math.isfinite(loss) or (abs(loss) > clip and not saturate):
        raise DataError(
            f"loss sum {loss:.6g} is beyond its clip 2**{block.clip_exponent}",
            where="slot loss",
            hint="the consortium publishes a manifest with a larger clip, or training has diverged",
        )
    return round(min(max(loss, -clip), clip) / clip * float(quantum))


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded sum: the averaged update and the sums of the slots."""

    weight: int
    mean: npt.NDArray[np.float64]
    loss: float | None
    hits: int | None


def decode(layout: Layout, total: Words) -> Decoded:
    """Read a sum of encoded vectors. Only for looking at it: the next state is computed in `state`."""
    weight, loss, hits = decode_slots(layout, total)
    mean = total.view(layout.signed_dtype)[: layout.state_words].astype(np.float64)
    for run in layout.runs:
        mean[run.place] *= step_size(layout, run, weight)
    return Decoded(weight, mean, loss, hits)


def decode_slots(layout: Layout, total: Words) -> tuple[int, float | None, int | None]:
    """The sums of weights, losses and hits, without the update they came with."""
    signed = total.view(layout.signed_dtype)
    weight = int(signed[layout.slot(WEIGHT)][0])
    if weight < 1:
        raise DataError("the sum of weights is not positive", where="slot weight")
    loss = hits = None
    if layout.has(LOSS):
        clip = Fraction(2) ** layout.block(LOSS).clip_exponent
        loss = float(int(signed[layout.slot(LOSS)][0]) * clip / layout.quantum)
    if layout.has(HITS):
        hits = int(signed[layout.slot(HITS)][0])
    return weight, loss, hits


def decode_scores(layout: Layout, total: Words) -> ScoreSum | None:
    """What the consenting sites of a sum scored; None without slots, or where no site has added a score."""
    if not layout.has(SCORED):
        return None
    signed = total.view(layout.signed_dtype)
    count, score = (int(signed[layout.slot(name)][0]) for name in (SCORED, SCORE))
    squares = int(signed[layout.slot(SQUARES)][0]) if layout.has(SQUARES) else None
    return ScoreSum(count=count, total=score, squares=squares) if count > 0 else None


def step_size(layout: Layout, run: Run, weight: int) -> Any:
    """g = C * W / (Q * sum of weights), correctly rounded; a number, or one for each value of the run."""
    base = float(Fraction(layout.weight_cap, layout.quantum * weight))
    return np.multiply(base, run.clips)
