"""Two forms a hospital can bring without writing code: a CSV manifest, and a folder per class (docs/data.md)."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from npr.data.catalogue import SIDES, Catalogue
from npr.data.decode import open_image, squash
from npr.data.rows import Decoding, Row, catalogue_of
from npr.data.store import Storage
from npr.data.table import Entry, read_table
from security.errors import DataError

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
    storage: Storage,
    class_names: Sequence[str] | None = None,
    decoding: Decoding | None = None,
) -> Catalogue:
    """The catalogue of a manifest `image,label[,patient][,split]`; images are looked for beside it.

    :param class_names: the federation's classes in its order; without them, the labels that occur, sorted.
    """
    rows, unit_kind = read_manifest(path)
    return catalogue_of(
        rows,
        class_names if class_names is not None else _learnt(rows, {row.label for row in rows}, path),
        name=path.stem,
        where=path.name,
        unit_kind=unit_kind,
        decoding=decoding or image_decoding(image_size),
        storage=storage,
    )


def read_manifest(path: Path) -> tuple[list[Row], str]:
    """The rows and what their unit is: the patient if there is such a column, else the lesion, the study, the image."""
    table = read_table(path, ("image", "label"), known=COLUMNS)
    unit = _unit_of(table.columns, path)
    return [_row(entry, path.parent, unit) for entry in table.entries], unit or "image"


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


def _row(entry: Entry, root: Path, unit: str | None) -> Row:
    fields = entry.fields
    for needed in ("image", "label", *([unit] if unit else [])):
        if not fields[needed]:
            raise DataError(f"{needed} is empty", where=entry.where)
    return Row(
        id=Path(os.path.normpath(fields["image"])).as_posix(),
        path=root / fields["image"],
        label=fields["label"],
        where=entry.where,
        unit=fields[unit] if unit else None,
        site=fields.get("site") or "site",
        side=fields.get("split") or None,
    )


def load_folders(
    path: Path,
    *,
    image_size: int,
    storage: Storage,
    class_names: Sequence[str] | None = None,
    decoding: Decoding | None = None,
) -> Catalogue:
    """`PATH/<class>/<image>`, or `PATH/train|test|validation/<class>/<image>`. Without ids, each image is a unit."""
    tops = _folders(path, path)
    split = bool(tops) and {top.name for top in tops} <= set(SIDES)
    suffixes = (".dcm",) if decoding else SUFFIXES
    sides = [(side, side.name) for side in tops] if split else [(path, None)]
    rows = [row for top, side in sides for row in _listed(path, top, side, class_names or (), suffixes)]
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


def _listed(root: Path, top: Path, side: str | None, classes: Sequence[str], suffixes: Sequence[str]) -> Iterator[Row]:
    """The images of one side. Files, and folders that are no class, are often called after people: they are counted."""
    for place, folder in enumerate(_folders(top, root), start=1):
        called = folder.name if folder.name in classes else f"folder {place}"
        shown = f"{side}/{called}" if side else called
        for number, file in enumerate(_files(folder, shown, suffixes), start=1):
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


def _files(folder: Path, shown: str, suffixes: Sequence[str]) -> list[Path]:
    with _listing(shown):
        found = sorted(folder.iterdir())
    files = [entry for entry in found if not entry.name.startswith(".") and entry.name != "Thumbs.db"]
    for number, file in enumerate(files, start=1):
        _check_name(file, f"{shown} file {number}")
        if file.suffix.lower() not in suffixes:
            raise DataError(
                "not an image of a known type",
                where=f"{shown} file {number}",
                hint=f"folders and files are counted in the order of their names; known: {', '.join(suffixes)}",
            )
    return files


def _check_name(path: Path, where: str) -> None:
    """Archives of old Windows machines unpack to names that are no text; they could not be written to any record."""
    try:
        path.name.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError("the name is not UTF-8", where=where, hint="rename it, e.g. with convmv") from None


def _learnt(rows: Sequence[Row], names: set[str], path: Path) -> list[str]:
    """The classes that occur, where nobody has listed them. One that occurs once is most probably a typing mistake."""
    counts = Counter(row.label for row in rows)
    alone = [row.where for row in rows if counts[row.label] == 1]
    if alone:
        _warn_once(path, alone[0], len(alone) - 1)
    return sorted(names)


@cache
def _warn_once(path: Path, where: str, others: int) -> None:
    """However often a process opens its data. The label stays untold: where columns are mixed up, it is a patient."""
    more = f", as in {others} more" if others else ""
    log.warning(
        "%s: no other image has this class%s; if it is mistyped, list the classes: %s?classes=A,B,C", where, more, path
    )
