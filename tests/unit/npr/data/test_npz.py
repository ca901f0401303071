"""The one-file form: JPEG bytes with offsets and a row of columns."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from lazaret.errors import ConfigError, DataError
from npr.data.catalogue import Catalogue
from npr.data.npz import load_npz
from npr.data.sources import open_catalogue, open_dataset
from npr.data.store import ImageStorage


def jpeg(colour) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def columns(rows=12):
    files = [jpeg((20 * row, 100, 60)) for row in range(rows)]
    return {
        "jpeg": np.frombuffer(b"".join(files), dtype=np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "image_id": np.array([f"I{row}" for row in range(rows)], dtype="S4"),
        "lesion_id": np.array([f"L{row // 2}" for row in range(rows)], dtype="S4"),
        "label": (np.arange(rows) // 2 % 3).astype(np.int8),
        "class_names": np.array(["A", "B", "C"], dtype="S1"),
        "site": np.array(["north", "south"] * (rows // 2), dtype="S5"),
        "fold": np.array(["train"] * (rows - 3) + ["test"] * 3, dtype="S5"),
        "fold_lesion": np.array(["train"] * (rows - 4) + ["test"] * 4, dtype="S5"),
    }


@pytest.fixture
def write(tmp_path):
    def save(**changes):
        arrays = {name: value for name, value in {**columns(), **changes}.items() if value is not None}
        np.savez(tmp_path / "set.npz", **arrays)
        return tmp_path / "set.npz"

    return save


def test_images_columns_and_both_folds(write):
    path = write()
    catalogue = open_catalogue(f"npz:{path}", image_size=16)
    assert catalogue.images.shape == (12, 16, 16, 3) and catalogue.unit_kind == "lesion"
    assert np.abs(catalogue.images[:, 8, 8, 0].astype(int) - 20 * np.arange(12)).max() <= 4
    leaky = open_dataset(f"npz:{path}", fold="fold", image_size=16)
    assert leaky.counts("test").sum() == 3 and leaky.fold == "fold"
    honest = open_dataset(f"npz:{path}", fold="fold_lesion", image_size=16)
    assert honest.counts("test").sum() == 4 and [s.name for s in honest.sites] == ["north", "south"]


def test_decoded_once_per_process_until_the_file_changes(write):
    path = write()
    first = load_npz(path, image_size=16, storage=ImageStorage())
    assert load_npz(path.parent, image_size=16, storage=ImageStorage()) is first
    write(label=np.zeros(12, np.int8), site=np.array(["elsewhere"] * 12, dtype="S9"))
    assert load_npz(path, image_size=16, storage=ImageStorage()) is not first


def test_the_cache_is_keyed_by_content_and_size(write, tmp_path):
    storage = ImageStorage(cache_dir=tmp_path / "cache")
    for size in (16, 24, 16):
        load_npz(write(), image_size=size, storage=storage)
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(
    ("changes", "message", "where"),
    [
        ({"label": np.array([0, 1, 2, 3] * 3, np.int8)}, "label 3 is not one of 3", "set.npz row 3"),
        ({"image_id": np.array(["I0"] * 12, dtype="S4")}, "image id of row 0 occurs again", "set.npz row 1"),
        ({"class_names": np.array([], dtype="S1")}, "class list is empty", "set.npz"),
        ({"fold": np.array(["train"] * 11 + ["exam"], dtype="S5")}, "the split is unknown", "set.npz row 11"),
        ({"fold_lesion": np.array(["train", "test"] * 6, dtype="S5")}, "one lesion is in", "set.npz row 1"),
        ({"jpeg": np.zeros(100_000, np.uint8)}, "cannot be read", "set.npz row 0"),
    ],
)
def test_mistakes_name_the_row(write, changes, message, where):
    path = write(**changes)
    with pytest.raises(DataError, match=message) as caught:
        open_catalogue(f"npz:{path}", image_size=16)
    assert caught.value.where == where


def test_not_the_form(write, tmp_path):
    with pytest.raises(DataError, match="array site is missing"):
        open_catalogue(f"npz:{write(site=None)}")
    with pytest.raises(DataError, match="array offsets has 3 values, not 13"):
        open_catalogue(f"npz:{write(offsets=np.arange(3))}")
    with pytest.raises(DataError, match="file is missing"):
        open_catalogue(f"npz:{tmp_path}/none.npz")
    (tmp_path / "set.npz").write_bytes(b"something else")
    with pytest.raises(DataError, match="not a plain npz"):
        open_catalogue(f"npz:{tmp_path}/set.npz")
    (tmp_path / "second.npz").write_bytes(b"")
    with pytest.raises(DataError, match="2 npz files"):
        open_catalogue(f"npz:{tmp_path}")


def test_objects_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "set.npz", **{**columns(), "image_id": np.array([{"x": 1}] * 12, dtype=object)})
    with pytest.raises(DataError, match="not a plain npz file: array image_id cannot be read"):
        open_catalogue(f"npz:{tmp_path}/set.npz")


def short(name):
    return columns()[name][:-1]


@pytest.mark.parametrize(
    ("changes", "message", "where"),
    [
        ({"label": np.array(["A", "B", "C"] * 4)}, "array label holds text, not whole numbers", "set.npz"),
        ({"label": np.array([0.0, 1.0, np.nan] * 4)}, "array label holds float64, not whole numbers", "set.npz"),
        ({"label": np.int64(3)}, "array label has 0 dimensions", "set.npz"),
        ({"label": np.zeros((12, 1), np.int8)}, "array label has 2 dimensions", "set.npz"),
        ({"label": np.array([], np.int8), "offsets": np.array([0])}, "array image_id has 12 values, not 0", "set.npz"),
        ({"offsets": np.arange(13).astype(float)}, "array offsets holds float64", "set.npz"),
        ({"jpeg": np.zeros(100_000)}, "array jpeg holds float64, not bytes", "set.npz"),
        ({"patient_id": np.array([1.0, np.nan] * 6)}, "array patient_id holds float64, neither text nor", "set.npz"),
        ({"site": np.array(["north"] * 11 + [b"\xff"], dtype="S5")}, "site is not UTF-8 text", "set.npz row 11"),
        ({"site": np.array(["north"] * 11 + ["\ud800"])}, "site is not UTF-8 text", "set.npz row 11"),
        ({"class_names": np.array(["A", "B", "A"])}, "names a class twice", "set.npz"),
        ({"class_names": np.array(["A", "B", ""])}, "holds an empty name", "set.npz"),
        *(
            ({name: short(name)}, f"array {name} has 11 values, not 12", "set.npz")
            for name in ("image_id", "lesion_id", "site", "fold", "fold_lesion")
        ),
    ],
)
def test_columns_of_another_type_or_length(write, changes, message, where):
    path = write(**changes)
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(f"npz:{path}", image_size=16)
    assert caught.value.where == where


def test_columns_are_checked_before_anything_is_decoded(write):
    path = write(fold=short("fold"), jpeg=np.zeros(100_000, np.uint8))
    with pytest.raises(DataError, match="array fold"):
        open_dataset(f"npz:{path}", image_size=16)


def test_ids_may_be_numbers_and_other_arrays_are_left_alone(write):
    path = write(patient_id=np.arange(12) // 2, notes=np.array([{}] * 12, dtype=object))
    assert open_catalogue(f"npz:{path}", image_size=16).units[:4] == ("0", "0", "1", "1")


def test_damaged_files(write, tmp_path):
    path = write()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"not a plain npz file \(BadZipFile\)"):
        open_dataset(f"npz:{path}")
    np.savez_compressed(path, **columns())
    packed = bytearray(path.read_bytes())
    packed[60:200] = bytes(140)
    path.write_bytes(packed)
    with pytest.raises(DataError, match="array jpeg cannot be read") as caught:
        open_dataset(f"npz:{path}")
    assert caught.value.where == str(path)
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(DataError, match="a single array"):
        open_dataset(f"npz:{path}")


def test_a_folder_in_the_place_of_the_file(tmp_path):
    (tmp_path / "set.npz").mkdir()
    with pytest.raises(DataError, match="not a plain npz file"):
        open_dataset(f"npz:{tmp_path}")


FEDERATION = ("B", "A", "C")


class TestClassesOfAFederation:
    """A file has its own list. Its numbers mean something else where the federation's order is another one."""

    def test_another_order_is_refused(self, write):
        with pytest.raises(DataError, match="class 1 is 'A' here and 'B' in the federation") as caught:
            open_catalogue(f"npz:{write()}", image_size=16, class_names=FEDERATION)
        assert "class_map" in caught.value.hint

    def test_without_the_comparison_labels_are_mixed_silently(self, write, monkeypatch):
        """The twin: the number of classes is right, and every A is learnt as a B."""
        right = open_catalogue(f"npz:{write()}", image_size=16)
        monkeypatch.setattr(Catalogue, "with_classes", lambda self, classes, _: self)
        mixed = open_catalogue(f"npz:{write()}", image_size=16, class_names=FEDERATION)
        wrong = [FEDERATION[label] != right.class_names[label] for label in mixed.labels]
        assert sum(wrong) == 8, "two of three classes are exchanged"

    def test_a_map_gives_every_image_the_class_it_has(self, write):
        own = open_catalogue(f"npz:{write()}", image_size=16)
        same = {name: name for name in "ABC"}
        mapped = open_catalogue(f"npz:{write()}", image_size=16, class_names=FEDERATION, class_map=same)
        assert mapped.class_names == FEDERATION and mapped.version() != own.version()
        assert [FEDERATION[n] for n in mapped.labels] == [own.class_names[n] for n in own.labels]
        two = {"A": "x", "B": "y", "C": "x"}
        merged = open_catalogue(f"npz:{write()}", image_size=16, class_names=("x", "y"), class_map=two)
        assert [("x", "y")[n] for n in merged.labels] == [two[own.class_names[n]] for n in own.labels]

    @pytest.mark.parametrize(
        ("given", "what"),
        [
            ({"A": "A", "B": "B"}, "no entry for 'C'"),
            ({"A": "A", "B": "B", "C": "C", "D": "C"}, "no class here: 'D'"),
            ({"A": "A", "B": "b", "C": "C"}, "the federation has not: 'b'"),
        ],
    )
    def test_a_map_that_is_not_whole_is_refused(self, write, given, what):
        with pytest.raises(ConfigError, match=what):
            open_catalogue(f"npz:{write()}", image_size=16, class_names=FEDERATION, class_map=given)
