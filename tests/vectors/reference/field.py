"""GF(2^8) with the polynomial of AES (FIPS 197 section 4.2) and Shamir's sharing over it, one byte at a time."""

from __future__ import annotations


def multiply(a: int, b: int) -> int:
    """Russian peasants, reducing by x^8 + x^4 + x^3 + x + 1."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a & 0x100:
            a ^= 0x11B
        b >>= 1
    return product


def inverse(a: int) -> int:
    """a^254, for then a * a^254 = a^255 = 1."""
    result = 1
    for _ in range(254):
        result = multiply(result, a)
    return result


def share(secret: bytes, coefficients: list[bytes], position: int) -> bytes:
    """Evaluate at `position`; `coefficients` from the highest power down to the first, the secret is the constant."""
    out = []
    for column in range(len(secret)):
        value = 0
        for coefficient in [*coefficients, secret]:
            value = multiply(value, position) ^ coefficient[column]
        out.append(value)
    return bytes(out)


def join(shares: dict[int, bytes]) -> bytes:
    """Lagrange's interpolation at zero."""
    length = len(next(iter(shares.values())))
    secret = bytearray(length)
    for i, value in shares.items():
        weight = 1
        for j in shares:
            if j != i:
                weight = multiply(weight, multiply(j, inverse(i ^ j)))
        for column in range(length):
            secret[column] ^= multiply(value[column], weight)
    return bytes(secret)
