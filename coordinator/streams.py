"""The streams of connected sites: what is to be sent to each, in order, made only when its turn comes.

A queue holds iterators, not messages: a sum of sixteen megabytes for fifty sites is then in memory once, and the
network's own back-pressure decides when the next frame is made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Final

from coordinator.books import Books
from protos.convert import FROM_COORDINATOR, Parcel
from security.relay import FRAMES
from security.secagg.wire import Wire

PATIENCE_SECONDS: Final = 0.2


class Turns:
    """So many frames on their way into the network at once, whoever they are for.

    A frame is in memory several times until the network has taken it. A turn that takes too long is given to the next
    in line: a slow link holds up nobody else.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def one(self, *, wanted: bool) -> AsyncIterator[None]:
        """Take a turn, if it is `wanted`."""
        if not wanted:
            yield
            return
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE_SECONDS
        lapse = loop.call_at(end, self._free.release)
        try:
            yield
        finally:
            if lapse.when() > loop.time():
                lapse.cancel()
                self._free.release()


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
        self.greeted = False
        self._sent = 0
        self._queue: deque[Iterator[Wire]] = deque()
        self._wake = asyncio.Event()
        self._closing = False

    def put(self, messages: Iterable[Wire]) -> None:
        """Queue messages behind everything that is already to be sent."""
        self._queue.append(iter(messages))
        self._wake.set()

    def close(self, *last: Wire) -> None:
        """End the stream once `last` is sent; what is queued before it is dropped."""
        self._queue = deque([iter(last)])
        self._closing = True
        self._wake.set()

    async def next(self) -> Wire | None:
        """The next message, when there is one; None at the end of the stream."""
        while True:
            while self._queue:
                message = next(self._queue[0], None)
                if message is not None:
                    return message
                self._queue.popleft()
            if self._closing:
                return None
            self._wake.clear()
            await self._wake.wait()

    def encode(self, message: Wire, books: Books) -> bytes:
        """The bytes of the next message of this stream, with the newest head of our log."""
        self._sent += 1
        head = None if type(message) in FRAMES else books.head
        data = FROM_COORDINATOR.encode(Parcel(message=message, sequence=self._sent, log_head=head))
        self.bytes_out += len(data)
        return data
