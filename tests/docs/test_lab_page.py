"""What the command can do is in its page."""

import re
from pathlib import Path

import click
import pytest

from npr.lab.cli import cli
from npr.lab.request import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
OWN = {name: command for name, command in cli.commands.items() if name != "model"}


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_is_described(name):
    assert f"npr-lab {name}" in PAGE


@pytest.mark.parametrize("name", sorted(OWN))
def test_every_flag_is_described_and_has_a_help_text_or_says_it_all(name):
    for option in OWN[name].params:
        if isinstance(option, click.Option):
            for flag in (*option.opts, *option.secondary_opts):
                assert re.search(rf"{flag}\b", PAGE), f"{name} {flag}"


def test_every_preset_is_described():
    assert all(f"`{name}`" in PAGE for name in PRESETS)
