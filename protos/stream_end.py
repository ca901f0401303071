"""One end of a stream between machines that share no network: the parcels are those of the network.

The loopback federation and the benches carry bytes from one end to the other. Shells of site and coordinator number and
order their parcels in the same way, with a log and gRPC around it.
"""

from __future__ import annotations

from lazaret.errors import CodecError
from protos.parse import FROM_COORDINATOR, FROM_SITE, Direction, Parcel
from security.crypto.merkle import EMPTY_ROOT
from security.log import note
from security.secagg.fields import Wire
from security.secagg.relay import FRAMES, SignedHead


def empty_log_head(party: str, federation: str, seed: bytes) -> SignedHead:
    """The signed head of a privacy log without entries: nobody logs inside one process, yet every parcel carries one.

    :param seed: of the log's key.
    """
    origin = f"{party}.{federation}/audit"
    text = note.Checkpoint(origin=origin, size=0, root=EMPTY_ROOT).text
    return SignedHead.of(note.Note(text=text, signatures=(note.NoteSigner.from_seed(origin, seed).sign(text),)))


class StreamEnd:
    """One party's end of a stream: numbers what it sends, and holds what it gets to its order.

    :param log_head: travels with every message but frames.
    """

    def __init__(self, sends: Direction, takes: Direction, log_head: SignedHead) -> None:
        self._sends, self._takes = sends, takes
        self._log_head = log_head
        self._sent = 0
        self._received = 0

    @classmethod
    def of_site(cls, log_head: SignedHead) -> StreamEnd:
        return cls(FROM_SITE, FROM_COORDINATOR, log_head)

    @classmethod
    def of_coordinator(cls, log_head: SignedHead) -> StreamEnd:
        return cls(FROM_COORDINATOR, FROM_SITE, log_head)

    def encode(self, message: Wire) -> bytes:
        self._sent += 1
        head = None if type(message) in FRAMES else self._log_head
        return self._sends.encode(Parcel(message=message, sequence=self._sent, log_head=head))

    def decode(self, data: bytes) -> Wire:
        """The next message of the other end.

        :raises CodecError: for bytes that are no parcel, or not the next one.
        """
        parcel = self._takes.decode(data)
        self._received += 1
        if parcel.sequence != self._received:
            raise CodecError("messages are out of order", where="stream")
        return parcel.message
