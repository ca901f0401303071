"""The Fed-ISIC2019 layout, on a small copy made here."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from lazaret.errors import DataError
from npr.data.fed_isic import load_fed_isic, shades_of_gray
from npr.data.generated import ISIC_CLASSES, ISIC_SITES
from npr.data.sources import open_catalogue, open_dataset
from npr.data.store import ImageStorage

HEADER = "image,MEL,target,center,fold,fold2\n"
LINES = [
    "ISIC_1,0.0,1,0,train,train_0",
    "ISIC_2,1.0,0,3,train,train_3",
    "ISIC_3,0.0,7,3,test,test_3",
    "ISIC_4,0,2,0,test,x",
]


@pytest.fixture
def layout(tmp_path, paint):
    def make(lines=LINES, folder="ISIC_2019_Training_Input", packed=False):
        for number in range(1, 5):
            paint(tmp_path / folder / f"ISIC_{number}.jpg", colour=(230, 150, 110), size=(60, 45))
        text = (HEADER + "\n".join(lines) + "\n").encode()
        name = "train_test_split.csv.gz" if packed else "train_test_split"
        (tmp_path / name).write_bytes(gzip.compress(text) if packed else text)
        return tmp_path

    return make


@pytest.mark.parametrize("packed", [False, True])
def test_hospitals_classes_and_the_benchmark_fold(layout, packed):
    dataset = open_dataset(f"fed-isic:{layout(packed=packed)}", fold="fold", image_size=32)
    assert dataset.class_names == ISIC_CLASSES
    assert [site.name for site in dataset.sites] == sorted([ISIC_SITES[0], ISIC_SITES[3]])
    assert dataset.site("rosendahl").test.labels.tolist() == [7] and dataset.site("bcn").train.labels.tolist() == [1]
    assert dataset.sites[0].train.unit_kind == "image"


def test_colour_constancy_and_brightness_are_switches(layout):
    root = layout()
    storage = ImageStorage()
    raw = load_fed_isic(root, image_size=32, storage=storage, colour_constancy=False).images
    even = load_fed_isic(root, image_size=32, storage=storage).images
    bright = open_catalogue(f"fed-isic:{root}?brightness=on&colour_constancy=on", image_size=32).images
    assert np.abs(raw.astype(int) - even).max() > 20
    assert np.array_equal(even[0], shades_of_gray(raw[0]))  # a flat image: order of the steps cannot matter
    assert bright.mean() == pytest.approx(140, abs=2) and even.mean() != pytest.approx(140, abs=2)


def test_preprocessed_images_are_not_balanced_twice(layout):
    root = layout(folder="ISIC_2019_Training_Input_preprocessed")
    images = open_catalogue(f"fed-isic:{root}", image_size=32).images
    assert np.abs(images[0, 0, 0].astype(int) - (230, 150, 110)).max() <= 3


def test_lesions_are_kept_together_where_the_metadata_knows_them(layout):
    root = layout()
    (root / "ISIC_2019_Training_Metadata.csv").write_text(
        "image,age_approx,lesion_id\nISIC_1,40,L1\nISIC_2,50,\nISIC_3,50,L9\nISIC_4,40,L1\n"
    )
    catalogue = open_catalogue(f"fed-isic:{root}", image_size=32)
    assert catalogue.unit_kind == "lesion" and catalogue.units == ("L1", "ISIC_2", "L9", "L1")
    for fold in range(3):
        dataset = open_dataset(f"fed-isic:{root}?partition=dirichlet:sites=1", fold=fold, folds=3, image_size=32)
        assert not set(dataset.sites[0].train.units) & set(dataset.sites[0].test.units)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ISIC_4,0,8,0,test,x", "target 8"),
        ("ISIC_4,0,2,6,test,x", "center 6"),
        ("ISIC_4,0,two,0,test,x", "whole numbers"),
        ("ISIC_4,0,2,0,exam,x", "the split is unknown"),
        ("ISIC_1,0,2,0,test,x", "the same image"),
        ("ISIC_9,0,2,0,test,x", "image file is missing"),
        (",0,2,0,test,x", "image is empty"),
        ("ISIC_4,0,2,0", "more or fewer fields"),
        ('ISIC_4,0,2,0,test,"x', "not a UTF-8 CSV file"),
    ],
)
def test_mistakes_name_the_row(layout, line, message):
    root = layout([*LINES[:3], line])
    with pytest.raises(DataError, match=message) as caught:
        open_catalogue(f"fed-isic:{root}", image_size=32)
    assert caught.value.where == "train_test_split row 5"


def test_split_file_missing_or_of_another_kind(layout, tmp_path):
    with pytest.raises(DataError, match="split file"):
        open_catalogue(f"fed-isic:{tmp_path}")
    (layout() / "train_test_split").write_text("image,target,fold\n")
    with pytest.raises(DataError, match="'center' is missing"):
        open_catalogue(f"fed-isic:{tmp_path}")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda data: data[:-20], "EOFError"),
        (lambda data: data[:10] + bytes(8) + data[18:], "error"),
        (lambda data: data[:-8] + bytes(8), "BadGzipFile"),
    ],
)
def test_a_gzipped_split_file_that_is_damaged(layout, spoil, error):
    root = layout(packed=True)
    path = root / "train_test_split.csv.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=rf"gzip file is damaged or cut off \({error}\)") as caught:
        open_dataset(f"fed-isic:{root}", image_size=32)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_split_file_that_is_not_utf8(layout, packed):
    root = layout(packed=packed)
    path = root / ("train_test_split.csv.gz" if packed else "train_test_split")
    text = (HEADER + "\n".join(LINES)).replace("train_3", "Küche").encode("latin-1")
    path.write_bytes(gzip.compress(text) if packed else text)
    with pytest.raises(DataError, match="not a UTF-8 CSV file") as caught:
        open_dataset(f"fed-isic:{root}", image_size=32)
    assert caught.value.where == f"{path.name} row 3"


@pytest.mark.parametrize(
    ("content", "message", "row"),
    [
        (b"name,lesion_id\nISIC_1,L1\n", "column 'image' is missing", 1),
        (b"image,lesion\nISIC_1,L1\n", "column 'lesion_id' is missing", 1),
        (b"", "column 'image' is missing", 1),
        (b"image,lesion_id\nISIC_1,L1\nISIC_2\n", "more or fewer fields", 3),
        (b"image,lesion_id\nISIC_1,\xff\n", "not a UTF-8 CSV file", 2),
    ],
)
def test_metadata_of_another_kind(layout, content, message, row):
    root = layout()
    (root / "ISIC_2019_Training_Metadata.csv").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(f"fed-isic:{root}", image_size=32)
    assert caught.value.where == f"ISIC_2019_Training_Metadata.csv row {row}"


def test_folders_in_the_place_of_files(layout):
    root = layout()
    (root / "ISIC_2019_Training_Metadata.csv").mkdir()
    with pytest.raises(DataError, match="table cannot be read") as caught:
        open_dataset(f"fed-isic:{root}", image_size=32)
    assert caught.value.where == str(root / "ISIC_2019_Training_Metadata.csv")
    (root / "train_test_split").unlink()
    (root / "train_test_split").mkdir()
    with pytest.raises(DataError, match="split file train_test_split is missing"):
        open_dataset(f"fed-isic:{root}", image_size=32)


def test_a_byte_order_mark_is_no_letter(layout):
    root = layout()
    path = root / "train_test_split"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(open_catalogue(f"fed-isic:{root}", image_size=32)) == 4
