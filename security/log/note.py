"""Signed notes, checkpoints and cosignatures as C2SP writes them: signed-note, tlog-checkpoint, tlog-cosignature v1.

A note is text, a blank line and signature lines. Three of our rules are stricter than C2SP's, never looser: base64
must be the one spelling of its bytes, a checkpoint has exactly three lines, and a note has at most 64 signatures.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

from lazaret.errors import CodecError, LocalProtocolError, VerificationFailed
from security.crypto.merkle import HASH_SIZE
from security.crypto.signing import KEY_BYTES, ML_DSA_KEY_BYTES, verify_ml_dsa

MAX_SIGNATURES: Final = 64
MAX_NOTE: Final = 1 << 18
MAX_SIZE: Final = 2**53 - 1  # tree sizes are also written as JSON integers
MAX_TIME: Final = 2**63 - 1

# C2SP signed-note: an em dash (U+2014), a space, the key's name, a space, base64 of key id and signature.
_signature_line = re.compile("\N{EM DASH} ([^\\s+]+) ([A-Za-z0-9+/]+={0,2})").fullmatch
# C2SP tlog-checkpoint: a tree size in decimal has no leading zeros, so that it has one spelling.
_number = re.compile("0|[1-9][0-9]*").fullmatch
# C2SP signed-note: the text has no control characters below U+0020 but the newline.
_control = re.compile("[\x00-\x09\x0b-\x1f]").search
COSIGNATURE_BYTES: Final = 72  # eight of time, 64 of Ed25519


class KeyType(IntEnum):
    """Signature types of C2SP signed-note; 0xff is for types of one's own, which have a name (`_ML_DSA`)."""

    LOG = 0x01
    COSIGNER = 0x04
    ML_DSA = 0xFF


_ML_DSA: Final = b"lazaret-ml-dsa-65"


def _unbase64(text: str, what: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CodecError(f"{what} is not base64") from error
    if base64.b64encode(data).decode() != text:
        raise CodecError(f"{what} is not canonical base64")
    return data


def key_id(name: str, kind: KeyType, public: bytes) -> bytes:
    """First four bytes of SHA-256(name, newline, type, key)."""
    # Type 0xff is followed by a name of one's own: without it two such schemes could have one key id.
    own = _ML_DSA if kind is KeyType.ML_DSA else b""
    return sha256(name.encode() + b"\n" + bytes([kind]) + own + public).digest()[:4]


def check_key_name(name: str) -> None:
    """Key names are not empty and hold neither spaces nor a plus sign."""
    if not name or "+" in name or " " in name or not name.isprintable():  # every other space is not printable
        raise CodecError("a key name is empty or holds a space or a plus sign")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierKey:
    """A public key with its name and the one kind of statement it may sign."""

    name: str
    kind: KeyType
    public: bytes

    def __post_init__(self) -> None:
        check_key_name(self.name)
        if len(self.public) != (ML_DSA_KEY_BYTES if self.kind is KeyType.ML_DSA else KEY_BYTES):
            raise CodecError("a public key has the wrong length")

    @property
    def id(self) -> bytes:
        """The four-byte key id; an identifier, not a commitment."""
        return key_id(self.name, self.kind, self.public)

    @classmethod
    def parse(cls, vkey: str) -> VerifierKey:
        """Read `name+hex id+base64(type, key)`."""
        parts = vkey.split("+", 2)
        if len(parts) != 3:
            raise CodecError("a verifier key has the form name+id+key")
        name, written_id, encoded = parts
        data = _unbase64(encoded, "verifier key")
        # A public ML-DSA key is too long for the form in which manifests name keys: it is a field of its own there.
        if not data or data[0] not in (KeyType.LOG, KeyType.COSIGNER):
            raise CodecError("a verifier key of a type that is not used here")
        key = cls(name=name, kind=KeyType(data[0]), public=data[1:])
        if key.id.hex() != written_id:
            raise CodecError("a verifier key does not match its id")
        return key

    def __str__(self) -> str:
        encoded = base64.b64encode(bytes([self.kind]) + self.public).decode()
        return f"{self.name}+{self.id.hex()}+{encoded}"

    def verify(self, text: str, signature: bytes) -> int | None:
        """Check one signature over a note's text; gives the time of a cosignature in seconds, else None."""
        timestamp: int | None = None
        message = text.encode()
        if self.kind is KeyType.ML_DSA:
            verify_ml_dsa(self.public, signature, message)
            return None
        if self.kind is KeyType.COSIGNER:
            if len(signature) != COSIGNATURE_BYTES:
                raise VerificationFailed("signature does not verify")
            # C2SP tlog-cosignature, cosignature/v1: u64 big-endian seconds, then Ed25519 over the text below.
            timestamp, signature = int.from_bytes(signature[:8], "big"), signature[8:]
            if timestamp > MAX_TIME:
                raise VerificationFailed("signature does not verify")
            message = _cosigned(text, timestamp)
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)
        except InvalidSignature:
            raise VerificationFailed("signature does not verify") from None
        return timestamp


def _cosigned(text: str, timestamp: int) -> bytes:
    # C2SP tlog-cosignature: the checkpoint's text after a line of its own and the time. So no signature of a witness is
    # one of a log, and the other way round.
    return f"cosignature/v1\ntime {timestamp}\n{text}".encode()


class NoteSigner:
    """A private key with its name and kind. It never prints its key."""

    __slots__ = ("_private", "key")

    def __init__(
        self, name: str, private: Ed25519PrivateKey | MLDSA65PrivateKey, kind: KeyType = KeyType.LOG
    ) -> None:
        self._private = private
        self.key = VerifierKey(name=name, kind=kind, public=private.public_key().public_bytes_raw())

    @classmethod
    def from_seed(cls, name: str, seed: bytes, kind: KeyType = KeyType.LOG) -> NoteSigner:
        """The signer whose Ed25519 private key is `seed`."""
        return cls(name, Ed25519PrivateKey.from_private_bytes(seed), kind)

    def sign(self, text: str) -> Signature:
        """Sign a note's text as a log or root key does."""
        if self.key.kind is KeyType.COSIGNER:
            raise LocalProtocolError("a cosigner key signs heads only, with a time: use cosign")
        return Signature(name=self.key.name, key_id=self.key.id, value=self._private.sign(text.encode()))

    def cosign(self, text: str, timestamp: int) -> Signature:
        """Sign a checkpoint as a witness does, at a POSIX time in seconds."""
        if self.key.kind is not KeyType.COSIGNER:
            raise LocalProtocolError("a log key does not cosign")
        if not 0 <= timestamp <= MAX_TIME:
            raise LocalProtocolError("a cosignature's time is out of range")
        value = timestamp.to_bytes(8, "big") + self._private.sign(_cosigned(text, timestamp))
        return Signature(name=self.key.name, key_id=self.key.id, value=value)

    def __repr__(self) -> str:
        return f"<Signer {self.key.name} redacted>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One signature line of a note."""

    name: str
    key_id: bytes
    value: bytes

    @property
    def time(self) -> int:
        """When a cosignature was given: u64 big-endian seconds at its beginning (C2SP tlog-cosignature); else 0."""
        return int.from_bytes(self.value[:8], "big") if len(self.value) == COSIGNATURE_BYTES else 0

    def __str__(self) -> str:
        return f"\N{EM DASH} {self.name} {base64.b64encode(self.key_id + self.value).decode()}"

    @classmethod
    def parse(cls, line: str) -> Signature:
        """Read one line, without its newline."""
        match = _signature_line(line)
        if match is None:
            raise CodecError("not a signature line")
        check_key_name(match[1])
        data = _unbase64(match[2], "signature")
        if len(data) < 5:
            raise CodecError("a signature line is too short")
        return cls(name=match[1], key_id=data[:4], value=data[4:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Text that ends in a newline, and its signatures."""

    text: str
    signatures: tuple[Signature, ...]

    def __post_init__(self) -> None:
        if not self.text.endswith("\n") or _control(self.text) or len(self.signatures) > MAX_SIGNATURES:
            raise CodecError("not the text of a signed note")

    @classmethod
    def parse(cls, data: bytes) -> Note:
        """Read a note strictly; nothing in it is to be believed before `verify`."""
        if len(data) > MAX_NOTE:
            raise CodecError("a note is too long")
        try:
            whole = data.decode()
        except UnicodeDecodeError as error:
            raise CodecError("a note is not UTF-8") from error
        # The last empty line: a text may have others before it.
        text, blank, lines = whole.rpartition("\n\n")
        if not blank or not lines.endswith("\n"):
            raise CodecError("a note has no signatures")
        signatures = tuple(Signature.parse(line) for line in lines[:-1].split("\n"))
        return cls(text=text + "\n", signatures=signatures)

    def encode(self) -> bytes:
        """The bytes of the note."""
        return (self.text + "\n" + "".join(f"{signature}\n" for signature in self.signatures)).encode()

    def verify(self, keys: Iterable[VerifierKey]) -> Mapping[VerifierKey, int | None]:
        """Check every signature made by a known key; gives those keys, with the times of cosignatures.

        As C2SP asks: an unknown signer is ignored, a bad signature of a known one spoils the note, and a note without
        one good signature is refused. Name, id *and* kind must match, so a key cannot be used for another purpose.
        """
        known = {(key.name, key.id): key for key in keys}
        verified: dict[VerifierKey, int | None] = {}
        for signature in self.signatures:
            key = known.get((signature.name, signature.key_id))
            if key is None:
                continue
            # Two signatures of one key with two times would leave open when it saw the checkpoint.
            if key in verified:
                raise VerificationFailed("a key has signed a note twice")
            verified[key] = key.verify(self.text, signature.value)
        if not verified:
            raise VerificationFailed("no signature by a known key")
        return verified

    def unknown(self, keys: Iterable[VerifierKey]) -> tuple[Signature, ...]:
        """Signatures of nobody in `keys`. Notes in a log folder should have none."""
        known = {(key.name, key.id) for key in keys}
        return tuple(line for line in self.signatures if (line.name, line.key_id) not in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A log's tree head: the statement that its first `size` entries have this root."""

    origin: str
    size: int
    root: bytes

    def __post_init__(self) -> None:
        check_key_name(self.origin)
        if not 0 <= self.size <= MAX_SIZE or len(self.root) != HASH_SIZE:
            raise CodecError("a head has an impossible size or root")

    @property
    def text(self) -> str:
        """The note text."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """Read the three lines; extension lines are refused, since no entry confirms them."""
        lines = text.split("\n")
        if len(lines) != 4 or lines[3] or not _number(lines[1]) or len(lines[1]) > 16:
            raise CodecError("not a checkpoint of three lines")
        return cls(origin=lines[0], size=int(lines[1]), root=_unbase64(lines[2], "root hash"))


def checkpoint_of(note: Note) -> Checkpoint:
    """The checkpoint a note speaks of; verify the note first."""
    return Checkpoint.parse(note.text)
