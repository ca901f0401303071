"""Copies and the privacy ledger: what was spent stays spent, whatever is restored where."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from lazaret.errors import ConfigError, LedgerError
from security.clock import ManualClock
from security.dp.accountant import dp_sgd_event, rate_at_least
from security.dp.ledger import Ledger, Terms, Unit
from security.dp.ledger_store import FileStore
from security.dp.noise import NoiseSource
from security.identity.enrolment import Identity
from security.identity.member_copies import RestoreOptions
from security.identity.pki import fingerprint
from site_agent import backup
from site_agent.config import SiteConfig
from site_agent.privacy import ledger_files
from tests.support.consortium_world import NOW, World
from tests.support.site_world import write_config

TERMS = Terms(population="patients", unit=Unit.PATIENT, delta=1e-5, cap=3.0, order=8.0)
ROUND = (dp_sgd_event(multiplier=2.0, clip=1.0, rate=rate_at_least(0.02), steps=50),)


@pytest.fixture
def config(tmp_path: Path) -> SiteConfig:
    """A site with a ledger in which two rounds are booked; the ledger is on disks of its own."""
    world = World.make(tmp_path / "world")
    world.publish()
    world.identity("graz").install_manifest(world.published(), now_ms=NOW)
    home = tmp_path / "graz"
    path = write_config(home, Path("identity"), Path("initial.safetensors"))
    disks = f"[privacy]\nledger = '{tmp_path}/disk'\nanchor = '{tmp_path}/other'"
    path.write_text(path.read_text().replace("[privacy]", disks))
    (tmp_path / "world" / "graz").rename(home / "identity")
    shutil.copyfile(world.authority.folder / "initial.safetensors", home / "initial.safetensors")
    (home / "state").mkdir()
    config = SiteConfig.read(path)
    with ledger_files(config) as store:
        Ledger.create(store, TERMS, version="v1", clock=ManualClock())
    book(config, 1, 2)
    return config


def book(config: SiteConfig, *rounds: int) -> None:
    with ledger_files(config) as store:
        ledger = Ledger.open(store, population="patients")
        for number in rounds:
            ledger.commit(ledger.reserve(run="r", round_number=number, events=ROUND, noise=NoiseSource()))


def booked(config: SiteConfig) -> int:
    state = ledger_files(config).peek()
    assert state is not None
    return len(state.bookings)


def restored(config: SiteConfig, target: Path, name: str | None = "graz-2", *outside: str) -> SiteConfig:
    """:param outside: names of folders beside the one that is restored; those of the fixture if left out."""
    place = config.path.parent.parent
    folders = [place / one for one in (outside or ("disk", "other"))]
    known = fingerprint(Identity(folder=config.identity).root())
    options = RestoreOptions(name=name, root_fingerprint=known)
    backup.restore_site(target, place / "new", options, outside=folders)
    return SiteConfig.read(place / "new" / "site.toml")


def backed_up(config: SiteConfig) -> Path:
    target = config.path.parent.parent / "graz.backup"
    backup.back_up(config, target, now_ms=NOW)
    return target


@pytest.mark.parametrize("move", [False, True])
def test_methods_of_one_s_own_are_in_every_copy(config: SiteConfig, move: bool) -> None:
    """Their approval is in site.toml, and without the file the run would stop at the new machine."""
    elsewhere = config.path.parent.parent / "methods"
    elsewhere.mkdir()
    (elsewhere / "own.py").write_text("# a method\n")
    text = config.path.read_text().replace("[site]\n", f"[site]\nplugins = '{elsewhere}'\n", 1)
    config.path.write_text(text.replace("# plugins = []", f'plugins = ["{"0" * 64}"]'))
    config, target = SiteConfig.read(config.path), config.path.parent.parent / "copy"
    (backup.move_away if move else backup.back_up)(config, target, now_ms=NOW)
    shutil.rmtree(elsewhere)
    new = restored(config, target, None if move else "graz-2")
    assert new.plugins == new.path.parent / "plugins" and new.policy.plugins == ("0" * 64,)
    assert (new.plugins / "own.py").read_text() == "# a method\n"


def lose(config: SiteConfig) -> None:
    config.ledger.unlink()
    config.ledger_anchor.unlink()


def begin_again(config: SiteConfig) -> None:
    with ledger_files(config) as store:
        Ledger.create(store, TERMS, version="v1", clock=ManualClock())


def test_without_its_ledger_a_budget_counts_as_spent(config: SiteConfig) -> None:
    target = backed_up(config)
    book(config, 3)  # which the backup does not know
    lose(config)
    new = restored(config, target)
    with pytest.raises(LedgerError, match="missing"):
        ledger_files(new).peek()
    with pytest.raises(LedgerError, match="already has a ledger"):
        begin_again(new)


def test_a_ledger_of_the_day_of_the_backup_does_not_open_the_budget_again(config: SiteConfig) -> None:
    """Somebody has kept the file: it has every line that the backup knew, and none that came later."""
    target, old = backed_up(config), config.ledger.read_bytes()
    book(config, 3)
    lose(config)
    new = restored(config, target)
    new.ledger.write_bytes(old)
    with pytest.raises(LedgerError, match="newest line of the ledger is missing"):
        ledger_files(new).peek()


def test_a_budget_begins_again_twin(config: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Did a restore not say that there was a ledger, three rounds would be forgotten."""
    monkeypatch.setattr(FileStore, "close_for_good", lambda *_: None)
    target = backed_up(config)
    lose(config)
    new = restored(config, target)
    begin_again(new)
    assert booked(new) == 0


def test_a_ledger_that_has_survived_goes_on(config: SiteConfig) -> None:
    target = backed_up(config)
    book(config, 3)
    assert booked(restored(config, target)) == 3


def test_a_ledger_older_than_the_backup_is_refused(config: SiteConfig) -> None:
    old = config.ledger.read_bytes(), config.ledger_anchor.read_bytes()
    book(config, 3)
    target = backed_up(config)
    config.ledger.write_bytes(old[0])
    config.ledger_anchor.write_bytes(old[1])
    with pytest.raises(LedgerError, match="older than this backup"):
        restored(config, target)
    assert not (config.path.parent.parent / "new").exists()


def test_an_older_ledger_is_taken_twin(config: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "_keep_spent", lambda *_: None)
    old = config.ledger.read_bytes(), config.ledger_anchor.read_bytes()
    book(config, 3)
    target = backed_up(config)
    config.ledger.write_bytes(old[0])
    config.ledger_anchor.write_bytes(old[1])
    assert booked(restored(config, target)) == 2


def test_a_ledger_moves_and_is_gone_here(config: SiteConfig) -> None:
    target = config.path.parent.parent / "graz.move"
    backup.move_away(config, target, now_ms=NOW)
    assert not config.ledger.exists()
    with pytest.raises(LedgerError):
        begin_again(config)  # another study on this machine must not, either
    new = restored(config, target, name=None)
    assert booked(new) == 2 and not list(new.path.parent.glob("*ledger*"))


@pytest.fixture
def at_home(config: SiteConfig) -> SiteConfig:
    """The ledger where it is if nobody says otherwise: inside the folder that is restored."""
    home = config.path.parent
    places = f"ledger = '{home.parent}/disk'\nanchor = '{home.parent}/other'"
    config.path.write_text(config.path.read_text().replace(places, ""))
    (home.parent / "disk").rename(home / "ledger")
    (home.parent / "other").rename(home / "ledger-anchor")
    return SiteConfig.read(config.path)


def test_a_ledger_inside_the_folder_moves_too(at_home: SiteConfig) -> None:
    target = at_home.path.parent.parent / "graz.move"
    backup.move_away(at_home, target, now_ms=NOW)
    new = restored(at_home, target, name=None)
    assert booked(new) == 2 and new.ledger.is_relative_to(new.path.parent.resolve())


def test_a_lost_ledger_inside_the_folder_counts_as_spent(at_home: SiteConfig) -> None:
    target = backed_up(at_home)
    lose(at_home)
    new = restored(at_home, target)
    with pytest.raises(LedgerError, match="already has a ledger"):
        begin_again(new)


def test_a_move_that_was_killed_after_the_ledger_goes_on(at_home: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    target = at_home.path.parent.parent / "graz.move"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backup.archive, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            backup.move_away(at_home, target, now_ms=NOW)
    assert not at_home.ledger.exists()
    backup.move_away(at_home, target, now_ms=NOW)
    assert booked(restored(at_home, target, name=None)) == 2


def test_a_ledger_that_has_grown_since_the_copy_stays(config: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two studies may share it: what the other one has booked meanwhile must not be forgotten."""
    target = config.path.parent.parent / "graz.move"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backup.archive.files, "erase", killed)
        with pytest.raises(KeyboardInterrupt):
            backup.move_away(config, target, now_ms=NOW)
    book(config, 3)
    with pytest.raises(ConfigError, match="not in the archive as it is here"):
        backup.move_away(config, target, now_ms=NOW)
    assert booked(config) == 3


@pytest.mark.parametrize("line", ['state    = "{state}"', 'state="{state}"', '  state = "{state}"'])
def test_folders_are_found_however_they_are_written(config: SiteConfig, line: str) -> None:
    """Else a moved site would start with its keys and without what it has signed."""
    text = config.path.read_text()
    (old,) = [row for row in text.splitlines() if row.startswith("state = ")]
    config.path.write_text(text.replace(old, line.format(state=config.state)))
    target = config.path.parent.parent / "graz.move"
    backup.move_away(SiteConfig.read(config.path), target, now_ms=NOW)
    new = restored(config, target, name=None)
    assert new.state == (new.path.parent / "state").resolve() or new.state == new.path.parent / "state"


def test_folders_that_cannot_be_found_are_refused(config: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup.control, "place_here", lambda _: None)
    text = config.path.read_text()
    (old,) = [row for row in text.splitlines() if row.startswith("state = ")]
    config.path.write_text(text.replace(old, f'state = "{config.state}"'))
    target = config.path.parent.parent / "graz.move"
    backup.move_away(SiteConfig.read(config.path), target, now_ms=NOW)
    with pytest.raises(ConfigError, match="does not say where `state` is"):
        restored(config, target, name=None)


def test_a_restore_that_was_killed_is_repeated(config: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    target = config.path.parent.parent / "graz.move"
    backup.move_away(config, target, now_ms=NOW)
    with monkeypatch.context() as patched:
        patched.setattr(backup.archive.os, "replace", _killed_at(".new.restoring", patched))
        with pytest.raises(KeyboardInterrupt):
            restored(config, target, name=None)
    assert booked(restored(config, target, name=None)) == 2


def _killed_at(name: str, patched: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]  # a stand-in for os.replace
    real = backup.archive.os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(source).name == name:
            raise KeyboardInterrupt
        real(source, target)

    return replace


def test_another_ledger_is_not_replaced_by_a_moved_one(config: SiteConfig) -> None:
    target = config.path.parent.parent / "graz.move"
    backup.move_away(config, target, now_ms=NOW)
    config.ledger_anchor.unlink()
    begin_again(config)
    with pytest.raises(LedgerError, match="another privacy ledger"):
        restored(config, target, name=None)
    assert booked(config) == 0


def test_state_says_what_may_be_copied(config: SiteConfig) -> None:
    for name in ("wal", "memory", "unheard-of"):
        (config.state / name).mkdir()
    done = CliRunner().invoke(backup.state, ["--config", str(config.path)])
    assert done.exit_code == 0
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    assert "backup and move" in lines["state/memory"] and "backup and move" in lines["identity/manifest.json"]
    for private in ("state/wal", "state/unheard-of", "identity/keys", str(config.ledger)):
        assert "move only" in lines[private]


def test_a_moved_site_keeps_its_keys_and_a_restored_one_has_others(config: SiteConfig) -> None:
    first = Identity(folder=config.identity).sealing_key()
    target = backed_up(config)
    new = restored(config, target)
    assert Identity(folder=new.identity).sealing_key() != first
    assert Identity(folder=new.identity).manifest(now_ms=NOW) is not None  # an older manifest is not taken later
