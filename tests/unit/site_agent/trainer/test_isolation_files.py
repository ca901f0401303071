"""What a process that sees images may read and write."""

from __future__ import annotations

from pathlib import Path

import pytest

from npr.data.store import ImageStorage, user_cache_dir
from site_agent.trainer.isolation import cache_folder, data_folders, data_path, image_folders


def test_a_table_names_folders_elsewhere(tmp_path: Path) -> None:
    for name in ("near", "far", "table"):
        (tmp_path / name).mkdir()
    (tmp_path / "table" / "images").mkdir()
    table = tmp_path / "table" / "cases.csv"
    rows = ["image,label", "images/1.png,a", "../near/2.png,a", f"{tmp_path}/far/3.png,b", "gone/4.png,b", ",b"]
    table.write_text("\n".join(rows) + "\n")
    assert image_folders(table) == {table, tmp_path / "table" / "images", tmp_path / "near", tmp_path / "far",
                                    tmp_path / "table"}  # fmt: skip


def test_links_lead_to_where_images_really_lie(tmp_path: Path) -> None:
    """A folder of links into an archive, which itself holds a link: each step is followed once, a circle too."""
    cases, archive, disk = (tmp_path / name for name in ("cases", "archive", "disk"))
    for folder in (cases / "sub", archive, disk):
        folder.mkdir(parents=True)
    (archive / "1.png").touch()
    (cases / "sub" / "1.png").symlink_to(archive / "1.png")
    (archive / "more").symlink_to(disk)
    (disk / "back").symlink_to(cases)
    (cases / "broken.png").symlink_to(tmp_path / "nowhere" / "x.png")
    assert image_folders(cases) == {cases, archive, disk}


def test_what_files_names_is_read_and_the_folder_of_the_table_is_not(tmp_path: Path) -> None:
    """There may be keys in it."""
    for name in ("site", "archive"):
        (tmp_path / name).mkdir()
    table = tmp_path / "site" / "labels.csv"
    table.write_text("StudyInstanceUID,label\n1.2,a\n")
    source = f"dicom:{table}?window=1/2&files={tmp_path / 'archive'}"
    assert data_folders(source) == {table, tmp_path / "archive"}
    assert data_folders(f"dicom:{table}") == {table, tmp_path / "site"}
    assert data_folders("generated") == set()


def test_a_damaged_table_is_left_to_those_who_read_it(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_bytes(b"\xff\xfe\x00image\x00\n\"")
    assert tmp_path / "cases.csv" in image_folders(tmp_path / "cases.csv")
    assert image_folders(tmp_path / "nothing") == set()


def test_where_a_source_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_path("generated:balanced=4,sites=1") is data_path("generated") is None
    assert data_path("csv:a/b.csv?classes=A,B") == Path("a/b.csv")
    monkeypatch.setenv("LAZARET_DATA", "sets")
    assert data_path("ham10000") == Path("sets/ham10000_fed")
    monkeypatch.delenv("LAZARET_DATA")
    assert data_path("ham10000") is None


@pytest.mark.parametrize("chosen", [{}, {"XDG_CACHE_HOME": "x"}, {"LAZARET_CACHE": "y", "XDG_CACHE_HOME": "x"}])
def test_the_cache_is_where_images_are_stored(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAZARET_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == (ImageStorage.from_environment().cache_dir or user_cache_dir())
