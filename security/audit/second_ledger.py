"""The kernel's own count of bytes, in the log beside ours: what leaves without an entry shows as a difference."""

from __future__ import annotations

from typing import Final

from security.audit.events import NetCounter
from security.audit.log import AuditLog
from security.traffic import SOURCE, Meter

READING_SECONDS: Final = 30.0
IDLE_BYTES: Final = 4096


class SecondLedger:
    """Takes readings of a meter into a log.

    A quiet line is not worth an entry: what keep-alives add up to waits for the next reading, but no more of it than
    would be worth hiding.
    """

    def __init__(self, log: AuditLog, meter: Meter) -> None:
        self._log = log
        self._meter = meter
        self._settled: float | None = None

    def tick(self, seconds: float) -> None:
        """To be called several times a second, with any clock that counts them."""
        self._meter.poll()
        if self._settled is None or seconds - self._settled >= READING_SECONDS:
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
                source=SOURCE,
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
