"""What a service tells the manager that has started it (systemd): that it is ready, and from then on that it is alive.

A few words over a datagram socket that the environment names, as `sd_notify` sends them. Without the variable nothing
is sent. A process that hangs says nothing any more, and the manager's watchdog starts it again.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

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
        """A quarter of the time after which the manager takes this process for dead; None if it does not look."""
        told, whose = environment.get(PERIOD, ""), environment.get(WATCHED, "")
        if not told.isdecimal() or int(told) == 0 or (whose and whose != str(os.getpid())):
            return None
        return int(told) / 4e6

    def alive(self) -> None:
        """To be called often, from the loop whose standstill should be noticed. The first time, the service is ready;
        later this is said only as often as it must be.
        """
        if not self._ready:
            self._ready = True
            self._tell("READY=1")
        if self._period is not None and self._clock() >= self._due:
            self._due = self._clock() + self._period
            self._tell("WATCHDOG=1")

    def _tell(self, words: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        # An address that begins with @ is abstract: its first byte is zero.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as way:
            way.setblocking(False)  # a manager that does not read must not stop us
            way.sendto(words.encode(), address)
