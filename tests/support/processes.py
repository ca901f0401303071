"""Processes of the machine, as /proc shows them."""

from __future__ import annotations

from pathlib import Path


def running(pid: int) -> bool:
    """It is there, and has not ended and waits to be asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
