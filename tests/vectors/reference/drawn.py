"""Bytes that look random and are the same every time."""

from __future__ import annotations

import hashlib


class Drawn:
    """A recorded source: what was drawn is kept, so that a vector can carry it."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()
        self._count = 0
        self.all = b""

    def take(self, count: int) -> bytes:
        out = b""
        while len(out) < count:
            out += hashlib.sha256(self._name + self._count.to_bytes(8, "big")).digest()
            self._count += 1
        self.all += out[:count]
        return out[:count]

    def number(self, bound: int) -> int:
        return int.from_bytes(self.take(16), "big") % bound
