"""Where cells run: in this process or in several worker processes; and the progress of a run.

Both call the same `run_cell`, as does on_ray.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lazaret.terminal import bars_fit, remark
from npr.lab.plan import Cell, Settings
from npr.lab.store import Json, ResultStore, read_json

# Progress of a run: a bar on a terminal, plain lines otherwise. All of it goes to stderr.


class Reporter(Protocol):
    """What an engine reports while cells run; calls may come from several threads."""

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


Outcome = tuple[Cell, Json | None, str]
"""A cell with its result, or with None and what went wrong."""


def run_inline(settings: Settings, cells: Sequence[Cell], store: ResultStore, reporter: Reporter) -> Iterator[Outcome]:
    """One after the other in this process, with all of torch's threads."""
    from npr.lab.cell import try_cell

    for cell in cells:
        reporter.cell_started(cell.key, settings.rounds)
        yield cell, *try_cell(settings, cell, store.directory(cell), on_round=_teller(reporter, cell))


def run_workers(
    settings: Settings, cells: Sequence[Cell], store: ResultStore, reporter: Reporter, *, workers: int, threads: int
) -> Iterator[Outcome]:
    """Several processes, each with its own cell; one that crashes loses only its own cell."""

    def work(cell: Cell) -> Outcome:
        reporter.cell_started(cell.key, settings.rounds)
        directory = store.directory(cell)
        job = {
            "settings": settings.model_dump(mode="json"),
            "cell": cell.model_dump(mode="json"),
            "directory": str(directory),
            "threads": threads,
        }
        error = _run_process(job, reporter, cell)
        return (cell, None, error) if error else (cell, read_json(directory / "result.json"), "")

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, cell) for cell in cells]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _run_process(job: Json, reporter: Reporter, cell: Cell) -> str:
    """Returns what went wrong, or an empty text."""
    command = [sys.executable, "-m", "npr.lab.engines"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        error = ""
        for line in process.stdout:
            message = json.loads(line)
            if "round" in message:
                reporter.round_done(cell.key, message["round"], message["text"])
            error = message.get("error", error)
        code = process.wait()
    return error or (f"the worker ended with exit code {code}" if code else "")


def _teller(reporter: Reporter, cell: Cell) -> Callable[[int, str], None]:
    return lambda number, text: reporter.round_done(cell.key, number, text)


# One cell in its own process: `python -m npr.lab.engines`, started by `npr-lab run --workers N`.
#
# The job comes as one JSON line on stdin; rounds and the end are reported as JSON lines on stdout. Stdin stays open for
# as long as the parent lives: when it closes, the worker stops, so that a killed run leaves no process behind.


def main() -> int:
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    # Imported only now: torch reads the number of threads when it is loaded.
    import torch

    from npr.lab.cell import try_cell

    torch.set_num_threads(job["threads"])
    _, error = try_cell(
        Settings.model_validate(job["settings"]),
        Cell.model_validate(job["cell"]),
        Path(job["directory"]),
        on_round=lambda number, text: _tell({"round": number, "text": text}),
    )
    _tell({"error": error} if error else {"done": True})
    return 1 if error else 0


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _stop_with_parent() -> None:
    while sys.stdin.readline():
        pass
    os._exit(143)


if __name__ == "__main__":
    sys.exit(main())
