"""`site-agent predict`: a folder of images to a table of diagnoses. A file that cannot be read costs one row."""

from __future__ import annotations

import contextlib
import csv
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from security.errors import ConfigError
from site_agent.predictor import Predictor
from site_agent.sources import Piece, decoding_for, find, pieces

BATCH = 32
EXPLANATION = ("nearest_class", "nearest_cluster", "nearest_cosine")
Tell = Callable[[int, int], None]


@dataclass(kw_only=True)
class Summary:
    """What came of it. `problems` names files, so that it belongs on this machine's screen and nowhere else."""

    files: int
    ignored: int
    problems: list[tuple[str, str]] = field(default_factory=list)
    predicted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "predicted": self.files - len(self.problems),
            "ignored": self.ignored,
            "by_class": dict(self.predicted),
            "problems": [{"file": name, "problem": told} for name, told in self.problems],
            "seconds": round(self.seconds, 3),
        }


def check_target(target: Path) -> None:
    """Said before the model is loaded, which takes a while."""
    if target.exists():
        raise ConfigError("refusing to overwrite an existing file", where=str(target), hint="choose another name")
    if not target.parent.is_dir():
        raise ConfigError("folder is missing", where=str(target.parent), hint="make it first")


def predict(predictor: Predictor, source: Path, target: Path, *, tell: Tell, batch: int = BATCH) -> Summary:
    """Read, predict and write, `batch` images at a time; the table appears when it is complete."""
    check_target(target)
    recipe = predictor.place.recipe
    decoding = decoding_for(predictor.place.config.data.source, recipe.image_size, recipe.in_channels)
    found = find(source, decoding)
    summary = Summary(files=len(found.files), ignored=found.ignored)
    started, done = time.monotonic(), 0
    with _table(target) as file:
        writer = csv.writer(file)
        writer.writerow(header(predictor.class_names))
        for piece in pieces(found, decoding, size=batch):
            writer.writerows(_rows(predictor, piece, summary))
            done += len(piece.names)
            tell(done, len(found.files))
    summary.seconds = time.monotonic() - started
    return summary


def header(class_names: tuple[str, ...]) -> list[str]:
    return ["file", "predicted", *(f"p_{name}" for name in class_names), *EXPLANATION, "problem"]


def _rows(predictor: Predictor, piece: Piece, summary: Summary) -> Iterator[list[str]]:
    names, empty = predictor.class_names, [""] * (len(predictor.class_names) + 1 + len(EXPLANATION))
    explained: Iterator[tuple[Any, tuple[str, int, float]]] = iter(())
    if len(piece.pixels):
        probabilities, features = predictor.deployed.predict(piece.pixels)
        explained = zip(probabilities, predictor.nearest(features), strict=True)
    for name, problem in zip(piece.names, piece.problems, strict=True):
        if problem is not None:
            summary.problems.append((name, problem))
            yield [name, *empty, problem]
            continue
        row, (owner, cluster, cosine) = next(explained)
        chosen = names[int(row.argmax())]
        summary.predicted[chosen] += 1
        yield [name, chosen, *(f"{p:.6f}" for p in row), owner, str(cluster), f"{cosine:.4f}", ""]


@contextlib.contextmanager
def _table(target: Path) -> Iterator[IO[str]]:
    """Beside the target until it is whole; readable by this user only, because names of files may name patients."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", newline="", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.link(beside, target)
    except FileExistsError as error:
        raise ConfigError("refusing to overwrite an existing file", where=str(target)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()


