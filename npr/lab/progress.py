"""Progress of a run: a bar on a terminal, plain lines otherwise. All of it goes to stderr."""

from __future__ import annotations

import threading
import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from security.terminal import bars_fit, remark


class Reporter(Protocol):
    """What an engine tells while cells run; calls may come from several threads."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def cell_started(self, key: str, rounds: int) -> None: ...
    def round_done(self, key: str, number: int, text: str) -> None: ...
    def cell_done(self, key: str, text: str) -> None: ...
    def cell_failed(self, key: str, error: str) -> None: ...


class LineReporter:
    """One line per event: for logs, pipes and batch systems."""

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._done = 0
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def cell_started(self, key: str, rounds: int) -> None:
        self._say(f"{key}: start, {rounds} rounds")

    def round_done(self, key: str, number: int, text: str) -> None:
        self._say(f"{key}: round {number}, {text}")

    def cell_done(self, key: str, text: str) -> None:
        with self._lock:
            self._done += 1
        self._say(f"{key}: done ({self._done}/{self._cells}), {text}")

    def cell_failed(self, key: str, error: str) -> None:
        self._say(f"{key}: FAILED, {error}")

    def _say(self, text: str) -> None:
        with self._lock:
            remark("npr-lab", f"[{time.monotonic() - self._start:7.1f} s] {text}")


class BarReporter:
    """A bar for the whole run and one for each running cell."""

    def __init__(self, cells: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._all = self._progress.add_task("cells", total=cells, text="")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def cell_started(self, key: str, rounds: int) -> None:
        self._tasks[key] = self._progress.add_task(key, total=rounds, text="")

    def round_done(self, key: str, number: int, text: str) -> None:
        self._progress.update(self._tasks[key], completed=number, text=text)

    def cell_done(self, key: str, text: str) -> None:
        self._progress.remove_task(self._tasks.pop(key))
        self._progress.advance(self._all)
        self._progress.console.print(f"{key}: {text}", highlight=False)

    def cell_failed(self, key: str, error: str) -> None:
        if key in self._tasks:
            self._progress.remove_task(self._tasks.pop(key))
        self._progress.console.print(f"{key}: FAILED, {error}", highlight=False)


def reporter(cells: int) -> Reporter:
    return BarReporter(cells) if bars_fit() else LineReporter(cells)
