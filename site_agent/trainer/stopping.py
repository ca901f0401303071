"""How a process that sees images ends: at once, with 0, on SIGTERM, SIGINT and SIGHUP, whatever it is doing.

Nothing on disk is ever half written, and an order that was open is given again. Standard library alone: this runs
before torch is loaded, which takes a while in which a signal may come too.
"""

from __future__ import annotations

import logging
import os
import signal
from threading import Thread
from typing import Final

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def block_signals() -> None:
    """In this thread and all that it starts: they wait for `end_on_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def end_on_signals() -> None:
    """Take the blocked signals in a thread of their own: also while another one computes for long."""

    def wait() -> None:
        signal.sigwait(ENDING)
        end(0)

    Thread(target=wait, name="signals", daemon=True).start()


def end(code: int) -> None:
    """At once, from any thread. Destructors of libraries would abort where a thread is still computing."""
    logging.shutdown()
    os._exit(code)
