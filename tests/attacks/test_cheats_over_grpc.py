"""Attacks by listed sites over real gRPC and TLS, every party a process of its own: boxes that do not open (A31, A32),
a vector that steers the model (A16), and cohorts that show one site (A33).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.local_federation.federation import Party
from tests.support.cheating_site import AWAY, VICTIM
from tests.support.federation import NumberFederation

pytestmark = pytest.mark.timeout(240)
ENTRY = "tests.support.cheating_site"
CHEAT = "site3"


def with_cheat(folder: Path, *withheld: str, deaf: bool = False) -> NumberFederation:
    federation = NumberFederation(folder, rounds=3, grace=30.0)
    folders = federation.folders
    home, output = folders.site(CHEAT), folders.folder / "output"
    words = [word for name in withheld for word in ("--without", name)]
    command = [ENTRY, "cheat", "--config", home / "site.toml", *words]
    federation.sites[CHEAT] = Party(CHEAT, command, output / f"{CHEAT}.log", home)
    if deaf:
        config = folders.coordinator / "coordinator.toml"
        command = [ENTRY, "deaf", "--config", config]
        federation.coordinator = Party("coordinator", command, output / "coordinator.log", folders.coordinator)
    return federation


def survivors(federation: NumberFederation) -> list[set[str]]:
    with federation.running():
        federation.wait_published(3)
    return [set(sites) for _, sites in federation.check_sums()]


def test_the_shares_are_published_and_all_are_summed(tmp_path: Path) -> None:
    federation = with_cheat(tmp_path / "answers")
    assert survivors(federation) == [set(federation.sites)] * 3
    assert "missing" not in federation.coordinator.text()


def test_a_dealer_that_does_not_answer_is_left_out_and_its_victim_is_not(tmp_path: Path) -> None:
    federation = with_cheat(tmp_path / "silent", "disclosure", "upload")
    assert survivors(federation) == [set(federation.sites) - {CHEAT}] * 3
    said = federation.coordinator.text()
    assert f"site {CHEAT}: silent" in said and f"site {VICTIM}: missing" not in said


def test_a_dealer_that_does_not_answer_twin(tmp_path: Path) -> None:
    """A coordinator that does not pass accusations on sums without the victim."""
    assert all(VICTIM not in sites for sites in survivors(with_cheat(tmp_path / "twin", deaf=True)))


def run_as(federation: NumberFederation, name: str, cheat: str) -> NumberFederation:
    """The party does what the command of `tests.support.cheating_site` says."""
    folders = federation.folders
    home = folders.coordinator if name == "coordinator" else folders.site(name)
    config = home / ("coordinator.toml" if name == "coordinator" else "site.toml")
    party = Party(name, [ENTRY, cheat, "--config", config], folders.folder / "output" / f"{name}.log", home)
    if name == "coordinator":
        federation.coordinator = party
    else:
        federation.sites[name] = party
    return federation


def steps(folder: Path, plan: str = "") -> list[float]:
    """How far the model moves in each of four rounds; the cheat steers from the third on."""
    federation = run_as(NumberFederation(folder, rounds=4, grace=30.0, aggregation=plan), CHEAT, "steer")
    with federation.running():
        federation.wait_published(4)
    return federation.steps()


def test_a_step_that_one_site_makes_long_is_shortened_to_the_cap(tmp_path: Path) -> None:
    first, second, *steered = steps(tmp_path / "caps")
    usual = min(first, second)
    assert all(step < 2.1 * usual for step in steered)


@pytest.mark.long
def test_a_step_that_one_site_makes_long_twin(tmp_path: Path) -> None:
    """No caps but the ceilings of the layout."""
    _, second, *steered = steps(tmp_path / "ceilings", "movement_window = 0\n")
    assert all(step > 4 * second for step in steered)


def alarms(folder: Path, *cheats: str) -> str:
    """What the victim says while a coordinator chooses the cohorts of four rounds."""
    federation = run_as(NumberFederation(folder, sites=6, rounds=4, grace=30.0), "coordinator", "chooser")
    for cheat in cheats:
        run_as(federation, VICTIM, cheat)
    with federation.running():
        federation.wait_published(4)
    cohorts = [set(federation.sites) - set(sites) for _, sites in federation.check_sums()]
    assert cohorts == [set(away) for away in AWAY], "never a refusal: an honest dropout looks the same"
    return federation.sites[VICTIM].text()


def test_a_site_that_chosen_cohorts_show_is_warned(tmp_path: Path) -> None:
    assert "together the sums so far show this site's update" in alarms(tmp_path / "alarm")


@pytest.mark.long
def test_a_site_that_chosen_cohorts_show_twin(tmp_path: Path) -> None:
    assert "together the sums so far" not in alarms(tmp_path / "twin", "forgetful")
