"""Rows of image files to a catalogue: the part that CSV manifests, folders, DICOM and benchmark layouts share.

Everything that can be wrong in the table is checked before the first image is decoded. Errors name the file and the
row and never the patient, because they are printed, mailed and pasted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from npr.data.catalogue import SIDES, Catalogue, NamedSplit, check_class_list
from npr.data.dataset import IMAGENET_MEAN, IMAGENET_STD
from npr.data.faults import Fault, Kind
from npr.data.splits import on_two_sides
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


def check_rows(
    rows: Sequence[Row], class_names: Sequence[str], *, where: str, report: Callable[[Fault], None]
) -> list[Row]:
    """The rows that can be used. Unknown labels and sides, repeated ids and missing files go to `report`, in order."""
    check_class_list(class_names, where=where)
    if not rows:
        raise DataError("there is no image", where=where)
    good, seen = list[Row](), dict[str, str]()
    for row in rows:
        fault = _fault(row, class_names, seen)
        if fault is None:
            good.append(row)
        else:
            report(fault)
    return good


def _fault(row: Row, class_names: Sequence[str], seen: dict[str, str]) -> Fault | None:
    """The first thing that is wrong with a row, and a note of its id in `seen`."""

    def fault(kind: Kind, what: str, hint: str) -> Fault:
        return Fault(kind=kind, error=DataError(what, where=row.where, hint=hint))

    if row.label not in class_names:
        return fault(Kind.LABEL, "the label is not in the class list", _meant(row.label, class_names))
    if row.side is not None and row.side not in SIDES:
        return fault(Kind.SPLIT, "the split is unknown", _meant(row.side, SIDES))
    if seen.setdefault(row.id, row.where) != row.where:
        return fault(Kind.REPEATED, f"the same image as in {seen[row.id]}", "list every image once")
    if not _readable(row.path):
        return fault(Kind.MISSING, "image file is missing", "copy it there and let this user read it, or drop the row")
    return None


def _meant(told: str, known: Sequence[str]) -> str:
    """What was written stays untold: where columns are mixed up, it is a patient."""
    near = get_close_matches(told, known, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}one of {', '.join(known)}"


def _readable(path: Path) -> bool:
    """An operating system's own error would name the file."""
    try:
        return path.is_file() and os.access(path, os.R_OK)
    except OSError:
        return False


def _grouped(rows: list[Row], unit_kind: str, report: Callable[[Fault], None]) -> list[Row]:
    """Rows whose unit began on another side go there, if `report` lets them: so they are still looked at."""
    sides, names = [row.side or "" for row in rows], [row.where for row in rows]
    for _, error in on_two_sides([_unit(row) for row in rows], sides, unit_kind=unit_kind, names=names):
        report(Fault(kind=Kind.TWO_SIDES, error=error))
    first = {_unit(row): row.side for row in reversed(rows)}
    return [replace(row, side=first[_unit(row)]) for row in rows]


def _unit(row: Row) -> str:
    return row.unit if row.unit is not None else row.id


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
    """Check, decode, assemble. A split is taken over when every row has a side. Faults go to the storage's `report`."""
    rows = check_rows(rows, class_names, where=where, report=storage.report)
    if any(row.side for row in rows):
        for row in rows:
            if row.side is None:
                raise DataError("split is empty", where=row.where, hint="fill the column for all rows, or remove it")
        rows = _grouped(rows, unit_kind, storage.report) if split_grouped else rows
    sides = tuple(row.side for row in rows if row.side is not None)
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
        units=tuple(_unit(row) for row in rows),
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
