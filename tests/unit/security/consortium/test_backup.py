"""The consortium's folder comes back only if it would sign nothing twice."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from lazaret import archive
from lazaret.errors import ConfigError, ManifestRejected
from security.consortium import backup
from security.consortium.authority import Authority
from tests.support.consortium_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World.make(tmp_path)
    made.publish()
    return made


def backed_up(world: World) -> Path:
    target = world.folder / "lesions.backup"
    backup.back_up(world.authority, target, now_ms=world.now)
    return target


def held_by_a_member(world: World) -> Path:
    path = world.folder / "held.json"
    path.write_bytes(world.published())
    return path


def test_the_newest_backup_comes_back_and_signs_the_next_version(world: World) -> None:
    target = backed_up(world)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    backup.restore_root(target, world.folder / "new", [held_by_a_member(world)], now_ms=world.now)
    restored = World(world.folder, Authority.open(world.folder / "new"), world.clock)
    assert restored.publish().version == 2
    assert [record.member for record in restored.authority.members()] == ["graz", "hub", "linz", "vienna"]


def test_an_older_backup_is_refused(world: World) -> None:
    target = backed_up(world)
    world.authority.revoke("graz", "stolen", now_ms=world.now)
    world.enroll("wels")
    world.publish()
    with pytest.raises(ManifestRejected, match="members have version 2"):
        backup.restore_root(target, world.folder / "new", [held_by_a_member(world)], now_ms=world.now)
    assert not (world.folder / "new").exists()


def test_an_older_backup_signs_a_version_twice_twin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison a revoked site would be a member again, in another manifest of the same version."""
    target, held = backed_up(world), held_by_a_member(world)
    world.authority.revoke("graz", "stolen", now_ms=world.now)
    world.enroll("wels")
    second = world.publish()
    backup.restore_root(target, world.folder / "new", [held], now_ms=world.now)  # the older manifest is given
    forged = World(world.folder, Authority.open(world.folder / "new"), world.clock).publish()
    assert forged.version == second.version and forged.digest != second.digest
    assert "graz" in forged.sites and "graz" not in second.sites


def test_of_several_members_the_newest_manifest_counts(world: World) -> None:
    """One member is behind. What another one has shows that the backup is too."""
    target = backed_up(world)
    behind = held_by_a_member(world).rename(world.folder / "behind.json")
    world.enroll("wels")
    world.publish()
    with pytest.raises(ManifestRejected, match="members have version 2"):
        backup.restore_root(target, world.folder / "new", [behind, held_by_a_member(world)], now_ms=world.now)
    assert not (world.folder / "new").exists()


def test_the_command_names_the_version_that_nobody_may_have(world: World) -> None:
    target, held = backed_up(world), held_by_a_member(world)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backup.SystemClock, "now_ms", lambda _: world.now)
        words = [str(target), str(world.folder / "new"), "--manifest", str(held)]
        done = CliRunner().invoke(backup.restore, words)
    assert done.exit_code == 0 and "the next manifest is version 2: if any member already has" in done.output


def test_earlier_backups_are_not_in_a_backup(world: World) -> None:
    """The folder is often the current one: `consortium backup lesions.backup` in it."""
    first = world.authority.folder / "first.backup"
    backup.back_up(world.authority, first, now_ms=world.now)
    (world.authority.folder / "half.backup.partial").write_bytes(b"of a try that was killed")
    (world.authority.folder / "notes.tar").write_bytes(b"no archive of ours")
    second = backup.back_up(world.authority, world.authority.folder / "second.backup", now_ms=world.now)
    assert {name for name in second.digests if "backup" in name} == set() and "notes.tar" in second.digests
    assert set(second.digests) - {"notes.tar"} == set(archive.read_contents(first).digests)


def test_the_newest_manifest_is_asked_for(world: World) -> None:
    with pytest.raises(ConfigError, match="together with the newest manifest"):
        backup.restore_root(backed_up(world), world.folder / "new", (), now_ms=world.now)


def test_before_the_first_manifest_none_is_needed(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    backup.restore_root(backed_up(world), world.folder / "new", (), now_ms=world.now)
    assert Authority.open(world.folder / "new").unlock(None)
