"""Two forms of data that need no code: a CSV manifest, and one folder for each class (docs/data.md).

The first part, from rows of image files to a catalogue, is shared with DICOM and the layouts of benchmarks.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import DataError
from npr.config import LabelsOfImage
from npr.data.catalogue import NO_SITE, Catalogue, NamedSplit, check_class_list, labels_of, targets_of
from npr.data.columns import ColumnEntry, read_table
from npr.data.dataset import IMAGENET_MEAN, IMAGENET_STD
from npr.data.sides import SIDES, on_two_sides, spelling_error, spelt_twice, unit_key
from npr.data.store import Fault, FaultKind, ImageStorage, blank_rows, digest_of, open_image, pool, squash

# From rows of image files to a catalogue. Everything that can be wrong in the table is checked before the first image
# is decoded. Errors name the file and the row and never the patient, because people print and mail them.

# Reads one file (`where` for its errors) as uint8 (H, W, C) of the wanted size.
Reader = Callable[[Path, str], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One image as a table describes it. `where` is what errors call it, e.g. `manifest.csv row 12`.

    :ivar read: reads this row in place of the data set's own way, where one file holds several images.
    """

    id: str
    path: Path
    label: str
    where: str
    unit: str | None = None
    site: str = NO_SITE
    side: str | None = None  # None where there is no such column, empty where it says nothing
    read: Reader | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How files become pixels; `settings` names everything that changes them and goes into the cache key."""

    read: Reader
    channels: int
    image_size: int
    settings: str
    dicom: bool = False


Expand = Callable[[Sequence[Row]], Iterable[Row]]


def check_rows(
    rows: Sequence[Row],
    class_names: Sequence[str],
    *,
    where: str,
    storage: ImageStorage,
    labels: LabelsOfImage = "one",
) -> list[Row]:
    """The rows that can be used. Unknown labels and sides, repeated ids and missing files are reported, in order."""
    check_class_list(class_names, where=where, many=labels == "many")
    if not rows and not storage.per_unit:
        raise DataError("there is no image", where=where)
    good, seen = list[Row](), dict[tuple[str, str], str]()
    for row in rows:
        # An image that another patient has too is no reason to leave a patient's row out, where each counts alone.
        fault = _fault(row, class_names, seen, (row.id, _unit(row) if storage.per_unit else ""), labels)
        if fault is None:
            good.append(row)
        else:
            storage.report(fault)
    return good


def _fault(
    row: Row,
    class_names: Sequence[str],
    seen: dict[tuple[str, str], str],
    key: tuple[str, str],
    labels: LabelsOfImage,
) -> Fault | None:
    """The first thing that is wrong with a row, and a note of its id in `seen`."""

    def fault(kind: FaultKind, what: str, hint: str) -> Fault:
        return Fault(kind=kind, error=DataError(what, where=row.where, hint=hint))

    for name in labels_of(row.label, labels):
        if name not in class_names:
            return fault(FaultKind.LABEL, "the label is not in the class list", _meant(name, class_names))
    if row.side and row.side not in SIDES:
        return fault(FaultKind.SPLIT, "the split is unknown", _meant(row.side, SIDES))
    if seen.setdefault(key, row.where) != row.where:
        return fault(FaultKind.REPEATED, f"the same image as in {seen[key]}", "list every image once")
    if not _readable(row.path):
        hint = "copy it there and let this user read it, or drop the row"
        return fault(FaultKind.MISSING, "image file is missing", hint)
    return None


def _meant(word: str, known: Sequence[str]) -> str:
    """What was written is not repeated: where columns are mixed up, it is a patient."""
    near = get_close_matches(word, known, n=1)
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
        report(Fault(kind=FaultKind.TWO_SIDES, error=error))
    first = {_unit(row): row.side for row in reversed(rows)}
    return [replace(row, side=first[_unit(row)]) for row in rows]


def _unit(row: Row) -> str:
    return row.unit if row.unit is not None else row.id


def _one_spelling(rows: list[Row], unit_kind: str, report: Callable[[Fault], None]) -> list[Row]:
    """Units that are written in two ways are left out, in all of their rows, if `report` lets them."""
    units = [_unit(row) for row in rows]
    twice = set[str]()
    for row, first in spelt_twice(units):
        error = spelling_error(unit_kind, rows[row].where, rows[first].where)
        report(Fault(kind=FaultKind.SPELLING, error=error))
        twice.add(unit_key(units[row]))
    return [row for row in rows if unit_key(_unit(row)) not in twice] if twice else rows


def catalogue_of(
    rows: Sequence[Row],
    class_names: Sequence[str],
    *,
    name: str,
    where: str,
    unit_kind: str,
    decoding: Decoding,
    storage: ImageStorage,
    split_name: str = "split",
    split_grouped: bool = True,
    labels: LabelsOfImage = "one",
) -> Catalogue:
    """Check, decode, assemble. A split is taken over when every row has a side. Faults go to the storage's `report`."""
    rows = check_rows(rows, class_names, where=where, storage=storage, labels=labels)
    if unit_kind != "image":
        rows = _one_spelling(rows, unit_kind, storage.report)
    has_split = any(row.side for row in rows)
    if storage.per_unit:
        # By the header and not by who is in the table; a row that says nothing is on no side.
        has_split = not rows or any(row.side is not None for row in rows)
    elif has_split:
        for row in rows:
            if not row.side:
                raise DataError("split is empty", where=row.where, hint="fill the column for all rows, or remove it")
    if has_split and split_grouped:
        rows = _grouped(rows, unit_kind, storage.report)
    images_digest = _images_digest(rows, decoding)
    size = decoding.image_size
    images = pool(
        lambda index: (rows[index].read or decoding.read)(rows[index].path, rows[index].where),
        len(rows),
        (size, size, decoding.channels),
        key=images_digest,
        storage=storage,
    )
    return Catalogue(
        name=name,
        class_names=tuple(class_names),
        images=images,
        labels=targets_of([row.label for row in rows], class_names, labels),
        ids=tuple(row.id for row in rows),
        units=tuple(_unit(row) for row in rows),
        unit_kind=unit_kind,
        sites=tuple(row.site for row in rows),
        splits={split_name: NamedSplit(sides=tuple(row.side or "" for row in rows), grouped=split_grouped)}
        if has_split
        else {},
        mean=IMAGENET_MEAN if decoding.channels == 3 else (0.456,),
        std=IMAGENET_STD if decoding.channels == 3 else (0.224,),
        row_names=tuple(row.where for row in rows),
        where=where,
        fingerprint=images_digest,
        per_unit=storage.per_unit,
        unusable=blank_rows(images) if storage.per_unit else frozenset(),
    )


def _images_digest(rows: Sequence[Row], decoding: Decoding) -> str:
    """Names the files by id, size and time of change, so that an edited image is decoded again."""
    parts: list[object] = [decoding.settings, decoding.image_size, decoding.channels]
    for row in rows:
        stat = row.path.stat()
        parts += [row.id, stat.st_size, stat.st_mtime_ns]
    return digest_of(parts)


log = logging.getLogger("npr.data")

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
UNITS = ("patient", "lesion", "study")
COLUMNS = ("image", "label", *UNITS, "split", "site")


def image_decoding(image_size: int, channels: int = 3) -> Decoding:
    """PNG, JPEG and the like, squashed to a square."""
    return Decoding(
        read=lambda path, where: squash(open_image(path, channels=channels, where=where), image_size),
        channels=channels,
        image_size=image_size,
        settings="image squash bilinear",
    )


def load_csv(
    path: Path,
    *,
    image_size: int,
    storage: ImageStorage,
    class_names: Sequence[str] | None = None,
    decoding: Decoding | None = None,
    expand: Expand | None = None,
    listed: Callable[[Path, ImageStorage], tuple[list[Row], str] | None] = lambda *_: None,
    labels: LabelsOfImage = "one",
) -> Catalogue:
    """The catalogue of a manifest `image,label[,patient][,split]`; images are looked for beside it.

    :param class_names: the federation's classes in its order; without them, the labels that occur, sorted.
    :param expand: makes several rows of one, where a file holds several images.
    :param listed: reads a table that names its images in another way; None where this one does not.
    """
    rows, unit_kind = listed(path, storage) or read_manifest(path, storage)
    rows = list(expand(rows)) if expand else rows
    return catalogue_of(
        rows,
        class_names if class_names is not None else _learnt(rows, None, path, labels),
        name=path.stem,
        where=path.name,
        unit_kind=unit_kind,
        decoding=decoding or image_decoding(image_size),
        storage=storage,
        labels=labels,
    )


def read_manifest(path: Path, storage: ImageStorage) -> tuple[list[Row], str]:
    """The rows and what their unit is: the patient if there is such a column, else the lesion, the study, the image."""

    def refuse(error: DataError) -> None:
        storage.report(Fault(kind=FaultKind.EMPTY, error=error))

    table = read_table(path, ("image", "label"), known=COLUMNS, refuse=refuse, each=storage.per_unit)
    unit = _unit_of(table.columns, path)
    rows = list[Row]()
    for entry in table.entries:
        try:
            rows.append(_row(entry, path.parent, unit))
        except DataError as error:
            refuse(error)
    return rows, unit or "image"


def _unit_of(names: Sequence[str], path: Path) -> str | None:
    for name in names:
        # A column meant as the patient but spelt otherwise would silently make the image the unit of privacy.
        near = next((known for known in (*UNITS, "split") if known in name.lower() and name != known), None)
        if near:
            raise DataError(
                f"column {name!r} looks like {near!r}",
                where=f"{path.name} row 1",
                hint=f"rename it to {near}, or remove it",
            )
        if names.count(name) > 1:
            raise DataError(f"column {name!r} occurs twice", where=f"{path.name} row 1")
    return next((unit for unit in UNITS if unit in names), None)


def _row(entry: ColumnEntry, root: Path, unit: str | None) -> Row:
    fields = entry.fields
    for needed in ("image", "label", *([unit] if unit else [])):
        # White space of every kind, and what cannot be seen, is no name.
        if not unit_key(fields[needed]):
            raise DataError(f"{needed} is empty", where=entry.where)
    return Row(
        id=image_id(fields["image"]),
        path=root / fields["image"],
        label=fields["label"],
        where=entry.where,
        unit=fields[unit] if unit else None,
        site=fields.get("site") or NO_SITE,
        side=fields.get("split"),
    )


def image_id(written: str) -> str:
    """What an image is called, however its path is written in a table."""
    return Path(os.path.normpath(written)).as_posix()


def load_folders(
    path: Path,
    *,
    image_size: int,
    storage: ImageStorage,
    class_names: Sequence[str] | None = None,
    decoding: Decoding | None = None,
    expand: Expand | None = None,
) -> Catalogue:
    """`PATH/<class>/<image>`, or `PATH/train|test|validation/<class>/<image>`. Without ids, each image is a unit."""
    tops = _folders(path, path)
    split = bool(tops) and {top.name for top in tops} <= set(SIDES)
    suffixes = (".dcm",) if decoding else SUFFIXES
    sides = [(side, side.name) for side in tops] if split else [(path, None)]
    listed = [_listed(path, top, side, class_names or (), suffixes, storage.report) for top, side in sides]
    rows = [row for part in listed for row in part]
    rows = list(expand(rows)) if expand else rows
    return catalogue_of(
        rows,
        class_names
        if class_names is not None
        else _learnt(rows, {folder.name for top, _ in sides for folder in _folders(top, path)}, path),
        name=path.name,
        where=str(path),
        unit_kind="image",
        decoding=decoding or image_decoding(image_size),
        storage=storage,
    )


def _listed(
    root: Path,
    top: Path,
    side: str | None,
    classes: Sequence[str],
    suffixes: Sequence[str],
    report: Callable[[Fault], None],
) -> Iterator[Row]:
    """The images of one side. Files, and folders that are no class, are often called after people: they are counted."""
    for place, folder in enumerate(_folders(top, root), start=1):
        called = folder.name if folder.name in classes else f"folder {place}"
        shown = f"{side}/{called}" if side else called
        for number, file in _files(folder, shown, suffixes, report):
            name = file.relative_to(root).as_posix()
            yield Row(id=name, path=file, label=folder.name, where=f"{root.name}/{shown} file {number}", side=side)


@contextmanager
def _listing(where: str) -> Iterator[None]:
    """The operating system's own error would name what lies in the folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"folder cannot be read ({type(error).__name__})",
            where=where,
            hint="let this user read it and what is in it",
        ) from None


def _folders(path: Path, root: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError("folder is missing", where=str(path))
    with _listing(str(root)):
        found = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for place, folder in enumerate(found, start=1):
        _check_name(folder, f"{root.name} folder {place}")
    return found


def _files(
    folder: Path, shown: str, suffixes: Sequence[str], report: Callable[[Fault], None]
) -> Iterator[tuple[int, Path]]:
    with _listing(shown):
        found = sorted(folder.iterdir())
    files = [entry for entry in found if not entry.name.startswith(".") and entry.name != "Thumbs.db"]
    for number, file in enumerate(files, start=1):
        where = f"{shown} file {number}"
        try:
            _check_name(file, where)
            if file.suffix.lower() not in suffixes:
                raise DataError(
                    "not an image of a known type",
                    where=where,
                    hint=f"folders and files are counted in the order of their names; known: {', '.join(suffixes)}",
                )
        except DataError as error:
            report(Fault(kind=FaultKind.FILE, error=error))
        else:
            yield number, file


def _check_name(path: Path, where: str) -> None:
    """Archives of old Windows machines unpack to names that are no text; they could not be written to any record."""
    try:
        path.name.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError("the name is not UTF-8", where=where, hint="rename it, e.g. with convmv") from None


def _learnt(
    rows: Sequence[Row], names: set[str] | None, path: Path, labels: LabelsOfImage = "one"
) -> list[str]:
    """The classes that occur, where nobody has listed them. One that occurs once is most probably a typing mistake."""
    named = [(row.where, labels_of(row.label, labels)) for row in rows]
    counts = Counter(name for _, found in named for name in found)
    alone = [where for where, found in named if any(counts[name] == 1 for name in found)]
    if alone:
        _warn_once(path, alone[0], len(alone) - 1)
    return sorted(counts if names is None else names)


@cache
def _warn_once(path: Path, where: str, others: int) -> None:
    """Once in a process. The label is not repeated: where columns are mixed up, it is a patient."""
    more = f", as in {others} more" if others else ""
    log.warning(
        "%s: no other image has this class%s; if it is mistyped, list the classes: %s?classes=A,B,C", where, more, path
    )
