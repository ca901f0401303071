"""`site-agent ledger` as a hospital types it: begun once, shown, and noise proposed for a wanted epsilon."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lazaret.errors import LedgerError
from npr.data.generated import ISIC_CLASSES
from npr.wire_layout import export
from security.clock import SystemClock
from security.consortium.authority import Authority
from security.dp.accountant import dp_sgd_event, rate_at_least
from security.dp.ledger import Ledger
from security.dp.noise import NoiseSource
from security.identity.enrolment import Identity
from security.identity.pki import Role
from site_agent.assembly import read_membership
from site_agent.cli import cli
from site_agent.config import SiteConfig
from site_agent.privacy import PrivatePlan, ledger_files
from tests.cli.test_quick_commands import loaded
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
    export(authority.folder / "initial.safetensors", SPEC, RECIPE, rounds=ROUNDS, classes=ISIC_CLASSES)
    world.write_plan(PLAN)
    world.enroll("hub", Role.COORDINATOR, hosts=("localhost",))
    for site in ("graz", "linz", "vienna"):
        world.enroll(site)
    world.publish()
    world.identity("graz").install_manifest(world.published(), now_ms=world.now)
    return write_config(folder / "agent", world.identity("graz").folder, authority.folder / "initial.safetensors")


def ledger(config: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--config", str(config), "ledger", *words])


def test_a_ledger_that_was_never_used_can_be_removed(config: Path) -> None:
    """As one that was begun under yesterday's manifest, with another cap."""
    told = SiteConfig.read(config)
    assert ledger(config, "--create").exit_code == 0
    key = (told.sides / "key").read_bytes()
    assert ledger(config, "--undo").exit_code == 0
    assert ledger_files(told).peek() is None and not told.ledger.exists() and not told.ledger_anchor.exists()
    assert ledger(config, "--create").exit_code == 0
    assert (told.sides / "key").read_bytes() == key, "patients keep their sides"
    with ledger_files(told) as held:
        Ledger.open(held, population=told.privacy.population)
        assert isinstance(ledger(config, "--undo").exception, LedgerError), "an agent uses it"
    assert ledger(config, "--undo").exit_code == 0


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


def test_figures_are_kept_and_a_command_that_shows_them_loads_no_accountant(config: Path) -> None:
    """Its imports are what takes seconds. A round that was booked since does not need it: its steps are known."""
    told = SiteConfig.read(config)
    if ledger_files(told).peek() is None:
        ledger(config, "--create")
    first = ledger(config).output
    kept = told.ledger.with_name(told.ledger.name + ".figures.json")
    assert kept.stat().st_mode & 0o777 == 0o600
    _, manifest = read_membership(Identity(folder=told.identity), SystemClock())
    plan = PrivatePlan.of(told, manifest)
    assert plan is not None
    with ledger_files(told) as store:
        opened = Ledger.open(store, population=told.privacy.population)
        opened.begin_run(plan.run_terms(opened.state.terms.delta))
        events = plan.schedule.round_events(1)
        opened.commit(opened.reserve(run=plan.run, round_number=1, events=events, noise=NoiseSource()))
    for command in ("ledger", "status"):
        count, heavy = loaded("site_agent.cli", "--config", str(config), command)
        assert count < 750 and not heavy & {"dp_accounting", "scipy", "torch", "timm", "grpc"}, (command, count, heavy)
    assert ledger(config).output != first
    for damage in ("{", '{"accountant": "dp-accounting 0", "figures": [[["x"], [0]]]}', '{"figures": 3}'):
        kept.write_text(damage)
        assert "is booked for each patient" in ledger(config).output


def test_a_ledger_is_computed_again_by_accountants_that_share_no_code(config: Path) -> None:
    told = SiteConfig.read(config)
    if ledger_files(told).peek() is None:
        ledger(config, "--create")
    event = dp_sgd_event(multiplier=1.5, clip=1.0, rate=rate_at_least(0.05), steps=40)
    with ledger_files(told) as files:
        opened = Ledger.open(files, population=told.privacy.population)
        opened.commit(opened.reserve(run="other", round_number=1, events=[event], noise=NoiseSource()))
    found = json.loads(ledger(config, "--check", "--json").stdout)["opinions"]
    assert set(found) == {"booked", "dp_accounting_rdp", "dp_accounting_pld", "opacus_rdp", "opacus_prv"}
    assert found["opacus_rdp"] == pytest.approx(found["dp_accounting_rdp"], rel=0.02)
    assert found["opacus_prv"] == pytest.approx(found["dp_accounting_pld"], rel=0.02)
    assert found["booked"] >= found["dp_accounting_rdp"]
    assert "opacus_prv" in ledger(config, "--check").output
    before = told.ledger.read_bytes()
    assert isinstance(ledger(config, "--undo").exception, LedgerError), "what was booked stays booked"
    assert told.ledger.read_bytes() == before and told.ledger_anchor.exists()
