"""Where cells run: in this process, in several worker processes or on a Ray cluster; and the progress of a run.

All three call the same `run_cell`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lazaret.errors import ConfigError
from lazaret.files import write_atomically
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


# Cells on a Ray cluster: an existing one by address, or one of this machine that ends with the run.
#
# A cell whose worker or node fails is started again elsewhere by Ray. Where nodes see the results directory, as on one
# machine or with a common disk, it continues from its last checkpoint; elsewhere it starts again and its files are
# returned as bytes.

# How often a cell is started again when its process or node fails. An error of the cell itself is final.
RETRIES = 3
_MARK = ".run"
_POLL_SECONDS = 0.5
_BROUGHT_BACK = ("result.json", "trained.json", "*.npz", "*.safetensors", "error.txt")


class _Board:
    """Where cells write their rounds; the driver reads it now and then. Lives on the cluster as an actor."""

    def __init__(self) -> None:
        self._news: list[tuple[str, int, str]] = []

    def tell(self, key: str, number: int, text: str) -> None:
        self._news.append((key, number, text))

    def take(self) -> list[tuple[str, int, str]]:
        news, self._news = self._news, []
        return news


def run_ray(
    settings: Settings,
    cells: Sequence[Cell],
    store: ResultStore,
    reporter: Reporter,
    *,
    address: str | None,
    workers: int,
    threads: int,
) -> Iterator[Outcome]:
    """`workers` cells at a time on a cluster of our own; an existing one has its own idea of how many fit."""
    if not cells:
        return
    # Ray reports lost workers on stdout, which is the table's and the JSON object's.
    with redirect_stdout(sys.stderr):
        ray = _connect(address, processors=workers * threads)
        try:
            _require_room(ray, threads)
            yield from _run(ray, settings, cells, store, reporter, threads)
        finally:
            ray.shutdown()


def _run(
    ray: Any, settings: Settings, cells: Sequence[Cell], store: ResultStore, reporter: Reporter, threads: int
) -> Iterator[Outcome]:
    from npr.lab.plugins import VARIABLE
    from npr.recipe import code_digest

    board = ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
    task = ray.remote(num_cpus=threads, max_retries=RETRIES)(run_on_node)
    mark, pending = secrets.token_hex(16), {}
    for cell in cells:
        reporter.cell_started(cell.key, settings.rounds)
        write_atomically(store.directory(cell) / _MARK, mark.encode())
        job = {
            "settings": settings.model_dump(mode="json"),
            "cell": cell.model_dump(mode="json"),
            "directory": str(store.directory(cell).resolve()),
            "mark": mark,
            "threads": threads,
            "code": code_digest(),
            "plugins": os.environ.get(VARIABLE, ""),
        }
        pending[task.remote(job, board)] = cell
    while pending:
        finished, _ = ray.wait(list(pending), num_returns=1, timeout=_POLL_SECONDS)
        _pass_on(ray, board, reporter)
        for reference in finished:
            yield _outcome(ray, reference, pending.pop(reference), store)


def _connect(address: str | None, *, processors: int) -> Any:
    # Ray reads this when it is imported, here and in every process it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "--engine ray needs the package ray, which is not installed", hint="pip install 'lazaret[ray]'"
        ) from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(address="local", num_cpus=processors, include_dashboard=False, **quiet)
        else:
            _reachable(address)
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            "there is no ray cluster at this address", where=address or "local", hint="`ray status` shows one"
        ) from error
    return ray


def _reachable(address: str) -> None:
    """Ray itself would keep trying for minutes.

    :raises ConnectionError: if nobody answers.
    """
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ConnectionError from error


def _require_room(ray: Any, threads: int) -> None:
    """A cell that fits no node would wait for ever."""
    most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if most < threads:
        raise ConfigError(f"no node of the cluster has {threads} processors", hint=f"use --threads {most:g} or less")


def _pass_on(ray: Any, board: Any, reporter: Reporter) -> None:
    try:
        news = ray.get(board.take.remote())
    except ray.exceptions.RayError:  # its node died; another board takes its place, and only progress is lost
        return
    for key, number, text in news:
        reporter.round_done(key, number, text)


def _outcome(ray: Any, reference: Any, cell: Cell, store: ResultStore) -> Outcome:
    directory = store.directory(cell)
    (directory / _MARK).unlink(missing_ok=True)
    try:
        answer = ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        return cell, None, f"lost on the cluster: {type(cause).__name__}"
    # The result last: a cell is finished exactly when that file is there.
    for name, content in sorted(answer["files"].items(), key=lambda item: item[0] == "result.json"):
        write_atomically(directory / name, content)
    if answer["error"]:
        return cell, None, answer["error"]
    return cell, read_json(directory / "result.json"), ""


def run_on_node(job: Json, board: Any) -> Json:
    """Runs on a node, in a process of Ray's: what went wrong, or the files that the driver does not see yet."""
    import torch

    from npr.lab.cell import try_cell
    from npr.lab.plugins import VARIABLE
    from npr.recipe import code_digest

    os.environ[VARIABLE] = job["plugins"]
    torch.set_num_threads(job["threads"])
    settings, cell = Settings.model_validate(job["settings"]), Cell.model_validate(job["cell"])

    def on_round(number: int, text: str) -> None:
        board.tell.remote(cell.key, number, text)

    if code_digest() != job["code"]:
        return {"error": "a node has other learning code than this machine: install the same version", "files": {}}
    if _sees(Path(job["directory"]), job["mark"]):
        _, error = try_cell(settings, cell, Path(job["directory"]), on_round=on_round)
        return {"error": error, "files": {}}
    with tempfile.TemporaryDirectory() as directory:
        _, error = try_cell(settings, cell, Path(directory), on_round=on_round)
        files = [path for pattern in _BROUGHT_BACK for path in Path(directory).glob(pattern)]
        return {"error": error, "files": {path.name: path.read_bytes() for path in files}}


def _sees(directory: Path, mark: str) -> bool:
    """Whether this node sees the driver's own directory and not one of the same name."""
    try:
        return (directory / _MARK).read_text() == mark
    except OSError:
        return False


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
        on_round=lambda number, text: _report({"round": number, "text": text}),
    )
    _report({"error": error} if error else {"done": True})
    return 1 if error else 0


def _report(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _stop_with_parent() -> None:
    while sys.stdin.readline():
        pass
    os._exit(143)


if __name__ == "__main__":
    sys.exit(main())
