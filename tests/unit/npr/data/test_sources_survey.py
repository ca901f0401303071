"""A survey lists every fault where training stops at the first, keeps nothing, and finds what occurs twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lazaret.errors import DataError
from npr.data.generated import CHUNK
from npr.data.sources import inspect_images, open_catalogue, survey
from npr.data.store import FaultKind


def table(folder, rows, columns="image,label,patient,split"):
    (folder / "table.csv").write_text("\n".join([columns, *rows, ""]))
    return f"csv:{folder / 'table.csv'}"


@pytest.fixture
def folder(tmp_path, paint):
    for number in range(6):
        paint(tmp_path / f"{number}.png", colour=(10 + 30 * number, 0, 0))
    return tmp_path


def test_every_fault_is_listed_and_the_rest_is_usable(folder, paint):
    (folder / "broken.png").write_bytes(b"not an image")
    paint(folder / "copy.png", colour=(10, 0, 0))
    source = table(
        folder,
        [
            "0.png,a,p0,train",
            "1.png,x,p1,train",
            "2.png,b,p2,train",
            "3.png,b,p2,test",
            "gone.png,a,p3,test",
            "0.png,a,p0,train",
            "4.png,a,p4,train",
            "5.png,b,p5,nowhere",
            "broken.png,a,p6,test",
            "copy.png,b,p7,test",
        ],
    )
    with pytest.raises(DataError, match="the label is not in the class list"):
        open_catalogue(source, image_size=16, class_names=("a", "b"))
    told = survey(source, image_size=16, class_names=("a", "b"))
    assert [(fault.kind, fault.error.where) for fault in told.faults] == [
        (FaultKind.LABEL, "table.csv row 3"),
        (FaultKind.MISSING, "table.csv row 6"),
        (FaultKind.REPEATED, "table.csv row 7"),
        (FaultKind.SPLIT, "table.csv row 9"),
        (FaultKind.TWO_SIDES, "table.csv row 5"),
    ]
    assert len(told.catalogue) == 6 and told.catalogue.splits["split"].sides[:3] == ("train", "train", "train")
    seen = inspect_images(told)
    assert [fault.error.where for fault in seen.unreadable] == ["table.csv row 10"]
    assert [(told.name(a), told.name(b)) for a, b in seen.same] == [("table.csv row 11", "table.csv row 2")]


def test_no_pixel_is_kept_or_cached(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("LAZARET_CACHE", str(tmp_path / "cache"))
    told = survey(table(folder, ["0.png,a,p0,train", "1.png,b,p1,test"]), image_size=16)
    inspect_images(told)
    assert told.catalogue.images.strides == (0, 0, 0, 0) and not (tmp_path / "cache").exists()


def test_it_decodes_what_training_would(folder):
    source = table(folder, ["0.png,a,p0,train", "1.png,b,p1,test"])
    told, real = survey(source, image_size=16), open_catalogue(source, image_size=16)
    assert all(np.array_equal(told.decode(row), real.images[row]) for row in range(2))
    assert (told.catalogue.labels == real.labels).all() and told.catalogue.ids == real.ids


def test_generated_images_can_be_surveyed_too():
    source = "generated:balanced=12,sites=3"  # more images than are drawn at a time
    told, real = survey(source, image_size=16), open_catalogue(source, image_size=16)
    seen = inspect_images(told)
    assert told.faults == () and seen.unreadable == () and seen.same == ()
    assert len(real) > 2 * CHUNK and not told.catalogue.images.any()
    for row in (0, len(real) - 1, 3, CHUNK, CHUNK - 1):
        assert np.array_equal(told.decode(row), real.images[row])


def test_only_the_rows_that_are_asked_for_are_looked_at():
    told = survey("generated:balanced=2,sites=3", image_size=16)
    looked: list[int] = []

    def decode(row: int):
        looked.append(row)
        return told.decode(row % 3)

    seen = inspect_images(replace(told, decode=decode), [2, 5, 7])
    assert sorted(looked) == [2, 5, 7] and seen.same == ((5, 2),)


def test_a_table_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DataError, match="table is missing"):
        survey(f"csv:{tmp_path}/none.csv", image_size=16)
