"""Time stamps of checkpoints by an authority outside of the consortium (RFC 3161).

Witnesses say when they saw a checkpoint; a court may prefer a time stamp authority. What is stamped is the text of a
checkpoint, so that cosignatures which come later change nothing. Nothing is sent here: `request` is a file for the
authority, and `check` reads its answer. Only what is needed of CMS (RFC 5652) is read: one signer, SHA-2, RSA or ECDSA.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

import click
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from lazaret import files
from lazaret.errors import CodecError, ConfigError, VerificationFailed
from security.audit.cli import FILE, TARGET, one_log
from security.audit.safe_files import read_capped, refuse_hostile
from security.audit.text import plain
from security.crypto.encoding import der
from security.log.note import Note, checkpoint_of
from security.log.store import LogFolder

RESPONSE_BYTES: Final = 1 << 20
INTEGER, OCTETS, NULL, OID, SEQUENCE, SET, TIME = 0x02, 0x04, 0x05, 0x06, 0x30, 0x31, 0x18
GRANTED: Final = frozenset({b"\x00", b"\x01"})
DEEPEST: Final = 5  # certificates between the authority's and the root

# Object identifiers, as DER has their content.
SIGNED_DATA: Final = bytes.fromhex("2a864886f70d010702")
STAMP: Final = bytes.fromhex("2a864886f70d0109100104")
CONTENT_TYPE: Final = bytes.fromhex("2a864886f70d010903")
MESSAGE_DIGEST: Final = bytes.fromhex("2a864886f70d010904")
SIGNER_V1: Final = bytes.fromhex("2a864886f70d010910020c")
SIGNER_V2: Final = bytes.fromhex("2a864886f70d010910022f")
SHA256: Final = bytes.fromhex("608648016503040201")
DIGESTS: Final[dict[bytes, type[hashes.HashAlgorithm]]] = {
    SHA256: hashes.SHA256,
    bytes.fromhex("608648016503040202"): hashes.SHA384,
    bytes.fromhex("608648016503040203"): hashes.SHA512,
}

UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeStamp:
    """When an authority saw something, and the name in its certificate."""

    time: datetime
    authority: str


# DER: one form for each value, so a length in another form is refused.


def _split(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The values that stand one after another: tag and content."""
    while data:
        if len(data) < 2:
            raise CodecError("a value that is cut off")
        tag, length, start = data[0], data[1], 2
        if length >= 128:
            start = 2 + (length & 0x7F)
            length = int.from_bytes(data[2:start], "big")
            if not 3 <= start <= 5 or length < 128 or length >> (8 * (start - 3)) == 0:
                raise CodecError("a length that is not DER")
        if tag & 0x1F == 0x1F or start + length > len(data):
            raise CodecError("a value that is cut off")
        yield tag, data[start : start + length]
        data = data[start + length :]


class _Values:
    """The parts of a structure, taken in their order."""

    def __init__(self, content: bytes) -> None:
        self._parts = list(_split(content))

    def take(self, tag: int) -> bytes:
        if not self._parts or self._parts[0][0] != tag:
            raise CodecError("not a time stamp")
        return self._parts.pop(0)[1]

    def maybe(self, tag: int) -> bytes | None:
        return self.take(tag) if self._parts and self._parts[0][0] == tag else None

    def inner(self, tag: int = SEQUENCE) -> _Values:
        return _Values(self.take(tag))


def _one(data: bytes, tag: int = SEQUENCE) -> bytes:
    """The content of the one value in some bytes."""
    found = list(_split(data))
    if len(found) != 1 or found[0][0] != tag:
        raise CodecError("not a time stamp")
    return found[0][1]


def request(data: bytes) -> bytes:
    """What an authority is asked: a stamp for the SHA-256 of some bytes, with its certificate."""
    algorithm = der(SEQUENCE, der(OID, SHA256), der(NULL))
    imprint = der(SEQUENCE, algorithm, der(OCTETS, sha256(data).digest()))
    return der(SEQUENCE, der(INTEGER, b"\x01"), imprint, der(0x01, b"\xff"))


def stamped(response: bytes, notes: Iterable[Note]) -> Note:
    """The checkpoint whose digest a response holds; `check` then says whether it is a time stamp of it.

    :raises VerificationFailed: if it is none of them.
    """
    for note in notes:
        if sha256(note.text.encode()).digest() in response:
            return note
    raise VerificationFailed("the time stamp is of no checkpoint of this log")


def read_roots(path: Path) -> list[x509.Certificate]:
    """Root certificates that an auditor brought."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise ConfigError("not certificates in PEM", where=str(path)) from error


def check(response: bytes, data: bytes, roots: Sequence[x509.Certificate]) -> TimeStamp:
    """When an authority under one of `roots` saw `data`.

    :raises CodecError: if the response cannot be read, by us or by a library.
    :raises VerificationFailed: if it does not say that.
    """
    try:
        return _check(response, data, roots)
    except UNREADABLE as error:
        raise CodecError("not a time stamp that can be read here") from error


def _check(response: bytes, data: bytes, roots: Sequence[x509.Certificate]) -> TimeStamp:
    answer = _Values(_one(response))
    if answer.inner().take(INTEGER) not in GRANTED:
        raise VerificationFailed("the authority did not grant a time stamp")
    content = answer.inner()
    # RFC 3161, section 2.4.2: the token is a CMS SignedData (RFC 5652, section 5.1).
    if content.take(OID) != SIGNED_DATA:
        raise CodecError("not a time stamp")
    signed = content.inner(0xA0).inner()
    signed.take(INTEGER)
    signed.take(SET)
    enclosed = signed.inner()
    # RFC 3161, section 2.4.2: what is signed is a TSTInfo, named by id-ct-TSTInfo.
    if enclosed.take(OID) != STAMP:
        raise CodecError("not a time stamp")
    info = enclosed.inner(0xA0).take(OCTETS)
    kept = _split(signed.maybe(0xA0) or b"")
    certificates = [x509.load_der_x509_certificate(der(tag, value)) for tag, value in kept]
    signed.maybe(0xA1)
    signer = _check_signer(_one(signed.take(SET)), info, certificates)
    time = _check_info(_Values(_one(info)), data)
    _check_chain(signer, certificates, roots, time)
    return TimeStamp(time=time, authority=signer.subject.rfc4514_string())


def _check_info(info: _Values, data: bytes) -> datetime:
    info.take(INTEGER)
    info.take(OID)
    imprint = info.inner()
    if imprint.inner().take(OID) != SHA256 or imprint.take(OCTETS) != sha256(data).digest():
        raise VerificationFailed("the time stamp is of something else")
    info.take(INTEGER)
    written = info.take(TIME).decode("ascii")
    form = "%Y%m%d%H%M%S.%fZ" if "." in written else "%Y%m%d%H%M%SZ"
    return datetime.strptime(written, form).replace(tzinfo=UTC)


def _check_signer(content: bytes, info: bytes, certificates: Sequence[x509.Certificate]) -> x509.Certificate:
    """The certificate under whose key the one signer signed these bytes."""
    parts = _Values(content)
    parts.take(INTEGER)
    name, serial = list(_split(parts.take(SEQUENCE)))
    algorithm = DIGESTS.get(parts.inner().take(OID))
    attributes = parts.take(0xA0)
    parts.take(SEQUENCE)
    signature = parts.take(OCTETS)
    if algorithm is None:
        raise CodecError("a digest other than SHA-2")
    # RFC 5652, section 5.3: the signer is named by issuer and serial number.
    wanted = (der(SEQUENCE, name[1]), int.from_bytes(serial[1], "big", signed=True))
    found = [one for one in certificates if (one.issuer.public_bytes(), one.serial_number) == wanted]
    if not found:
        raise VerificationFailed("the certificate of the signer is not in the time stamp")
    _check_attributes(attributes, info, algorithm, found[0])
    # RFC 5652, section 5.4: signed is the attributes' encoding as a SET, whose tag in the message is [0].
    _check_signature(found[0], signature, der(SET, attributes), algorithm())
    return found[0]


def _check_attributes(
    content: bytes, info: bytes, algorithm: type[hashes.HashAlgorithm], signer: x509.Certificate
) -> None:
    """What the signature covers: the type, the digest of the stamp, and which certificate signed."""
    signed: dict[bytes, bytes] = {}
    for _, attribute in _split(content):
        parts = _Values(attribute)
        name = parts.take(OID)
        signed[name] = parts.take(SET)
    if signed.get(CONTENT_TYPE) != der(OID, STAMP):
        raise VerificationFailed("what was signed is no time stamp")
    if signed.get(MESSAGE_DIGEST) != der(OCTETS, _digest(algorithm, info)):
        raise VerificationFailed("what was signed is another time stamp")
    # RFC 3161, section 2.4.2: the signature covers which certificate made it, else another one with the same key would
    # pass for it. By SHA-1 (RFC 2634) in the first form; by SHA-256, unless it names another, in the second (RFC 5816).
    second = SIGNER_V2 in signed
    named = _Values(_one(_one(signed.get(SIGNER_V2) or signed.get(SIGNER_V1, b"")))).inner()
    other = named.maybe(SEQUENCE) if second else None
    kind = DIGESTS.get(_Values(other).take(OID)) if other else hashes.SHA256 if second else hashes.SHA1
    if kind is None or named.take(OCTETS) != signer.fingerprint(kind()):
        raise VerificationFailed("another certificate than the one that signed is named")


def _digest(algorithm: type[hashes.HashAlgorithm], data: bytes) -> bytes:
    state = hashes.Hash(algorithm())
    state.update(data)
    return state.finalize()


def _check_signature(signer: x509.Certificate, signature: bytes, data: bytes, algorithm: hashes.HashAlgorithm) -> None:
    key = signer.public_key()
    try:
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, data, padding.PKCS1v15(), algorithm)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, data, ec.ECDSA(algorithm))
        else:
            raise CodecError("a key that is neither RSA nor ECDSA")
    except InvalidSignature as error:
        raise VerificationFailed("the signature of the time stamp is not valid") from error


def _check_chain(
    signer: x509.Certificate, others: Sequence[x509.Certificate], roots: Sequence[x509.Certificate], time: datetime
) -> None:
    """From the signer, who may do nothing but stamp, to a root that the auditor brought; all valid at that time."""
    # RFC 3161, section 2.3: this usage alone, and critical.
    usage = signer.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    if not usage.critical or list(usage.value) != [ExtendedKeyUsageOID.TIME_STAMPING]:
        raise VerificationFailed("the certificate of the signer is not for time stamps")
    at = signer
    for _ in range(DEEPEST):
        if not at.not_valid_before_utc <= time <= at.not_valid_after_utc:
            raise VerificationFailed("a certificate was not valid at the time of the stamp")
        if any(_issued(at, root) and root.not_valid_before_utc <= time <= root.not_valid_after_utc for root in roots):
            return
        above = next((one for one in others if one != at and _is_authority(one) and _issued(at, one)), None)
        if above is None:
            break
        at = above
    raise VerificationFailed("the authority is not under the root certificates given")


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


# The command.


@click.command(short_help="Ask for and check time stamps (RFC 3161).")
@one_log
@click.option("--request", "asked", type=TARGET, help="Write what the authority is asked about the newest checkpoint.")
@click.option("--response", type=FILE, help="The authority's answer, to be checked.")
@click.option("--ca", type=FILE, help="Root certificates of the authority (PEM).")
def timestamp(log: Path, asked: Path | None, response: Path | None, ca: Path | None) -> None:
    """Time stamps of checkpoints (RFC 3161). Nothing is sent: you carry the files to the authority and back."""
    refuse_hostile(log)
    folder = LogFolder(log)
    notes = [folder.checkpoint_note(size) for size in reversed(folder.checkpoint_sizes())]
    if not notes:
        raise ConfigError("there is no checkpoint", where=str(log))
    if asked is not None and response is None and ca is None:
        files.write_atomically(asked, request(notes[0].text.encode()))
        click.echo(f"{asked}: asks for a time stamp of the checkpoint of {checkpoint_of(notes[0]).size} entries")
        return
    if asked is not None or response is None or ca is None:
        raise ConfigError("give --request, or --response and --ca", where="privacy-audit timestamp")
    answer = read_capped(response, RESPONSE_BYTES)
    note = stamped(answer, notes)
    stamp = check(answer, note.text.encode(), read_roots(ca))
    size = checkpoint_of(note).size
    click.echo(f"the checkpoint of {size} entries existed at {stamp.time.isoformat()}, says {plain(stamp.authority)}")
