"""Rows of image files to a catalogue: the part that CSV manifests, folders, DICOM and benchmark layouts share.

Everything that can be wrong in the table is checked before the first image is decoded. Errors name the file and the
row and never the patient, because they are printed, mailed and pasted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from npr.data.catalogue import SIDES, Catalogue, NamedSplit
from npr.data.dataset import IMAGENET_MEAN, IMAGENET_STD
from npr.data.store import Storage, digest_of, pool
from security.errors import DataError

# Reads one file (`where` for its errors) as uint8 (H, W, C) of the wanted size.
Reader = Callable[[Path, str], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One image as a table describes it. `where` is what errors call it, e.g. `manifest.csv row 12`."""

    id: str
    path: Path
    label: str
    where: str
    unit: str | None = None
    site: str = "site"
    side: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How files become pixels; `settings` names everything that changes them and goes into the cache key."""

    read: Reader
    channels: int
    image_size: int
    settings: str


def check_rows(rows: Sequence[Row], class_names: Sequence[str], *, where: str) -> None:
    """Empty lists, unknown labels and sides, repeated ids and missing files, in the order of the rows."""
    if not class_names:
        raise DataError("the class list is empty", where=where)
    if len(set(class_names)) != len(class_names):
        raise DataError("the class list names a class twice", where=where)
    if not rows:
        raise DataError("there is no image", where=where)
    known, seen = set(class_names), dict[str, str]()
    for row in rows:
        if row.label not in known:
            raise DataError(
                f"label {row.label!r} is not in the class list",
                where=row.where,
                hint=f"one of {', '.join(class_names)}",
            )
        if row.side is not None and row.side not in SIDES:
            raise DataError(f"split {row.side!r} is unknown", where=row.where, hint=f"one of {', '.join(SIDES)}")
        if seen.setdefault(row.id, row.where) != row.where:
            raise DataError(f"the same image as in {seen[row.id]}", where=row.where, hint="list every image once")
        if not row.path.is_file():
            raise DataError("image file is missing", where=row.where, hint=f"looked in {row.path.parent}")


def catalogue_of(
    rows: Sequence[Row],
    class_names: Sequence[str],
    *,
    name: str,
    where: str,
    unit_kind: str,
    decoding: Decoding,
    storage: Storage,
    split_name: str = "split",
    split_grouped: bool = True,
) -> Catalogue:
    """Check, decode, assemble. A split is taken over when every row has a side."""
    check_rows(rows, class_names, where=where)
    sides = tuple(row.side for row in rows if row.side is not None)
    if sides and len(sides) != len(rows):
        row = next(row for row in rows if row.side is None)
        raise DataError("split is empty", where=row.where, hint="fill the column for all rows, or remove it")
    fingerprint = _fingerprint(rows, decoding)
    size = decoding.image_size
    number: Mapping[str, int] = {label: index for index, label in enumerate(class_names)}
    return Catalogue(
        name=name,
        class_names=tuple(class_names),
        images=pool(
            lambda index: decoding.read(rows[index].path, rows[index].where),
            len(rows),
            (size, size, decoding.channels),
            key=fingerprint,
            storage=storage,
        ),
        labels=np.array([number[row.label] for row in rows], dtype=np.int64),
        ids=tuple(row.id for row in rows),
        units=tuple(row.unit if row.unit is not None else row.id for row in rows),
        unit_kind=unit_kind,
        sites=tuple(row.site for row in rows),
        splits={split_name: NamedSplit(sides=sides, grouped=split_grouped)} if sides else {},
        mean=IMAGENET_MEAN if decoding.channels == 3 else (0.456,),
        std=IMAGENET_STD if decoding.channels == 3 else (0.224,),
        row_names=tuple(row.where for row in rows),
        where=where,
        fingerprint=fingerprint,
    )


def _fingerprint(rows: Sequence[Row], decoding: Decoding) -> str:
    """Names the files by id, size and time of change, so that an edited image is decoded again."""
    parts: list[object] = [decoding.settings, decoding.image_size, decoding.channels]
    for row in rows:
        stat = row.path.stat()
        parts += [row.id, stat.st_size, stat.st_mtime_ns]
    return digest_of(parts)
