"""CSV manifests and class folders: what comes out, and that each mistake is one error with file and row."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from lazaret.errors import ConfigError, DataError
from npr.data.sources import open_catalogue, open_dataset
from npr.data.store import ImageStorage

GOOD = [
    ["img/a.png", "nevus", "p1", "train"],
    ["img/b.jpg", "melanoma", "p1", "train"],
    ["img/c.png", "nevus", "p2", "test"],
    ["img/d.png", "melanoma", "p3", "train"],
]


def test_a_good_manifest(write_manifest):
    dataset = open_dataset(f"csv:{write_manifest(GOOD)}", fold="split", image_size=16)
    site = dataset.sites[0]
    assert dataset.class_names == ("melanoma", "nevus") and site.train.unit_kind == "patient"
    assert site.train.ids == ("img/a.png", "img/b.jpg", "img/d.png") and site.train.units == ("p1", "p1", "p3")
    assert site.train.labels.tolist() == [1, 0, 0] and site.test.labels.tolist() == [1]
    assert site.train.images.shape == (3, 16, 16, 3)
    assert site.train.images[0, 8, 8].tolist() == [0, 100, 50]


def test_the_federation_fixes_the_classes(write_manifest):
    names = ("nevus", "keratosis", "melanoma")
    dataset = open_dataset(f"csv:{write_manifest(GOOD)}", fold="split", image_size=16, class_names=names)
    assert dataset.class_names == names and dataset.counts().tolist() == [[1, 0, 2]]


@pytest.mark.parametrize(
    ("columns", "kind"),
    [(("image", "label"), "image"), (("image", "label", "lesion"), "lesion"), (("image", "label", "study"), "study")],
)
def test_the_most_private_unit_there_is(write_manifest, columns, kind):
    rows = [row[: len(columns)] for row in GOOD]
    catalogue = open_catalogue(f"csv:{write_manifest(rows, columns)}", image_size=16)
    assert catalogue.unit_kind == kind
    assert len(set(catalogue.units)) == (4 if kind == "image" else 3)


def test_site_column_and_numbered_folds(write_manifest):
    rows = [[f"{n}.png", "xy"[n % 2], f"p{n // 2}", f"site{n % 2}"] for n in range(40)]
    path = write_manifest(rows, ("image", "label", "patient", "site"))
    dataset = open_dataset(f"csv:{path}", fold=2, folds=4, image_size=16, validation=0.25)
    assert [site.name for site in dataset.sites] == ["site0", "site1"]
    sides = [[getattr(site, side) for site in dataset.sites] for side in ("train", "test", "validation")]
    units = [{unit for samples in side for unit in samples.units} for side in sides]
    assert not units[0] & units[1] and not units[0] & units[2] and not units[1] & units[2]
    assert sum(len(samples) for side in sides for samples in side) == 40
    assert sum(len(s) for s in sides[1]) == 10


def bad(index, column, value):
    rows = [list(row) for row in GOOD]
    rows[index][column] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "message", "where"),
    [
        (bad(2, 1, "wart"), "the label is not in the class list", "manifest.csv row 4"),
        (bad(3, 0, "img/a.png"), "the same image as in manifest.csv row 2", "manifest.csv row 5"),
        (bad(3, 0, "img/../img/a.png"), "the same image as in manifest.csv row 2", "manifest.csv row 5"),
        (bad(1, 1, " "), "label is empty", "manifest.csv row 3"),
        (bad(1, 2, ""), "patient is empty", "manifest.csv row 3"),
        (bad(1, 3, "training"), "the split is unknown", "manifest.csv row 3"),
        (bad(1, 3, ""), "split is empty", "manifest.csv row 3"),
        (bad(3, 2, "p2"), "one patient is in 'train' here and in 'test' in manifest.csv row 4", "manifest.csv row 5"),
        ([*GOOD, ["img/e.png", "nevus", "p4"]], "more or fewer fields", "manifest.csv row 6"),
        ([*GOOD, ["img/e.png", "nevus", "p4", "train", "x"]], "more or fewer fields", "manifest.csv row 6"),
        ([], "there is no image", "manifest.csv"),
    ],
)
def test_each_mistake_is_one_error_with_file_and_row(write_manifest, rows, message, where):
    path = write_manifest(rows)
    with pytest.raises(DataError, match=message) as caught:
        open_catalogue(f"csv:{path}", image_size=16, class_names=("melanoma", "nevus"))
    assert caught.value.where == where
    assert "p2" not in str(caught.value) and "img/" not in str(caught.value)


def test_empty_and_repeated_class_lists(write_manifest):
    path = write_manifest(GOOD)
    with pytest.raises(DataError, match="class list is empty"):
        open_catalogue(f"csv:{path}", image_size=16, class_names=())
    with pytest.raises(DataError, match="names a class twice"):
        open_catalogue(f"csv:{path}", image_size=16, class_names=("nevus", "melanoma", "nevus"))


class TestClassList:
    MISTYPED = (["a", "b", "c"] * 3) + ["bb"]

    def table(self, write_manifest, labels):
        columns = ("image", "label", "site")
        rows = [[f"{number}.png", label, f"s{number % 2}"] for number, label in enumerate(labels)]
        return write_manifest(rows, columns)

    def test_the_source_can_name_it(self, write_manifest):
        path = self.table(write_manifest, self.MISTYPED[:-1])
        dataset = open_dataset(f"csv:{path}?classes=c, a,b,unseen", image_size=16)
        assert dataset.class_names == ("c", "a", "b", "unseen")
        assert dataset.site("s0").train.class_counts()[3] == 0

    def test_a_mistyped_label_is_refused_and_not_a_class(self, write_manifest):
        path = self.table(write_manifest, self.MISTYPED)
        with pytest.raises(DataError, match="the label is not in the class list") as caught:
            open_dataset(f"csv:{path}?classes=a,b,c", image_size=16)
        assert caught.value.where == "manifest.csv row 11" and "one of a, b, c" in caught.value.hint

    def test_in_folders(self, tmp_path, paint):
        for number, name in enumerate(("a", "a", "b", "b", "bb")):
            paint(tmp_path / "set" / name / f"{number}.png")
        with pytest.raises(DataError, match="the label is not in the class list") as caught:
            open_dataset(f"folders:{tmp_path}/set?classes=a,b", image_size=16)
        assert caught.value.where == "set/folder 3 file 1"
        shutil.rmtree(tmp_path / "set" / "bb")
        assert open_catalogue(f"folders:{tmp_path}/set?classes=b,a", image_size=16).labels.tolist() == [1, 1, 0, 0]

    def test_with_other_options(self, write_manifest):
        path = self.table(write_manifest, self.MISTYPED[:-1])
        catalogue = open_catalogue(f"csv:{path}?partition=dirichlet:sites=2,alpha=9&classes=b,c,a", image_size=16)
        assert catalogue.class_names == ("b", "c", "a") and set(catalogue.sites) == {"site_01", "site_02"}

    def test_it_must_be_the_federations(self, write_manifest):
        source = f"csv:{self.table(write_manifest, self.MISTYPED[:-1])}?classes=a,b,c"
        assert open_catalogue(source, image_size=16, class_names=["a", "b", "c"]).class_names == ("a", "b", "c")
        with pytest.raises(ConfigError, match="another class list than the federation's"):
            open_catalogue(source, image_size=16, class_names=["b", "a", "c"])

    def test_without_one_a_class_of_one_image_is_told_once(self, write_manifest, caplog):
        path = self.table(write_manifest, self.MISTYPED)
        for fold in (0, 1):
            open_dataset(f"csv:{path}", fold=fold, image_size=16)
        (record,) = caplog.records
        assert record.levelname == "WARNING" and record.name == "npr.data"
        assert record.getMessage().startswith("manifest.csv row 11: no other image has this class;")
        # Where columns are mixed up, the label is a patient.
        assert "bb" not in record.getMessage().replace(str(path), "") and f"{path}?classes=" in record.getMessage()

    def test_several_are_told_in_one_line(self, tmp_path, paint, caplog):
        for number, name in enumerate(("a", "a", "Doe_Jane", "Roe_Richard")):
            paint(tmp_path / "set" / name / f"{number}.png")
        open_catalogue(f"folders:{tmp_path}/set", image_size=16)
        (record,) = caplog.records
        assert record.getMessage().startswith("set/folder 1 file 1: no other image has this class, as in 1 more;")
        assert "Doe" not in record.getMessage()

    @pytest.mark.parametrize("labels", [["a", "b"] * 3, MISTYPED])
    def test_nothing_is_told_where_nothing_can_be_wrong(self, write_manifest, caplog, labels):
        path = self.table(write_manifest, labels)
        listed = "?classes=a,b,c,bb" if "bb" in labels else ""
        open_dataset(f"csv:{path}{listed}", image_size=16)
        open_dataset(f"csv:{path}", image_size=16, class_names=("a", "b", "c", "bb"))
        assert not caplog.records


def test_missing_file_is_found_before_anything_is_decoded(write_manifest, tmp_path):
    path = write_manifest(GOOD)
    (tmp_path / "img/d.png").unlink()
    (tmp_path / "img/a.png").write_bytes(b"broken too, but the missing one is seen first")
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="missing") as caught:
        open_catalogue(f"csv:{path}", image_size=16, storage=ImageStorage(cache_dir=cache))
    assert caught.value.where == "manifest.csv row 5" and not cache.exists()


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\x00" * 40])
def test_unreadable_image_names_the_row_and_leaves_no_cache(write_manifest, tmp_path, content):
    path = write_manifest(GOOD)
    (tmp_path / "img/c.png").write_bytes(content)
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="cannot be read") as caught:
        open_catalogue(f"csv:{path}", image_size=16, storage=ImageStorage(cache_dir=cache))
    assert caught.value.where == "manifest.csv row 4" and list(cache.iterdir()) == []


def test_a_truncated_jpeg_is_unreadable(write_manifest, tmp_path):
    path = write_manifest(GOOD)
    whole = (tmp_path / "img/b.jpg").read_bytes()
    (tmp_path / "img/b.jpg").write_bytes(whole[: len(whole) - 100])
    with pytest.raises(DataError, match="cannot be read") as caught:
        open_catalogue(f"csv:{path}", image_size=16)
    assert caught.value.where == "manifest.csv row 3"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("file,label", "column 'image' is missing"),
        ("image,diagnosis", "column 'label' is missing"),
        ("image,label,patient_id", "looks like 'patient'"),
        ("image,label,Patient", "looks like 'patient'"),
        ("image,label,label", "occurs twice"),
    ],
)
def test_header_mistakes(tmp_path, header, message):
    path = tmp_path / "m.csv"
    path.write_text(header + "\n")
    with pytest.raises(DataError, match=message) as caught:
        open_catalogue(f"csv:{path}")
    assert caught.value.where == "m.csv row 1"


def test_other_columns_are_left_alone_and_a_byte_order_mark_is_no_letter(tmp_path, paint):
    paint(tmp_path / "a.png")
    path = tmp_path / "m.csv"
    path.write_bytes(b"\xef\xbb\xbfimage,label,age\na.png,x,44\n")
    assert len(open_catalogue(f"csv:{path}", image_size=16)) == 1


def test_not_a_csv_file(tmp_path):
    path = tmp_path / "m.csv"
    path.write_bytes(b"image,label\n\xff\xfe,x\n")
    with pytest.raises(DataError, match="UTF-8") as caught:
        open_catalogue(f"csv:{path}")
    assert caught.value.where == "m.csv row 2"
    path.write_text('image,label\na.png,x\n"b.png,x\nc.png,x\n')
    with pytest.raises(DataError, match="not a UTF-8 CSV file") as caught:
        open_catalogue(f"csv:{path}")
    assert caught.value.where == "m.csv row 3"  # where the quote was left open, not where the file ends
    with pytest.raises(DataError, match="missing"):
        open_catalogue(f"csv:{tmp_path}/none.csv")


class TestFolders:
    def test_a_folder_per_class(self, tmp_path, paint):
        for name in ("a/1.png", "a/2.jpg", "b/3.png"):
            paint(tmp_path / "set" / name)
        (tmp_path / "set" / "c").mkdir()
        (tmp_path / "set" / "a" / ".hidden").write_text("")
        catalogue = open_catalogue(f"folders:{tmp_path}/set", image_size=16)
        assert catalogue.class_names == ("a", "b", "c") and catalogue.labels.tolist() == [0, 0, 1]
        assert catalogue.unit_kind == "image" and not catalogue.splits

    def test_sides_above_classes(self, tmp_path, paint):
        for name in ("train/a/1.png", "train/b/2.png", "test/a/1.png"):
            paint(tmp_path / name)
        dataset = open_dataset(f"folders:{tmp_path}", fold="split", image_size=16)
        assert dataset.counts().tolist() == [[1, 1]] and dataset.counts("test").tolist() == [[1, 0]]

    def test_mistakes(self, tmp_path, paint):
        with pytest.raises(DataError, match="folder is missing"):
            open_catalogue(f"folders:{tmp_path}/none")
        with pytest.raises(DataError, match="class list is empty"):
            open_catalogue(f"folders:{tmp_path}")
        paint(tmp_path / "a/1.png")
        with pytest.raises(DataError, match="the label is not in the class list") as caught:
            open_catalogue(f"folders:{tmp_path}", class_names=("b",))
        # Image files are often named after people: the error counts them instead.
        assert str(caught.value.where).endswith("/folder 1 file 1") and "1.png" not in str(caught.value)
        (tmp_path / "a/2.txt").write_text("notes")
        with pytest.raises(DataError, match="known type") as caught:
            open_catalogue(f"folders:{tmp_path}")
        assert caught.value.where == "folder 1 file 2"
        with pytest.raises(DataError) as caught:
            open_catalogue(f"folders:{tmp_path}", class_names=("a",))
        assert caught.value.where == "a file 2"

    def test_names_that_are_not_text(self, tmp_path, paint):
        """Of an archive from a machine that wrote Latin-1: folds could not be dealt by such a name."""
        paint(tmp_path / "set" / "a" / "1.png")
        os.rename(tmp_path / "set" / "a" / "1.png", os.fsencode(tmp_path / "set" / "a") + b"/M\xfcller.png")
        with pytest.raises(DataError, match="the name is not UTF-8") as caught:
            open_dataset(f"folders:{tmp_path}/set")
        assert caught.value.where == "folder 1 file 1" and "ller" not in str(caught.value)
        os.rename(tmp_path / "set" / "a", os.fsencode(tmp_path / "set") + b"/\xfc")
        with pytest.raises(DataError, match="the name is not UTF-8") as caught:
            open_dataset(f"folders:{tmp_path}/set")
        assert caught.value.where == "set folder 1"

    def test_a_folder_that_may_not_be_read(self, tmp_path, paint, monkeypatch):
        paint(tmp_path / "Doe_Jane" / "1.png")
        plain = Path.iterdir

        def refuse(path):
            if path.name == "Doe_Jane":
                raise PermissionError(13, "permission denied", str(path))
            return plain(path)

        monkeypatch.setattr(Path, "iterdir", refuse)
        with pytest.raises(DataError, match=r"folder cannot be read \(PermissionError\)") as caught:
            open_dataset(f"folders:{tmp_path}")
        assert caught.value.where == "folder 1" and "Doe" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyError, struct.error, EOFError, MemoryError])
def test_whatever_a_decoder_raises_is_one_error_with_the_row(write_manifest, monkeypatch, error):
    def fail(*_, **__):
        raise error("damaged")

    monkeypatch.setattr("npr.data.store.Image.open", fail)
    with pytest.raises(DataError, match=rf"image cannot be read \({error.__name__}\)") as caught:
        open_dataset(f"csv:{write_manifest(GOOD)}", fold="split", image_size=16)
    assert caught.value.where == "manifest.csv row 2"


def test_grey_images_become_rgb(tmp_path):
    from PIL import Image

    Image.fromarray(np.full((20, 20), 90, np.uint8)).save(tmp_path / "g.png")
    (tmp_path / "m.csv").write_text("image,label\ng.png,x\n")
    images = open_catalogue(f"csv:{tmp_path}/m.csv", image_size=16).images
    assert images.shape == (1, 16, 16, 3) and (images == 90).all()


def test_an_image_too_large_to_be_meant_is_refused(write_manifest, monkeypatch):
    monkeypatch.setattr("npr.data.store.MAX_PIXELS", 100)
    with pytest.raises(DataError, match="24 x 18 pixels is too large") as caught:
        open_catalogue(f"csv:{write_manifest(GOOD)}", image_size=16)
    assert caught.value.where == "manifest.csv row 2"
