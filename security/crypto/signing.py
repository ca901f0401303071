"""Ed25519 signatures over tagged statements (docs/spec/secure-aggregation.md, "Bytes that are signed"), and the check
of ML-DSA-65 signatures (FIPS 204), which stand beside others on manifests and log heads: they are verified in years.

A statement is ``label || TLV(signer) || TLV(field)*``. The label says what kind of statement it is, so a signature
made for one purpose verifies for no other; every field carries its length, so no two lists of fields share bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PublicKey

from lazaret.errors import VerificationFailed
from security.crypto import encoding
from security.rng import Randomness
from security.secrets import Secret

KEY_BYTES = 32
SIGNATURE_BYTES = 64
ML_DSA_KEY_BYTES = 1952
ML_DSA_SIGNATURE_BYTES = 3309


def statement(label: bytes, signer: str, *fields: bytes) -> bytes:
    """Return the bytes that are signed."""
    return label + encoding.text(signer) + b"".join(encoding.tlv(field) for field in fields)


def verify_ml_dsa(public: bytes, signature: bytes, message: bytes) -> None:
    """Return if `signature` is that of an ML-DSA-65 key over the message; raise otherwise, without saying why."""
    try:
        MLDSA65PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise VerificationFailed("signature does not verify") from None


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """A public Ed25519 key, 32 bytes (RFC 8032)."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != KEY_BYTES:
            raise VerificationFailed("public signing key has the wrong length")

    def verify(self, signature: bytes, label: bytes, signer: str, *fields: bytes) -> None:
        """Return if `signature` is this key's over the statement; raise otherwise, without saying why."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, statement(label, signer, *fields))
        except (InvalidSignature, ValueError):
            raise VerificationFailed("signature does not verify") from None


class SigningKey:
    """A private Ed25519 key, here or in a token that signs for us. Prints redacted, compares by its public key, does
    not pickle.
    """

    __slots__ = ("_private", "verify_key")
    __hash__ = None  # type: ignore[assignment]  # as for Secret

    def __init__(self, private: Ed25519PrivateKey | Secret) -> None:
        """:param private: the key, or the seed that it is made from."""
        if isinstance(private, Secret):
            if len(private) != KEY_BYTES:
                raise ValueError(f"an Ed25519 seed has {KEY_BYTES} bytes")
            private = Ed25519PrivateKey.from_private_bytes(private.reveal())
        self._private = private
        self.verify_key = VerifyKey(private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls, randomness: Randomness) -> SigningKey:
        return cls(Secret(randomness.bytes(KEY_BYTES)))

    @property
    def seed(self) -> Secret:
        """A key in a token has none that can be read."""
        return Secret(self._private.private_bytes_raw())

    def sign(self, label: bytes, signer: str, *fields: bytes) -> bytes:
        return self._private.sign(statement(label, signer, *fields))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SigningKey):
            return NotImplemented
        return self.verify_key == other.verify_key

    def __repr__(self) -> str:
        return "<SigningKey redacted>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SigningKey cannot be pickled or copied")
