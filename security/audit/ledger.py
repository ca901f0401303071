"""Bytes that left, by data class, and whether the network's own counters agree."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from security.audit.collect import Findings

# TLS records, HTTP/2 frames, headers, acknowledgements and keep-alives above the messages themselves: a share of the
# bytes, something for each message, and something for each connection and quiet hour between two readings.
OVERHEAD_SHARE: Final = 0.03
OVERHEAD_PER_MESSAGE: Final = 2048
OVERHEAD_PER_READING: Final = 256 * 1024


class EgressLedger:
    """Totals of what was logged as sent, and the comparison with what was counted."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.counted = 0
        self.readings = 0
        self._logged = 0
        self._count = 0
        self._unsure = 0
        self._last = 0

    def add(self, data_class: str, size: int) -> None:
        """One message."""
        self.messages[data_class] += 1
        self.bytes[data_class] += size
        self._logged += size
        self._count += 1
        self._last = size

    def interrupted(self) -> None:
        """The agent died: its last message may have been logged and not sent."""
        self._unsure += self._last

    def counter(self, match: re.Match[str], seq: int) -> None:
        """Compare the running totals at one reading of the network's counter."""
        self.counted += int(match["body_bytes_out"])
        self.readings += 1
        most = (
            self._logged * (1 + OVERHEAD_SHARE)
            + self._count * OVERHEAD_PER_MESSAGE
            + self.readings * OVERHEAD_PER_READING
        )
        least = self._logged - self._unsure - self._last
        if not least <= self.counted <= most:
            self.findings.add(
                "UnloggedTraffic",
                f"at entry {seq} the network counted {self.counted} bytes out, the log explains {self._logged}",
                seq,
            )

    @property
    def total(self) -> int:
        """All bytes logged as sent."""
        return self._logged

    @property
    def count(self) -> int:
        """All messages logged as sent."""
        return self._count
