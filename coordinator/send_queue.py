"""The streams of connected sites: what is to be sent to each, in order, made only when its turn comes.

A queue holds iterators, not messages: a sum of sixteen megabytes for fifty sites is then in memory once, and the
network's own back-pressure decides when the next frame is made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from coordinator.ingress_log import IngressLog
from lazaret.errors import RemoteProtocolError
from protos.parse import FROM_COORDINATOR, Parcel
from security.secagg.fields import Wire
from security.secagg.messages import Adverts, Deliver, Jump, Result
from security.secagg.relay import FRAMES

# A dozen links of 100 Mbit/s fill more than a gigabit. A turn lapses when no frame has passed for a while, and when the
# vector takes long as a whole: however many slow links there are, each gets under way in time for its deadline.
VECTORS_AT_ONCE: Final = 12
PATIENCE_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 4.0
# Some hundred rounds, or half an hour of receipts: who has not read for so long does not read at all.
MOST_QUEUED: Final = 1000
# They grow with the cohort, and go to all of it at the same moment: encoded for a hundred sites at once, one kind would
# have more bytes than a vector.
BULKY: Final = frozenset({Adverts, Deliver, Result, Jump})


class Turns:
    """So many vectors on their way at once, whoever they are for; so many bulky messages too. Others need no turn.

    A frame is in memory several times while it is under way, and there is one for every stream that moves a vector:
    with turns, memory does not grow with the number of sites. What checks a sum lets everything else pass: the sites
    wait for the sum, to train on.
    """

    def __init__(self, count: int = VECTORS_AT_ONCE) -> None:
        self._free = asyncio.Semaphore(count)
        self._before_checks = 0
        self._none_before = asyncio.Event()
        self._none_before.set()

    async def begin(self, *, check: bool) -> None:
        """:param check: it waits until nothing else has a turn, but not for long."""
        if check:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._none_before.wait(), LONGEST_SECONDS)
        await self._free.acquire()
        if not check:
            self._before_checks += 1
            self._none_before.clear()

    def end(self, *, check: bool) -> None:
        self._free.release()
        if not check:
            self._before_checks -= 1
            if not self._before_checks:
                self._none_before.set()

    @contextmanager
    def of_stream(self) -> Iterator[SendTurn]:
        turn = SendTurn(self)
        try:
            yield turn
        finally:
            turn.end()


class SendTurn:
    """One stream's turn. It lasts while frames pass, but not for ever; then the next in line gets it, and the stream
    goes on without: a slow link holds up nobody else.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._check = False
        self._end: float | None = None
        self._lapse: asyncio.TimerHandle | None = None

    async def frame(self, *, check: bool = False) -> None:
        """Before every frame: wait for the turn, if the vector has none yet.

        :param check: it is of the check of a sum.
        """
        loop = asyncio.get_running_loop()
        if self._end is None:
            await self._turns.begin(check=check)
            self._check = check
            self._end = loop.time() + LONGEST_SECONDS
        elif self._lapse is None:
            return  # given away for the rest of this vector
        else:
            self._lapse.cancel()
        self._lapse = loop.call_at(min(loop.time() + PATIENCE_SECONDS, self._end), self._give_away)

    def _give_away(self) -> None:
        self._lapse = None
        self._turns.end(check=self._check)

    def end(self) -> None:
        """The vector is through, or will not be."""
        if self._lapse is not None:
            self._lapse.cancel()
            self._give_away()
        self._end = None


class _Queued(NamedTuple):
    messages: Iterator[Wire]
    vector: bool
    check: bool = False


class Stream:
    """One connection of one site."""

    def __init__(self, site: str, session: int, spki: str) -> None:
        self.site = site
        self.session = session
        self.spki = spki
        self.received = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.heard_ms = 0
        self.model_sent = False
        self._sent = 0
        self._queue: deque[_Queued] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._overrun = asyncio.Event()  # more is waiting than a site may leave unread

    def put(self, messages: Iterable[Wire], *, vector: bool = False, check: bool = False) -> None:
        """Queue messages behind everything that is already to be sent. A vector waits for its turn, unmade.

        :param vector: of a bulky message too: it is encoded when its turn comes.
        :param check: of a vector for the check of a sum: its turn comes after those of others.
        """
        if len(self._queue) >= MOST_QUEUED:
            self._overrun.set()
            return
        self._queue.append(_Queued(iter(messages), vector, check))
        self._wake.set()

    def close(self, *last: Wire) -> None:
        """End the stream once `last` is sent; what is queued before it is dropped."""
        self._queue = deque([_Queued(iter(last), vector=False)])
        self._closing = True
        self._wake.set()

    async def unread(self) -> None:
        """Until a site has left too much unread: what it is owed would be kept in memory without end.

        :raises RemoteProtocolError: then.
        """
        await self._overrun.wait()
        raise RemoteProtocolError("it does not read what it is sent", where=f"site {self.site}")

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send."""
        return not self._queue

    async def next(self, turn: SendTurn) -> Wire | None:
        """The next message, when there is one and it has its turn; None at the end of the stream."""
        while True:
            while not self.idle:
                if self._queue[0].vector:
                    await turn.frame(check=self._queue[0].check)
                message = self.take()
                if message is not None:
                    return message
                turn.end()
            if self._closing:
                return None
            self._wake.clear()
            await self._wake.wait()

    def take(self) -> Wire | None:
        """The next message of what is first in line; None if that is all of it."""
        message = next(self._queue[0].messages, None)
        if message is None:
            self._queue.popleft()
        return message

    def encode(self, message: Wire, books: IngressLog) -> bytes:
        """The bytes of the next message of this stream, with the newest checkpoint of our log."""
        self._sent += 1
        head = None if type(message) in FRAMES else books.head
        data = FROM_COORDINATOR.encode(Parcel(message=message, sequence=self._sent, log_head=head))
        self.bytes_out += len(data)
        return data
