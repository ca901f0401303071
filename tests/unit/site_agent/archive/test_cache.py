"""The folder of fetched files: private, bounded, and complete or not listed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from lazaret.errors import ArchiveError, ArchiveObjectError, ConfigError
from npr.data.columns import LISTING
from site_agent.archive.cache import ArchiveCache, open_cache, prepare
from site_agent.archive.dicomweb import InstanceName

IMAGE = b"\0" * 128 + b"DICM" + b"pixels"
ONE, TWO = InstanceName("1.2", "1.3", "1.4"), InstanceName("1.2", "1.3", "1.5")
Begin = Callable[[], Callable[[bytes], None]]


def sending(*pieces: bytes) -> Callable[[Begin], None]:
    def fetch(begin: Begin) -> None:
        begin()(b"an answer that broke off")
        write = begin()
        for piece in pieces:
            write(piece)

    return fetch


def fill(folder: Path, *names: InstanceName) -> None:
    with open_cache(prepare(folder), 10_000) as cache:
        for name in names:
            cache.receive(name, sending(IMAGE[:50], IMAGE[50:]))
        cache.finish(names)


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    before = os.umask(0)
    try:
        fill(folder, ONE, TWO)
    finally:
        os.umask(before)
    assert (folder / "1.2" / "1.4.dcm").read_bytes() == IMAGE
    assert (folder / LISTING).read_text() == "1.2/1.4.dcm\n1.2/1.5.dcm\n"
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_what_no_longer_belongs_is_removed_and_foreign_files_stay(tmp_path: Path) -> None:
    fill(tmp_path / "a", ONE, TWO)
    (tmp_path / "a" / "note.txt").write_text("ours")
    fill(tmp_path / "a", TWO)
    assert sorted(path.name for path in (tmp_path / "a" / "1.2").iterdir()) == ["1.5.dcm"]
    with open_cache(tmp_path / "a", 10_000) as cache:
        assert cache.used == len(IMAGE) and cache.erase() == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["note.txt"]


def test_erased_completely(tmp_path: Path) -> None:
    fill(tmp_path / "a", ONE)
    (tmp_path / "a" / "1.9").mkdir()
    with open_cache(tmp_path / "a", 10_000) as cache:
        cache.erase()
    assert not (tmp_path / "a").exists()


def test_the_bound_holds_over_all_files_and_within_one(tmp_path: Path) -> None:
    with open_cache(prepare(tmp_path / "a"), 2 * len(IMAGE) - 1) as cache:
        cache.receive(ONE, sending(IMAGE))
        with pytest.raises(ArchiveError, match=r"larger than \d+ bytes"):
            cache.receive(TWO, sending(IMAGE))
        assert cache.used == len(IMAGE) and not cache.has(TWO)


def test_what_is_no_image_is_not_kept(tmp_path: Path) -> None:
    with open_cache(prepare(tmp_path / "a"), 10_000) as cache:
        with pytest.raises(ArchiveObjectError, match="no DICOM file"):
            cache.receive(ONE, sending(b"<html>"))
        assert not cache.has(ONE)


def test_a_disk_that_refuses_names_no_study(tmp_path: Path) -> None:
    with open_cache(prepare(tmp_path / "a"), 10_000) as cache:
        (tmp_path / "a" / ONE.study).write_bytes(b"a file where a folder should be")
        with pytest.raises(OSError, match="a") as raised:
            cache.receive(ONE, sending(IMAGE))
    assert raised.value.filename == str(tmp_path / "a")


def test_a_file_that_was_on_its_way_is_gone_at_the_next_start(tmp_path: Path) -> None:
    fill(tmp_path / "a", ONE)
    (tmp_path / "a" / "1.2" / ".receiving").write_bytes(b"half")
    with open_cache(tmp_path / "a", 10_000) as cache:
        assert cache.has(ONE) and cache.used == len(IMAGE)
    assert not (tmp_path / "a" / "1.2" / ".receiving").exists()


def test_one_command_at_a_time(tmp_path: Path) -> None:
    with (
        open_cache(prepare(tmp_path / "a"), 1),
        pytest.raises(ConfigError, match="another command"),
        open_cache(tmp_path / "a", 1),
    ):
        pass


def test_before_the_first_fetch_has_ended_nothing_is_listed(tmp_path: Path) -> None:
    with open_cache(prepare(tmp_path / "a"), 10_000) as cache:
        cache.receive(ONE, sending(IMAGE))
    assert (tmp_path / "a" / LISTING).read_text() == ""
    assert isinstance(cache, ArchiveCache)


def test_folders_that_are_not_taken(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="open to others"):
        prepare(open_to_all)
    full = tmp_path / "full"
    full.mkdir(mode=0o700)
    (full / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="were not fetched"):
        prepare(full)
