"""Learning curves as files that TensorBoard and MLflow read. Nothing is sent, and neither has to be installed here.

MLflow's own client reports its use to its makers and brings a cloud's; both formats are simple, so that the processes
which know a hospital's figures only write files. docs/lab.md says how to look at them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from lazaret import files


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """One run and its figures.

    :ivar points: figures by name after each round, the rounds in order; a figure that does not exist is left out.
    :ivar written_ms: the time that its points are shown at.
    """

    name: str
    points: Sequence[tuple[int, Mapping[str, float]]]
    settings: Mapping[str, str] = field(default_factory=dict)
    written_ms: int


class Tracker(Protocol):
    """Writes runs into one folder. A run that is written again replaces itself."""

    def write(self, run: TrackedRun) -> None: ...


def open_tracker(kind: str, folder: Path, *, experiment: str) -> Tracker:
    """:param kind: one of `TRACKERS`."""
    return TensorBoardFiles(folder) if kind == "tensorboard" else MlflowFiles(folder, experiment)


TRACKERS: Final = ("tensorboard", "mlflow")


class TensorBoardFiles:
    """A folder a run, with one event file: records of a length, an Event message, and a checksum of each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, run: TrackedRun) -> None:
        seconds = run.written_ms / 1000
        events = [_event(seconds, 0, _text(3, b"brain.Event:2"))]
        for step, figures in run.points:
            values = b"".join(
                _text(1, _text(1, name.encode()) + b"\x15" + struct.pack("<f", figure))
                for name, figure in figures.items()
            )
            events.append(_event(seconds, step, _text(5, values)))
        content = b"".join(map(_framed, events))
        _put(self._folder / run.name / "events.out.tfevents.1.lazaret", content)


# The protocol-buffer wire format, as far as an Event with numbers needs it.


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _text(number: int, content: bytes) -> bytes:
    """A field that has a length: a string, or a message inside a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _event(seconds: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", seconds) + b"\x10" + _varint(step) + what


def _framed(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def _crc_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return tuple(table)


_CRC32C: Final = _crc_table()


def _checksum(content: bytes) -> bytes:
    """CRC-32C, rotated and shifted as TFRecord files have it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class MlflowFiles:
    """The layout of MLflow's file store: a folder an experiment, in it a folder a run, in it a file a figure."""

    def __init__(self, folder: Path, experiment: str) -> None:
        self._id, self._experiment = str(int(_named(experiment)[:15], 16)), experiment
        self._home = (folder / self._id).resolve()

    def write(self, run: TrackedRun) -> None:
        now = run.written_ms
        if not (self._home / "meta.yaml").exists():
            dates = {"creation_time": now, "last_update_time": now}
            self._about(self._home, name=self._experiment, artifact_location=self._home.as_uri(), **dates)
        place = self._home / _named(f"{self._experiment}\n{run.name}")
        shutil.rmtree(place, ignore_errors=True)
        for part in ("artifacts", "metrics", "params", "tags"):  # MLflow takes no folder for a run that lacks one
            (place / part).mkdir(parents=True)
        for key, value in run.settings.items():
            _put(place / "params" / key, value.encode())
        curves: dict[str, list[str]] = {}
        for step, figures in run.points:
            for key, figure in figures.items():
                curves.setdefault(key, []).append(f"{now} {figure!r} {step}\n")
        for key, lines in curves.items():
            _put(place / "metrics" / key, "".join(lines).encode())
        _put(place / "tags" / "mlflow.runName", run.name.encode())
        names = {"run_id": place.name, "run_name": run.name, "artifact_uri": (place / "artifacts").as_uri()}
        kind = {"status": 3, "source_type": 4, "tags": [], "user_id": ""}  # finished, and local
        self._about(place, start_time=now, end_time=now, **names, **kind)

    def _about(self, folder: Path, **values: object) -> None:
        """What is JSON is YAML."""
        entries = {"experiment_id": self._id, "lifecycle_stage": "active"} | values
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in entries.items()]
        _put(folder / "meta.yaml", "".join(lines).encode())


def _named(text: str) -> str:
    """The same name for the same run, each time."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _put(path: Path, content: bytes) -> None:
    """A hospital's figures are exact: only its own user reads them."""
    files.write_atomically(path, content, mode=0o600)
