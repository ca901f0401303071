"""docs/commands.md names every command, sub-command, argument and flag, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from coordinator.cli import cli as coordinator
from npr.lab.cli import cli as laboratory
from security.audit.cli import main as audit
from security.consortium.cli import cli as consortium
from site_agent.cli import cli as site_agent

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
GROUPS: dict[str, click.Group] = {
    "consortium": consortium,
    "coordinator": coordinator,
    "site-agent": site_agent,
    "privacy-audit": audit,
    "npr-lab": laboratory,
}
EVERY = {
    **GROUPS,
    **{f"{name} {sub}": command for name, group in GROUPS.items() for sub, command in group.commands.items()},
}
SECTIONS = dict(re.findall(r"^###? ([^\n]+)\n(.*?)(?=^###? |\Z)", PAGE, re.MULTILINE | re.DOTALL))
# What every sub-command of a group takes may be explained once, above them.
SHARED = {"--json", "--dir", "--passphrase-file", "--no-passphrase", "--root-key", "--config"}


def flags(command: click.Command) -> set[str]:
    options = [option for option in command.params if isinstance(option, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def named(section: str) -> set[str]:
    return set(re.findall(r"`(-{1,2}[a-z][a-z-]*)`", section))


def test_every_command_has_a_section_and_no_other_does() -> None:
    assert set(SECTIONS) == set(EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_the_flags_of_a_section_are_those_of_its_command(name: str) -> None:
    wanted, found = flags(EVERY[name]), named(SECTIONS[name])
    assert wanted - found == set(), "not on the page"
    assert found - wanted <= (SHARED | {"--help", "-h"} if name in GROUPS else set()), "not in the command"


@pytest.mark.parametrize("name", [name for name in EVERY if name not in GROUPS])
def test_the_arguments_of_a_section_are_those_of_its_command(name: str) -> None:
    command = EVERY[name]
    arguments = [option for option in command.params if isinstance(option, click.Argument)]
    words = " ".join([name, *(argument.make_metavar(click.Context(command)) for argument in arguments)])
    assert f"`{words}`" in SECTIONS[name]


@pytest.mark.parametrize("name", GROUPS)
def test_the_list_of_commands_says_each_in_one_whole_sentence(name: str) -> None:
    """On a terminal of 80 columns nothing is cut off with dots."""
    listed = CliRunner().invoke(GROUPS[name], ["--help"], terminal_width=80).output.partition("Commands:\n")[2]
    assert len(listed.splitlines()) >= len(GROUPS[name].commands)
    assert "..." not in listed and all(line.strip() for line in listed.splitlines())
