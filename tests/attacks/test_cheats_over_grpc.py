"""A31 and A32 over real gRPC and TLS: a listed site deals its victim boxes that do not open, every party a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.local_federation.processes import Party
from tests.support.cheating_site import VICTIM
from tests.support.federation import NumberFederation

pytestmark = pytest.mark.timeout(240)
ENTRY = "tests.support.cheating_site"
CHEAT = "site3"


def with_cheat(folder: Path, *withheld: str, deaf: bool = False) -> NumberFederation:
    federation = NumberFederation(folder, rounds=3, grace=30.0)
    grounds = federation.grounds
    home, output = grounds.site(CHEAT), grounds.folder / "output"
    words = [word for name in withheld for word in ("--without", name)]
    command = [ENTRY, "cheat", "--config", home / "site.toml", *words]
    federation.sites[CHEAT] = Party(CHEAT, command, output / f"{CHEAT}.log", home)
    if deaf:
        config = grounds.coordinator / "coordinator.toml"
        command = [ENTRY, "deaf", "--config", config]
        federation.coordinator = Party("coordinator", command, output / "coordinator.log", grounds.coordinator)
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
