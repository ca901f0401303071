"""Tables with several labels of an image: what they say, and that each mistake is one error with file and row."""

from __future__ import annotations

import pytest

from lazaret.errors import ConfigError, DataError
from npr.data.sources import open_catalogue, open_dataset, survey
from npr.data.store import FaultKind

NAMES = ("effusion", "mass", "nodule")
ROWS = [
    ["a.png", "mass|effusion", "p1", "train"],
    ["b.png", "-", "p1", "train"],
    ["c.png", "nodule", "p2", "test"],
    ["d.png", "mass | nodule", "p3", "train"],
]


def opened(path, **options):
    return open_catalogue(f"csv:{path}", image_size=16, labels="many", **options)


def test_a_good_table(write_manifest):
    path = write_manifest(ROWS)
    catalogue = opened(path)
    assert catalogue.class_names == NAMES, "without a list: the names that occur, sorted"
    assert catalogue.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 1]]
    dataset = open_dataset(f"csv:{path}", fold="split", image_size=16, labels="many", class_names=NAMES)
    train = dataset.sites[0].train
    assert train.many and train.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert dataset.counts().tolist() == [[1, 2, 1]], "an image counts for each of its labels"
    assert len(train) == 3 and train.subset([1]).class_counts().tolist() == [0, 0, 0]


def test_the_same_table_with_one_label_of_an_image_is_another(write_manifest):
    path = write_manifest(ROWS)
    with pytest.raises(DataError, match="not in the class list"):
        open_catalogue(f"csv:{path}", image_size=16, class_names=NAMES)
    assert opened(path).version() != open_catalogue(f"csv:{path}", image_size=16).version()


def test_own_names_may_be_one_label_there(write_manifest):
    """An image that has either of two names here has their label there, once."""
    there = ("fluid", "shadow")
    catalogue = opened(
        write_manifest(ROWS), class_names=there, class_map=dict(zip(NAMES, ("fluid", "shadow", "shadow"), strict=True))
    )
    assert catalogue.class_names == there and catalogue.labels.tolist() == [[1, 1], [0, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("field", ["mass|wart", "mass||nodule", "mass|-", "|"])
def test_a_name_that_is_no_label(write_manifest, field):
    path = write_manifest([["a.png", "mass"], ["b.png", field]], ("image", "label"))
    with pytest.raises(DataError, match=r"manifest.csv row 3: the label is not in the class list"):
        opened(path, class_names=NAMES)
    assert [fault.kind for fault in survey(
        f"csv:{path}", image_size=16, class_names=NAMES, labels="many"
    ).faults] == [FaultKind.LABEL]  # fmt: skip


def test_an_empty_field_is_no_finding(write_manifest):
    with pytest.raises(DataError, match="label is empty"):
        opened(write_manifest([["a.png", "mass"], ["b.png", " "]], ("image", "label")), class_names=NAMES)


def test_folds_are_even_over_combinations_of_labels(write_manifest):
    rows = [[f"{n}.png", ("-", "mass", "mass|nodule", "nodule")[n % 4], f"p{n}"] for n in range(40)]
    path = write_manifest(rows, ("image", "label", "patient"))
    for fold in range(5):
        dataset = open_dataset(f"csv:{path}", fold=fold, image_size=8, labels="many")
        found = dataset.sites[0].test.labels.tolist()
        assert sorted(map(tuple, found)) == [(0, 0)] * 2 + [(0, 1)] * 2 + [(1, 0)] * 2 + [(1, 1)] * 2


def test_sources_that_give_every_image_one_class(tmp_path, paint, write_manifest):
    paint(tmp_path / "skin" / "mass" / "a.png")
    with pytest.raises(ConfigError, match="gives every image one class"):
        open_catalogue(f"folders:{tmp_path / 'skin'}", image_size=16, labels="many")
    with pytest.raises(ConfigError, match="a partition deals images by their one class"):
        open_catalogue(f"csv:{write_manifest(ROWS)}?partition=dirichlet:sites=2", image_size=16, labels="many")


def test_a_table_of_dicom_files(tmp_path):
    from tests.support.dicom_images import GREY, drawn, saved

    saved(drawn(GREY, PatientID="P1"), tmp_path / "a.dcm")
    saved(drawn(GREY, PatientID="P2"), tmp_path / "b.dcm")
    (tmp_path / "table.csv").write_text("image,label\na.dcm,mass|nodule\nb.dcm,-\n")
    found = open_catalogue(f"dicom:{tmp_path / 'table.csv'}", image_size=16, labels="many", class_names=NAMES)
    assert found.labels.tolist() == [[0, 1, 1], [0, 0, 0]] and found.unit_kind == "patient"


@pytest.mark.parametrize("name", ["-", "mass|nodule"])
def test_a_name_that_no_field_can_say(write_manifest, name):
    """Images with it would be read as images without it, or not at all."""
    path = write_manifest(ROWS)
    with pytest.raises(DataError, match="no label can be called"):
        opened(path, class_names=(*NAMES, name))
    with pytest.raises(DataError, match="no label can be called"):
        opened(path, class_names=("other", name), class_map=dict.fromkeys(NAMES, "other"))
    with pytest.raises(DataError, match="no label can be called '-'"):
        opened(write_manifest([*ROWS, ["e.png", "-|mass", "p4", "train"]]))
    one = [[image, "mass", *rest] for image, _, *rest in ROWS]
    assert len(open_catalogue(f"csv:{write_manifest(one)}", image_size=16, class_names=("mass", name))) == len(ROWS)
