"""Ledgers in copies: all that are the site's own move, a closed one stays closed, and nothing is written elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lazaret import archive
from lazaret.errors import ConfigError, LedgerError
from security.clock import ManualClock
from security.dp.ledger import Ledger
from security.rng import SystemRandomness
from site_agent import backup, privacy
from site_agent.backup import of_population
from site_agent.config import SiteConfig
from site_agent.privacy import create_ledger, ledger_files
from tests.support.consortium_world import NOW
from tests.unit.site_agent.test_backup import (
    TERMS,
    at_home,
    backed_up,
    begin_again,
    book,
    booked,
    config,
    lose,
    restored,
)

__all__ = ["at_home", "config"]


def moved(config: SiteConfig) -> Path:
    target = config.path.parent.parent / "graz.move"
    backup.move_away(config, target, now_ms=NOW)
    return target


def begun_for(config: SiteConfig, population: str) -> SiteConfig:
    other = of_population(config, population)
    with ledger_files(other) as store:
        Ledger.create(store, replace(TERMS, population=population), version="v1", clock=ManualClock())
    return other


# Outside of the folder.


def test_a_ledger_elsewhere_is_not_written_without_a_word(config: SiteConfig) -> None:
    target = moved(config)
    place = config.path.parent.parent
    config.ledger_anchor.unlink()
    with pytest.raises(ConfigError, match="outside of the folder that is restored") as caught:
        restored(config, target, None, "neither", "nor")
    assert caught.value.hint is not None and f"--outside {config.ledger.parent}" in caught.value.hint
    assert not (place / "new").exists() and not config.ledger.exists() and not config.ledger_anchor.exists()
    with pytest.raises(ConfigError, match="outside of the folder"):
        restored(config, target, None, "disk")  # one of the two
    assert not config.ledger.exists()
    assert booked(restored(config, target, None, "disk", "other")) == 2


def test_nor_is_the_anchor_of_a_budget_that_is_spent(config: SiteConfig) -> None:
    target = backed_up(config)
    lose(config)
    with pytest.raises(ConfigError, match="outside of the folder"):
        restored(config, target, "graz-2", "neither")
    assert not config.ledger_anchor.exists() and not (config.path.parent.parent / "new").exists()


def test_a_ledger_elsewhere_is_written_twin(config: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check a copy would say where on this machine files are written."""
    monkeypatch.setattr(backup, "_check_places", lambda *_: None)
    target = moved(config)
    restored(config, target, None, "neither")
    assert config.ledger.exists()


def test_a_ledger_that_is_only_read_needs_no_word(config: SiteConfig) -> None:
    assert booked(restored(config, backed_up(config), "graz-2", "neither")) == 2


def test_a_restore_that_is_refused_closes_no_budget(config: SiteConfig) -> None:
    """The ledger comes last: what is wrong with a name or a token is known before."""
    target = backed_up(config)
    lose(config)
    with pytest.raises(ConfigError, match="needs another name"):
        restored(config, target, "graz")
    assert not config.ledger_anchor.exists()


# A ledger that is closed.


def test_a_site_with_an_anchor_alone_moves_and_stays_closed(at_home: SiteConfig) -> None:
    at_home.ledger.unlink()
    target = moved(at_home)
    new = restored(at_home, target, name=None)
    assert new.ledger_anchor.exists() and not new.ledger.exists()
    with pytest.raises(LedgerError, match="already has a ledger"):
        begin_again(new)


def test_and_its_backup_knows_it(at_home: SiteConfig) -> None:
    at_home.ledger.unlink()
    target = backed_up(at_home)
    assert archive.read_contents(target).about["ledger"]["seq"] == json.loads(at_home.ledger_anchor.read_bytes())["seq"]
    with pytest.raises(LedgerError, match="already has a ledger"):
        begin_again(restored(at_home, target))


# Ledgers of other patients.


def test_every_ledger_in_the_folder_of_the_site_moves(at_home: SiteConfig) -> None:
    begun_for(at_home, "children")
    target = moved(at_home)
    assert not of_population(at_home, "children").ledger.exists()
    new = restored(at_home, target, name=None)
    assert booked(new) == 2 and booked(of_population(new, "children")) == 0
    assert archive.read_contents(target).about["left_behind"] == []


def test_one_that_others_may_use_stays_and_is_named(config: SiteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    other = begun_for(config, "children")
    target = moved(config)
    assert other.ledger.exists()
    backup._say_left(archive.read_contents(target))
    assert "ledgers of children stay on the old machine" in capsys.readouterr().err


def test_a_ledger_that_somebody_books_in_does_not_move(at_home: SiteConfig) -> None:
    other = begun_for(at_home, "children")
    with ledger_files(other) as store:
        store.load()
        with pytest.raises(LedgerError, match="another process uses"):
            moved(at_home)
    assert at_home.ledger.exists() and not (at_home.state / archive.MOVED).exists()


# A ledger that the backup could not know.


class Plan:
    """What `create_ledger` asks of a plan."""

    def terms(self, _: SiteConfig) -> object:
        return TERMS


def before_the_ledger(config: SiteConfig) -> SiteConfig:
    """Backed up, then begun and booked in, then lost."""
    lose(config)
    target = backed_up(config)
    begin_again(config)
    book(config, 1)
    lose(config)
    return restored(config, target)


def test_a_restored_site_begins_no_ledger_without_a_word(at_home: SiteConfig) -> None:
    new = before_the_ledger(at_home)
    with pytest.raises(LedgerError, match="restored from a backup of graz, which knew no ledger"):
        create_ledger(new, Plan(), rng=SystemRandomness())  # type: ignore[arg-type]
    assert not new.ledger_anchor.exists() and not privacy.sides_key_file(new).exists()
    create_ledger(new, Plan(), rng=SystemRandomness(), first=True)  # type: ignore[arg-type]


def test_it_begins_one_twin(at_home: SiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that was booked after the backup would be forgotten."""
    monkeypatch.setattr(privacy, "_refuse_restored", lambda _: None)
    new = before_the_ledger(at_home)
    create_ledger(new, Plan(), rng=SystemRandomness())  # type: ignore[arg-type]
    assert booked(new) == 0
