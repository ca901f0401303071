"""The only place that asks the operating system for randomness.

Secrets come from ``SystemRandomness``. ``CountedRandomness`` repeats a stream from a seed: it exists for test
vectors and property tests and must never reach a running agent (a test greps for it outside ``tests``).
"""

from __future__ import annotations

import hashlib
import os
from typing import Protocol


class Randomness(Protocol):
    def bytes(self, count: int) -> bytes:
        """Return `count` unpredictable bytes."""
        ...


class SystemRandomness:
    def bytes(self, count: int) -> bytes:
        return os.urandom(count)


class CountedRandomness:
    """SHA-256 in counter mode over a seed. Deterministic, hence for tests only."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._drawn = 0

    def bytes(self, count: int) -> bytes:
        out = bytearray()
        while len(out) < count:
            out += hashlib.sha256(self._seed + self._drawn.to_bytes(8, "big")).digest()
            self._drawn += 1
        return bytes(out[:count])
