"""Bytes that came and went, by type of message, since this start."""

from __future__ import annotations

from collections import Counter


class Traffic:
    """Counts what passes the network's edge."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._marked = (0, 0)

    def since_last(self) -> tuple[int, int]:
        """Bytes in and out since this was last asked."""
        now = (self.received.total(), self.sent.total())
        passed = (now[0] - self._marked[0], now[1] - self._marked[1])
        self._marked = now
        return passed
