"""How a process of ours ends on SIGTERM, SIGINT and SIGHUP: with exit code 0, at every moment from its first line on.

Agent and coordinator end in good order (`ending_well`, `stop_on_signals`). A process that sees images ends at once
(`end_on_signals`): an order that was open is given again. Nothing on disk is ever half written. Standard library alone:
this comes before what takes long to load, and a signal may come meanwhile.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Final, NoReturn

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
