"""Bytes that must not leak by accident: into a log, a traceback, a pickle or a timing."""

from __future__ import annotations

import hmac
from typing import NoReturn


class Secret:
    """Immutable bytes that never print, compare in constant time, and can be neither hashed nor pickled.

    `reveal` is the only way to the bytes, so that a search for it lists every place that handles them. Python cannot
    promise to wipe memory: holders drop their references when the protocol says "erase" (docs/threat-model.md).
    """

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]  # a hash table would compare in variable time

    def __init__(self, value: bytes) -> None:
        self._value = bytes(value)

    def reveal(self) -> bytes:
        return self._value

    def __len__(self) -> int:
        return len(self._value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value, other._value)

    def __repr__(self) -> str:
        return "<Secret redacted>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret cannot be pickled or copied")
