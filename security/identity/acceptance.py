"""Which manifest a party accepts: signed by the consortium's root, within the rules, and after the one before.

`open_manifest` is the one way from bytes to a manifest that may be trusted; `accept_newer` is the one way to a newer
one for whoever holds one already. History goes forward only, and what a run has promised stays. What a manifest must be
in itself is in rules.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey, MLDSA65PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from pydantic import Field, ValidationError

from lazaret.errors import CodecError, ConfigError, ManifestRejected, VerificationFailed
from security import labels
from security.crypto import encoding
from security.crypto.signing import ML_DSA_SIGNATURE_BYTES, statement, verify_ml_dsa
from security.dp.noise import SharedNoise
from security.dp.planner import PREFIX
from security.identity.manifest import Document, Manifest, describe
from security.identity.rules import (
    OTHER_FEDERATION,
    check_certificates,
    check_clock,
    check_consistency,
    check_federation,
    labels_of,
    least_noise,
    where_of,
)

MAX_BYTES: Final = 4 * 1024 * 1024
_FETCH: Final = "it may be cut off or edited: get the manifest from the consortium again"
FETCH_AGAIN: Final = (
    "fetch the manifest again; if that does not help, compare the root's fingerprint with the consortium"
)
# Order of the base point of P-256 (SEC 2, section 2.4.2).
P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_PUBLIC_KEY: Final = re.compile(rb"-----BEGIN PUBLIC KEY-----[^-]*-----END PUBLIC KEY-----\n?")


# The file: canonical JSON, and the root's signatures.


class Envelope(Document):
    """The file: the manifest and the root's signatures over its digest."""

    manifest: dict[str, Any]
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,80}$")]
    ml_dsa: Annotated[str, Field(pattern=rf"^([0-9a-f]{{{2 * ML_DSA_SIGNATURE_BYTES}}})$")] = ""


class SignatureSet(NamedTuple):
    """The root's signatures on one manifest: ECDSA on each, ML-DSA-65 where the manifest asks for it, else empty."""

    ecdsa: bytes
    ml_dsa: bytes = b""


def seal(manifest: Manifest, signature: bytes, ml_dsa: bytes = b"") -> bytes:
    second = {"ml_dsa": ml_dsa.hex()} if ml_dsa else {}
    return encoding.dumps({"manifest": manifest.to_dict(), "signature": signature.hex(), **second}) + b"\n"


def unseal(data: bytes, where: str = "manifest") -> tuple[Manifest, SignatureSet]:
    """Parse the file strictly: one canonical form, no unknown key. Says nothing yet about who signed it."""
    if len(data) > MAX_BYTES:
        raise ManifestRejected(f"{len(data)} bytes are more than a manifest may have", where=where, hint=_FETCH)
    try:
        value = encoding.loads(data.removesuffix(b"\n"))
        envelope = Envelope.model_validate(value)
    except CodecError as error:
        raise ManifestRejected(f"manifest is {error.message}", where=where, hint=_FETCH) from error
    except ValidationError as error:
        raise ManifestRejected(describe(error), where=where, hint=_FETCH) from None
    signatures = SignatureSet(bytes.fromhex(envelope.signature), bytes.fromhex(envelope.ml_dsa))
    return Manifest.from_dict(envelope.manifest, where), signatures


def open_manifest(data: bytes, root: x509.Certificate, *, now_ms: int, where: str = "manifest") -> Manifest:
    """Read a manifest file and accept it only if this root signed it and it keeps every rule."""
    manifest, signatures = unseal(data, where)
    check_signatures(manifest, signatures, root)
    check_federation(manifest, root)
    check_clock(manifest, root, now_ms)
    check_certificates(manifest, root)
    check_consistency(manifest)
    return manifest


# The root's signatures. ECDSA P-256 is on every manifest. ML-DSA-65 beside it holds where a quantum computer forges the
# first: a consortium turns it on with `ml_dsa = true` in federation.toml. From then on the manifest names the root's
# ML-DSA key, and one for the log of each member, and a party that holds such a manifest takes none without the second
# signature. Who holds none yet takes the key from the first manifest it sees; an auditor brings it, in `root.pem` after
# the certificate.


def signed_bytes(manifest: Manifest) -> bytes:
    """What the root signs, with either key."""
    return statement(labels.SIGN_MANIFEST, manifest.federation, manifest.digest)


def sign(manifest: Manifest, key: ec.EllipticCurvePrivateKey) -> bytes:
    r, s = decode_dss_signature(key.sign(signed_bytes(manifest), ec.ECDSA(hashes.SHA256())))
    return encode_dss_signature(r, min(s, P256_ORDER - s))


def sign_ml_dsa(manifest: Manifest, key: MLDSA65PrivateKey) -> bytes:
    return key.sign(signed_bytes(manifest))


def check_signatures(manifest: Manifest, signatures: SignatureSet, root: x509.Certificate) -> None:
    """All that the manifest asks for. Which ML-DSA key it must name, `check_ml_dsa_kept` knows from the one before."""
    check_signature(manifest, signatures.ecdsa, root)
    check_ml_dsa_signature(manifest, signatures.ml_dsa)


def check_signature(manifest: Manifest, signature: bytes, root: x509.Certificate) -> None:
    key = root.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ManifestRejected("the root certificate holds no ECDSA key", where="root certificate")
    try:
        check_one_form(signature)
        key.verify(signature, signed_bytes(manifest), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        raise ManifestRejected(
            "the signature is not this consortium's",
            where=where_of(manifest),
            hint=FETCH_AGAIN,
        ) from None


def check_one_form(signature: bytes) -> None:
    """(r, s) and (r, n - s) verify alike: one of them is refused, so that nobody can give one manifest two files."""
    r, s = decode_dss_signature(signature)
    if s > P256_ORDER // 2 or encode_dss_signature(r, s) != signature:
        raise InvalidSignature


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


def check_ml_dsa_kept(current: Manifest, offered: Manifest) -> None:
    """No way back: whoever could forge the older kind of signature alone would take it."""
    if current.root_ml_dsa not in (None, offered.root_ml_dsa):
        raise ManifestRejected(
            f"is not signed with the ML-DSA key of version {current.version}",
            where=where_of(offered),
            hint="the consortium publishes with ml_dsa = true; if it did, stop, keep both files and call it",
        )


# The ML-DSA key in `root.pem`.


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


# Which manifest may follow another. Each rule returns or raises, as in rules.py.


def accept_newer(current: Manifest | None, offered: Manifest) -> Manifest:
    """The manifest in force after `offered` was seen; a party keeps it on disk before it acts on it."""
    if current is not None:
        check_same_federation(current, offered)
        if offered.digest == current.digest:
            return current
        check_not_older(current, offered)
        check_chain(current, offered)
        check_run(current, offered)
        check_ml_dsa_kept(current, offered)
    check_draw(current, offered)
    return offered


def check_draw(current: Manifest | None, offered: Manifest) -> None:
    """Commitments are public before the first secret is opened, and groups that were drawn stay for the whole run.

    Otherwise the consortium, or the site that opens its secret last, could choose who is in one group.
    """
    drawn = offered.aggregation.groups
    if current is None or current.run != offered.run:
        if drawn is not None and drawn.secrets and (current is not None or offered.version == 1):
            raise ManifestRejected(
                "has the secrets of the draw of groups, but is the first manifest of the run",
                where=where_of(offered),
                hint="publish the commitments first: without secrets under [aggregation.secrets]",
            )
        return
    before = current.aggregation.groups
    known = {member.id: member.draw for member in current.roster}
    if before is not None and before.secrets:
        same = drawn == before
    elif drawn is not None and drawn.secrets:
        same = before is not None and all(known.get(m.id) == m.draw for m in offered.roster)
        same = same and set(drawn.secrets) == set(offered.sites)
        # Over a gap the manifest that was shown may be one that this party has not seen.
        same = same and (offered.version > current.version + 1 or drawn.shown == current.digest.hex())
    else:
        same = drawn is None or before is not None
    if not same:
        raise ManifestRejected(
            f"changes the groups of run {current.run!r}, or opens secrets that were not committed to before",
            where=where_of(offered),
            hint="other groups need a new run id",
        )


def check_same_federation(current: Manifest, offered: Manifest) -> None:
    if offered.federation != current.federation:
        raise ManifestRejected(
            f"belongs to another federation, {offered.federation!r}", where=where_of(offered), hint=OTHER_FEDERATION
        )


def check_not_older(current: Manifest, offered: Manifest) -> None:
    """An older version may have had weaker thresholds, or a member who has since been revoked."""
    if offered.version < current.version:
        raise ManifestRejected(
            f"is older than version {current.version}, which was seen before",
            where=where_of(offered),
            hint="fetch the newest manifest from the consortium",
        )
    if offered.version == current.version:
        raise ManifestRejected(
            f"two different manifests are both called version {current.version}",
            where=where_of(offered),
            hint="stop, keep both files and call the consortium: its root key may have been used without its knowledge",
        )


def check_chain(current: Manifest, offered: Manifest) -> None:
    """The next version names the last one; over a gap only the root's signature is checked."""
    if offered.version == current.version + 1 and offered.previous != current.digest.hex():
        raise ManifestRejected(
            f"does not continue the version {current.version} that was seen before",
            where=where_of(offered),
            hint="stop, keep both files and call the consortium",
        )


def check_run(current: Manifest, offered: Manifest) -> None:
    """Within a run the model and its vector stay what they are; a new model is a new run."""
    if offered.run == current.run and (
        offered.model != current.model
        or _tensors(offered) != _tensors(current)
        or offered.training.method != current.training.method
        or labels_of(offered) != labels_of(current)
        or offered.training.plugin != current.training.plugin
        # The lengths of the newest steps are part of a run's state, as many as the window has.
        or offered.aggregation.movement_window != current.aggregation.movement_window
        or (offered.audit.vote_drop is None) != (current.audit.vote_drop is None)
        or offered.scores != current.scores
        or _promise(offered) != _promise(current)
        or not _keeps_noise(_shared_noise(current), _shared_noise(offered))
    ):
        raise ManifestRejected(
            f"changes the model, the method, the labels, the tensors, the movement window, the vote, the scores or the "
            f"privacy of run {current.run!r}",
            where=where_of(offered),
            hint="the consortium must give a changed model a new run id",
        )


def _tensors(manifest: Manifest) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((block.name, block.shape, block.kind) for block in manifest.aggregation.layout.blocks)


def _promise(manifest: Manifest) -> tuple[object, dict[str, object]]:
    """The guarantee for patients and its schedule: a run that was booked under one cannot continue under another."""
    settings = manifest.training.settings
    return manifest.privacy, {name: value for name, value in settings.items() if name.startswith(PREFIX)}


def _shared_noise(manifest: Manifest) -> SharedNoise | None:
    schedule = least_noise(manifest)
    return None if schedule is None else schedule.shared


def _keeps_noise(current: SharedNoise | None, offered: SharedNoise | None) -> bool:
    """Rounds are booked with the honest survivors and the ring units with which the run began."""
    if current is None or offered is None:
        return current is offered
    return offered.honest >= current.honest and replace(offered, honest=current.honest) == current
