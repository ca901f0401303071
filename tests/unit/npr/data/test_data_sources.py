"""From a name to a data set."""

from __future__ import annotations

import pytest

from npr.data.sources import open_catalogue, open_dataset
from security.errors import ConfigError, DataError


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
