"""Private keys and secrets on disk: mode 0600, written atomically, checked again on every load.

A passphrase protects a key as standard PKCS#8 with PBES2, scrypt and AES-256-CBC (RFC 8018, RFC 7914 section 7).
`cryptography` reads that form but writes only 2,048 rounds of PBKDF2, which a stolen root key deserves better than;
hence the few lines of DER below. `openssl pkey` opens the files too.

A key file may instead hold the address of a key that stays in a token (`security.identity.token`).
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final, TypeAlias

from cryptography.hazmat.primitives import padding, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from lazaret.errors import ConfigError
from lazaret.files import (
    read_private,
    write_atomically,
)
from security.crypto.encoding import der
from security.identity import token
from security.identity.token import TokenSigningKey, TokenTlsKey, TokenUri
from security.rng import Randomness, SystemRandomness

PrivateKey: TypeAlias = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey | MLDSA65PrivateKey

# 16 MiB and five passes: as costly to guess as N = 2^17, and within the 32 MiB that the openssl command allows.
SCRYPT_N: Final = 2**14
SCRYPT_R: Final = 8
SCRYPT_P: Final = 5

_OID_PBES2: Final = bytes.fromhex("06092a864886f70d01050d")
_OID_SCRYPT: Final = bytes.fromhex("06092b06010401da47040b")
_OID_AES256_CBC: Final = bytes.fromhex("060960864801650304012a")
_INTEGER, _OCTETS, _SEQUENCE = 0x02, 0x04, 0x30


def save_private_key(
    path: Path, key: PrivateKey, *, passphrase: bytes | None = None, rng: Randomness | None = None
) -> None:
    """Write a PKCS#8 PEM file, mode 0600, or the address of a key in a token; never overwrites."""
    if isinstance(key, TokenSigningKey | TokenTlsKey):
        write_atomically(path, f"{key.uri}\n".encode(), mode=0o600, replace=False)
        return
    plain = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    if passphrase is None:
        pem = _pem("PRIVATE KEY", plain)
    else:
        pem = _pem("ENCRYPTED PRIVATE KEY", _seal_pkcs8(plain, passphrase, rng or SystemRandomness()))
    write_atomically(path, pem, mode=0o600, replace=False)


def load_private_key(path: Path, *, passphrase: bytes | None = None) -> PrivateKey:
    data = read_private(path)
    if (uri := _address_in(data, path)) is not None:
        return token.load(uri, str(path))
    if b"BEGIN ENCRYPTED" not in data:
        passphrase = None  # A passphrase offered for a key that has none is not an error of the key.
    try:
        key = serialization.load_pem_private_key(data, passphrase)
    except TypeError as error:
        raise ConfigError("key is encrypted and no passphrase was given", where=str(path)) from error
    except ValueError as error:
        hint = "check the passphrase" if passphrase is not None else "restore the file from a backup"
        raise ConfigError("key does not open", where=str(path), hint=hint) from error
    if not isinstance(key, PrivateKey):
        raise ConfigError("key is of a kind this toolkit does not use", where=str(path))
    return key


def token_of(path: Path) -> TokenUri | None:
    """The token that a key is in; None if the key is in the file."""
    return _address_in(read_private(path), path)


def _address_in(data: bytes, path: Path) -> TokenUri | None:
    if not data.startswith(token.SCHEME.encode()):
        return None
    return TokenUri.parse(data.decode("utf-8", "replace").strip(), str(path))


def load_ed25519_key(path: Path, *, passphrase: bytes | None = None) -> ed25519.Ed25519PrivateKey:
    key = load_private_key(path, passphrase=passphrase)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError("not an Ed25519 key", where=str(path), hint="TLS keys and signing keys are different files")
    return key


def load_ml_dsa_key(path: Path, *, passphrase: bytes | None = None) -> MLDSA65PrivateKey:
    key = load_private_key(path, passphrase=passphrase)
    if not isinstance(key, MLDSA65PrivateKey):
        raise ConfigError("not an ML-DSA-65 key", where=str(path), hint="restore the file from a backup")
    return key


def load_tls_key(path: Path, *, passphrase: bytes | None = None) -> ec.EllipticCurvePrivateKey:
    key = load_private_key(path, passphrase=passphrase)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("not an ECDSA key", where=str(path), hint="TLS keys and signing keys are different files")
    return key


def save_secret(path: Path, secret: bytes) -> None:
    """Raw key bytes (sealing, HMAC) as one line of base64, mode 0600; never overwrites."""
    write_atomically(path, base64.b64encode(secret) + b"\n", mode=0o600, replace=False)


def load_secret(path: Path, *, length: int = 32) -> bytes:
    try:
        secret = base64.b64decode(read_private(path).strip(), validate=True)
    except ValueError as error:
        raise ConfigError("secret file is not base64", where=str(path)) from error
    if len(secret) != length:
        raise ConfigError(f"secret has {len(secret)} bytes, expected {length}", where=str(path))
    return secret


def _pem(label: str, data: bytes) -> bytes:
    text = base64.b64encode(data).decode("ascii")
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""]).encode("ascii")


def _seal_pkcs8(plain: bytes, passphrase: bytes, rng: Randomness) -> bytes:
    """EncryptedPrivateKeyInfo of RFC 5958 section 3, with the PBES2 parameters of RFC 8018 appendix A.4."""
    salt, iv = rng.bytes(16), rng.bytes(16)
    key = Scrypt(salt=salt, length=32, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P).derive(passphrase)
    padder, cipher = padding.PKCS7(128).padder(), Cipher(algorithms.AES256(key), modes.CBC(iv)).encryptor()
    sealed = cipher.update(padder.update(plain) + padder.finalize()) + cipher.finalize()
    cost = der(_SEQUENCE, der(_OCTETS, salt), *(_der_integer(value) for value in (SCRYPT_N, SCRYPT_R, SCRYPT_P)))
    kdf = der(_SEQUENCE, _OID_SCRYPT, cost)
    encryption = der(_SEQUENCE, _OID_AES256_CBC, der(_OCTETS, iv))
    algorithm = der(_SEQUENCE, _OID_PBES2, der(_SEQUENCE, kdf, encryption))
    return der(_SEQUENCE, algorithm, der(_OCTETS, sealed))


def _der_integer(value: int) -> bytes:
    return der(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big"))
