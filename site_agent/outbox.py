"""The egress filter of a hospital: permitted type, exact length, test for randomness, log, and only then the bytes.

Nothing else in this package may write to the network; a test looks for it. Every message carries the newest signed
checkpoint of the privacy log, and its own entry is on disk before its first byte can leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from lazaret.errors import CertificateError, LocalProtocolError, PolicyViolation
from protos.parse import FROM_SITE, Parcel
from security.identity.membership import Seat
from security.identity.peers import check_coordinator_pin
from security.log.egress import Outgoing, OutgoingVector, blocked, check_outgoing, check_outgoing_vector
from security.log.writer import AuditLog
from security.secagg import messages, relay
from security.secagg.effects import Send, SendUpload
from security.secagg.fields import Wire
from security.secagg.registry import REGISTRY, Shape
from security.secagg.relay import FRAMES, SignedHead
from security.secagg.sizes import expected_bytes
from site_agent.policy import SitePolicy


class Outbox:
    """Turns messages into logged parcels, numbered on each connection.

    Only `Open` is sent to a coordinator whose TLS key the manifest in force does not pin: one with renewed keys answers
    with the manifest that pins them.

    :param seat: whose name, run, layout and destination the parcels have.
    :ivar peer: SHA-256 of the TLS key at the other end, set by the client for each connection; None: there is no TLS.
    :ivar refused: why something was held back on this connection.
    :param spent: bytes that each round has cost before this start.
    """

    def __init__(
        self,
        log: AuditLog,
        policy: SitePolicy,
        seat: Seat,
        *,
        spent: Mapping[int, int] | None = None,
    ) -> None:
        self._log = log
        self._policy = policy
        self._seat = seat
        self._connection = 0
        self._sequence = 0
        self.connected = False
        self.peer: str | None = None
        self.refused: CertificateError | None = None
        self.sent: Counter[str] = Counter()
        self.blocked = 0
        self._of_round: Counter[int] = Counter(spent)

    @property
    def _base(self) -> Shape:
        """The public numbers that are the same for every message."""
        policy = self._seat.policy
        site, vector = self._seat.signer.site, policy.layout.byte_length
        return Shape(federation=policy.federation, site=site, vector_bytes=vector)

    def opened(self, connection: int) -> None:
        """A new stream: its number is on disk already, so that no message is ever named twice."""
        self._connection, self._sequence, self.connected, self.refused = connection, 0, True, None

    def closed(self) -> None:
        """From here on nothing is logged as sent, because nothing is."""
        self.connected = False

    def _may_send(self, message: type[Wire]) -> bool:
        """There is a stream, and the right coordinator is at its other end."""
        if self.peer is not None and message is not relay.Open:
            try:
                check_coordinator_pin(self._seat.manifest, self.peer)
            except CertificateError as error:
                self.refused = error
        return self.connected and self.refused is None

    def post(self, send: Send) -> Iterator[bytes]:
        """One message; nothing comes out while there is no stream.

        :raises PolicyViolation: by the rule that stopped it, after logging so.
        """
        if not self._may_send(type(send.message)):
            return
        message, name = send.message, type(send.message).__name__
        if type(message) in FRAMES:
            raise LocalProtocolError("frames are sent as one vector", where=name)
        head = own_head(self._log)
        sequence = self._sequence + 1
        payload = FROM_SITE.encode(Parcel(message=message, sequence=sequence, log_head=head))
        outgoing = Outgoing(
            msg_id=self._name(sequence),
            message=name,
            payload=payload,
            shape=self._shape(message, send.cohort, head),
            destination=self._seat.destination,
            head=head.size,
        )
        try:
            self._weigh(len(payload), send.round)
            entry = check_outgoing(outgoing)
        except PolicyViolation as refusal:
            self._stop(outgoing, refusal, send.round)
            raise
        self._log.append(entry, run=self._seat.policy.run, round=send.round)
        self._sequence = sequence
        self.sent[name] += len(payload)
        yield payload

    def vector(self, send: SendUpload) -> Iterator[bytes]:
        """A masked vector, frame by frame: one check and one entry for all of it, before the first frame.

        :raises PolicyViolation: by the rule that stopped it, after logging so.
        """
        if not self._may_send(messages.UploadFrame):
            return
        first, total = send.first, self._seat.layout.frames
        if first >= total:
            return
        shape = replace(self._base, cohort=send.cohort, frame=first, frames=total - first)
        outgoing = OutgoingVector(
            msg_id=self._name(self._sequence + 1),
            shape=shape,
            vector=send.vector.data,
            root=send.root,
            destination=self._seat.destination,
            head=own_head(self._log).size,
            modulus_bits=self._seat.layout.ring_bits,
        )
        try:
            self._weigh(expected_bytes(messages.UploadFrame, shape), send.round)
            entry = check_outgoing_vector(outgoing)
        except PolicyViolation as refusal:
            self._stop(outgoing, refusal, send.round)
            raise
        self._log.append(entry, run=self._seat.policy.run, round=send.round)
        # All frames but the last are equally long.
        ends = (replace(shape, frame=at, frames=1) for at in (0, total - 1))
        whole, last = (expected_bytes(messages.UploadFrame, end) for end in ends)
        for frame in send.frames():
            if self._is_closed():
                return
            yield self._frame(frame, last if frame.index == total - 1 else whole)

    def _stop(self, outgoing: Outgoing | OutgoingVector, refusal: PolicyViolation, number: int | None) -> None:
        self.blocked += 1
        self._log.append(blocked(outgoing, refusal), run=self._seat.policy.run, round=number)

    def _is_closed(self) -> bool:
        """Asked between frames: the stream may break while one is on its way."""
        return not self.connected

    def _frame(self, frame: messages.UploadFrame, due: int) -> bytes:
        self._sequence += 1
        payload = FROM_SITE.encode(Parcel(message=frame, sequence=self._sequence))
        if len(payload) != due:
            raise PolicyViolation("a frame has the wrong length", where="UploadFrame")
        self.sent["UploadFrame"] += len(payload)
        return payload

    def spent(self, number: int) -> int:
        """Bytes that a round has cost so far."""
        return self._of_round[number]

    def _name(self, sequence: int) -> str:
        return relay.message_id(self._seat.signer.site, self._connection, sequence, from_site=True)

    def _weigh(self, size: int, number: int | None) -> None:
        """Bytes of a round, over all its attempts, against the hospital's own limit."""
        if number is not None:
            self._policy.check_bytes(self._of_round[number] + size)
            self._of_round[number] += size

    def _shape(self, message: Wire, cohort: tuple[str, ...], head: SignedHead) -> Shape:
        """The public numbers that the message's length must follow from."""
        known = replace(
            self._base,
            cohort=cohort,
            head_signatures=len(head.signatures),
        )
        return REGISTRY[type(message)].shape_of(message, known)


def own_head(log: AuditLog) -> SignedHead:
    """The newest head as it travels: under the log's own signatures only, since those of witnesses come and go."""
    head = SignedHead.of(log.newest_checkpoint)
    return replace(head, signatures=tuple(line for line in head.signatures if line.name == log.origin))
