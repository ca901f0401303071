"""Layout, fixed point, range tests and the next state with Python's integers, fractions and floats (IEEE doubles)."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

from .transcript import h, label, listed, tlv, u64

Layout = dict[str, Any]


def to_f32(value: float) -> float:
    """Round a double to the nearest float, ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def floats(data: str) -> list[float]:
    raw = bytes.fromhex(data)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def quantum(layout: Layout) -> int:
    if layout["ring_bits"] == 64:
        return int(layout["weight_cap"]) * 2**35
    return (2 ** (layout["ring_bits"] - 1) - 1) // int(layout["roster_size"])


def _units(block: dict[str, Any]) -> bytes:
    return bytes.fromhex(block.get("units", ""))


def size(block: dict[str, Any]) -> int:
    return math.prod(block["shape"])


def layout_hash(layout: Layout) -> bytes:
    blocks = []
    for block in layout["blocks"]:
        encoded = [
            tlv(block["name"]),
            listed([u64(extent) for extent in block["shape"]]),
            tlv(block["kind"]),
            u64(block.get("clip_exponent", 0) + 2**31),
            u64(block.get("movement_exponent", 0) + 2**31),
            tlv(_units(block)),
            u64(1 if block.get("nonnegative") else 0),
            u64(block.get("maximum", 0)),
        ]
        blocks.append(tlv(b"".join(encoded)))
    head = [layout["ring_bits"], layout["roster_size"], quantum(layout), layout["weight_cap"]]
    return h(label("layout"), *(u64(number) for number in head), listed(blocks))


def clips(layout: Layout) -> list[Fraction]:
    """The clip of every coordinate of the state, in order."""
    out = []
    for block in layout["blocks"]:
        if block["kind"] == "mean":
            out += [Fraction(2) ** block["clip_exponent"]] * size(block)
        elif block["kind"] == "statistic":
            units = struct.unpack(f"{size(block)}b", _units(block))
            out += [Fraction(2) ** (block["clip_exponent"] + unit) for unit in units]
    return out


def encode(
    layout: Layout, update: list[float], weight: int, loss: float | None, hits: int | None, draws: bytes = b""
) -> list[int]:
    """Signed integers, padded to 16 bytes. The constant w*Q/W is rounded once, the product once, then to an integer:
    the nearest, or with `draws` (four bytes for each coordinate, a fraction u) the floor of the product and u.
    """
    q, cap = quantum(layout), layout["weight_cap"]
    weight = min(weight, cap)
    top = float(Fraction(weight * q, cap))
    out = []
    for value, clip in zip(update, clips(layout), strict=True):
        assert abs(Fraction(value)) <= clip
        product = float(Fraction(value) / clip * Fraction(top))  # a fraction rounds to the nearest double once
        if draws:
            u = Fraction(int.from_bytes(draws[4 * len(out) : 4 * len(out) + 4], "little"), 2**32)
            out.append(math.floor(Fraction(product) + u))
        else:
            out.append(round(product))
    out.append(weight)
    for block in layout["blocks"]:
        if block["name"] == "loss":
            assert loss is not None
            out.append(round(loss / float(Fraction(2) ** block["clip_exponent"]) * float(q)))
        if block["name"] == "hits":
            assert hits is not None
            out.append(hits)
    return out + [0] * (-len(out) % (16 // stream_word(layout)))


def stream_word(layout: Layout) -> int:
    """Bytes of a mask stream that meet one number."""
    return {16: 2, 64: 8}.get(layout["ring_bits"], 4)


def to_words(layout: Layout, values: list[int]) -> bytes:
    """A vector of at most one frame as it travels; a frame of 24-bit words has their lower halves first."""
    bits = layout["ring_bits"]
    words = [(value % 2**bits).to_bytes(bits // 8, "little") for value in values]
    if bits == 24:
        assert len(words) <= 65_536
        return b"".join(word[:2] for word in words) + b"".join(word[2:] for word in words)
    return b"".join(words)


def from_words(layout: Layout, data: bytes) -> list[int]:
    step = layout["ring_bits"] // 8
    words = [data[i : i + step] for i in range(0, len(data), step)]
    if layout["ring_bits"] == 24:
        count = len(data) // 3
        words = [data[2 * i : 2 * i + 2] + data[2 * count + i : 2 * count + i + 1] for i in range(count)]
    return [int.from_bytes(word, "little", signed=True) for word in words]


def stream_words(layout: Layout, stream: bytes) -> bytes:
    """A mask stream as a vector: its words modulo the ring."""
    step = stream_word(layout)
    return to_words(layout, [int.from_bytes(stream[i : i + step], "little") for i in range(0, len(stream), step)])


def combine(layout: Layout, left: bytes, right: bytes, sign: int) -> bytes:
    pairs = zip(from_words(layout, left), from_words(layout, right), strict=True)
    return to_words(layout, [a + sign * b for a, b in pairs])


def canonical(value: float) -> float:
    return 0.0 if abs(value) < 2.0**-126 else value


def state_hash(state: list[float]) -> bytes:
    return h(label("state"), struct.pack(f"<{len(state)}f", *state))


def is_void(layout: Layout, total: list[int], survivors: int) -> bool:
    """The range tests."""
    q, cap = quantum(layout), layout["weight_cap"]
    words = len(clips(layout))
    weight = total[words]
    if not survivors <= weight <= survivors * cap:
        return True
    if cap * max(abs(value) for value in total[:words]) > q * weight + survivors * cap:
        return True
    used = sum(size(block) for block in layout["blocks"])
    if any(total[used:]):
        return True
    at = 0
    for block in layout["blocks"]:
        part = total[at : at + size(block)]
        at += size(block)
        if block["kind"] == "sum" and abs(part[0]) > survivors * q:
            return True
        if block["kind"] == "count" and not 0 <= part[0] <= survivors * block["maximum"]:
            return True
    return False


History = list[list[int]]


def shorten(
    layout: Layout, total: list[int], window: int, factor: Fraction, history: History
) -> tuple[list[int], History]:
    """The sum with long steps cut to their caps, and the lengths of the newest steps, this one first."""
    weight = total[len(clips(layout))]
    whole = layout["roster_size"] * quantum(layout)
    coarse = max(0, whole.bit_length() - 31)
    shift = {16: 0, 24: 8}.get(layout["ring_bits"], 24)
    out, after, at = list(total), [], 0
    for block, before in zip(layout["blocks"], history, strict=False):
        part = total[at : at + size(block)]
        squares = sum((value >> coarse) ** 2 >> shift for value in part) * 2**shift * 4**coarse
        scale = Fraction(layout["weight_cap"], quantum(layout) * weight)
        length = math.isqrt(math.floor(squares * scale**2 * 4**20))
        ceiling = 2 ** max(0, block["movement_exponent"] - block["clip_exponent"] + 20)
        moves = sorted(value for value in before if value)
        cap = ceiling
        if moves:
            cap = min(ceiling, max(1, math.floor(factor * moves[(len(moves) - 1) // 2])))
        if length > cap:
            multiplier = cap * 2**31 // length
            out[at : at + size(block)] = [value * multiplier // 2**31 for value in part]
        done = min(length, cap)
        after.append(([done, *before] if done else before)[:window])
        at += size(block)
    return out, after


def next_state(
    layout: Layout,
    state: list[float],
    total: list[int],
    survivors: int,
    window: int = 0,
    factor: Fraction = Fraction(2),
    history: History | None = None,
) -> tuple[int, list[float], History]:
    """Verdict (0 good, 1 void), state and history. Product and sum are rounded apart, each to a double."""
    tensors = [block for block in layout["blocks"] if block["kind"] in ("mean", "statistic")]
    known = history or [[0] * window for _ in tensors]
    if is_void(layout, total, survivors):
        return 1, state, known
    total, after = shorten(layout, total, window, factor, known)
    weight = total[len(clips(layout))]
    out = []
    for old, summed, clip in zip(state, total, clips(layout), strict=False):
        step = float(clip * layout["weight_cap"] / (quantum(layout) * weight))
        out.append(to_f32(old + float(summed) * step))
    at = 0
    for block in layout["blocks"]:
        if block.get("nonnegative"):
            out[at : at + size(block)] = [max(value, 0.0) for value in out[at : at + size(block)]]
        at += size(block)
    return 0, [canonical(value) for value in out], after
