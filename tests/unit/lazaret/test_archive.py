"""Archives: complete or refused, readable by one user, and a kill leaves one party that can act."""

from __future__ import annotations

import io
import stat
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazaret import archive, files
from lazaret.archive import ArchiveContents
from lazaret.errors import ConfigError, DataError

TOLD = {"party": "site graz", "made_ms": 1, "about": {"member": "graz"}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    (folder / "state" / "log").mkdir(parents=True)
    (folder / "site.toml").write_bytes(b"# toml\n")
    (folder / "state" / "log" / "entries").write_bytes(b"entry\n" * 1000)
    (folder / "key").write_bytes(b"a secret key")
    return folder


def sources(home: Path) -> list[tuple[str, Path]]:
    return [("site.toml", home / "site.toml"), ("state", home / "state"), ("key", home / "key")]


def written(home: Path) -> Path:
    target = home.parent / "graz.backup"
    archive.write(target, sources(home), kind="backup", **TOLD)
    return target


def test_what_was_packed_is_unpacked(home: Path) -> None:
    (home / "state" / "link").symlink_to("/etc/passwd")
    target = written(home)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with archive.unpacked(target, home.parent / "new") as (staging, contents):
        assert staging.name == ".new.restoring" and contents.party == "site graz"
    new = home.parent / "new"
    found = {path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()}
    assert found == set(contents.digests) == {"site.toml", "state/log/entries", "key"}  # and no link
    assert (new / "state" / "log" / "entries").read_bytes() == b"entry\n" * 1000
    assert stat.S_IMODE((new / "key").stat().st_mode) == 0o600
    assert {stat.S_IMODE(path.stat().st_mode) for path in (new, *new.rglob("*")) if path.is_dir()} == {0o700}


def test_nothing_is_overwritten(home: Path) -> None:
    target = written(home)
    with pytest.raises(ConfigError, match="overwrite"):
        archive.write(target, sources(home), kind="backup", **TOLD)
    with pytest.raises(ConfigError, match="already"), archive.unpacked(target, home):
        pass


def refused(target: Path) -> None:
    folder = target.parent / "new"
    with pytest.raises(DataError), archive.unpacked(target, folder):
        pass
    assert not folder.exists() and not (target.parent / ".new.restoring").exists()


def test_an_archive_that_is_cut_short_or_changed_anywhere_is_refused(home: Path) -> None:
    target = written(home)
    whole = target.read_bytes()
    length = archive.read_contents(target).length
    for cut in (0, 100, length, length + 600):
        target.write_bytes(whole[:cut])
        refused(target)
    for at in (0, 513, whole.index(b"entry\n") + 3000, whole.index(b"a secret key"), whole.rindex(b"site graz")):
        target.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused(target)
    target.write_bytes(whole)
    with archive.unpacked(target, target.parent / "new"):
        pass


def test_a_changed_file_is_taken_without_the_digests_twin(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = written(home)
    whole = target.read_bytes()
    target.write_bytes(whole.replace(b"a secret key", b"another key!"))
    decode = ArchiveContents.decode

    class Everything(dict[str, str]):
        def __ne__(self, other: object) -> bool:
            return False

    def lenient(data: bytes, where: str) -> ArchiveContents:
        found = decode(data, where)
        return ArchiveContents(
            kind=found.kind, party="", made_ms=0, about={}, digests=Everything(), length=found.length
        )

    monkeypatch.setattr(ArchiveContents, "decode", lenient)
    monkeypatch.setattr(archive, "_extract", lambda data, path: (_put(data, path), "")[1])
    with archive.unpacked(target, target.parent / "new") as (staging, _):
        assert (staging / "key").read_bytes() == b"another key!"


def _put(data: io.BufferedReader, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.read())


@pytest.mark.parametrize(
    "change", [{"about": []}, {"about": None}, {"signature": 5}, {"made_ms": "1"}, {"party": 1}, {"length": True}]
)
def test_what_an_archive_says_of_itself_has_its_types(change: dict[str, Any]) -> None:
    """It is read before anybody knows who wrote it: what is wrong with it is an error of ours, not a traceback."""
    told = ArchiveContents(kind="backup", party="site graz", made_ms=1, about={}, digests={}, length=0)
    assert ArchiveContents.decode(told.encode(), "copy") == told
    with pytest.raises(DataError, match="is not a complete backup"):
        ArchiveContents.decode(replace(told, **change).encode(), "copy")


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "./key", "BACKUP.json"])
def test_no_name_leads_out_of_the_folder(home: Path, name: str) -> None:
    target = home.parent / "evil.backup"
    with files.open_private(target) as file, tarfile.open(fileobj=file, mode="w") as packed:
        member = tarfile.TarInfo(name)
        member.size = 4
        packed.addfile(member, io.BytesIO(b"evil"))
        contents = ArchiveContents(kind="backup", **TOLD, digests={name: "0" * 64}, length=packed.offset)  # type: ignore[arg-type]
        last = tarfile.TarInfo(archive.CONTENTS)
        last.size = len(contents.encode())
        packed.addfile(last, io.BytesIO(contents.encode()))
    refused(target)
    assert not (home.parent / "outside").exists()


def test_what_a_kill_left_is_in_nobodys_way(home: Path) -> None:
    """Half an archive, and half a folder: both are begun again."""
    target = home.parent / "graz.backup"
    archive.partial(target).write_bytes(b"half of one")
    (home.parent / ".new.restoring").mkdir()
    (home.parent / ".new.restoring" / "half").touch()
    written(home)
    with archive.unpacked(target, home.parent / "new"):
        pass
    assert not (home.parent / "new" / "half").exists() and not archive.partial(target).exists()


# A move.


class Killed(BaseException):
    pass


def moved(home: Path, target: Path) -> ArchiveContents:
    return archive.move(home / "state", target, lambda: sources(home), [("key", home / "key")], lambda: TOLD)


def test_a_party_that_has_moved_is_there_and_no_longer_here(home: Path) -> None:
    target = home.parent / "graz.move"
    assert moved(home, target).kind == "move"
    assert not (home / "key").exists()
    with pytest.raises(ConfigError, match="has moved"):
        archive.refuse_moved(home / "state")
    with pytest.raises(ConfigError, match="has moved"):
        moved(home, home.parent / "twice.move")
    with archive.unpacked(target, home.parent / "new") as (staging, _):
        assert (staging / "key").read_bytes() == b"a secret key"
        assert not (staging / "state" / archive.MOVED).exists()


KILLS = {
    "before the mark": ("write_atomically", files),
    "before the keys are erased": ("erase", files),
    "before the archive is finished": ("finish", archive),
    "before it has its name": ("rename", archive.os),
}


@pytest.mark.parametrize("when", KILLS)
def test_killed_at_any_moment_there_is_one_that_can_act(home: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = home.parent / "graz.move"

    def kill(*_: object, **__: object) -> None:
        raise Killed

    name, module = KILLS[when]
    with monkeypatch.context() as patched:
        patched.setattr(module, name, kill)
        with pytest.raises(Killed):
            moved(home, target)
    assert not target.exists()
    beside = archive.partial(target)
    if when != "before it has its name":
        with pytest.raises(DataError):  # also under another name: it has no contents
            archive.read_contents(beside)
    acts_here = (home / "key").exists() and not (home / "state" / archive.MOVED).exists()
    assert acts_here == (when == "before the mark")
    moved(home, target)
    assert not (home / "key").exists()
    with archive.unpacked(target, home.parent / "new") as (staging, _):
        assert (staging / "key").read_bytes() == b"a secret key"


def test_a_link_does_not_move_and_nothing_is_left_of_the_try(home: Path) -> None:
    """What it leads to would not be in the archive, and a key behind it would be erased all the same."""
    elsewhere = home.parent / "disk"
    (home / "key").rename(elsewhere)
    (home / "key").symlink_to(elsewhere)
    target = home.parent / "graz.move"
    with pytest.raises(ConfigError, match="a link cannot move"):
        moved(home, target)
    assert elsewhere.read_bytes() == b"a secret key" and not archive.partial(target).exists()
    archive.refuse_moved(home / "state")


@pytest.mark.parametrize("kill", ["erase", "finish"])
def test_what_has_changed_since_it_was_packed_is_not_erased(
    home: Path, kill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = home.parent / "graz.move"

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(files if kill == "erase" else archive, kill, killed)
        with pytest.raises(Killed):
            moved(home, target)
    (home / "key").write_bytes(b"another key")
    with pytest.raises(ConfigError, match="not in the archive as it is here"):
        moved(home, target)
    assert (home / "key").read_bytes() == b"another key"
    (home / "key").write_bytes(bytes(12))  # as a kill in the middle of erasing leaves it
    assert moved(home, target).kind == "move" and not (home / "key").exists()


def test_a_move_goes_on_with_its_own_copy_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = home.parent / "graz.move"

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(files, "erase", killed)
        with pytest.raises(Killed):
            moved(home, target)
    archive.partial(target).write_bytes(b"of another try")
    with pytest.raises(DataError, match="not a complete backup"):
        moved(home, target)
    assert (home / "key").exists()
