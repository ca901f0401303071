"""Where cells run: in this process or in several worker processes. Both call the same `run_cell`, as does on_ray.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from npr.lab.plan import Cell, Settings
from npr.lab.progress import Reporter
from npr.lab.store import Json, ResultStore, read_json

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
    """Several processes, each with its own cell; one that dies takes only its cell with it."""

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
    command = [sys.executable, "-m", "npr.lab.worker"]
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
