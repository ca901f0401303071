"""What may leave a site: the egress filter, and the kernel's own count of bytes beside it.

The filter checks three things of each message: its type is permitted, its length is exactly what its type and public
numbers give, and a vector in it looks masked. The site's outbox asks before it sends; the auditor asks the same
questions of the log afterwards. `KernelByteLog` then writes what the kernel counted, so that bytes which left without
an entry show as a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from lazaret.errors import PolicyViolation
from lazaret.kernel_bytes import Meter
from security.log.events import Egress, EgressBlocked, NetCounter
from security.log.schema import decimal
from security.log.writer import AuditLog
from security.secagg.fields import DataClass

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from security.secagg.registry import Shape


MASKED: Final = DataClass.MASKED_VECTOR.value
LEAST_UNIFORMITY: Final = 1e-9


@cache
def permitted() -> Mapping[str, str]:
    """Which class of data each message of a site carries, as the messages state it. What is not here does not leave."""
    # The message types pull in the whole protocol, which a reader of small logs need not wait for.
    from security.secagg.relay import PERMITTED

    return PERMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message that is about to leave: its exact bytes, and the public numbers that its length must follow from.

    :param head: size of the checkpoint that travels along.
    """

    msg_id: str
    message: str
    payload: bytes
    shape: Shape
    destination: str
    head: int


def recorded_shape(shape: Shape) -> dict[str, Any]:
    """The numbers of the size equation as an entry holds them. Of a cohort only its size enters a length."""
    return {
        "cohort": len(shape.cohort),
        "cosigned": shape.cosigned,
        "epochs": shape.epochs,
        "frame": shape.frame,
        "frames": shape.frames,
        "head_signatures": shape.head_signatures,
        "named": shape.named or None,
        "path": shape.path,
        "vector_bytes": shape.vector_bytes,
    }


@lru_cache(maxsize=4096)
def _due(message: str, federation: str, site: str, numbers: tuple[tuple[str, Any], ...]) -> int | None:
    # The message types pull in the whole protocol, which a reader of small logs need not wait for.
    from lazaret.errors import LocalProtocolError
    from security.secagg.registry import Shape
    from security.secagg.relay import FROM_SITE
    from security.secagg.sizes import expected_bytes

    known = {cls.__name__: cls for cls in FROM_SITE}
    fields = dict(numbers)
    size = fields.pop("cohort")
    cohort = [site, *("",) * (size - 1)] if size else []
    fields["named"] = fields["named"] or ""
    try:
        shape = Shape(federation=federation, site=site, cohort=cohort, **fields)
        return expected_bytes(known[message], shape)
    except (KeyError, LocalProtocolError):
        return None


def due_bytes(message: str, origin: str, numbers: dict[str, Any]) -> int | None:
    """The length that a message must have, from its type and the recorded numbers; None where there is no such length.

    :param origin: the log's name, which is made of the site's and the federation's.
    """
    site, _, federation = origin.removesuffix("/audit").partition(".")
    return _due(message, federation, site, tuple(sorted(numbers.items())))


def check_outgoing(outgoing: Outgoing) -> Egress:
    """The entry to log before a message without a vector is sent; vectors pass `check_outgoing_vector`.

    :raises PolicyViolation: by the rule it names; log `blocked` then, and send nothing.
    """
    data_class = permitted().get(outgoing.message)
    if data_class is None:
        raise _refused("type of message is not permitted", outgoing)
    if data_class == MASKED:
        raise _refused("a vector was not checked by the egress filter", outgoing)
    numbers = recorded_shape(outgoing.shape)
    due = due_bytes(outgoing.message, outgoing.shape.origin, numbers)
    if due is None or len(outgoing.payload) != due:
        raise _refused(f"length differs from the {due} bytes of its type", outgoing)
    return Egress(
        msg_id=outgoing.msg_id,
        message=outgoing.message,
        data_class=data_class,
        bytes=len(outgoing.payload),
        sha256=sha256(outgoing.payload).hexdigest(),
        expected_bytes=due,
        shape=numbers,
        masked=False,
        modulus_bits=None,
        uniformity=None,
        destination=outgoing.destination,
        head=outgoing.head,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingVector:
    """A masked vector that is about to leave, from frame `shape.frame` to its last: one entry for all its frames.

    :param vector: the whole vector, whichever frames are left to send.
    :param root: its Merkle root, computed while masking and signed in the header: the entry's digest.
    """

    msg_id: str
    shape: Shape
    vector: bytes | memoryview
    root: bytes
    destination: str
    head: int
    modulus_bits: int
    message: str = "UploadFrame"


def check_outgoing_vector(outgoing: OutgoingVector) -> Egress:
    """The entry to log before the first frame is sent. The outbox holds each frame to its length as it leaves.

    :raises PolicyViolation: as `check_outgoing`.
    """
    numbers = recorded_shape(outgoing.shape)
    due = due_bytes(outgoing.message, outgoing.shape.origin, numbers)
    if due is None or len(outgoing.vector) != outgoing.shape.vector_bytes:
        raise _refused("vector is not as long as the layout says", outgoing)
    return Egress(
        msg_id=outgoing.msg_id,
        message=outgoing.message,
        data_class=MASKED,
        bytes=due,
        sha256=outgoing.root.hex(),
        expected_bytes=due,
        shape=numbers,
        masked=True,
        modulus_bits=outgoing.modulus_bits,
        uniformity=decimal(uniformity_of(outgoing)),
        destination=outgoing.destination,
        head=outgoing.head,
    )


def uniformity_of(outgoing: OutgoingVector) -> float:
    """How likely bytes as uneven as these are, if they are masked.

    :raises PolicyViolation: if that is next to impossible.
    """

    found = p_value(outgoing.vector)
    if found < LEAST_UNIFORMITY:
        raise _refused("vector does not look masked", outgoing)
    return found


def _refused(rule: str, outgoing: Outgoing | OutgoingVector) -> PolicyViolation:
    return PolicyViolation(rule, where=outgoing.message, hint="nothing was sent; report this: it is a bug or an attack")


def blocked(outgoing: Outgoing | OutgoingVector, refusal: PolicyViolation) -> EgressBlocked:
    """The entry for a message that stayed. Without a digest: of a plain update it would confirm a guess."""
    size = len(outgoing.payload) if isinstance(outgoing, Outgoing) else len(outgoing.vector)
    return EgressBlocked(rule=refusal.message, message=outgoing.message, bytes=size, sha256=None)


# Does a vector look like noise? Pearson's chi-square over byte values. A masked upload is uniform, so a p-value below
# `LEAST_UNIFORMITY` means that masking did not happen. Passing proves nothing, so this is an alarm and not a proof.

_EXPECTED: Final = 16  # the smallest expected count of a bin; below it the chi-square law does not hold in the tail
_CHUNK: Final = 1 << 16  # as whole numbers, half a megabyte: stays in the cache, and in the heap (lazaret/malloc.py)


def _byte_counts(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Count byte values two at a time: half as many look-ups as single bytes."""
    import numpy as np

    pairs = data[: len(data) // 2 * 2].view("<u2")
    counts = np.zeros(65_536, dtype=np.int64)
    scratch = np.empty(min(_CHUNK, len(pairs)), dtype=np.intp)
    for start in range(0, len(pairs), _CHUNK):
        part = scratch[: len(pairs) - start]
        np.copyto(part, pairs[start : start + _CHUNK])
        counts += np.bincount(part, minlength=65_536)
    table = counts.reshape(256, 256)
    last = np.bincount(data[len(pairs) * 2 :], minlength=256)
    return np.asarray(table.sum(axis=0) + table.sum(axis=1) + last, dtype=np.int64)


def p_value(data: bytes | bytearray | memoryview) -> float:
    """Return the probability that uniform bytes are as uneven as these; 1.0 if they are too few to tell.

    Short vectors are counted by half bytes, so that every bin still expects enough.
    """
    # Only here: an auditor asks for lengths and types, and need not wait for these.
    import numpy as np
    from scipy.special import chdtrc

    values = np.frombuffer(data, dtype=np.uint8)
    counts = _byte_counts(values)
    if len(values) < 256 * _EXPECTED:
        table = counts.reshape(16, 16)
        counts = table.sum(axis=0) + table.sum(axis=1)
    expected = counts.sum() / len(counts)
    if expected < _EXPECTED:
        return 1.0
    statistic = float(((counts - expected) ** 2).sum() / expected)
    return float(chdtrc(len(counts) - 1, statistic))


# The kernel's count of bytes

READING_SECONDS: Final = 30.0
IDLE_BYTES: Final = 4096


class KernelByteLog:
    """Takes readings of a meter into a log.

    A quiet line is not worth an entry: what keep-alives add up to waits for the next reading, but no more of it than
    would be worth hiding.
    """

    def __init__(self, log: AuditLog, meter: Meter) -> None:
        self._log = log
        self._meter = meter
        self._settled: float | None = None
        self._result = 0

    def tick(self, seconds: float, result: int = 0) -> None:
        """To be called several times a second, with any clock that counts them.

        :param result: the newest one's round. What a round has sent is read when it ends: a card that is written in
            the next moment rests on a log with a count.
        """
        self._meter.poll()
        due = self._settled is None or seconds - self._settled >= READING_SECONDS
        if due or result != self._result:
            self._result = result
            self._settled = seconds
            self.settle()

    def settle(self, least: int = IDLE_BYTES) -> None:
        """Write a reading, if so much was counted since the last one, and sign it.

        A reading never runs ahead of the log: every message has its entry before its first byte can be counted.
        """
        if self._meter.sent < least:
            return
        reading = self._meter.take()
        self._log.append(
            NetCounter(
                source=self._meter.source,
                coverage=self._meter.coverage,
                beside_out=reading.beside,
                connections=reading.opened,
                bytes_out=reading.flow.out,
                bytes_in=reading.flow.into,
            )
        )
        self._log.checkpoint()

    def close(self) -> None:
        """The last reading, before the log says that the agent stops."""
        self._meter.poll()
        self.settle(1)
