"""What a run leaves behind: results.json, and for each cell a working folder from which a killed run continues.

    OUT/results.json              settings, finished cells, what failed, what has not run; replaced atomically
    OUT/choices.json              what was chosen on validation sides, before any test image of those rows was read
    OUT/cells/<cell>/             models, validation-*.npz and result.json of a trained cell, test-*.npz and judged.json
                                  of a judged one, the checkpoint of an unfinished one

A worker writes only into its cell's own directory; results.json has one writer, the holder of OUT/cells/lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lazaret.errors import ConfigError
from lazaret.files import write_atomically
from npr.lab.plan import Cell, LabPlan, Settings

FORMAT = "lazaret-lab-results/2"

Json = dict[str, Any]


def write_json(path: Path, value: object) -> None:
    write_atomically(path, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), hint="run `npr-lab run --out DIR` first") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("not a JSON file", where=str(path), hint="restore it, or choose another --out") from error
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object", where=str(path))
    return value


def read_results(out: Path) -> Json:
    """The results of a run, refused when the format is not ours."""
    path = out / "results.json" if out.is_dir() else out
    results = read_json(path)
    if results.get("format") != FORMAT:
        raise ConfigError(f"this is not a {FORMAT} file", where=str(path))
    return results


class ResultStore:
    """The results directory of one run."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.scratch = out / "cells"
        self.earlier_summary: list[Json] = []
        self._cells: dict[str, Json] = {}
        self._failed: dict[str, str] = {}
        self._wanted: list[str] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuses a second run into the same directory; the lock goes with the process, even by kill -9."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        with (self.scratch / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    "another run is writing here", where=str(self.out), hint="wait for it, or choose another --out"
                ) from None
            yield

    def load(self, plan: LabPlan) -> None:
        """Takes up what is there: results.json, and cells a killed run finished but did not get to write into it."""
        if (self.out / "results.json").exists():
            earlier = read_results(self.out)
            _require_same_settings(plan.settings, earlier["settings"], self.out)
            self._cells = {cell["key"]: cell for cell in earlier["cells"]}
            self.earlier_summary = earlier.get("summary", [])
            self._wanted = [*earlier["not_run"], *(entry["key"] for entry in earlier["failed"])]
        self._wanted = list(dict.fromkeys([*(cell.key for cell in plan.cells), *self._wanted]))
        for cell in plan.cells:
            result = self.directory(cell) / "result.json"
            if cell.key not in self._cells and result.exists():
                self._cells[cell.key] = read_json(result)

    def directory(self, cell: Cell) -> Path:
        return self.scratch / cell.slug

    def finished(self, cell: Cell) -> bool:
        return cell.key in self._cells

    def result(self, cell: Cell) -> Json | None:
        return self._cells.get(cell.key)

    @property
    def cells(self) -> list[Json]:
        return list(self._cells.values())

    @property
    def failed(self) -> Mapping[str, str]:
        return self._failed

    def record(self, cell: Cell, result: Json) -> None:
        self._cells[cell.key] = result
        self._failed.pop(cell.key, None)

    def record_failure(self, cell: Cell, error: str) -> None:
        self._failed[cell.key] = error

    def write(self, plan: LabPlan, extra: Json) -> None:
        """Replaces results.json; `extra` holds what is derived from the cells (summary, comparisons)."""
        done = self._cells.keys() | self._failed.keys()
        cells = sorted(self._cells.values(), key=lambda cell: (cell["seed"], str(cell["fold"]), cell["key"]))
        write_json(
            self.out / "results.json",
            {
                "format": FORMAT,
                "settings": plan.settings.model_dump(mode="json"),
                "machine": machine(),
                **extra,
                "failed": [{"key": key, "error": error} for key, error in self._failed.items()],
                "not_run": [key for key in self._wanted if key not in done],
                "cells": cells,
            },
        )


def _require_same_settings(wanted: Settings, found: Json, out: Path) -> None:
    """Cells under different settings would be compared as if they were alike."""
    try:
        theirs = Settings.model_validate(found).model_dump(mode="json")
    except ValidationError as error:
        raise ConfigError("these settings are from another version", where=str(out / "results.json")) from error
    ours = wanted.model_dump(mode="json")
    different = sorted(key for key in ours if ours[key] != theirs[key])
    if different:
        raise ConfigError(
            f"there are already results, with other settings ({', '.join(different)})",
            where=str(out / "results.json"),
            hint="use the same settings to continue, or choose another --out",
        )


def machine() -> Json:
    """What a timing depends on; no host name."""
    from importlib.metadata import version

    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "timm": version("timm"),
        "numpy": version("numpy"),
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
    }
