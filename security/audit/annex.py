"""The private annex: details behind a salted commitment, for the site's own auditor, erasable at any time."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from security.audit import canonical
from security.errors import CodecError, VerificationFailed

SALT_SIZE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Annex:
    """A salt and the details. Without the salt, a commitment to a small count could be guessed."""

    salt: bytes
    details: Mapping[str, Any]

    def commitment(self) -> str:
        """SHA-256(salt || canonical details), in hexadecimal."""
        return sha256(self.salt + canonical.dumps(self.details)).hexdigest()

    def encode(self) -> bytes:
        """The bytes of the annex file."""
        return canonical.dumps({"details": self.details, "salt": self.salt.hex()}) + b"\n"

    @classmethod
    def open(cls, data: bytes, commitment: str) -> Annex:
        """Read an annex file and check it against its leaf.

        :raises VerificationFailed: if it is not what was committed to.
        """
        value = canonical.loads(data.removesuffix(b"\n"))
        if not isinstance(value, dict) or value.keys() != {"details", "salt"} or not isinstance(value["details"], dict):
            raise CodecError("not an annex")
        try:
            annex = cls(salt=bytes.fromhex(value["salt"]), details=value["details"])
        except (TypeError, ValueError) as error:
            raise CodecError("not an annex") from error
        if len(annex.salt) != SALT_SIZE or not hmac.compare_digest(annex.commitment(), commitment):
            raise VerificationFailed("the annex is not what the entry commits to")
        return annex
