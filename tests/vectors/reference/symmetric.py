"""HKDF-SHA256 (RFC 5869), AES-256 (FIPS 197), counter mode (NIST SP 800-38A) and GCM (NIST SP 800-38D)."""

from __future__ import annotations

import hashlib
import hmac

from .field import multiply


def hkdf(material: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    key = hmac.new(salt or bytes(32), material, hashlib.sha256).digest()
    block, out = b"", b""
    counter = 1
    while len(out) < length:
        block = hmac.new(key, block + info + bytes([counter]), hashlib.sha256).digest()
        out += block
        counter += 1
    return out[:length]


def _sbox() -> list[int]:
    """FIPS 197 section 5.1.1: the inverse in GF(2^8), then an affine map of its bits."""
    table = []
    for value in range(256):
        inverse = next((x for x in range(256) if multiply(value, x) == 1), 0)
        turned = inverse
        for shift in range(1, 5):
            turned ^= (inverse << shift | inverse >> (8 - shift)) & 0xFF
        table.append(turned ^ 0x63)
    return table


SBOX = _sbox()
DOUBLE = [multiply(2, value) for value in range(256)]


def expand_key(key: bytes) -> list[bytes]:
    """FIPS 197 section 5.2 for 256-bit keys: fifteen round keys."""
    words = [key[i : i + 4] for i in range(0, 32, 4)]
    constant = 1
    for i in range(8, 60):
        word = words[-1]
        if i % 8 == 0:
            turned = bytes(SBOX[b] for b in word[1:] + word[:1])
            word = bytes([turned[0] ^ constant]) + turned[1:]
            constant = DOUBLE[constant]
        elif i % 8 == 4:
            word = bytes(SBOX[b] for b in word)
        words.append(bytes(a ^ b for a, b in zip(words[-8], word, strict=True)))
    return [b"".join(words[i : i + 4]) for i in range(0, 60, 4)]


def _mix(column: bytes) -> bytes:
    every = column[0] ^ column[1] ^ column[2] ^ column[3]
    return bytes(column[i] ^ every ^ DOUBLE[column[i] ^ column[(i + 1) % 4]] for i in range(4))


def encrypt_block(round_keys: list[bytes], block: bytes) -> bytes:
    state = bytes(a ^ b for a, b in zip(block, round_keys[0], strict=True))
    for number, round_key in enumerate(round_keys[1:], start=1):
        state = bytes(SBOX[state[(i + 4 * (i % 4)) % 16]] for i in range(16))
        if number < 14:
            state = b"".join(_mix(state[i : i + 4]) for i in range(0, 16, 4))
        state = bytes(a ^ b for a, b in zip(state, round_key, strict=True))
    return state


def ctr(key: bytes, counter: int, length: int) -> bytes:
    """The key stream from a 128-bit big-endian counter block on."""
    round_keys = expand_key(key)
    blocks = -(-length // 16)
    stream = (encrypt_block(round_keys, ((counter + i) % 2**128).to_bytes(16, "big")) for i in range(blocks))
    return b"".join(stream)[:length]


def _ghash_multiply(x: int, y: int) -> int:
    product = 0
    for i in range(127, -1, -1):
        if x >> i & 1:
            product ^= y
        y = y >> 1 ^ (0xE1 << 120 if y & 1 else 0)
    return product


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def gcm_seal(key: bytes, nonce: bytes, plaintext: bytes, associated: bytes) -> bytes:
    """Return ciphertext and tag for a 96-bit nonce."""
    round_keys = expand_key(key)
    first = int.from_bytes(nonce + b"\0\0\0\1", "big")
    stream = ctr(key, first + 1, len(plaintext))
    ciphertext = bytes(a ^ b for a, b in zip(plaintext, stream, strict=True))
    h = int.from_bytes(encrypt_block(round_keys, bytes(16)), "big")
    lengths = (len(associated) * 8).to_bytes(8, "big") + (len(ciphertext) * 8).to_bytes(8, "big")
    hashed = _padded(associated) + _padded(ciphertext) + lengths
    y = 0
    for i in range(0, len(hashed), 16):
        y = _ghash_multiply(y ^ int.from_bytes(hashed[i : i + 16], "big"), h)
    tag = y ^ int.from_bytes(encrypt_block(round_keys, first.to_bytes(16, "big")), "big")
    return ciphertext + tag.to_bytes(16, "big")
