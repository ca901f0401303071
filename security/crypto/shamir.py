"""Shamir's t-of-n sharing of 32-byte secrets, byte by byte over GF(2^8).

The field is that of AES (x^8 + x^4 + x^3 + x + 1), the holder's position 1..n is the x-coordinate, so that a share is
exactly as long as the secret and uniform. Table look-ups are not constant-time: they run only in the process that
knows the secret anyway, or on shares that are being opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from lazaret.errors import LocalProtocolError
from security.rng import Randomness
from security.secrets import Secret

SECRET_BYTES: Final = 32
MAX_HOLDERS: Final = 255
ShareKind = Literal["b", "s"]
Bytes = npt.NDArray[np.uint8]


# FIPS 197, section 4.2: bytes as polynomials modulo x^8 + x^4 + x^3 + x + 1 (0x11B). The powers of 3 are all of them
# but zero.
def _field() -> tuple[Bytes, list[int]]:
    """Return the multiplication table and the list of inverses, from powers of the generator 3."""
    power, powers = 1, []
    for _ in range(255):
        powers.append(power)
        power ^= (power << 1) ^ (0x11B if power & 0x80 else 0)
    log = {value: exponent for exponent, value in enumerate(powers)}
    product = np.zeros((256, 256), dtype=np.uint8)
    for a in range(1, 256):
        product[a, 1:] = [powers[(log[a] + log[b]) % 255] for b in range(1, 256)]
    inverse = [0, *(powers[-log[a] % 255] for a in range(1, 256))]
    return product, inverse


_PRODUCT, _INVERSE = _field()


def split(secret: Secret, *, threshold: int, holders: int, randomness: Randomness) -> tuple[Secret, ...]:
    """Return one share for each position 1..`holders`; any `threshold` of them give the secret back."""
    if len(secret) != SECRET_BYTES:
        raise LocalProtocolError(f"a shared secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if not 1 <= threshold <= holders <= MAX_HOLDERS:
        raise LocalProtocolError(f"cannot share {threshold} of {holders}; at most {MAX_HOLDERS} holders")
    # The leading coefficient may be zero: forcing it away from zero would give t-1 holders information.
    drawn = np.frombuffer(randomness.bytes((threshold - 1) * SECRET_BYTES), dtype=np.uint8)
    positions = np.arange(1, holders + 1, dtype=np.uint8)[:, None]
    values = np.zeros((holders, SECRET_BYTES), dtype=np.uint8)
    # Horner's rule, for all holders and all 32 bytes at once; the secret is the constant term.
    for coefficient in drawn.reshape(threshold - 1, SECRET_BYTES):
        values = _PRODUCT[values ^ coefficient, positions]
    values ^= np.frombuffer(secret.reveal(), dtype=np.uint8)
    return tuple(Secret(row.tobytes()) for row in values)


@lru_cache(maxsize=64)
def lagrange_weights(positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the weights at zero for interpolation through `positions`; the same for every secret of an attempt."""
    if len(set(positions)) != len(positions) or not all(1 <= x <= MAX_HOLDERS for x in positions):
        raise LocalProtocolError(f"share positions must be distinct and in 1..{MAX_HOLDERS}")
    weights = []
    for i in positions:
        weight = 1
        for j in positions:
            if j != i:
                weight = int(_PRODUCT[weight, _PRODUCT[j, _INVERSE[i ^ j]]])
        weights.append(weight)
    return tuple(weights)


def join(shares: Mapping[int, Secret], *, threshold: int) -> Secret:
    """Interpolate at zero from exactly `threshold` shares, keyed by position.

    The outcome is only as good as the shares: the caller compares it with the dealer's commitment or public key.
    """
    if len(shares) != threshold:
        raise LocalProtocolError(f"{len(shares)} shares given, {threshold} needed")
    if any(len(share) != SECRET_BYTES for share in shares.values()):
        raise LocalProtocolError(f"a share has {SECRET_BYTES} bytes")
    positions = tuple(sorted(shares))
    weights = np.array(lagrange_weights(positions), dtype=np.uint8)[:, None]
    values = np.frombuffer(b"".join(shares[x].reveal() for x in positions), dtype=np.uint8)
    # The polynomial at zero is the sum of the shares, each times its Lagrange weight; addition is exclusive or.
    terms = _PRODUCT[values.reshape(threshold, SECRET_BYTES), weights]
    return Secret(np.bitwise_xor.reduce(terms, axis=0).tobytes())
