"""X25519 (RFC 7748) and the three keys derived with HKDF-SHA256 (RFC 5869).

Every derivation is salted with KX, the hash over the attempt's context and all its public keys, so that sites that saw
another model, cohort, round or key derive other masks (docs/spec/secure-aggregation.md, "What the keys are bound to").
"""

from __future__ import annotations

from typing import NoReturn

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lazaret.errors import VerificationFailed
from security import labels
from security.crypto import encoding
from security.rng import Randomness
from security.secrets import Secret

KEY_BYTES = 32


def clamp(scalar: bytes) -> bytes:
    """Return the one canonical form of an X25519 scalar (RFC 7748 section 5)."""
    if len(scalar) != KEY_BYTES:
        raise ValueError(f"an X25519 scalar has {KEY_BYTES} bytes")
    return bytes([scalar[0] & 248, *scalar[1:31], (scalar[31] & 127) | 64])


class KeyPair:
    """An X25519 key pair, made for one attempt.

    The scalar is kept clamped: several scalars share one public key, and the result of a round names the opened ones.
    """

    __slots__ = ("_private", "_scalar", "public")
    __hash__ = None  # type: ignore[assignment]  # as for Secret

    def __init__(self, scalar: Secret) -> None:
        self._scalar = Secret(clamp(scalar.reveal()))
        self._private = X25519PrivateKey.from_private_bytes(self._scalar.reveal())
        self.public = self._private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls, randomness: Randomness) -> KeyPair:
        return cls(Secret(randomness.bytes(KEY_BYTES)))

    @property
    def scalar(self) -> Secret:
        return self._scalar

    def exchange(self, peer_public: bytes) -> Secret:
        """Return the shared secret; a peer key of small order, which makes it all zero, is refused (RFC 7748 6.1)."""
        try:
            return Secret(self._private.exchange(X25519PublicKey.from_public_bytes(peer_public)))
        except ValueError:
            raise VerificationFailed("public key of the peer is not usable") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeyPair):
            return NotImplemented
        return self._scalar == other._scalar

    def __repr__(self) -> str:
        return "<KeyPair redacted>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KeyPair cannot be pickled or copied")


def require_usable(*publics: bytes) -> None:
    """Refuse keys of small order, with which no site could agree on anything."""
    probe = KeyPair(Secret(bytes(KEY_BYTES)))  # any clamped scalar is a multiple of 8 and takes such a point to zero
    for public in publics:
        probe.exchange(public)


def _derive(material: Secret, kx: bytes, info: bytes) -> Secret:
    return Secret(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=kx, info=info).derive(material.reveal()))


def mask_key(own: KeyPair, peer_public: bytes, *, kx: bytes, own_id: str, peer_id: str) -> Secret:
    """k_ij: the key of the mask that two sites share; the same from either side."""
    low, high = sorted((own_id.encode(), peer_id.encode()))
    return _derive(own.exchange(peer_public), kx, labels.KDF_MASK + encoding.tlv(low) + encoding.tlv(high))


def share_key(own: KeyPair, peer_public: bytes, *, kx: bytes, source: str, destination: str) -> Secret:
    """e_ij: the key of the share box from `source` to `destination`; one for each direction."""
    return _derive(own.exchange(peer_public), kx, labels.KDF_SHARE + encoding.text(source) + encoding.text(destination))


def self_mask_key(seed: Secret, *, kx: bytes, site: str) -> Secret:
    """q_i: the key of a site's own mask, from its shared seed b_i."""
    return _derive(seed, kx, labels.KDF_SELF + encoding.text(site))
