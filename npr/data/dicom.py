"""DICOM data sets: files in a table or in folders, rows by their identifiers, and the layout of RSNA-ICH."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from lazaret.errors import ConfigError, DataError
from npr.config import LabelsOfImage
from npr.data.catalogue import NO_LABEL, NO_SITE, SEPARATOR, Catalogue
from npr.data.columns import IDENTIFIERS, LISTING, Arrays, read_table, text_of
from npr.data.dicom_pixels import DicomView, Window, as_data_error, frame_count, read_header
from npr.data.manifest import UNITS, Row, catalogue_of, load_csv, load_folders
from npr.data.sides import unit_key
from npr.data.store import Fault, FaultKind, ImageStorage

log = logging.getLogger("npr.data")

# Alphabetical, as in the RSNA challenge; the split file itself holds only numbers.
ICH_CLASSES: Final = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
RSNA_LABELS: Final = "stage_2_train.csv"  # of the challenge
_ANY: Final = "any"  # its sixth row for each slice: whether one of the others is there


def load_dicom(
    path: Path,
    *,
    image_size: int,
    storage: ImageStorage,
    class_names: Sequence[str] | None = None,
    window: Window | None = None,
    frame: int | str = "middle",
    channels: int = 1,
    files: Path | None = None,
    labels: LabelsOfImage = "one",
) -> Catalogue:
    """DICOM files listed by a CSV table, sorted into folders per class, or in the layout of RSNA-ICH.

    :param frame: first, middle, a number from 1 on, or all: every frame of a file is then an image of its own.
    :param files: where the files are that a table names by identifiers; beside the table and below if left out.
    """
    if files is not None and path.is_dir():
        raise ConfigError("files= belongs to a table of identifiers", where=str(path), hint="dicom:TABLE?files=FOLDER")
    every = frame == "all"
    view = DicomView(window=window, frame="middle" if every else frame, channels=channels)  # type: ignore[arg-type]
    if path.is_dir() and any(path.glob("*.npz")):
        if class_names is not None and tuple(class_names) != ICH_CLASSES:
            raise ConfigError(
                "the classes of RSNA-ICH are fixed: the split file has only their numbers",
                where=str(path),
                hint=f"leave the class list out, or give {', '.join(ICH_CLASSES)}",
            )
        return load_rsna(path, image_size=image_size, storage=storage, view=view, labels=labels)
    table = partial(load_csv, listed=partial(_by_identifier, files=files), labels=labels)
    load = load_folders if path.is_dir() else table
    catalogue = load(
        path,
        image_size=image_size,
        storage=storage,
        class_names=class_names,
        decoding=view.decoding(image_size),
        expand=partial(_frames, view=view, image_size=image_size, storage=storage) if every else None,
    )
    if catalogue.unit_kind != "image":
        return catalogue
    root = files or (path if path.is_dir() else path.parent)
    paths = [root / _file_of(name) for name in catalogue.ids]
    if storage.per_unit:
        return _by_patient(catalogue, paths, storage)
    units, kind = header_units(paths, catalogue.row_names)
    return replace(catalogue, units=units, unit_kind=kind) if kind != "image" else catalogue


def _by_patient(catalogue: Catalogue, paths: Sequence[Path], storage: ImageStorage) -> Catalogue:
    """Where each patient counts alone, a slice without PatientID is left out; it does not change what others are."""
    units, missing = list[str](), set[int]()
    for row, (path, where) in enumerate(zip(paths, catalogue.row_names, strict=True)):
        try:
            unit = _units(path, where)[0]
            if not unit_key(unit):
                raise DataError("the header names no patient", where=where, hint="add a column `patient` to the table")
        except DataError as error:
            storage.report(Fault(kind=FaultKind.EMPTY, error=error))
            missing.add(row)
            unit = f"no patient {row}"
        units.append(unit)
    return replace(catalogue, units=tuple(units), unit_kind="patient", unusable=catalogue.unusable | missing)


def _file_of(identity: str) -> str:
    """The file of an image; a frame has the id `FILE#FRAME`."""
    name, mark, frame = identity.rpartition("#")
    return name if mark and frame.isdigit() else identity


def _frames(rows: Sequence[Row], *, view: DicomView, image_size: int, storage: ImageStorage) -> Iterator[Row]:
    """Every frame as a row of its own, with the label and the unit of its file."""
    for row in rows:
        if not row.path.is_file():
            yield row  # reported where all missing files are
            continue
        try:
            frames = frame_count(read_header(row.path, row.where, pixels=False, only=["NumberOfFrames"]), row.where)
        except DataError as error:
            storage.report(Fault(kind=FaultKind.UNREADABLE, error=error))
            continue
        for number in range(1, frames + 1):
            read = partial(view.read, image_size=image_size, frame=number)
            yield replace(row, id=f"{row.id}#{number}", where=f"{row.where} frame {number}", read=read)


def _by_identifier(path: Path, storage: ImageStorage, *, files: Path | None = None) -> tuple[list[Row], str] | None:
    """The rows of a table that names identifiers in place of files; None where it has none.

    Files are looked for in `files`, or else in the table's folder, and below. Files that no row names are left out, and
    counted in the log.
    """

    def refuse(error: DataError) -> None:
        storage.report(Fault(kind=FaultKind.EMPTY, error=error))

    known = ("image", *IDENTIFIERS, "label", *UNITS, "split", "site")
    table = read_table(path, ("label",), known=known, refuse=refuse, each=storage.per_unit)
    keys = [name for name in IDENTIFIERS if name in table.columns]
    if "image" in table.columns or not keys:
        if files is None:
            return None
        hint = f"with files= a table has one of {', '.join(IDENTIFIERS)}, and no column `image`"
        raise DataError("the table names no identifiers", where=path.name, hint=hint)
    key, root = keys[0], files or path.parent
    unit = next((name for name in UNITS if name in table.columns), None)
    known_files = _index(root, key, storage)
    rows, seen = list[Row](), dict[tuple[str, str], str]()
    for entry in table.entries:
        value = entry.fields[key]
        empty = [name for name in (key, "label", *([unit] if unit else [])) if not unit_key(entry.fields[name])]
        if empty:
            refuse(DataError(f"{empty[0]} is empty", where=entry.where))
            continue
        # Where each patient counts alone, what another patient's row names is no fault of this one.
        whose = (value, entry.fields[unit] if unit and storage.per_unit else "")
        if seen.setdefault(whose, entry.where) != entry.where:
            refuse(DataError(f"the same {key} as in {seen[whose]}", where=entry.where, hint="name each once"))
            continue
        found = known_files.get(value, [])
        for number, file in enumerate(found or [root / "no file with this identifier"], start=1):
            rows.append(
                Row(
                    id=file.relative_to(root).as_posix(),
                    path=file,
                    label=entry.fields["label"],
                    where=f"{entry.where} file {number}" if len(found) > 1 else entry.where,
                    unit=entry.fields[unit] if unit else None,
                    site=entry.fields.get("site") or NO_SITE,
                    side=entry.fields.get("split"),
                )
            )
    named = {value for value, _ in seen}
    if left := sum(len(paths) for value, paths in known_files.items() if value not in named):
        log.warning("%s: no row names %d of the files", path.name, left)
    return rows, unit or "image"


def _index(folder: Path, key: str, storage: ImageStorage) -> dict[str, list[Path]]:
    """Every DICOM file of a folder by one identifier of its header. What is no DICOM file is passed over."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in _files_in(folder, each=storage.per_unit):
        try:
            header = read_header(file, "a file beside the table", pixels=False, only=[key])
            with as_data_error("header cannot be read", "a file beside the table", "export it again"):
                found[str(header.get(key) or "")].append(file)
        except DataError as error:
            storage.report(Fault(kind=FaultKind.UNREADABLE, error=error))
    found.pop("", None)
    return found


def _files_in(folder: Path, *, each: bool) -> list[Path]:
    """All DICOM files below a folder; of one that is filled from an archive, those that its list has.

    :param each: for the latter, whatever has come: a list waits for everybody, so that one patient whose images do not
        come would keep out all others.
    :raises DataError: where there is no such folder.
    """
    if not folder.is_dir():
        raise DataError("there is no such folder", where=str(folder), hint="`site-agent archive-fetch` fills it")
    if not (folder / LISTING).exists():
        return sorted(file for file in folder.rglob("*") if file.is_file() and is_dicom(file))
    if each:
        return sorted(file for file in folder.rglob("*.dcm") if file.is_file())
    names = (folder / LISTING).read_text(encoding="ascii", errors="replace").split()
    return [folder / name for name in names if ".." not in Path(name).parts and (folder / name).is_file()]


def is_dicom(path: Path) -> bool:
    """By suffix, or by the four letters after the preamble (DICOM PS3.10 section 7.1): archives leave suffixes out."""
    if path.suffix.lower() == ".dcm":
        return True
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:  # a file that this user may not read is missing for the row that names it, and for nobody else
        return False


def header_units(paths: Sequence[Path], names: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The patient of every file by its header, else its study, else the file itself: the first that all have."""
    found = [_units(path, where) for path, where in zip(paths, names, strict=True)]
    for number, kind in enumerate(("patient", "study")):
        values = tuple(units[number] for units in found)
        if all(values):
            return values, kind
    return tuple(path.name for path in paths), "image"


def _units(path: Path, where: str) -> tuple[str, str]:
    """Patient and study of one file, empty where the header does not tell."""
    header = read_header(path, where, pixels=False, only=["PatientID", "StudyInstanceUID"])
    with as_data_error("header cannot be read", where, "export the file again"):
        return str(header.get("PatientID") or ""), str(header.get("StudyInstanceUID") or "")


def load_rsna(
    path: Path, *, image_size: int, storage: ImageStorage, view: DicomView, labels: LabelsOfImage = "one"
) -> Catalogue:
    """`ID_*.dcm` files beside (or in a folder beside) one npz of ids, labels, clients and folds.

    The published split is by slice, so one patient's slices are on both sides and at several sites.

    :param labels: `many` takes all bleedings of a slice from the challenge's own table; the split file has one of them.
    """
    splits = sorted(path.glob("*.npz"))
    if len(splits) != 1:
        raise DataError(f"folder holds {len(splits)} split files, not one", where=str(path))
    images = next((path / name for name in ("stage_2_train", "images") if os.path.isdir(path / name)), path)
    rows = read_rsna_split(splits[0], images, storage.report)
    if labels == "many":
        found = read_rsna_labels(path / RSNA_LABELS, [row.id for row in rows])
        rows = [replace(row, label=SEPARATOR.join(found[row.id]) or NO_LABEL) for row in rows]
    catalogue = catalogue_of(
        rows,
        ICH_CLASSES,
        name="rsna-ich",
        where=splits[0].name,
        unit_kind="image",
        decoding=view.decoding(image_size),
        storage=storage,
        split_name="fold",
        split_grouped=False,
        labels=labels,
    )
    paths = [images / f"{name}.dcm" for name in catalogue.ids]
    if storage.per_unit:
        return _by_patient(catalogue, paths, storage)
    units, kind = header_units(paths, catalogue.row_names)
    return replace(catalogue, units=units, unit_kind=kind)


def read_rsna_split(split: Path, images: Path, report: Callable[[Fault], None]) -> list[Row]:
    """Rows of the split file: arrays image_id, label, client and fold of equal length, no pickles."""
    arrays = Arrays.read(split, ("image_id", "label", "client", "fold"))
    labels = arrays.numbers("label").tolist()
    ids, folds = arrays.words("image_id", len(labels)), arrays.words("fold", len(labels))
    clients = arrays.numbers("client", len(labels)).tolist()
    rows = []
    for number, (image, label, client, fold) in enumerate(zip(ids, labels, clients, folds, strict=True)):
        where = f"{split.name} row {number}"
        if not 0 <= label < len(ICH_CLASSES):
            error = DataError(f"label {label} is not one of {len(ICH_CLASSES)} classes", where=where)
            report(Fault(kind=FaultKind.LABEL, error=error))
            continue
        rows.append(
            Row(
                id=image,
                path=images / f"{image}.dcm",
                label=ICH_CLASSES[label],
                where=where,
                site=f"client_{client:02d}",
                side=fold,
            )
        )
    return rows


def read_rsna_labels(table: Path, slices: Iterable[str]) -> dict[str, list[str]]:
    """All bleedings of each of these slices. The table has a row `SLICE_BLEEDING,0` or `...,1` for each of both.

    It has four million rows, so they are not kept.
    """
    known: dict[str, dict[str, str]] = {name: {} for name in slices}
    for number, line in enumerate(text_of(table).splitlines(), start=1):
        name, _, value = line.partition(",")
        image, _, bleeding = name.rpartition("_")
        if image not in known:
            continue
        where = f"{table.name} row {number}"
        if bleeding not in (*ICH_CLASSES, _ANY) or value.strip() not in ("0", "1"):
            hint = f"SLICE_NAME,0 or SLICE_NAME,1, with a name of {', '.join((*ICH_CLASSES, _ANY))}"
            raise DataError("not a row of the challenge's table", where=where, hint=hint)
        if known[image].setdefault(bleeding, value.strip()) != value.strip():
            raise DataError("an earlier row says the opposite about this slice", where=where)
    for number, row in enumerate(known.values()):
        if missing := [name for name in ICH_CLASSES if name not in row]:
            hint = f"the table has nothing about {', '.join(missing)}; copy {table.name} again"
            raise DataError(f"slice {number} of the split file is not fully labelled", where=table.name, hint=hint)
    return {image: [name for name in ICH_CLASSES if row[name] == "1"] for image, row in known.items()}
