"""From a name to a data set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lazaret.errors import ConfigError, DataError
from npr.data.loader import Augmentation, Batches
from npr.data.sources import open_catalogue, open_dataset
from npr.data.store import ImageStorage


@pytest.mark.parametrize("source", ["", "nothing", "csv", "csv:", "ham1000", "tar:/x"])
def test_unknown_sources_list_the_known(source):
    with pytest.raises(ConfigError, match="unknown data source") as caught:
        open_catalogue(source)
    assert "csv:PATH" in caught.value.hint and "generated" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("generated?brightness=on", "unexpected option 'brightness=on'"),
        ("fed-isic:x?brightness=yes", "neither on nor off"),
        ("fed-isic:x?brightness=on&brightness=off", "unexpected option"),
        ("dicom:x?window=40", "not LEVEL/WIDTH"),
        ("generated?partition=iid", "unknown partition"),
        ("generated?partition=dirichlet:seed=-1", "seed not negative"),
        ("generated?partition=dirichlet:alpha=nan", "must be finite"),
        ("generated?partition=dirichlet:alpha=inf", "must be finite"),
        ("csv:x?classes=", "class list holds an empty name"),
        ("csv:x?classes=a,,b", "class list holds an empty name"),
        ("folders:x?classes=a, ", "class list holds an empty name"),
        ("dicom:x?classes=a,b, a", "class list names 'a' twice"),
        ("csv:x?classes=a&classes=b", "unexpected option 'classes=b'"),
        ("csv:x?class=a,b", "unexpected option 'class=a,b'"),
        ("npz:x?classes=a,b", "unexpected option 'classes=a,b'"),
        ("fed-isic:x?classes=a,b", "unexpected option 'classes=a,b'"),
        ("generated?classes=a,b", "unexpected option 'classes=a,b'"),
    ],
)
def test_options_are_checked_before_anything_is_read(source, message):
    with pytest.raises(ConfigError, match=message):
        open_catalogue(source)


def test_real_data_is_never_guessed(monkeypatch):
    monkeypatch.delenv("LAZARET_DATA", raising=False)
    with pytest.raises(ConfigError, match="LAZARET_DATA is not set"):
        open_catalogue("ham10000")


def test_a_fold_that_is_not_there_lists_those_that_are():
    for fold in ("fold_lesion", 5, -1, "7"):
        with pytest.raises(DataError, match="no fold") as caught:
            open_dataset("generated:balanced=2,sites=1", fold=fold, image_size=8)
        assert "fold, 0 to 4" in caught.value.hint


def test_numbers_may_be_text():
    by_number = open_dataset("generated:balanced=5,sites=2", fold=3, image_size=8)
    by_text = open_dataset("generated:balanced=5,sites=2", fold="3", image_size=8)
    assert by_number.sites[0].test.ids == by_text.sites[0].test.ids and by_number.fold == by_text.fold == "3"


@pytest.mark.parametrize("kind", ["csv", "folders", "dicom", "fed-isic", "npz"])
def test_what_this_user_may_not_read(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("npr.data.sources.os.access", lambda path, mode: False)
    with pytest.raises(DataError, match="cannot be read") as caught:
        open_dataset(f"{kind}:{tmp_path}")
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize("kind", ["csv", "folders", "dicom", "fed-isic", "npz"])
def test_a_name_longer_than_a_name_can_be(kind, tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        open_dataset(f"{kind}:{tmp_path}/{'x' * 300}")


@pytest.mark.parametrize("kind", ["csv", "dicom", "folders", "fed-isic", "npz"])
def test_the_wrong_one_of_folder_and_file(kind, tmp_path):
    (tmp_path / "file").write_bytes(b"\x00\xff")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(DataError) as caught:
            open_dataset(f"{kind}:{path}")
        assert path.name in str(caught.value.where)


def test_too_small_images():
    with pytest.raises(ConfigError, match="image_size"):
        open_catalogue("generated", image_size=4)


def test_folds_test_every_image_once():
    seen: list[str] = []
    for fold in range(5):
        dataset = open_dataset("generated:balanced=10,sites=2", fold=fold, image_size=8)
        for site in dataset.sites:
            assert not set(site.train.units) & set(site.test.units)
            seen += site.test.ids
    assert len(seen) == len(set(seen)) == 2 * 8 * 12


def test_batches_from_images_that_do_not_fit_into_memory(write_manifest, tmp_path):
    path = write_manifest([[f"{n}.png", "ab"[n % 2], f"p{n}"] for n in range(12)], ("image", "label", "patient"))
    bounded = ImageStorage(memory_limit=100, cache_dir=tmp_path / "cache")
    on_disk, in_memory = (
        open_dataset(f"csv:{path}", fold=0, image_size=16, storage=storage).sites[0].train
        for storage in (bounded, ImageStorage())
    )

    def run(samples):
        settings = {"batch_size": 4, "mean": (0.5,) * 3, "std": (0.5,) * 3, "seed": (1,)}
        return torch.cat([b.images for b in Batches(samples, **settings, augment=Augmentation(), shuffle=True)])

    assert torch.equal(run(on_disk), run(in_memory))


def test_a_catalogue_refuses_what_cannot_be_one():
    good = open_catalogue("generated:balanced=1,sites=1", image_size=8)
    assert "patient-" not in repr(good)
    with pytest.raises(DataError, match="class list is empty"):
        replace(good, class_names=())
    with pytest.raises(DataError, match="different length"):
        replace(good, sites=good.sites[1:])
    with pytest.raises(DataError, match="no image"):
        replace(good, labels=good.labels[:0])
