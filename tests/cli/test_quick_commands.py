"""Commands that people wait for load only what they need: counted in modules, because seconds depend on the machine."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from coordinator.cli import cli as coordinator
from npr.lab.cli import _listed, _registered
from security.audit.cli import main as audit
from security.consortium.cli import cli as consortium
from site_agent.cli import cli as site_agent

HEAVY = ("torch", "timm", "grpc", "scipy", "pandas", "sklearn", "dp_accounting", "numpy", "pydantic", "cryptography")
CODE = """
import sys
sys.argv = {words!r}
try:
    from {module} import main
    main()
except SystemExit as end:
    assert not end.code, end.code
print(len(sys.modules), *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


def loaded(module: str, *words: str) -> tuple[int, set[str]]:
    """How many modules a command loads, and which of the heavy ones."""
    code = CODE.format(words=["x", *words], module=module, heavy=HEAVY)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    count, *heavy = told.stderr.split("\n")[-2].split()
    return int(count), set(heavy)


@pytest.mark.parametrize(
    ("module", "words", "most"),
    [
        ("site_agent.cli", ("--help",), 300),
        ("coordinator.cli", ("--help",), 300),
        ("security.audit.cli", ("--help",), 300),
        ("security.consortium.cli", ("--help",), 300),
        ("npr.lab.cli", ("--help",), 350),
        ("npr.lab.cli", ("list",), 350),
    ],
)
def test_what_is_only_read_loads_nothing_heavy(module: str, words: tuple[str, ...], most: int) -> None:
    count, heavy = loaded(module, *words)
    assert heavy <= {"pydantic"} and count < most, (count, heavy)


@pytest.mark.parametrize("module", ["site_agent.checks.run", "site_agent.trainer.data_checks"])
def test_what_check_loads_on_either_side_trains_nothing(module: str) -> None:
    """The trial apart, which loads torch when its turn comes. Nor is the agent itself needed to check it."""
    code = f"import sys, {module}; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    agent = {"site_agent.run", "site_agent.session", "security.secagg.site", "security.secagg.relay", "protos.schema"}
    agent |= {"security.secagg.messages", "security.secagg.records", "security.secagg.certificates"}
    heavy = {"torch", "timm", "scipy", "pandas", "sklearn", "dp_accounting"}
    assert not set(told.stdout.split()) & (heavy | agent), set(told.stdout.split()) & (heavy | agent)


def test_the_list_of_methods_is_the_registrys() -> None:
    assert _listed() == _registered()


def test_the_order_of_methods_is_that_of_the_list_whatever_is_imported_first() -> None:
    code = "import npr.methods.fedbabu; from npr.methods import registry; print(*registry.names())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.split() == [row["name"] for row in _listed()]


@pytest.mark.parametrize("group", [site_agent, coordinator, consortium, audit])
def test_every_command_is_where_its_group_says(group: click.Group) -> None:
    assert set(group.texts) == set(group.commands)  # type: ignore[attr-defined]  # of the late group
    for name in group.commands:
        assert isinstance(group.commands[name], click.Command) and group.commands[name].name == name
