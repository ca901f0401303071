"""ML-KEM-768 (FIPS 203) on Python integers, with the coins of the encapsulation as an argument."""

from __future__ import annotations

import hashlib

Q, N, K, ETA, DU, DV = 3329, 256, 3, 2, 10, 4
Poly = list[int]
Vector = list[Poly]


def _reversed_bits(number: int) -> int:
    return int(f"{number:07b}"[::-1], 2)


ZETAS = [pow(17, _reversed_bits(i), Q) for i in range(128)]
GAMMAS = [pow(17, 2 * _reversed_bits(i) + 1, Q) for i in range(128)]


def _ntt(poly: Poly) -> Poly:
    f, i, length = list(poly), 1, 128
    while length >= 2:
        for start in range(0, N, 2 * length):
            for j in range(start, start + length):
                t = ZETAS[i] * f[j + length] % Q
                f[j + length], f[j] = (f[j] - t) % Q, (f[j] + t) % Q
            i += 1
        length //= 2
    return f


def _inverse_ntt(poly: Poly) -> Poly:
    f, i, length = list(poly), 127, 2
    while length <= 128:
        for start in range(0, N, 2 * length):
            for j in range(start, start + length):
                t = f[j]
                f[j], f[j + length] = (t + f[j + length]) % Q, ZETAS[i] * (f[j + length] - t) % Q
            i -= 1
        length *= 2
    return [value * 3303 % Q for value in f]


def _product(a: Poly, b: Poly) -> Poly:
    out = [0] * N
    for i, gamma in enumerate(GAMMAS):
        a0, a1, b0, b1 = a[2 * i], a[2 * i + 1], b[2 * i], b[2 * i + 1]
        out[2 * i], out[2 * i + 1] = (a0 * b0 + a1 * b1 * gamma) % Q, (a0 * b1 + a1 * b0) % Q
    return out


def _sum(*polys: Poly) -> Poly:
    return [sum(values) % Q for values in zip(*polys, strict=True)]


def _dot(a: Vector, b: Vector) -> Poly:
    return _sum(*(_product(x, y) for x, y in zip(a, b, strict=True)))


def _encode(poly: Poly, bits: int) -> bytes:
    return sum(value << (bits * i) for i, value in enumerate(poly)).to_bytes(N * bits // 8, "little")


def _decode(data: bytes, bits: int) -> Poly:
    whole, modulus = int.from_bytes(data, "little"), Q if bits == 12 else 2**bits
    return [(whole >> (bits * i)) % 2**bits % modulus for i in range(N)]


def _compress(poly: Poly, bits: int) -> Poly:
    return [((value << bits) + Q // 2) // Q % 2**bits for value in poly]


def _decompress(poly: Poly, bits: int) -> Poly:
    return [(value * Q + 2 ** (bits - 1)) >> bits for value in poly]


def _uniform(seed: bytes) -> Poly:
    stream, out, at = hashlib.shake_128(seed).digest(3 * N * 4), [], 0
    while len(out) < N:
        a, b, c = stream[at : at + 3]
        at += 3
        out += [value for value in (a + 256 * (b % 16), b // 16 + 16 * c) if value < Q]
    return out[:N]


def _small(seed: bytes, number: int) -> Poly:
    bits = int.from_bytes(hashlib.shake_256(seed + bytes([number])).digest(64 * ETA), "little")

    def ones(at: int) -> int:
        return (bits >> at & 1) + (bits >> (at + 1) & 1)

    return [(ones(2 * ETA * i) - ones(2 * ETA * i + ETA)) % Q for i in range(N)]


def _matrix(rho: bytes) -> list[Vector]:
    return [[_uniform(rho + bytes([j, i])) for j in range(K)] for i in range(K)]


def keys(seed: bytes) -> tuple[bytes, bytes]:
    """The encapsulation key and the decapsulation key of a 64-byte seed d || z (algorithms 13 and 16)."""
    d, z = seed[:32], seed[32:]
    hashed = hashlib.sha3_512(d + bytes([K])).digest()
    rho, sigma = hashed[:32], hashed[32:]
    s = [_ntt(_small(sigma, i)) for i in range(K)]
    e = [_ntt(_small(sigma, K + i)) for i in range(K)]
    t = [_sum(_dot(row, s), noise) for row, noise in zip(_matrix(rho), e, strict=True)]
    public = b"".join(_encode(poly, 12) for poly in t) + rho
    private = b"".join(_encode(poly, 12) for poly in s)
    return public, private + public + hashlib.sha3_256(public).digest() + z


def _encrypt(public: bytes, message: bytes, coins: bytes) -> bytes:
    t = [_decode(public[384 * i : 384 * (i + 1)], 12) for i in range(K)]
    matrix = _matrix(public[384 * K :])
    y = [_ntt(_small(coins, i)) for i in range(K)]
    u = [
        _sum(_inverse_ntt(_dot([matrix[j][i] for j in range(K)], y)), _small(coins, K + i)) for i in range(K)
    ]
    v = _sum(_inverse_ntt(_dot(t, y)), _small(coins, 2 * K), _decompress(_decode(message, 1), 1))
    return b"".join(_encode(_compress(poly, DU), DU) for poly in u) + _encode(_compress(v, DV), DV)


def _decrypt(private: bytes, ciphertext: bytes) -> bytes:
    size = 32 * DU
    u = [_decompress(_decode(ciphertext[size * i : size * (i + 1)], DU), DU) for i in range(K)]
    v = _decompress(_decode(ciphertext[size * K :], DV), DV)
    s = [_decode(private[384 * i : 384 * (i + 1)], 12) for i in range(K)]
    w = [(a - b) % Q for a, b in zip(v, _inverse_ntt(_dot(s, [_ntt(poly) for poly in u])), strict=True)]
    return _encode(_compress(w, 1), 1)


def encapsulate(public: bytes, coins: bytes) -> tuple[bytes, bytes]:
    """The shared secret and its ciphertext (algorithm 17)."""
    hashed = hashlib.sha3_512(coins + hashlib.sha3_256(public).digest()).digest()
    return hashed[:32], _encrypt(public, coins, hashed[32:])


def decapsulate(private: bytes, ciphertext: bytes) -> bytes:
    """The shared secret; for a wrong ciphertext one that nobody knows (algorithm 18)."""
    own, public = private[: 384 * K], private[384 * K : 768 * K + 32]
    digest, z = private[768 * K + 32 : 768 * K + 64], private[768 * K + 64 :]
    message = _decrypt(own, ciphertext)
    hashed = hashlib.sha3_512(message + digest).digest()
    if _encrypt(public, message, hashed[32:]) == ciphertext:
        return hashed[:32]
    return hashlib.shake_256(z + ciphertext).digest(32)
