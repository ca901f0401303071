"""One patient's rows more or less in a source that is no plain table: DICOM files and the layouts of benchmarks.

As in `test_dp_table`, through the code that a hospital runs. Here the patient is in the header of a file, or a row is
a place in an array; files have no patient, are torn, or are spelt in two ways, labels are beyond the classes, a patient
is on two sides. Nobody else may notice.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.data import get_testdata_file

from lazaret.errors import ConfigError, DataError
from npr.data import dicom
from npr.data.columns import LISTING
from npr.data.dicom import ICH_CLASSES, header_units
from npr.data.generated import ISIC_CLASSES
from npr.data.sides import KeyedSides, unit_key
from npr.data.sources import open_catalogue
from site_agent.config import DataTable
from site_agent.trainer.data import open_data
from tests.property.test_dp_table import told

TABLES, SIZE = 12, 8
SIDES = ("train", "train", "test", "validation")
# What the headers say; None is no patient. The last file is torn.
PATIENTS = ("A", "A", "A", "B", "b ", "C", "C", "D", "E", "F", "F", None, "G", "torn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A row: a file of `PATIENTS`, its label's number and its side."""

    file: int
    label: int
    side: str

    @property
    def patient(self) -> str:
        """Who is protected; a file that names nobody is a patient of its own."""
        return unit_key(PATIENTS[self.file] or f"nobody {self.file}")


def random_rows(seed: int) -> list[Listed]:
    rng = np.random.default_rng(seed)
    files = rng.permutation(len(PATIENTS))[: rng.integers(6, len(PATIENTS) + 1)]
    labels, sides = rng.choice([0, 1, 2, 3, 4, 4, 9], len(files)), rng.choice(SIDES, len(files))
    found = zip(files.tolist(), labels.tolist(), sides.tolist(), strict=True)
    return [Listed(file=file, label=label, side=side) for file, label, side in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slice of each patient; and small images of the same numbers."""
    made = tmp_path_factory.mktemp("slices")
    (made / "images").mkdir()
    rng = np.random.default_rng(2)
    slice_ = pydicom.dcmread(get_testdata_file("CT_small.dcm"))
    for number, patient in enumerate(PATIENTS):
        slice_.PatientID, slice_.SOPInstanceUID = patient or "", f"1.2.{number}"
        slice_.save_as(made / "images" / f"{number}.dcm")
        Image.fromarray(rng.integers(0, 256, (SIZE, SIZE, 3)).astype(np.uint8)).save(made / f"{number}.jpg")
    for name in ("images/13.dcm", "13.jpg"):
        (made / name).write_bytes((made / name).read_bytes()[:90])
    return made


# Each writes a source with these rows, and gives its name, its classes and our site in it.
Source = tuple[str, Sequence[str], str]
Writer = Callable[[Path, list[Listed]], Source]


def _name(classes: Sequence[str], label: int) -> str:
    return classes[label] if label < len(classes) else "unheard of"


def table(folder: Path, rows: list[Listed]) -> Source:
    lines = [f"images/{row.file}.dcm,{_name(ICH_CLASSES, row.label)},{row.side}" for row in rows]
    (folder / "table.csv").write_text("\n".join(["image,label,split", *lines]))
    return f"dicom:{folder}/table.csv", ICH_CLASSES, "site"


def identifiers(folder: Path, rows: list[Listed]) -> Source:
    lines = [f"1.2.{row.file},{_name(ICH_CLASSES, row.label)},{row.side}" for row in rows]
    (folder / "uids.csv").write_text("\n".join(["SOPInstanceUID,label,split", *lines]))
    return f"dicom:{folder}/uids.csv?files={folder}/images", ICH_CLASSES, "site"


def rsna(folder: Path, rows: list[Listed]) -> Source:
    np.savez(
        folder / "split.npz",
        image_id=np.array([str(row.file) for row in rows], dtype="S12"),
        label=np.array([row.label for row in rows], dtype=np.int8),
        client=np.zeros(len(rows), dtype=np.int8),
        fold=np.array([row.side for row in rows], dtype="S10"),
    )
    return f"dicom:{folder}", ICH_CLASSES, "client_00"


def npz(folder: Path, rows: list[Listed]) -> Source:
    images = [(folder / f"{row.file}.jpg").read_bytes() for row in rows]
    np.savez(
        folder.parent / "data.npz",
        jpeg=np.frombuffer(b"".join(images), dtype=np.uint8),
        offsets=np.cumsum([0, *(len(image) for image in images)]),
        image_id=np.array([str(row.file) for row in rows]),
        patient_id=np.array([PATIENTS[row.file] or f"nobody {row.file}" for row in rows]),
        label=np.array([row.label for row in rows]),
        site=np.array(["here" for _ in rows]),
        class_names=np.array(ICH_CLASSES),
        fold=np.array([row.side if row.label < 4 else "nowhere" for row in rows]),
    )
    return f"npz:{folder.parent}/data.npz", ICH_CLASSES, "here"


def fed_isic(folder: Path, rows: list[Listed]) -> Source:
    shown = [f"{row.file},{row.label},0,{row.side}" for row in rows]
    (folder / "train_test_split.csv").write_text("\n".join(["image,target,center,fold", *shown]))
    lesions = [f"{row.file},{PATIENTS[row.file] or f'nobody {row.file}'}" for row in rows]
    (folder / "ISIC_2019_Training_Metadata.csv").write_text("\n".join(["image,lesion_id", *lesions]))
    return f"fed-isic:{folder}", ISIC_CLASSES, "rosendahl"


def opened(source: Source, fold: str) -> dict[str, list[tuple[str, str, int]]]:
    name, classes, site = source
    rule = KeyedSides(key=bytes(range(32)), fold=fold)
    data = DataTable(source=name, fold=fold, site=site)
    found = open_data(data, site="graz", image_size=SIZE, classes=tuple(classes), rule=rule, private=True)[1]
    assert found.train.unit_kind == ("lesion" if classes is ISIC_CLASSES else "patient")
    return told(found)


def others(folder: Path, write: Writer, fold: str, seed: int) -> tuple[object, object]:
    """What is seen of everybody but one patient, with that patient's rows and without."""
    rows = random_rows(seed)
    leaver = rows[seed % len(rows)].patient
    whole = opened(write(folder, rows), fold)
    without = opened(write(folder, [row for row in rows if row.patient != leaver]), fold)
    return {side: [row for row in part if unit_key(row[0]) != leaver] for side, part in whole.items()}, without


SOURCES = {"split": (table, identifiers), "fold": (rsna, npz, fed_isic)}


@pytest.mark.parametrize(("write", "fold"), [(write, fold) for fold, all_ in SOURCES.items() for write in all_])
def test_a_patient_more_or_less_changes_nothing_else(folder: Path, write: Writer, fold: str) -> None:
    for seed in range(TABLES):
        kept, without = others(folder, write, fold, seed)
        assert kept == without, f"table {seed}"


def test_a_patient_without_a_name_takes_it_from_all_others_twin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The units of a laboratory: the patient if all files name one, else the study of all."""

    def of_all(catalogue: dicom.Catalogue, paths: Sequence[Path], _: object) -> dicom.Catalogue:
        units, kind = header_units(paths, catalogue.row_names)
        return dicom.replace(catalogue, units=units, unit_kind=kind)

    rows = [Listed(file=file, label=0, side="train") for file in (0, 1, 3)]
    nameless = [*rows, Listed(file=PATIENTS.index(None), label=0, side="train")]

    def units(listed: list[Listed]) -> set[str]:
        return {unit for unit, _, _ in opened(rsna(folder, listed), "fold")["train"]}

    assert units(rows) == units(nameless) == {"A", "B"}
    monkeypatch.setattr(dicom, "_by_patient", of_all)
    assert units(rows) == {"A", "B"}
    with pytest.raises(AssertionError):
        units(nameless)  # the unit is the study now, for everybody


@pytest.mark.parametrize("write", [table, rsna, npz])
def test_a_patient_on_two_sides_is_on_that_of_the_first_row(folder: Path, write: Writer) -> None:
    rows = [Listed(file=file, label=0, side=side) for file, side in enumerate(("test", "train", "validation", "train"))]
    found = opened(write(folder, rows), "split" if write is table else "fold")
    sides = {side: {unit for unit, _, _ in part} for side, part in found.items()}
    assert sides == {"train": {"B"}, "test": {"A"}, "validation": set()}


def test_a_file_that_may_not_be_opened_is_missing_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "images" / "locked").write_bytes(b"")
    whole = Path.open

    def locked(self: Path, *arguments: object, **options: object) -> io.IOBase:
        if self.name == "locked":
            raise PermissionError
        return whole(self, *arguments, **options)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(Path, "open", locked)
    assert opened(identifiers(folder, [Listed(file=3, label=0, side="train")]), "split")["train"]


def test_a_study_that_does_not_come_from_the_archive_keeps_nobody_else_out(folder: Path) -> None:
    """A fetch with a problem leaves its list as it was; without privacy nothing new is read until all is there."""
    rows = [Listed(file=file, label=0, side="train") for file in (0, 3, 5)]
    listing = folder / "images" / LISTING
    listing.write_text("0.dcm\n")
    try:
        assert {unit for unit, _, _ in opened(identifiers(folder, rows), "split")["train"]} == {"A", "B", "C"}
        with pytest.raises(DataError, match="missing"):
            open_catalogue(identifiers(folder, rows)[0], image_size=SIZE)
    finally:
        listing.unlink()


def test_sites_are_not_dealt(folder: Path) -> None:
    name, *rest = table(folder, random_rows(0))
    with pytest.raises(ConfigError, match="would depend on all others"):
        opened((f"{name}?partition=dirichlet:sites=2", *rest), "split")  # type: ignore[arg-type]
