"""CT from DICOM, on pydicom's own CT slice and on slices made from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_file

from lazaret.errors import ConfigError, DataError
from npr.data.dicom import ICH_CLASSES
from npr.data.dicom_pixels import DicomView, Window, read_header, render
from npr.data.sources import open_catalogue, open_dataset, survey


@pytest.fixture
def slice_():
    return pydicom.dcmread(get_testdata_file("CT_small.dcm"))


@pytest.fixture
def save(slice_):
    """A copy of the slice with other header values."""

    def write(path: Path, **changes) -> Path:
        for name, value in changes.items():
            if value is None:
                if name in slice_:
                    delattr(slice_, name)
            else:
                setattr(slice_, name, value)
        path.parent.mkdir(parents=True, exist_ok=True)
        slice_.save_as(path)
        return path

    return write


def test_a_window_of_a_real_slice_is_in_hounsfield_units(slice_):
    values = slice_.pixel_array.astype(float) * float(slice_.RescaleSlope) + float(slice_.RescaleIntercept)
    assert values.min() >= -1100 and -50 < np.median(values[values > -300]) < 200  # air, and soft tissue
    header = read_header(Path(get_testdata_file("CT_small.dcm")), "slice")
    found = render(header, DicomView(window=Window(level=0, width=2400)), "slice")
    expected = Window(level=0, width=2400).apply(values)
    if "PixelPaddingValue" in slice_:
        expected[slice_.pixel_array == slice_.PixelPaddingValue] = 0
    assert np.array_equal(found, expected)


def test_brain_window_is_level_40_width_80():
    window = Window()
    assert window.apply(np.array([-1000.0, 0.0, 20.0, 40.0, 80.0, 3000.0])).tolist() == [0, 0, 64, 128, 255, 255]
    wide = Window(level=0, width=2000)
    assert wide.apply(np.array([-1000.0, 0.0, 1000.0])).tolist() == [0, 128, 255]


def test_manifest_of_slices_takes_the_patient_from_the_header(save, tmp_path):
    for number in range(4):
        save(tmp_path / f"{number}.dcm", PatientID=f"patient{number // 2}")
    (tmp_path / "m.csv").write_text("image,label\n" + "".join(f"{n}.dcm,{'ab'[n % 2]}\n" for n in range(4)))
    catalogue = open_catalogue(f"dicom:{tmp_path}/m.csv", image_size=32)
    assert catalogue.images.shape == (4, 32, 32, 1) and catalogue.images.max() > 0
    assert catalogue.unit_kind == "patient" and len(set(catalogue.units)) == 2
    assert catalogue.mean == (0.456,) and catalogue.std == (0.224,)
    wide = open_catalogue(f"dicom:{tmp_path}/m.csv?window=0/4000", image_size=32)
    assert (catalogue.images.min(), catalogue.images.max()) == (0, 255)  # air and bone are clipped in the brain window
    assert wide.images.min() > 0 and wide.images.max() < 255 and wide.fingerprint != catalogue.fingerprint


def test_a_patient_column_goes_before_the_header(save, tmp_path):
    for number in range(2):
        save(tmp_path / f"{number}.dcm", PatientID="header")
    (tmp_path / "m.csv").write_text("image,label,patient\n0.dcm,a,p0\n1.dcm,a,p1\n")
    assert open_catalogue(f"dicom:{tmp_path}/m.csv", image_size=16).units == ("p0", "p1")


def test_without_patient_the_study_and_without_study_the_slice(save, tmp_path):
    save(tmp_path / "s" / "a" / "1.dcm", PatientID="")
    assert open_catalogue(f"dicom:{tmp_path}/s", image_size=16).unit_kind == "study"
    save(tmp_path / "s" / "a" / "1.dcm", StudyInstanceUID="")
    assert open_catalogue(f"dicom:{tmp_path}/s", image_size=16).unit_kind == "image"


def test_a_patient_on_two_sides_is_found_in_the_header(save, tmp_path):
    for number in range(2):
        save(tmp_path / f"{number}.dcm", PatientID="same person")
    (tmp_path / "m.csv").write_text("image,label,split\n0.dcm,a,train\n1.dcm,a,test\n")
    with pytest.raises(DataError, match="one patient is in") as caught:
        open_catalogue(f"dicom:{tmp_path}/m.csv", image_size=16)
    assert caught.value.where == "m.csv row 3" and "same person" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"Modality": "PT"}, "modality PT is not read"),
        ({"RescaleSlope": None}, "not a CT slice"),
        ({"NumberOfFrames": 3}, "pixels cannot be read"),
        ({"Rows": 4096}, "pixels cannot be read"),
    ],
)
def test_what_is_not_a_ct_slice_is_refused_with_its_row(save, tmp_path, changes, message):
    save(tmp_path / "0.dcm")
    save(tmp_path / "1.dcm", **changes)
    (tmp_path / "m.csv").write_text("image,label\n0.dcm,a\n1.dcm,a\n")
    with pytest.raises(DataError, match=message) as caught:
        open_catalogue(f"dicom:{tmp_path}/m.csv", image_size=16)
    assert caught.value.where == "m.csv row 3"


def test_not_dicom_at_all(tmp_path):
    (tmp_path / "0.dcm").write_bytes(b"plain text")
    (tmp_path / "m.csv").write_text("image,label\n0.dcm,a\n")
    with pytest.raises(DataError, match="not a DICOM file"):
        open_catalogue(f"dicom:{tmp_path}/m.csv", image_size=16)
    with pytest.raises(DataError, match="missing"):
        read_header(tmp_path / "none.dcm", "slice")


class TestRsna:
    def layout(self, save, root, labels=(0, 4, 2, 3), clients=(0, 0, 3, 3)):
        names = [f"ID_{number:09x}" for number in range(4)]
        for number, name in enumerate(names):
            save(root / "stage_2_train" / f"{name}.dcm", PatientID=f"p{number // 2}")
        np.savez(
            root / "split.npz",
            image_id=np.array(names, dtype="S12"),
            label=np.array(labels, dtype=np.int8),
            client=np.array(clients, dtype=np.int8),
            fold=np.array(["train", "test", "train", "test"], dtype="S5"),
        )
        return root

    def test_ids_labels_clients_and_folds_come_from_the_split_file(self, save, tmp_path):
        dataset = open_dataset(f"dicom:{self.layout(save, tmp_path)}", fold="fold", image_size=16)
        assert dataset.class_names == ICH_CLASSES and [s.name for s in dataset.sites] == ["client_00", "client_03"]
        assert dataset.counts().tolist() == [[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]
        # The published split puts one patient on both sides; that is its own business and known.
        assert dataset.sites[0].train.units == dataset.sites[0].test.units
        assert dataset.sites[0].train.unit_kind == "patient"

    def test_mistakes(self, save, tmp_path):
        self.layout(save, tmp_path, labels=(0, 5, 2, 3))
        with pytest.raises(DataError, match="label 5") as caught:
            open_catalogue(f"dicom:{tmp_path}", image_size=16)
        assert caught.value.where == "split.npz row 1"
        np.savez(tmp_path / "split.npz", image_id=np.array([b"x"]))
        with pytest.raises(DataError, match="array label is missing"):
            open_catalogue(f"dicom:{tmp_path}", image_size=16)

    def test_ids_and_folds_may_be_text(self, save, tmp_path):
        path = self.layout(save, tmp_path) / "split.npz"
        with np.load(path) as archive:
            arrays = dict(archive)
        np.savez(path, **{**arrays, **{name: arrays[name].astype(str) for name in ("image_id", "fold")}})
        dataset = open_dataset(f"dicom:{tmp_path}", fold="fold", image_size=16)
        assert dataset.sites[0].train.ids == ("ID_000000000",)

    @pytest.mark.parametrize(
        ("changes", "message", "where"),
        [
            ({"image_id": np.array([{}] * 4, dtype=object)}, "array image_id cannot be read", None),
            ({"image_id": np.arange(4.0)}, "array image_id holds float64", "split.npz"),
            ({"image_id": np.array([b"a", b"b", b"\xff", b"d"])}, "image_id is not UTF-8 text", "split.npz row 2"),
            ({"image_id": np.array(["a"] * 3)}, "array image_id has 3 values, not 4", "split.npz"),
            ({"label": np.array(["subdural"] * 4)}, "array label holds text", "split.npz"),
            ({"client": np.array(["north"] * 4)}, "array client holds text", "split.npz"),
            ({"client": np.array([0, 1])}, "array client has 2 values, not 4", "split.npz"),
            ({"fold": np.array(["train"] * 5)}, "array fold has 5 values, not 4", "split.npz"),
            ({"fold": np.array(["train"] * 3 + ["exam"])}, "the split is unknown", "split.npz row 3"),
        ],
    )
    def test_columns_of_another_type_or_length(self, save, tmp_path, changes, message, where):
        path = self.layout(save, tmp_path) / "split.npz"
        with np.load(path) as archive:
            arrays = dict(archive)
        np.savez(path, **{**arrays, **changes})
        with pytest.raises(DataError, match=message) as caught:
            open_dataset(f"dicom:{tmp_path}", image_size=16)
        assert caught.value.where == (where or str(path))

    def test_a_split_file_that_is_cut_off(self, save, tmp_path):
        path = self.layout(save, tmp_path) / "split.npz"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(DataError, match="not a plain npz file"):
            open_dataset(f"dicom:{tmp_path}", image_size=16)

    def test_its_classes_are_fixed(self, save, tmp_path):
        root = self.layout(save, tmp_path)
        names = ",".join(ICH_CLASSES)
        assert open_catalogue(f"dicom:{root}?classes={names}", image_size=16).class_names == ICH_CLASSES
        with pytest.raises(ConfigError, match="classes of RSNA-ICH are fixed"):
            open_catalogue(f"dicom:{root}?classes=subdural,epidural", image_size=16)

    def labelled(self, root, **changes):
        """The challenge's table: slices with two bleedings, one, none, and one again."""
        truth = {0: ("epidural", "subdural"), 1: ("subdural",), 2: (), 3: ("subarachnoid",)}
        rows = {
            f"ID_{number:09x}_{name}": str(int(name in has or (name == "any" and bool(has))))
            for number, has in truth.items()
            for name in (*ICH_CLASSES, "any")
        } | changes
        lines = [f"{name},{value}" for name, value in rows.items() if value]
        (root / "stage_2_train.csv").write_text("\n".join(["ID,Label", "ID_ffffffffe_any,0", *lines]) + "\n")
        return f"dicom:{root}"

    def test_all_bleedings_of_a_slice_come_from_the_table_of_the_challenge(self, save, tmp_path):
        source = self.labelled(self.layout(save, tmp_path))
        found = open_catalogue(source, image_size=16, labels="many")
        assert found.many and found.class_names == ICH_CLASSES
        assert found.labels.tolist() == [[1, 0, 0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]]
        assert found.sites == ("client_00", "client_00", "client_03", "client_03")
        assert not open_catalogue(source, image_size=16).many, "one label is that of the split file"

    @pytest.mark.parametrize(
        ("changes", "message", "where"),
        [
            ({"ID_000000001_any": "2"}, "not a row of the challenge's table", "stage_2_train.csv row 14"),
            ({"ID_000000001_broken": "1"}, "not a row of the challenge's table", "stage_2_train.csv row 27"),
            ({"ID_000000001_subdural": ""}, "slice 1 of the split file is not fully labelled", "stage_2_train.csv"),
            ({"ID_000000001_subdural": "1\nID_000000001_subdural,0"}, "says the opposite", "stage_2_train.csv row 14"),
        ],
    )
    def test_mistakes_in_the_table_of_the_challenge(self, save, tmp_path, changes, message, where):
        source = self.labelled(self.layout(save, tmp_path), **changes)
        with pytest.raises(DataError, match=message) as caught:
            open_catalogue(source, image_size=16, labels="many")
        assert caught.value.where == where

    def test_without_the_table_of_the_challenge(self, save, tmp_path):
        with pytest.raises(DataError, match="table is missing"):
            open_catalogue(f"dicom:{self.layout(save, tmp_path)}", image_size=16, labels="many")

    def test_a_survey_passes_over_a_slice_that_is_missing(self, save, tmp_path):
        root = self.layout(save, tmp_path)
        (root / "stage_2_train" / "ID_000000001.dcm").unlink()
        told = survey(f"dicom:{root}", image_size=16)
        assert [fault.error.where for fault in told.faults] == ["split.npz row 1"]
        assert told.catalogue.units == ("p0", "p1", "p1")


@pytest.mark.parametrize(
    ("changes", "written", "message"),
    [
        ({"NumberOfFrames": 7777}, b"many", "header cannot be read"),
        ({"RescaleSlope": "7777"}, b"many", "pixels cannot be read"),
        ({"RescaleSlope": "7777"}, b"    ", "pixels cannot be read"),
    ],
)
def test_header_values_that_are_no_numbers(save, tmp_path, changes, written, message):
    path = save(tmp_path / "0.dcm", **changes)
    path.write_bytes(path.read_bytes().replace(b"7777", written))
    (tmp_path / "m.csv").write_text("image,label\n0.dcm,a\n")
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(f"dicom:{tmp_path}/m.csv", image_size=16)
    assert caught.value.where == "m.csv row 2"


@pytest.mark.parametrize("window", ["40/0", "40/-80", "nan/80", "40/inf"])
def test_a_window_that_shows_nothing(window):
    with pytest.raises(ConfigError, match="shows nothing"):
        open_catalogue(f"dicom:x?window={window}")
