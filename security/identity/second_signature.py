"""The root's second signature on manifests, ML-DSA-65 beside ECDSA: it holds where a quantum computer forges the first.

A consortium turns it on with `ml_dsa = true` in federation.toml. From then on the manifest names the root's ML-DSA key,
and one for the log of each member. A party that holds such a manifest takes none without the second signature. Who
holds none yet takes the key from the first manifest it sees; an auditor brings it, in `root.pem` after the certificate.
"""

from __future__ import annotations

import re
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey, MLDSA65PublicKey

from lazaret.errors import ConfigError, ManifestRejected, VerificationFailed
from security import labels
from security.crypto.signing import statement, verify_ml_dsa
from security.identity.manifest import Manifest

FETCH_AGAIN: Final = (
    "fetch the manifest again; if that does not help, compare the root's fingerprint with the consortium"
)
_PUBLIC_KEY: Final = re.compile(rb"-----BEGIN PUBLIC KEY-----[^-]*-----END PUBLIC KEY-----\n?")


def signed_bytes(manifest: Manifest) -> bytes:
    """What the root signs, with either key."""
    return statement(labels.SIGN_MANIFEST, manifest.federation, manifest.digest)


def sign_ml_dsa(manifest: Manifest, key: MLDSA65PrivateKey) -> bytes:
    return key.sign(signed_bytes(manifest))


def check_ml_dsa_signature(manifest: Manifest, signature: bytes) -> None:
    """A signature that nobody asked for is refused too: one manifest, one file."""
    if manifest.root_ml_dsa is None and not signature:
        return
    try:
        verify_ml_dsa(bytes.fromhex(manifest.root_ml_dsa or ""), signature, signed_bytes(manifest))
    except VerificationFailed:
        raise ManifestRejected(
            "the ML-DSA signature is not this consortium's, or is missing", where=where_of(manifest), hint=FETCH_AGAIN
        ) from None


def check_ml_dsa(manifest: Manifest) -> None:
    """All or nobody: a log without the second signature would be the one to forge."""
    if any((key is None) != (manifest.root_ml_dsa is None) for key in log_keys(manifest)):
        raise ManifestRejected(
            "ML-DSA keys are listed for some members, or without the root's",
            where=where_of(manifest),
            hint="with ml_dsa = true every member needs one: `site-agent renew --ml-dsa`, then `consortium renew`",
        )


def log_keys(manifest: Manifest) -> list[str | None]:
    """Of each member, the ML-DSA key of its log."""
    return [member.log_ml_dsa for member in manifest.members]


def check_ml_dsa_kept(current: Manifest, offered: Manifest) -> None:
    """No way back: whoever could forge the older kind of signature alone would take it."""
    if current.root_ml_dsa not in (None, offered.root_ml_dsa):
        raise ManifestRejected(
            f"is not signed with the ML-DSA key of version {current.version}",
            where=where_of(offered),
            hint="the consortium publishes with ml_dsa = true; if it did, stop, keep both files and call it",
        )


def where_of(manifest: Manifest) -> str:
    """For messages to people."""
    return f"manifest version {manifest.version}"


# The key in `root.pem`.


def public_pem(key: MLDSA65PublicKey) -> bytes:
    """What follows the certificate in `root.pem`."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def key_in(pem: bytes, where: str) -> str | None:
    """The root's ML-DSA key, as manifests name it; None if the file has only the certificate."""
    if b"PUBLIC KEY" not in pem:
        return None
    found = _PUBLIC_KEY.findall(pem)
    try:
        key = serialization.load_pem_public_key(b"".join(found))
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if len(found) != 1 or not isinstance(key, MLDSA65PublicKey):
        raise ConfigError("the key after the root certificate is no ML-DSA-65 key", where=where)
    return key.public_bytes_raw().hex()


def check_root_key(manifest: Manifest, known: str | None) -> None:
    """The manifest is signed with the ML-DSA key that came with the root certificate."""
    if known is not None and manifest.root_ml_dsa != known:
        raise ManifestRejected("is not signed with the root's ML-DSA key", where=where_of(manifest), hint=FETCH_AGAIN)
