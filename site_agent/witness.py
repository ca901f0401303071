"""A site as a witness of the other logs, and as one that is witnessed. The coordinator carries the messages.

It can drop them, which becomes visible as staleness, but not forge them: each party cosigns only what extends the
checkpoint that it has.
"""

from __future__ import annotations

from collections.abc import Iterator

from lazaret.errors import CheckpointConflict, RemoteProtocolError
from security.identity.membership import Seat
from security.log import events as ev
from security.log.note import Note, checkpoint_of
from security.log.schema import MAX_COUNT
from security.log.witness import Witness
from security.log.writer import AuditLog
from security.secagg import relay
from security.secagg.fields import Wire
from security.secagg.relay import HeadSignature, SignedHead

WitnessMessage = relay.WitnessCall | relay.Head | relay.Cosignature | relay.Held


class Witnessing:
    """Answers what witnesses ask, and keeps what they sign."""

    def __init__(self, seat: Seat, log: AuditLog, witness: Witness) -> None:
        self._seat = seat
        self._log = log
        self.witness = witness
        self._seen = ("", 0)  # the coordinator's log, and how much of it
        self._held: dict[str, int] = {}  # how much of this log each witness holds, as far as it has said so
        self._last = 0  # size of the checkpoint that was offered at the end

    def saw(self, head: SignedHead) -> None:
        """Log a checkpoint of the coordinator that came with a message, if it has grown.

        It is not cosigned by this. But a coordinator that shows a checkpoint to one site only is then on record.
        """
        if head.origin != self._seat.membership.coordinator_log or head.size > MAX_COUNT:
            return
        origin, size = self._seen
        if head.size > (size if origin == head.origin else 0):
            self._seen = (head.origin, head.size)
            self._log.append(ev.CheckpointSeen(origin=head.origin, size=head.size, root=head.root.hex()))

    def attend(self, message: WitnessMessage) -> Iterator[Wire]:
        """What to send in answer.

        :raises ForkDetected: if another log has shown two histories; the evidence is on disk.
        :raises RollbackDetected: if our own log was restored from an old copy.
        """
        match message:
            case relay.WitnessCall():
                yield self._offer(message)
            case relay.Head():
                yield self._consider(message)
            case relay.Cosignature():
                self._keep(message)
            case relay.Held():
                self._log.refuse_rollback([message.held])

    def _offer(self, call: relay.WitnessCall) -> relay.Head:
        """The newest head, grown from what the witness holds. The coordinator asks first, and all are offered the same
        one: so it is signed then, over everything so far."""
        head = self._log.newest_checkpoint
        if call.witness == self._seat.manifest.coordinator.id or call.held_size > checkpoint_of(head).size:
            head = self._log.checkpoint()
        if call.held_size > checkpoint_of(head).size:
            raise RemoteProtocolError("a witness claims to hold more of this log than there is", where=call.witness)
        if call.witness in self.witness.roster.by_name:
            self._held[call.witness] = call.held_size
        return self._grown(head, call.witness, call.held_size)

    def _grown(self, head: Note, witness: str, held_size: int) -> relay.Head:
        own = tuple(line for line in head.signatures if line.name == self._log.origin)
        return relay.Head.of(witness, self._log.submission(held_size, Note(text=head.text, signatures=own)))

    def expect_last(self) -> None:
        """Nothing is settled until `last_head` was sent, which may have to wait for an upload before it."""
        self._last = MAX_COUNT

    def last_head(self) -> Iterator[relay.Head]:
        """Everything so far, offered to those who have witnessed this log before: the agent is about to stop."""
        head = self._log.checkpoint()
        self._last = checkpoint_of(head).size
        for witness, held_size in self._held.items():
            # Who has left the roster signs nothing any more, and its name is in no message.
            if held_size <= self._last and witness in self.witness.roster.by_name:
                yield self._grown(head, witness, held_size)

    @property
    def settled(self) -> bool:
        """Whether witnesses have signed what was offered last."""
        return self._log.witnessed >= self._last

    def _consider(self, message: relay.Head) -> Wire:
        if message.witness != self._seat.signer.site:
            raise RemoteProtocolError("a checkpoint for another witness", where=message.witness)
        origin = message.head.origin
        try:
            signature = self.witness.consider(message.submission)
        except CheckpointConflict:
            held = self.witness.held(origin)
            if held is None:
                raise
            return relay.Held.of(self._seat.signer.site, held)
        given = ev.Cosigned(
            origin=origin,
            size=message.head.size,
            root=message.head.root.hex(),
            cosigner=signature.name,
            timestamp=signature.time,
        )
        self._log.append(given)
        return relay.Cosignature(origin=origin, size=message.head.size, signature=HeadSignature.of(signature))

    def _keep(self, message: relay.Cosignature) -> None:
        if message.origin != self._log.origin:
            raise RemoteProtocolError("a cosignature for another log", where=message.origin)
        self._log.add_cosignature(message.size, message.signature.line)
        cosigner = message.signature.line.name
        # An observer signs too. It is no party: nothing is offered to it over the wire.
        for party in self.witness.roster.parties:
            if party.cosigner.name == cosigner:
                self._held[party.name] = message.size
