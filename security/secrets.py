"""Bytes that must not leak by accident: into a log, a traceback, a pickle or a timing."""

from __future__ import annotations

import ctypes
import hmac
import os
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


def take_from_environment(name: str) -> Secret | None:
    """A variable's value, which is gone afterwards: from this process, from what it starts, and from the block that the
    kernel shows as `/proc/PID/environ`, which a fork would copy. None if it is not set.
    """
    value = os.environ.get(name)
    if value is None:
        return None
    getenv = ctypes.CDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_void_p
    if place := getenv(name.encode()):
        ctypes.memset(place, 0, len(os.fsencode(value)))
    del os.environ[name]
    return Secret(os.fsencode(value))
