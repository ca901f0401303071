"""What the log can say and the auditor can find is documented."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

import security.log.events
from security.audit.cli import main
from security.audit.findings import CODES
from security.log.schema import SCHEMAS

DOCS = Path(__file__).parents[2] / "docs"
SPEC, GUIDE = DOCS / "spec" / "audit-log.md", DOCS / "auditors.md"


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_event_types_are_in_the_specification(name: str) -> None:
    assert f"`{name}`" in SPEC.read_text()
    assert security.log.events.__doc__


def test_findings_are_in_the_guide() -> None:
    guide = GUIDE.read_text()
    for name, code in CODES.items():
        assert f"| `{name}` | {code.severity.value} | {code.meaning} | {code.ask} |" in guide, name


def test_commands_and_options_are_in_the_guide() -> None:
    guide = GUIDE.read_text()
    for name, command in main.commands.items():
        assert f"privacy-audit {name}" in guide, name
        for option in command.params:
            if isinstance(option, click.Option):
                assert any(flag in guide for flag in option.opts), (name, option.opts)
