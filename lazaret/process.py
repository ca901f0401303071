"""What every process of ours has to do with the system: it ends well on a signal, says to systemd that it is alive, and
keeps little more memory than it uses.

On SIGTERM, SIGINT and SIGHUP a process ends with exit code 0, at every moment from its first line on. Agent and
coordinator end in good order (`ending_well`, `stop_on_signals`). A process that sees images ends at once
(`end_on_signals`): an order that was open is given again. Nothing on disk is ever half written. Standard library alone:
this comes before what takes long to load, and a signal may come meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any, Final, NoReturn

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _taken() -> list[signal.Signals]:
    """All of them; but `nohup` has a process ignore SIGHUP, and then it does."""
    return [number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


# In good order.


@contextmanager
def ending_well() -> Iterator[None]:
    """A signal in here ends the process with 0: at once before `stop_on_signals`, and in good order after it.

    Signals are taken also where whoever started this process has them blocked: a mask is inherited. Afterwards they
    wait for ever: the process is ending already.
    """
    leave_on_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


_came = Event()
"""A signal came. Python drops an exception that is raised inside a callback of its own, such as those of imports."""


def leave_on_signals() -> None:
    """Leave by `SystemExit(0)`, wherever the main thread is; at the latest `stop_on_signals` sees that one came."""
    _came.clear()

    def leave(number: int, frame: object) -> NoReturn:
        del number, frame
        _came.set()
        raise SystemExit(0)

    for number in _taken():
        signal.signal(number, leave)


def stop_on_signals(stop: Callable[[], None]) -> None:
    """From now on a signal only calls this, in the loop that runs here."""
    import asyncio  # here: processes without a loop do not load it

    loop = asyncio.get_running_loop()

    def handle(number: int, frame: object) -> None:
        del number, frame
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(stop)

    for number in _taken():
        signal.signal(number, handle)
    if _came.is_set():
        loop.call_soon(stop)


# At once.


def block_signals() -> None:
    """In this thread and all that it starts: they wait for `end_on_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def end_on_signals() -> None:
    """Take the blocked signals in a thread of their own: also while another one computes for long."""

    def wait() -> None:
        signal.sigwait(_taken())
        end(0)

    Thread(target=wait, name="signals", daemon=True).start()


def end(code: int) -> None:
    """At once, from any thread. Destructors of libraries would abort where a thread is still computing."""
    logging.shutdown()
    os._exit(code)


# The service manager (systemd): it hears that the service is ready, and from then on that it is alive.
#
# A few words over a datagram socket that the environment names, as `sd_notify` sends them. Without the variable nothing
# is sent. A process that hangs says nothing any more, and the manager's watchdog starts it again.


SOCKET: Final = "NOTIFY_SOCKET"
PERIOD: Final = "WATCHDOG_USEC"
WATCHED: Final = "WATCHDOG_PID"


class ServiceManager:
    """The manager's socket, if there is one.

    :param clock: seconds that only go forward.
    """

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = environment.get(SOCKET, "")
        self._clock = clock
        self._period = self._watchdog(environment)
        self._due = -math.inf
        self._ready = False

    @staticmethod
    def _watchdog(environment: Mapping[str, str]) -> float | None:
        """A quarter of the time after which the manager starts this process again; None if it does not watch."""
        period, watched = environment.get(PERIOD, ""), environment.get(WATCHED, "")
        if not period.isdecimal() or int(period) == 0 or (watched and watched != str(os.getpid())):
            return None
        return int(period) / 4e6

    def alive(self) -> None:
        """To be called often, from the loop whose standstill should be noticed. The first time, the service is ready;
        later this is said only as often as it must be.
        """
        if not self._ready:
            self._ready = True
            self._send("READY=1")
        if self._period is not None and self._clock() >= self._due:
            self._due = self._clock() + self._period
            self._send("WATCHDOG=1")

    def _send(self, words: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        # An address that begins with @ is abstract: its first byte is zero.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as stream:
            stream.setblocking(False)  # a manager that does not read must not stop us
            stream.sendto(words.encode(), address)


# Memory: what we ask of the C library.
#
# Left to itself, glibc keeps what was freed for the next request: a heap for every thread, and above each what was once
# needed. So there are two heaps, of which little more than is in use is kept; and what the uploads leave behind at a
# coordinator, or a round at an agent or a trainer, is given back. Tighter bounds would save a little more and cost far
# more time than the masks do: every frame would be copied into pages that have just been fetched from the system. In a
# trainer the same bounds would slow training down. Other C libraries do so by themselves, or have no such switch.


# malloc.h of glibc; the numbers are part of its interface.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
HEAPS: Final = 2
# Set by hand, the bounds stay where they are: glibc would raise them with the first large block that is freed.
BLOCK_BYTES: Final = 1_048_576  # larger ones, such as vectors, are mapped on their own
HEAP_END_BYTES: Final = 2_097_152


def _library() -> Any:
    return ctypes.CDLL(None)


def limit_heaps() -> None:
    """Once, before anything large is allocated."""
    change = getattr(_library(), "mallopt", None)
    if change is None:
        return
    for what, value in (
        (_ARENA_MAX, HEAPS),
        (_MMAP_THRESHOLD, BLOCK_BYTES),
        (_TRIM_THRESHOLD, HEAP_END_BYTES),
    ):
        change(what, value)


def freeze_objects() -> None:
    """Once, when everything is set up: what is there now stays, and later collections need not look at it."""
    gc.collect()
    gc.freeze()


def release_memory() -> None:
    """Drop what only cycles hold, and return free pages in the midst of the heap as well; takes some milliseconds."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Return free pages alone. For a trainer, in which a search for cycles would take longer than a small round."""
    give = getattr(_library(), "malloc_trim", None)
    if give is not None:
        give(0)
