"""Time is passed in: machines never look at a clock of their own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall clock, UTC, in milliseconds."""
        ...

    def mono_ms(self) -> int:
        """Monotonic clock of this boot, in milliseconds."""
        ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def mono_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


@dataclass
class ManualClock:
    """A clock that is moved by its user; for tests, simulations and test vectors."""

    wall: int = 1_700_000_000_000
    mono: int = 0

    def now_ms(self) -> int:
        return self.wall

    def mono_ms(self) -> int:
        return self.mono

    def advance(self, milliseconds: int) -> None:
        self.wall += milliseconds
        self.mono += milliseconds
