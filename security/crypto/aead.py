"""Sealed boxes that carry two shares from one site to another through the coordinator.

AES-256-GCM under a key of this one direction and attempt; the attempt and both ends are authenticated as well, so that
a box that was swapped, reflected or kept from another attempt does not open.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lazaret.errors import VerificationFailed
from security.crypto import encoding
from security.rng import Randomness
from security.secrets import Secret

NONCE_BYTES = 12
TAG_BYTES = 16
OVERHEAD = NONCE_BYTES + TAG_BYTES


def _associated(kx: bytes, source: str, destination: str) -> bytes:
    return kx + encoding.text(source) + encoding.text(destination)


def seal(key: Secret, plaintext: Secret, *, kx: bytes, source: str, destination: str, randomness: Randomness) -> bytes:
    """Return ``nonce || ciphertext || tag``."""
    # A random nonce is safe for 2^32 boxes under one key (NIST SP 800-38D, section 8.3); a key here seals far fewer.
    nonce = randomness.bytes(NONCE_BYTES)
    sealed = AESGCM(key.reveal()).encrypt(nonce, plaintext.reveal(), _associated(kx, source, destination))
    return nonce + sealed


def open_box(key: Secret, box: bytes, *, kx: bytes, source: str, destination: str) -> Secret:
    try:
        nonce, sealed = box[:NONCE_BYTES], box[NONCE_BYTES:]
        return Secret(AESGCM(key.reveal()).decrypt(nonce, sealed, _associated(kx, source, destination)))
    except (InvalidTag, ValueError):
        raise VerificationFailed("box does not open") from None
