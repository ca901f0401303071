"""Where everything is in the one vector that is masked, and why its sum cannot overflow.

A layout is public and pinned by the consortium: the tensors in order with their clips, the weight slot, the auxiliary
slots, the ring, the roster size N and the weight cap W. The quantum Q is derived from these by every party and never
received (docs/spec/secure-aggregation.md, "Numbers"). All scales are powers of two, stored as exponents.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Final, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from lazaret.errors import ConfigError
from security import labels
from security.crypto import encoding
from security.crypto.prg import BLOCK_BYTES
from security.crypto.ring import BITS, DEFAULT_BITS, FRAME_BYTES, Ring

# A model as it is shared, or one site's change of it: one flat vector, in the order of a layout.
Vector = npt.NDArray[np.float32]
Kind = Literal["mean", "statistic", "sum", "count"]
STATE_KINDS: Final = ("mean", "statistic")
WEIGHT: Final = "weight"
LOSS: Final = "loss"
HITS: Final = "hits"
SCORED: Final = "scored"
SCORE: Final = "score"
SQUARES: Final = "score_squares"
SCORE_GRID: Final = 64
# The only numbers beside the weight that may travel. A class count or a prototype has no name here, hence no slot.
AUXILIARY: Final[Mapping[str, Kind]] = {
    LOSS: "sum", HITS: "count", SCORED: "count", SCORE: "count", SQUARES: "count",
}  # fmt: skip
# The largest value of one site in a slot of scores (`scores`).
SCORE_MAXIMA: Final[Mapping[str, int]] = {SCORED: 1, SCORE: SCORE_GRID, SQUARES: SCORE_GRID**2}

MAX_ROSTER: Final = 255
MAX_BLOCK_WORDS: Final = 2**24  # keeps the movement sum of a block inside 63 bits
# In the ring of 16 bits a full clip at weight 1 has at least this many steps: see `Layout._require_steps`.
LEAST_STEPS: Final = 32
EXACT_FRACTION_BITS: Final = 35  # the 64-bit ring resolves each clip into 2^35 steps, whatever the roster
MAX_EXPONENT: Final = 100


def most_weight(sites: int) -> int:
    """The largest weight cap of a ring of 16 bits for so many sites; 0 for too many."""
    return (2**15 - 1) // sites // LEAST_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One tensor or slot of the vector.

    :param clip_exponent: the clip is 2**clip_exponent, in units of `units` for a statistic; not for counts.
    :param movement_exponent: bound on the L2 norm of the averaged step, 2**movement_exponent in the same units.
    :param units: for a statistic, one exponent for each channel: its unit is 2**exponent.
    :param nonnegative: for a statistic, whether the next state is kept at or above zero (a variance).
    :param maximum: for a count, the largest value one site may hold.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    clip_exponent: int = 0
    movement_exponent: int = 0
    units: tuple[int, ...] = ()
    nonnegative: bool = False
    maximum: int = 0

    def __post_init__(self) -> None:
        numbers = (*self.shape, *self.units, self.clip_exponent, self.movement_exponent, self.maximum)
        if any(type(number) is not int for number in numbers):
            raise _bad(self.name, "shapes, exponents and maxima are whole numbers")
        if type(self.nonnegative) is not bool:
            raise _bad(self.name, "nonnegative is true or false")
        if self.kind not in get_args(Kind):
            raise _bad(self.name, f"unknown kind {self.kind!r}")
        if not self.name or any(extent < 1 for extent in self.shape) or not 1 <= self.size <= MAX_BLOCK_WORDS:
            raise _bad(self.name, f"shape {self.shape} must hold 1 to {MAX_BLOCK_WORDS} values under a name")
        if abs(self.clip_exponent) > MAX_EXPONENT or abs(self.movement_exponent) > MAX_EXPONENT:
            raise _bad(self.name, f"exponents must be within {MAX_EXPONENT} of zero")
        if self.kind == "statistic":
            if len(self.units) != self.size or any(abs(unit) > MAX_EXPONENT for unit in self.units):
                raise _bad(self.name, "a statistic needs one unit exponent for each channel")
        elif self.units or self.nonnegative:
            raise _bad(self.name, "only statistics have units and a floor")
        if (self.maximum > 0) != (self.kind == "count"):
            raise _bad(self.name, "counts, and only counts, need a maximum")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def with_clip(self, exponent: int) -> Block:
        """The same tensor with another clip; the movement cap keeps its distance from it."""
        moved = self.movement_exponent + exponent - self.clip_exponent
        return replace(self, clip_exponent=exponent, movement_exponent=moved)

    def encode(self) -> bytes:
        return b"".join(
            (
                encoding.text(self.name),
                encoding.array(encoding.u64(extent) for extent in self.shape),
                encoding.text(self.kind),
                _signed(self.clip_exponent),
                _signed(self.movement_exponent),
                encoding.tlv(_units_bytes(self.units)),
                encoding.u64(int(self.nonnegative)),
                encoding.u64(self.maximum),
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Return only what this kind of block has, as canonical JSON can carry it: no float anywhere."""
        values: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "kind": self.kind}
        if self.kind == "count":
            return values | {"maximum": self.maximum}
        values["clip_exponent"] = self.clip_exponent
        if self.kind in STATE_KINDS:
            values["movement_exponent"] = self.movement_exponent
        if self.kind == "statistic":
            values |= {"units": _units_bytes(self.units).hex(), "nonnegative": self.nonnegative}
        return values

    @classmethod
    def from_dict(cls, written: object) -> Block:
        if not isinstance(written, dict) or not isinstance(written.get("name"), str):
            raise _bad("blocks", "a block is described under a name")
        try:
            values = dict(written)
            values["shape"] = tuple(values["shape"])
            if "units" in values:
                values["units"] = tuple(np.frombuffer(bytes.fromhex(values["units"]), dtype=np.int8).tolist())
            block = cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise _bad(written["name"], "not a block description") from error
        if block.to_dict() != written:
            raise _bad(block.name, "fields that this kind of block does not have")
        return block


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tensors that are scaled in one go: real models have hundreds of tiny ones.

    :param clips: one for the whole run, or one for each value; powers of two, so that scaling by them is exact.
    """

    place: slice
    clips: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Blocks in the order of the vector: tensors and statistics, then the weight, then auxiliary slots."""

    blocks: tuple[Block, ...]
    roster_size: int
    weight_cap: int
    ring_bits: int = DEFAULT_BITS
    _offsets: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.ring_bits not in BITS:
            raise _bad("ring_bits", f"{self.ring_bits} is none of {', '.join(map(str, BITS))}")
        if not 2 <= self.roster_size <= MAX_ROSTER:
            raise _bad("roster_size", f"{self.roster_size} is not in 2..{MAX_ROSTER}")
        self._require_order()
        self._require_no_overflow()
        self._require_steps()
        offsets, at = {}, 0
        for block in self.blocks:
            offsets[block.name] = at
            at += block.size
        object.__setattr__(self, "_offsets", offsets)

    def _require_order(self) -> None:
        names = [block.name for block in self.blocks]
        if len(set(names)) != len(names):
            raise _bad("blocks", "two blocks have the same name")
        slots = [block for block in self.blocks if block.kind not in STATE_KINDS]
        tensors = self.blocks[: len(names) - len(slots)]
        if not tensors or not slots or slots[0].name != WEIGHT or (*tensors, *slots) != self.blocks:
            raise _bad("blocks", "tensors come first, then the weight, then the auxiliary slots")
        if (slots[0].kind, slots[0].shape, slots[0].maximum) != ("count", (1,), self.weight_cap):
            raise _bad(WEIGHT, "is one count whose maximum is the weight cap")
        for slot in slots[1:]:
            if AUXILIARY.get(slot.name) != slot.kind or slot.shape != (1,):
                raise ConfigError(
                    f"auxiliary slot {slot.name!r} is not allowed",
                    where="layout",
                    hint="only a loss sum, a hit count and sums of scores travel; see docs/threat-model.md",
                )
        scores = [slot for slot in slots if slot.name in SCORE_MAXIMA]
        if [(slot.name, slot.maximum) for slot in scores] not in (list(SCORE_MAXIMA.items())[:n] for n in (0, 2, 3)):
            raise _bad(SCORE, "scores are a number of sites, a sum and perhaps a sum of squares, each with its maximum")

    def _require_no_overflow(self) -> None:
        """Recompute N * max|z| <= 2^(k-1) - 1 for every slot: then no sum of at most N sites wraps."""
        for block in self.blocks:
            largest = block.maximum if block.kind == "count" else self.quantum
            if self.roster_size * largest > self.half_ring:
                raise ConfigError(
                    f"{self.roster_size} values up to {largest} do not fit {self.ring_bits} bits",
                    where=f"layout [{block.name}]",
                    hint="the consortium publishes a manifest with a larger ring_bits or a smaller weight_cap",
                )

    def _require_steps(self) -> None:
        """With two bytes for a number, the weights of few images beside many would leave no step for their update."""
        most = most_weight(self.roster_size)
        if self.ring_bits == 16 and self.weight_cap > most:
            raise ConfigError(
                f"weight_cap = {self.weight_cap} is too large for {self.roster_size} sites in 16 bits: at most {most}",
                where="layout [ring_bits]",
                hint="the consortium publishes a manifest with a smaller weight_cap (sites beyond it count alike), or "
                "ring_bits = 24",
            )

    @classmethod
    def of(
        cls,
        tensors: Sequence[Block],
        *,
        roster_size: int,
        weight_cap: int,
        ring_bits: int = DEFAULT_BITS,
        loss_exponent: int | None = None,
        hits_maximum: int | None = None,
        scores: Sequence[str] = (),
    ) -> Layout:
        """Append the weight and the auxiliary slots that are asked for."""
        slots = [Block(name=WEIGHT, shape=(1,), kind="count", maximum=weight_cap)]
        if loss_exponent is not None:
            slots.append(Block(name=LOSS, shape=(1,), kind="sum", clip_exponent=loss_exponent))
        if hits_maximum is not None:
            slots.append(Block(name=HITS, shape=(1,), kind="count", maximum=hits_maximum))
        slots += [Block(name=name, shape=(1,), kind="count", maximum=SCORE_MAXIMA[name]) for name in scores]
        return cls(blocks=(*tensors, *slots), roster_size=roster_size, weight_cap=weight_cap, ring_bits=ring_bits)

    @property
    def half_ring(self) -> int:
        return int(2 ** (self.ring_bits - 1)) - 1

    @property
    def quantum(self) -> int:
        """Q, the encoding of a full clip at full weight; from the roster, so that it is the same in every attempt."""
        if self.ring_bits == 64:
            return self.weight_cap << EXACT_FRACTION_BITS
        return self.half_ring // self.roster_size

    @property
    def ring(self) -> Ring:
        return Ring(self.ring_bits)

    @property
    def rounds_at_random(self) -> bool:
        """Whether a coordinate is rounded up or down by a draw, so that its error is zero on average."""
        return self.ring_bits == 16

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.ring.dtype

    @property
    def signed_dtype(self) -> np.dtype[Any]:
        return self.ring.signed_dtype

    @cached_property
    def state_words(self) -> int:
        return sum(block.size for block in self.state_blocks)

    @cached_property
    def used_words(self) -> int:
        return sum(block.size for block in self.blocks)

    @cached_property
    def words(self) -> int:
        """Length of the vector in words, padded to whole AES blocks; the padding is zero."""
        per_block = BLOCK_BYTES // self.dtype.itemsize
        return -(-self.used_words // per_block) * per_block

    @property
    def byte_length(self) -> int:
        """Of the vector on the wire."""
        return self.words * self.ring.word_bytes

    @property
    def memory_bytes(self) -> int:
        """Of the vector in memory."""
        return self.words * self.dtype.itemsize

    @property
    def frames(self) -> int:
        return -(-self.byte_length // FRAME_BYTES)

    def frame_bytes(self, index: int) -> int:
        """How long a frame is: the last one has what is left."""
        return min(FRAME_BYTES, self.byte_length - index * FRAME_BYTES)

    @cached_property
    def sum_order(self) -> tuple[int, ...]:
        """The order in which the frames of a sum travel: the one with the weight first, so that the next model can be
        made while the others come.
        """
        first = self.slot(WEIGHT).start // self.ring.frame_words
        return (first, *(index for index in range(self.frames) if index != first))

    @cached_property
    def state_blocks(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.kind in STATE_KINDS)

    def slot(self, name: str) -> slice:
        start = self._offsets[name]
        return slice(start, start + self.block(name).size)

    def has(self, name: str) -> bool:
        return name in self._offsets

    def block(self, name: str) -> Block:
        return next(block for block in self.blocks if block.name == name)

    def placed(self) -> Iterator[tuple[Block, slice]]:
        """Yield every block of the state with its place in the vector."""
        for block in self.state_blocks:
            start = self._offsets[block.name]
            yield block, slice(start, start + block.size)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        runs: list[Run] = []
        for (_, exponent), members in groupby(self.placed(), key=lambda placed: _scaling(placed[0])):
            blocks, places = zip(*members, strict=True)
            place = slice(places[0].start, places[-1].stop)
            exponents: list[int] | int = (
                exponent
                if exponent is not None
                else [unit + block.clip_exponent for block in blocks for unit in block.units]
            )
            runs.append(Run(place, np.ldexp(1.0, np.array(exponents, dtype=np.int32))))
        return tuple(runs)

    def block_at(self, word: int) -> Block:
        """Return the block that holds a word, to name it in an error."""
        return next(b for b in self.blocks if self._offsets[b.name] <= word < self._offsets[b.name] + b.size)

    def encode(self) -> bytes:
        return b"".join(
            (
                encoding.u64(self.ring_bits),
                encoding.u64(self.roster_size),
                encoding.u64(self.quantum),
                encoding.u64(self.weight_cap),
                encoding.array(encoding.tlv(block.encode()) for block in self.blocks),
            )
        )

    @cached_property
    def layout_hash(self) -> bytes:
        return hashlib.sha256(labels.LAYOUT + self.encode()).digest()

    def to_dict(self) -> dict[str, Any]:
        return {
            "ring_bits": self.ring_bits,
            "roster_size": self.roster_size,
            "weight_cap": self.weight_cap,
            "blocks": [block.to_dict() for block in self.blocks],
        }

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> Layout:
        expected = {"ring_bits", "roster_size", "weight_cap", "blocks"}
        numbers = [written.get(name) for name in ("ring_bits", "roster_size", "weight_cap")]
        if set(written) != expected or any(type(number) is not int for number in numbers):
            raise _bad("layout", f"must have exactly the keys {', '.join(sorted(expected))}, with whole numbers")
        if not isinstance(written["blocks"], list):
            raise _bad("blocks", "must be a list")
        ring_bits, roster_size, weight_cap = cast("list[int]", numbers)
        blocks = tuple(Block.from_dict(block) for block in written["blocks"])
        return cls(blocks=blocks, ring_bits=ring_bits, roster_size=roster_size, weight_cap=weight_cap)


def _bad(what: str, why: str) -> ConfigError:
    return ConfigError(why, where=f"layout [{what}]", hint="the layout comes from the consortium's signed manifest")


def _scaling(block: Block) -> tuple[Kind, int | None]:
    return block.kind, None if block.kind == "statistic" else block.clip_exponent


def _signed(value: int) -> bytes:
    """A small signed number as u64: biased, so that there is one encoding."""
    return encoding.u64(value + 2**31)


def _units_bytes(units: Sequence[int]) -> bytes:
    return np.array(units, dtype=np.int8).tobytes()
