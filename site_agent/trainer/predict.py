"""`site-agent predict`: from a folder of images to a table of diagnoses. A file that cannot be read costs one row."""

from __future__ import annotations

import contextlib
import csv
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from lazaret.errors import ConfigError, DataError, ToolkitError
from npr.data.catalogue import NO_LABEL, SEPARATOR
from npr.data.dicom import is_dicom
from npr.data.dicom_pixels import DicomView, Frame
from npr.data.fed_isic import decoding as isic_decoding
from npr.data.manifest import SUFFIXES, Decoding, image_decoding
from npr.data.sources import SourceName
from npr.deployed import Pixels
from site_agent.trainer.predictor import Predictor
from site_agent.trainer.reports import ReportedModel, Reports, require_highdicom

# Input: a folder, one file, or a table with a column `image`; decoded exactly as in training.

_IGNORED: Final = ("Thumbs.db", "DICOMDIR")
_READERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFiles:
    """Files in order, each with the name it has in the result, and how many others were passed over."""

    files: tuple[tuple[str, Path], ...]
    ignored: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBatch:
    """Some files: the pixels of those that could be read, and what was wrong with the others."""

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    problems: tuple[str | None, ...]
    pixels: Pixels


def decoding_for(source: str, image_size: int, channels: int) -> Decoding:
    """How files become pixels at this site: as the data set it trains on is read."""
    name = SourceName.parse(source)
    if name.kind == "dicom":
        view = DicomView(window=name.options.get("window"), frame=shown_frame(name.options), channels=channels)
        found = view.decoding(image_size)
    elif name.kind == "fed-isic":
        found = isic_decoding(
            image_size, name.options.get("colour_constancy", True), name.options.get("brightness", False)
        )
    else:
        found = image_decoding(image_size)
    if found.channels != channels:
        raise ConfigError(
            f"the model takes {channels} channels, [data] source gives {found.channels}", where="site.toml [data]"
        )
    return found


def shown_frame(options: Mapping[str, Any]) -> Frame:
    """Of a file with several frames one is predicted, also where each was an image of its own in training."""
    frame: Any = options.get("frame", "middle")
    found: Frame = "middle" if frame == "all" else frame
    return found


def find(source: Path, decoding: Decoding) -> InputFiles:
    """The files behind one name, sorted; a folder is searched with its sub-folders."""
    dicom = decoding.dicom
    if source.is_dir():
        every = sorted(path for path in source.rglob("*") if path.is_file() and not _hidden(path, source))
        wanted = [path for path in every if (is_dicom(path) if dicom else path.suffix.lower() in SUFFIXES)]
        found = InputFiles(
            files=tuple((path.relative_to(source).as_posix(), path) for path in wanted),
            ignored=len(every) - len(wanted),
        )
    elif source.suffix.lower() == ".csv":
        found = InputFiles(files=tuple(_listed(source)))
    elif source.exists():
        found = InputFiles(files=((source.name, source),))
    else:
        raise DataError("there is no such folder, file or table", where=str(source))
    if not found.files:
        kinds = "DICOM files" if dicom else f"images ({', '.join(SUFFIXES)})"
        raise DataError(f"there are no {kinds} here", where=str(source))
    return found


def _hidden(path: Path, root: Path) -> bool:
    return path.name in _IGNORED or any(part.startswith(".") for part in path.relative_to(root).parts)


def _listed(table: Path) -> Iterator[tuple[str, Path]]:
    """The column `image`, relative to the table; other columns are not read."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            if "image" not in (reader.fieldnames or ()):
                raise DataError("column 'image' is missing", where=f"{table.name} row 1")
            for entry in reader:
                name = (entry["image"] or "").strip()
                if not name:
                    raise DataError("image is empty", where=f"{table.name} row {reader.line_num}")
                yield name, table.parent / name
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"not a UTF-8 CSV file ({type(error).__name__})", where=str(table)) from None


def pieces(found: InputFiles, decoding: Decoding, *, size: int) -> Iterator[FileBatch]:
    """Decode `size` files at a time, one piece ahead of the one in work: memory holds two, however many come."""
    parts = [found.files[start : start + size] for start in range(0, len(found.files), size)]
    with ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="reading") as workers:

        def begin(part: tuple[tuple[str, Path], ...]) -> list[Future[Pixels | str]]:
            return [workers.submit(_decoded, path, name, decoding) for name, path in part]

        waiting = begin(parts[0])
        for number, part in enumerate(parts):
            current = [future.result() for future in waiting]
            waiting = begin(parts[number + 1]) if number + 1 < len(parts) else []
            yield _piece(part, current, decoding)


def _decoded(path: Path, name: str, decoding: Decoding) -> Pixels | str:
    """Pixels, or what is wrong. Whatever a damaged file makes a decoder raise, it is that file's problem alone."""
    try:
        return decoding.read(path, name)
    except ToolkitError as error:
        return error.message
    except Exception as error:
        return f"cannot be read ({type(error).__name__})"


def _piece(part: tuple[tuple[str, Path], ...], read: list[Pixels | str], decoding: Decoding) -> FileBatch:
    good = [pixels for pixels in read if not isinstance(pixels, str)]
    shape = (0, decoding.image_size, decoding.image_size, decoding.channels)
    return FileBatch(
        names=tuple(name for name, _ in part),
        paths=tuple(path for _, path in part),
        problems=tuple(found if isinstance(found, str) else None for found in read),
        pixels=np.stack(good) if good else np.empty(shape, dtype=np.uint8),
    )


BATCH = 32
EXPLANATION = ("nearest_class", "nearest_cluster", "nearest_cosine")
Tell = Callable[[int, int], None]


@dataclass(kw_only=True)
class PredictionSummary:
    """What came of it. `problems` names files, so that it belongs on this machine's screen and nowhere else.

    :ivar unreported: files that were predicted and are in no report, if reports were asked for.
    """

    files: int
    ignored: int
    problems: list[tuple[str, str]] = field(default_factory=list)
    unreported: list[tuple[str, str]] = field(default_factory=list)
    predicted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "predicted": self.files - len(self.problems),
            "ignored": self.ignored,
            "by_class": dict(self.predicted),
            "problems": [{"file": name, "problem": problem} for name, problem in self.problems],
            "unreported": [{"file": name, "problem": problem} for name, problem in self.unreported],
            "seconds": round(self.seconds, 3),
        }


def check_store(source: str, store: Path) -> Frame:
    """Said before the model is loaded. Returns which frame of an image is shown to it.

    :param source: of the data that the model was trained on, by which files are read.
    """
    name = SourceName.parse(source)
    if name.kind != "dicom":
        raise ConfigError("only DICOM images have reports", where="--store", hint="leave it out")
    require_highdicom()
    if store.exists():
        raise ConfigError("refusing to overwrite what exists already", where=str(store), hint="choose another name")
    return shown_frame(name.options)


def check_target(target: Path) -> None:
    """Said before the model is loaded, which takes a while."""
    if target.exists():
        raise ConfigError("refusing to overwrite an existing file", where=str(target), hint="choose another name")
    if not target.parent.is_dir():
        raise ConfigError("folder is missing", where=str(target.parent), hint="make it first")


def predict(
    predictor: Predictor, source: Path, target: Path, *, tell: Tell, batch: int = BATCH, store: Path | None = None
) -> PredictionSummary:
    """Read, predict and write, `batch` images at a time; the table appears when it is complete.

    :param store: a folder to make, of reports.
    """
    check_target(target)
    recipe, data = predictor.place.recipe, predictor.place.config.data.source
    reports = _reports(predictor, check_store(data, store)) if store is not None else None
    decoding = decoding_for(data, recipe.image_size, recipe.in_channels)
    found = find(source, decoding)
    summary = PredictionSummary(files=len(found.files), ignored=found.ignored)
    started, done = time.monotonic(), 0
    with _table(target) as file:
        writer = csv.writer(file)
        writer.writerow(header(predictor.class_names))
        for piece in pieces(found, decoding, size=batch):
            writer.writerows(_rows(predictor, piece, summary, reports))
            done += len(piece.names)
            tell(done, len(found.files))
        if reports is not None and store is not None:
            summary.unreported = reports.write(store)
    summary.seconds = time.monotonic() - started
    return summary


def header(class_names: tuple[str, ...]) -> list[str]:
    return ["file", "predicted", *(f"p_{name}" for name in class_names), *EXPLANATION, "problem"]


def _reports(predictor: Predictor, frame: Frame) -> Reports:
    trained = predictor.trained
    about = ReportedModel(
        class_names=predictor.class_names,
        architecture=predictor.place.manifest.model.architecture,
        digest=trained.digest,
        round=trained.round,
        frame=frame,
        many=predictor.many,
    )
    return Reports(model=about)


def _rows(
    predictor: Predictor, piece: FileBatch, summary: PredictionSummary, reports: Reports | None
) -> Iterator[list[str]]:
    empty = [""] * (len(predictor.class_names) + 1 + len(EXPLANATION))
    explained: Iterator[tuple[Any, tuple[str, int, float]]] = iter(())
    if len(piece.pixels):
        probabilities, features = predictor.deployed.predict(piece.pixels)
        explained = zip(probabilities, predictor.nearest(features), strict=True)
    for name, path, problem in zip(piece.names, piece.paths, piece.problems, strict=True):
        if problem is not None:
            summary.problems.append((name, problem))
            yield [name, *empty, problem]
            continue
        row, (owner, cluster, cosine) = next(explained)
        chosen = predictor.predicted(row)
        summary.predicted.update(chosen)
        if reports is not None:
            reports.add(name, path, row)
        shown = SEPARATOR.join(chosen) or NO_LABEL
        yield [name, shown, *(f"{p:.6f}" for p in row), owner, str(cluster), f"{cosine:.4f}", ""]


@contextlib.contextmanager
def _table(target: Path) -> Iterator[IO[str]]:
    """Written next to the target until it is complete; readable by this user only, because names of files may name
    patients."""
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
