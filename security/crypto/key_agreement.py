"""Hybrid key agreement of one attempt: X25519 (RFC 7748) and ML-KEM-768 (FIPS 203) together, keys by HKDF-SHA256.

Masks that are recorded today stay secret as long as one of the two holds. Every derivation is salted with KX, the hash
over the attempt's context and all its public keys, so that sites that saw another model, cohort, round or key derive
other masks (docs/spec/secure-aggregation.md, "What the keys are bound to"). The sections cited are of that page.
"""

from __future__ import annotations

from typing import Final, NoReturn

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lazaret.errors import VerificationFailed
from security import labels
from security.crypto import aead, encoding
from security.rng import Randomness
from security.secrets import Secret

SUITE: Final = "x25519-mlkem768"
SUITES: Final = {"hybrid": SUITE}  # by the word for it in a manifest
KEY_BYTES: Final = 32
KEM_KEY_BYTES: Final = 1184
KEM_SEED_BYTES: Final = 64
CIPHERTEXT_BYTES: Final = 1088
# What a dealer sends to each holder: a box with two shares, and to a later one the pair's secret under its mask key.
BOX_BYTES: Final = CIPHERTEXT_BYTES + aead.OVERHEAD + 2 * KEY_BYTES
PAIR_BYTES: Final = CIPHERTEXT_BYTES + aead.OVERHEAD + KEY_BYTES


def clamp(scalar: bytes) -> bytes:
    """Return the one canonical form of an X25519 scalar (RFC 7748 section 5)."""
    if len(scalar) != KEY_BYTES:
        raise ValueError(f"an X25519 scalar has {KEY_BYTES} bytes")
    return bytes([scalar[0] & 248, *scalar[1:31], (scalar[31] & 127) | 64])


class KeyPair:
    """An X25519 key pair, made for one attempt."""

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
        return f"<{type(self).__name__} redacted>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied")


class HybridPair(KeyPair):
    """An X25519 and an ML-KEM-768 key pair of one owner and one purpose."""

    __slots__ = ("_kem", "kem_public")
    __hash__ = None

    def __init__(self, scalar: Secret, kem_seed: Secret) -> None:
        super().__init__(scalar)
        self._kem = MLKEM768PrivateKey.from_seed_bytes(kem_seed.reveal())
        self.kem_public = self._kem.public_key().public_bytes_raw()

    @classmethod
    def generate(cls, randomness: Randomness) -> HybridPair:
        return cls(Secret(randomness.bytes(KEY_BYTES)), Secret(randomness.bytes(KEM_SEED_BYTES)))

    @classmethod
    def from_seed(cls, seed: Secret, *, ctx: bytes, site: str) -> HybridPair:
        """The mask keys of a site, all from the one seed that is shared: whoever opens it has the keys (section 4)."""
        info = encoding.text(site)
        scalar = _derive(seed, ctx, labels.KDF_SEED_X25519 + info)
        return cls(scalar, _derive(seed, ctx, labels.KDF_SEED_MLKEM + info, length=KEM_SEED_BYTES))

    def decapsulate(self, ciphertext: bytes) -> Secret:
        """A wrong ciphertext gives another secret, and no error (FIPS 203, implicit rejection)."""
        return Secret(self._kem.decapsulate(ciphertext))


def encapsulate(kem_public: bytes) -> tuple[Secret, bytes]:
    """A fresh secret for the owner of a key, and the ciphertext that carries it."""
    secret, ciphertext = _kem_key(kem_public).encapsulate()
    return Secret(secret), ciphertext


def _kem_key(kem_public: bytes) -> MLKEM768PublicKey:
    try:
        return MLKEM768PublicKey.from_public_bytes(kem_public)
    except ValueError:
        raise VerificationFailed("public key of the peer is not usable") from None


def require_usable(*publics: bytes, kems: tuple[bytes, ...] = ()) -> None:
    """Refuse keys with which no site could agree on anything: of small order, or not an ML-KEM key."""
    probe = KeyPair(Secret(bytes(KEY_BYTES)))  # any clamped scalar is a multiple of 8 and takes such a point to zero
    for public in publics:
        probe.exchange(public)
    for kem in kems:
        _kem_key(kem)


def _derive(material: Secret, salt: bytes, info: bytes, *, length: int = KEY_BYTES) -> Secret:
    return Secret(HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(material.reveal()))


def pair_secret(seed: Secret, *, ctx: bytes, site: str, peer: str) -> Secret:
    """r_ij: what a site adds to the key of the mask that it shares with a later one."""
    return _derive(seed, ctx, labels.KDF_PAIR + encoding.text(site) + encoding.text(peer))


def mask_key(own: KeyPair, peer_public: bytes, pair: Secret, *, kx: bytes, own_id: str, peer_id: str) -> Secret:
    """k_ij: the key of the mask that two sites share; the same from either side.

    :param pair: r_ij of the two, from the seed of the one that comes first.
    """
    low, high = sorted((own_id.encode(), peer_id.encode()))
    both = Secret(own.exchange(peer_public).reveal() + pair.reveal())
    info = labels.KDF_MASK + encoding.text(SUITE) + encoding.tlv(low) + encoding.tlv(high)
    return _derive(both, kx, info)


def self_mask_key(seed: Secret, *, kx: bytes, site: str) -> Secret:
    """q_i: the key of a site's own mask, from its shared seed b_i."""
    return _derive(seed, kx, labels.KDF_SELF + encoding.text(site))


# What goes from one site to another through the coordinator: the ciphertext of a fresh secret, and a box under it.


def _share_key(agreed: Secret, kem: Secret, kx: bytes, source: str, destination: str) -> Secret:
    info = labels.KDF_SHARE + encoding.text(SUITE) + encoding.text(source) + encoding.text(destination)
    return _derive(Secret(agreed.reveal() + kem.reveal()), kx, info)


def seal_shares(
    own: KeyPair, peer: tuple[bytes, bytes], plain: Secret, *, kx: bytes, source: str, destination: str, rng: Randomness
) -> bytes:
    """A box for `destination`, under a key from both agreements.

    :param peer: its two public share keys.
    """
    fresh, ciphertext = encapsulate(peer[1])
    key = _share_key(own.exchange(peer[0]), fresh, kx, source, destination)
    return ciphertext + aead.seal(key, plain, kx=kx, source=source, destination=destination, randomness=rng)


def open_shares(
    own: HybridPair, peer_public: bytes, box: bytes, *, kx: bytes, source: str, destination: str
) -> Secret:
    fresh = own.decapsulate(_ciphertext(box))
    key = _share_key(own.exchange(peer_public), fresh, kx, source, destination)
    return aead.open_box(key, box[CIPHERTEXT_BYTES:], kx=kx, source=source, destination=destination)


def _pair_box_key(fresh: Secret, kx: bytes, source: str, destination: str) -> Secret:
    return _derive(fresh, kx, labels.KDF_PAIR_BOX + encoding.text(source) + encoding.text(destination))


def seal_pair(kem_public: bytes, pair: Secret, *, kx: bytes, source: str, destination: str, rng: Randomness) -> bytes:
    """r_ij for the later site, under its ML-KEM mask key: whoever opens that site's seed can read it."""
    fresh, ciphertext = encapsulate(kem_public)
    key = _pair_box_key(fresh, kx, source, destination)
    return ciphertext + aead.seal(key, pair, kx=kx, source=source, destination=destination, randomness=rng)


def open_pair(own: HybridPair, box: bytes, *, kx: bytes, source: str, destination: str) -> Secret:
    key = _pair_box_key(own.decapsulate(_ciphertext(box)), kx, source, destination)
    return aead.open_box(key, box[CIPHERTEXT_BYTES:], kx=kx, source=source, destination=destination)


def _ciphertext(box: bytes) -> bytes:
    if len(box) < CIPHERTEXT_BYTES:
        raise VerificationFailed("box does not open")
    return box[:CIPHERTEXT_BYTES]
