"""Noise and sampling: their secret generator, the exact discrete Gaussian, draws of patients, noise that sites share.

docs/spec/differential-privacy.md, section 4. The generator is AES-256 in counter mode. Whoever can repeat the stream
can subtract the noise and knows which patients were sampled. So its state is never saved, copied or inherited by a
forked process, and the experiment's seed does not influence it. Each reservation has a source of its own, and each draw
mixes fresh bytes of the operating system into the key: a virtual machine that is resumed twice from one snapshot does
not draw the same noise twice. A source with another key than one of the operating system is not `secret`, and the
ledger refuses it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NoReturn, Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from lazaret.errors import ConfigError, DataError, LocalProtocolError
from security import labels
from security.dp.accountant import LEAST_SHARED_SIGMA, RATE_ONE, MechanismEvent, shared_event
from security.rng import Randomness, SystemRandomness
from security.secagg.layout import Layout

_PAIRS: Final = 1 << 14
"""Box-Muller runs in pieces whose working arrays (ten of 128 KiB) stay in the cache."""

_ZEROS: Final = bytes(_PAIRS * 16)

_TURN_BITS: Final = 14
_TURN: Final = np.exp(2j * math.pi * np.arange(1 << _TURN_BITS) / (1 << _TURN_BITS))
"""A whole turn of the unit circle."""


class NoiseSource:
    """Unpredictable words, Gaussians and uniform integers. Not thread-safe: give each thread its own `fork`."""

    def __init__(self, randomness: Randomness | None = None) -> None:
        source = SystemRandomness() if randomness is None else randomness
        self._secret = type(source) is SystemRandomness
        self._start(source.bytes(32))

    def _start(self, key: bytes) -> None:
        self._key = key
        self._process = os.getpid()

    @property
    def secret(self) -> bool:
        """False for a seeded source: what it produces can be repeated, hence protects nobody."""
        return self._secret

    def fork(self) -> NoiseSource:
        """An independent source for another thread, keyed from this one."""
        child = NoiseSource.__new__(type(self))
        child._secret = self._secret
        child._start(self.bytes(32))
        return child

    def bytes(self, count: int) -> bytes:
        return self._stream().update(_ZEROS[:count] if count <= len(_ZEROS) else bytes(count))

    def _stream(self) -> CipherContext:
        # A forked process would have the same stream as its parent, and equal noise cancels in the difference of two
        # sums.
        if os.getpid() != self._process:
            raise LocalProtocolError("a noise source is used in a forked process", hint="make a new one there")
        # A key for this draw, and one for the next; a seeded source has nothing fresh to mix in.
        fresh = SystemRandomness().bytes(32) if self._secret else b""
        # One half is the key of this stream, the other the key of the next draw: whoever learns the state later cannot
        # go back.
        mixed = hashlib.sha512(labels.DP_NOISE + self._key + fresh).digest()
        self._key = mixed[32:]
        return Cipher(AES(mixed[:32]), CTR(bytes(16))).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self.bytes(8 * count), dtype=np.uint64)

    def below(self, bounds: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One exactly uniform integer in 0..bound-1 for each bound (bounds from 1 to 2^63)."""
        out = np.empty(bounds.shape, dtype=np.uint64)
        todo = np.arange(bounds.size)
        while todo.size:
            limit = bounds[todo]
            word = self.words(todo.size)
            # Words of the last, incomplete range are rejected: otherwise small values would be more likely.
            tail = (np.uint64(0) - limit) % limit
            out[todo] = word % limit
            todo = todo[word > np.uint64(2**64 - 1) - tail]
        return out

    def gaussian(self, out: NDArray[np.float64]) -> NDArray[np.float64]:
        """Fill a flat array with independent standard normal values (Box-Muller in double precision)."""
        pairs = min(_PAIRS, out.size // 2 + 1)
        work = _BoxMuller(pairs)
        for start in range(0, out.size, 2 * pairs):
            piece = out[start : start + 2 * pairs]
            self._stream().update_into(memoryview(_ZEROS)[: 16 * pairs], work.memory)
            piece[:] = work.normal()[: piece.size]
        return out

    def __reduce__(self) -> NoReturn:
        raise TypeError("a noise source is never saved or copied: repeated noise protects nobody")

    def __repr__(self) -> str:
        return f"<NoiseSource {'secret' if self._secret else 'seeded, not private'}>"


class _BoxMuller:
    """Two words to two independent standard normal values, in memory of its own: pieces of new memory would take
    longer than what is computed in them, and large ones let threads go on beside each other."""

    def __init__(self, pairs: int) -> None:
        # The cipher asks for 15 bytes more than it fills.
        self.memory = bytearray(16 * pairs + 15)
        words = np.frombuffer(self.memory, dtype=np.uint64, count=2 * pairs)
        self._lengths, self._angles = words[:pairs], words[pairs:]
        self._bits = np.empty(pairs, dtype=np.uint64)
        self._radius, self._rest, self._square = np.empty((3, pairs))
        self._point, self._turn = np.empty((2, pairs), dtype=np.complex128)

    def normal(self) -> NDArray[np.float64]:
        """From the words in memory; overwritten by the next call."""
        radius = self._radius
        # (w + 1) / 2^63 is in (0, 1]: the logarithm is finite and the tail reaches 9.3 standard deviations. Numbers
        # below 2^63 are converted as signed ones, which takes a fifth of the time of unsigned ones.
        np.right_shift(self._lengths, np.uint64(1), out=self._bits)
        np.copyto(radius, self._bits.view(np.int64))
        radius += 1.0
        radius *= 2.0**-63
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        self._turned(radius)
        return self._point.view(np.float64)

    def _turned(self, radius: NDArray[np.float64]) -> None:
        """The point at this distance and at a uniform angle, given as a fraction of the turn in 64 bits.

        A table holds every 2^-14 of a turn. What is left to the nearest of them, at most 0.0002 on either side, goes
        through its series, whose first neglected term is under 1e-16.
        """
        bits, rest, square = self._bits, self._rest, self._square
        # The lower bits as a signed number: negative where the nearest entry is ahead.
        np.left_shift(self._angles, np.uint64(_TURN_BITS), out=bits)
        np.copyto(rest, bits.view(np.int64))
        rest *= 2.0 * math.pi * 2.0 ** -(64 + _TURN_BITS)
        np.add(self._angles, np.uint64(1 << (63 - _TURN_BITS)), out=bits)
        bits >>= np.uint64(64 - _TURN_BITS)
        _TURN.take(bits.view(np.int64), out=self._turn, mode="wrap")
        np.multiply(rest, rest, out=square)
        rest *= radius
        np.multiply(square, -1.0 / 6.0, out=self._point.imag)
        self._point.imag += 1.0
        self._point.imag *= rest
        square *= -0.5
        square += 1.0
        np.multiply(square, radius, out=self._point.real)
        self._point *= self._turn


def grid_step(sigma: float) -> float:
    """The power of two in (sigma / 2048, sigma / 1024].

    A noisy sum is rounded to whole multiples of this step. Floating-point sums have gaps that depend on the operands
    and so on the data (Mironov 2012); after rounding, the set of possible outputs is the same for every data set. A
    power of two makes the multiples exact in single precision.
    """
    return float(2.0 ** math.floor(math.log2(sigma / 1024.0)))


# Exact discrete Gaussian noise on whole numbers (Canonne, Kamath and Steinke, arXiv 2004.00010, algorithms 1 to 3).
#
# Only whole numbers are drawn and compared, so there is no rounding to consider. The noise satisfies the same
# concentrated-DP bound as the continuous Gaussian of the same sigma (their theorem 4), for vectors too. Everything is
# vectorised: a loop runs over the values that are still undecided.
#
# Sizes: sigma is at most 2^26 lattice units (`accountant`), so 2 sigma^2 k stays below 2^63 for k up to 2^9, and
# squares fit 64 bits up to 64 sigma. A proposal beyond that has a chance of e^-64 (2^-92), a run of 512 an even smaller
# one.

Whole = NDArray[np.uint64]
_ONE = np.uint64(1)


def discrete_gaussian(noise: NoiseSource, sigma: int, count: int) -> NDArray[np.int64]:
    """`count` independent draws with chance proportional to exp(-x^2 / (2 sigma^2)) over all whole x."""
    out = np.empty(count, dtype=np.int64)
    todo = np.arange(count)
    scale = np.uint64(2 * sigma * sigma)
    while todo.size:
        proposal = _discrete_laplace(noise, sigma, todo.size)
        # With a proposal of scale sigma the acceptance chance is exp(-(|x| - sigma)^2 / (2 sigma^2)).
        distance = np.abs(np.abs(proposal) - sigma).astype(np.uint64)
        accepted = _exp_minus(noise, distance * distance, np.full(todo.size, scale))
        out[todo[accepted]] = proposal[accepted]
        todo = todo[~accepted]
    return out


def _discrete_laplace(noise: NoiseSource, scale: int, count: int) -> NDArray[np.int64]:
    """Chance proportional to exp(-|x| / scale)."""
    out = np.empty(count, dtype=np.int64)
    todo = np.arange(count)
    while todo.size:
        bound = np.full(todo.size, np.uint64(scale))
        low = noise.below(bound)
        kept = _exp_minus(noise, low, bound)
        value = (low + np.uint64(scale) * _successes_of_exp_minus_one(noise, todo.size)).astype(np.int64)
        negative = noise.words(todo.size) >> np.uint64(63) == _ONE
        # Minus zero would give zero twice its chance.
        kept &= ~(negative & (value == 0))
        out[todo[kept]] = np.where(negative, -value, value)[kept]
        todo = todo[~kept]
    return out


def _exp_minus(noise: NoiseSource, numerator: Whole, denominator: Whole) -> NDArray[np.bool_]:
    """True with chance exp(-numerator/denominator), exactly."""
    whole, rest = numerator // denominator, numerator % denominator
    result = _exp_minus_small(noise, rest, denominator)
    # exp(-whole) is a run of `whole` successes of exp(-1); nothing needs to be drawn once a run is broken.
    left = np.where(result, whole, np.uint64(0))
    while (active := np.flatnonzero(left)).size:
        ones = np.ones(active.size, dtype=np.uint64)
        success = _exp_minus_small(noise, ones, ones)
        left[active] = np.where(success, left[active] - _ONE, np.uint64(0))
        result[active[~success]] = False
    return result


def _exp_minus_small(noise: NoiseSource, numerator: Whole, denominator: Whole) -> NDArray[np.bool_]:
    """As above for ratios up to one: a run of chances ratio/1, ratio/2, ... that first fails at an odd place."""
    stop = np.zeros(numerator.size, dtype=np.uint64)
    active = np.arange(numerator.size)
    k = _ONE
    while active.size:
        held = noise.below(denominator[active] * k) < numerator[active]
        stop[active[~held]] = k
        active = active[held]
        k += _ONE
    odd: NDArray[np.bool_] = stop % np.uint64(2) == _ONE
    return odd


def _successes_of_exp_minus_one(noise: NoiseSource, count: int) -> Whole:
    """How many draws of chance exp(-1) succeed before the first failure."""
    out = np.zeros(count, dtype=np.uint64)
    active = np.arange(count)
    while active.size:
        ones = np.ones(active.size, dtype=np.uint64)
        active = active[_exp_minus_small(noise, ones, ones)]
        out[active] += _ONE
    return out


# Poisson sampling by unit of privacy: for each patient separately, whether they take part in a step. The accountant may
# count sampling as protection only if the draws are independent, have exactly the booked rate, and are unknown to
# whoever sees the result. So they come from the secret generator, and a batch is never truncated, padded or discarded.


class Units:
    """Which images belong to which unit of privacy (patient, lesion or image)."""

    def __init__(self, unit_of_image: Sequence[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self.of_image: NDArray[np.int64] = np.array(
            [numbers.setdefault(unit, len(numbers)) for unit in unit_of_image], dtype=np.int64
        )
        self.sizes: NDArray[np.int64] = np.bincount(self.of_image, minlength=len(numbers))
        # Images sorted by unit, so that a unit's images are one slice.
        self._images = np.argsort(self.of_image, kind="stable")
        self._starts = np.concatenate(([0], np.cumsum(self.sizes)[:-1])).astype(np.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    def image_of(self, unit: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.int64]:
        images: NDArray[np.int64] = self._images[self._starts[unit] + position]
        return images


class PoissonSampler:
    """Draws the images of one step: every unit with probability rate / 2^24, then one of its images, uniformly.

    One image per sampled unit keeps the sensitivity at one clipped gradient, however many images a patient has.
    """

    def __init__(self, units: Units, *, rate: int, noise: NoiseSource) -> None:
        if not 1 <= rate <= RATE_ONE:
            raise DataError(f"sampling rate {rate} is not in 1..2^24")
        self._units = units
        self._rate = rate
        self._noise = noise

    def draw_views(self, views: int) -> NDArray[np.int64]:
        """(sampled units, views): each unit's images in random order, over and over, until there are so many.

        The mean of a patient's gradients over several images is one gradient of that patient: it is clipped once.
        """
        # Each unit by itself: the accountant's amplification holds for independent draws of exactly this rate (section
        # 4).
        drawn = np.flatnonzero(self._coins() < self._rate)
        sizes = self._units.sizes[drawn]
        start = self._noise.below(sizes.astype(np.uint64)).astype(np.int64)
        positions = (start[:, None] + np.arange(views)[None, :]) % sizes[:, None]
        return self._units.image_of(np.repeat(drawn[:, None], views, axis=1), positions)

    def _coins(self) -> NDArray[np.uint32]:
        """24 fresh bits for each unit, to compare with the booked rate: both are whole, so the rate is exact."""
        return np.frombuffer(self._noise.bytes(4 * len(self._units)), dtype=np.uint32) >> np.uint32(8)

    def draw(self) -> NDArray[np.int64]:
        """Indices of the sampled images. An empty batch is possible; it still gets its noise and is charged, because to
        skip it would reveal that nobody was sampled (section 2)."""
        drawn = np.flatnonzero(self._coins() < self._rate)
        sizes = self._units.sizes[drawn].astype(np.uint64)
        return self._units.image_of(drawn, self._noise.below(sizes).astype(np.int64))


# Noise that the sites of a secure sum share, in ring units: how long a clip is, how much noise, how much room. It
# follows from a manifest alone, so that sites, auditors and the laboratory have the same numbers.

LEAST_UNITS: Final = 4
"""Units of the clip over the square root of the dimensions: below, truncation takes away too much of a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNoise:
    """Noise that the sites of a secure sum share (section 4).

    :param sites: how many take part at most.
    :param honest: the least number of honest survivors over all cohorts that the manifest allows.
    :param dimensions: how many numbers are summed.
    :param units: the clip in ring units: a patient's gradient is truncated to whole units.
    :param bits: of the ring.
    :param unit: what one ring unit moves the model by, times the sum of weights.
    :param weight_cap: what a larger weight counts as.
    :param momentum: how much of the last step of the whole model is in the next one. The step is public, and each site
        adds its part after its noise, so that it costs nothing.

    On the wire the step of a round is `2^e W / (Q sum of weights)` for each ring unit (docs/spec/secure-aggregation.md,
    "Numbers"), and it is to be `learning rate * clip / units / patients`. The weights are noisy numbers of patients, so
    `units = learning rate * clip * Q / (2^e W)`, rounded down.
    """

    sites: int
    honest: int
    dimensions: int
    units: int = 1 << 12
    bits: int = 32
    unit: float = 1.0
    weight_cap: int = 1
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.honest < 1:
            raise ConfigError(
                "no sum of this federation has noise of an honest site",
                where="dp.noise",
                hint="more sites, a larger least_survivors or fewer colluders; or dp.noise = site",
            )
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"momentum {self.momentum:g} is not from 0 to below 1", where="[training.settings]")

    @classmethod
    def of(
        cls, layout: Layout, *, clip: float, learning_rate: float, honest: int, momentum: float = 0.0
    ) -> Self:
        """From what a manifest says.

        :raises ConfigError: where ring, cohort or tensors are not fit for it.
        """
        exponents = {block.clip_exponent for block in layout.state_blocks}
        kinds = {block.kind for block in layout.state_blocks}
        if layout.ring_bits not in (24, 32) or len(exponents) != 1 or kinds != {"mean"}:
            raise ConfigError(
                "shared noise is for weights with one clip, in a ring of 24 or 32 bits",
                where="dp.noise",
                hint="dp.trainable = head sends weights alone; [aggregation] ring_bits = 32",
            )
        unit = Fraction(2) ** exponents.pop() * layout.weight_cap / layout.quantum
        units, words = math.floor(Fraction(learning_rate) * Fraction(clip) / unit), layout.state_words
        if units < LEAST_UNITS * math.sqrt(words):
            raise ConfigError(
                f"a gradient of {words} numbers would be {units} ring units long: most of it is truncated to zero",
                where="dp.noise",
                hint="[aggregation] ring_bits = 32 and a smaller weight_cap, fewer numbers, or dp.noise = site",
            )
        return cls(
            sites=layout.roster_size,
            honest=honest,
            dimensions=words,
            units=units,
            bits=layout.ring_bits,
            unit=float(unit),
            weight_cap=layout.weight_cap,
            momentum=momentum,
        )

    def sigma(self, multiplier: float) -> int:
        """Each site's noise in ring units, rounded up, for this much noise over the clip inside the sum."""
        return max(LEAST_SHARED_SIGMA, math.ceil(multiplier * self.units / math.sqrt(self.honest)))

    def event(self, multiplier: float, *, steps: int = 1) -> MechanismEvent:
        sigma = self.sigma(multiplier)
        return shared_event(
            sigma=sigma, units=self.units, honest=self.honest, dimensions=self.dimensions, steps=steps
        )

    @property
    def _quantum(self) -> int:
        """The part of the ring that one site has."""
        return ((1 << (self.bits - 1)) - 1) // self.sites

    @property
    def momentum_room(self) -> int:
        """The largest size of one site's part of the momentum; the other half of its ring is for sum and noise."""
        return self._quantum // 2 if self.momentum else 0

    def saturation(self, sigma: int) -> int:
        """The largest size of one site's coordinate before its noise: with it, any sum of sites fits the ring."""
        room = self._quantum - self.momentum_room - 9 * sigma
        if room < self.units:
            raise ConfigError(
                f"a ring of {self.bits} bits is too small for {sigma} units of noise",
                where="dp.noise",
                hint="[aggregation] ring_bits = 32, less noise, or fewer sites",
            )
        return room
