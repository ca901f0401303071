"""docs/consortium.md is right: its commands run, and no option or key of a plan is missing from it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import click
import pytest

from security.clock import SystemClock
from security.consortium import cli, commands
from security.consortium.authority import Authority
from security.consortium.backup import back_up
from security.consortium.plan import FederationPlan
from security.identity.pki import Role
from tests.support.consortium_world import PLAN, World, write_initial_model

PAGE = Path(__file__).parents[2] / "docs" / "consortium.md"
LINES = sorted(set(re.findall(r"^\$ consortium (.+)$", PAGE.read_text(), re.MULTILINE)))


def prepare(folder: Path) -> None:
    """As the page has it when a command is typed: three members enrolled, a fourth with its request at hand."""
    authority = Authority.create(folder / "consortium", "lesions", passphrase=None, now_ms=now())
    world = World(folder, authority, SystemClock())
    world.write_plan(PLAN)
    write_initial_model(world.authority.folder / "initial.safetensors")
    world.enroll("hub", Role.COORDINATOR, hosts=("localhost",))
    for site in ("graz", "linz", "vienna", "wels"):
        world.enroll(site)
    world.publish()
    shutil.copy(world.authority.manifest_path, folder)
    shutil.copy(world.authority.folder / "root.pem", folder)


def now() -> int:
    return SystemClock().now_ms()


@pytest.mark.parametrize("line", LINES)
def test_the_commands_of_the_page_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    arguments = shlex.split(line)
    if arguments[0] == "init":
        shutil.rmtree(tmp_path / "consortium")
    if arguments[0] == "enroll":
        shutil.rmtree(tmp_path / "graz")
        (tmp_path / "consortium" / "members" / "graz.json").unlink()
        World(tmp_path, Authority.open(tmp_path / "consortium"), SystemClock()).request("graz")
    if arguments[0] == "restore":
        back_up(Authority.open(tmp_path / "consortium"), tmp_path / arguments[1], now_ms=now())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(commands.PASSPHRASE_VARIABLE, "words")
    monkeypatch.setattr(commands.click, "confirm", lambda *args, **kwargs: True)
    monkeypatch.setattr(commands, "can_ask", lambda: True)
    monkeypatch.setattr(sys, "argv", ["consortium", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0, capfd.readouterr().err


def test_the_page_shows_all_six_commands() -> None:
    assert {line.split()[0] for line in LINES} == set(cli.cli.commands)


def test_every_option_is_on_the_page() -> None:
    page = PAGE.read_text()
    missing = {
        f"{name} {parameter.opts[-1]}"
        for name, command in cli.cli.commands.items()
        for parameter in command.params
        if isinstance(parameter, click.Option) and not any(f"{option}" in page for option in parameter.opts)
    }
    assert not missing


def test_every_key_of_a_plan_is_on_the_page() -> None:
    page = PAGE.read_text()
    tables = {name: field.annotation for name, field in FederationPlan.model_fields.items() if name != "run"}
    for name, annotation in tables.items():
        model = next(
            kind for kind in (annotation, *getattr(annotation, "__args__", ())) if hasattr(kind, "model_fields")
        )
        for key in model.model_fields:
            assert f"`{key}`" in page or f"] {key}`" in page or f"{key} " in page, f"[{name}] {key}"
