"""Moments of processes on one machine, comparable because the monotonic clock is the machine's."""

from __future__ import annotations

import json
import time
from pathlib import Path


def note(path: Path, what: str, number: int, value: float = 0.0) -> None:
    with path.open("a") as file:
        file.write(json.dumps([what, number, time.monotonic(), value]) + "\n")


def read(path: Path, what: str) -> dict[int, float]:
    """When `what` happened first, by number."""
    found: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, number, moment, _ = json.loads(line)
        if name == what:
            found.setdefault(number, moment)
    return found


def last_value(path: Path, what: str) -> float:
    values = [json.loads(line) for line in path.read_text().splitlines()]
    return float(next((value for name, _, _, value in reversed(values) if name == what), 0.0))


def values(path: Path, what: str) -> dict[int, float]:
    """The value of `what` when it happened last, by number."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {number: float(value) for name, number, _, value in lines if name == what}


def spent(path: Path, begin: str, end: str) -> dict[int, float]:
    """Between two moments of one process, by number: the difference of their values."""
    begun, over = values(path, begin), values(path, end)
    return {number: over[number] - begun[number] for number in begun.keys() & over.keys()}
