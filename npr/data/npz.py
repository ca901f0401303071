"""A whole data set in one npz: JPEG bytes end to end with offsets, and a row of columns per image (docs/data.md)."""

from __future__ import annotations

import hashlib
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npr.data.catalogue import SIDES, Catalogue, NamedSplit
from npr.data.decode import open_image, squash
from npr.data.store import Storage, digest_of, pool
from security.errors import DataError

REQUIRED = ("jpeg", "offsets", "image_id", "label", "site", "class_names")
# Column of units, most private first, and what it is called.
UNIT_COLUMNS = (("patient_id", "patient"), ("lesion_id", "lesion"), ("study_id", "study"))
# Named splits; `fold` is the benchmark's own, which splits by image.
SPLIT_COLUMNS = {"fold": False, "fold_lesion": True, "fold_patient": True}


def load_npz(path: Path, *, image_size: int, storage: Storage) -> Catalogue:
    """The catalogue of the file (or of the only npz in the folder); decoded once per process and size."""
    file = _find(path)
    stat = file.stat()
    return _load(file, stat.st_mtime_ns, stat.st_size, image_size, storage)


def _find(path: Path) -> Path:
    if path.is_dir():
        found = sorted(path.glob("*.npz"))
        if len(found) != 1:
            raise DataError(f"folder holds {len(found)} npz files, not one", where=str(path), hint="name the file")
        return found[0]
    if not path.exists():
        raise DataError("file is missing", where=str(path), hint="see docs/data.md for where data is looked for")
    return path


@lru_cache(maxsize=2)
def _load(file: Path, _mtime: int, _size: int, image_size: int, storage: Storage) -> Catalogue:
    columns = _columns(file)
    fingerprint = hashlib.sha256(columns["jpeg"].tobytes()).hexdigest()
    labels = columns["label"].astype(np.int64)
    class_names = _text(columns["class_names"])
    ids = _text(columns["image_id"])
    _check(file, labels, len(class_names), ids)
    images = _decode(file, columns, image_size, storage, fingerprint)
    unit_column, unit_kind = next(((c, k) for c, k in UNIT_COLUMNS if c in columns), ("image_id", "image"))
    splits = {
        name: NamedSplit(sides=_sides(file, columns[name]), grouped=grouped)
        for name, grouped in SPLIT_COLUMNS.items()
        if name in columns
    }
    return Catalogue(
        name=file.stem,
        class_names=class_names,
        images=images,
        labels=labels,
        ids=ids,
        units=_text(columns[unit_column]),
        unit_kind=unit_kind,
        sites=_text(columns["site"]),
        splits=splits,
        where=file.name,
        fingerprint=fingerprint,
    )


def _columns(file: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            columns = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"not a plain npz file ({type(error).__name__})", where=str(file)) from None
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise DataError(f"array {missing[0]} is missing", where=str(file), hint=f"needed: {', '.join(REQUIRED)}")
    rows = len(columns["label"])
    if len(columns["offsets"]) != rows + 1:
        raise DataError(f"{len(columns['offsets'])} offsets for {rows} images", where=str(file))
    return columns


def _text(column: NDArray[Any]) -> tuple[str, ...]:
    return tuple(np.char.decode(column, "utf-8").tolist() if column.dtype.kind == "S" else column.astype(str).tolist())


def _sides(file: Path, column: NDArray[Any]) -> tuple[str, ...]:
    sides = _text(column)
    for row, side in enumerate(sides):
        if side not in SIDES:
            raise DataError("the split is unknown", where=f"{file.name} row {row}", hint=f"one of {', '.join(SIDES)}")
    return sides


def _check(file: Path, labels: NDArray[np.int64], classes: int, ids: tuple[str, ...]) -> None:
    if not classes:
        raise DataError("the class list is empty", where=file.name)
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"label {labels[wrong[0]]} is not one of {classes} classes", where=f"{file.name} row {wrong[0]}"
        )
    seen: dict[str, int] = {}
    for row, name in enumerate(ids):
        if seen.setdefault(name, row) != row:
            raise DataError(f"image id of row {seen[name]} occurs again", where=f"{file.name} row {row}")


def _decode(
    file: Path, columns: dict[str, NDArray[Any]], image_size: int, storage: Storage, fingerprint: str
) -> NDArray[np.uint8]:
    data, offsets = columns["jpeg"].tobytes(), columns["offsets"].tolist()

    def decode(row: int) -> NDArray[np.uint8]:
        image = open_image(data[offsets[row] : offsets[row + 1]], channels=3, where=f"{file.name} row {row}")
        return squash(image, image_size)

    key = digest_of(("npz", fingerprint, "squash", image_size))
    return pool(decode, len(offsets) - 1, (image_size, image_size, 3), key=key, storage=storage)
