"""What may leave a site, and how a door checks it: permitted types, exact length, and a look at the masks.

The site's outbox asks before it sends; the auditor asks the same questions of the log afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import numpy as np

from security.audit.events import Egress, EgressBlocked
from security.audit.kinds import decimal
from security.errors import PolicyViolation

MASKED: Final = "masked-vector"

# Which class of data each message of a site carries. What is not here does not leave.
PERMITTED: Final[dict[str, str]] = {
    "Open": "control",
    "Hello": "control",
    "Pong": "control",
    "Decline": "control",
    "Rollback": "control",
    "Ready": "control",
    "Refusal": "control",
    "Accusation": "control",
    "Abort": "control",
    "Agree": "control",
    "Ack": "control",
    "ChunkRequest": "control",
    "ResultRequest": "control",
    "UploadHeader": "control",
    "Advert": "public-key",
    "Shares": "sealed-share",
    "Unmask": "mask-share",
    "UploadFrame": MASKED,
    "Head": "checkpoint",
    "Cosignature": "checkpoint",
    "Held": "checkpoint",
}

LEAST_UNIFORMITY: Final = 1e-9
_LEAST_BYTES: Final = 64


def uniformity(payload: bytes) -> float:
    """How likely bytes as uneven as these are, if they were uniform: a chi-square test on each byte of a 4-byte word.

    A masked vector is uniform whatever it hides. Integers of a plain update have high bytes of nearly always 0x00 or
    0xff, and floats nearly constant exponents, so both give a probability of zero for any vector worth training.
    """
    data = np.frombuffer(payload, dtype=np.uint8)
    if data.size < _LEAST_BYTES:
        return 1.0
    shift, cells = (0, 256) if data.size >= 4 * 256 * 5 else (4, 16)
    statistic, freedom = 0.0, 0
    for lane in range(4):
        counts = np.bincount(data[lane::4] >> shift, minlength=cells)
        expected = data[lane::4].size / cells
        statistic += float(((counts - expected) ** 2).sum() / expected)
        freedom += cells - 1
    # Wilson and Hilferty (1931): the cube root of chi-square over its freedom is very nearly normal.
    spread = 2.0 / (9.0 * freedom)
    deviate = ((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(deviate / math.sqrt(2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message at the door: its exact bytes and what the sender says about them."""

    msg_id: str
    message: str
    payload: bytes
    expected_bytes: int
    destination: str
    head: int
    cohort_size: int | None = None
    dim: int | None = None
    modulus_bits: int | None = None
    vector: bytes | None = None  # the masked words inside the payload, where there are any


def pass_door(outgoing: Outgoing) -> Egress:
    """The entry to log before the message is sent.

    :raises PolicyViolation: by the rule it names; log `blocked` then, and send nothing.
    """
    data_class = PERMITTED.get(outgoing.message)
    if data_class is None:
        raise _refused("type of message is not permitted", outgoing)
    if len(outgoing.payload) != outgoing.expected_bytes:
        raise _refused(f"length differs from the {outgoing.expected_bytes} bytes of its type", outgoing)
    evenness: float | None = None
    if data_class == MASKED:
        evenness = uniformity(outgoing.vector if outgoing.vector is not None else outgoing.payload)
        if evenness < LEAST_UNIFORMITY:
            raise _refused("vector does not look masked", outgoing)
    elif outgoing.vector is not None:
        raise _refused("a vector in a message that carries none", outgoing)
    return Egress(
        msg_id=outgoing.msg_id,
        message=outgoing.message,
        data_class=data_class,
        bytes=len(outgoing.payload),
        sha256=sha256(outgoing.payload).hexdigest(),
        expected_bytes=outgoing.expected_bytes,
        cohort_size=outgoing.cohort_size,
        dim=outgoing.dim,
        masked=data_class == MASKED,
        modulus_bits=outgoing.modulus_bits,
        uniformity=None if evenness is None else decimal(evenness),
        destination=outgoing.destination,
        head=outgoing.head,
    )


def _refused(rule: str, outgoing: Outgoing) -> PolicyViolation:
    return PolicyViolation(rule, where=outgoing.message, hint="nothing was sent; report this: it is a bug or an attack")


def blocked(outgoing: Outgoing, refusal: PolicyViolation) -> EgressBlocked:
    """The entry for a message that stayed. Without a digest: of a plain update it would confirm a guess."""
    return EgressBlocked(rule=refusal.message, message=outgoing.message, bytes=len(outgoing.payload), sha256=None)
