"""`site-agent ledger` as a hospital types it: begun once, shown, and noise proposed for a wanted epsilon."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lazaret.errors import LedgerError
from npr.wire_layout import export
from security.clock import SystemClock
from security.consortium.authority import Authority
from security.identity.pki import Role
from site_agent.cli import cli
from tests.support.consortium_world import World
from tests.support.private_world import PLAN, RECIPE, ROUNDS, SPEC
from tests.support.site_world import write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of a private federation of today."""
    clock = SystemClock()
    folder = tmp_path_factory.mktemp("federation")
    authority = Authority.create(folder / "consortium", "lesions", passphrase=None, now_ms=clock.now_ms())
    world = World(folder, authority, clock)
    export(authority.folder / "initial.safetensors", SPEC, RECIPE, rounds=ROUNDS)
    world.write_plan(PLAN)
    world.enroll("hub", Role.COORDINATOR, hosts=("localhost",))
    for site in ("graz", "linz", "vienna"):
        world.enroll(site)
    world.publish()
    world.identity("graz").install_manifest(world.published(), now_ms=world.now)
    return write_config(folder / "agent", world.identity("graz").folder, authority.folder / "initial.safetensors")


def ledger(config: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--config", str(config), "ledger", *words])


def test_a_ledger_is_begun_once_and_proposes_noise(config: Path) -> None:
    assert "ledger --create" in ledger(config).output
    proposed = re.search(r"for epsilon 6: noise = ([0-9.]+)", ledger(config, "--epsilon", "6").output)
    assert proposed is not None and float(proposed[1]) > 1
    begun = ledger(config, "--create", "--json")
    assert begun.exit_code == 0, begun.output
    told = json.loads(begun.stdout)
    assert (told["cap"], told["epsilon"], told["rounds_affordable"], told["unit"]) == (20, 0, ROUNDS, "patient")
    assert Path(told["ledger"]).stat().st_mode & 0o777 == 0o600
    assert Path(told["ledger"]).parent != Path(told["anchor"]).parent
    assert f"{ROUNDS} of {ROUNDS} more rounds fit" in ledger(config).output
    assert isinstance(ledger(config, "--create").exception, LedgerError), "a budget is never begun twice"
