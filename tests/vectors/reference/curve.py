"""X25519 (RFC 7748) and Ed25519 (RFC 8032) on Python integers."""

from __future__ import annotations

import hashlib

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493


def clamp(scalar: bytes) -> bytes:
    edited = bytearray(scalar)
    edited[0] &= 0b1111_1000
    edited[31] &= 0b0111_1111
    edited[31] |= 0b0100_0000
    return bytes(edited)


def x25519(scalar: bytes, u: bytes) -> bytes:
    """RFC 7748 section 5, the Montgomery ladder."""
    k = int.from_bytes(clamp(scalar), "little")
    x1 = int.from_bytes(u, "little") % 2**255 % P
    x2, z2, x3, z3 = 1, 0, x1, 1
    swapped = 0
    for t in range(254, -1, -1):
        bit = k >> t & 1
        if swapped != bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swapped = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a % P, b * b % P, d * a % P, c * b % P
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % P, x1 * (da - cb) ** 2 % P
        x2, z2 = aa * bb % P, e * (aa + 121665 * e) % P
    if swapped:
        x2, z2 = x3, z3
    return (x2 * pow(z2, P - 2, P) % P).to_bytes(32, "little")


def x25519_public(scalar: bytes) -> bytes:
    return x25519(scalar, (9).to_bytes(32, "little"))


D = -121665 * pow(121666, P - 2, P) % P
Point = tuple[int, int]


def _add(a: Point, b: Point) -> Point:
    """RFC 8032 section 3, affine, complete on this curve."""
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2 % P
    x = (x1 * y2 + x2 * y1) * pow(1 + k, P - 2, P) % P
    y = (y1 * y2 + x1 * x2) * pow(1 - k, P - 2, P) % P
    return x, y


def _times(scalar: int, point: Point) -> Point:
    result: Point = (0, 1)
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point = _add(point, point)
        scalar >>= 1
    return result


def _recover_x(y: int, odd: int) -> int:
    xx = (y * y - 1) * pow(D * y * y + 1, P - 2, P)
    x = pow(xx, (P + 3) // 8, P)
    if (x * x - xx) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    return P - x if x & 1 != odd else x


BASE_Y = 4 * pow(5, P - 2, P) % P
BASE: Point = (_recover_x(BASE_Y, 0), BASE_Y)


def _compress(point: Point) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


def _expand(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    return int.from_bytes(clamp(digest[:32]), "little"), digest[32:]


def ed25519_public(seed: bytes) -> bytes:
    return _compress(_times(_expand(seed)[0], BASE))


def ed25519_sign(seed: bytes, message: bytes) -> bytes:
    """RFC 8032 section 5.1.6."""
    scalar, prefix = _expand(seed)
    public = ed25519_public(seed)
    r = int.from_bytes(hashlib.sha512(prefix + message).digest(), "little") % ORDER
    point = _compress(_times(r, BASE))
    k = int.from_bytes(hashlib.sha512(point + public + message).digest(), "little") % ORDER
    return point + ((r + k * scalar) % ORDER).to_bytes(32, "little")
