"""What is said about changes of the data: counts as ranges, classes that vanished; nothing of it under privacy."""

from __future__ import annotations

from site_agent.config import DataTable
from site_agent.log_events import data_annex, data_change, data_opened
from site_agent.trainer.channel import DataReady

FIRST = {"names": ["nevus", "melanoma"], "train": [140, 3], "test": [30, 1], "fingerprint": "aa"}


def test_a_new_version_is_told_with_what_vanished() -> None:
    assert data_change({}, FIRST) == "opened for the first time: 100 to 199 training images"
    assert data_change(FIRST, FIRST) == "unchanged: 100 to 199 training images"
    grown = FIRST | {"train": [260, 0], "fingerprint": "bb"}
    told = data_change(FIRST, grown)
    assert told == "a new version: 200 to 499 training images, 100 to 199 before; no image any more of melanoma"


def test_images_with_several_labels_are_counted_once() -> None:
    """Two hundred images, each with both labels."""
    counts = {"names": ["nevus", "melanoma"], "train": [200, 200], "fingerprint": "aa"}
    told = data_change({}, counts | {"images": {"train": 150}})
    assert told == "opened for the first time: 100 to 199 training images"
    ready = DataReady(
        fingerprint="ab" * 32,
        version="ab" * 32,
        subjects=2,
        class_names=("nevus", "melanoma"),
        counts={"train": (120, 120)},
        images={"train": 120},
    )
    assert data_annex(ready)["images"] == "100 to 199"


def test_long_names_fit_into_an_entry() -> None:
    """Otherwise an agent whose data have changed would not start any more."""
    before = FIRST | {"names": [f"{number}{'x' * 199}" for number in range(9)], "train": [10**14] * 9}
    change = data_change(before, FIRST | {"names": ["other"], "train": [1], "fingerprint": "bb"})
    assert "and 5 more" in data_opened(DataTable(source="generated"), "ab" * 32, change, private=False).change


def test_under_privacy_the_log_has_the_name_of_the_version_alone() -> None:
    table = DataTable(source="generated", version="spring")
    change = data_change({}, FIRST)
    assert data_opened(table, "ab" * 32, change, private=True).change == "version spring"
    assert data_opened(table, "ab" * 32, change, private=False).change == change
