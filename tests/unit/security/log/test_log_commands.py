"""Segments that were archived: the log goes on, is verified with them, and is never clean if one is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lazaret.errors import AuditLogError, ConfigError
from security.audit.verify import verify
from security.log import log_commands
from security.log.log_commands import archive_segments, hand_over
from security.log.machine import Heartbeat
from security.log.reader import LogFollower, LogReader
from security.log.store import ARCHIVES
from tests.support.audit_attacks import Lonely, weighty


@pytest.fixture
def long(lonely: Lonely, monkeypatch: pytest.MonkeyPatch) -> Lonely:
    """Five segments of eight entries."""
    for name in ("log.machine", "log.store", "log.reader", "log.opening", "audit.scan"):
        monkeypatch.setattr(f"security.{name}.SEGMENT", 8)
    for _ in range(30):
        lonely.log.append(Heartbeat(size=lonely.log.size))
    lonely.log.checkpoint()
    return lonely


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "nas" / "graz"


def codes(folder: Path, long: Lonely, *archives: Path) -> set[str]:
    """As an auditor sees it, who follows no path that a log names."""
    token = ARCHIVES.set(archives)
    try:
        return weighty(verify(folder, long.keys).findings)
    finally:
        ARCHIVES.reset(token)


def here(long: Lonely) -> list[str]:
    return sorted(path.name for path in (long.folder / "segments").iterdir())


def test_a_log_goes_on_after_its_older_segments_were_archived(long: Lonely, archive: Path) -> None:
    assert archive_segments(long.log, archive) == [f"0000000{number}.jsonl" for number in range(3)]
    assert here(long) == ["00000003.jsonl", "00000004.jsonl"]
    long.log.append(Heartbeat(size=long.log.size))
    long.log.close()
    log = long.reopen()  # which reads all of it again
    every = [record.seq for record in LogReader(long.folder).records()]
    assert every == list(range(log.size))
    assert len(list(LogFollower(long.folder).new_lines())) == log.size
    for _ in range(20):
        log.append(Heartbeat(size=log.size))
    assert archive_segments(log, archive)[0] == "00000003.jsonl" and len(here(long)) == 2
    log.close()
    assert codes(long.folder, long, archive) == set()


def test_without_the_archive_a_log_is_not_clean_and_does_not_start(long: Lonely, archive: Path) -> None:
    archive_segments(long.log, archive)
    long.log.close()
    assert "SegmentMissing" in codes(long.folder, long)
    (archive / "00000001.jsonl").unlink()
    assert "SegmentMissing" in codes(long.folder, long, archive)
    archive.rename(archive.with_name("unmounted"))
    with pytest.raises(AuditLogError):
        long.reopen()


def test_a_log_whose_beginning_is_elsewhere_is_not_followed_in_silence(long: Lonely, archive: Path) -> None:
    archive_segments(long.log, archive)
    long.log.close()
    for known, whole in (((), False), ((archive,), True)):
        token = ARCHIVES.set(known)
        try:
            if whole:
                assert len(list(LogFollower(long.folder).new_lines())) == long.log.size
                continue
            with pytest.raises(AuditLogError, match="segment 0 is not here") as caught:
                list(LogFollower(long.folder).new_lines())
            assert caught.value.hint is not None and "--segments" in caught.value.hint
        finally:
            ARCHIVES.reset(token)


def test_two_folders_may_hold_the_same_segment(long: Lonely, archive: Path) -> None:
    """A copy on each of two disks."""
    archive_segments(long.log, archive)
    long.log.close()
    second = archive.with_name("second")
    shutil.copytree(archive, second)
    assert codes(long.folder, long, archive, second) == set()
    (second / "00000001.jsonl").unlink()
    assert codes(long.folder, long, second, archive) == set(), "each has a part"


def test_a_changed_segment_in_an_archive_is_a_finding(long: Lonely, archive: Path) -> None:
    archive_segments(long.log, archive)
    long.log.close()
    path = archive / "00000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"size":10', b'"size":11'))
    assert "RootMismatch" in codes(long.folder, long, archive)
    with pytest.raises(AuditLogError):
        long.reopen()


def test_an_auditor_follows_no_path_that_a_log_names_twin(long: Lonely, archive: Path) -> None:
    """The party's own process does; with that, a copy could have an auditor read files of its own machine."""
    archive_segments(long.log, archive)
    long.log.close()
    assert "SegmentMissing" in codes(long.folder, long)
    followed = {finding.code for finding in verify(long.folder, long.keys).findings}
    assert "SegmentMissing" not in followed


def test_a_link_in_an_archive_is_not_followed(long: Lonely, archive: Path) -> None:
    archive_segments(long.log, archive)
    long.log.close()
    (archive / "00000001.jsonl").rename(archive.parent / "elsewhere")
    (archive / "00000001.jsonl").symlink_to(archive.parent / "elsewhere")
    assert "HostileFolder" in codes(long.folder, long, archive)


def test_an_auditor_gets_the_whole_log(long: Lonely, archive: Path, tmp_path: Path) -> None:
    archive_segments(long.log, archive)
    hand_over(long.log, tmp_path / "copy", auditor="Dr. Weiss", purpose="audit")
    long.log.close()
    assert not (tmp_path / "copy" / "archive").exists()
    assert codes(tmp_path / "copy", long) == set()


def test_what_a_kill_leaves_is_archived_again(long: Lonely, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(log_commands.Path, "unlink", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            archive_segments(long.log, archive)
    assert len(here(long)) == 5
    long.log.close()
    assert codes(long.folder, long, archive) == set()
    log = long.reopen()
    assert len(archive_segments(log, archive)) == 3
    log.close()


def test_archives_are_not_mixed(long: Lonely, archive: Path) -> None:
    archive.mkdir(parents=True)
    (archive / "LOG").write_text("lesions/site/linz\n")
    with pytest.raises(ConfigError, match="another log"):
        archive_segments(long.log, archive)
    assert len(here(long)) == 5 and not (long.folder / "archive").exists()
    archive_segments(long.log, archive.with_name("own"))
    for _ in range(20):
        long.log.append(Heartbeat(size=long.log.size))
    with pytest.raises(ConfigError, match="another folder"):
        archive_segments(long.log, archive.with_name("second"))


def test_nothing_old_is_no_archive(lonely: Lonely, archive: Path) -> None:
    with pytest.raises(ConfigError, match="old enough"):
        archive_segments(lonely.log, archive)
    assert not archive.exists()


@pytest.mark.parametrize("inside", ["segments", "."])
def test_a_log_is_not_its_own_archive(long: Lonely, inside: str) -> None:
    """Each segment would be copied onto itself, and then removed."""
    before = here(long)
    with pytest.raises(ConfigError, match="outside its log"):
        archive_segments(long.log, long.folder / inside)
    assert here(long) == before
    long.log.close()


def test_another_segment_in_an_archive_is_not_replaced(long: Lonely, archive: Path) -> None:
    archive.mkdir(parents=True)
    (archive / "00000001.jsonl").write_bytes(b"older")
    with pytest.raises(ConfigError, match="another segment is there"):
        archive_segments(long.log, archive)
    assert "00000000.jsonl" in here(long)
    long.log.close()
