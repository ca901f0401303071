"""A whole data set in one npz: JPEG bytes end to end with offsets, and a row of columns per image (docs/data.md)."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import DataError
from npr.data.catalogue import Catalogue, NamedSplit, check_class_list
from npr.data.columns import Arrays
from npr.data.sides import SIDES
from npr.data.store import Fault, FaultKind, ImageStorage, blank_rows, digest_of, open_image, pool, squash

REQUIRED = ("jpeg", "offsets", "image_id", "label", "site", "class_names")
# Column of units, most private first, and what it is called.
UNIT_COLUMNS = (("patient_id", "patient"), ("lesion_id", "lesion"), ("study_id", "study"))
# Named splits; `fold` is the benchmark's own, which splits by image.
SPLIT_COLUMNS = {"fold": False, "fold_lesion": True, "fold_patient": True}


def load_npz(path: Path, *, image_size: int, storage: ImageStorage) -> Catalogue:
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
def _load(file: Path, _mtime: int, _size: int, image_size: int, storage: ImageStorage) -> Catalogue:
    """Everything in the columns is checked before the first image is decoded."""
    arrays = Arrays.read(file, REQUIRED, (*(column for column, _ in UNIT_COLUMNS), *SPLIT_COLUMNS))
    labels = arrays.numbers("label")
    rows = len(labels)
    class_names = arrays.words("class_names")
    check_class_list(class_names, where=file.name)
    ids = arrays.words("image_id", rows)
    unit_column, unit_kind = next(((c, k) for c, k in UNIT_COLUMNS if c in arrays), ("image_id", "image"))
    units, sites = arrays.words(unit_column, rows), arrays.words("site", rows)
    bad = _faulty(file, labels, len(class_names), ids, units, storage)
    labels[sorted(bad)] = 0
    splits = {
        name: NamedSplit(sides=_sides(file, arrays.words(name, rows), storage), grouped=grouped)
        for name, grouped in SPLIT_COLUMNS.items()
        if name in arrays
    }
    data = _jpeg(arrays)
    fingerprint = hashlib.sha256(data).hexdigest()
    images = _decode(file, data, arrays.numbers("offsets", rows + 1), image_size, storage, fingerprint)
    return Catalogue(
        name=file.stem,
        class_names=class_names,
        images=images,
        labels=labels,
        ids=ids,
        units=units,
        unit_kind=unit_kind,
        sites=sites,
        splits=splits,
        where=file.name,
        fingerprint=fingerprint,
        per_unit=storage.per_unit,
        unusable=bad | blank_rows(images) if storage.per_unit else bad,
    )


def _jpeg(arrays: Arrays) -> bytes:
    values = arrays.column("jpeg")
    if values.dtype.itemsize != 1:
        raise DataError(f"array jpeg holds {values.dtype}, not bytes", where=arrays.file.name, hint="save it as uint8")
    return values.tobytes()


def _sides(file: Path, sides: tuple[str, ...], storage: ImageStorage) -> tuple[str, ...]:
    for row, side in enumerate(sides):
        if side not in SIDES:
            hint = f"one of {', '.join(SIDES)}"
            error = DataError("the split is unknown", where=f"{file.name} row {row}", hint=hint)
            storage.report(Fault(kind=FaultKind.SPLIT, error=error))
    return tuple(side if side in SIDES else "" for side in sides)


def _faulty(
    file: Path,
    labels: NDArray[np.int64],
    classes: int,
    ids: tuple[str, ...],
    units: tuple[str, ...],
    storage: ImageStorage,
) -> frozenset[int]:
    """Rows that cannot be used; where nothing is left out, the first of them raises."""
    bad = set[int]()

    def report(kind: FaultKind, row: int, what: str) -> None:
        storage.report(Fault(kind=kind, error=DataError(what, where=f"{file.name} row {row}")))
        bad.add(row)

    for row in np.flatnonzero((labels < 0) | (labels >= classes)).tolist():
        report(FaultKind.LABEL, row, f"label {labels[row]} is not one of {classes} classes")
    seen: dict[tuple[str, str], int] = {}
    for row, name in enumerate(ids):
        key = (name, units[row] if storage.per_unit else "")
        if seen.setdefault(key, row) != row:
            report(FaultKind.REPEATED, row, f"image id of row {seen[key]} occurs again")
    return frozenset(bad)


def _decode(
    file: Path, data: bytes, starts: NDArray[np.int64], image_size: int, storage: ImageStorage, fingerprint: str
) -> NDArray[np.uint8]:
    offsets = starts.tolist()

    def decode(row: int) -> NDArray[np.uint8]:
        image = open_image(data[offsets[row] : offsets[row + 1]], channels=3, where=f"{file.name} row {row}")
        return squash(image, image_size)

    key = digest_of(("npz", fingerprint, "squash", image_size))
    return pool(decode, len(offsets) - 1, (image_size, image_size, 3), key=key, storage=storage)
