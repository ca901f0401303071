"""Room on this machine: disk and memory, as numbers and as lines. What is needed comes from the caller."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from security.preflight.lines import Line, ok, problem, warning


def free_bytes(folder: Path) -> int:
    """What this user may still write where `folder` is or will be."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    return shutil.disk_usage(there).free


def used_bytes(folder: Path) -> int:
    """What lies in a folder already."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


def available_memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that a process could still take: of the machine, or of its control group if that allows less."""
    bounds = []
    try:
        told = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        bounds.append(int(told["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        limit = int((cgroup / "memory.max").read_text())
        bounds.append(max(0, limit - int((cgroup / "memory.current").read_text())))
    except (OSError, ValueError):
        pass  # no control group of its own, or "max"
    return min(bounds, default=None)


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def disk(folder: Path, *, free: int, least: int, whole: int) -> Line:
    """Room for one round is a must, for the whole run a wish.

    :param least: bytes that the next round may add to what is there.
    :param whole: bytes that the rest of the run may add.
    """
    room = f"{size(free)} free for {folder}"
    if free < least:
        return problem(
            f"{room}, and one round needs {size(least)}", "make room, or put the state folder on a larger disk"
        )
    if free < whole:
        return warning(f"{room}, and the whole run may need {size(whole)}", "make room before it is needed")
    return ok(f"{room}; one round needs {size(least)}, the whole run {size(whole)}")


def memory(*, available: int, needed: int, what: str) -> Line:
    told = f"{what} takes about {size(needed)}, {size(available)} are available"
    if needed > available:
        return problem(told, "use a machine with more memory, or end other programs")
    if needed > 0.8 * available:
        return warning(told, "that is close; other programs should leave room")
    return ok(told)
